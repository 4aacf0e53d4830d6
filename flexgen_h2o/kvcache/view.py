"""Rows of a KV unit as tensors: where columns are put, gathered and recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flexgen_h2o.kernels.packed_slots import pack_columns
from flexgen_h2o.kernels.slot_columns import put_slots
from flexgen_h2o.kernels.slot_packing import SlotPacking
from flexgen_h2o.kvcache.eviction.policy import POSITIONS, RANKS
from flexgen_h2o.kvcache.layout import RECORD_ITEMSIZE, UnitLayout
from flexgen_h2o.tiers.placement import Part


@dataclass(frozen=True)
class Record:
    """What an eviction policy knows of the slots of some rows; only slots that are filled hold meaning.

    positions: (rows, slots) int32, of the columns in their sequences. scores, norms: (rows, slots) fp32, or None where
    the policy has no use for them. ranks: (rows, slots) int32, how many columns of the row are older, or None where
    columns keep their positions. victims: (rows,) int32, the slot that the next column of a full row takes.
    """

    positions: torch.Tensor
    victims: torch.Tensor
    scores: torch.Tensor | None = None
    norms: torch.Tensor | None = None
    ranks: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        every = (self.positions, self.victims, self.scores, self.norms, self.ranks)
        return [t for t in every if t is not None]

    def rows(self, start: int, end: int) -> Record:
        positions, victims, *others = (
            None if t is None else t[start:end]
            for t in (self.positions, self.victims, self.scores, self.norms, self.ranks)
        )
        assert positions is not None and victims is not None
        return Record(positions, victims, *others)


@dataclass(frozen=True)
class PartView:
    """Rows [start, end) of a unit, where attention runs on them.

    keys, values: (segments, rows, segment slots, width); slot j is [j // segment slots, :, j % segment slots]. Packed
    (`packing`) the width is a slot's words, int32. record: None with the full cache.
    """

    start: int
    keys: torch.Tensor
    values: torch.Tensor
    record: Record | None = None
    packing: SlotPacking | None = None

    @property
    def rows(self) -> int:
        return self.keys.shape[1]

    @property
    def end(self) -> int:
        return self.start + self.rows

    def first_rows(self, count: int) -> PartView:
        record = self.record.rows(0, count) if self.record is not None else None
        return replace(self, keys=self.keys[:, :count], values=self.values[:, :count], record=record)

    def rows_from(self, first: int) -> PartView:
        """The rows of the unit from `first` on that are in this part; they are counted from `first`."""
        skipped = max(0, first - self.start)
        record = self.record.rows(skipped, self.rows) if self.record is not None else None
        keys, values = self.keys[:, skipped:], self.values[:, skipped:]
        return replace(self, start=max(0, self.start - first), keys=keys, values=values, record=record)

    def row_tensors(self) -> list[torch.Tensor]:
        """Every tensor of the view with its rows first."""
        kept = [self.keys.transpose(0, 1), self.values.transpose(0, 1)]
        return kept + (self.record.tensors() if self.record is not None else [])


def split_views(views: Sequence[PartView], row: int) -> tuple[list[PartView], list[PartView]]:
    """The rows of a unit before `row`, and those from there on, counted from there."""
    before = [v.first_rows(row - v.start) for v in views if v.start < row]
    return before, [v.rows_from(row) for v in views if v.end > row]


def part_view(
    layout: UnitLayout, part: Part, data: torch.Tensor, dtype: torch.dtype, record: Record | None
) -> PartView:
    """The part whose bytes `data` holds. dtype: of numbers that are not packed."""
    dtype = stored_dtype(layout, dtype)
    area, size = layout.area_bytes(part) // dtype.itemsize, part.rows * layout.row_bytes // dtype.itemsize
    areas = data.view(dtype).view(layout.segments, 2, area)[:, :, :size]
    keys, values = areas.unflatten(2, (part.rows, layout.segment_slots, layout.slot_bytes // dtype.itemsize)).unbind(1)
    return PartView(part.start, keys, values, record, layout.packing)


def stored_dtype(layout: UnitLayout, dtype: torch.dtype) -> torch.dtype:
    """What slots consist of: numbers of `dtype`, or words."""
    return dtype if layout.packing is None else torch.int32


def carve_record(layout: UnitLayout, part: Part, data: torch.Tensor) -> Record | None:
    """The record whose bytes `data` holds; None where the policy keeps none."""
    if not layout.record:
        return None
    size = part.rows * layout.slots * RECORD_ITEMSIZE
    fields: dict[str, torch.Tensor] = {}
    for i, name in enumerate(layout.record):
        dtype = torch.int32 if name in (POSITIONS, RANKS) else torch.float32
        fields[name] = data[i * size : (i + 1) * size].view(dtype).view(part.rows, layout.slots)
    start = len(layout.record) * size
    victims = data[start : start + part.rows * RECORD_ITEMSIZE].view(torch.int32)
    return Record(victims=victims, **fields)


def put_columns(view: PartView, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
    """One column a row: keys, values (rows, width) go to `slots` ((rows,) int64), all on the view's device."""
    columns = _stored(view, keys).unsqueeze(1), _stored(view, values).unsqueeze(1)
    put_slots((view.keys, view.values), slots.unsqueeze(1), columns)


def put_first_columns(view: PartView, start: int, end: int, keys: torch.Tensor, values: torch.Tensor) -> None:
    """Slots 0, 1, ... of the view's rows [start, end) from keys and values (rows, columns, width)."""
    keys, values = _stored(view, keys), _stored(view, values)
    per_segment, columns = view.keys.shape[2], keys.shape[1]
    for segment, a in enumerate(range(0, columns, per_segment)):
        b = min(columns, a + per_segment)
        view.keys[segment, start:end, : b - a].copy_(keys[:, a:b])
        view.values[segment, start:end, : b - a].copy_(values[:, a:b])


def _stored(view: PartView, columns: torch.Tensor) -> torch.Tensor:
    """(..., width) numbers as the view holds them."""
    return columns if view.packing is None else pack_columns(columns, view.packing)


def column_index(view: PartView, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What finds one slot a row in the view's keys and values. slots: (rows,) int64."""
    per_segment = view.keys.shape[2]
    rows = torch.arange(view.rows, device=slots.device)
    return slots // per_segment, rows, slots % per_segment
