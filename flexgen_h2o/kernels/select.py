"""Decode attention that reads some columns: the step's query chooses them by a sketch of all keys, and the others count
through sums of their values. R, g, d, C, S as in slots.py; columns are never dropped, so slot j holds column j.

A sketch has the keys in 2 bits on a grid for each channel, in blocks of SKETCH_BLOCK columns, and the sum of each
block's values. Of a row with n columns `counts` are read, the newest of them in any case (`newest_of`); the others are
those of the largest estimated probability, by any query head. A column that is not read gets its estimated
probability, and for its value stands the mean of those of its block that are not read. Without the mean of what is left
out, choosing loses (docs/reference/eviction.md, "Selective reading"). Kin: SparQ (Ribar et al. 2024, arXiv
2312.04985) adds one mean value for all that is not read; here each block has its own, weighed by what the sketch gives
its columns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch

from flexgen_h2o.core.packing import LEAST_PROMPT, SKETCH_BLOCK, SKETCH_CODES, sketch_shape
from flexgen_h2o.core.units import PACKED_CHUNK
from flexgen_h2o.kernels.beside import WHOLE, SlotForm, softmax, unpacked, whole_addresses
from flexgen_h2o.kernels.slots import check_slots, loops_can_read, of_values, slot_products, slots_job
from flexgen_h2o.kernels.workspace import element_of, is_compiled, mismatch, parallel_rows

if TYPE_CHECKING:
    from flexgen_h2o.kernels.compiled.sketch import SketchAddresses

LEVELS = 4
STEP = 1.2  # of a grid, in standard deviations of a prompt's keys; 1.0 is best for Gaussian ones, which these are not
LEAST_STEP = 1 / 16  # of the mean of a row's channels: what hardly moves in the prompt may do so later
NEWEST = 16  # columns that are always read, at most


@dataclass(frozen=True)
class Sketch:
    """Of all columns of R rows, on the device of the keys, each tensor contiguous; B blocks.

    centres, steps: (R, d) fp32, steps above 0: number i of a key has code floor((key - centre) / step + 2) in 0..3,
    which stands for centre + (code - 1.5) x step. codes: (R, B, N, SKETCH_BLOCK) int16, of SKETCH_CODES channels each,
    the first in the lowest bits; N x SKETCH_CODES channels, the last ones 0. sums: (R, B, d) fp32, of the values of a
    block's columns so far. B a multiple of 4.
    """

    centres: torch.Tensor
    steps: torch.Tensor
    codes: torch.Tensor
    sums: torch.Tensor

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Sketch:
        """`change` applied to every tensor."""
        return Sketch(*(change(t) for t in vars(self).values()))

    def codes_of(self, keys: torch.Tensor) -> torch.Tensor:
        """The codes of keys (R, n, d), packed: (R, n, N) int16."""
        grid = (keys.float() - self.centres.unsqueeze(1)) / self.steps.unsqueeze(1)
        codes = (grid + LEVELS / 2).floor().clamp(0, LEVELS - 1).nan_to_num().int()
        channels = self.codes.shape[2] * SKETCH_CODES
        padded = torch.nn.functional.pad(codes, (0, channels - codes.shape[2]))
        places = torch.arange(0, 2 * SKETCH_CODES, 2, device=keys.device, dtype=torch.int32)
        return (padded.view(*codes.shape[:2], -1, SKETCH_CODES) << places).sum(dim=3).to(torch.int16)

    def unpacked(self) -> torch.Tensor:
        """(R, B x SKETCH_BLOCK, channels) fp32: codes less 1.5."""
        places = torch.arange(0, 2 * SKETCH_CODES, 2, device=self.codes.device, dtype=torch.int32)
        codes = (self.codes.int().unsqueeze(4) >> places) & (LEVELS - 1)
        return codes.permute(0, 1, 3, 2, 4).flatten(1, 2).flatten(2).float() - (LEVELS - 1) / 2


def empty_sketch(rows: int, slots: int, width: int, device: torch.device | None = None) -> Sketch:
    """Room for the columns of so many slots, of zeros; steps are 1."""
    blocks, numbers = sketch_shape(slots, width)
    centres = torch.zeros(rows, width, device=device, dtype=torch.float32)
    steps = torch.ones(rows, width, device=device, dtype=torch.float32)
    codes = torch.zeros(rows, blocks, numbers, SKETCH_BLOCK, dtype=torch.int16, device=device)
    return Sketch(centres, steps, codes, torch.zeros(rows, blocks, width, device=device, dtype=torch.float32))


@dataclass(frozen=True)
class Selection:
    """What a step reads of R rows. counts: (R,) int32, columns of each, from 1 to those that are filled."""

    sketch: Sketch
    counts: torch.Tensor

    def rows(self, some: slice) -> Selection:
        """Of some of the rows."""
        return Selection(self.sketch.map(lambda t: t[some]), self.counts[some])


def counts_of(share: float, filled: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
    """How many columns of each row are read, int32: int(share x filled), at least 1. filled, prompts: (R,) ints."""
    some = (share * filled.double()).int().clamp(min=1)
    return torch.where(prompts < LEAST_PROMPT, filled.int(), some)


def newest_of(counts: torch.Tensor) -> torch.Tensor:
    """How many of the columns that are read are the newest."""
    return torch.clamp(counts // 2, max=NEWEST)


def fill_sketch(sketch: Sketch, k: torch.Tensor, v: torch.Tensor) -> None:
    """Begin the sketch of some rows with their prompts: k, v (n, rows, d). All is written."""
    n, rows, width = k.shape
    if not is_compiled(k, v) or k.stride() != v.stride() or k.stride()[1:] != (width, 1):
        fill_sketch_reference(sketch, k, v)
        return
    from flexgen_h2o.kernels.compiled import sketch as loops

    sketch.codes.zero_()
    sketch.sums.zero_()
    job = loops.Fed(k.data_ptr(), v.data_ptr(), n, k.stride(0) * k.itemsize, width * k.itemsize, 0)
    loop = partial(loops.fill, element_of(k.dtype), _addresses(sketch, k[0].unsqueeze(1)), job)
    parallel_rows(loop, rows, 8 * n * width * k.itemsize)


def fill_sketch_reference(sketch: Sketch, k: torch.Tensor, v: torch.Tensor) -> None:
    """`fill_sketch` in torch operations."""
    n = len(k)
    keys, values = (t.transpose(0, 1).float() for t in (k, v))
    sketch.centres.copy_(keys.mean(dim=1))
    steps = STEP * keys.std(dim=1, correction=0)
    steps = torch.maximum(steps, steps.mean(dim=1, keepdim=True) * LEAST_STEP)
    sketch.steps.copy_(torch.where(steps > 0, steps, 1.0))  # of one column nothing is known
    sketch.codes.zero_()
    sketch.sums.zero_()
    padded = torch.nn.functional.pad(sketch.codes_of(keys), (0, 0, 0, -n % SKETCH_BLOCK))
    blocks = padded.unflatten(1, (-1, SKETCH_BLOCK)).transpose(2, 3)
    sketch.codes[:, : blocks.shape[1]] = blocks
    for number, block in enumerate(values.split(SKETCH_BLOCK, dim=1)):
        sketch.sums[:, number] = block.sum(dim=1)


def add_to_sketch(sketch: Sketch, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """One more column a row: keys, values (R, d) at `slots` (R,) int64."""
    rows, width = keys.shape
    if not is_compiled(keys, values) or not all(t.is_contiguous() for t in (keys, values, slots)):
        add_to_sketch_reference(sketch, slots, keys, values)
        return
    from flexgen_h2o.kernels.compiled import sketch as loops

    job = loops.Fed(keys.data_ptr(), values.data_ptr(), 1, 0, width * keys.itemsize, slots.data_ptr())
    loop = partial(loops.add, element_of(keys.dtype), _addresses(sketch, keys.unsqueeze(1)), job)
    parallel_rows(loop, rows, 4 * width * keys.itemsize)


def add_to_sketch_reference(sketch: Sketch, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """`add_to_sketch` in torch operations."""
    rows = torch.arange(len(slots), device=slots.device)
    block, lane = slots // SKETCH_BLOCK, slots % SKETCH_BLOCK
    sketch.codes[rows, block, :, lane] = sketch.codes_of(keys.unsqueeze(1)).squeeze(1)
    sketch.sums[rows, block] += values.float()


def attend_selected(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, filled: torch.Tensor, scale: float,
    selection: Selection, form: SlotForm = WHOLE,
) -> torch.Tensor:  # fmt: skip
    """Attention that reads some of each row's slots 0..filled-1; arguments as of `slots.attend`.

    form: a packing and its whole columns, sinks. Returns (R, g, d) in q's dtype. A row's result depends on
    that row alone.
    """
    if not loops_can_read(q, keys, values, form):
        return attend_selected_reference(q, keys, values, filled, scale, selection, form)
    from flexgen_h2o.kernels.compiled import beside, packed_slots, select

    q, filled, counts, out = q.contiguous(), filled.contiguous(), selection.counts.contiguous(), torch.empty_like(q)
    most, packing = int(filled.max()), form.packing
    check_slots((q, keys, values, filled), most, packing)
    chosen = _addresses(selection.sketch, q, counts)
    if chosen.blocks * SKETCH_BLOCK < most:
        raise mismatch("attend: filled, sketch", filled, selection.sketch.codes)
    job = slots_job((q, keys, values, filled, out), most, scale, form.sinks)
    loop: Callable[..., None] = partial(select.attend_rows, element_of(q.dtype), job, chosen)
    if packing is not None:
        whole = beside.NO_WHOLE if form.whole is None else whole_addresses(form.whole, q)
        forms, jobs = packed_slots.formats_of(packing), (job, of_values(job, values))
        loop = partial(select.attend_packed_rows, element_of(q.dtype), forms, jobs, chosen, whole)
    parallel_rows(loop, len(q), most * chosen.numbers * 2 + 8 * int(counts.max()) * job.words)
    return out


def attend_selected_reference(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, filled: torch.Tensor, scale: float,
    selection: Selection, form: SlotForm = WHOLE,
) -> torch.Tensor:  # fmt: skip
    """`attend_selected` in torch operations, which read all columns of some rows at a time."""
    step = max(1, PACKED_CHUNK // (keys.shape[0] * keys.shape[2] * q.shape[2]))
    if len(q) > step:
        parts = []
        for a in range(0, len(q), step):
            some = slice(a, a + step)
            areas, own = (keys[:, some], values[:, some], filled[some]), (selection.rows(some), form.rows(some))
            parts.append(attend_selected_reference(q[some], *areas, scale, *own))
        return torch.cat(parts)
    sketch, counts = selection.sketch, selection.counts
    keys, values = unpacked(keys, values, form, q.dtype)
    longest = int(filled.max())
    estimates = _estimates(q, sketch, scale)[..., :longest]
    places, ends = torch.arange(longest, device=q.device), filled.view(-1, 1)
    estimates = estimates.masked_fill((places >= ends).unsqueeze(1), float("-inf"))
    sums = estimates.logsumexp(dim=2)
    sums = sums if form.sinks is None else torch.logaddexp(sums, form.sinks)
    costs = (sums.unsqueeze(2) - estimates).amin(dim=1)
    chosen = _choose(costs, ends, counts.view(-1, 1))
    rest = ~chosen & (places < ends)
    read = slot_products(q, keys, filled, scale).masked_fill(~chosen.unsqueeze(1), float("-inf"))
    products = torch.cat([read, estimates.masked_fill(~rest.unsqueeze(1), float("-inf"))], dim=2)
    p, beside = softmax(products, form.sinks).tensor_split(2, dim=2)
    blocks = sketch.sums.shape[1]
    number = places // SKETCH_BLOCK
    by_block = torch.zeros(longest, blocks, device=q.device, dtype=torch.float32)
    by_block[places, number] = 1.0
    share = (beside @ by_block) / (rest.float() @ by_block).clamp(min=1).unsqueeze(1)  # of each column that is not read
    weights = torch.where(chosen.unsqueeze(1), p - share[..., number], 0.0)
    held = values.transpose(0, 1).flatten(1, 2)[:, :longest].masked_fill(~chosen.unsqueeze(2), 0)
    return (torch.bmm(weights, held.float()) + torch.bmm(share, sketch.sums)).to(q.dtype)


def _estimates(q: torch.Tensor, sketch: Sketch, scale: float) -> torch.Tensor:
    """(R, g, columns) fp32: scale x q.k by the sketch, of queries that are rounded to whole numbers channel by channel,
    so that a compiled loop adds up 16-bit ones."""
    queries = q.float()
    turned = queries * sketch.steps.unsqueeze(1)
    most = levels_of(q.shape[2]) / turned.abs().amax(dim=2, keepdim=True).clamp(min=1e-30)
    whole = torch.nn.functional.pad((turned * most).round(), (0, sketch.codes.shape[2] * SKETCH_CODES - q.shape[2]))
    products = torch.bmm(whole, sketch.unpacked().transpose(1, 2)) / most
    return (products + (queries * sketch.centres.unsqueeze(1)).sum(dim=2, keepdim=True)) * scale


def levels_of(width: int) -> int:
    """The largest whole number of a query: its sum with `width` codes is a 16-bit number."""
    return min(127, (2**15 - 1) // (width * (LEVELS - 1)))


def _choose(costs: torch.Tensor, ends: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """(R, n) bool: the newest columns, and of the others those of the least costs; of equal ones the older."""
    places = torch.arange(costs.shape[1], device=costs.device)
    newest = newest_of(counts)
    infinite = torch.finfo(torch.float32).max
    costs = costs.nan_to_num(nan=infinite, posinf=infinite).masked_fill(places >= ends - newest, float("inf"))
    order = costs.sort(dim=1, stable=True).indices
    rank = torch.empty_like(order).scatter_(1, order, places.expand_as(order))
    is_newest = (places >= ends - newest) & (places < ends)
    return is_newest | ((rank < counts - newest) & (places < ends))


def _addresses(sketch: Sketch, q: torch.Tensor, counts: torch.Tensor | None = None) -> SketchAddresses:
    """Raises ValueError."""
    from flexgen_h2o.kernels.compiled.sketch import SketchAddresses

    (rows, _, width), (_, blocks, numbers, lanes) = q.shape, sketch.codes.shape
    grid, kinds = (rows, width), (torch.float32, torch.float32, torch.int16, torch.float32)
    shapes = grid, grid, (rows, blocks, numbers, lanes), (rows, blocks, width)
    ok = lanes == SKETCH_BLOCK and blocks % 4 == 0 and numbers == -(-width // SKETCH_CODES)
    ok = ok and (counts is None or (tuple(counts.shape), counts.dtype) == ((rows,), torch.int32))
    tensors = list(vars(sketch).values())
    for tensor, kind, shape in zip(tensors, kinds, shapes, strict=True):
        ok = ok and (tensor.dtype, tuple(tensor.shape)) == (kind, shape) and tensor.is_contiguous()
    if not ok:
        raise mismatch("sketch of q, centres, steps, codes, sums", q, *tensors)
    addresses = (0 if t is None else t.data_ptr() for t in (*tensors, counts))
    return SketchAddresses(blocks, numbers, width, levels_of(width), NEWEST, STEP, LEAST_STEP, *addresses)
