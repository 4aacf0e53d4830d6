"""Rows of a KV unit that are moved when some leave."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.kvcache.budgets import plan_moves
from flexgen_h2o.kvcache.part import KVPart, move_rows

WIDTH = 4
batches = st.integers(1, 12).flatmap(
    lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))
)


def random_views(rows: int, slots: int, cuts: Sequence[int], has_metadata: bool) -> list[KVPart]:
    """Parts cut anywhere, in the middle of a sequence's heads too."""
    keys = torch.randn(2, rows, slots, WIDTH)
    values = torch.randn(2, rows, slots, WIDTH)
    positions = torch.randint(0, 99, (rows, slots), dtype=torch.int32)
    record = {
        "positions": positions,
        "victims": positions[:, 0].clone(),
        "scores": torch.randn(rows, slots),
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
    """In the order that is named, in which no row moves that could have stayed."""
    count, leaving = batch
    views = random_views(count * kv_heads, 3, cuts, has_metadata)
    before = [t.clone() for t in joined(views)]
    moves, order = plan_moves(sorted(leaving, reverse=True), count)
    assert sorted(order) == [i for i in range(count) if i not in leaving]
    assert all(order[i] == i for i in range(len(order)) if i not in leaving)
    move_rows(views, moves, kv_heads)
    for tensor, arrived in zip(before, joined(views), strict=True):
        expected = tensor.unflatten(0, (count, kv_heads))[order].flatten(0, 1)
        assert torch.equal(arrived[: len(order) * kv_heads], expected)
