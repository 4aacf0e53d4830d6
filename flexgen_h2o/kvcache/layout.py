"""The byte layout of one unit of the cache: slots or state. This module has no tensors.

A unit is one (layer, micro-batch). Its rows are (sequence, kv-head) pairs, which the cache shares
cut into at most three parts. A part is `segments` times a key area and a value area. Each area is
(rows, segment slots, bytes of a slot) and starts on a page, so that it can be read and written with
O_DIRECT. A cache that grows and is streamed has several segments, so that only those that hold
columns move. The metadata of the slots is stored separately, where attention runs.

A unit of state has the same homes, loads and stores. Each row has one slot, which holds as many
bytes as the state of the row takes, whatever the number of tokens (`UnitLayout.of_state`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from flexgen_h2o.core.packing import KVPacking, KVSizes, window_of
from flexgen_h2o.core.units import ALIGN, PAGE, SEGMENT_SLOTS, WRITE_BACK_STEPS, round_up
from flexgen_h2o.tiers.stream import Part, Shares, split_rows

METADATA_ITEMSIZE = 4  # int32 positions and victims, float32 scores and norms


@dataclass(frozen=True)
class UnitLayout:
    """The sizes of one KV unit and of its parts. The engine's memory plan makes it.

    Names that end in `_bytes` are sizes in bytes.
    """

    sequences: int
    kv_heads: int  # rows per sequence
    slots: int  # per row
    width: int  # numbers of a key, and of a value
    itemsize: int  # bytes of a number that is not packed
    shares: Shares  # shares of the unit's rows on device, host and disk
    # Tensors that the eviction policy records of each slot (`Needs.record`)
    record: tuple[str, ...] = ()
    streamed: bool = True  # some part is brought from another tier for each use
    # How compressed columns are stored in their slots. None: a slot holds `width` numbers of
    # `itemsize` bytes for the key, and as many for the value.
    packing: KVPacking | None = None
    window: int = 0  # at most this many of the newest columns are also kept whole (`window_of`)
    is_state: bool = False  # the unit holds state: one slot of `width` numbers per row, no values

    @classmethod
    def of_state(
        cls, sequences: int, rows: int, width: int, itemsize: int, shares: Shares
    ) -> UnitLayout:
        """Return the layout of a unit of state.

        rows: rows per sequence, for example the heads of a layer.
        width: numbers of the state of a row. itemsize: bytes of a number.
        """
        return cls(sequences, rows, 1, width, itemsize, shares, is_state=True)

    @property
    def kind(self) -> str:
        """Kind of the unit, by which a plan reports its bytes: "kv" for slots, or "state"."""
        return "state" if self.is_state else "kv"

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts of the unit that have rows, by tier."""
        return split_rows(self.sequences * self.kv_heads, self.shares)

    @cached_property
    def sizes(self) -> KVSizes:
        """The sizes of one row."""
        return KVSizes(self.width, self.packing, self.window, self.itemsize)

    @property
    def slot_bytes(self) -> tuple[int, int]:
        """Bytes of a key in its slot, and of a value. A unit of state has no values."""
        keys, values = self.sizes.slot_bytes
        return keys, 0 if self.is_state else values

    @property
    def column_bytes(self) -> int:
        """Bytes of a key and a value in their slot."""
        return sum(self.slot_bytes)

    @property
    def beside_bytes(self) -> int:
        """Bytes of one row that are needed in addition to packed slots."""
        return self.sizes.beside(self.slots)

    @property
    def segments(self) -> int:
        """Number of segments.

        It is 1 unless slots fill up step by step and are streamed, because attention reads long
        runs of slots faster.
        """
        return -(-self.slots // SEGMENT_SLOTS) if self.streamed and not self.record else 1

    @property
    def segment_slots(self) -> int:
        """Slots of a segment per row.

        All segments are equal, so the last one may have a few slots that are never used.
        """
        return -(-self.slots // self.segments)

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Bytes of one row's keys in one segment, and of its values."""
        keys, values = self.slot_bytes
        return self.segment_slots * keys, self.segment_slots * values

    def area_bytes(self, part: Part) -> tuple[int, int]:
        """Return the bytes of a part's key area in one segment, and of its value area.

        Both are whole pages.
        """
        keys, values = self.row_bytes
        return round_up(part.rows * keys, PAGE), round_up(part.rows * values, PAGE)

    def part_bytes(self, part: Part) -> int:
        """Return the bytes of all areas of a part."""
        return self.segments * sum(self.area_bytes(part))

    def room_bytes(self, part: Part) -> int:
        """Return the bytes that hold this part in this layout, and in any with fewer slots or rows.

        `part_bytes` may be too few, because with fewer slots a segment may round up to more pages.
        """
        most_slots = self.slots + self.segments - 1
        return part.rows * most_slots * self.column_bytes + 2 * self.segments * PAGE

    def live_ranges(self, part: Part, sequences: int, columns: int) -> list[tuple[int, int]]:
        """Return the (offset, bytes) of the segments that hold live columns, within the part.

        These are all segments with any of the first `columns` slots, for the rows of the first
        `sequences` sequences. Ranges on adjacent pages are merged.
        """
        rows = min(part.rows, max(0, sequences * self.kv_heads - part.start))
        # State has no values.
        areas = [of for of in zip(self.area_bytes(part), self.row_bytes, strict=True) if of[0]]
        ranges: list[tuple[int, int]] = []
        start = 0
        for area, row_bytes in (
            areas * min(self.segments, -(-columns // self.segment_slots)) if rows else []
        ):
            before, size = ranges[-1] if ranges else (0, -PAGE)
            if round_up(before + size, PAGE) == start:
                ranges[-1] = before, start + rows * row_bytes - before
            else:
                ranges.append((start, rows * row_bytes))
            start += area
        return ranges

    def most_part_rows(self, share: float) -> int:
        """Return the most rows that a tier with this share gets of this unit or of a smaller one.

        In a smaller unit, rounding may give a part one more row.
        """
        rows = self.sequences * self.kv_heads
        return min(rows, math.ceil(rows * share) + 1) if 0 < share < 1 else round(rows * share)

    def overlay_bytes(self, part: Part) -> int:
        """Return the bytes of RAM for the columns of a disk part that wait to be written back.

        Their slot numbers (int64) are included. It is 0 for state, which changes in every step and
        is always written back whole.
        """
        return 0 if self.is_state else part.rows * WRITE_BACK_STEPS * (self.column_bytes + 8)

    @property
    def sequence_bytes(self) -> int:
        """Bytes of one sequence's slots, and of what packed slots need in addition.

        The record of slots (positions, scores, ...) is not included.
        """
        return self.kv_heads * (self.slots * self.column_bytes + self.beside_bytes)

    def metadata_bytes(self, part: Part) -> int:
        """Return the bytes of a part's metadata.

        These are the policy's record of its slots, one victim per row, and what packed slots
        need in addition.
        """
        return round_up(part.rows * (self._record_bytes + self.beside_bytes), ALIGN)

    @property
    def _record_bytes(self) -> int:
        """Bytes of one row's record: of its slots and its victim."""
        numbers = len(self.record) * self.slots + 1
        return numbers * METADATA_ITEMSIZE if self.record else 0

    @property
    def whole_columns(self) -> int:
        """Number of newest columns per row that are also kept whole; 0 if slots are not packed."""
        return 0 if self.packing is None else window_of(self.window, self.slots)
