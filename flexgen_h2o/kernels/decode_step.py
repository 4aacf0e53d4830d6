"""Run a decode step of the rows of a KV unit on a card, in one launch.

New columns are written to their slots, queries attend over the filled slots, scores grow, and each
row names its next victim. R, g, d, C, S, W: as in kernels/slots.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flexgen_h2o.core.packing import KVPacking, SlotPacking
from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.ops import op
from flexgen_h2o.kernels.slot_form import WHOLE, SlotForm, WholeColumns, joined
from flexgen_h2o.kernels.slots import (
    ScoreState,
    attend,
    attend_lse,
    put_packed,
    put_slots,
)

FILLED, SLOT, POSITION, OLDEST, NEWEST, GAIN, PLACE = range(7)

InFront = tuple[torch.Tensor | None, torch.Tensor]  # type of StepSlots.before


@dataclass(frozen=True)
class StepSlots:
    """Describe some rows of a KV unit in a decode step.

    R rows; a sequence has `kv_heads` of the unit's rows. scores, positions and victims are as in
    ScoreState; either all are given or none.
    """

    keys: torch.Tensor  # (segments, R, S, d), or packed (segments, R, S, W)
    values: torch.Tensor  # as `keys`
    first: int  # row of the unit that is row 0 here
    kv_heads: int
    # (7, sequences) int32 of the whole unit, by the constants above: FILLED, slots filled including
    # the new column; SLOT, its slot, or -1 for the slot of the row's victim; POSITION, its
    # position; OLDEST and NEWEST, the range of positions (inclusive) in which a row may lose a
    # slot; GAIN, the gain of a score, as fp32 bits; PLACE, its index among whole columns, or -1.
    state: torch.Tensor
    taken: torch.Tensor  # (R,) int64, written: the slots of the new columns
    scores: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    victims: torch.Tensor | None = None
    decay: float = 1.0
    per_query: bool = False  # compare scores over the number of queries that saw their columns
    form: SlotForm = WHOLE  # how slots are stored; without sinks; if packed, with WholeColumns
    # Attention over a common prefix or a sink in front of the slots: (unit's rows, g, d) in q's
    # dtype, None for a sink, which has no values; and its log-sum-exp, (unit's rows, g) fp32. With
    # values, nothing is packed or scored.
    before: InFront | None = None


@op
def attend_step(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: StepSlots,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Run the decode step for the rows of `slots`, and write their attention to `out`.

    q, out: (sequences, heads, d), k, v: (sequences, kv_heads, d), of all rows of the unit, with
    adjacent heads. Only rows of `slots` are written. The result is that of `slots.attend`; q.k is
    summed in fp32.
    """
    rows = slots.keys.shape[1]
    kv_heads = slots.kv_heads
    width = q.shape[2]
    unit_rows = torch.arange(slots.first, slots.first + rows, device=q.device)
    state = slots.state[:, unit_rows // kv_heads]
    here = torch.arange(rows, device=q.device)
    taken = state[SLOT].long()
    if slots.victims is not None:
        taken = torch.where(taken < 0, slots.victims.long(), taken)
    slots.taken.copy_(taken)
    queries, keys, values, result = (
        t.view(len(t) * kv_heads, -1, width)[slots.first : slots.first + rows]
        for t in (q, k, v, out)
    )
    areas = slots.keys, slots.values
    if slots.form.packing is None:
        put_slots.torch(areas, taken.unsqueeze(1), (keys, values))
    else:
        columns = keys.squeeze(1), values.squeeze(1)
        put_packed.torch(areas, taken, columns, slots.form, state[PLACE])
    scores = None
    if slots.scores is not None and slots.positions is not None and slots.victims is not None:
        slots.positions[here, taken] = state[POSITION]
        slots.scores[here, taken] = 0.0
        gains = state[GAIN].view(torch.float32)
        recorded = slots.scores, slots.positions, state[OLDEST], state[NEWEST]
        scores = ScoreState(
            *recorded,
            slots.decay,
            gains,
            slots.victims,
            state[POSITION] if slots.per_query else None,
        )
    of_slots = (queries, slots.keys, slots.values, state[FILLED], scale)
    form = slots.form
    if slots.before is not None:
        elsewhere, lse = (None if t is None else t[unit_rows] for t in slots.before)
        if elsewhere is not None and lse is not None:
            result.copy_(joined((elsewhere, lse), attend_lse.torch(*of_slots)))
            return
        form = replace(form, sinks=lse)
    result.copy_(attend.torch(*of_slots, scores, form))


@attend_step.kernel
def _attend_step_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: StepSlots,
    scale: float,
    out: torch.Tensor,
) -> None:
    segments, rows, length, _ = slots.keys.shape
    packing = slots.form.packing
    whole = slots.form.whole
    group = q.shape[1] // k.shape[1]
    width = q.shape[2]
    assert all(t.stride()[1:] == (width, 1) for t in (q, k, v, out))
    columns = segments * length
    products = slots.state
    if slots.scores is not None:
        columns = slots.scores.shape[1]
        products = torch.empty(rows, group, columns, dtype=torch.float32, device=q.device)
    unused = slots.state  # placeholder for arguments that the kernel does not read
    recorded = slots.scores, slots.positions, slots.victims
    of_slots = [unused if t is None else t for t in recorded]
    gains = slots.state[GAIN].view(torch.float32)
    before = [unused if t is None else t.contiguous() for t in slots.before or (None, None)]
    tensors = (
        q,
        k,
        v,
        out,
        slots.keys,
        slots.values,
        slots.state,
        gains,
        *of_slots,
        products,
        slots.taken,
        *before,
        *whole_tensors(whole),
    )
    strides = *(t.stride(0) for t in (q, k, v, out)), segment_step(slots.keys)
    sizes = (
        *strides,
        slots.state.shape[1],
        slots.first,
        slots.kv_heads,
        length,
        columns,
        scale,
        slots.decay,
        *packed_sizes(slots.form, slots.values),
    )
    windows = 0 if whole is None else whole.slots.shape[1]
    constants = {
        "G": group,
        "GROUP": triton.power_of_two(group, 16),
        "D": width,
        "WIDTH": triton.power_of_two(width, 16),
        "BLOCK": columns_at_a_time(q.dtype, width),
        "RECORDS": slots.scores is not None,
        "PER_QUERY": slots.per_query,
        "BEFORE": 0 if slots.before is None else 1 if slots.before[0] is None else 2,
        "WINDOW": triton.power_of_two(max(1, windows), 16),
        **packing_constants(packing),
    }
    if packing is not None:
        # words are loaded once for each of their numbers; with more stages they would not fit the
        # shared memory
        constants["num_stages"] = 1
    triton.launch("slots.attend_step", (rows,), (*tensors, *sizes), **constants)


