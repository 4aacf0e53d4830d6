"""The tests' own family with grouped kv-heads: engine and plain torch agree on it while nothing is evicted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flexgen_h2o import MemoryBudget, Policy, SamplingParams
from tests.eviction.gqa_family import PlainGQA, random_weights, register, save
from tests.eviction.policies import Budget, h2o
from tests.eviction.reference import evicted_greedy
from tests.parity.cases import PLACEMENTS
from tests.parity.reference import LEAST_GAP, LOGIT_TOLERANCE, LogitsByRow, random_prompts, run, tokens_of

NEW_TOKENS = 6
ALL = Budget(heavy_size=100, recent_size=100)
THREE_TIERS = MemoryBudget("64MiB", "64MiB", "64MiB")


@pytest.mark.parametrize(
    ("policy", "budget"),
    [
        (Policy(5, 1), MemoryBudget()),
        (Policy(2, 2, PLACEMENTS["everything split 30/30"]), THREE_TIERS),
        (Policy(2, 3, PLACEMENTS["kv on host"], cpu_cache_compute=True, sep_layer=False), THREE_TIERS),
    ],
    ids=["one batch", "split three ways", "attends on host"],
)
def test_the_engine_gives_the_plain_forwards_tokens(
    policy: Policy, budget: MemoryBudget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch)
    weights, prompts = random_weights(), random_prompts((5, 9, 9, 1, 12))
    want = [evicted_greedy(PlainGQA(weights), p, NEW_TOKENS, h2o(ALL)) for p in prompts]
    assert len({t for row in want for t in row.tokens}) > 3, "greedy repeats itself: take another seed"
    assert min(row.least_token_gap for row in want) > LEAST_GAP, "a near tie: take another seed"
    watch, params = LogitsByRow(), SamplingParams(max_tokens=NEW_TOKENS)
    out = run(save(weights, tmp_path / "model"), prompts, policy, tmp_path / "offload", params, budget, watch)
    assert tokens_of(out) == [row.tokens for row in want]
    for row, reference in enumerate(want):
        assert (torch.stack(watch.rows[row]) - reference.logits).abs().max() <= LOGIT_TOLERANCE
