"""Compaction against a plain list: who remains, and that rows arrive whole wherever the parts are cut."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.kvcache.moves import move_rows, plan_moves

SLOTS, WIDTH = 3, 2

batches = st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1))))


@dataclass
class View:
    """Rows [start, end) as tensors of their own."""

    start: int
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def end(self) -> int:
        return self.start + len(self.keys)


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


@given(batches, st.integers(1, 4), st.lists(st.integers(0, 48), max_size=2))
def test_rows_arrive_whole_across_parts(batch: tuple[int, set[int]], kv_heads: int, cuts: list[int]) -> None:
    """Parts are cut anywhere, in the middle of a sequence's heads too."""
    count, leaving = batch
    rows = count * kv_heads
    keys, values = torch.randn(rows, SLOTS, WIDTH), torch.randn(rows, SLOTS, WIDTH)
    bounds = sorted({0, rows, *(c for c in cuts if c < rows)})
    views = [View(a, keys[a:b].clone(), values[a:b].clone()) for a, b in pairwise(bounds)]
    moves, order = plan_moves(sorted(leaving), count)
    move_rows(views, moves, kv_heads)
    for whole, parts in ((keys, [v.keys for v in views]), (values, [v.values for v in views])):
        expected = whole.view(count, kv_heads, SLOTS, WIDTH)[order].view(-1, SLOTS, WIDTH)
        assert torch.equal(torch.cat(parts)[: len(order) * kv_heads], expected)
