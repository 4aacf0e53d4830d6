"""Rows: how they are cut into blocks, when rows leave, and who joins."""

from __future__ import annotations

from collections import abc
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.core.settings import SamplingParams
from flexgen_h2o.engine.scheduler import Scheduler, make_blocks
from flexgen_h2o.engine.sequence import Sequence


def row(index: int, length: int, max_new: int = 9, **more: Any) -> Sequence:
    ids = tuple(range(100 * index, 100 * index + length))
    return Sequence(index, ids, max_new=max_new, **more)


def indices(rows: abc.Sequence[Sequence]) -> list[int]:
    return [r.index for r in rows]


# ---- blocks


def test_blocks_are_sorted_by_what_rows_ask_for_then_by_length() -> None:
    rows = [row(i, n) for i, n in enumerate([3, 9, 9, 1, 5])]
    blocks = [[indices(batch) for batch in block] for block in make_blocks(rows, 2, 2)]
    assert blocks == [[[1, 2], [4, 0]], [[3]]]
    asked = [(3, 64), (9, 2), (4, 64), (8, 2)]
    rows = [row(i, n, params=SamplingParams(new)) for i, (n, new) in enumerate(asked)]
    assert [indices(block[0]) for block in make_blocks(rows, 2, 1)] == [[2, 0], [1, 3]]
    assert make_blocks([], 4, 2) == []


# ---- continuous batching


def scheduler(rows: abc.Sequence[Sequence], *windows: list[Sequence]) -> Scheduler:
    """`rows` wait for places in a block that runs; then the windows, one after another."""
    further = iter(windows)
    return Scheduler([[[row(99, 1)]], [list(rows)]], lambda: next(further, []))


def test_more_rows_are_read_when_all_have_joined() -> None:
    waiting = scheduler([row(0, 4), row(1, 4)], [row(2, 4), row(3, 40)], [row(4, 4)])
    assert indices(waiting.take(1, 99)) == [0]
    assert indices(waiting.take(3, 30)) == [1, 2], "of the window that is read a row must wait"
    assert indices(waiting.take(9, 60)) == [3, 4]
    assert waiting.take(9, 60) == [] and waiting.joined == 5


@given(
    st.lists(st.integers(1, 20), max_size=30),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40)), min_size=5, max_size=30),
)
def test_no_row_is_lost_and_no_bound_is_passed(
    lengths: list[int], rooms: list[tuple[int, int]]
) -> None:
    waiting = scheduler([row(i, n) for i, n in enumerate(lengths)])
    joined = []
    for places, tokens in rooms:
        taken = waiting.take(places, tokens)
        assert len(taken) <= places and sum(len(r.fed_ids) for r in taken) <= tokens
        left = [i for i in range(len(lengths)) if i not in joined]
        if places and left and lengths[left[0]] <= tokens:
            assert indices(taken)[:1] == left[:1], "the first joins where it has room"
        joined += indices(taken)
    while taken := waiting.take(5, 20):
        joined += indices(taken)
    assert sorted(joined) == list(range(len(lengths)))
