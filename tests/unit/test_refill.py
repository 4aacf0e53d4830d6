"""Rows that wait: who enters, in which order, and what is read on."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.engine.generation import Row
from flexgen_h2o.engine.prompts import Prompt
from flexgen_h2o.engine.requests import Queue


def row(index: int, length: int) -> Row:
    return Row(Prompt(index, (5,) * length, None), 1)


def indices(rows: Sequence[Row]) -> list[int]:
    return [r.prompt.index for r in rows]


def test_rows_enter_in_their_order_as_far_as_there_is_room() -> None:
    queue = Queue([row(i, 10) for i in range(6)])
    assert queue.take(0, 100) == [] == queue.take(3, 9)
    assert indices(queue.take(2, 100)) == [0, 1]
    assert indices(queue.take(4, 25)) == [2, 3]
    assert indices(queue.take(4, 100)) == [4, 5] and queue.take(4, 100) == [] and queue.entered == 6


def test_a_long_prompt_waits_and_is_the_next_to_be_asked() -> None:
    queue = Queue([row(0, 50), row(1, 60), row(2, 5), row(3, 5)])
    assert indices(queue.take(3, 58)) == [0, 2]
    assert indices(queue.take(1, 60)) == [1]
    assert indices(queue.take(1, 60)) == [3]


def test_it_reads_on_when_all_have_entered() -> None:
    windows = [[row(2, 4), row(3, 40)], [row(4, 4)]]
    asked: list[int] = []

    def more() -> list[Row]:
        asked.append(len(windows))
        return windows.pop(0) if windows else []

    queue = Queue([row(0, 4), row(1, 4)], more)
    assert indices(queue.take(1, 99)) == [0] and not asked, "one still waits"
    assert indices(queue.take(3, 30)) == [1, 2] and asked == [2], "the window that is read has a row that must wait"
    assert indices(queue.take(9, 60)) == [3, 4] and asked == [2, 1, 0]
    assert queue.take(9, 60) == [] and queue.entered == 5


@given(
    st.lists(st.integers(1, 20), max_size=30),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40)), min_size=5, max_size=30),
)
def test_nobody_is_lost_and_no_bound_is_passed(lengths: list[int], rooms: list[tuple[int, int]]) -> None:
    queue, entered = Queue([row(i, n) for i, n in enumerate(lengths)]), []
    for places, tokens in rooms:
        taken = queue.take(places, tokens)
        assert len(taken) <= places and sum(len(r.prompt.token_ids) for r in taken) <= tokens
        left = [i for i in range(len(lengths)) if i not in entered]
        if places and left and lengths[left[0]] <= tokens:
            assert indices(taken)[:1] == left[:1], "whoever is first enters where it has room"
        entered += indices(taken)
    while taken := queue.take(5, 20):
        entered += indices(taken)
    assert sorted(entered) == list(range(len(lengths)))
