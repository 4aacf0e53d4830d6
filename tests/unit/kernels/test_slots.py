"""Slots, packed or not: attention over them and columns into them, against plain loops in fp64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.core.packing import KVPacking
from flexgen_h2o.kernels import slots as slot_kernels
from flexgen_h2o.kernels.packed import pack_columns, unpack_columns
from flexgen_h2o.kernels.slot_form import SlotForm, WholeColumns
from flexgen_h2o.kernels.slots import (
    ScoreState,
    attend,
    attend_largest,
    attend_lse,
    get_last_slots,
    put_packed,
    put_slots,
    slot_products,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Half: the result is rounded, and everything before it is fp32.
CLOSE = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SCALE = 0.3
# Bits of packed keys and values (None: not packed) and a dtype have a compiled loop of their own,
# which takes seconds to compile. The default suite compiles three for packed slots.
FEW = [(3, torch.float32), ("4/3", torch.float32), (4, torch.bfloat16)]
REST = [(bits, dtype) for bits in (3, 4, 8, "4/3") for dtype in DTYPES if (bits, dtype) not in FEW]
REST += [("3/4", torch.float32), ("3/8", torch.bfloat16), ("8/3", torch.float32)]
FORMS = [*((None, dtype) for dtype in DTYPES), *FEW]
EACH_FORM = pytest.mark.parametrize(
    ("bits", "dtype"), FORMS + [pytest.param(*form, marks=pytest.mark.slow) for form in REST]
)


class Stored(NamedTuple):
    """Hold what `attend` is given, and the columns that its slots stand for."""

    q: torch.Tensor
    keys: torch.Tensor  # slots in segments
    values: torch.Tensor
    filled: torch.Tensor
    form: SlotForm
    columns: tuple[torch.Tensor, torch.Tensor]  # (R, C, d); NaN where nothing is filled

    def attend(self, version: Any = attend, state: ScoreState | None = None) -> torch.Tensor:
        found: torch.Tensor = version(*self[:4], SCALE, state, self.form)
        return found


def in_segments(columns: torch.Tensor, length: int) -> torch.Tensor:
    """Return (R, C, d) as (segments, R, length, d), with a gap after each segment.

    Slots beyond C are never filled, and hold NaN.
    """
    rows, slots, width = columns.shape
    segments = -(-slots // length)
    unread = -1 if columns.dtype == torch.int32 else math.nan
    memory = torch.full((segments, rows * length * width + 2), unread, dtype=columns.dtype)
    view = memory[:, :-2].view(segments, rows, length, width)
    for j in range(slots):
        view[j // length, :, j % length] = columns[:, j]
    return view


def whole_columns(filled: list[int], width: int, dtype: torch.dtype, count: int) -> WholeColumns:
    """Return whole columns of some slots of each row."""
    rows = len(filled)
    slots = torch.full((rows, count), -1, dtype=torch.int32)
    for r, n in enumerate(filled):
        some = torch.randperm(n)[: max(0, count - 1)]
        slots[r, torch.randperm(count)[: len(some)]] = some.int()
    numbers = (torch.randn(rows, count, width).to(dtype) for _ in range(2))
    ranges = torch.rand(rows, width) + 0.25
    return WholeColumns(torch.randn(rows, width).bfloat16(), ranges.bfloat16(), *numbers, slots)


def stored(
    filled: list[int],
    group: int,
    width: int,
    dtype: torch.dtype,
    bits: int | str | None = None,
    length: int = 7,
    count: int | None = None,
    sinks: bool = False,
) -> Stored:
    """count: whole columns beside packed slots; None: keys are packed as they are."""
    torch.manual_seed(width)
    rows = len(filled)
    q = torch.randn(rows, group, width).to(dtype)
    keys, values = (torch.randn(rows, max(filled) + 2, width).to(dtype) for _ in range(2))
    for r, n in enumerate(filled):
        keys[r, n:] = math.nan
        values[r, n:] = math.nan
    joining = 3 * torch.randn(rows, group) if sinks else None
    form = SlotForm(sinks=joining)
    areas = [keys, values]
    if bits is not None:
        packing = KVPacking.of(width, bits)
        whole = None if count is None else whole_columns(filled, width, dtype, count)
        form = SlotForm(packing, whole, joining)
        areas[0] = pack_columns(keys if whole is None else whole.smoothed(keys), packing.keys)
        areas[1] = pack_columns(values, packing.values)
        keys = unpack_columns(areas[0], packing.keys, torch.float32)
        values = unpack_columns(areas[1], packing.values, torch.float32)
        if whole is not None:
            keys = whole.restored(keys)
            for r, entry in (whole.slots >= 0).nonzero().tolist():
                keys[r, whole.slots[r, entry]] = whole.keys[r, entry].float()
                values[r, whole.slots[r, entry]] = whole.values[r, entry].float()
    counts = torch.tensor(filled, dtype=torch.int32)
    return Stored(q, *(in_segments(t, length) for t in areas), counts, form, (keys, values))


def slow_row(given: Stored, r: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the attention of a row's queries, its log-sum-exp, and each slot's probability."""
    keys, values = (t[r, : given.filled[r]].double() for t in given.columns)
    logits = SCALE * given.q[r].double() @ keys.T
    sinks = given.form.sinks
    none = torch.full((len(logits), 1), -torch.inf) if sinks is None else sinks[r].unsqueeze(1)
    logits = torch.cat([logits, none.double()], dim=1)
    p = logits.softmax(dim=1)[:, :-1]
    return p @ values, logits.logsumexp(dim=1), p


