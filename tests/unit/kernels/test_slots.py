"""Slots: attention over them and columns into them, compiled loops against torch and torch against
plain loops."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.core.packing import KVPacking
from flexgen_h2o.kernels import slots as slot_kernels
from flexgen_h2o.kernels.packed import pack_columns
from flexgen_h2o.kernels.slot_form import SlotForm
from flexgen_h2o.kernels.slots import (
    Pair,
    ScoreState,
    attend,
    attend_largest,
    attend_lse,
    attend_lse_reference,
    attend_reference,
    get_last_slots,
    get_last_slots_reference,
    put_slots,
    put_slots_reference,
    slot_products,
)

# Half: the result is rounded; everything before it is fp32.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 2, 6, 15, 16, 20, 33, 34, 64, 80, 128]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def in_segments(columns: torch.Tensor, length: int, unread: float = math.nan) -> torch.Tensor:
    """(R, C, d) as (segments, R, length, d) with a gap after each segment; slots that fill up the
    last are unread."""
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
    rows = len(filled)
    slots = max(filled) + 2
    q = torch.randn(rows, group, width, generator=g).to(dtype)
    keys, values = (torch.randn(rows, slots, width, generator=g).to(dtype) for _ in range(2))
    for r, n in enumerate(filled):
        keys[r, n:] = math.nan
        values[r, n:] = math.nan
    return q, keys, values, torch.tensor(filled, dtype=torch.int32)


def make_state(
    rows: int, slots: int, decay: float = 1.0, gain: float = 1.0, per_query: bool = False
) -> ScoreState:
    g = torch.Generator().manual_seed(rows)
    positions = torch.stack(
        [torch.randperm(3 * slots, generator=g)[:slots] for _ in range(rows)]
    ).int()
    oldest = torch.randint(0, slots, (rows,), generator=g).int()
    scores = torch.randint(0, 3, (rows, slots), generator=g) / 4
    gains = gain * torch.rand(rows, generator=g)
    state = ScoreState(
        scores, positions, oldest, oldest + slots, decay, gains, torch.full((rows,), -7).int()
    )
    now = torch.randint(3 * slots, 4 * slots, (rows,), generator=g).int()
    return replace(state, now=now) if per_query else state


def is_compiled(width: int, dtype: torch.dtype) -> bool:
    """The compiled loops read whole words; torch operations round products to the dtype."""
    return dtype == torch.float32 or width % 2 == 0


def copy_of(state: ScoreState) -> ScoreState:
    return replace(state, scores=state.scores.clone(), victims=state.victims.clone())


def double_attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, n: int, scale: float
) -> torch.Tensor:
    """One row by definition, in double precision."""
    p = torch.softmax(scale * (q.double() @ keys[:n].double().T), dim=1)
    return p @ values[:n].double()


ragged = st.lists(st.integers(1, 21), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(
    ragged, st.integers(1, 9), st.sampled_from(WIDTHS), st.sampled_from(DTYPES), st.integers(1, 24)
)
def test_against_the_definition(
    filled: list[int], group: int, width: int, dtype: torch.dtype, length: int
) -> None:
    """The result, bit for bit the same with the log-sum-exp, and the log-sum-exp."""
    q, keys, values, counts = make(filled, group, width, dtype)
    columns = in_segments(keys, length), in_segments(values, length)
    out, lse = attend_lse(q, *columns, counts, 0.3)
    assert (
        torch.equal(out, attend(q, *columns, counts, 0.3))
        and out.shape == q.shape
        and out.dtype == dtype
    )
    reference = attend_reference(q, *columns, counts, 0.3)
    same, reference_lse = attend_lse_reference(q, *columns, counts, 0.3)
    assert lse.shape == reference_lse.shape == (len(filled), group)
    assert lse.dtype == reference_lse.dtype == torch.float32
    for r, n in enumerate(filled):
        expected = double_attend(q[r], keys[r], values[r], n, 0.3)
        tolerance = TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))
        assert (out[r].double() - expected).abs().max() < (
            tolerance if is_compiled(width, dtype) else 4 * tolerance
        )
        assert (reference[r].double() - expected).abs().max() < 4 * tolerance
        assert (same[r] - out[r]).abs().max() <= 0.05 * max(1.0, float(out[r].abs().max()))
        products = 0.3 * (q[r].double() @ keys[r, :n].double().T)
        expected = torch.logsumexp(products, dim=1)
        largest = max(1.0, float(products.abs().max()))
        rounded = (1e-5 if dtype == torch.float32 else 2**-7) * largest
        assert (lse[r] - expected).abs().max() <= (
            1e-5 * largest if is_compiled(width, dtype) else rounded
        )
        assert (reference_lse[r] - expected).abs().max() <= rounded


@settings(max_examples=60, deadline=None)
@given(
    ragged,
    st.integers(1, 9),
    st.sampled_from(WIDTHS),
    st.sampled_from(DTYPES),
    st.sampled_from([1.0, 0.5]),
    st.booleans(),
)
def test_scores_and_victims(
    filled: list[int], group: int, width: int, dtype: torch.dtype, decay: float, per_query: bool
) -> None:
    """Scores by the reference in fp32; victims by definition from the scores that came out, or from
    these over the number of queries that saw each; the same attention."""
    q, keys, values, counts = make(filled, group, width, dtype)
    state = make_state(len(filled), keys.shape[1], decay, 2.0, per_query)
    expected = copy_of(state)
    args = in_segments(keys, 7), in_segments(values, 7), counts, 0.3
    assert torch.equal(attend(q, *args, state), attend(q, *args))
    attend_reference(q.float(), args[0].float(), args[1].float(), counts, 0.3, expected)
    tolerance = 2e-6 if is_compiled(width, dtype) else 0.03
    assert torch.allclose(state.scores, expected.scores, atol=tolerance, rtol=tolerance)
    assert state.victims.tolist() == victims(state, filled)
    assert expected.victims.tolist() == victims(expected, filled)


@settings(max_examples=60, deadline=None)
@given(
    ragged,
    st.integers(1, 9),
    st.sampled_from(WIDTHS),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_sinks_are_columns_without_values(
    filled: list[int], group: int, width: int, dtype: torch.dtype, has_sinks: bool
) -> None:
    """By definition: in the denominator, and no score for them."""
    q, keys, values, counts = make(filled, group, width, dtype)
    columns = (in_segments(keys, 7), in_segments(values, 7))
    state = make_state(len(filled), keys.shape[1])
    expected_state = copy_of(state)
    sinks = (
        9 * torch.randn(len(filled), group, generator=torch.Generator().manual_seed(0))
        if has_sinks
        else None
    )
    form = SlotForm(sinks=sinks)
    found = attend(q, *columns, counts, 0.3, state, form)
    reference = attend_reference(
        q.float(), *(t.float() for t in columns), counts, 0.3, expected_state, form
    )
    for r, n in enumerate(filled):
        k = keys[r, :n].double()
        v = values[r, :n].double()
        none = torch.full((group, 1), -torch.inf) if sinks is None else sinks[r].unsqueeze(1)
        logits = torch.cat([0.3 * (q[r].double() @ k.T), none.double()], dim=1)
        expected = torch.softmax(logits, dim=1)[:, :-1] @ v
        tolerance = TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))
        assert (found[r].double() - expected).abs().max() < 4 * tolerance
        assert (reference[r].double() - expected).abs().max() < 1e-5
    exact = is_compiled(width, dtype)
    assert torch.allclose(
        state.scores,
        expected_state.scores,
        atol=4e-6 if exact else 0.03,
        rtol=4e-6 if exact else 0.03,
    )
    out, lse = attend_lse(q, *columns, counts, 0.3, sinks)
    assert torch.equal(out, found)
    whole, whole_lse = attend_lse_reference(q, *columns, counts, 0.3, sinks)
    assert (lse - whole_lse).abs().max() <= (1e-5 if dtype == torch.float32 else 2**-6) * 30
    assert (whole - out).abs().max() <= 0.05 * max(1.0, float(out.abs().max()))


def victims(state: ScoreState, filled: list[int]) -> list[int]:
    found = []
    ranks = state.scores
    if state.now is not None:
        ranks = ranks / (state.now[:, None] + 1 - state.positions)
    for r, n in enumerate(filled):
        allowed = [
            j for j in range(n) if state.oldest[r] <= state.positions[r, j] <= state.newest[r]
        ]
        found.append(
            min(allowed, key=lambda j: (float(ranks[r, j]), int(state.positions[r, j])), default=-1)
        )
    return found


@pytest.mark.parametrize(
    ("group", "width", "dtype"),
    [(1, 64, torch.bfloat16), (6, 34, torch.float32), (5, 8, torch.bfloat16)],
)
def test_segments_rows_and_threads_change_no_bit(
    group: int, width: int, dtype: torch.dtype
) -> None:
    filled = [50, 3, 103, 64, 1, 77, 12]
    q, keys, values, counts = make(filled, group, width, dtype)
    whole = attend(q, in_segments(keys, 105), in_segments(values, 105), counts, 0.2)
    for length in (1, 16, 300):
        assert torch.equal(
            attend(q, in_segments(keys, length), in_segments(values, length), counts, 0.2), whole
        )
    for one in (slice(r, r + 1) for r in range(len(filled))):
        alone = attend(
            q[one], in_segments(keys[one], 64), in_segments(values[one], 64), counts[one], 0.2
        )
        assert torch.equal(alone, whole[one])
    many = [t.repeat(200, *[1] * (t.dim() - 1)) for t in (q, keys, values, counts)]
    repeated = attend(many[0], in_segments(many[1], 105), in_segments(many[2], 105), many[3], 0.2)
    assert torch.equal(repeated, whole.repeat(200, 1, 1))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(
            attend(many[0], in_segments(many[1], 9), in_segments(many[2], 9), many[3], 0.2),
            repeated,
        )
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("scored", [attend, attend_reference])
def test_ties_go_to_the_lowest_position_and_an_empty_range_to_nobody(scored) -> None:
    q = torch.zeros(4, 1, 16)  # all slots receive the same
    keys = torch.randn(1, 4, 6, 16)
    values = torch.randn(1, 4, 6, 16)
    filled = torch.tensor([6, 6, 2, 6], dtype=torch.int32)
    positions = torch.tensor([[9, 4, 7, 2, 8, 3]] * 4, dtype=torch.int32)
    oldest = torch.tensor([0, 4, 0, 10]).int()
    newest = torch.tensor([99, 8, 3, 99]).int()
    scores = torch.zeros(4, 6)
    scores[1, 1] = 1.0
    state = ScoreState(scores, positions, oldest, newest, 1.0, torch.ones(4), torch.zeros(4).int())
    scored(q, keys, values, filled, 1.0, state)
    assert state.victims.tolist() == [3, 2, -1, -1]
    assert torch.equal(state.scores[2, 2:], torch.zeros(4))  # what is not filled keeps its score


@pytest.mark.parametrize("scored", [attend, attend_reference])
def test_a_score_that_is_no_number_names_the_victim(scored) -> None:
    """The earliest where all are: every row has a slot for its next column."""
    q, keys, values, filled = make([6, 6], 2, 16, torch.float32)
    positions = torch.tensor([[9, 4, 7, 2, 8, 3, 0, 0]] * 2, dtype=torch.int32)
    scores = torch.zeros(2, 8)
    oldest = torch.tensor([3, 3]).int()
    q[0] = math.nan
    scores[1, 2] = math.nan
    state = ScoreState(
        scores, positions, oldest, oldest + 5, 1.0, torch.ones(2), torch.zeros(2).int()
    )
    scored(q, in_segments(keys, 8), in_segments(values, 8), filled, 1.0, state)
    assert state.victims.tolist() == [5, 2] and scores[0, :6].isnan().all()


@pytest.mark.parametrize("function", [attend, attend_reference])
def test_nan_and_infinity_in_filled_slots_show(function) -> None:
    q, keys, values, counts = make([40, 40, 40], 1, 64, torch.float32)
    q[:] = q.abs()
    keys[0, 17, 3] = math.nan
    keys[1, 5] = math.inf
    out = function(q, in_segments(keys, 42), in_segments(values, 42), counts, 1.0)
    assert bool(out[:2].isnan().all()) and bool(out[2].isfinite().all())


def test_scores_of_any_size() -> None:
    """Probabilities that underflow, and products in the thousands."""
    q, keys, values, counts = make([30], 1, 64, torch.float32)
    out = attend(q * 50, in_segments(keys, 32), in_segments(values, 32), counts, 1.0)
    assert (out[0] - double_attend(q[0] * 50, keys[0], values[0], 30, 1.0)).abs().max() < 1e-3


def test_wrong_shapes_are_refused_before_memory_is_touched() -> None:
    q, keys, values, counts = make([5, 5], 1, 64, torch.float32)
    keys = in_segments(keys, 7)
    values = in_segments(values, 7)
    apart = keys.transpose(2, 3).contiguous().transpose(2, 3)
    for wrong in (
        (keys[:, :1], values[:, :1], counts),
        (keys, values, counts + 3),
        (apart, values, counts),
    ):
        with pytest.raises(ValueError, match="do not go together"):
            attend(q, *wrong, 1.0)
    for rows, slots in ((3, 7), (2, 4)):
        with pytest.raises(ValueError, match="scores is"):
            attend(q, keys, values, counts, 1.0, make_state(rows, slots))
    weighed = make_state(2, 7, per_query=True)
    assert weighed.now is not None
    for other in (weighed.now[:1], weighed.now.long()):
        with pytest.raises(ValueError, match="attend: now"):
            attend(q, keys, values, counts, 1.0, replace(weighed, now=other))


def areas(rows: int, segments: int, per_segment: int, width: int, dtype: torch.dtype) -> Pair:
    """Keys and values in one memory, a segment behind the other, with room between them."""
    memory = torch.randn(segments, 2, rows * per_segment * width + 5).to(dtype)
    keys, values = memory[..., :-5].unflatten(2, (rows, per_segment, width)).unbind(1)
    return keys, values


def distinct(rows: int, count: int, slots: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(slots, generator=generator)[:count] for _ in range(rows)])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([1, 3, 8, 64]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int32]),
    st.integers(0, 99),
    st.data(),
)
def test_columns_as_the_reference(
    rows: int,
    segments: int,
    per_segment: int,
    width: int,
    dtype: torch.dtype,
    seed: int,
    data: st.DataObject,
) -> None:
    count = data.draw(st.integers(1, segments * per_segment))
    slots = distinct(rows, count, segments * per_segment, seed)
    wide = torch.randn(2, rows, count + 2, width).to(dtype)
    found, want = (areas(rows, segments, per_segment, width, dtype) for _ in range(2))
    for a, b in zip(found, want, strict=True):
        a.copy_(b)
    columns = wide[0, :, :count], wide[1, :, :count]
    put_slots(found, slots, columns)
    put_slots_reference(want, slots, columns)
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    again = data.draw(st.integers(0, count - 1))
    slots[:, again] = slots[:, -1]
    outs = torch.zeros(2, 2, rows, count + 1, width).to(dtype)
    get_last_slots(found, slots, (outs[0, 0, :, :count], outs[0, 1, :, :count]))
    get_last_slots_reference(found, slots, (outs[1, 0, :, :count], outs[1, 1, :, :count]))
    assert torch.equal(outs[0], outs[1]) and torch.equal(
        outs[0, 0, :, again], outs[0, 0, :, count - 1]
    )
    assert not outs[0, :, :, count].any()


def test_of_columns_for_one_slot_the_last_stays() -> None:
    keys, values = areas(2, 2, 3, 8, torch.float32)
    column = torch.randn(2, 2, 8)
    put_slots((keys, values), torch.tensor([[4, 4], [1, 1]]), (column, -column))
    assert torch.equal(keys[1, 0, 1], column[0, 1]) and torch.equal(values[0, 1, 1], -column[1, 1])


@pytest.mark.parametrize("wrong", ["columns' dtype", "slots' dtype", "columns apart"])
def test_what_the_loops_do_not_take_goes_through_torch(
    wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What goes by address is checked."""
    called = []
    monkeypatch.setattr(slot_kernels, "put_slots_reference", lambda *_: called.append(wrong))
    keys, values = areas(2, 1, 3, 8, torch.float32)
    column = torch.randn(2, 1, 8)
    slots = torch.tensor([[1], [2]])
    columns = {
        "columns' dtype": column.bfloat16(),
        "columns apart": torch.randn(2, 1, 16)[..., ::2],
    }.get(wrong, column)
    put_slots((keys, values), slots.int() if wrong == "slots' dtype" else slots, (columns, columns))
    assert called == [wrong]


