"""The store of KV units: loads them to where attention runs, and writes changes back to tiers.

Each part of a unit has a home: its bytes on a tier. Memory for the homes is allocated once for the
largest block, and divided anew for each block. Parts whose home is where attention runs are used in
place. The others are streamed through a ring. New columns of a disk part wait in a RAM overlay, and
the part is written back every WRITE_BACK_STEPS steps. Only segments that hold columns move. The
metadata of slots stays where attention runs.

A unit is slots or state (`UnitLayout.is_state`). State has no overlay, because it changes in every
step. It is zero when a sequence joins.

This module knows rows and slots. It does not know prompts, eviction policies or models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from flexgen_h2o.core.config import TIERS
from flexgen_h2o.core.units import PAGE, WRITE_BACK_STEPS, round_up
from flexgen_h2o.kernels.slots import get_last_slots, put_slots
from flexgen_h2o.kvcache.budgets import Move
from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.kvcache.part import (
    KVPart,
    first_rows,
    move_rows,
    part_view,
    record_view,
    reset_state,
    stored_dtype,
)
from flexgen_h2o.tiers.disk import DirectFile, FileRange
from flexgen_h2o.tiers.stream import (
    Done,
    Part,
    Region,
    Waitable,
    is_streamed,
    wait_all,
    wait_all_on_card,
)
from flexgen_h2o.tiers.transfers import Memory, Mover

CacheKey = tuple[int, int, int]  # sweep, transformer block, micro-batch


class Overlay:
    """The newest columns of a part on disk, in RAM: up to WRITE_BACK_STEPS per row.

    memory: uint8, `UnitLayout.overlay_bytes` of the part.
    dtype: of keys and values that are not packed.
    """

    def __init__(
        self, layout: UnitLayout, part: Part, memory: torch.Tensor, dtype: torch.dtype
    ) -> None:
        dtype = stored_dtype(layout, dtype)
        shape = part.rows, WRITE_BACK_STEPS
        pieces = memory.split(
            [part.rows * WRITE_BACK_STEPS * nbytes for nbytes in (8, *layout.slot_bytes)]
        )
        self._slots = pieces[0].view(torch.int64).view(shape)
        self._keys, self._values = (t.view(dtype).view(*shape, -1) for t in pieces[1:])
        self._used = 0

    @property
    def is_full(self) -> bool:
        """Whether the part must be written back before the next column is added."""
        return self._used == WRITE_BACK_STEPS

    def clear(self) -> None:
        """Drop all columns, after the part was written back."""
        self._used = 0

    def add(self, view: KVPart, slots: torch.Tensor) -> None:
        """Copy the columns of the view's rows at `slots` ((rows,) int64) into the overlay.

        If the overlay has an older entry for a slot, both entries get the newer column. So `apply`
        may write the entries in any order.
        """
        rows = view.rows
        where = view.keys.device
        self._slots[:rows, self._used] = slots.to(self._slots.device)
        self._used += 1
        waiting = self._keys[:rows, : self._used], self._values[:rows, : self._used]
        brought = waiting[0].to(where), waiting[1].to(where)
        get_last_slots(
            (view.keys, view.values), self._slots[:rows, : self._used].to(where), brought
        )
        if where != self._keys.device:
            for ours, theirs in zip(waiting, brought, strict=True):
                ours.copy_(theirs)

    def apply(self, view: KVPart) -> None:
        """Write the columns into the view, which holds the part as it was last written back."""
        rows = view.rows
        where = view.keys.device
        if self._used:
            slots, keys, values = (
                t[:rows, : self._used].to(where) for t in (self._slots, self._keys, self._values)
            )
            put_slots((view.keys, view.values), slots, (keys, values))


@dataclass
class _Home:
    """The place of a part's bytes for one block. `CacheStore._take_home` makes it."""

    part: Part
    streamed: bool  # it is brought through the ring for each use
    memory: torch.Tensor | None = None  # uint8 in RAM or device memory; None on disk
    offset: int = 0  # bytes, in the cache file; only on disk
    overlay: Overlay | None = None  # only on disk
    # What is kept besides slots, where attention runs (`record_view`)
    record: dict[str, Any] = field(default_factory=dict)


