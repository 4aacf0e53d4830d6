"""Rows of a KV unit that are moved, and the budgets that follow them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.kvcache.budgets import BudgetTable, plan_moves
from flexgen_h2o.kvcache.eviction import H2O
from flexgen_h2o.kvcache.eviction.of_model import OfModel
from flexgen_h2o.kvcache.part import KVPart, move_rows

WIDTH = 4
DTYPE = torch.float32
BLOCKS = 3
batches = st.integers(1, 12).flatmap(
    lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))
)


# ---- rows that are moved and cut


@given(batches)
def test_the_moves_make_the_order_that_is_named(batch: tuple[int, set[int]]) -> None:
    count, leaving = batch
    moves, order = plan_moves(sorted(leaving, reverse=True), count)
    assert sorted(order) == [i for i in range(count) if i not in leaving]
    places: list[int | None] = [None if i in leaving else i for i in range(count)]
    for source, target in moves:
        assert places[target] is None and places[source] is not None
        places[target] = places[source]
        places[source] = None
    assert places == [*order, *[None] * len(leaving)]
    assert all(
        order[i] == i for i in range(len(order)) if i not in leaving
    )  # no row moves that could have stayed


def random_views(rows: int, slots: int, cuts: Sequence[int], has_metadata: bool) -> list[KVPart]:
    """Parts cut anywhere, in the middle of a sequence's heads too."""
    keys = torch.randn(2, rows, slots, WIDTH)
    values = torch.randn(2, rows, slots, WIDTH)
    positions = torch.randint(0, 99, (rows, slots), dtype=torch.int32)
    record = {
        "positions": positions,
        "victims": positions[:, 0].clone(),
        "scores": torch.randn(rows, slots),
        "norms": torch.randn(rows, slots),
    }
    whole = KVPart(0, keys, values, **(record if has_metadata else {}))
    return [
        whole.part(a, b, a) for a, b in pairwise(sorted({0, rows, *(c for c in cuts if c < rows)}))
    ]


def joined(views: Sequence[KVPart]) -> list[torch.Tensor]:
    return [torch.cat(parts) for parts in zip(*(view.row_tensors() for view in views), strict=True)]


@given(batches, st.integers(1, 4), st.lists(st.integers(0, 48), max_size=2), st.booleans())
def test_rows_arrive_whole_across_parts(
    batch: tuple[int, set[int]], kv_heads: int, cuts: list[int], has_metadata: bool
) -> None:
    count, leaving = batch
    views = random_views(count * kv_heads, 3, cuts, has_metadata)
    before = [t.clone() for t in joined(views)]
    moves, order = plan_moves(sorted(leaving), count)
    move_rows(views, moves, kv_heads)
    for tensor, arrived in zip(before, joined(views), strict=True):
        expected = tensor.unflatten(0, (count, kv_heads))[order].flatten(0, 1)
        assert torch.equal(arrived[: len(order) * kv_heads], expected)


# ---- budgets


def test_tables_follow_rows_that_leave_and_enter() -> None:
    policy = OfModel(H2O(heavy_size=4, recent_size=2), (None, 5, None))
    sizes = [(30, 9), (5, 2), (20, 9), (8, 8)]
    table = BudgetTable(policy, sizes, BLOCKS)
    moves, order = plan_moves([1], len(sizes))
    table.compact(moves, len(order))
    table.admit([(40, 3), (9, 1)])
    rows = [*(sizes[i] for i in order), (40, 3), (9, 1)]
    for block in range(BLOCKS):
        mine = table.at(block)
        budget = [policy.budget(*row, block) for row in rows]
        assert mine.prompts.tolist() == [30, 8, 20, 40, 9]
        assert mine.heavy.tolist() == [b.heavy for b in budget] and mine.recent.tolist() == [
            b.recent for b in budget
        ]
        assert mine.slots.tolist() == [policy.slots(*row, block) for row in rows]
        assert table.most_slots(block) == int(mine.slots.max())
        assert torch.equal(mine.select(slice(3, None)).heavy, mine.heavy[3:])
    table.compact([], 0)
    table.admit([(3, 3)])
    assert table.at(0).prompts.tolist() == [3]