def test_products_in_half_precision_are_scaled_first() -> None:
    """q.k of 204,800 is beyond float16, and its softmax is not."""
    q, k = (torch.full((1, 1, 1, 128), 40.0, dtype=torch.float16) for _ in range(2))
    k = k.repeat(1, 1, 3, 1) * torch.tensor([1.0, 0.5, 0.25], dtype=torch.float16).view(3, 1)
    found = slot_products(q[0], k, None, 128**-0.5)
    torch.testing.assert_close(
        found, (q[0].float() @ k[0].float().transpose(1, 2)) * 128**-0.5, rtol=1e-3, atol=0
    )


def test_what_is_not_filled_is_masked_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    q, keys, values = (torch.randn(*size, 16) for size in ((5, 2), (2, 5, 4), (2, 5, 4)))
    filled = torch.tensor([1, 8, 5, 3, 4], dtype=torch.int32)
    values[0, 0, 1:] = float("nan")
    values[1, 2, 1:] = float("nan")
    found = []
    for chunk in (10**6, 1):
        monkeypatch.setattr(slot_kernels, "PACKED_CHUNK", chunk)
        found.append(attend_lse_reference(q, keys, values, filled, 0.25)[0])
    torch.testing.assert_close(*found)
    assert found[0].isfinite().all()


