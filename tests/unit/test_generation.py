"""Rows: how they are cut into blocks, what micro-batches feed, when rows leave, who joins, and the
progress bar."""

from __future__ import annotations

import io
import sys
from collections import abc
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.engine.decoding import StopCriteria
from flexgen_h2o.engine.generation import MicroBatch, Progress, SweepInput, make_blocks
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.engine.scheduler import Scheduler
from flexgen_h2o.engine.sequence import Sequence
from flexgen_h2o.kvcache.prefixes import PromptGroup


def row(index: int, length: int, max_new: int = 9, **more: Any) -> Sequence:
    ids = tuple(range(100 * index, 100 * index + length))
    return Sequence(index, ids, max_new=max_new, **more)


def indices(rows: abc.Sequence[Sequence]) -> list[int]:
    return [r.index for r in rows]


class Letters:
    """A tokenizer: token i is the letter i; 0 is special."""

    all_special_ids = (0,)

    def __len__(self) -> int:
        return 26

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(97 + i) for i in token_ids if i or not skip_special_tokens)


# ---- blocks


def test_blocks_are_sorted_by_what_rows_ask_for_then_by_length() -> None:
    lengths = [3, 9, 9, 1, 5, 9, 2, 7, 4, 6, 8]
    blocks = make_blocks(
        [row(i, n) for i, n in enumerate(lengths)], gpu_batch_size=2, num_gpu_batches=2
    )
    assert [[indices(batch) for batch in block] for block in blocks] == [
        [[1, 2], [5, 10]],
        [[7, 9], [4, 8]],
        [[0, 6], [3]],
    ]
    rows = [
        row(i, n, params=SamplingParams(asked))
        for i, (n, asked) in enumerate([(3, 64), (9, 2), (4, 64), (8, 2)])
    ]
    assert [indices(block[0]) for block in make_blocks(rows, 2, 1)] == [[2, 0], [1, 3]]
    assert make_blocks([], 4, 2) == []


# ---- the input of a sweep


def test_known_tokens_are_fed_together_step_by_step() -> None:
    """As many as all rows know, may feed in a sweep, and have room for; never with new rows."""
    known_tokens = {0: [7, 8, 9], 1: [4, 5]}
    rows = [row(i, i + 2, max_tokens_per_sweep=3) for i in range(2)]
    batch = MicroBatch(rows)

    def know(row: Sequence) -> list[int]:
        return known_tokens[row.index]

    assert (batch.sweep_input(know).steps, batch.sweep_input(know).phase) == (1, "prefill")
    batch.append_tokens([11, 12], lambda r: None)
    fed = batch.sweep_input(know)
    assert fed.ids.tolist() == [11, 12, 7, 4, 8, 5] and fed.positions.tolist() == [2, 3, 3, 4, 4, 5]
    assert (fed.steps, fed.counts, fed.past, fed.phase) == (3, (3, 3), (2, 3), "decode")
    assert [torch.arange(6)[fed.last(step)].tolist() for step in range(3)] == [
        [0, 1],
        [2, 3],
        [4, 5],
    ]
    known_tokens[1] = []
    assert batch.sweep_input(know).steps == batch.sweep_input().steps == 1
    known_tokens[1] = [4, 5]
    rows[0].max_new = 3
    assert batch.sweep_input(know).steps == 2
    batch.admit([row(2, 3)])
    assert batch.sweep_input(know).steps == 1


