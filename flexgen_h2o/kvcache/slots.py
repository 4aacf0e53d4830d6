"""Rows of a KV unit as tensors: the slots that they hold, the slots that new columns take, and columns put into them.

When rows leave a micro-batch its last rows take their places (compaction).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexgen_h2o.core.packing import KVPacking
from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.beside import SlotForm, WholeColumns
from flexgen_h2o.kernels.packed import pack_columns
from flexgen_h2o.kernels.slots import put_packed, put_slots
from flexgen_h2o.kvcache.eviction.policy import POSITIONS, RANKS, Eviction
from flexgen_h2o.kvcache.layout import METADATA_ITEMSIZE, UnitLayout
from flexgen_h2o.kvcache.rows import Move, RowBudgets, StepNumbers
from flexgen_h2o.tiers.stream import Part


@dataclass(frozen=True)
class SlotMetadata:
    """What an eviction policy records of the slots of some rows; meaningless for slots that are not filled.

    positions: (rows, slots) int32, of the columns in their sequences. victims: (rows,) int32, the slot that the next
    column of a full row takes. scores, norms: (rows, slots) fp32; ranks: (rows, slots) int32, how many columns of the
    row are older. queries: (rows, numbers) fp32, what is kept of the prompt's queries (`KeyScores.of_prompt`). Each of
    these four is None unless the policy needs it.
    """

    positions: torch.Tensor
    victims: torch.Tensor
    scores: torch.Tensor | None = None
    norms: torch.Tensor | None = None
    ranks: torch.Tensor | None = None
    queries: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor, rows first."""
        return list(self._given().values())

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> SlotMetadata:
        """`change` applied to every tensor."""
        return SlotMetadata(**{name: change(t) for name, t in self._given().items()})

    def widened(self, more: int) -> SlotMetadata:
        """With so many slots more, of zeros."""
        pad = torch.nn.functional.pad
        of_rows = ("victims", "queries")
        wide = {name: t if name in of_rows else pad(t, (0, more)) for name, t in self._given().items()}
        return SlotMetadata(**wide)

    def _given(self) -> dict[str, torch.Tensor]:
        return {name: t for name, t in vars(self).items() if t is not None}


@dataclass(frozen=True)
class PartView:
    """Rows [start, end) of a unit, where attention runs on them.

    keys, values: (segments, rows, segment slots, width); slot j is [j // segment slots, :, j % segment slots]. With
    `packing` the width is a key's or a value's words, int32. metadata: None with the full cache. whole: goes with
    `packing`.
    """

    start: int
    keys: torch.Tensor
    values: torch.Tensor
    metadata: SlotMetadata | None = None
    packing: KVPacking | None = None
    whole: WholeColumns | None = None

    @property
    def rows(self) -> int:
        return self.keys.shape[1]

    @property
    def end(self) -> int:
        return self.start + self.rows

    def part(self, first: int, end: int, start: int) -> PartView:
        """The view's rows [first, end), numbered from `start` on."""
        metadata = self.metadata.map(lambda t: t[first:end]) if self.metadata is not None else None
        whole = self.whole.map(lambda t: t[first:end]) if self.whole is not None else None
        keys, values = self.keys[:, first:end], self.values[:, first:end]
        return PartView(start, keys, values, metadata, self.packing, whole)

    @property
    def form(self) -> SlotForm:
        """What the decode kernel must know of the rows besides their slots, but for sinks."""
        return SlotForm(self.packing, self.whole)

    def row_tensors(self) -> list[torch.Tensor]:
        """Every tensor of the view with its rows first."""
        columns = [self.keys.transpose(0, 1), self.values.transpose(0, 1)]
        columns += self.metadata.tensors() if self.metadata is not None else []
        columns += vars(self.whole).values() if self.whole is not None else []
        return columns


def split_views(views: Sequence[PartView], row: int) -> tuple[list[PartView], list[PartView]]:
    """The rows of a unit before `row`, and those from `row` on, numbered from 0."""
    before = [v if v.end <= row else v.part(0, row - v.start, v.start) for v in views if v.start < row]
    behind = [v.part(max(0, row - v.start), v.rows, max(0, v.start - row)) for v in views if v.end > row]
    return before, behind