def make_state(rows: int, slots: int, decay: float = 1.0, per_query: bool = False) -> ScoreState:
    positions = torch.stack([torch.randperm(3 * slots)[:slots] for _ in range(rows)]).int()
    oldest = torch.randint(0, slots, (rows,)).int()
    scores = torch.randint(0, 3, (rows, slots)) / 4
    gains = 2 * torch.rand(rows)
    now = torch.randint(3 * slots, 4 * slots, (rows,)).int() if per_query else None
    victims = torch.full((rows,), -7).int()
    return ScoreState(scores, positions, oldest, oldest + slots, decay, gains, victims, now)


def victims(state: ScoreState, filled: list[int]) -> list[int]:
    found = []
    ranks = state.scores
    if state.now is not None:
        ranks = ranks / (state.now[:, None] + 1 - state.positions)
    for r, n in enumerate(filled):
        places = state.positions[r].tolist()
        allowed = [j for j in range(n) if state.oldest[r] <= places[j] <= state.newest[r]]
        found.append(min(allowed, key=lambda j: (float(ranks[r, j]), places[j]), default=-1))
    return found


ragged = st.lists(st.integers(1, 21), min_size=1, max_size=5)


@EACH_FORM
@settings(max_examples=60)
@given(
    ragged,
    st.integers(1, 9),
    st.sampled_from([1, 2, 6, 15, 16, 20, 33, 34, 64, 80, 128, 160, 256]),
    st.integers(1, 24),
    st.sampled_from([None, 0, 4, 8]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1.0, 0.5]),
    st.sampled_from([1, 2**20]),
)
def test_attention_scores_and_victims(
    bits: Any,
    dtype: torch.dtype,
    filled: list[int],
    group: int,
    width: int,
    length: int,
    count: int | None,
    sinks: bool,
    per_query: bool,
    decay: float,
    chunk: int,
) -> None:
    """Against the definition; the state and the log-sum-exp change no bit of the result.

    Torch operations work on some rows at a time.
    """
    given = stored(filled, group, width, dtype, bits, length, count, sinks)
    state = make_state(len(filled), max(filled) + 2, decay, per_query)
    other = replace(state, scores=state.scores.clone(), victims=state.victims.clone())
    before = state.scores.clone()
    found = given.attend(state=state)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_kernels, "PACKED_CHUNK", chunk)
        by_torch = given.attend(attend.torch, other)
    assert found.shape == given.q.shape and found.dtype == dtype
    # Loops read whole words. Torch operations round products, and packed keys, to the dtype.
    is_loop = dtype == torch.float32 or width % 2 == 0 or (bits is not None and count is None)
    rounded = 1e-5 if dtype == torch.float32 else 0.03
    for r, n in enumerate(filled):
        want, _, p = slow_row(given, r)
        size = max(1.0, float(want.abs().max()))
        close = CLOSE[dtype] * size * (1 if is_loop else 4)
        assert (found[r].double() - want).abs().max() < close
        assert (by_torch[r].double() - want).abs().max() < 16 * close
        received = (decay * before[r, :n] + state.gains[r] * p.sum(0)).float()
        for scored, off in ((state, 4e-5 if is_loop else rounded), (other, rounded)):
            assert torch.allclose(scored.scores[r, :n], received, atol=2 * off, rtol=off)
    for scored in (state, other):
        assert scored.victims.tolist() == victims(scored, filled)
    assert torch.equal(found, given.attend())
    for version in (attend_lse, attend_lse.torch) if bits is None else ():
        out, sums = version(*given[:4], SCALE, given.form.sinks)
        assert sums.shape == (len(filled), group) and sums.dtype == torch.float32
        exact = 1e-5 if is_loop and version is attend_lse else rounded
        for r in range(len(filled)):
            assert (sums[r] - slow_row(given, r)[1]).abs().max() < exact * 30
        assert torch.allclose(out, found, atol=0.1, rtol=0.1)
        assert version is attend_lse.torch or torch.equal(out, found)


