"""Rows of a micro-batch: what they feed, what they get, and when they leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.engine.generation import Callbacks, Decoding, MicroBatch, Row, StopCriteria
from flexgen_h2o.engine.prompts import Prompt
from flexgen_h2o.engine.requests import ForcedTokens
from flexgen_h2o.engine.sampling import Sampler, SamplingParams, StopStrings


def row(index: int, length: int, max_new: int = 9) -> Row:
    return Row(Prompt(index, tuple(range(100 * index, 100 * index + length)), None), max_new)


class Letters:
    """A tokenizer: token i is the letter i; 0 is special."""

    all_special_ids = (0,)

    def __len__(self) -> int:
        return 26

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(chr(97 + i) for i in token_ids if i or not skip_special_tokens)


# ---- what a sweep is fed


def test_the_first_sweep_takes_the_prompts_packed() -> None:
    fed = MicroBatch([row(0, 3), row(1, 1), row(2, 2)]).sweep_input()
    assert (fed.phase, fed.decoding, fed.prompt_tokens) == ("prefill", 0, 6)
    assert fed.ids.tolist() == [0, 1, 2, 100, 200, 201] and fed.ids.dtype == torch.int64
    assert fed.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert (fed.counts, fed.past, fed.last().tolist()) == ((3, 1, 2), (0, 0, 0), [2, 3, 5])


def test_later_sweeps_take_each_rows_newest_token_behind_its_columns() -> None:
    batch = MicroBatch([row(0, 3), row(1, 1)])
    assert batch.prompt_tokens == 4
    batch.append_tokens([7, 8], lambda r: None)
    batch.append_tokens([5, 6], lambda r: None)
    fed = batch.sweep_input()
    assert (fed.phase, fed.decoding, fed.prompt_tokens) == ("decode", 2, 0)
    assert (fed.ids.tolist(), fed.positions.tolist()) == ([5, 6], [4, 2])
    assert (fed.counts, fed.past, fed.last().tolist()) == ((1, 1), (4, 2), [0, 1])


def test_rows_that_enter_bring_their_prompts_behind_those_that_decode() -> None:
    batch = MicroBatch([row(0, 3), row(1, 1)])
    batch.append_tokens([7, 8], lambda r: None)
    batch.admit([row(2, 2), row(3, 3)])
    fed = batch.sweep_input()
    assert (fed.phase, fed.decoding, fed.prompt_tokens) == ("mixed", 2, 5)
    assert fed.ids.tolist() == [7, 8, 200, 201, 300, 301, 302] and fed.positions.tolist() == [3, 1, 0, 1, 0, 1, 2]
    assert (fed.counts, fed.past, fed.last().tolist()) == ((1, 1, 2, 3), (3, 1, 0, 0), [0, 1, 3, 6])
    finished, moves = batch.append_tokens([4, 5, 6, 9], lambda r: "stop" if r.prompt.index == 0 else None)
    assert [r.prompt.index for r in finished] == [0] and moves == [(3, 0)]
    fed = batch.sweep_input()
    assert (fed.phase, fed.ids.tolist(), fed.past) == ("decode", [9, 5, 6], (3, 2, 2))


def test_tokens_that_are_known_are_fed_together_step_by_step() -> None:
    """As many as all rows know, may feed at once, and have room for; never beside rows that enter."""
    known_tokens = {0: [7, 8, 9], 1: [4, 5]}
    rows = [Row(Prompt(i, (1,) * (i + 2), None), 9, max_tokens_per_sweep=3) for i in range(2)]
    batch = MicroBatch(rows)

    def know(row: Row) -> list[int]:
        return known_tokens[row.prompt.index]

    assert (batch.sweep_input(know).steps, batch.sweep_input(know).phase) == (1, "prefill")
    batch.append_tokens([11, 12], lambda r: None)
    fed = batch.sweep_input(know)
    assert fed.ids.tolist() == [11, 12, 7, 4, 8, 5] and fed.positions.tolist() == [2, 3, 3, 4, 4, 5]
    assert (fed.steps, fed.counts, fed.past, fed.phase) == (3, (3, 3), (2, 3), "decode")
    assert [fed.last(step).tolist() for step in range(3)] == [[0, 1], [2, 3], [4, 5]]
    known_tokens[1] = []
    assert batch.sweep_input(know).steps == batch.sweep_input().steps == 1
    known_tokens[1] = [4, 5]
    rows[0].max_new = 3
    assert batch.sweep_input(know).steps == 2
    batch.admit([row(2, 3)])
    assert batch.sweep_input(know).steps == 1


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=8))
def test_rows_of_any_length_generate_to_their_own_end(shapes: list[tuple[int, int]]) -> None:
    """Columns in the cache are always the positions before the token that is fed; a list follows the moves."""
    rows = [row(i, length, most) for i, (length, most) in enumerate(shapes)]
    batch, done, cache = MicroBatch(rows), [], [0] * len(rows)
    end = StopCriteria(SamplingParams(), (), StopStrings(None, ()))
    while batch.rows:
        fed = batch.sweep_input()
        assert list(fed.past) == cache[: len(batch.rows)]
        for i, count in enumerate(fed.counts):
            cache[i] += count
        assert [r.length for r in batch.rows] == cache[: len(batch.rows)]
        tokens = [len(r.token_ids) for r in batch.rows]
        finished, moves = batch.append_tokens(tokens, end)
        for source, target in moves:
            cache[target] = cache[source]
        done += finished
    assert sorted(r.prompt.index for r in done) == list(range(len(rows)))
    assert all(r.token_ids == list(range(r.max_new)) and r.finish_reason == "length" for r in done)


def test_those_who_stay_close_ranks_and_know_who_they_are() -> None:
    batch = MicroBatch([row(i, 2) for i in range(5)])
    finished, moves = batch.append_tokens([1] * 5, lambda r: "stop" if r.prompt.index in (1, 3) else None)
    assert [r.prompt.index for r in finished] == [1, 3] and [r.prompt.index for r in batch.rows] == [0, 4, 2]
    assert moves == [(4, 1)] and [r.finish_reason for r in finished] == ["stop", "stop"]
    with pytest.raises(ValueError, match="zip"):
        batch.append_tokens([1] * 5, lambda r: None)


# ---- when a row ends


def ended(new: list[int], max_new: int = 9, eos: tuple[int, ...] = (2,), **params: Any) -> str | None:
    one = row(0, 1, max_new)
    one.token_ids += new
    sampling = SamplingParams(**params)
    return StopCriteria(sampling, eos, StopStrings(Letters(), sampling.stop))(one)


@pytest.mark.parametrize(
    ("reason", "arguments"),
    [
        (None, {"new": [5, 6]}),
        ("stop", {"new": [5, 2]}),
        (None, {"new": [2, 5]}),  # an end token is seen when it comes, not later
        ("stop", {"new": [5, 9], "eos": (2, 9)}),
        (None, {"new": [5, 2], "ignore_eos": True}),
        (None, {"new": [5, 2], "eos": ()}),
        ("length", {"new": [5, 6], "max_new": 2}),
        ("length", {"new": [5, 2], "max_new": 2, "ignore_eos": True}),
        ("stop", {"new": [5, 2], "max_new": 2}),  # the end token is the better reason
        ("stop", {"new": [1, 3, 4], "stop": ("de",)}),
        ("stop", {"new": [1, 3, 4], "stop": ("zz", "de"), "max_new": 3, "ignore_eos": True}),
        (None, {"new": [1, 3], "stop": ("de",)}),
    ],
)
def test_reasons(reason: str | None, arguments: dict[str, Any]) -> None:
    assert ended(**arguments) == reason


# ---- choosing


def test_forced_tokens_are_taken_whatever_the_logits() -> None:
    """Rows by their index, each at its own step, to the last."""
    forced = ForcedTokens({7: [1, 2, 3], 4: (5, 6)})
    assert forced.sample(torch.randn(2, 9), [4, 7], [1, 0]) == [6, 1]
    assert forced.sample(torch.full((1, 9), torch.nan), [7], [2]) == [3]
    assert (forced.most_new(7), forced.most_new(4)) == (3, 2)
    assert [forced.end(Row(Prompt(4, (1,), None), 2, ids)) for ids in ([5], [5, 6])] == [None, "length"]


def test_choice_and_watch_see_rows_by_their_place_in_the_input() -> None:
    seen: list[Any] = []

    class Chooser(Sampler):
        def sample(self, logits: torch.Tensor, rows: Any, steps: Any) -> list[int]:
            seen.append((list(rows), list(steps)))
            return super().sample(logits, rows, steps)

    end = StopCriteria(SamplingParams(), (), StopStrings(None, ()))
    batch = MicroBatch([row(7, 2), row(3, 1)])
    batch.append_tokens([1, 1], lambda r: None)
    logits = torch.eye(4)[:2]
    watched: list[Any] = []
    decoding = Decoding(Chooser(SamplingParams()), end, Callbacks(lambda rows, t: watched.append((rows, t.clone()))))
    assert decoding.sample(batch, logits) == [0, 1]
    assert seen == [([7, 3], [1, 1])] and watched[0][0] == [7, 3] and torch.equal(watched[0][1], logits)
    assert Decoding(Sampler(SamplingParams()), end).sample(batch, logits) == [0, 1]