@dataclass
class CacheUnit:
    """The KV cache of one (transformer block, micro-batch): its parts' homes, and what they hold.

    `CacheStore.begin_block` makes it.
    """

    layout: UnitLayout
    homes: list[_Home]  # one per part
    sequences: int  # sequences of the micro-batch that the unit holds now
    columns: int = 0  # slots that its fullest row has filled; 0 before the prefill sweep
    version: int = 0  # the last change of the micro-batch's rows that was applied (`_MicroBatch`)
    in_use: bool = False  # from `load` or `open` until `close`, or until the micro-batch is empty
    # Views of the live rows if all parts are used in place; else empty. Set by `CacheStore.open`.
    in_place: list[KVPart] = field(default_factory=list)
    # Events of the stores that the last `CacheStore.close` started
    last_store: list[Waitable] = field(default_factory=list)

    def live_views(self, views: list[KVPart]) -> list[KVPart]:
        """Return the views of the rows that sequences use now."""
        return first_rows(views, self.sequences * self.layout.kv_heads)


@dataclass
class _MicroBatch:
    """The sequences of a micro-batch after the last change. `CacheStore.change_rows` sets it."""

    live: int  # sequences now
    left: int  # sequences that stayed in the last change; those that entered come behind them
    moves: Sequence[Move] = ()  # the moves that brought them to the front
    version: int = 0  # number of changes in this block
    final: int = -1  # the newest sweep whose sequences are final
    first: int = 0  # the first sweep of the sequences that entered when it was empty