@pytest.mark.parametrize(
    ("group", "width", "bits", "dtype"),
    [
        (1, 64, None, torch.bfloat16),
        (6, 34, None, torch.float32),
        (5, 8, None, torch.bfloat16),
        (6, 64, 4, torch.bfloat16),
        (5, 128, 3, torch.float32),
        (3, 96, "4/3", torch.float32),
        *(pytest.param(1, 64, *form, marks=pytest.mark.slow) for form in REST),
    ],
)
def test_segments_rows_and_threads_change_no_bit(
    group: int, width: int, bits: Any, dtype: torch.dtype
) -> None:
    filled = [50, 3, 103, 64, 1, 77, 12] * 40
    given = stored(filled, group, width, dtype, bits, 105)
    want = given.attend()
    for length in (1, 16, 64, 300):
        assert torch.equal(stored(filled, group, width, dtype, bits, length).attend(), want)
    areas = (t[:, 2:3].contiguous() for t in (given.keys, given.values))
    alone = attend(given.q[2:3], *areas, given.filled[2:3], SCALE, None, given.form)
    assert torch.equal(alone, want[2:3])
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        assert torch.equal(given.attend(), want)
    finally:
        torch.set_num_threads(before)


BOTH = pytest.mark.parametrize("version", [attend, attend.torch])


@BOTH
def test_ties_go_to_the_lowest_position_and_an_empty_range_to_nobody(version: Any) -> None:
    """A score that is no number is the lowest, so that every row has a slot for its next column."""
    q = torch.zeros(5, 1, 16)  # all slots receive the same
    q[4] = math.nan
    keys, values = torch.randn(2, 1, 5, 6, 16)
    filled = torch.tensor([6, 6, 2, 6, 6], dtype=torch.int32)
    positions = torch.tensor([[9, 4, 7, 2, 8, 3]] * 5, dtype=torch.int32)
    oldest = torch.tensor([0, 4, 0, 10, 3]).int()
    newest = torch.tensor([99, 8, 3, 99, 8]).int()
    scores = torch.zeros(5, 6)
    scores[1, 1] = 1.0
    state = ScoreState(scores, positions, oldest, newest, 1.0, torch.ones(5), torch.zeros(5).int())
    version(q, keys, values, filled, 1.0, state)
    assert state.victims.tolist() == [3, 2, -1, -1, 5] and scores[4].isnan().all()
    assert not scores[2, 2:].any()  # what is not filled keeps its score
    scores[0, 2] = math.nan
    version(q, keys, values, filled, 1.0, state)
    assert state.victims[0] == 2


@BOTH
def test_what_is_not_finite_shows_in_its_row(version: Any) -> None:
    given = stored([40, 40, 40], 1, 64, torch.float32, length=42)
    given.q.abs_()
    given.keys[0, 0, 17, 3] = math.nan
    given.keys[0, 1, 5] = math.inf
    out = given.attend(version)
    assert bool(out[:2].isnan().all()) and bool(out[2].isfinite().all())


def test_products_of_any_size() -> None:
    """Probabilities underflow. In fp16, products are scaled first: q.k of 204,800 is beyond it."""
    given = stored([30], 1, 64, torch.float32)
    given.q.mul_(160)
    assert (given.attend()[0] - slow_row(given, 0)[0]).abs().max() < 1e-3
    q, k = (torch.full((1, 1, 1, 128), 40.0, dtype=torch.float16) for _ in range(2))
    found = slot_products(q[0], k, None, 128**-0.5)
    assert found.item() == pytest.approx(128 * 1600 * 128**-0.5, rel=1e-3)


