"""Rows of a KV unit as tensors: where columns are put, gathered and recorded.

Compaction: rows that remain are moved over those that left.

Which slots the rows of a micro-batch hold, and which their next column takes. No keys and no values here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from flexgen_h2o.core.packing import SlotPacking
from flexgen_h2o.kernels.packed import pack_columns
from flexgen_h2o.kernels.slots import put_slots
from flexgen_h2o.kvcache.eviction.policy import POSITIONS, RANKS, Eviction
from flexgen_h2o.kvcache.layout import RECORD_ITEMSIZE, UnitLayout
from flexgen_h2o.tiers.placement import Part


@dataclass(frozen=True)
class SlotMetadata:
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

    def rows(self, start: int, end: int) -> SlotMetadata:
        positions, victims, *others = (
            None if t is None else t[start:end]
            for t in (self.positions, self.victims, self.scores, self.norms, self.ranks)
        )
        assert positions is not None and victims is not None
        return SlotMetadata(positions, victims, *others)


@dataclass(frozen=True)
class PartView:
    """Rows [start, end) of a unit, where attention runs on them.

    keys, values: (segments, rows, segment slots, width); slot j is [j // segment slots, :, j % segment slots]. Packed
    (`packing`) the width is a slot's words, int32. record: None with the full cache.
    """

    start: int
    keys: torch.Tensor
    values: torch.Tensor
    record: SlotMetadata | None = None
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
    layout: UnitLayout, part: Part, data: torch.Tensor, dtype: torch.dtype, record: SlotMetadata | None
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


def carve_record(layout: UnitLayout, part: Part, data: torch.Tensor) -> SlotMetadata | None:
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
    return SlotMetadata(victims=victims, **fields)


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


Move = tuple[int, int]  # from sequence, to sequence


def plan_moves(leaving: Sequence[int], count: int) -> tuple[list[Move], list[int]]:
    """Fill the places of `leaving` (indices of `count` sequences) from the end.

    Returns the moves and, for each remaining place, the sequence that stands there now.
    """
    gone = set(leaving)
    order, moves = list(range(count)), []
    remaining = count - len(gone)
    donors = [i for i in range(count - 1, remaining - 1, -1) if i not in gone]
    for place, donor in zip(sorted(i for i in gone if i < remaining), donors, strict=True):
        moves.append((donor, place))
        order[place] = donor
    return moves, order[:remaining]


def order_after(moves: Sequence[Move], remaining: int) -> list[int]:
    """For each of the `remaining` places, the sequence that stands there after the moves."""
    came_from = {target: source for source, target in moves}
    return [came_from.get(place, place) for place in range(remaining)]


def move_rows(views: Sequence[PartView], moves: Sequence[Move], kv_heads: int) -> None:
    """Copy the `kv_heads` rows of each moved sequence, and their records, across parts where they are split."""
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


@dataclass(frozen=True)
class RowSlots:
    """The rows of a micro-batch in one transformer block; each field (sequences,) int64 on the host.

    prompts: tokens of the prompt. sinks, heavy, recent: the row's budget. slots: what the row may fill; a row that has
    filled them drops a column for each new one.
    """

    prompts: torch.Tensor
    sinks: torch.Tensor
    heavy: torch.Tensor
    recent: torch.Tensor
    slots: torch.Tensor

    @property
    def kept(self) -> torch.Tensor:
        """Columns left of each prompt after the prefill sweep."""
        return torch.minimum(self.prompts, self.sinks + self.heavy + self.recent)

    def part(self, start: int, end: int | None) -> RowSlots:
        """The sequences [start, end); None: to the last."""
        return RowSlots(*(t[start:end] for t in (self.prompts, self.sinks, self.heavy, self.recent, self.slots)))


@dataclass(frozen=True)
class NewColumn:
    """The new columns of one decode step; each field (sequences,) int64 on the host.

    past: their positions. slot: where each goes, -1 for the victim of the step before. filled: slots in use with it.
    """

    past: torch.Tensor
    slot: torch.Tensor
    filled: torch.Tensor


def new_columns(rows: RowSlots, past: torch.Tensor) -> NewColumn:
    """Where the columns at positions `past` go: the next free slot, or in a full row the slot of its victim."""
    held = rows.kept + past - rows.prompts
    filled = torch.minimum(held + 1, rows.slots)
    return NewColumn(past, torch.where(held < rows.slots, held, -1), filled)


class SlotTable:
    """Budgets of the rows of a micro-batch in every transformer block.

    rows: (prompt tokens, most new tokens) of each.
    """

    def __init__(self, policy: Eviction, rows: Sequence[tuple[int, int]], num_blocks: int) -> None:
        self._policy, self._num_blocks = policy, num_blocks
        self._table = self._entries(rows)

    def compact(self, moves: Sequence[Move], remaining: int) -> None:
        """Rows have left: `moves` bring the others to the front, `remaining` stay."""
        self._table = self._table[:, order_after(moves, remaining)]

    def admit(self, rows: Sequence[tuple[int, int]]) -> None:
        """More rows, behind the others."""
        self._table = torch.cat([self._table, self._entries(rows)], dim=1)

    def at(self, block: int, rows: Sequence[int] | None = None) -> RowSlots:
        """`rows`: which of the rows, in their order; None: all."""
        table = self._table[block]
        return RowSlots(*(table if rows is None else table[list(rows)]).unbind(1))

    def most_slots(self, block: int) -> int:
        return int(self._table[block, :, -1].max())

    def _entries(self, rows: Sequence[tuple[int, int]]) -> torch.Tensor:
        """(blocks, rows, 5) int64"""
        policy, num_blocks = self._policy, self._num_blocks

        def entry(prompt_len: int, gen_len: int, block: int) -> list[int]:
            budget = policy.budget(prompt_len, block, num_blocks)
            slots = policy.slots(prompt_len, gen_len, block, num_blocks)
            return [prompt_len, budget.sinks, budget.heavy, budget.recent, slots]

        return torch.tensor([[entry(*row, block) for row in rows] for block in range(num_blocks)])
