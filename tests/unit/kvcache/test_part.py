"""Rows of a KV unit: where columns lie, where new ones go, and rows that are moved."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.core.packing import KVPacking
from flexgen_h2o.core.units import SEGMENT_SLOTS
from flexgen_h2o.kvcache.budgets import BudgetTable, DecodeStep, plan_moves
from flexgen_h2o.kvcache.eviction import H2O, Eviction, Full, Local
from flexgen_h2o.kvcache.eviction.of_model import OfModel
from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.kvcache.part import KVPart, KVUnit, move_rows, part_view

WIDTH = 4
DTYPE = torch.float32
BLOCKS = 3
batches = st.integers(1, 12).flatmap(
    lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))
)


# ---- columns in their slots


@pytest.mark.parametrize("packing", [None, KVPacking.of(32, "8/3")])
def test_parts_begin_in_the_bytes_they_are_given(packing: KVPacking | None) -> None:
    """A view is the bytes themselves, keys and values of a segment each on a page."""
    width = WIDTH if packing is None else 32
    slots = 2 * SEGMENT_SLOTS
    layout = UnitLayout(3, 1, slots, width, DTYPE.itemsize, (0.0, 1.0, 0.0), packing=packing)
    (part,) = layout.parts
    data = torch.zeros(layout.part_bytes(part), dtype=torch.uint8)
    keys, values = layout.area_bytes(part)
    view = part_view(layout, part, data, DTYPE)
    assert (keys != values) is (packing is not None)
    areas = (view.keys[0], view.values[0], view.keys[1], view.values[1])
    for start, area in zip((0, keys, keys + values, 2 * keys + values), areas, strict=True):
        assert area.data_ptr() == data.data_ptr() + start and area.is_contiguous()
        assert area.shape[:2] == (3, SEGMENT_SLOTS)


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
    whole = KVPart(0, keys, values, None, None, **(record if has_metadata else {}))
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


# ---- the slots that new columns take

policies = st.one_of(
    st.just(Full()),
    st.builds(Local, heavy_size=st.integers(1, 6), recent_size=st.integers(1, 6)),
    st.builds(
        H2O,
        heavy_size=st.integers(1, 6),
        recent_size=st.integers(1, 6),
        while_decoding=st.booleans(),
    ),
    st.builds(H2O, kv_budget=st.floats(0.01, 1), while_decoding=st.booleans()),
)
workloads = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=4)
KV_HEADS = 2


@given(policies, workloads, st.integers(0, BLOCKS - 1), st.lists(st.integers(0, 8), max_size=2))
def test_rows_grow_to_their_budget_and_then_give_up_their_victims(
    policy: Eviction, workload: list[tuple[int, int]], block: int, cuts: list[int]
) -> None:
    """The next free slot, or the victim's; as many slots as the row was given, each of them filled
    in the end."""
    count = len(workload)
    record = policy.needs.record
    table = BudgetTable(policy, workload, BLOCKS)
    views = random_views(count * KV_HEADS, table.most_slots(block), cuts, bool(record))
    unit = KVUnit(policy, block, KV_HEADS, table.at(block), views, count)
    held = [min(row[0], policy.budget(*row, block).columns) for row in workload]
    room = [policy.slots(prompt, gen, block) for prompt, gen in workload]
    assert unit.budgets.kept.tolist() == held
    prompts = torch.tensor([prompt for prompt, _ in workload])
    # The last token of a row is never fed, so it has gen - 1 decode steps.
    for step in range(min(gen for _, gen in workload) - 1):
        for view in views:
            if view.victims is not None:
                view.victims.random_(0, 5)
        victims = torch.cat([v.victims for v in views if v.victims is not None]) if record else None
        new = DecodeStep(unit.budgets, policy.needs, prompts + step)
        unit.begin(new)
        free = [h if h < r else None for h, r in zip(held, room, strict=True)]
        held = [min(h + 1, r) for h, r in zip(held, room, strict=True)]
        assert new.positions.tolist() == (prompts + step).tolist() and new.filled.tolist() == held
        slots = torch.cat(unit.taken)
        assert slots.dtype == torch.int64
        assert [len(s) for s in unit.taken] == [v.rows for v in views]
        for row, slot in enumerate(slots.tolist()):
            expected = free[row // KV_HEADS]
            assert slot == (
                int(victims[row]) if expected is None and victims is not None else expected
            )
    if len({gen for _, gen in workload}) == 1 and workload[0][1] > 1:
        assert held == room


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
