"""Rows of a KV unit as tensors: their slots, the slots of new columns, and writes into slots.

When rows leave a micro-batch, its last rows move to the places that became free (compaction).
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
    """The record that an eviction policy keeps of the slots of some rows.

    Entries of slots that are not filled are meaningless. Each of the last four tensors is None
    unless the policy needs it. `evict` writes the tensors, and the decode kernel updates them.
    """

    positions: torch.Tensor  # (rows, slots) int32: positions of the columns in their sequences
    victims: torch.Tensor  # (rows,) int32: the slot that the next column of a full row takes
    scores: torch.Tensor | None = None  # (rows, slots) fp32: scores of the columns
    norms: torch.Tensor | None = None  # (rows, slots) fp32: sizes of the values (`value_sizes`)
    ranks: torch.Tensor | None = None  # (rows, slots) int32: how many columns of the row are older
    # (rows, numbers) fp32: summary of the prompt's queries (`KeyScores.of_prompt`)
    queries: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """Return every tensor that is not None. The first dimension of each is the row."""
        return list(self._given().values())

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> SlotMetadata:
        """Return SlotMetadata with `change` applied to every tensor."""
        return SlotMetadata(**{name: change(t) for name, t in self._given().items()})

    def widened(self, more: int) -> SlotMetadata:
        """Return SlotMetadata with `more` additional slots, filled with zeros."""
        pad = torch.nn.functional.pad
        of_rows = ("victims", "queries")
        wide = {
            name: t if name in of_rows else pad(t, (0, more)) for name, t in self._given().items()
        }
        return SlotMetadata(**wide)

    def _given(self) -> dict[str, torch.Tensor]:
        return {name: t for name, t in vars(self).items() if t is not None}


@dataclass(frozen=True)
class PartView:
    """Rows [start, end) of a unit, on the device where attention runs on them.

    `part_view` and `common_views` make it.
    """

    start: int  # row of the unit that is row 0 here
    # (segments, rows, segment slots, width). Slot j is [j // segment slots, :, j % segment slots].
    # With `packing`, the width counts the int32 words of a key.
    keys: torch.Tensor
    values: torch.Tensor  # as `keys`, with the words of a value
    metadata: SlotMetadata | None = None  # None with the full cache
    packing: KVPacking | None = None  # how columns are packed; None if they are not
    whole: WholeColumns | None = None  # whole columns and key statistics; given with `packing`

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.keys.shape[1]

    @property
    def end(self) -> int:
        """First row of the unit behind this view."""
        return self.start + self.rows

    def part(self, first: int, end: int, start: int) -> PartView:
        """Return the view's rows [first, end) as rows of a unit that begin at `start`."""
        metadata = self.metadata.map(lambda t: t[first:end]) if self.metadata is not None else None
        whole = self.whole.map(lambda t: t[first:end]) if self.whole is not None else None
        keys = self.keys[:, first:end]
        values = self.values[:, first:end]
        return PartView(start, keys, values, metadata, self.packing, whole)

    @property
    def form(self) -> SlotForm:
        """How the slots are stored, for the decode kernel. Sinks are not included."""
        return SlotForm(self.packing, self.whole)

    def row_tensors(self) -> list[torch.Tensor]:
        """Return every tensor of the view, with the row as its first dimension."""
        columns = [self.keys.transpose(0, 1), self.values.transpose(0, 1)]
        columns += self.metadata.tensors() if self.metadata is not None else []
        columns += vars(self.whole).values() if self.whole is not None else []
        return columns


def split_views(views: Sequence[PartView], row: int) -> tuple[list[PartView], list[PartView]]:
    """Return views of the unit's rows before `row`, and views of the rows from `row` on.

    The rows of the second list are numbered from 0.
    """
    before = [
        v if v.end <= row else v.part(0, row - v.start, v.start) for v in views if v.start < row
    ]
    behind = [
        v.part(max(0, row - v.start), v.rows, max(0, v.start - row)) for v in views if v.end > row
    ]
    return before, behind


