"""Rows of every length that leave when they like: the same tokens as transformers gives each prompt
alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import OPTForCausalLM

from flexgen_h2o import LLM, MemoryBudget, Policy, SamplingParams
from flexgen_h2o.core.errors import UsageError
from tests.parity.cases import BASE, PLACEMENTS
from tests.parity.reference import (
    LONG,
    Ended,
    Reference,
    folder_with_eos,
    greedy,
    random_prompts,
    run,
    tokens_of,
)

POSITIONS = BASE["max_position_embeddings"]
BUDGETS = {"host": MemoryBudget(), "stand-in": MemoryBudget("64MiB", "64MiB", "64MiB")}
KV_ELSEWHERE = (
    "kv on disk",
    "kv split three ways",
    "kv on host and disk",
    "everything split 30/30",
    "kv on host",
)


@pytest.mark.parametrize(
    ("placement", "budget", "gbs", "num_batches"),
    [
        (p, list(BUDGETS)[i % 2], *((3, 3) if i // 2 % 2 else (9, 1)))
        for i, p in enumerate(KV_ELSEWHERE)
    ],
)
def test_rows_that_end_leave_a_block(
    placement: str, budget: str, gbs: int, num_batches: int, ended: Ended, tmp_path: Path
) -> None:
    policy = Policy(gbs, num_batches, PLACEMENTS[placement])
    out = run(
        ended.folder,
        ended.prompts,
        policy,
        tmp_path,
        SamplingParams(max_tokens=LONG),
        BUDGETS[budget],
    )
    assert tokens_of(out) == ended.tokens
    for one in out:
        assert one.finish_reason == ("stop" if one.token_ids[-1] == ended.eos else "length")


@pytest.mark.parametrize(
    "switches", [{"overlap": False}, {"sep_layer": False}, {"cpu_cache_compute": True}], ids=str
)
def test_rows_that_end_in_blocks_of_every_kind(
    switches: dict[str, bool], ended: Ended, tmp_path: Path
) -> None:
    policy = Policy(2, 5, PLACEMENTS["kv split three ways"], **switches)
    out = run(
        ended.folder,
        ended.prompts,
        policy,
        tmp_path,
        SamplingParams(max_tokens=LONG),
        BUDGETS["stand-in"],
    )
    assert tokens_of(out) == ended.tokens


def test_any_of_several_eos_tokens_ends_a_row(
    ended: Ended, reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    other = next(t for row in ended.tokens for t in row[:3] if t != ended.eos)
    folder = folder_with_eos(ended.folder, tmp_path / "model", [ended.eos, other])
    out = run(
        folder, ended.prompts, Policy(4, 3), tmp_path / "offload", SamplingParams(max_tokens=LONG)
    )
    for row, one in zip(ended.tokens, out, strict=True):
        assert one.token_ids == (row[: row.index(other) + 1] if other in row else row)


def test_end_tokens_of_a_generation_config(ended: Ended, tmp_path: Path) -> None:
    """They count, not those of config.json, as in transformers' generate."""
    ends = list(dict.fromkeys(t for row in ended.tokens for t in row[1:4] if t != ended.eos))[:2]
    folder = folder_with_eos(ended.folder, tmp_path / "model", ended.eos)
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": ends, "pad_token_id": 1})
    )
    model = OPTForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    out = run(
        folder, ended.prompts, Policy(4, 3), tmp_path / "offload", SamplingParams(max_tokens=LONG)
    )
    for prompt, one in zip(ended.prompts, out, strict=True):
        want = model.generate(torch.tensor([prompt]), max_new_tokens=LONG, do_sample=False)[
            0, len(prompt) :
        ].tolist()
        assert one.token_ids == want
        assert one.finish_reason == ("stop" if want[-1] in ends else "length")
    assert {one.token_ids[-1] for one in out} >= set(ends)


def test_ignore_eos_goes_on(
    ended: Ended, reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    params = SamplingParams(max_tokens=LONG, ignore_eos=True)
    out = run(ended.folder, ended.prompts[:2], Policy(2, 1), tmp_path, params)
    assert tokens_of(out) == [greedy(reference("normal").model, p, LONG) for p in ended.prompts[:2]]


@pytest.mark.parametrize(
    ("placement", "budget"),
    [("all on device", "host"), ("kv on disk", "stand-in"), ("everything split 30/30", "host")],
)
def test_the_last_position_ends_a_row(
    placement: str, budget: str, reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    """A prompt that fills all positions gets one token, and every row of the block ends at another
    step."""
    known = reference("normal")
    prompts = random_prompts([POSITIONS - n for n in (0, 1, 3, 4, 6, 20)], seed=3)
    policy = Policy(2, 3, PLACEMENTS[placement])
    out = run(
        known.folder, prompts, policy, tmp_path, SamplingParams(max_tokens=8), BUDGETS[budget]
    )
    assert [len(c.token_ids) for c in out] == [1, 2, 4, 5, 7, 8]
    assert [c.finish_reason for c in out] == ["length"] * 6
    assert tokens_of(out) == [
        greedy(known.model, p, len(c.token_ids)) for p, c in zip(prompts, out, strict=True)
    ]


def test_a_prompt_longer_than_the_positions_is_refused(
    reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    prompts = random_prompts([3, POSITIONS + 1])
    with pytest.raises(UsageError, match=f"{POSITIONS + 1} tokens.*{POSITIONS} positions"):
        run(reference("normal").folder, prompts, Policy(), tmp_path, SamplingParams())


def test_many_blocks_and_one_llm_for_all_workloads(
    reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    """Small, then larger than the open buffers, then small again in the large ones; each over
    several blocks."""
    known = reference("normal")
    prompts = random_prompts([7, 2, 9, 1, 4, 30, 5, 8, 6, 3, 28], seed=4)
    want = [greedy(known.model, p, 5) for p in prompts]
    policy = Policy(2, 2, PLACEMENTS["everything split 30/30"])
    with LLM(
        str(known.folder), policy, dtype="float32", budget=BUDGETS["stand-in"], offload_dir=tmp_path
    ) as llm:
        for count, max_new in ((5, 3), (11, 5), (5, 4), (1, 1)):
            out = llm.generate(prompts[:count], SamplingParams(max_tokens=max_new))
            assert tokens_of(out) == [row[:max_new] for row in want[:count]]
            assert [c.index for c in out] == list(range(count))
    assert not list(tmp_path.glob("run-*"))


def test_no_prompts_give_no_completions(
    reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    assert run(reference("normal").folder, [], Policy(), tmp_path, SamplingParams()) == []


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("placement", ["kv on disk"])
def test_rows_leave_a_later_block_of_shorter_prompts(
    placement: str, budget: str, ended: Ended, reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    """What an earlier block left in the overlay (slots that the later block does not have) must not
    be applied."""
    long = random_prompts([40] * len(ended.prompts), seed=5)
    policy = Policy(len(ended.prompts), 1, PLACEMENTS[placement])
    params = SamplingParams(max_tokens=LONG)
    out = run(ended.folder, [*long, *ended.prompts], policy, tmp_path, params, BUDGETS[budget])
    assert tokens_of(out[len(long) :]) == ended.tokens