def largest_by_loops(given: Stored, r: int, share: float) -> torch.Tensor:
    """Compute a row by definition (FlexGen's _sparse_attention_value)."""
    p = slow_row(given, r)[2]
    keys = given.keys
    if given.form.packing is not None:
        keys = given.columns[0].nan_to_num().unsqueeze(0)
    products = slot_products(given.q, keys, given.filled, SCALE)[r]
    newest = p.shape[1] - 1
    kept = torch.zeros_like(p)
    kept[:, newest] = p[:, newest]
    for x in range(len(p)):  # in half precision, rounded products may be equal
        order = sorted(range(newest), key=lambda j: (-float(products[x, j]), j))
        chosen = order[: int(share * newest)]
        kept[x, chosen] = p[x, chosen]
    return kept @ given.columns[1][r, : newest + 1].double()


@pytest.mark.parametrize(
    ("bits", "dtype"),
    [*((None, dtype) for dtype in DTYPES), (8, torch.float32), ("4/3", torch.float32)],
)
@pytest.mark.parametrize(
    ("share", "group", "length", "sinks", "chunk"),
    [(0.2, 3, 7, True, 1), (0.001, 1, 30, False, 2**22), (0.5, 9, 5, False, 2**22)],
)
def test_the_largest_probabilities(
    share: float,
    group: int,
    length: int,
    sinks: bool,
    chunk: int,
    bits: Any,
    dtype: Any,
    monkeypatch: Any,
) -> None:
    monkeypatch.setattr(slot_kernels, "PACKED_CHUNK", chunk)
    given = stored([21, 1, 2, 8, 21], group, 16, dtype, bits, length, sinks=sinks)
    found = attend_largest(*given[:4], SCALE, share, given.form)
    assert found.shape == given.q.shape and found.dtype == dtype
    for r in range(5):
        want = largest_by_loops(given, r, share)
        close = 4 * CLOSE[dtype] * max(1.0, float(want.abs().max()))
        assert (found[r].double() - want).abs().max() < close


PLAIN = stored([5, 5], 1, 64, torch.float32)
PACKED = stored([5, 5], 1, 64, torch.float32, 4, count=4)
FOUR = PACKED.form.packing
BESIDE = PACKED.form.whole
assert BESIDE is not None
WEIGHED = make_state(2, 7, per_query=True)
assert WEIGHED.now is not None
REFUSED: list[tuple[Stored, ScoreState | None]] = [
    (PLAIN._replace(keys=PLAIN.keys[:, :1], values=PLAIN.values[:, :1]), None),
    (PLAIN._replace(filled=PLAIN.filled + 3), None),
    (PLAIN._replace(keys=PLAIN.keys.transpose(2, 3).contiguous().transpose(2, 3)), None),
    (PLAIN._replace(form=SlotForm(sinks=torch.zeros(2, 2))), None),
    *((PLAIN, make_state(*sizes)) for sizes in ((3, 7), (2, 4))),
    *((PLAIN, replace(WEIGHED, now=now)) for now in (WEIGHED.now[:1], WEIGHED.now.long())),
    (PACKED._replace(q=PACKED.q[..., :48]), None),
    *(
        (PACKED._replace(form=form), None)
        for form in (
            SlotForm(KVPacking.of(64, 8)),
            SlotForm(FOUR, BESIDE.map(lambda t: t[:1])),
            SlotForm(FOUR, replace(BESIDE, slots=BESIDE.slots.long())),
        )
    ),
]


@pytest.mark.parametrize(("given", "state"), REFUSED, ids=range(len(REFUSED)))
def test_what_does_not_go_together_is_refused(given: Stored, state: ScoreState | None) -> None:
    """Loops read by address, so a wrong shape would be memory out of bounds."""
    with pytest.raises(ValueError, match=r"^attend: "):
        given.attend(state=state)


# ---- columns into slots


def areas(rows: int, length: int, sizes: list[int], segments: int, is_packed: bool) -> Any:
    """Return keys and values, segment by segment in one memory.

    The memory of a single segment has another size for values than for keys, and other strides.
    """
    numbers = [rows * length * size for size in sizes]
    if segments == 1:
        parts = [torch.randn(1, count) * 9 for count in numbers]
    else:
        parts = list((torch.randn(segments, sum(numbers) + 5) * 9)[:, :-5].split(numbers, dim=1))
    kind = torch.int32 if is_packed else torch.float32
    return tuple(part.to(kind).unflatten(1, (rows, length, -1)) for part in parts)