def part_view(
    layout: UnitLayout, part: Part, data: torch.Tensor, dtype: torch.dtype, metadata: SlotMetadata | None = None,
    whole: WholeColumns | None = None,
) -> PartView:  # fmt: skip
    """The part whose bytes `data` holds. dtype: of numbers that are not packed."""
    dtype = stored_dtype(layout, dtype)
    segments, views = data.view(dtype).view(layout.segments, -1), []
    of_segments = segments.split([nbytes // dtype.itemsize for nbytes in layout.area_bytes(part)], dim=1)
    for areas, nbytes in zip(of_segments, layout.slot_bytes, strict=True):
        shape = part.rows, layout.segment_slots, nbytes // dtype.itemsize
        views.append(areas[:, : math.prod(shape)].unflatten(1, shape))
    return PartView(part.start, views[0], views[1], metadata, layout.packing, whole)


def stored_dtype(layout: UnitLayout, dtype: torch.dtype) -> torch.dtype:
    """What slots consist of: numbers of `dtype`, or words."""
    return dtype if layout.packing is None else torch.int32


def metadata_view(layout: UnitLayout, part: Part, data: torch.Tensor) -> SlotMetadata | None:
    """The metadata whose bytes `data` holds; None where the policy records nothing."""
    if not layout.record:
        return None
    size = part.rows * layout.slots * METADATA_ITEMSIZE
    fields: dict[str, Any] = {}
    for i, name in enumerate(layout.record.names):
        dtype = torch.int32 if name in (POSITIONS, RANKS) else torch.float32
        fields[name] = data[i * size : (i + 1) * size].view(dtype).view(part.rows, layout.slots)
    start = len(layout.record.names) * size
    end = start + part.rows * METADATA_ITEMSIZE
    victims = data[start:end].view(torch.int32)
    if layout.record.query_numbers:
        start = end
        end = start + part.rows * layout.record.query_numbers * METADATA_ITEMSIZE
        fields["queries"] = data[start:end].view(torch.float32).view(part.rows, -1)
    return SlotMetadata(victims=victims, **fields)


def whole_view(layout: UnitLayout, part: Part, data: torch.Tensor, dtype: torch.dtype) -> WholeColumns | None:
    """What lies beside packed slots, in the bytes behind the metadata; None where nothing is packed."""
    if layout.packing is None:
        return None
    rows, columns, width = part.rows, layout.whole_columns, layout.width
    sizes = [2 * rows * width] * 2 + [4 * rows * columns] + [rows * columns * width * dtype.itemsize] * 2
    end = layout.metadata_end(part)
    centres, ranges, slots, keys, values = data[end : end + sum(sizes)].split(sizes)
    both = [t.view(torch.bfloat16).view(rows, width) for t in (centres, ranges)]
    of_columns = [t.view(dtype).view(rows, columns, width) for t in (keys, values)]
    return WholeColumns(both[0], both[1], of_columns[0], of_columns[1], slots.view(torch.int32).view(rows, columns))


def put_columns(
    view: PartView, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, places: torch.Tensor | None = None
) -> None:
    """One column a row: keys, values (rows, width) go to `slots` ((rows,) int64), all on the view's device.

    places: (rows,) int64, whose places they take among the columns that are whole beside packed slots, -1 for none;
    None: of no row.
    """
    if view.whole is not None:
        places = slots.new_full(slots.shape, -1) if places is None else places
        put_packed((view.keys, view.values), slots, (keys, values), view.form, places)
        return
    keys, values = _stored(view, keys, values)
    columns = keys.unsqueeze(1), values.unsqueeze(1)
    put_slots((view.keys, view.values), slots.unsqueeze(1), columns)


def put_first_columns(view: PartView, start: int, end: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Slots 0, 1, ... of the view's rows [start, end) from keys and values (rows, columns, width)."""
    keys = keys if view.whole is None else view.whole.smoothed(keys, slice(start, end))
    keys, values = _stored(view, keys, values)
    per_segment, columns = view.keys.shape[2], keys.shape[1]
    for segment, a in enumerate(range(0, columns, per_segment)):
        b = min(columns, a + per_segment)
        view.keys[segment, start:end, : b - a].copy_(keys[:, a:b])
        view.values[segment, start:end, : b - a].copy_(values[:, a:b])


def _stored(view: PartView, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(..., width) numbers as the view holds them."""
    if view.packing is None:
        return keys, values
    return pack_columns(keys, view.packing.keys), pack_columns(values, view.packing.values)


def common_views(memory: torch.Tensor, dtype: torch.dtype, columns: int, shape: Sequence[int]) -> list[PartView]:
    """A prefix that all rows begin with, of each transformer block: a row for each kv-head, all slots filled.

    Its keys are rotated where the model has rotary embeddings. The first micro-batch of a block of rows writes it.
    memory: bytes, room for `columns` or more. shape: transformer blocks, kv-heads and d.
    """
    blocks, heads, width = shape
    copies = memory.view(dtype)[: 2 * blocks * heads * columns * width].view(blocks, 2, 1, heads, columns, width)
    return [PartView(0, keys, values) for keys, values in copies]


# ---- rows of a unit


@dataclass(frozen=True)
class NewColumns:
    """The new columns of one decode step. slots: for each view, (rows,) int64 on its device, where they go; for views
    that `attend_step` handles, that call fills them in."""

    numbers: StepNumbers
    slots: Sequence[torch.Tensor]

    @property
    def positions(self) -> torch.Tensor:
        return self.numbers.positions

    @property
    def filled(self) -> torch.Tensor:
        return self.numbers.filled


@dataclass(frozen=True)
class PromptAttention:
    """Causal attention of equally long prompts, as it was computed: the probability of query i and column j is
    exp(scale x q_i.k_j - lse_i), with sinks in lse.

    q: (b, heads, m, d), the last m queries, all where no prefix is shared; k: (b, kv_heads, n, d), both with their
    rotary embeddings; lse: (b, heads, m) fp32.
    """

    q: torch.Tensor
    k: torch.Tensor
    lse: torch.Tensor
    scale: float


@dataclass(frozen=True)
class KVRows:
    """Rows of a KV unit while their layer is computed, and the eviction policy at work on them.

    A sequence is `kv_heads` rows. block: the transformer block; window: of ModelSpec.windows. views: the parts that
    hold the rows, numbered from 0.
    common: columns of the full cache that all sequences have in front of their own, in one copy (`common_views`); with
    a window: used only while prompts are computed, since each row's slots hold their own copy.
    watch: sees the attention of prompts that the policy scores: (first sequence of those computed together, attention).
    sinks: (heads,), learned logits that join the softmax of each query of their head and have no values.
    hadamard: slots hold transformed keys and values (kernels/hadamard.py), and keys are not smoothed; those of
    `common` are not transformed.
    attn_sparsity: the share of the entries whose values a new token adds up (`attend_largest`).
    """

    policy: Eviction
    block: int
    kv_heads: int
    budgets: RowBudgets
    views: Sequence[PartView] = ()
    common: PartView | None = None
    watch: Callable[[int, PromptAttention], None] | None = None
    window: int | None = None
    sinks: torch.Tensor | None = None
    hadamard: bool = False
    attn_sparsity: float = 1.0

    def sinks_of_rows(self, count: int) -> torch.Tensor | None:
        """Of `count` sequences: (rows, g) fp32."""
        return None if self.sinks is None else self.sinks.float().view(self.kv_heads, -1).repeat(count, 1)

    def step_numbers(self, positions: torch.Tensor) -> StepNumbers:
        whole = max((view.whole.slots.shape[1] for view in self.views if view.whole is not None), default=0)
        return StepNumbers(self.budgets, self.policy.needs, positions, whole)

    def new_columns(self, numbers: StepNumbers) -> NewColumns:
        """Where columns go: the next free slot, or in a full row the slot of its victim; of its oldest column where
        nothing is recorded."""
        taken = []
        for view in self.views:
            if self.is_one_launch(view):  # which finds the slots
                taken.append(torch.empty(view.rows, dtype=torch.int64, device=view.keys.device))
                continue
            of_rows = numbers.of_rows(self.kv_heads, view.start, view.end, view.keys.device)
            if view.metadata is None:
                taken.append(of_rows.oldest_slot)
            else:
                taken.append(torch.where(of_rows.free < 0, view.metadata.victims, of_rows.free))
        return NewColumns(numbers, taken)

    def whole_places(self, view: PartView, numbers: StepNumbers) -> torch.Tensor | None:
        """(rows of the view,) int64, on its device: the places of new columns among the whole ones; None without."""
        if view.whole is None or not view.whole.slots.shape[1]:
            return None
        places = numbers.whole_places(view.whole.slots.shape[1]).repeat_interleave(self.kv_heads)
        return places[view.start : view.end].to(view.keys.device)

    def is_one_launch(self, view: PartView) -> bool:
        """Does `attend_step` take a decode step of the view's rows?"""
        return triton.takes(view.keys) and self.is_plain and self.attn_sparsity == 1

    @property
    def is_plain(self) -> bool:
        """Is nothing more recorded of slots than a decode step in one launch keeps?"""
        return self.policy.needs.in_one_launch


# ---- compaction


def move_rows(views: Sequence[PartView], moves: Sequence[Move], kv_heads: int) -> None:
    """Copy the `kv_heads` rows of each moved sequence, and their metadata, across parts where they are split."""
    for source, target in moves:
        done = 0
        while done < kv_heads:
            src_row, dst_row = source * kv_heads + done, target * kv_heads + done
            src = next(v for v in views if v.start <= src_row < v.end)
            dst = next(v for v in views if v.start <= dst_row < v.end)
            n = min(kv_heads - done, src.end - src_row, dst.end - dst_row)
            a, b = src_row - src.start, dst_row - dst.start
            for there, here in zip(dst.row_tensors(), src.row_tensors(), strict=True):
                there[b : b + n].copy_(here[a : a + n])
            done += n
