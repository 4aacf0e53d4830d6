"""Compaction against a plain list: who remains, and that rows arrive whole wherever the parts are cut."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.kvcache.slots import PartView, SlotMetadata, move_rows, plan_moves

SLOTS, WIDTH = 3, 2

batches = st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1))))


@given(batches)
def test_the_moves_make_the_order_that_is_named(batch: tuple[int, set[int]]) -> None:
    count, leaving = batch
    moves, order = plan_moves(sorted(leaving), count)
    assert sorted(order) == [i for i in range(count) if i not in leaving]
    places: list[int | None] = [None if i in leaving else i for i in range(count)]
    for source, target in moves:
        assert places[target] is None and places[source] is not None
        places[target], places[source] = places[source], None
    assert places == [*order, *[None] * len(leaving)]
    # No row is moved that could have stayed.
    assert all(order[i] == i for i in range(len(order)) if i not in leaving)


def test_the_order_of_leaving_does_not_matter() -> None:
    assert plan_moves([4, 0, 2], 5) == plan_moves([0, 2, 4], 5) == ([(3, 0)], [3, 1])


def random_record(rows: int) -> SlotMetadata:
    positions = torch.randint(0, 99, (rows, SLOTS), dtype=torch.int32)
    return SlotMetadata(positions, positions[:, 0].clone(), torch.randn(rows, SLOTS), torch.randn(rows, SLOTS))


@given(batches, st.integers(1, 4), st.lists(st.integers(0, 48), max_size=2), st.booleans())
def test_rows_arrive_whole_across_parts(
    batch: tuple[int, set[int]], kv_heads: int, cuts: list[int], records: bool
) -> None:
    """Parts are cut anywhere, in the middle of a sequence's heads too; what is recorded of a row follows it."""
    count, leaving = batch
    rows = count * kv_heads
    keys, values = torch.randn(2, rows, SLOTS, WIDTH), torch.randn(2, rows, SLOTS, WIDTH)
    whole = PartView(0, keys, values, random_record(rows) if records else None)
    bounds = sorted({0, rows, *(c for c in cuts if c < rows)})
    views = [
        PartView(
            a, keys[:, a:b].clone(), values[:, a:b].clone(),
            SlotMetadata(*(t[a:b].clone() for t in whole.record.tensors())) if whole.record else None,
        )
        for a, b in pairwise(bounds)
    ]  # fmt: skip
    before = [t.clone() for t in whole.row_tensors()]
    moves, order = plan_moves(sorted(leaving), count)
    move_rows(views, moves, kv_heads)
    parts = zip(*(view.row_tensors() for view in views), strict=True)
    for tensor, arrived in zip(before, parts, strict=True):
        expected = tensor.unflatten(0, (count, kv_heads))[order].flatten(0, 1)
        assert torch.equal(torch.cat(arrived)[: len(order) * kv_heads], expected)
