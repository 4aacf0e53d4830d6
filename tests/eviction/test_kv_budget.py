"""Rows that keep a share of their prompt and of the new tokens that they may grow by: each of its
own, in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flexgen_h2o import LLM, Policy, SamplingParams
from flexgen_h2o.engine.workload import workload_of
from flexgen_h2o.kvcache.eviction import H2O
from flexgen_h2o.kvcache.eviction.policy import ROLLING
from tests.eviction.conftest import Known
from tests.eviction.engine import PAIRS, STAND_IN, Ran, Wanted, assert_same, run_with, wanted
from tests.eviction.test_packed_cache import Rounded
from tests.parity.cases import BASE, PLACEMENTS
from tests.parity.reference import random_prompts

LENGTHS = (1, 4, 8, 9, 9, 21, 2, 5)
MAX_NEW = (12, 12, 3, 7, 12, 1, 14, 9)  # so that equal prompts keep different numbers of columns
H2O_OF_SEQUENCE = "h2o, of the sequence"


def ran_with(
    known: Known,
    want: Wanted,
    pair: str,
    policy: Policy,
    offload_dir: Path,
    asked: tuple[int, ...],
    **how: bool,
) -> Ran:
    params = [SamplingParams(max_tokens=n) for n in asked]
    with LLM(
        str(known.folder),
        policy,
        PAIRS[pair].engine,
        dtype="float32",
        budget=STAND_IN,
        offload_dir=offload_dir,
    ) as llm:
        return run_with(llm, want.prompts, params, **how)


@pytest.mark.parametrize(
    ("shape", "pair", "refill"),
    [
        ("normal", H2O_OF_SEQUENCE, False),
        ("normal", H2O_OF_SEQUENCE, True),
        ("llama", "tova, of the sequence", True),
    ],
)
def test_rows_of_different_max_tokens(
    shape: str, pair: str, refill: bool, known: Callable[[str], Known], tmp_path: Path
) -> None:
    want = wanted(known(shape).plain, PAIRS[pair], LENGTHS, MAX_NEW)
    policy = Policy(2, 2, PLACEMENTS["kv split three ways"])
    ran = ran_with(known(shape), want, pair, policy, tmp_path, MAX_NEW, refill=refill)
    assert_same(want, ran)
    assert ran.report.extra.get("refilled", 0) == (len(LENGTHS) - policy.block_size) * refill
    assert ran.report.eviction == PAIRS[pair].engine.to_json()


def test_a_packed_cache(known: Callable[[str], Known], tmp_path: Path) -> None:
    want = wanted(
        known("normal").plain, PAIRS[H2O_OF_SEQUENCE], LENGTHS, MAX_NEW, lambda: Rounded(8)
    )
    policy = Policy(2, 2, PLACEMENTS["kv on disk"], compress_cache=True, cache_bits=8)
    assert_same(want, ran_with(known("normal"), want, H2O_OF_SEQUENCE, policy, tmp_path, MAX_NEW))


def test_what_is_asked_for_beyond_the_positions_does_not_count(
    known: Callable[[str], Known], tmp_path: Path
) -> None:
    """The newest token needs no position: a prompt of 60 gets 5 tokens of a model of 64, and keeps
    a share of 65."""
    most = BASE["max_position_embeddings"]
    lengths = (60, most, 12)
    asked = (40, 9, 10)
    want = wanted(known("normal").plain, PAIRS[H2O_OF_SEQUENCE], lengths, (5, 1, 10))
    ran = ran_with(known("normal"), want, H2O_OF_SEQUENCE, Policy(2, 2), tmp_path, asked)
    assert_same(want, ran)
    assert ran.report.kv["slots"] == int(0.4 * 65) + 1


def test_rolling_rows_grow_until_their_share_fills_the_positions(
    known: Callable[[str], Known], tmp_path: Path
) -> None:
    """int(0.4 x (9 + 150)) columns and the newcomer are 64; one token more would make them 65."""
    eviction = H2O(kv_budget=0.4, positions=ROLLING)
    with LLM(
        str(known("llama").folder), Policy(1), eviction, dtype="float32", offload_dir=tmp_path
    ) as llm:
        (row,) = llm.generate(random_prompts((9,)), SamplingParams(max_tokens=1000))
        assert (len(row.token_ids), row.finish_reason) == (150, "length")
        assert llm.report is not None and llm.report.kv["slots"] == 64


def test_all_of_the_sequence_is_the_full_cache(
    known: Callable[[str], Known], tmp_path: Path
) -> None:
    prompts = random_prompts(LENGTHS)
    params = [SamplingParams(max_tokens=n) for n in MAX_NEW]
    found = []
    for eviction in (None, H2O(kv_budget=1)):
        with LLM(
            str(known("normal").folder), Policy(4), eviction, dtype="float32", offload_dir=tmp_path
        ) as llm:
            found.append(run_with(llm, prompts, params))
    full, kept = found
    assert kept.tokens == full.tokens and kept.report.kv == full.report.kv


@pytest.mark.parametrize("decoding", [True, False])
def test_the_planner_counts_the_columns_that_the_engine_holds(
    decoding: bool, known: Callable[[str], Known], tmp_path: Path
) -> None:
    """Of equal rows, sweep by sweep; and of all rows at their most, the slots of the memory
    plan."""
    eviction = H2O(kv_budget=0.4, while_decoding=decoding)
    with LLM(
        str(known("normal").folder), Policy(4), eviction, dtype="float32", offload_dir=tmp_path
    ) as llm:
        llm.follow([[3] * 9] * 2, [list(range(5, 30))] * 2, lambda rows, logits: None)
        need = workload_of(eviction, 2, {(9, 25)}, 2)
        held = [sum(need.columns(block, sweep, 9) for block in range(2)) for sweep in range(25)]
        assert llm.times[0].held_by_sweep == [2 * columns for columns in held]
        assert llm.report is not None and llm.report.kv["slots"] == max(need.slots)
