"""KV units on their home tiers: brought to where attention runs, extended in place, written back.

Homes are taken once for the largest block and carved anew for each. Parts that live where attention runs are used in
place; the others come through a ring. Columns made for a disk part wait in a RAM overlay and the part is written back
every WRITE_BACK_STEPS steps. Knows rows and slots, not prompts, eviction policies or models.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from flexgen_h2o.config import TIERS
from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.kvcache.moves import Move, move_rows
from flexgen_h2o.limits import PAGE, WRITE_BACK_STEPS
from flexgen_h2o.tiers.disk import DirectFile
from flexgen_h2o.tiers.mover import Memory, Mover
from flexgen_h2o.tiers.placement import Part, is_streamed
from flexgen_h2o.tiers.ring import Region
from flexgen_h2o.tiers.transfer import Done, Waitable, wait_all
from flexgen_h2o.units import round_up

CacheKey = tuple[int, int, int]  # sweep, transformer block, micro-batch


@dataclass(frozen=True)
class PartView:
    """Rows [start, end) of a unit, ready for attention. keys, values: (rows, slots, width)."""

    start: int
    keys: torch.Tensor
    values: torch.Tensor

    @property
    def end(self) -> int:
        return self.start + len(self.keys)


@dataclass
class _Overlay:
    """Columns of a disk part not written back yet. keys, values: (rows, WRITE_BACK_STEPS, width); slots: int64."""

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor
    used: int = 0

    def apply(self, view: PartView) -> None:
        n = self.used
        if n:
            rows = torch.arange(len(view.keys)).unsqueeze(1)
            slots = self.slots[: len(view.keys), :n]
            index = (rows.to(view.keys.device), slots.to(view.keys.device))
            view.keys[index] = self.keys[: len(view.keys), :n].to(view.keys.device)
            view.values[index] = self.values[: len(view.keys), :n].to(view.keys.device)

    def add(self, view: PartView, slots: torch.Tensor) -> None:
        where, n = view.keys.device, self.used
        index = (torch.arange(len(view.keys), device=where), slots.to(where))
        self.slots[: len(slots), n] = slots
        self.keys[: len(slots), n] = view.keys[index]
        self.values[: len(slots), n] = view.values[index]
        self.used += 1


@dataclass
class _Home:
    """Where a part lives: `memory` (2, area bytes) in RAM or device memory, or `offset` in the cache file."""

    part: Part
    streamed: bool
    memory: torch.Tensor | None = None
    offset: int = 0
    overlay: _Overlay | None = None


@dataclass
class Unit:
    """One (transformer block, micro-batch): homes of its parts, and how far it follows its micro-batch."""

    layout: UnitLayout
    homes: list[_Home]
    sequences: int  # rows of the micro-batch that the unit holds now
    version: int = 0  # compactions applied
    filled: bool = False
    in_use: bool = False
    last_store: list[Waitable] = field(default_factory=list)


class CacheStore:
    """All units of the current block. `memory`: uint8 arenas by tier; `file`: the disk arena."""

    def __init__(
        self, mover: Mover, dtype: torch.dtype, memory: dict[str, torch.Tensor], file: DirectFile | None,
        overlay: torch.Tensor, attends_on_host: bool,
    ) -> None:  # fmt: skip
        self._mover, self._dtype, self._memory, self._file = mover, dtype, memory, file
        self._overlay = overlay
        # Attention runs on the host where the device is host memory and with --cpu-cache-compute.
        self._streamed_tiers = frozenset(t for t in TIERS if is_streamed(t, attends_on_host))
        self._ring_memory: Memory = "host" if attends_on_host else "device"
        self._units: dict[tuple[int, int], Unit] = {}
        self._compactions: list[list[list[Move]]] = []
        self._live: list[int] = []

    def begin_block(self, num_blocks: int, layouts: list[UnitLayout]) -> None:
        """Carve homes for a block with a layout for each micro-batch."""
        used = dict.fromkeys((*self._memory, "disk", "overlay"), 0)
        self._compactions = [[] for _ in layouts]
        self._live = [layout.sequences for layout in layouts]
        self._units = {
            (block, k): Unit(layout, [self._carve(layout, part, used) for part in layout.parts], layout.sequences)
            for block in range(num_blocks)
            for k, layout in enumerate(layouts)
        }

    def compact(self, micro_batch: int, moves: list[Move], sequences: int) -> None:
        """Rows have left: `moves` bring the others to the front, `sequences` remain. Units follow at their next use."""
        self._compactions[micro_batch].append(moves)
        self._live[micro_batch] = sequences

    # Source of a Stream[CacheKey]

    def nbytes(self, key: CacheKey) -> int:
        unit = self._units[key[1:]]
        return sum(unit.layout.part_bytes(h.part) for h in unit.homes if h.streamed)

    def is_wanted(self, key: CacheKey) -> bool:
        return self._live[key[2]] > 0

    def is_ready(self, key: CacheKey) -> bool:
        unit = self._units[key[1:]]
        return not unit.in_use and (unit.filled or key[0] == 0)

    def load(self, key: CacheKey, region: Region) -> list[Done]:
        unit = self._units[key[1:]]
        unit.in_use = True  # from here on: a later sweep's load must not overtake this one's use
        loads: list[Done] = []
        if unit.filled:
            for home, data in self._slices(unit, region):
                loads += self._load_part(unit, home, data, [*region.after, *unit.last_store])
        return loads

    # Compute side

    def open(self, key: CacheKey, region: Region | None) -> tuple[list[PartView], bool]:
        """Views of the unit's live rows, overlay and compactions applied; whether whole parts must be stored after."""
        unit = self._units[key[1:]]
        unit.in_use = True
        for event in [] if unit.filled or region is None else region.after:
            event.wait()
        views = self._views(unit, region)
        # The overlay holds columns of the rows that are in the unit now, as before any compaction still to come.
        for home, view in zip(unit.homes, self._live_views(unit, views), strict=False):
            if home.overlay is not None:
                home.overlay.apply(view)
        pending = self._compactions[key[2]][unit.version :]
        for moves in pending:
            move_rows(views, moves, unit.layout.kv_heads)
        unit.version += len(pending)
        unit.sequences = self._live[key[2]]
        return self._live_views(unit, views), bool(pending) or not unit.filled

    def close(
        self, key: CacheKey, region: Region | None, slots: torch.Tensor, whole: bool, fence: Waitable
    ) -> list[Waitable]:
        """Bring what compute changed back to its homes: whole parts, or the columns at `slots` ((rows,) int64).

        Returns the events after which the region may be overwritten.
        """
        unit = self._units[key[1:]]
        stores: list[Waitable] = [fence]
        if region is not None:
            views = self._live_views(unit, self._views(unit, region))
            slices = {id(home): data for home, data in self._slices(unit, region)}
            for home, view in zip(unit.homes, views, strict=False):
                if home.streamed:
                    stores += self._store_part(unit, home, view, slices[id(home)], slots, whole, fence)
        unit.in_use, unit.filled, unit.last_store = False, True, stores[1:]
        return stores

    def settle(self) -> None:
        """Wait for stores under way, so that the next block may carve the homes anew."""
        for unit in self._units.values():
            wait_all(unit.last_store)

    def _carve(self, layout: UnitLayout, part: Part, used: dict[str, int]) -> _Home:
        nbytes = layout.part_bytes(part)
        start = used[part.tier]
        used[part.tier] += nbytes
        streamed = part.tier in self._streamed_tiers
        if part.tier != "disk":
            return _Home(part, streamed, memory=self._memory[part.tier][start : start + nbytes])
        size = layout.overlay_bytes(part)
        waiting = self._overlay[used["overlay"] : used["overlay"] + size]
        used["overlay"] += size
        return _Home(part, streamed, offset=start, overlay=self._carve_overlay(layout, part, waiting))

    def _carve_overlay(self, layout: UnitLayout, part: Part, memory: torch.Tensor) -> _Overlay:
        shape = (part.rows, WRITE_BACK_STEPS, layout.width)
        slot_bytes = 8 * part.rows * WRITE_BACK_STEPS
        half = (memory.numel() - slot_bytes) // 2
        slots = memory[:slot_bytes].view(torch.int64).view(part.rows, WRITE_BACK_STEPS)
        keys = memory[slot_bytes : slot_bytes + half].view(self._dtype).view(shape)
        values = memory[slot_bytes + half :].view(self._dtype).view(shape)
        return _Overlay(keys, values, slots)

    def _slices(self, unit: Unit, region: Region) -> list[tuple[_Home, torch.Tensor]]:
        """The region's bytes of each streamed part."""
        found, start = [], 0
        for home in unit.homes:
            if home.streamed:
                nbytes = unit.layout.part_bytes(home.part)
                found.append((home, region.data[start : start + nbytes]))
                start += nbytes
        return found

    def _views(self, unit: Unit, region: Region | None) -> list[PartView]:
        brought = {id(h): data for h, data in self._slices(unit, region)} if region is not None else {}
        return [self._view(unit.layout, h.part, brought.get(id(h), h.memory)) for h in unit.homes]

    def _view(self, layout: UnitLayout, part: Part, data: torch.Tensor | None) -> PartView:
        assert data is not None
        area, size = layout.area_bytes(part), part.rows * layout.row_bytes
        shape = (part.rows, layout.slots, layout.width)
        keys, values = (data[a : a + size].view(self._dtype).view(shape) for a in (0, area))
        return PartView(part.start, keys, values)

    @staticmethod
    def _live_views(unit: Unit, views: list[PartView]) -> list[PartView]:
        rows = unit.sequences * unit.layout.kv_heads
        return [
            PartView(v.start, v.keys[: rows - v.start], v.values[: rows - v.start]) for v in views if v.start < rows
        ]

    def _load_part(self, unit: Unit, home: _Home, data: torch.Tensor, after: list[Waitable]) -> list[Done]:
        """Bring the live rows of one part; keys and values are two areas."""
        layout, part = unit.layout, home.part
        area = layout.area_bytes(part)
        size = min(part.rows, max(0, unit.sequences * layout.kv_heads - part.start)) * layout.row_bytes
        if not size:
            return []
        loads = []
        for start in (0, area):
            if home.memory is not None:
                source = home.memory[start : start + size]
                loads.append(self._mover.copy("h2d", "load_cache", data[start : start + size], source, after))
            else:
                assert self._file is not None
                dst = data[start : start + min(area, round_up(size, PAGE))]
                loads.append(
                    self._mover.read(
                        "load_cache", dst, self._ring_memory, self._file, home.offset + start, size, after=after
                    )
                )
        return loads

    def _store_part(
        self, unit: Unit, home: _Home, view: PartView, data: torch.Tensor, slots: torch.Tensor, whole: bool,
        fence: Waitable,
    ) -> list[Waitable]:  # fmt: skip
        columns = slots[view.start : view.end]
        if home.overlay is not None:
            assert self._file is not None
            if not whole:
                home.overlay.add(view, columns)
                if home.overlay.used < WRITE_BACK_STEPS:
                    return []
            home.overlay.used = 0
            return [self._mover.write("store_cache", self._file, home.offset, data, self._ring_memory, [fence])]
        assert home.memory is not None
        if whole:
            return [self._mover.copy("d2h", "store_cache", home.memory, data, [fence])]
        target = self._view(unit.layout, home.part, home.memory)
        pair = (target.keys[: len(columns)], target.values[: len(columns)])
        return [self._mover.copy_columns("store_cache", pair, (view.keys, view.values), columns, [fence])]