def part_view(
    layout: UnitLayout,
    part: Part,
    data: torch.Tensor,
    dtype: torch.dtype,
    metadata: SlotMetadata | None = None,
    whole: WholeColumns | None = None,
) -> PartView:
    """Return the view of a part.

    data: uint8, the bytes of the part (`UnitLayout.part_bytes`).
    dtype: of keys and values that are not packed.
    """
    dtype = stored_dtype(layout, dtype)
    segments = data.view(dtype).view(layout.segments, -1)
    views = []
    of_segments = segments.split(
        [nbytes // dtype.itemsize for nbytes in layout.area_bytes(part)], dim=1
    )
    for areas, nbytes in zip(of_segments, layout.slot_bytes, strict=True):
        shape = part.rows, layout.segment_slots, nbytes // dtype.itemsize
        views.append(areas[:, : math.prod(shape)].unflatten(1, shape))
    return PartView(part.start, views[0], views[1], metadata, layout.packing, whole)


def stored_dtype(layout: UnitLayout, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of slots: `dtype`, or int32 if they are packed."""
    return dtype if layout.packing is None else torch.int32


def metadata_view(layout: UnitLayout, part: Part, data: torch.Tensor) -> SlotMetadata | None:
    """Return the view of a part's metadata. Returns None if the policy records nothing.

    data: uint8, the bytes of the metadata (`UnitLayout.metadata_bytes`).
    """
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


def whole_view(
    layout: UnitLayout, part: Part, data: torch.Tensor, dtype: torch.dtype
) -> WholeColumns | None:
    """Return what is stored in addition to packed slots. Returns None if slots are not packed.

    data: uint8, as in `metadata_view`; the whole columns lie behind the metadata.
    dtype: of whole columns.
    """
    if layout.packing is None:
        return None
    rows = part.rows
    columns = layout.whole_columns
    width = layout.width
    sizes = (
        [2 * rows * width] * 2
        + [4 * rows * columns]
        + [rows * columns * width * dtype.itemsize] * 2
    )
    end = layout.metadata_end(part)
    centres, ranges, slots, keys, values = data[end : end + sum(sizes)].split(sizes)
    both = [t.view(torch.bfloat16).view(rows, width) for t in (centres, ranges)]
    of_columns = [t.view(dtype).view(rows, columns, width) for t in (keys, values)]
    return WholeColumns(
        both[0], both[1], of_columns[0], of_columns[1], slots.view(torch.int32).view(rows, columns)
    )


def put_columns(
    view: PartView,
    slots: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: torch.Tensor | None = None,
) -> None:
    """Write one column per row into its slot. All tensors are on the view's device.

    slots: (rows,) int64.
    keys, values: (rows, width).
    places: (rows,) int64, the index of the new column among the row's whole columns, or -1 if it is
        only packed. None means -1 for all rows.
    """
    if view.whole is not None:
        places = slots.new_full(slots.shape, -1) if places is None else places
        put_packed((view.keys, view.values), slots, (keys, values), view.form, places)
        return
    keys, values = _stored(view, keys, values)
    columns = keys.unsqueeze(1), values.unsqueeze(1)
    put_slots((view.keys, view.values), slots.unsqueeze(1), columns)


def put_first_columns(
    view: PartView, start: int, end: int, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Write columns to slots 0, 1, ... of the view's rows [start, end).

    keys, values: (end - start, columns, width).
    """
    keys = keys if view.whole is None else view.whole.smoothed(keys, slice(start, end))
    keys, values = _stored(view, keys, values)
    per_segment = view.keys.shape[2]
    columns = keys.shape[1]
    for segment, a in enumerate(range(0, columns, per_segment)):
        b = min(columns, a + per_segment)
        view.keys[segment, start:end, : b - a].copy_(keys[:, a:b])
        view.values[segment, start:end, : b - a].copy_(values[:, a:b])


def _stored(
    view: PartView, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values (..., width) in the form in which the view stores them."""
    if view.packing is None:
        return keys, values
    return pack_columns(keys, view.packing.keys), pack_columns(values, view.packing.values)


def common_views(
    memory: torch.Tensor, dtype: torch.dtype, columns: int, shape: Sequence[int]
) -> list[PartView]:
    """Return one view per transformer block of the prefix that all rows begin with.

    A view has one row per kv-head, and all its slots are filled. The first micro-batch of a block
    of rows writes them. Keys are rotated if the model has rotary embeddings.

    memory: uint8, with room for `columns` columns or more.
    shape: (transformer blocks, kv-heads, d).
    """
    blocks, heads, width = shape
    copies = memory.view(dtype)[: 2 * blocks * heads * columns * width].view(
        blocks, 2, 1, heads, columns, width
    )
    return [PartView(0, keys, values) for keys, values in copies]


# ---- rows of a unit


@dataclass(frozen=True)
class NewColumns:
    """The new columns of one decode step in one unit. `KVRows.new_columns` makes it."""

    numbers: StepNumbers
    # For each view: (rows,) int64 on its device, the slots of the new columns. `attend_step` fills
    # in the slots of the views that it handles.
    slots: Sequence[torch.Tensor]

    @property
    def positions(self) -> torch.Tensor:
        """Positions of the new columns, (sequences,) int64 on the host."""
        return self.numbers.positions

    @property
    def filled(self) -> torch.Tensor:
        """Slots in use with the new columns, (sequences,) int64 on the host."""
        return self.numbers.filled


@dataclass(frozen=True)
class PromptAttention:
    """The causal attention of b equally long prompts, as `attend` computed it.

    The probability of query i and column j is exp(scale x q_i.k_j - lse_i).
    """

    # (b, heads, m, d) with rotary embeddings: the last m queries, which are all queries if the
    # prompts share no prefix
    q: torch.Tensor
    k: torch.Tensor  # (b, kv_heads, n, d) with rotary embeddings
    lse: torch.Tensor  # (b, heads, m) fp32: log-sum-exp, including sinks
    scale: float


@dataclass(frozen=True)
class KVRows:
    """The rows of a KV unit while their layer is computed, and their eviction policy.

    `engine/attention.py` makes it for each layer and micro-batch, `integrations/cache.py` for each
    layer.
    """

    policy: Eviction
    block: int  # the transformer block
    kv_heads: int  # rows per sequence
    budgets: RowBudgets  # of the micro-batch's sequences in this transformer block
    views: Sequence[PartView] = ()  # the parts that hold the rows, numbered from 0
    # Columns of the full cache that all sequences have in front of their own, in one copy
    # (`common_views`). With a window it is used only while prompts are computed, because each row's
    # slots hold their own copy.
    common: PartView | None = None
    # Called with the attention of prompts that the policy scores. The first argument is the first
    # of the sequences that were computed together.
    watch: Callable[[int, PromptAttention], None] | None = None
    window: int | None = None  # of ModelSpec.windows
    # (heads,): learned logits that join the softmax of each query of their head and have no values
    sinks: torch.Tensor | None = None
    # Slots hold transformed keys and values (kernels/hadamard.py), and keys are not smoothed.
    # Columns of `common` are not transformed.
    hadamard: bool = False
    # Share of the KV entries whose values a new token adds up (`attend_largest`)
    attn_sparsity: float = 1.0

    def sinks_of_rows(self, count: int) -> torch.Tensor | None:
        """Return the sinks of the rows of `count` sequences, (rows, g) fp32, or None."""
        return (
            None
            if self.sinks is None
            else self.sinks.float().view(self.kv_heads, -1).repeat(count, 1)
        )

    def step_numbers(self, positions: torch.Tensor) -> StepNumbers:
        """Return the StepNumbers of new columns. positions: (sequences,) int64 on the host."""
        whole = max(
            (view.whole.slots.shape[1] for view in self.views if view.whole is not None), default=0
        )
        return StepNumbers(self.budgets, self.policy.needs, positions, whole)

    def new_columns(self, numbers: StepNumbers) -> NewColumns:
        """Return the new columns with the slots that they take.

        A new column takes the next free slot. In a full row it takes the victim's slot, or that of
        the oldest column if nothing is recorded.
        """
        taken = []
        for view in self.views:
            if self.is_one_launch(view):  # the launch finds the slots itself
                taken.append(torch.empty(view.rows, dtype=torch.int64, device=view.keys.device))
                continue
            of_rows = numbers.of_rows(self.kv_heads, view.start, view.end, view.keys.device)
            if view.metadata is None:
                taken.append(of_rows.oldest_slot)
            else:
                taken.append(torch.where(of_rows.free < 0, view.metadata.victims, of_rows.free))
        return NewColumns(numbers, taken)

    def whole_places(self, view: PartView, numbers: StepNumbers) -> torch.Tensor | None:
        """Return the index of each new column among its row's whole columns, or -1.

        The result is (rows of the view,) int64 on its device. It is None if rows have no whole
        columns.
        """
        if view.whole is None or not view.whole.slots.shape[1]:
            return None
        places = numbers.whole_places(view.whole.slots.shape[1]).repeat_interleave(self.kv_heads)
        return places[view.start : view.end].to(view.keys.device)

    def is_one_launch(self, view: PartView) -> bool:
        """Return whether `attend_step` runs the decode step of the view's rows."""
        return triton.supports(view.keys) and self.is_plain and self.attn_sparsity == 1

    @property
    def is_plain(self) -> bool:
        """Whether one launch can keep all that is recorded of slots (`Needs.in_one_launch`)."""
        return self.policy.needs.in_one_launch


# ---- compaction


def move_rows(views: Sequence[PartView], moves: Sequence[Move], kv_heads: int) -> None:
    """Copy the `kv_heads` rows of each moved sequence, and their metadata, to their new place.

    The rows of a sequence may be split over several parts.
    """
    for source, target in moves:
        done = 0
        while done < kv_heads:
            src_row = source * kv_heads + done
            dst_row = target * kv_heads + done
            src = next(v for v in views if v.start <= src_row < v.end)
            dst = next(v for v in views if v.start <= dst_row < v.end)
            n = min(kv_heads - done, src.end - src_row, dst.end - dst_row)
            a = src_row - src.start
            b = dst_row - dst.start
            for there, here in zip(dst.row_tensors(), src.row_tensors(), strict=True):
                there[b : b + n].copy_(here[a : a + n])
            done += n
