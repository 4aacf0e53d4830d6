"""Rows that enter a running block drop the columns that each drops alone, beside others that are
far ahead of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen_h2o import LLM, Policy, SamplingParams
from flexgen_h2o.kvcache.eviction import H2O, Eviction
from flexgen_h2o.kvcache.eviction.policy import ROLLING
from tests.eviction.conftest import Known
from tests.eviction.engine import PAIRS, Ran, Wanted, assert_same, cut, run_with
from tests.eviction.test_engine_placements import KV_PLACEMENTS, TURNS
from tests.parity.cases import CONFIGURATIONS, PLACEMENTS, thinned
from tests.parity.reference import LOGIT_TOLERANCE, MIN_GAP, random_prompts
from tests.parity.test_large import split_parts

# Three times the six prompts of the reference, cut to so many tokens; a block holds eight at most.
ASKED = (3, 12, 1, 5, 2, 9, 12, 1, 4, 2, 8, 3, 1, 6, 12, 2, 7, 11)


def some_of_each() -> Iterator[tuple[str, str, str]]:
    """(placement, configuration, pair), each in turn."""
    names = list(CONFIGURATIONS)
    for p, placement in enumerate(KV_PLACEMENTS):
        yield placement, names[(5 * p + 1) % len(names)], TURNS[p % len(TURNS)]


@pytest.mark.parametrize(("placement", "configuration", "pair"), thinned(some_of_each(), 4))
def test_placement_by_configuration(
    placement: str,
    configuration: str,
    pair: str,
    known: Callable[[str], Known],
    reference: Callable[..., Wanted],
    tmp_path: Path,
) -> None:
    one = reference("normal", pair)
    chosen = CONFIGURATIONS[configuration]
    want = cut(Wanted(one.prompts * 3, one.rows * 3), ASKED)
    policy = chosen.policy(PLACEMENTS[placement])
    params = [SamplingParams(max_tokens=n) for n in ASKED]
    folder = str(known("normal").folder)
    with LLM(folder, policy, PAIRS[pair].engine, "auto", "float32", chosen.budget, tmp_path) as llm:
        ran = run_with(llm, want.prompts, params, refill=True)
    assert_same(want, ran)
    assert ran.report.extra["refilled"] == len(ASKED) - policy.block_size


@pytest.mark.parametrize(
    ("shape", "pair", "refills"),
    [("normal", "h2o", True), ("llama", "h2o-norm, one sink", True), ("llama", "tova", False)],
)
def test_prompts_in_parts(
    shape: str,
    pair: str,
    refills: bool,
    known: Callable[[str], Known],
    reference: Callable[..., Wanted],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a micro-batch's prompts, behind rows that decode or alone, some attend at a time."""
    one = reference(shape, pair)
    parts = split_parts(monkeypatch)
    want = cut(Wanted(one.prompts * 3, one.rows * 3), ASKED)
    params = [SamplingParams(max_tokens=n) for n in ASKED]
    policy = Policy(4, 2, PLACEMENTS["kv split three ways"])
    with LLM(
        str(known(shape).folder), policy, PAIRS[pair].engine, "auto", "float32", None, tmp_path
    ) as llm:
        ran = run_with(llm, want.prompts, params, refill=refills)
    assert_same(want, ran)
    assert max(parts) > 1


FEW_BITS = {"compress_cache": True, "cache_bits": "4/3", "cache_window": 4}
ROLLS = H2O(heavy_size=5, recent_size=3, positions=ROLLING)


@pytest.mark.parametrize(
    ("shape", "eviction", "switches", "configuration", "placement"),
    thinned(
        [
            ("llama", ROLLS, {}, "device, 2x2", "kv split three ways"),
            ("llama", None, {}, "device, 2x3, attends on host", "kv on host and disk"),
            ("normal", None, {"compress_cache": True}, "device, 2x2", "everything split 30/30"),
            ("normal", None, {"attn_sparsity": 0.5}, "device, 2x2", "kv split three ways"),
            ("llama", PAIRS["h2o"].engine, FEW_BITS, "device, 2x2", "kv split three ways"),
            (
                "llama",
                PAIRS["h2o"].engine,
                {**FEW_BITS, "cache_rotation": True},
                "device, 2x2",
                "kv split three ways",
            ),
        ],
        2,
    ),
    ids=str,
)
def test_other_ways_of_keeping_columns(
    shape: str,
    eviction: Eviction | None,
    switches: dict[str, Any],
    configuration: str,
    placement: str,
    known: Callable[[str], Known],
    tmp_path: Path,
) -> None:
    """As without refill, which other tests hold against their references."""
    chosen = CONFIGURATIONS[configuration]
    params = [SamplingParams(max_tokens=n) for n in ASKED]
    policy = chosen.policy(PLACEMENTS[placement], **switches)
    lengths = [1 + i * 5 % 17 for i in range(len(ASKED))]
    with LLM(
        str(known(shape).folder), policy, eviction, "auto", "float32", chosen.budget, tmp_path
    ) as llm:
        tries = (random_prompts(lengths, seed) for seed in range(20))
        prompts, want = next(
            (p, w) for p in tries if least_gap(w := run_with(llm, p, params)) > MIN_GAP
        )
        ran = run_with(llm, prompts, params, refill=True)
    assert ran.tokens == want.tokens and ran.seen == want.seen
    for row, logits in want.logits.items():
        assert (torch.stack(ran.logits[row]) - torch.stack(logits)).abs().max() <= LOGIT_TOLERANCE
    assert ran.report.extra["refilled"] == len(ASKED) - policy.block_size
    assert ran.report.extra["sweeps"] < want.report.extra["sweeps"]


def least_gap(ran: Ran) -> float:
    best = torch.cat([torch.stack(logits) for logits in ran.logits.values()]).topk(2).values
    return float((best[:, 0] - best[:, 1]).min())