class CacheStore:
    """The units of the current block, which are the source of a Stream.

    dtype: of keys and values that are not packed.
    memory: uint8 arenas for slots, by tier. file: the arena on disk.
    overlay: uint8 arena in RAM for the overlays.
    metadata: uint8 arenas for metadata, by the place where attention runs.
    attends_on_host: attention runs on the CPU.
    """

    def __init__(
        self,
        mover: Mover,
        dtype: torch.dtype,
        memory: dict[str, torch.Tensor],
        file: DirectFile | None,
        overlay: torch.Tensor,
        metadata: dict[str, torch.Tensor],
        attends_on_host: bool,
    ) -> None:
        self._mover = mover
        self._dtype = dtype
        self._memory = memory
        self._file = file
        self._overlay = overlay
        self._metadata = metadata
        # Attention runs on the host if the device is the CPU, or with --cpu-cache-compute.
        self._streamed_tiers = frozenset(t for t in TIERS if is_streamed(t, attends_on_host))
        self._ring_memory: Memory = "host" if attends_on_host else "device"
        self._units: dict[tuple[int, int], CacheUnit] = {}
        self._batches: list[_MicroBatch] = []
        self._is_open = False

    def begin_block(
        self, layouts: Sequence[Sequence[UnitLayout]], rows: Sequence[int], is_open: bool = False
    ) -> None:
        """Divide the arenas into homes for the units of a new block.

        layouts: for each transformer block, one layout per micro-batch.
        rows: sequences of each micro-batch now; its layout may have room for more.
        is_open: sequences may enter micro-batches that have none.
        """
        self._is_open = is_open
        self._batches = [_MicroBatch(count, count) for count in rows]
        used: Counter[str] = Counter()
        self._units = {
            (block, k): CacheUnit(
                layout, [self._take_home(layout, part, used) for part in layout.parts], rows[k]
            )
            for block, of_block in enumerate(layouts)
            for k, layout in enumerate(of_block)
        }

    def begin_sweep(self, micro_batch: int) -> None:
        """Record that the sequences of the micro-batch's next sweep are final."""
        self._batches[micro_batch].final += 1

    def change_rows(
        self, micro_batch: int, moves: Sequence[Move], left: int, entering: int = 0
    ) -> None:
        """Record that sequences left a micro-batch after a sweep, and that others entered.

        `moves` bring the `left` sequences that stay to the front. The `entering` ones come behind
        them. Each unit applies the change at its next use, which is in the next sweep.
        """
        batch = self._batches[micro_batch]
        if not batch.live:
            batch.first = batch.final + 1
        batch.live = left + entering
        batch.left = left
        batch.moves = moves
        batch.version += 1
        if not batch.live:  # Nobody will use the units that were loaded ahead.
            for (_, k), unit in self._units.items():
                unit.in_use = unit.in_use and k != micro_batch

    # Source of a Stream[CacheKey]

    def nbytes(self, key: CacheKey) -> int:
        """Return the bytes that the unit needs in the ring."""
        unit = self._units[key[1:]]
        return sum(unit.layout.part_bytes(h.part) for h in unit.homes if h.streamed)

    def is_needed(self, key: CacheKey) -> bool:
        """Return whether the sweep will use the unit, as far as is known now."""
        batch = self._batches[key[2]]
        sweep = key[0]
        return sweep >= batch.first if batch.live else self._is_open and sweep > batch.final

    def is_ready(self, key: CacheKey) -> bool:
        """Return whether the unit may be loaded: it is unused, and has live sequences."""
        unit = self._units[key[1:]]
        return not unit.in_use and self._batches[key[2]].live > 0

    def load(self, key: CacheKey, region: Region) -> list[Done]:
        """Start to load the unit's streamed parts into the region, and return the loads' events."""
        unit = self._units[key[1:]]
        batch = self._batches[key[2]]
        unit.in_use = True  # A later sweep's load must not overtake this sweep's use.
        loads: list[Done] = []
        # Otherwise the unit holds no row that stays, so there is nothing to load.
        if unit.columns > 0 and (unit.version == batch.version or batch.left > 0):
            for home, data in zip(unit.homes, self._data(unit, region), strict=True):
                if home.streamed:
                    loads += self._load(unit, home, data, [*region.after, *unit.last_store])
        return loads

    # Compute side

    def open(self, key: CacheKey, region: Region | None) -> tuple[list[KVPart], bool]:
        """Return views of the unit's live rows, and whether whole parts must be stored afterwards.

        The overlay and the moves are applied. Rows that enter are the last ones; their slots still
        hold old data, and their state is zero.

        region: the ring region that `load` filled; None if no part is streamed.
        """
        unit = self._units[key[1:]]
        batch = self._batches[key[2]]
        unit.in_use = True
        is_new = not unit.columns
        has_changed = unit.version != batch.version
        if unit.in_place and not has_changed:
            return unit.in_place, is_new
        if region is not None and (is_new or (has_changed and batch.live > batch.left)):
            wait = wait_all if self._ring_memory == "host" else wait_all_on_card
            # No load waited for the bytes that the entering rows will overwrite.
            wait([*region.after, *unit.last_store])
        views = self._views(unit, region)
        # The overlay refers to the rows as they are before the change.
        for home, view in zip(unit.homes, unit.live_views(views), strict=False):
            if home.overlay is not None:
                home.overlay.apply(view)
        if has_changed:
            move_rows(views, batch.moves, unit.layout.kv_heads)
        unit.version = batch.version
        unit.sequences = batch.live
        live = unit.live_views(views)
        if unit.layout.is_state and (is_new or has_changed):
            reset_state(live, 0 if is_new else batch.left * unit.layout.kv_heads)
        unit.in_place = live if region is None else []
        return live, has_changed or is_new

    def close(
        self,
        key: CacheKey,
        region: Region | None,
        columns: int,
        slots: Sequence[torch.Tensor] | None,
        fence: Callable[[], Waitable],
    ) -> list[Waitable]:
        """Start to store what compute changed. Return the events after which the region is free.

        columns: columns that the fullest row has now.
        slots: the slots that changed, (rows,) int64 for each view of `open`. None: all columns, as
            in every step of a unit of state.
        fence: makes an event that is done when compute is; not called without a region.
        """
        unit = self._units[key[1:]]
        unit.columns = columns
        unit.in_use = False
        unit.last_store = []
        if region is None:
            return []
        stores: list[Waitable] = [done := fence()]
        parts = zip(
            unit.homes,
            unit.live_views(self._views(unit, region)),
            self._data(unit, region),
            strict=False,
        )
        for i, (home, view, data) in enumerate(parts):
            if home.streamed and slots is None:
                stores += self._store(unit, home, data, done)
            elif home.streamed and slots is not None:
                stores += self._store_columns(unit, home, view, data, slots[i], done)
        unit.last_store = stores[1:]
        return stores

    def settle(self) -> None:
        """Wait for all running stores, so that the next block may divide the arenas anew."""
        for unit in self._units.values():
            wait_all(unit.last_store)

    def _take_home(self, layout: UnitLayout, part: Part, used: Counter[str]) -> _Home:
        """Return a home for a part in the next free bytes of its arenas.

        used: bytes that are taken, by arena; increased here.
        """

        def take(arena: torch.Tensor, name: str, nbytes: int) -> torch.Tensor:
            start = used[name]
            used[name] += nbytes
            return arena[start : start + nbytes]

        streamed = part.tier in self._streamed_tiers
        place: str = self._ring_memory if streamed else part.tier
        home = _Home(part, streamed)
        if nbytes := layout.metadata_bytes(part):
            data = take(self._metadata[place], f"metadata on {place}", nbytes)
            home.record = record_view(layout, part, data, self._dtype)
        if part.tier == "disk":
            if nbytes := layout.overlay_bytes(part):
                memory = take(self._overlay, "overlay", nbytes)
                home.overlay = Overlay(layout, part, memory, self._dtype)
            home.offset = used["disk"]
            used["disk"] += layout.part_bytes(part)
        else:
            home.memory = take(self._memory[part.tier], part.tier, layout.part_bytes(part))
        return home

    def _data(self, unit: CacheUnit, region: Region | None) -> list[torch.Tensor]:
        """Return the bytes of each part where attention runs: in the region, or in its home."""
        found = []
        start = 0
        for home in unit.homes:
            if home.streamed:
                assert region is not None
                nbytes = unit.layout.part_bytes(home.part)
                found.append(region.data[start : start + nbytes])
                start += nbytes
            else:
                assert home.memory is not None
                found.append(home.memory)
        return found

    def _views(self, unit: CacheUnit, region: Region | None) -> list[KVPart]:
        return [
            part_view(unit.layout, home.part, data, self._dtype, home.record)
            for home, data in zip(unit.homes, self._data(unit, region), strict=True)
        ]

    def _load(
        self, unit: CacheUnit, home: _Home, data: torch.Tensor, after: list[Waitable]
    ) -> list[Done]:
        """Start to load the columns of a part's live rows into `data`, and return the events.

        after: events that the loads wait for.
        """
        loads = list[Done]()
        for here, offset, pages in self._live_ranges(unit, home):
            if home.memory is not None:
                source = home.memory[here]
                loads.append(self._mover.copy("h2d", "load_cache", data[here], source, after))
            else:
                assert self._file is not None
                there = FileRange(self._file, offset, here.stop - here.start)
                target = data[pages]
                loads.append(
                    self._mover.read("load_cache", target, self._ring_memory, there, after)
                )
        return loads

    def _store(
        self, unit: CacheUnit, home: _Home, data: torch.Tensor, fence: Waitable
    ) -> list[Done]:
        """Start to store all columns of a part's live rows after `fence`, and return the events."""
        stores = list[Done]()
        for here, offset, pages in self._live_ranges(unit, home):
            if home.memory is not None:
                target = home.memory[here]
                stores.append(self._mover.copy("d2h", "store_cache", target, data[here], [fence]))
            else:
                assert self._file is not None
                source = data[pages]
                memory = self._ring_memory
                stores.append(
                    self._mover.write("store_cache", self._file, offset, source, memory, [fence])
                )
        if home.overlay is not None:
            home.overlay.clear()
        return stores

    def _live_ranges(self, unit: CacheUnit, home: _Home) -> Iterator[tuple[slice, int, slice]]:
        """Yield the ranges of a part's bytes that hold columns of live rows.

        Each is (the bytes, their offset in the file, the whole pages of the bytes).
        """
        for start, size in unit.layout.live_ranges(home.part, unit.sequences, unit.columns):
            pages = slice(start, start + round_up(size, PAGE))
            yield slice(start, start + size), home.offset + start, pages

    def _store_columns(
        self,
        unit: CacheUnit,
        home: _Home,
        view: KVPart,
        data: torch.Tensor,
        slots: torch.Tensor,
        fence: Waitable,
    ) -> list[Done]:
        """Start to store only the columns at `slots` after `fence`, and return the events.

        A part on disk adds them to its overlay, and is stored whole when the overlay is full.
        """
        if home.overlay is not None:
            home.overlay.add(view, slots)
            return self._store(unit, home, data, fence) if home.overlay.is_full else []
        assert home.memory is not None
        target = part_view(unit.layout, home.part, home.memory, self._dtype)
        pairs = ((target.keys, view.keys), (target.values, view.values))
        return [self._mover.copy_kv_entries("store_cache", pairs, slots, [fence])]