def segment_step(area: torch.Tensor) -> int:
    """Return the stride from a segment to the next, or 0 if there is only one.

    The stride of a single segment may be any number, but a kernel is compiled for multiples of 16.
    """
    return area.stride(0) if len(area) > 1 else 0


def whole_tensors(whole: WholeColumns | None) -> Sequence[torch.Tensor | None]:
    """Return what kernels read and write beside packed slots, or as many times None."""
    return (None,) * 5 if whole is None else tuple(vars(whole).values())


def packed_sizes(form: SlotForm, values: torch.Tensor) -> Sequence[int | None]:
    """Return the sizes that kernels for packed slots need, or as many times None.

    They are the number of whole columns, the stride between segments of values, and the words of
    lower bits, of codes and of a slot, for keys, then for values.
    """
    packing = form.packing
    if packing is None or form.whole is None:
        return (None,) * 8
    words = [(of.low_words, of.value_words, of.words) for of in (packing.keys, packing.values)]
    return form.whole.slots.shape[1], segment_step(values), *words[0], *words[1]


def packing_constants(packing: KVPacking | None) -> dict[str, int]:
    """Return the constants for which kernels are compiled; all are 0 if slots are not packed."""
    found: dict[str, int] = {}
    for letter, name in (("K", "keys"), ("V", "values")):
        of: SlotPacking | None = getattr(packing, name, None)
        found[f"{letter}_BITS"] = 0 if of is None else of.bits
        found[f"{letter}_SHARING"] = 0 if of is None else of.group
        found[f"{letter}_GROUPS"] = 0 if of is None else of.groups
    return found


def columns_at_a_time(dtype: torch.dtype, width: int) -> int:
    """Return how many columns a row attends to at a time.

    They must fit the shared memory; fp32 products and wide heads need much of it.
    """
    return max(
        16, (16 if dtype == torch.float32 else 64) // max(1, triton.power_of_two(width) // 128)
    )