def largest_by_loops(
    products: list[float], sink: float, values: torch.Tensor, share: float
) -> torch.Tensor:
    """One query by definition (FlexGen's _sparse_attention_value). products, values: of the columns
    of its row."""
    total = sum(math.exp(x) for x in [*products, sink])
    p = [math.exp(x) / total for x in products]
    newest = len(p) - 1
    order = sorted(range(newest), key=lambda j: (-products[j], j))
    out = p[newest] * values[newest].double()
    for j in order[: int(share * newest)]:
        out += p[j] * values[j].double()
    return out


@pytest.mark.parametrize("chunk", [2**22, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("share", "group", "length"), [(0.2, 3, 7), (0.001, 1, 30), (0.5, 9, 5), (0.9, 2, 12)]
)
def test_the_largest_probabilities(
    share: float,
    group: int,
    length: int,
    dtype: torch.dtype,
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The result of a row is of that row alone. In half products are rounded, so some are equal."""
    monkeypatch.setattr(slot_kernels, "PACKED_CHUNK", chunk)
    filled = [21, 1, 2, 8, 21]
    q, keys, values, counts = make(filled, group, 16, dtype)
    areas = in_segments(keys, length), in_segments(values, length)
    sinks = torch.randn(len(filled), group)
    products = slot_products(q, areas[0], counts, 0.3)
    for joining in (None, sinks):
        found = attend_largest(q, *areas, counts, 0.3, share, SlotForm(sinks=joining))
        assert found.shape == q.shape and found.dtype == dtype
        for r, n in enumerate(filled):
            for x in range(group):
                sink = -math.inf if joining is None else float(sinks[r, x])
                want = largest_by_loops(products[r, x, :n].tolist(), sink, values[r], share)
                assert (found[r, x].double() - want).abs().max() < 4 * TOLERANCE[dtype] * max(
                    1.0, want.abs().max()
                )


@pytest.mark.parametrize("bits", [8, "4/3"])
def test_the_largest_probabilities_of_packed_slots(bits: int | str) -> None:
    q, keys, values, counts = make([21, 3, 9], 4, 32, torch.float32)
    packing = KVPacking.of(32, bits)
    areas = in_segments(keys.nan_to_num(), 6), in_segments(values.nan_to_num(), 6, 0.0)
    packed = (
        pack_columns(areas[0].nan_to_num(), packing.keys),
        pack_columns(areas[1], packing.values),
    )
    k, v = slot_kernels.unpacked(*packed, SlotForm(packing), torch.float32)
    want = attend_largest(q, k, v, counts, 0.3, 0.25)
    assert torch.equal(attend_largest(q, *packed, counts, 0.3, 0.25, SlotForm(packing)), want)
    every = attend_largest(q, *packed, counts, 0.3, 1.0, SlotForm(packing))
    assert (every - attend(q, *packed, counts, 0.3, None, SlotForm(packing))).abs().max() < 1e-4
