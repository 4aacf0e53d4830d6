"""Packed slots: what the format loses, and attention over it against torch over what it gives back."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.core.packing import SlotPacking
from flexgen_h2o.kernels import slots as slot_kernels
from flexgen_h2o.kernels.packed import pack_columns, pack_columns_reference, unpack_columns
from flexgen_h2o.kernels.slots import (
    attend_packed,
    attend_packed_reference,
    attend_reference,
    attend_scored_reference,
)
from tests.unit.kernels.test_slots import DTYPES, copy_of, in_segments, make, make_state, ragged, victims

WIDTHS = [1, 3, 16, 20, 33, 64, 67, 80, 96, 128, 160, 256]
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-7}
packings = st.builds(SlotPacking, st.sampled_from(WIDTHS), st.sampled_from([4, 8]))


def steps_of(packed: torch.Tensor, packing: SlotPacking) -> torch.Tensor:
    """(..., d): the scale of each number's group."""
    scales = (packed[..., packing.value_words :] << 16).view(torch.float32)
    return scales[..., torch.arange(packing.width) // packing.group]


@pytest.mark.parametrize(
    ("width", "group", "words4", "words8"),
    [
        (16, 16, 2 + 1, 4 + 1), (64, 64, 8 + 1, 16 + 1), (80, 40, 10 + 2, 20 + 2), (96, 48, 12 + 2, 24 + 2),
        (128, 64, 16 + 2, 32 + 2), (256, 64, 32 + 4, 64 + 4), (67, 40, 9 + 2, 17 + 2),
    ],
)  # fmt: skip
def test_bytes_of_a_slot(width: int, group: int, words4: int, words8: int) -> None:
    four, eight = SlotPacking(width, 4), SlotPacking(width, 8)
    assert four.group == eight.group == group
    assert (four.slot_bytes, eight.slot_bytes) == (4 * words4, 4 * words8)


@settings(max_examples=60, deadline=None)
@given(
    packings, st.sampled_from(DTYPES), st.floats(-1e4, 1e4), st.floats(1e-6, 1e4), st.integers(0, 9),
    st.sampled_from([pack_columns, pack_columns_reference]),
)  # fmt: skip
def test_no_number_is_further_off_than_half_a_step(packing, dtype, offset, size, seed, pack) -> None:  # type: ignore[no-untyped-def]
    g = torch.Generator().manual_seed(seed)
    columns = (offset + size * torch.randn(5, 3, packing.width, generator=g)).to(dtype)
    packed = pack(columns, packing)
    assert packed.shape == (5, 3, packing.words) and packed.dtype == torch.int32
    x, steps = columns.double(), steps_of(packed, packing).double()
    off = (unpack_columns(packed, packing, torch.float32).double() - x).abs()
    assert bool((off <= 0.5 * steps * (1 + 1e-3) + 2.0**-22 * x.abs()).all())
    for group in range(packing.groups):  # the steps are no larger than the numbers need, but for bf16's rounding
        here = slice(group * packing.group, (group + 1) * packing.group)
        part = x[..., here]
        needed = (part.amax(-1) - part.amin(-1) + part.amin(-1).abs() * 2.0**-7) / packing.levels
        assert bool((steps[..., here.start] <= needed * (1 + 2.0**-7) + 1e-30).all())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("pack", [pack_columns, pack_columns_reference])
def test_numbers_that_are_exact(bits: int, pack) -> None:  # type: ignore[no-untyped-def]
    packing = SlotPacking(64, bits)
    for column in (torch.zeros(64), torch.full((64,), -3.5), torch.arange(64.0) % 16, torch.full((64,), 3e38)):
        expected = column.bfloat16().float()
        back = unpack_columns(pack(expected, packing), packing, torch.float32)
        assert torch.allclose(back, expected, rtol=1e-6, atol=0 if bits == 4 else 0.04)


@pytest.mark.parametrize("pack", [pack_columns, pack_columns_reference])
@pytest.mark.parametrize("odd", [math.nan, -math.nan, math.inf, -math.inf])
def test_what_is_no_number_shows_in_its_group(odd: float, pack) -> None:  # type: ignore[no-untyped-def]
    packing = SlotPacking(128, 4)
    columns = torch.randn(1, 128)
    columns[0, 70] = odd
    back = unpack_columns(pack(columns, packing), packing, torch.float32)
    assert not bool(back[0, 64:].isfinite().any()) and bool(back[0, :64].isfinite().all())


def packed_inputs(filled, group, packing, dtype, length):  # type: ignore[no-untyped-def]
    """Queries, packed keys and values in segments (NaN groups where nothing is filled), and the columns they hold."""
    q, keys, values, counts = make(filled, group, packing.width, dtype)
    pair = [pack_columns(t, packing) for t in (keys, values)]
    back = [unpack_columns(t, packing, torch.float32) for t in pair]
    segmented = [in_segments(t.view(torch.float32), length).view(torch.int32) for t in pair]
    return q, segmented, [in_segments(t, length) for t in back], counts


@settings(max_examples=80, deadline=None)
@given(ragged, st.sampled_from([1, 2, 4, 5, 8]), packings, st.sampled_from(DTYPES), st.integers(1, 24))
def test_attention_is_that_over_the_rounded_columns(filled, group, packing, dtype, length) -> None:  # type: ignore[no-untyped-def]
    q, pair, back, counts = packed_inputs(filled, group, packing, dtype, length)
    actual = attend_packed(q, *pair, counts, 0.3, packing)
    expected = attend_reference(q.float(), *back, counts, 0.3)
    assert actual.shape == q.shape and actual.dtype == dtype
    assert (actual.float() - expected).abs().max() < TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))
    if dtype == torch.float32:
        assert torch.allclose(attend_packed_reference(q, *pair, counts, 0.3, packing), expected, atol=1e-6)


