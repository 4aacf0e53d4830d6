"""Decode attention: one query per head over KV slots, and column scores and a victim for eviction.

R = rows: sequences x kv-heads. g = query heads of one kv-head. d = head width. C = slots of a row,
which are stored in segments of S: slot j of row r is at [j // S, r, j % S]. W = words of a packed
slot. Softmax and sums are in fp32.

On the CPU, fp32 and bf16 use one compiled pass over the keys and one over the values, which
dequantise packed slots in registers. Everything else uses torch operations, which unpack
PACKED_CHUNK values at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from flexgen_h2o.core.packing import WORD, KVPacking
from flexgen_h2o.core.units import PACKED_CHUNK
from flexgen_h2o.kernels.ops import op
from flexgen_h2o.kernels.packed import pack_columns
from flexgen_h2o.kernels.slot_form import (
    WHOLE,
    SlotForm,
    softmax,
    unpacked,
    whole_addresses,
)
from flexgen_h2o.kernels.workspace import (
    element_of,
    is_compiled_beside_card,
    mismatch,
    parallel_rows,
)

if TYPE_CHECKING:
    from flexgen_h2o.kernels.compiled.slots import ColumnSlots, Scores

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class ScoreState:
    """Hold the column scores of R rows with C slots; `attend` updates them in place.

    All tensors are contiguous and on the device of the keys.
    """

    scores: torch.Tensor  # (R, C) fp32
    positions: torch.Tensor  # (R, C) int32, distinct within a row and not negative
    oldest: torch.Tensor  # (R,) int32, first position of the range in which a row may lose a slot
    newest: torch.Tensor  # (R,) int32, last position of that range
    decay: float
    gains: torch.Tensor  # (R,) fp32
    victims: torch.Tensor  # (R,) int32, written
    # (R,) int32, the position of each row's newest column: scores are compared over the number of
    # queries that saw their columns. None: scores are compared as they are.
    now: torch.Tensor | None = None

    def rows(self, some: slice) -> ScoreState:
        """Return the state of some of the rows."""
        now = None if self.now is None else self.now[some]
        return replace(self, now=now, **{name: getattr(self, name)[some] for name in _OF_ROWS})


# the order of fields in compiled.slots.Scores
_OF_ROWS = ("scores", "positions", "oldest", "newest", "victims", "gains")


@op
def attend(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    filled: torch.Tensor,
    scale: float,
    state: ScoreState | None = None,
    form: SlotForm = WHOLE,
) -> torch.Tensor:
    """Return attention of each row's queries over its slots 0..filled-1.

    Other slots are not read and may contain anything. With sinks, each query has one more column
    without a value. It takes a share of the attention; everything below is about the slots alone.

    q: (R, g, d). keys, values: (segments, R, S, d) in q's dtype, or packed, (segments, R, S, W)
    int32. Each segment is contiguous. The stride between segments is any number, the same for keys
    and values if they are not packed. filled: (R,) int32, from 1 to segments x S. Returns (R, g, d)
    in q's dtype. A row's result depends on that row alone, not on S, on other rows or on threads.

    state: it is updated, which changes no bit of the result. For all slots j < filled:

    - scores[r, j] = decay x scores[r, j] + gains[r] x (sum over g of the probability of slot j).
    - victims[r] = the slot j of the lowest new score, with NaN below all, among the slots with
      oldest <= positions[r, j] <= newest. If scores are equal, it is the slot of the lowest
      position. It is -1 if there is no such slot.

    With `now`, scores are compared over now[r] + 1 - positions[r, j].

    Torch operations round products to q's dtype. They unpack packed slots to q's dtype, some rows
    at a time.
    """
    packing = form.packing
    if packing is None:
        products = slot_products(q, keys, filled, scale)
        p = softmax(products, form.sinks)
        if state is not None:
            _update_scores(state, p, filled)
        return _mix(p, values, filled).to(q.dtype)
    out = torch.empty_like(q)
    step = max(1, PACKED_CHUNK // (keys.shape[0] * keys.shape[2] * packing.width))
    for a in range(0, len(q), step):
        rows = slice(a, a + step)
        own = None if state is None else state.rows(rows)
        own_form = form.rows(rows)
        k, v = unpacked(keys[:, rows], values[:, rows], own_form, q.dtype)
        out[rows] = attend.torch(
            q[rows], k, v, filled[rows], scale, own, SlotForm(sinks=own_form.sinks)
        )
    return out


@op
def attend_lse(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    filled: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> Pair:
    """Return `attend`, bit for bit, and the log-sum-exp, (R, g) fp32.

    The log-sum-exp is the natural logarithm of the sum of exp(scale x q.k) over the slots, and of
    exp(sink). filled: None if all slots are filled. sinks: as in a SlotForm.
    """
    products = slot_products(q, keys, filled, scale)
    lse = torch.logsumexp(products, dim=2)
    lse = lse if sinks is None else torch.logaddexp(lse, sinks)
    return _mix(products.sub_(lse.unsqueeze(2)).exp_(), values, filled).to(q.dtype), lse


def attend_largest(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    filled: torch.Tensor,
    scale: float,
    share: float,
    form: SlotForm = WHOLE,
) -> torch.Tensor:
    """Return `attend` over only the values with the largest probabilities.

    It is FlexGen's `--attn-sparsity`.

    Slots contain columns in their order, the newest last. In a row with n columns, each query uses
    the newest column, and of the others the int(share x (n - 1)) with the largest probabilities. If
    probabilities are equal, the older column is used. The softmax is over all columns, and the
    remaining probabilities are not renormalised.

    It is computed in torch operations, some rows at a time.
    """
    out = torch.empty_like(q)
    step = max(1, PACKED_CHUNK // (keys.shape[0] * keys.shape[2] * q.shape[2]))
    for a in range(0, len(q), step):
        rows = slice(a, a + step)
        own_form = form.rows(rows)
        k, v = unpacked(keys[:, rows], values[:, rows], own_form, q.dtype)
        p = softmax(slot_products(q[rows], k, filled[rows], scale), own_form.sinks)
        p.masked_fill_(~_are_largest(p, filled[rows], share), 0)
        out[rows] = _mix(p, v, filled[rows]).to(q.dtype)
    return out


def _are_largest(p: torch.Tensor, filled: torch.Tensor, share: float) -> torch.Tensor:
    """Return which probabilities `attend_largest` keeps, (R, g, longest) bool."""
    newest = (filled.long() - 1).view(-1, 1, 1)
    counts = (share * newest.double()).long()
    others = p.scatter(2, newest.expand(-1, p.shape[1], 1), -1.0)
    order = others.sort(dim=2, descending=True, stable=True).indices
    places = torch.arange(p.shape[2], device=p.device)
    ranks = torch.empty_like(order).scatter_(2, order, places.expand_as(order))
    return (ranks < counts) | (places == newest)


def _update_scores(state: ScoreState, p: torch.Tensor, filled: torch.Tensor) -> None:
    """Update scores and victims as in `attend`. p: (R, g, longest)."""
    longest = p.shape[2]
    scores = state.scores[:, :longest]
    positions = state.positions[:, :longest]
    used = torch.arange(longest, device=p.device) < filled.unsqueeze(1)
    scores.copy_(
        torch.where(used, state.decay * scores + state.gains.unsqueeze(1) * p.sum(dim=1), scores)
    )
    allowed = (
        used & (positions >= state.oldest.unsqueeze(1)) & (positions <= state.newest.unsqueeze(1))
    )
    if state.now is not None:
        seen = (state.now.unsqueeze(1) + 1 - positions).masked_fill(~allowed, 1)
        scores = scores / seen.float()
    ranks = scores.masked_fill(scores.isnan(), float("-inf"))
    lowest = ranks.masked_fill(~allowed, float("inf")).amin(dim=1, keepdim=True)
    candidates = allowed & (ranks == lowest)
    earliest = positions.masked_fill(~candidates, torch.iinfo(torch.int32).max).argmin(dim=1)
    state.victims.copy_(torch.where(candidates.any(dim=1), earliest, -1))


def slot_products(
    q: torch.Tensor, keys: torch.Tensor, filled: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Return scale x q.k, (R, g, longest) fp32, with -inf for slots from `filled` on.

    filled: None if all slots are filled.
    """
    segments, _, length, _ = keys.shape
    longest = segments * length if filled is None else int(filled.max())
    # q.k of some models exceeds the largest fp16 number; scale x q.k does not
    if q.dtype == torch.float16:
        q = q * scale
        scale = 1.0
    parts = [
        torch.bmm(q, keys[i, :, : longest - i * length].transpose(1, 2))
        for i in range(-(-longest // length))
    ]
    products = torch.cat(parts, dim=2).float().mul_(scale)
    if filled is None:
        return products
    empty = torch.arange(longest, device=q.device) >= filled.view(-1, 1, 1)
    return products.masked_fill_(empty, float("-inf"))


def _mix(p: torch.Tensor, values: torch.Tensor, filled: torch.Tensor | None) -> torch.Tensor:
    """Return the values weighted with p, (R, g, d) fp32.

    A value of weight 0 can be NaN, so slots that are not filled are first set to 0, in a copy of
    some rows at a time.
    """
    length = values.shape[2]
    longest = p.shape[2]
    least = longest if filled is None else int(filled.min())
    out = torch.zeros(*p.shape[:2], values.shape[3], device=p.device, dtype=torch.float32)
    for start in range(0, longest, length):
        end = min(longest, start + length)
        part = values[start // length, :, : end - start]
        of_part = p[:, :, start:end].to(values.dtype)
        if filled is None or least >= end:
            out += torch.bmm(of_part, part)
            continue
        empty = torch.arange(start, end, device=p.device) >= filled.unsqueeze(1)
        step = max(1, PACKED_CHUNK // (part.shape[1] * part.shape[2]))
        for a in range(0, len(p), step):
            rows = slice(a, a + step)
            out[rows] += torch.bmm(
                of_part[rows], part[rows].masked_fill(empty[rows].unsqueeze(2), 0)
            )
    return out


def _are_read_by_loops(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    filled: torch.Tensor | None,
    scale: float,
    state: ScoreState | None = None,
    form: SlotForm = WHOLE,
) -> bool:
    """Return whether the compiled loops can read these tensors.

    They read slots of whole words in the CPU's memory.
    """
    width = q.shape[2] * q.itemsize
    if keys.dtype == torch.int32:  # packed slots
        return is_compiled_beside_card(q) and (form.whole is None or width % WORD == 0)
    places = width, keys.stride(0) * q.itemsize, *(t.data_ptr() for t in (q, keys, values))
    return is_compiled_beside_card(q) and not any(place % WORD for place in places)


def _attend_loop(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    filled: torch.Tensor,
    scale: float,
    state: ScoreState | None = None,
    form: SlotForm = WHOLE,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend in the compiled loops. lse: written if given."""
    from flexgen_h2o.kernels.compiled import slots

    packing = form.packing
    q = q.contiguous()
    filled = filled.contiguous()
    most = int(filled.max())
    _check_slots((q, keys, values, filled), most, packing)
    sinks = form.sinks
    if sinks is not None and (
        (sinks.shape, sinks.dtype) != (q.shape[:2], torch.float32) or not sinks.is_contiguous()
    ):
        raise mismatch("attend: q, sinks", q, sinks)
    out = torch.empty_like(q)
    addresses = [0 if t is None else t.data_ptr() for t in (q, filled, out, lse, sinks)]
    areas = [
        slots.Area(
            t.data_ptr(),
            t.shape[3] * t.itemsize // WORD,
            t.shape[2],
            t.stride(0) * t.itemsize // WORD,
        )
        for t in (keys, values)
    ]
    whole_format = slots.format_of(q.dtype, q.shape[2])
    forms = whole_format, whole_format, whole_format
    if packing is not None:
        of_keys = slots.packed_format(packing.keys)
        forms = of_keys, slots.packed_format(packing.values), whole_format
    loop = partial(
        slots.attend_rows,
        element_of(q.dtype),
        forms,
        tuple(areas),
        slots.AttendJob._make([q.shape[1], most, *addresses, float(scale)]),
        slots.NO_SCORES if state is None else _score_addresses(state, len(q), most),
        slots.NO_WHOLE if form.whole is None else whole_addresses(form.whole, q),
    )
    parallel_rows(loop, len(q), 2 * most * areas[0].words * WORD)
    return out


attend.loop_if(_are_read_by_loops)(_attend_loop)


@attend_lse.loop_if(lambda q, keys, values, *_: _are_read_by_loops(q, keys, values, None, 1.0))
def _attend_lse_loop(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    filled: torch.Tensor | None,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> Pair:
    if filled is None:
        most = keys.shape[0] * keys.shape[2]
        filled = torch.full((len(q),), most, dtype=torch.int32, device="cpu")
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device="cpu")
    form = SlotForm(sinks=sinks)
    return _attend_loop(q, keys, values, filled, scale, form=form, lse=lse), lse


# The loops read by address, so a wrong shape would be memory out of bounds. All shapes are checked.


def _check_slots(tensors: tuple[torch.Tensor, ...], most: int, packing: KVPacking | None) -> None:
    """Raise ValueError if shapes or dtypes do not fit.

    tensors: q, keys, values, filled; most: the largest number in `filled`.
    """
    q, keys, values, filled = tensors
    segments, _, length, _ = keys.shape
    width = q.shape[2]
    sizes = (q.shape[2], q.shape[2])
    dtype = q.dtype
    if packing is not None:
        width = packing.width
        sizes = (packing.keys.words, packing.values.words)
        dtype = torch.int32
    ok = width == q.shape[2] and most <= segments * length
    for t, size in zip((keys, values), sizes, strict=True):
        ok = (
            ok
            and t.shape == (segments, len(q), length, size)
            and t.dtype == dtype
            and t[0].is_contiguous()
        )
    ok = ok and (packing is not None or segments == 1 or keys.stride(0) == values.stride(0))
    if not ok or filled.dtype != torch.int32 or filled.shape != (len(q),):
        raise mismatch("attend: q, keys, values, filled", *tensors)


def _score_addresses(state: ScoreState, rows: int, most: int) -> Scores:
    """Return the addresses of the state's tensors.

    Raises ValueError if their shapes or dtypes do not fit.
    """
    from flexgen_h2o.kernels.compiled.slots import Scores

    columns = state.scores.shape[1]
    for name in _OF_ROWS:
        tensor = getattr(state, name)
        shape = (rows, columns) if name in ("scores", "positions") else (rows,)
        dtype = torch.float32 if name in ("scores", "gains") else torch.int32
        if (
            (tuple(tensor.shape), tensor.dtype) != (shape, dtype)
            or not tensor.is_contiguous()
            or columns < most
        ):
            raise ValueError(
                f"attend: {name} is {tuple(tensor.shape)} {tensor.dtype}, not {shape} {dtype}"
            )
    now = state.now
    if now is not None and (
        (now.shape, now.dtype) != ((rows,), torch.int32) or not now.is_contiguous()
    ):
        raise mismatch("attend: now", now)
    addresses = [getattr(state, name).data_ptr() for name in _OF_ROWS]
    return Scores._make(
        [columns, *addresses, 0 if now is None else now.data_ptr(), float(state.decay)]
    )


@op
def put_slots(areas: Pair, slots: torch.Tensor, columns: Pair) -> None:
    """Set areas[slots[r, i]] = columns[r, i] for all rows r, in the order of i.

    areas: keys and values, (segments, R, S, d); slots: (R, n) int64; columns: (R, n, d) of the
    areas' dtype. d may differ for keys and values. All tensors are on one device. With torch
    operations, any of several columns for one slot may remain.

    On the CPU, small torch operations with an index per number would take most of the time.
    """
    index = _index(areas[0], slots)
    for area, column in zip(areas, columns, strict=True):
        area[index] = column


@op
def get_last_slots(areas: Pair, slots: torch.Tensor, columns: Pair) -> None:
    """Copy slot slots[r, -1] to the last columns[r, i], and to earlier ones of the same slot.

    Arguments as in `put_slots`.
    """
    row, entry = (slots == slots[:, -1:]).nonzero(as_tuple=True)
    for area, column in zip(areas, columns, strict=True):
        column[row, entry] = area[_index(area, slots[:, -1:])].squeeze(1)[row]


@op
def put_packed(
    areas: Pair, slots: torch.Tensor, columns: Pair, form: SlotForm, places: torch.Tensor
) -> None:
    """Write the new columns of a decode step to packed slots, and to their whole columns.

    areas: keys and values, (segments, R, S, W) int32; slots: (R,) int64; columns: keys and values
    (R, d), not packed; form: a packing and whole columns; places: (R,) int64, index among the whole
    columns, -1 for none. All tensors are on one device. With torch operations, a scale or a value
    may differ by a rounding.
    """
    keys, values = columns
    packing = form.packing
    whole = form.whole
    assert packing is not None and whole is not None
    whole.enter(places, slots, keys, values)
    packed_keys = pack_columns.torch(whole.smoothed(keys), packing.keys)
    packed_values = pack_columns.torch(values, packing.values)
    put_slots.torch(
        areas, slots.unsqueeze(1), (packed_keys.unsqueeze(1), packed_values.unsqueeze(1))
    )


def _index(
    area: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    per_segment = area.shape[2]
    rows = torch.arange(len(slots), device=slots.device).unsqueeze(1)
    return slots // per_segment, rows, slots % per_segment


def _are_copied_by_loops(areas: Pair, slots: torch.Tensor, columns: Pair) -> bool:
    """Return whether the compiled loops can copy these columns to slots, or back."""
    return _are_found_by_loops(areas, slots) and all(
        column.is_cpu
        and column.dtype == area.dtype
        and column.shape == (*slots.shape, area.shape[3])
        and column[0].is_contiguous()
        for area, column in zip(areas, columns, strict=True)
    )


def _are_found_by_loops(areas: Pair, slots: torch.Tensor) -> bool:
    """Return whether the compiled loops can find these slots: in the CPU's memory, by address."""
    keys, values = areas
    return (
        slots.is_cpu
        and slots.dtype == torch.int64
        and slots[0].is_contiguous()
        and keys.dtype == values.dtype
        and keys.shape[:3] == values.shape[:3]
        and keys.shape[1] == len(slots)
        # Keys and values of one segment may take different bytes: the step to the next is not used.
        and (len(keys) == 1 or keys.stride(0) == values.stride(0))
        and all(area.is_cpu and area[0].is_contiguous() for area in areas)
    )


def _column_slots(areas: Pair, slots: torch.Tensor, columns: Pair) -> ColumnSlots:
    """Return the sizes and addresses with which the loops copy columns."""
    from flexgen_h2o.kernels.compiled.slots import ColumnSlots

    keys, values = areas
    column_keys, column_values = columns
    item = keys.itemsize
    return ColumnSlots(
        keys.data_ptr(),
        values.data_ptr(),
        keys.shape[2],
        keys.stride(0) * item,
        keys.shape[3] * item,
        values.shape[3] * item,
        slots.data_ptr(),
        slots.stride(0) * slots.itemsize,
        column_keys.data_ptr(),
        column_values.data_ptr(),
        column_keys.stride(0) * item,
        column_values.stride(0) * item,
    )


@put_slots.loop_if(_are_copied_by_loops)
def _put_loop(areas: Pair, slots: torch.Tensor, columns: Pair) -> None:
    from flexgen_h2o.kernels.compiled import slots as loops

    job = _column_slots(areas, slots, columns)
    rows, count = slots.shape
    row_bytes = 2 * count * (job.key_bytes + job.value_bytes)
    parallel_rows(partial(loops.put, job, count), rows, row_bytes)


@get_last_slots.loop_if(_are_copied_by_loops)
def _get_last_loop(areas: Pair, slots: torch.Tensor, columns: Pair) -> None:
    from flexgen_h2o.kernels.compiled import slots as loops

    job = _column_slots(areas, slots, columns)
    rows, count = slots.shape
    parallel_rows(partial(loops.get, job, count - 1), rows, 2 * (job.key_bytes + job.value_bytes))


@put_packed.loop_if(
    lambda areas, slots, columns, *_: (
        is_compiled_beside_card(columns[0]) and _are_found_by_loops(areas, slots.unsqueeze(1))
    )
)
def _put_packed_loop(
    areas: Pair, slots: torch.Tensor, columns: Pair, form: SlotForm, places: torch.Tensor
) -> None:
    from flexgen_h2o.kernels.compiled import slots as loops

    packing = form.packing
    whole = form.whole
    rows = len(slots)
    assert packing is not None and whole is not None
    keys, values, places = (t.contiguous() for t in (*columns, places))
    if not (keys.shape == values.shape == (rows, packing.width) and keys.dtype == values.dtype):
        raise mismatch("put_packed: keys, values", keys, values)
    if (places.shape, places.dtype) != ((rows,), torch.int64):
        raise mismatch("put_packed: slots, places", slots, places)
    packed_keys, packed_values = (
        areas[0].new_empty(rows, 1, of.words) for of in (packing.keys, packing.values)
    )
    packed = packed_keys, packed_values
    if not _are_copied_by_loops(areas, slots.unsqueeze(1), packed):
        raise mismatch("put_packed: packed keys, values", *areas)
    new = keys.data_ptr(), values.data_ptr(), places.data_ptr()
    formats = map(loops.packed_format, (packing.keys, packing.values))
    job = _column_slots(areas, slots.unsqueeze(1), packed)
    of_rows = job, new, whole_addresses(whole, keys.unsqueeze(1))
    loop = partial(loops.put_new, element_of(keys.dtype), tuple(formats), *of_rows)
    parallel_rows(loop, rows, 16 * packing.width * keys.itemsize)
