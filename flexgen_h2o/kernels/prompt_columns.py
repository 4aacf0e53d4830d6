"""Choose which KV entries of prompts stay, and put them into slots.

Slots may be packed; then WholeColumns beside the packed slots are filled too. On a card each step
is one launch, also for prompts of different lengths. R, d, C, S, W: as in kernels/slots.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

import torch

from flexgen_h2o.core.units import PACKED_CHUNK
from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.decode_step import (
    packed_sizes,
    packing_constants,
    segment_step,
    whole_tensors,
)
from flexgen_h2o.kernels.ops import op
from flexgen_h2o.kernels.packed import pack_columns
from flexgen_h2o.kernels.slot_form import WHOLE, SlotForm, WholeColumns
from flexgen_h2o.kernels.slots import put_slots
from flexgen_h2o.kernels.workspace import is_compiled_beside_card

# least range of a key's channel, as a share of the mean range of the row's channels
MIN_RANGE = 1 / 16
_RANKS = 1024  # ranks that are compared at a time
_COLUMNS = 64  # columns that are put at a time
_NUMBERS = 2048  # numbers that are packed at a time


@op
def choose_kept(rank: torch.Tensor, begin: int, end: int, count: int) -> torch.Tensor:
    """Return the columns that stay, (b, kv_heads, count) int64, ascending.

    These are the columns outside [begin, end), and the highest-ranked columns inside.

    rank: (b, kv_heads, n) fp32, n > count. If ranks are equal, the newer column stays; NaN ranks
    lowest.
    """
    most = torch.finfo(rank.dtype).max
    n = rank.shape[2]
    finite = rank[..., begin:end].nan_to_num(nan=-most, posinf=most, neginf=-most)
    newest_first = finite.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    chosen = (end - 1 - newest_first[..., : count - n + end - begin]).sort(dim=-1).values
    ends = (
        torch.arange(*of, device=rank.device).expand(*rank.shape[:2], -1)
        for of in ((0, begin), (end, n))
    )
    before, behind = ends
    return torch.cat([before, chosen, behind], dim=-1)


@choose_kept.kernel
def _choose_kernel(rank: torch.Tensor, begin: int, end: int, count: int) -> torch.Tensor:
    tokens = rank.shape[2]
    line = triton.PromptPlace(0, tokens, tokens, 0, count, begin, end)
    return _choose_packed_kernel(rank, (line,) * len(rank))


@op
def choose_packed(rank: torch.Tensor, lines: triton.PromptPlaces) -> torch.Tensor:
    """Run `choose_kept` on a card for a batch, or for packed prompts (adjacent, b = 1).

    It is one launch. Returns (b, kv_heads, all that stay) int64; numbers count from 0 in each
    prompt. A prompt whose columns all stay has no ranked columns.
    """
    kept = rank.new_empty(*rank.shape[:2], lines[-1].stays.stop, dtype=torch.int64)
    for i, line in enumerate(lines):
        batch = min(i, len(rank) - 1)
        own = rank[batch, :, line.tokens].unsqueeze(0)
        kept[batch, :, line.stays] = choose_kept.torch(own, line.begin, line.end, line.kept)[0]
    return kept


@choose_packed.kernel
def _choose_packed_kernel(rank: torch.Tensor, lines: triton.PromptPlaces) -> torch.Tensor:
    rank = rank.contiguous()
    kv_heads = rank.shape[1]
    kept = rank.new_empty(*rank.shape[:2], lines[-1].stays.stop, dtype=torch.int64)
    sizes = *triton.batch_strides(rank, 2), *triton.batch_strides(kept, 2), kv_heads
    arguments = rank, kept, triton.prompt_table(lines, rank.device), *sizes
    triton.launch("prompts.choose", (len(lines) * kv_heads,), arguments, BLOCK=_RANKS)
    return kept


@dataclass(frozen=True)
class PromptSlots:
    """Describe some rows of a KV unit to which columns of prompts are written.

    All tensors are on the device of the prompts' columns.
    """

    keys: torch.Tensor  # (segments, R, S, d), or packed (segments, R, S, W)
    values: torch.Tensor  # as `keys`
    first: int  # row of the prompts (of b x kv_heads) that is row 0 here
    form: SlotForm = WHOLE  # how slots are stored; if packed, with WholeColumns
    window: int = 0  # newest tokens that stay whole beside packed slots
    positions: torch.Tensor | None = None  # (R, C) int32, written; None if `scores` is None
    scores: torch.Tensor | None = None  # (R, C) fp32, written; None if scores are not recorded
    smooths: bool = True  # centre and scale packed keys per channel, by the prompt (WholeColumns)

    def of_prompts(self, first: int, count: int, kv_heads: int, window: int) -> PromptSlots:
        """Return the rows of prompts [first, first + count), with their own window."""
        start = first * kv_heads - self.first
        here = slice(max(0, start), max(0, start + count * kv_heads))
        positions, scores = (None if t is None else t[here] for t in (self.positions, self.scores))
        return PromptSlots(
            self.keys[:, here],
            self.values[:, here],
            max(0, -start),
            self.form.rows(here),
            window,
            positions,
            scores,
            self.smooths,
        )


def are_put_together(k: torch.Tensor, area: torch.Tensor) -> bool:
    """Return whether columns of all rows of prompts are put into slots at once.

    The CPU's loops pack and copy row by row.
    """
    return k.device == area.device and not is_compiled_beside_card(k)


@op
def put_prompts(
    k: torch.Tensor,
    v: torch.Tensor,
    kept: torch.Tensor,
    scores: torch.Tensor | None,
    slots: PromptSlots,
    lines: triton.PromptPlaces | None = None,
) -> None:
    """Write columns of prompts to the slots 0, 1, ... of their rows.

    It is one launch, or two if slots are packed.

    k, v: (b, n, kv_heads, d), with the numbers of a head adjacent. kept: (b, kv_heads, count)
    int64, ascending, the tokens whose columns stay. scores: (b, kv_heads, n) fp32, if slots record
    scores. lines: packed prompts (adjacent, b = 1) of any lengths, each with its own window; `kept`
    is then from `choose_packed`.
    """
    prompts, tokens = k.shape[:2]
    lines = lines or _same_lines(prompts, tokens, kept, slots)
    is_packed = len(lines) > len(k)
    first = 0
    for line, same in groupby(lines):  # neighbours with the same window are put together
        count = len(list(same))
        batch = slice(None) if is_packed else slice(first, first + count)
        part = slots.of_prompts(first, count, k.shape[2], line.window)
        if part.keys.shape[1]:
            _put_prompts(
                k[batch, line.tokens],
                v[batch, line.tokens],
                kept[batch, :, line.stays],
                None if scores is None else scores[batch, :, line.tokens],
                part,
            )
        first += count


def _same_lines(
    prompts: int, tokens: int, kept: torch.Tensor, slots: PromptSlots
) -> triton.PromptPlaces:
    """Return the places of a batch of whole prompts."""
    line = triton.PromptPlace(0, tokens, tokens, 0, kept.shape[2], window=slots.window)
    return (line,) * prompts


def _put_prompts(
    k: torch.Tensor,
    v: torch.Tensor,
    kept: torch.Tensor,
    scores: torch.Tensor | None,
    slots: PromptSlots,
) -> None:
    """Put prompts of a batch, PACKED_CHUNK numbers of keys at a time."""
    kv_heads, count = kept.shape[1:]
    rows = slots.keys.shape[1]
    packing = slots.form.packing
    whole = slots.form.whole
    if whole is not None:
        keep_whole(whole, k, v, kept, slots.first, slots.window, slots.smooths)
    step = max(1, PACKED_CHUNK // (count * k.shape[3]))
    for a in range(0, rows, step):
        here = slice(a, min(rows, a + step))
        row = torch.arange(
            slots.first + here.start, slots.first + here.stop, device=k.device
        ).unsqueeze(1)
        batch = torch.div(row, kv_heads, rounding_mode="floor")
        head = row % kv_heads
        tokens = kept[batch.squeeze(1), head.squeeze(1)]
        keys, values = (t[batch, tokens, head] for t in (k, v))
        if packing is not None:
            keys = keys if whole is None else whole.smoothed(keys, here)
            keys = pack_columns.torch(keys, packing.keys)
            values = pack_columns.torch(values, packing.values)
        areas = slots.keys[:, here], slots.values[:, here]
        put_slots.torch(
            areas, torch.arange(count, device=k.device).expand(len(row), count), (keys, values)
        )
        if scores is not None and slots.scores is not None and slots.positions is not None:
            slots.positions[here, :count] = tokens.int()
            slots.scores[here, :count] = scores[batch, head, tokens]


@put_prompts.kernel
def _put_kernel(
    k: torch.Tensor,
    v: torch.Tensor,
    kept: torch.Tensor,
    scores: torch.Tensor | None,
    slots: PromptSlots,
    lines: triton.PromptPlaces | None = None,
) -> None:
    prompts, tokens, kv_heads, width = k.shape
    lines = lines or _same_lines(prompts, tokens, kept, slots)
    assert k.stride(3) == v.stride(3) == kept.stride(2) == 1
    # placeholder for arguments that the kernel does not read
    _, rows, length, _ = slots.keys.shape
    unused = kept
    given = unused if scores is None else scores.contiguous()
    recorded = (unused, unused) if scores is None else (slots.scores, slots.positions)
    whole = slots.form.whole
    if whole is not None:
        _begin_whole(whole, k, slots.first, lines, slots.smooths)
    tensors = (
        k,
        v,
        kept,
        slots.keys,
        slots.values,
        given,
        *recorded,
        triton.prompt_table(lines, k.device),
        *whole_tensors(whole),
    )
    laid_out = (k, 3), (v, 3), (kept, 2), (given, 2)
    sizes = (
        *(step for t, count in laid_out for step in triton.batch_strides(t, count)),
        segment_step(slots.keys),
        length,
        unused.shape[2] if slots.scores is None else slots.scores.shape[1],
        kv_heads,
        slots.first,
        *packed_sizes(slots.form, slots.values),
    )
    wide = triton.power_of_two(width, 16)
    block = _COLUMNS if whole is None else max(1, _NUMBERS // wide)
    constants = {"D": width, "WIDTH": wide, "BLOCK": block, "RECORDS": scores is not None}
    constants |= packing_constants(slots.form.packing)
    grid = rows, -(-max(line.kept for line in lines) // block)
    triton.launch("prompts.put", grid, (*tensors, *sizes), **constants)


# ---- WholeColumns beside packed slots


def keep_whole(
    whole: WholeColumns,
    k: torch.Tensor,
    v: torch.Tensor,
    kept: torch.Tensor,
    first: int,
    window: int,
    smooths: bool = True,
) -> None:
    """Fill the WholeColumns of some rows from their prompts.

    These are the centre and range of each channel of the keys (0 and 1 if keys are not smoothed),
    and the `window` newest columns that are kept.

    k, v, kept, first: as in `put_prompts`; smooths: as in `PromptSlots`.
    """
    begin_whole(whole, k, first, smooths)
    if not window:
        return
    n = k.shape[1]
    rows = slice(first, first + len(whole.slots))
    count = kept.shape[2]
    places = torch.arange(window, device=k.device)
    # for each place the last token that goes there; below 0: none
    newest = n - 1 - (n - 1 - places) % window
    own = kept.flatten(0, 1)[rows].contiguous()
    slots = torch.searchsorted(own, newest.expand(len(own), window).contiguous()).clamp_(
        max=count - 1
    )
    stays = own.gather(1, slots) == newest
    whole.slots[:, :window].copy_(torch.where(stays, slots, -1))
    for target, columns in ((whole.keys, k), (whole.values, v)):
        found = columns.index_select(1, newest.clamp(min=0)).transpose(1, 2).flatten(0, 1)[rows]
        target[:, :window].copy_(found.masked_fill(~stays.unsqueeze(2), 0))


def _begin_whole(
    whole: WholeColumns, k: torch.Tensor, first: int, lines: triton.PromptPlaces, smooths: bool
) -> None:
    """Launch the kernel for `begin_whole`."""
    *_, kv_heads, width = k.shape
    wide = triton.power_of_two(k.shape[3], 16)
    sizes = *triton.batch_strides(k, 3), kv_heads, first, whole.slots.shape[1], MIN_RANGE
    constants = {"D": width, "WIDTH": wide, "BLOCK": max(1, _NUMBERS // wide), "SMOOTHS": smooths}
    arguments = k, triton.prompt_table(lines, k.device), *vars(whole).values(), *sizes
    triton.launch("prompts.begin_whole", (len(whole.slots),), arguments, **constants)


def begin_whole(whole: WholeColumns, k: torch.Tensor, first: int, smooths: bool = True) -> None:
    """Set centres and ranges, the part of `keep_whole` that needs all columns of a prompt.

    No column is whole afterwards.
    """
    for t in (whole.keys, whole.values, whole.centres):
        t.zero_()
    whole.slots.fill_(-1)
    whole.ranges.fill_(1)
    if not smooths:
        return
    rows = slice(first, first + len(whole.slots))
    # torch.aminmax takes three times as long
    least, most = (t.flatten(0, 1)[rows].float() for t in (k.amin(dim=1), k.amax(dim=1)))
    ranges = most - least
    # A channel that hardly varies in the prompt may vary later and would then dominate. So it gets
    # at least a share of the mean range.
    ranges = torch.maximum(ranges, ranges.mean(dim=1, keepdim=True) * MIN_RANGE)
    whole.centres.copy_((most + least) / 2)
    whole.ranges.copy_(torch.where(ranges > 0, ranges, 1.0))  # a single column has no range
