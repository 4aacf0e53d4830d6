"""Rows of every length that leave when they like: the same tokens as transformers gives each prompt
alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import OPTForCausalLM

from flexgen_h2o import MemoryBudget, Policy, SamplingParams
from flexgen_h2o.core.errors import UsageError
from tests.parity.cases import BASE, PLACEMENTS
from tests.parity.reference import (
    LONG,
    ByShape,
    Ended,
    folder_with_eos,
    greedy,
    opened,
    random_prompts,
    run,
    tokens_of,
)

POSITIONS = BASE["max_position_embeddings"]
BUDGETS = {"host": MemoryBudget(), "stand-in": MemoryBudget("64MiB", "64MiB", "64MiB")}
# Placement, budget and policy of blocks that rows leave one by one.
LEFT: tuple[tuple[str, str, Policy], ...] = (
    ("kv on disk", "host", Policy(9, 1)),
    ("kv split three ways", "stand-in", Policy(9, 1)),
    ("everything split 30/30", "stand-in", Policy(3, 3)),
    ("kv split three ways", "stand-in", Policy(2, 5, sep_layer=False)),
    ("kv split three ways", "stand-in", Policy(2, 5, cpu_cache_compute=True)),
)
WHOLE = SamplingParams(max_tokens=LONG)


@pytest.mark.parametrize(("placement", "budget", "policy"), LEFT)
def test_rows_that_end_leave_a_block(
    placement: str, budget: str, policy: Policy, ended: Ended, tmp_path: Path
) -> None:
    policy = replace(policy, percent=PLACEMENTS[placement])
    out = run(ended.folder, ended.prompts, policy, tmp_path, WHOLE, BUDGETS[budget])
    assert tokens_of(out) == ended.tokens
    for one in out:
        assert one.finish_reason == ("stop" if one.token_ids[-1] == ended.eos else "length")


def test_end_tokens_of_a_generation_config(ended: Ended, tmp_path: Path) -> None:
    """They count, not those of config.json, as in transformers' generate. Any of several ends a
    row."""
    ends = list(dict.fromkeys(t for row in ended.tokens for t in row[1:4] if t != ended.eos))[:2]
    folder = folder_with_eos(ended.folder, tmp_path / "model", ended.eos)
    config = {"eos_token_id": ends, "pad_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(config))
    model = OPTForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = run(folder, ended.prompts, Policy(4, 3), tmp_path / "offload", WHOLE)
    for prompt, one in zip(ended.prompts, out, strict=True):
        found = model.generate(torch.tensor([prompt]), max_new_tokens=LONG, do_sample=False)
        assert one.token_ids == found[0, len(prompt) :].tolist()
        assert one.finish_reason == ("stop" if one.token_ids[-1] in ends else "length")
    assert {one.token_ids[-1] for one in out} >= set(ends)


@pytest.mark.parametrize(
    ("placement", "budget"), [("kv on disk", "stand-in"), ("everything split 30/30", "host")]
)
def test_the_last_position_ends_a_row(
    placement: str, budget: str, reference: ByShape, tmp_path: Path
) -> None:
    """A prompt that fills all positions gets one token, and every row of the block ends at another
    step."""
    known = reference("normal")
    prompts = random_prompts([POSITIONS - n for n in (0, 1, 3, 4, 6, 20)], seed=3)
    policy = Policy(2, 3, PLACEMENTS[placement])
    params = SamplingParams(max_tokens=8)
    out = run(known.folder, prompts, policy, tmp_path, params, BUDGETS[budget])
    lengths = [1, 2, 4, 5, 7, 8]
    assert {c.finish_reason for c in out} == {"length"}
    want = [greedy(known.model, p, n) for p, n in zip(prompts, lengths, strict=True)]
    assert tokens_of(out) == want


def test_many_blocks_and_one_llm_for_all_workloads(reference: ByShape, tmp_path: Path) -> None:
    """Small, then larger than the open buffers, then small again in the large ones; each over
    several blocks."""
    known = reference("normal")
    prompts = random_prompts([7, 2, 9, 1, 4, 30, 5, 8, 6, 3, 28], seed=4)
    want = [greedy(known.model, p, 5) for p in prompts]
    policy = Policy(2, 2, PLACEMENTS["everything split 30/30"])
    with opened(known.folder, policy, tmp_path, budget=BUDGETS["stand-in"]) as llm:
        for count, max_new in ((5, 3), (11, 5), (5, 4), (1, 1), (0, 1)):
            out = llm.generate(prompts[:count], SamplingParams(max_tokens=max_new))
            assert tokens_of(out) == [row[:max_new] for row in want[:count]]
            assert [c.index for c in out] == list(range(count))
    assert not list(tmp_path.glob("run-*"))


@pytest.mark.parametrize("budget", BUDGETS)
def test_rows_leave_a_later_block_of_shorter_prompts(
    budget: str, ended: Ended, tmp_path: Path
) -> None:
    """What an earlier block left in the overlay (slots that the later block does not have) must not
    be applied."""
    long = random_prompts([40] * len(ended.prompts), seed=5)
    policy = Policy(len(long), 1, PLACEMENTS["kv on disk"])
    out = run(ended.folder, [*long, *ended.prompts], policy, tmp_path, WHOLE, BUDGETS[budget])
    assert tokens_of(out[len(long) :]) == ended.tokens


def test_a_prompt_longer_than_the_positions_is_refused(reference: ByShape, tmp_path: Path) -> None:
    prompts = random_prompts([3, POSITIONS + 1])
    with pytest.raises(UsageError, match=f"{POSITIONS + 1} tokens.*{POSITIONS} positions"):
        run(reference("normal").folder, prompts, Policy(), tmp_path, SamplingParams())
