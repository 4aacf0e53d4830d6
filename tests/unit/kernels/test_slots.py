"""Decode attention over slots: the compiled loops against torch in fp32, and torch against plain loops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.kernels.slots import (
    ScoreState,
    attend,
    attend_lse,
    attend_lse_reference,
    attend_reference,
    attend_scored,
    attend_scored_reference,
)

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}  # bf16: the result is rounded; everything before it is fp32
DTYPES = [torch.float32, torch.bfloat16]
WIDTHS = [1, 2, 6, 15, 16, 20, 33, 34, 64, 80, 128]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def in_segments(columns: torch.Tensor, length: int, unread: float = math.nan) -> torch.Tensor:
    """(R, C, d) as (segments, R, length, d) with a gap after each segment; slots that fill up the last are unread."""
    rows, slots, width = columns.shape
    segments = -(-slots // length)
    memory = torch.full((segments, rows * length * width + 2), unread, dtype=columns.dtype)
    view = memory[:, :-2].view(segments, rows, length, width)
    for j in range(slots):
        view[j // length, :, j % length] = columns[:, j]
    return view


def make(filled: list[int], group: int, width: int, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """q, keys, values (R, C, d), filled; NaN in the slots that a row has not filled."""
    g = torch.Generator().manual_seed(seed)
    rows, slots = len(filled), max(filled) + 2
    q = torch.randn(rows, group, width, generator=g).to(dtype)
    keys, values = (torch.randn(rows, slots, width, generator=g).to(dtype) for _ in range(2))
    for r, n in enumerate(filled):
        keys[r, n:], values[r, n:] = math.nan, math.nan
    return q, keys, values, torch.tensor(filled, dtype=torch.int32)


def make_book(rows: int, slots: int, decay: float = 1.0, gain: float = 1.0) -> ScoreState:
    g = torch.Generator().manual_seed(rows)
    positions = torch.stack([torch.randperm(3 * slots, generator=g)[:slots] for _ in range(rows)]).int()
    oldest = torch.randint(0, slots, (rows,), generator=g).int()
    scores = torch.randint(0, 3, (rows, slots), generator=g) / 4
    gains = gain * torch.rand(rows, generator=g)
    return ScoreState(scores, positions, oldest, oldest + slots, decay, gains, torch.full((rows,), -7).int())


def copy_of(book: ScoreState) -> ScoreState:
    return replace(book, scores=book.scores.clone(), victims=book.victims.clone())


def double_attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, n: int, scale: float) -> torch.Tensor:
    """One row by definition, in double precision."""
    p = torch.softmax(scale * (q.double() @ keys[:n].double().T), dim=1)
    return p @ values[:n].double()


ragged = st.lists(st.integers(1, 21), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(ragged, st.integers(1, 9), st.sampled_from(WIDTHS), st.sampled_from(DTYPES), st.integers(1, 24))
def test_against_the_definition(filled: list[int], group: int, width: int, dtype: torch.dtype, length: int) -> None:
    q, keys, values, counts = make(filled, group, width, dtype)
    actual = attend(q, in_segments(keys, length), in_segments(values, length), counts, 0.3)
    assert actual.shape == q.shape and actual.dtype == dtype
    reference = attend_reference(q, in_segments(keys, length), in_segments(values, length), counts, 0.3)
    for r, n in enumerate(filled):
        expected = double_attend(q[r], keys[r], values[r], n, 0.3)
        tolerance = TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))
        assert (actual[r].double() - expected).abs().max() < tolerance
        assert (reference[r].double() - expected).abs().max() < 4 * tolerance


@settings(max_examples=30, deadline=None)
@given(ragged, st.integers(1, 9), st.sampled_from(WIDTHS), st.sampled_from(DTYPES), st.integers(1, 24))
def test_the_log_sum_exp(filled: list[int], group: int, width: int, dtype: torch.dtype, length: int) -> None:
    """The same result to the bit, and of each query the logarithm of what its softmax is divided by."""
    q, keys, values, counts = make(filled, group, width, dtype)
    columns = in_segments(keys, length), in_segments(values, length)
    out, lse = attend_lse(q, *columns, counts, 0.3)
    assert torch.equal(out, attend(q, *columns, counts, 0.3))
    reference, by_reference = attend_lse_reference(q, *columns, counts, 0.3)
    assert lse.shape == by_reference.shape == (len(filled), group) and lse.dtype == by_reference.dtype == torch.float32
    for r, n in enumerate(filled):
        products = 0.3 * (q[r].double() @ keys[r, :n].double().T)
        expected = torch.logsumexp(products, dim=1)
        exact = 1e-5 * max(1.0, float(products.abs().max()))
        rounded = exact if dtype == torch.float32 else 2**-7 * max(1.0, float(products.abs().max()))
        is_compiled = dtype == torch.float32 or width % 2 == 0  # the compiled loops read whole words
        assert (lse[r] - expected).abs().max() <= (exact if is_compiled else rounded)
        assert (by_reference[r] - expected).abs().max() <= rounded
        assert (reference[r] - out[r]).abs().max() <= 0.05 * max(1.0, float(out[r].abs().max()))


@settings(max_examples=60, deadline=None)
@given(ragged, st.integers(1, 9), st.sampled_from(WIDTHS), st.sampled_from(DTYPES), st.sampled_from([1.0, 0.5]))
def test_scores_and_victims(filled: list[int], group: int, width: int, dtype: torch.dtype, decay: float) -> None:
    """Scores by the reference in fp32; victims by definition from the scores that came out."""
    q, keys, values, counts = make(filled, group, width, dtype)
    book = make_book(len(filled), keys.shape[1], decay, 2.0)
    expected = copy_of(book)
    args = in_segments(keys, 7), in_segments(values, 7), counts, 0.3
    attend_scored(q, *args, book)
    attend_scored_reference(q.float(), args[0].float(), args[1].float(), counts, 0.3, expected)
    assert torch.allclose(book.scores, expected.scores, atol=2e-6, rtol=2e-6)
    assert book.victims.tolist() == victims(book, filled)
    assert expected.victims.tolist() == victims(expected, filled)


def victims(book: ScoreState, filled: list[int]) -> list[int]:
    found = []
    for r, n in enumerate(filled):
        allowed = [j for j in range(n) if book.oldest[r] <= book.positions[r, j] <= book.newest[r]]
        found.append(min(allowed, key=lambda j: (float(book.scores[r, j]), int(book.positions[r, j])), default=-1))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "width"), [(1, 64), (1, 80), (1, 6), (5, 128), (3, 20)])
def test_scoring_does_not_touch_the_attention(group: int, width: int, dtype: torch.dtype) -> None:
    filled = [1, 4, 100, 103, 37] * 5
    q, keys, values, counts = make(filled, group, width, dtype)
    args = q, in_segments(keys, 105), in_segments(values, 105), counts, 0.125
    assert torch.equal(attend(*args), attend_scored(*args, make_book(len(filled), 105)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("group", "width"), [(1, 64), (6, 34), (1, 8)])
def test_segments_rows_and_threads_change_no_bit(group: int, width: int, dtype: torch.dtype) -> None:
    filled = [50, 3, 103, 64, 1, 77, 12]
    q, keys, values, counts = make(filled, group, width, dtype)
    whole = attend(q, in_segments(keys, 105), in_segments(values, 105), counts, 0.2)
    for length in (1, 3, 16, 104, 300):
        assert torch.equal(attend(q, in_segments(keys, length), in_segments(values, length), counts, 0.2), whole)
    for r in range(len(filled)):
        one = slice(r, r + 1)
        alone = attend(q[one], in_segments(keys[one], 64), in_segments(values[one], 64), counts[one], 0.2)
        assert torch.equal(alone, whole[one])
    many = [t.repeat(200, *[1] * (t.dim() - 1)) for t in (q, keys, values, counts)]
    repeated = attend(many[0], in_segments(many[1], 105), in_segments(many[2], 105), many[3], 0.2)
    assert torch.equal(repeated, whole.repeat(200, 1, 1))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(attend(many[0], in_segments(many[1], 9), in_segments(many[2], 9), many[3], 0.2), repeated)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("scored", [attend_scored, attend_scored_reference])
def test_ties_go_to_the_lowest_position_and_an_empty_range_to_nobody(scored) -> None:
    q = torch.zeros(4, 1, 16)  # all slots receive the same
    keys, values = torch.randn(1, 4, 6, 16), torch.randn(1, 4, 6, 16)
    filled = torch.tensor([6, 6, 2, 6], dtype=torch.int32)
    positions = torch.tensor([[9, 4, 7, 2, 8, 3]] * 4, dtype=torch.int32)
    oldest, newest = torch.tensor([0, 4, 0, 10]).int(), torch.tensor([99, 8, 3, 99]).int()
    scores = torch.zeros(4, 6)
    scores[1, 1] = 1.0
    book = ScoreState(scores, positions, oldest, newest, 1.0, torch.ones(4), torch.zeros(4).int())
    scored(q, keys, values, filled, 1.0, book)
    assert book.victims.tolist() == [3, 2, -1, -1]
    assert torch.equal(book.scores[2, 2:], torch.zeros(4))  # what is not filled keeps its score


@pytest.mark.parametrize("function", [attend, attend_reference])
def test_nan_and_infinity_in_filled_slots_show(function) -> None:
    q, keys, values, counts = make([40, 40, 40], 1, 64, torch.float32)
    q[:] = q.abs()
    keys[0, 17, 3], keys[1, 5] = math.nan, math.inf
    out = function(q, in_segments(keys, 42), in_segments(values, 42), counts, 1.0)
    assert bool(out[:2].isnan().all()) and bool(out[2].isfinite().all())


def test_scores_of_any_size() -> None:
    """Probabilities that underflow, and products in the thousands."""
    q, keys, values, counts = make([30], 1, 64, torch.float32)
    out = attend(q * 50, in_segments(keys, 32), in_segments(values, 32), counts, 1.0)
    assert (out[0] - double_attend(q[0] * 50, keys[0], values[0], 30, 1.0)).abs().max() < 1e-3


def test_wrong_shapes_are_refused_before_memory_is_touched() -> None:
    q, keys, values, counts = make([5, 5], 1, 64, torch.float32)
    keys, values = in_segments(keys, 7), in_segments(values, 7)
    with pytest.raises(ValueError, match="do not go together"):
        attend(q, keys[:, :1], values[:, :1], counts, 1.0)
    with pytest.raises(ValueError, match="do not go together"):
        attend(q, keys, values, counts + 3, 1.0)
    with pytest.raises(ValueError, match="do not go together"):
        attend(q, keys.transpose(2, 3).contiguous().transpose(2, 3), values, counts, 1.0)
    with pytest.raises(ValueError, match="scores is"):
        attend_scored(q, keys, values, counts, 1.0, make_book(3, 7))
    with pytest.raises(ValueError, match="scores is"):
        attend_scored(q, keys, values, counts, 1.0, make_book(2, 4))