@settings(max_examples=80)
@given(
    st.integers(1, 5),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([[1, 1], [3, 3], [64, 64], [8, 5]]),
    st.booleans(),
    st.data(),
)
def test_columns_go_to_their_slots_and_come_back(
    rows: int, segments: int, length: int, sizes: list[int], is_packed: bool, data: st.DataObject
) -> None:
    slots = segments * length
    count = data.draw(st.integers(1, slots))
    index = torch.stack([torch.randperm(slots)[:count] for _ in range(rows)])
    held = areas(rows, length, sizes, segments, is_packed)
    want = [t.clone() for t in held]
    columns = tuple(torch.randn(rows, count + 2, n).to(held[0].dtype)[:, :count] for n in sizes)
    again = data.draw(st.integers(0, count - 1))
    index[:, again] = index[:, -1]  # of columns for one slot the last stays
    put_slots(held, index, columns)
    for area, column in zip(want, columns, strict=True):
        for r in range(rows):
            for i, slot in enumerate(index[r].tolist()):
                area[slot // length, r, slot % length] = column[r, i]
    assert all(map(torch.equal, held, want))
    outs = tuple(torch.zeros(rows, count + 1, n).to(held[0].dtype) for n in sizes)
    get_last_slots(held, index, tuple(out[:, :count] for out in outs))  # type: ignore[arg-type]
    for out, column in zip(outs, columns, strict=True):
        for i in range(count + 1):
            is_last = i in (again, count - 1)
            assert torch.equal(out[:, i], column[:, -1]) if is_last else not out[:, i].any()


@pytest.mark.parametrize("wrong", ["columns' dtype", "slots' dtype", "columns apart"])
def test_what_the_loops_do_not_take_goes_through_torch(wrong: str) -> None:
    held = areas(2, 3, [8, 8], 1, False)
    column = torch.randn(2, 1, 16)[..., ::2] if wrong == "columns apart" else torch.randn(2, 1, 8)
    column = column.bfloat16().float()
    given = column.bfloat16() if wrong == "columns' dtype" else column
    slots = torch.tensor([[1], [2]])
    try:
        put_slots(held, slots.int() if wrong == "slots' dtype" else slots, (given, given))
    except (IndexError, RuntimeError):  # torch's own refusal: nothing was written by address
        return
    assert torch.equal(held[0][0, 1, 2], column[1, 0])


NEW = [(64, 4, torch.bfloat16), (80, "4/3", torch.float32), (128, 3, torch.float32)]
SLOW = [(64, 4, torch.float16), (33, 8, torch.bfloat16), (33, 8, torch.float32)]


@pytest.mark.parametrize(
    ("width", "bits", "dtype"),
    NEW + [pytest.param(*one, marks=pytest.mark.slow) for one in SLOW],
)
@pytest.mark.parametrize(("count", "segments"), [(0, 2), (8, 2), (8, 1)])
def test_new_columns_go_to_packed_slots_and_among_whole_ones(
    dtype: torch.dtype, width: int, bits: Any, count: int, segments: int
) -> None:
    """The result is what smoothing, packing and putting give one after the other."""
    rows = 37
    length = 14 // segments
    packing = KVPacking.of(width, bits)
    whole = whole_columns([12] * rows, width, dtype, count)
    slots = torch.randint(0, 14, (rows,))
    keys, values = torch.randn(2, rows, width).to(dtype)
    if count:
        slots[3] = int(whole.slots[3].max())  # its whole column is evicted
    places = torch.randint(-1, count, (rows,)) if count else torch.full((rows,), -1)
    held = areas(rows, length, [packing.keys.words, packing.values.words], segments, True)
    for version, packs in (
        (put_packed, (pack_columns, pack_columns.torch)),  # torch's if no loop reads such slots
        (put_packed.torch, (pack_columns.torch,)),
    ):
        found = [t.clone() for t in held]
        beside = whole.map(torch.clone)
        expected = whole.map(torch.clone)
        expected.enter(places, slots, keys, values)
        version(tuple(found), slots, (keys, values), SlotForm(packing, beside), places)  # type: ignore[arg-type]
        is_same = []
        for pack in packs:
            want = [t.clone() for t in held]
            packed = pack(expected.smoothed(keys), packing.keys), pack(values, packing.values)
            put_slots.torch(tuple(want), slots.unsqueeze(1), tuple(t.unsqueeze(1) for t in packed))  # type: ignore[arg-type]
            is_same.append(all(map(torch.equal, found, want)))
        assert any(is_same)
        assert all(map(torch.equal, vars(beside).values(), vars(expected).values()))
