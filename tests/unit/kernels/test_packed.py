"""Packed numbers: what the format loses, compiled loops against torch, attention over packed slots,
what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.core.packing import KVPacking, SlotPacking
from flexgen_h2o.kernels import packed as packed_kernels
from flexgen_h2o.kernels import slots as slot_kernels
from flexgen_h2o.kernels.packed import (
    pack_columns,
    pack_rows,
    unpack_columns,
    unpack_rows,
)
from flexgen_h2o.kernels.slot_form import SlotForm, WholeColumns
from flexgen_h2o.kernels.slots import (
    attend,
    attend_reference,
    put_packed,
    put_packed_reference,
    put_slots_reference,
)
from flexgen_h2o.kernels.workspace import is_compiled
from tests.unit.kernels.test_slots import (
    DTYPES,
    copy_of,
    in_segments,
    make,
    make_state,
    ragged,
    victims,
)

WIDTHS = [1, 3, 16, 20, 33, 63, 64, 65, 67, 80, 96, 128, 160, 200, 256, 1024]
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
BITS = [4, 8]
BOTH = pytest.mark.parametrize("pack", [pack_columns, pack_columns.torch])
OF_COLUMNS = [3, 4, 8]
widths = st.sampled_from(WIDTHS[:-1])
draws = st.integers(0, 99)
Kinds = list[tuple[int, torch.dtype]]
SlotKinds = list[tuple[int | str, torch.dtype]]
# Bits and dtype have a loop of their own, which takes seconds to compile.
FEW: Kinds = [(3, torch.float32), (4, torch.float32), (4, torch.bfloat16)]
REST: Kinds = [(bits, dtype) for bits in OF_COLUMNS for dtype in DTYPES if (bits, dtype) not in FEW]
EACH_LOOP = pytest.mark.parametrize(
    "kinds", [FEW, pytest.param(REST, marks=pytest.mark.slow)], ids=["few", "rest"]
)
# Bits of keys and values, and dtype, are what attention has a loop for.
FEW_SLOTS: SlotKinds = [(3, torch.float32), ("4/3", torch.float32), (4, torch.bfloat16)]
REST_SLOTS: SlotKinds = [
    *((bits, dtype) for bits in OF_COLUMNS for dtype in DTYPES if (bits, dtype) not in FEW_SLOTS),
    ("4/3", torch.bfloat16),
    ("3/4", torch.float32),
    ("3/8", torch.bfloat16),
    ("8/3", torch.float32),
]
EACH_SLOT_LOOP = pytest.mark.parametrize(
    "kinds", [FEW_SLOTS, pytest.param(REST_SLOTS, marks=pytest.mark.slow)], ids=["few", "rest"]
)


@pytest.mark.parametrize(
    ("width", "group", "words4", "words8"),
    [
        (16, 16, 2 + 1, 4 + 1),
        (64, 64, 8 + 1, 16 + 1),
        (80, 40, 10 + 2, 20 + 2),
        (96, 48, 12 + 2, 24 + 2),
        (128, 64, 16 + 2, 32 + 2),
        (256, 64, 32 + 4, 64 + 4),
        (67, 40, 9 + 2, 17 + 2),
    ],
)
def test_bytes_of_a_slot(width: int, group: int, words4: int, words8: int) -> None:
    four = SlotPacking(width, 4)
    eight = SlotPacking(width, 8)
    assert four.group == eight.group == group
    assert (four.slot_bytes, eight.slot_bytes) == (4 * words4, 4 * words8)


def steps_of(packed: torch.Tensor, packing: SlotPacking) -> torch.Tensor:
    """(..., d): the scale of each number's group."""
    scales = (packed[..., packing.value_words :] << 16).view(torch.float32)
    return scales[..., torch.arange(packing.width) // packing.group]


@EACH_LOOP
@settings(max_examples=80, deadline=None)
@given(
    widths,
    draws,
    st.booleans(),
    st.floats(-1e4, 1e4),
    st.floats(1e-6, 1e4),
    st.integers(0, 9),
    st.sampled_from([pack_columns, pack_columns.torch]),
)
def test_no_number_is_further_off_than_half_a_step(
    kinds, width, kind, is_half, offset, size, seed, pack
) -> None:  # type: ignore[no-untyped-def]
    g = torch.Generator().manual_seed(seed)
    bits, dtype = kinds[kind % len(kinds)]
    packing = SlotPacking(width, bits)
    dtype = torch.float16 if is_half else dtype
    columns = (offset + size * torch.randn(5, 3, packing.width, generator=g)).to(dtype)
    packed = pack(columns, packing)
    assert packed.shape == (5, 3, packing.words) and packed.dtype == torch.int32
    x = columns.double()
    steps = steps_of(packed, packing).double()
    off = (unpack_columns(packed, packing, torch.float32).double() - x).abs()
    assert bool((off <= 0.5 * steps * (1 + 1e-3) + 2.0**-22 * x.abs()).all())
    for group in range(
        packing.groups
    ):  # the steps are no larger than the numbers need, but for bf16's rounding
        here = slice(group * packing.group, (group + 1) * packing.group)
        part = x[..., here]
        needed = (part.amax(-1) - part.amin(-1) + part.amin(-1).abs() * 2.0**-7) / packing.levels
        assert bool((steps[..., here.start] <= needed * (1 + 2.0**-7) + 1e-30).all())


@pytest.mark.parametrize(("width", "words"), [(16, 3), (32, 4), (64, 7), (80, 10), (128, 14)])
def test_bytes_of_a_slot_of_3_bits(width: int, words: int) -> None:
    assert SlotPacking(width, 3).slot_bytes == 4 * words


@pytest.mark.parametrize("bits", OF_COLUMNS)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_two_ways_to_pack_agree(bits: int, width: int) -> None:
    """In whole numbers, whose codes no rounding moves: bit for bit, and back to what they were."""
    packing = SlotPacking(width, bits)
    columns = torch.randint(0, 2**bits, (7, width)).float()
    for start in range(0, width, packing.group):  # a step of 1
        columns[:, start] = 0
        columns[:, min(start + 1, width - 1)] = (
            2**bits - 1 if min(start + packing.group, width) - start > 1 else 0
        )
    packed = pack_columns(columns, packing)
    assert torch.equal(packed, pack_columns.torch(columns, packing))
    assert torch.equal(unpack_columns(packed, packing, torch.float32), columns)


@pytest.mark.parametrize("bits", BITS)
@BOTH
def test_numbers_that_are_exact(bits: int, pack) -> None:  # type: ignore[no-untyped-def]
    packing = SlotPacking(64, bits)
    for column in (
        torch.zeros(64),
        torch.full((64,), -3.5),
        torch.arange(64.0) % 16,
        torch.full((64,), 3e38),
    ):
        expected = column.bfloat16().float()
        back = unpack_columns(pack(expected, packing), packing, torch.float32)
        assert torch.allclose(back, expected, rtol=1e-6, atol=0 if bits == 4 else 0.04)


# ---- weights


def by_hand(row: bytes, columns: int, bits: int) -> list[float]:
    """The format, value by value."""
    found = []
    packing = SlotPacking(columns, bits)
    for i in range(columns):
        code = row[i] if bits == 8 else (row[i // 2] >> (4 * (i % 2))) & 15
        at = 4 * (packing.value_words + i // packing.group)
        scale, least = (
            torch.frombuffer(bytearray(row[a : a + 2]), dtype=torch.bfloat16).item()
            for a in (at, at + 2)
        )
        found.append(least + code * scale)
    return found


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("columns", WIDTHS)
def test_the_format_and_the_compiled_loop(
    bits: int, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop is the reference to the bit, some rows at a time, and writes nothing beside its
    rows."""
    packed = pack_rows(torch.randn(19, columns), bits)
    assert packed.dtype == torch.uint8 and packed.shape == (
        19,
        SlotPacking(columns, bits).slot_bytes,
    )
    monkeypatch.setattr(packed_kernels, "UNPACK_CHUNK", 300)
    for dtype in (*DTYPES, torch.float16):  # nothing is compiled for the last
        out = torch.full((21, columns), 7.0, dtype=dtype)
        unpack_rows(packed, bits, out[1:20])
        assert torch.equal(
            out[1:20], unpack_rows.torch(packed, bits, torch.empty(19, columns, dtype=dtype))
        )
        assert bool((out[[0, 20]] == 7).all()), "wrote beside its rows"
    want = [by_hand(bytes(row.tolist()), columns, bits) for row in packed[:2]]
    found = unpack_rows(packed[:2], bits, torch.empty(2, columns))
    assert torch.allclose(found, torch.tensor(want), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scale", [1e-36, 1e-30, 1e30])
def test_any_magnitude(scale: float) -> None:
    values = torch.randn(3, 128).mul_(scale)
    found = unpack_rows(pack_rows(values, 8), 8, torch.empty(3, 128))
    assert (found - values).abs().max() <= 0.02 * values.abs().max()


@pytest.mark.parametrize(
    ("bad", "at"),
    [(math.nan, 0), (math.inf, 64), (-math.inf, 99), (3.3e38, 0), (3.3e38, 64), (3.3e38, 99)],
)
def test_what_cannot_be_packed(bad: float, at: int) -> None:
    """What is not finite, and a group that spans more than float32 does."""
    values = torch.randn(3, 100)
    values[1, at] = bad
    if bad == 3.3e38:
        values[1, at - 1 if at > 64 or at == 99 else at + 1] = -bad
    with pytest.raises(ValueError, match="not finite, or too large"):
        pack_rows(values, 4)


@pytest.mark.parametrize("bits_of_it", [0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF])
def test_no_kind_of_nan_can_be_packed(bits_of_it: int) -> None:
    """Cut to bf16, or rounded up as a number is, its bits would be those of infinity or of zero."""
    values = torch.randn(3, 100)
    values.view(torch.int32)[1, 5] = bits_of_it
    with pytest.raises(ValueError, match="not finite, or too large"):
        pack_rows(values, 4)


@BOTH
@pytest.mark.parametrize("odd", [math.nan, -math.nan, math.inf, -math.inf])
def test_in_a_column_what_is_no_number_shows_in_its_group(odd: float, pack) -> None:  # type: ignore[no-untyped-def]
    packing = SlotPacking(128, 4)
    columns = torch.randn(1, 128)
    columns[0, 70] = odd
    back = unpack_columns(pack(columns, packing), packing, torch.float32)
    assert not bool(back[0, 64:].isfinite().any()) and bool(back[0, :64].isfinite().all())


# ---- attention over packed slots


def packed_inputs(filled, group, packing, dtype, length):  # type: ignore[no-untyped-def]
    """Queries, packed keys and values in segments (NaN groups where nothing is filled), and the
    columns they hold."""
    q, keys, values, counts = make(filled, group, packing.width, dtype)
    of_each = packing.keys, packing.values
    pair = [pack_columns(t, one) for t, one in zip((keys, values), of_each, strict=True)]
    back = [unpack_columns(t, one, torch.float32) for t, one in zip(pair, of_each, strict=True)]
    segmented = [in_segments(t.view(torch.float32), length).view(torch.int32) for t in pair]
    return q, segmented, [in_segments(t, length) for t in back], counts


@EACH_SLOT_LOOP
@settings(max_examples=80, deadline=None)
@given(ragged, st.sampled_from([1, 2, 4, 5, 8]), widths, draws, st.integers(1, 24))
def test_attention_is_that_over_the_rounded_columns(
    kinds, filled, group, width, kind, length
) -> None:  # type: ignore[no-untyped-def]
    bits, dtype = kinds[kind % len(kinds)]
    packing = KVPacking.of(width, bits)
    q, pair, back, counts = packed_inputs(filled, group, packing, dtype, length)
    actual = attend(q, *pair, counts, 0.3, form=SlotForm(packing))
    expected = attend_reference(q.float(), *back, counts, 0.3)
    assert actual.shape == q.shape and actual.dtype == dtype
    assert (actual.float() - expected).abs().max() < TOLERANCE[dtype] * max(
        1.0, float(expected.abs().max())
    )
    if dtype == torch.float32:
        assert torch.allclose(
            attend_reference(q, *pair, counts, 0.3, form=SlotForm(packing)), expected, atol=1e-6
        )


@EACH_SLOT_LOOP
@settings(max_examples=40, deadline=None)
@given(ragged, st.sampled_from([1, 3, 4]), widths, draws, st.sampled_from([1.0, 0.5]))
def test_scores_and_victims(kinds, filled, group, width, kind, decay) -> None:  # type: ignore[no-untyped-def]
    bits, dtype = kinds[kind % len(kinds)]
    packing = KVPacking.of(width, bits)
    q, pair, back, counts = packed_inputs(filled, group, packing, dtype, 7)
    state = make_state(len(filled), max(filled) + 2, decay, 2.0)
    expected = copy_of(state)
    scored = attend(q, *pair, counts, 0.3, state, SlotForm(packing))
    attend_reference(q.float(), *back, counts, 0.3, expected)
    assert torch.allclose(state.scores, expected.scores, atol=4e-6, rtol=4e-6)
    assert state.victims.tolist() == victims(state, filled)
    assert torch.equal(scored, attend(q, *pair, counts, 0.3, form=SlotForm(packing)))


@pytest.mark.parametrize(
    ("group", "width", "bits", "dtype"),
    [
        (1, 64, 4, torch.bfloat16),
        (6, 80, 4, torch.float32),
        (1, 128, 8, torch.float32),
        (2, 16, 4, torch.float32),
        (1, 64, 3, torch.float32),
        (5, 128, 3, torch.float32),
        (3, 96, "4/3", torch.float32),
        *(pytest.param(1, 64, bits, dtype, marks=pytest.mark.slow) for bits, dtype in REST_SLOTS),
    ],
)
def test_segments_and_rows_change_no_bit(
    group: int, width: int, bits: int | str, dtype: torch.dtype
) -> None:
    filled = [50, 3, 103, 64, 1, 77, 12] * 60
    packing = KVPacking.of(width, bits)
    q, whole, _, counts = packed_inputs(filled, group, packing, dtype, 105)
    expected = attend(q, *whole, counts, 0.2, form=SlotForm(packing))
    for length in (1, 16, 64, 300):
        _, parts, _, _ = packed_inputs(filled, group, packing, dtype, length)
        assert torch.equal(attend(q, *parts, counts, 0.2, form=SlotForm(packing)), expected)
    alone = attend(
        q[2:3], *(t[:, 2:3].contiguous() for t in whole), counts[2:3], 0.2, form=SlotForm(packing)
    )
    assert torch.equal(alone, expected[2:3])


def test_torch_unpacks_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the chunk, the same; the state too."""
    packing = KVPacking.of(16, 4)
    q, pair, _, counts = packed_inputs([5, 9, 2, 7, 1], 2, packing, torch.float32, 4)
    found = []
    for chunk in (1, 2 * 12 * 16, 2**20):
        monkeypatch.setattr(slot_kernels, "PACKED_CHUNK", chunk)
        state = make_state(5, 11)
        found.append((attend_reference(q, *pair, counts, 0.3, state, SlotForm(packing)), state))
    for out, state in found[1:]:
        assert torch.allclose(out, found[0][0], atol=1e-6) and torch.allclose(
            state.scores, found[0][1].scores
        )
        assert state.victims.tolist() == found[0][1].victims.tolist()


def test_wrong_shapes_are_refused_before_memory_is_touched() -> None:
    packing = KVPacking.of(64, 4)
    q, pair, _, counts = packed_inputs([5, 5], 1, packing, torch.float32, 7)
    for queries, filled, how in (
        (q, counts + 3, packing),
        (q, counts, KVPacking.of(64, 8)),
        (q[..., :48], counts, packing),
        (q, counts, None),
    ):
        with pytest.raises(ValueError, match="do not go together"):
            attend(queries, *pair, filled, 1.0, form=SlotForm(how))
    with pytest.raises(ValueError, match="is not of width 64"):
        pack_columns(torch.zeros(3, 63), packing.keys)


# ---- what lies beside packed slots


def beside(
    rows: int, width: int, dtype: torch.dtype, filled: list[int], count: int
) -> WholeColumns:
    """Whole columns in some slots of each row."""
    g = torch.Generator().manual_seed(rows * width)
    centres = torch.randn(rows, width, generator=g)
    ranges = torch.rand(rows, width, generator=g) + 0.25
    keys, values = (torch.randn(rows, count, width, generator=g).to(dtype) for _ in range(2))
    slots = torch.full((rows, count), -1, dtype=torch.int32)
    for r, n in enumerate(filled):
        some = torch.randperm(n, generator=g)[: max(0, count - 1)]
        slots[r, torch.randperm(count, generator=g)[: len(some)]] = some.int()
    return WholeColumns(centres.bfloat16(), ranges.bfloat16(), keys, values, slots)


FEW_NEW_COLUMNS = {(64, 4, torch.bfloat16), (80, "4/3", torch.float32), (128, 3, torch.float32)}


@pytest.mark.parametrize(
    ("width", "bits", "dtype"),
    [
        pytest.param(
            *form, dtype, marks=[] if (*form, dtype) in FEW_NEW_COLUMNS else pytest.mark.slow
        )
        for form, dtype in product([(64, 4), (80, "4/3"), (128, 3), (33, 8)], DTYPES)
    ],
)
@pytest.mark.parametrize(("count", "segments"), [(0, 2), (8, 2), (8, 1)])
def test_new_columns_go_to_slots_and_among_whole_ones(
    dtype: torch.dtype,
    width: int,
    bits: int | str,
    count: int,
    segments: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the bit what smoothing, packing and putting give one after the other; as the reference but
    for a rounding."""
    rows = 37
    length = 14 // segments
    packing = KVPacking.of(width, bits)
    whole = beside(rows, width, dtype, [12] * rows, count)
    slots = torch.randint(0, 14, (rows,))
    keys, values = torch.randn(2, rows, width).to(dtype)
    if count:
        slots[3] = int(whole.slots[3].max())  # its whole column is evicted
    places = torch.randint(-1, max(count, 1), (rows,)) if count else torch.full((rows,), -1)
    sizes = [rows * length * of.words for of in (packing.keys, packing.values)]
    if segments == 1:
        parts = tuple(torch.randint(0, 9, (1, size)).int() for size in sizes)
    else:  # as slots lie, segment by segment
        parts = torch.randint(0, 9, (segments, sum(sizes))).int().split(sizes, dim=1)
    areas = [part.unflatten(1, (rows, length, -1)) for part in parts]
    want = [t.clone() for t in areas]
    of_want = whole.map(torch.clone)
    of_want.enter(places, slots, keys, values)
    packed = (
        pack_columns(of_want.smoothed(keys), packing.keys),
        pack_columns(values, packing.values),
    )
    put_slots_reference(
        (want[0], want[1]), slots.unsqueeze(1), (packed[0].unsqueeze(1), packed[1].unsqueeze(1))
    )
    plain = [t.clone() for t in areas]
    of_plain = whole.map(torch.clone)
    put_packed_reference(
        (plain[0], plain[1]), slots, (keys, values), SlotForm(packing, whole=of_plain), places
    )
    if is_compiled(keys):  # the slow path is not taken
        monkeypatch.setattr("flexgen_h2o.kernels.slots.put_packed_reference", None)
    put_packed((areas[0], areas[1]), slots, (keys, values), SlotForm(packing, whole=whole), places)
    assert all(map(torch.equal, areas, want))
    for found in (whole, of_plain):
        assert all(map(torch.equal, vars(found).values(), vars(of_want).values()))
    ids = slots // length, torch.arange(rows), slots % length
    for area, other, of in zip(areas, plain, (packing.keys, packing.values), strict=True):
        assert torch.allclose(
            *(unpack_columns(t[ids], of, torch.float32) for t in (area, other)), rtol=1e-2, atol=1.2
        )


@EACH_SLOT_LOOP
@settings(max_examples=60, deadline=None)
@given(
    ragged,
    st.sampled_from([1, 2, 5, 8]),
    widths,
    draws,
    st.sampled_from([0, 4, 8]),
    st.booleans(),
)
def test_attention_with_all_that_lies_beside(
    kinds, filled, group, width, kind, count, has_sinks
) -> None:  # type: ignore[no-untyped-def]
    """Whole columns in their slots, sinks. By definition in double precision: smoothed keys
    restored, sinks as columns."""
    bits, dtype = kinds[kind % len(kinds)]
    packing = KVPacking.of(width, bits)
    q, keys, values, counts = make(filled, group, packing.width, dtype)
    whole = beside(len(filled), packing.width, dtype, filled, count)
    packed = pack_columns(whole.smoothed(keys), packing.keys), pack_columns(values, packing.values)
    pair = [in_segments(t.view(torch.float32), 7).view(torch.int32) for t in packed]
    sinks = 3 * torch.randn(len(filled), group) if has_sinks else None
    form = SlotForm(packing, whole, sinks)
    state = make_state(len(filled), max(filled) + 2)
    scores = state.scores.clone()
    found = attend(q, *pair, counts, 0.3, state, form)
    reference = attend_reference(q, *pair, counts, 0.3, None, form)
    k = whole.restored(unpack_columns(packed[0], packing.keys, torch.float32))
    v = unpack_columns(packed[1], packing.values, torch.float32)
    for r, n in enumerate(filled):
        for entry, slot in enumerate(whole.slots[r].tolist()):
            if slot >= 0:
                k[r, slot] = whole.keys[r, entry].float()
                v[r, slot] = whole.values[r, entry].float()
        logits = 0.3 * (q[r].double() @ k[r, :n].double().T)
        seen = v[r, :n].double()
        none = torch.full((group, 1), -torch.inf) if sinks is None else sinks[r].unsqueeze(1)
        p = torch.cat([logits, none.double()], dim=1).softmax(dim=1)[:, :-1]
        expected = p @ seen
        tolerance = TOLERANCE[dtype] * max(1.0, float(expected.abs().max()))
        assert (found[r].double() - expected).abs().max() < 4 * tolerance
        assert (reference[r].double() - expected).abs().max() < 16 * tolerance
        received = scores[r, :n] + state.gains[r] * p[:, :n].sum(0)
        assert torch.allclose(
            state.scores[r, :n], received.float(), atol=4e-5 if dtype == torch.float32 else 0.03
        )
    assert torch.equal(found, attend(q, *pair, counts, 0.3, None, form))


def test_what_does_not_go_together_is_refused() -> None:
    packing = KVPacking.of(64, 4)
    q, pair, _, counts = packed_inputs([5, 5], 1, packing, torch.float32, 7)
    whole = beside(2, 64, torch.float32, [5, 5], 4)
    for form in (
        SlotForm(packing, replace(whole, slots=whole.slots[:, :3])),
        SlotForm(packing, whole.map(lambda t: t[:1])),
        SlotForm(packing, replace(whole, slots=whole.slots.long())),
    ):
        with pytest.raises(ValueError, match="do not go together"):
            attend(q, *pair, counts, 1.0, None, form)