@settings(max_examples=40, deadline=None)
@given(ragged, st.sampled_from([1, 3, 4]), packings, st.sampled_from(DTYPES), st.sampled_from([1.0, 0.5]))
def test_scores_and_victims(filled, group, packing, dtype, decay) -> None:  # type: ignore[no-untyped-def]
    q, pair, back, counts = packed_inputs(filled, group, packing, dtype, 7)
    state = make_state(len(filled), max(filled) + 2, decay, 2.0)
    expected = copy_of(state)
    with_book = attend_packed(q, *pair, counts, 0.3, packing, state)
    attend_scored_reference(q.float(), *back, counts, 0.3, expected)
    assert torch.allclose(state.scores, expected.scores, atol=4e-6, rtol=4e-6)
    assert state.victims.tolist() == victims(state, filled)
    assert torch.equal(with_book, attend_packed(q, *pair, counts, 0.3, packing))


@pytest.mark.parametrize(
    ("group", "width", "bits", "dtype"),
    [(1, 64, 4, torch.bfloat16), (6, 80, 4, torch.float32), (1, 128, 8, torch.bfloat16), (2, 16, 4, torch.float32)],
)
def test_segments_and_rows_change_no_bit(group: int, width: int, bits: int, dtype: torch.dtype) -> None:
    filled, packing = [50, 3, 103, 64, 1, 77, 12] * 60, SlotPacking(width, bits)
    q, whole, _, counts = packed_inputs(filled, group, packing, dtype, 105)
    expected = attend_packed(q, *whole, counts, 0.2, packing)
    for length in (1, 3, 16, 64, 104, 300):
        _, parts, _, _ = packed_inputs(filled, group, packing, dtype, length)
        assert torch.equal(attend_packed(q, *parts, counts, 0.2, packing), expected)
    alone = attend_packed(q[2:3], *(t[:, 2:3].contiguous() for t in whole), counts[2:3], 0.2, packing)
    assert torch.equal(alone, expected[2:3])


def test_torch_unpacks_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the chunk, the same; the state too."""
    packing = SlotPacking(16, 4)
    q, pair, _, counts = packed_inputs([5, 9, 2, 7, 1], 2, packing, torch.float32, 4)
    found = []
    for chunk in (1, 2 * 12 * 16, 2**20):
        monkeypatch.setattr(slot_kernels, "PACKED_CHUNK", chunk)
        state = make_state(5, 11)
        found.append((attend_packed_reference(q, *pair, counts, 0.3, packing, state), state))
    for out, state in found[1:]:
        assert torch.allclose(out, found[0][0], atol=1e-6) and torch.allclose(state.scores, found[0][1].scores)
        assert state.victims.tolist() == found[0][1].victims.tolist()


def test_wrong_shapes_are_refused_before_memory_is_touched() -> None:
    packing = SlotPacking(64, 4)
    q, pair, _, counts = packed_inputs([5, 5], 1, packing, torch.float32, 7)
    with pytest.raises(ValueError, match="do not go together"):
        attend_packed(q, *pair, counts + 3, 1.0, packing)
    with pytest.raises(ValueError, match="do not go together"):
        attend_packed(q, *pair, counts, 1.0, SlotPacking(64, 8))
    with pytest.raises(ValueError, match="of width 48"):
        attend_packed(q[..., :48], *pair, counts, 1.0, packing)
    with pytest.raises(ValueError, match="is not of width 64"):
        pack_columns(torch.zeros(3, 63), packing)
