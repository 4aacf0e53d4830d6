"""What is to be run: columns that rows hold, micro-batches, blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexgen_h2o.core.config import Policy
from flexgen_h2o.engine.workload import (
    Workload,
    even_blocks,
    shape_of,
    workload_of,
)
from flexgen_h2o.kvcache.eviction import H2O, Eviction, Full, SnapKV
from flexgen_h2o.kvcache.eviction.of_model import OfModel
from flexgen_h2o.kvcache.eviction.policy import RowRecord


def test_the_full_cache_grows_by_a_column_a_sweep() -> None:
    """The newest token's column is never read again, so the last sweep adds none."""
    need = Workload.full(3, 10, 5, 2)
    assert need.slots == (14, 14)
    assert [need.columns(1, sweep, 10) for sweep in range(5)] == [10, 11, 12, 13, 14]
    assert [need.columns(1, sweep, 4) for sweep in range(5)] == [4, 5, 6, 7, 8]


def test_an_eviction_policy_grows_by_one_column_more() -> None:
    """The newcomer has a slot; then each column takes a victim's."""
    need = workload_of(H2O(heavy_size=3, recent_size=2), 3, {(10, 6)}, 2)
    assert [need.columns(0, sweep, 10) for sweep in range(4)] == [5, 6, 6, 6]


@pytest.mark.parametrize(
    "eviction",
    [
        Full(),
        H2O(heavy_size=6, recent_size=6),
        H2O(0.2),
        H2O(0.2, while_decoding=False),
        SnapKV(0.3, 0.1),
        H2O(kv_budget=0.25),
        H2O(kv_budget=0.95),
        H2O(kv_budget=1.0),
        H2O(kv_budget=0.25, while_decoding=False),
        H2O(kv_budget=1.0, while_decoding=False),
    ],
    ids=[
        "full",
        "sizes",
        "ratios",
        "prompt only",
        "snapkv",
        "a quarter of the sequence",
        "nearly all",
        "all",
        "a quarter, prompt only",
        "all, prompt only",
    ],
)
@pytest.mark.parametrize("prompt_len", [60, 10])
def test_shorter_prompts_hold_what_the_policy_says(eviction: Eviction, prompt_len: int) -> None:
    """Columns that are left of the prompt, and slots, of rows with any length among longer ones."""
    need = workload_of(eviction, 9, {(100, 8), (prompt_len, 8), (10, 8)}, 2)
    kept = min(prompt_len, eviction.budget(prompt_len, 8, 0).columns)
    assert need.columns(0, 0, prompt_len) == kept
    assert need.slots_of(0, prompt_len) == eviction.slots(prompt_len, 8, 0)
    assert need.columns(0, 7, prompt_len) == eviction.slots(prompt_len, 8, 0)


def test_rows_that_keep_a_share_of_prompt_and_new_tokens() -> None:
    """Rows of other lengths get other budgets; the most slots cover the row that is longest in all,
    here not the one with the longest prompt. A row that is planned for as many new tokens as any is
    no longer than the longest."""
    eviction = H2O(kv_budget=0.5)
    need = workload_of(eviction, 3, {(40, 2), (10, 90), (30, 6)}, 2)
    assert (need.prompt_len, need.gen_len, need.sequence) == (40, 90, 100)
    assert need.slots == (51, 51) and need.kept == (21, 21)
    assert workload_of(eviction, 3, {(40, 2)}, 2).slots == (22, 22)
    assert need.columns(0, 0, 10) == 10 and need.columns(0, 80, 10) == 51
    assert workload_of(H2O(0.5), 3, {(40, 2), (10, 90)}, 2).sequence == 0


def test_layers_may_keep_different_numbers() -> None:
    """A window's slots are its columns; other layers have one more than they keep."""
    windows = (5, None, 3, None)
    need = workload_of(OfModel(H2O(0.2), windows), 9, {(100, 8)}, 4, windows)
    assert need.slots == (5, 41, 3, 41) and need.kept == (5, 40, 3, 40)
    assert need.record == RowRecord(("positions", "scores")) and need.scored


def test_a_common_prefix_is_in_no_slot() -> None:
    """The first micro-batch is fed it; pairs are counted one by one."""
    need = Workload.full(7, 10, 5, 2).in_one_copy(6)
    assert need.slots == (8, 8) and [need.columns(0, sweep, 10) for sweep in range(5)] == [
        4,
        5,
        6,
        7,
        8,
    ]
    assert need.columns(1, 1, 8) == 3 and need.slots_of(0, 8) == 6
    ((first, second), full), ((third,), rest) = even_blocks(Policy(2, 2), replace(need, rows=6))
    assert (full, rest) == (1, 1) and first == third
    assert (first.fed, second.fed, first.tokens, first.longest) == (6 + 2 * 4, 2 * 4, 20, 10)
    own = sum(6 + i for i in range(1, 5))
    assert first.pairs - second.pairs == 36 and second.pairs == pytest.approx(
        2 * 2 * own, abs=2 * 4
    )
    assert shape_of(Policy(2, 2), need).common == 6 and shape_of(Policy(2, 2), need).tokens == 14


@pytest.mark.parametrize(
    ("gbs", "batches", "rows", "blocks"),
    [
        (4, 2, 21, [([4, 4], 2), ([4, 1], 1)]),
        (4, 2, 3, [([3], 1)]),
        (1, 9, 4, [([1, 1, 1, 1], 1)]),
    ],
)
def test_a_pile_is_cut_into_equal_blocks_and_a_rest(
    gbs: int, batches: int, rows: int, blocks: list[tuple[list[int], int]]
) -> None:
    """No row is lost, and the last micro-batch may be smaller."""
    found = even_blocks(Policy(gbs, batches), Workload.full(rows, 10, 2, 1))
    assert [([b.rows for b in block], count) for block, count in found] == blocks
    assert sum(count * sum(b.rows for b in block) for block, count in found) == rows


@pytest.mark.parametrize(
    ("gbs", "batches", "rows", "shape"),
    [(4, 2, 100, (4, 2)), (4, 2, 3, (3, 1)), (4, 3, 5, (4, 2))],
)
def test_the_shape_is_of_the_rows_there_are(
    gbs: int, batches: int, rows: int, shape: tuple[int, int]
) -> None:
    """Not of those that the policy would take."""
    need = Workload(rows, 10, 8, (30, 29, 28, 30), (9, 9, 9, 9), RowRecord(("positions", "scores")))
    found = shape_of(Policy(gbs, batches), need)
    assert (found.rows, found.micro_batches, found.tokens) == (*shape, 10 * shape[0])
    assert (found.slots, found.record) == (need.slots, need.record)