@given(
    st.lists(st.integers(1, 9), max_size=5),
    st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.integers(1, 6), min_size=1, max_size=5)),
        max_size=5,
    ),
    st.integers(1, 20),
)
def test_parts_are_the_sweep_in_order(
    past: list[int], prefixes: list[tuple[int, list[int]]], most: int
) -> None:
    groups = tuple(PromptGroup(prefix, tuple(own)) for prefix, own in prefixes)
    prompts = [n for group in groups for n in group.lengths]
    counts = (*(1 for _ in past), *prompts)
    tokens = len(past) + sum(group.tokens for group in groups)
    whole = SweepInput(
        torch.arange(tokens),
        100 + torch.arange(tokens),
        torch.tensor([]),
        counts,
        (*past, *(0 for _ in prompts)),
        len(past),
        groups,
    )
    parts = whole.parts(most)
    for name in ("ids", "positions"):
        assert torch.cat([getattr(part, name) for part in parts]).equal(getattr(whole, name))
    for name in ("counts", "past"):
        assert sum((getattr(part, name) for part in parts), ()) == getattr(whole, name)
    of_rows = [(group.prefix, n) for part in parts for group in part.groups for n in group.own]
    assert of_rows == [(group.prefix, n) for group in groups for n in group.own]
    assert [group for part in parts for group in part.groups if group.prefix] == [
        g for g in groups if g.prefix
    ]
    assert [part.decoding for part in parts] == [len(past), *(0 for _ in parts[1:])]
    num_earlier_prompts = 0
    for part in parts:
        assert part.num_earlier_prompts == num_earlier_prompts
        assert len(part.ids) == part.decoding + part.prompt_tokens
        num_earlier_prompts += len(part.counts) - part.decoding
    # Whatever is behind a part would not have gone into it.
    for part, behind in pairwise(parts):
        first = behind.groups[0]
        assert len(part.ids) + (first.tokens if first.prefix else first.own[0]) > most
    alone = (
        len(part.ids) <= most or part.decoding + sum(g.rows for g in part.groups) == 1
        for part in parts
    )
    assert any(group.prefix for group in groups) or len(past) > most or all(alone)


# ---- when a row ends


@pytest.mark.parametrize(
    ("reason", "new", "max_new", "params"),
    [
        (None, [2, 5], 9, {}),  # an end token is seen when it comes, not later
        ("stop", [5, 9], 9, {}),
        (None, [5, 2], 9, {"ignore_eos": True}),
        ("length", [5, 6], 2, {}),
        ("stop", [5, 2], 2, {}),  # the end token is the better reason
        ("stop", [1, 3, 4], 3, {"stop": ("zz", "de"), "ignore_eos": True}),
        (None, [1, 3], 9, {"stop": ("de",)}),
    ],
)
def test_reasons(reason: str | None, new: list[int], max_new: int, params: dict[str, Any]) -> None:
    criteria = StopCriteria(
        params.get("stop", ()), () if params.get("ignore_eos") else (2, 9), Letters()
    )
    assert criteria(row(0, 1, max_new, token_ids=new)) == reason


# ---- choosing


# ---- continuous batching


def scheduler(rows: abc.Sequence[Sequence], *windows: list[Sequence]) -> Scheduler:
    """`rows` wait for places in a block that runs; then the windows, one after another."""
    further = iter(windows)
    return Scheduler([[[row(99, 1)]], [list(rows)]], lambda: next(further, []))


def test_rows_join_in_their_order_as_far_as_there_is_room() -> None:
    waiting = scheduler([row(i, 10) for i in range(6)])
    assert waiting.take(0, 100) == [] == waiting.take(3, 9)
    assert indices(waiting.take(2, 100)) == [0, 1]
    assert indices(waiting.take(4, 25)) == [2, 3]
    assert (
        indices(waiting.take(4, 100)) == [4, 5]
        and waiting.take(4, 100) == []
        and waiting.joined == 6
    )


def test_a_long_prompt_waits_and_is_asked_first_the_next_time() -> None:
    waiting = scheduler([row(0, 50), row(1, 60), row(2, 5), row(3, 5)])
    assert indices(waiting.take(3, 58)) == [0, 2]
    assert indices(waiting.take(1, 60)) == [1]
    assert indices(waiting.take(1, 60)) == [3]


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


# ---- the progress bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stderr", [io.StringIO(), None])
def test_no_bar_without_a_terminal(
    stderr: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr)
    with Progress(10) as progress:
        progress.sweep(5)
    assert not Progress.on_terminal() and (stderr is None or stderr.getvalue() == "")


def test_a_row_that_stops_early_takes_tokens_off_the_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress(20) as progress:
        progress.sweep(2)
        progress.finish([row(0, 1, 10, token_ids=[5]), row(1, 1, 10, token_ids=[5] * 10)])
        progress.sweep(9)
    shown = sys.stderr.getvalue()
    assert "11/11" in shown and "generate" in shown
