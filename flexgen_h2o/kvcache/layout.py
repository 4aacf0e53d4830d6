"""Where the slots of one KV unit lie: geometry in bytes, no tensors.

A unit is one (layer, micro-batch). Its rows are (sequence, kv-head) pairs, cut into at most three parts by the cache
shares. A part is `segments` times a key and a value area, each (rows, segment slots, bytes of a slot) and starting on a
page, so that it can be read and written with O_DIRECT. A cache that grows and is streamed has several segments, so that
only those that hold columns move. The metadata of the slots lies elsewhere, where attention runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from flexgen_h2o.core.packing import KVPacking, KVSizes, window_of
from flexgen_h2o.core.units import ALIGN, PAGE, SEGMENT_SLOTS, WRITE_BACK_STEPS, round_up
from flexgen_h2o.kvcache.eviction.policy import NO_RECORD, RowRecord
from flexgen_h2o.tiers.stream import Part, Shares, split_rows

METADATA_ITEMSIZE = 4  # int32 positions and victims, float32 scores and norms


@dataclass(frozen=True)
class UnitLayout:
    """Sizes in bytes unless named otherwise.

    shares: of the unit's rows on device, host and disk. record: what an eviction policy keeps besides columns.
    streamed: some part is brought from another tier for each use. packing: how compressed columns lie in their slots;
    None where a slot holds `width` numbers of `itemsize` bytes. window: at most this many of the newest columns are
    also kept unpacked (`window_of`).
    """

    sequences: int
    kv_heads: int
    slots: int
    width: int
    itemsize: int
    shares: Shares
    record: RowRecord = NO_RECORD
    streamed: bool = True
    packing: KVPacking | None = None
    window: int = 0

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        return split_rows(self.sequences * self.kv_heads, self.shares)

    @cached_property
    def sizes(self) -> KVSizes:
        """What a row and kv-head takes."""
        return KVSizes(self.width, self.packing, self.window, self.itemsize)

    @property
    def slot_bytes(self) -> tuple[int, int]:
        """A key of one slot, and a value."""
        return self.sizes.slot_bytes

    @property
    def column_bytes(self) -> int:
        """A key and a value of one slot."""
        return self.sizes.column_bytes

    @property
    def beside_bytes(self) -> int:
        """Of a row: what lies beside packed slots."""
        return self.sizes.beside(self.slots)

    @property
    def segments(self) -> int:
        """One, unless slots fill up step by step and are streamed: attention reads long runs of slots faster."""
        return -(-self.slots // SEGMENT_SLOTS) if self.streamed and not self.record else 1

    @property
    def segment_slots(self) -> int:
        """Slots of a segment. All segments are equal, so the last may have a few slots that are never used."""
        return -(-self.slots // self.segments)

    @property
    def row_bytes(self) -> tuple[int, int]:
        """Keys of one row in one segment, and values."""
        keys, values = self.slot_bytes
        return self.segment_slots * keys, self.segment_slots * values

    def area_bytes(self, part: Part) -> tuple[int, int]:
        """The key area of one segment of a part, and the value area, whole pages."""
        keys, values = self.row_bytes
        return round_up(part.rows * keys, PAGE), round_up(part.rows * values, PAGE)

    def part_bytes(self, part: Part) -> int:
        return self.segments * sum(self.area_bytes(part))

    def room_bytes(self, part: Part) -> int:
        """Bytes that hold this part in this layout and in any with fewer slots or rows.

        `part_bytes` may be too few: with fewer slots a segment may round up to more whole pages.
        """
        most_slots = self.slots + self.segments - 1
        return part.rows * most_slots * self.column_bytes + 2 * self.segments * PAGE

    def live_ranges(self, part: Part, sequences: int, columns: int) -> list[tuple[int, int]]:
        """(offset, bytes) within the part of the first `columns` slots of the first `sequences`.

        Adjacent ranges are merged.
        """
        rows = min(part.rows, max(0, sequences * self.kv_heads - part.start))
        areas = list(zip(self.area_bytes(part), self.row_bytes, strict=True))
        ranges: list[tuple[int, int]] = []
        start = 0
        for area, row_bytes in areas * min(self.segments, -(-columns // self.segment_slots)) if rows else []:
            before, size = ranges[-1] if ranges else (0, -PAGE)
            if round_up(before + size, PAGE) == start:
                ranges[-1] = before, start + rows * row_bytes - before
            else:
                ranges.append((start, rows * row_bytes))
            start += area
        return ranges

    def most_part_rows(self, share: float) -> int:
        """Most rows that a tier with this share gets of a unit of so many rows or fewer.

        With fewer rows, rounding may give a part one more row.
        """
        rows = self.sequences * self.kv_heads
        return min(rows, math.ceil(rows * share) + 1) if 0 < share < 1 else round(rows * share)

    def overlay_bytes(self, part: Part) -> int:
        """RAM for the columns of a disk part that wait to be written back, with their slot numbers (int64)."""
        return part.rows * WRITE_BACK_STEPS * (self.column_bytes + 8)

    @property
    def sequence_bytes(self) -> int:
        """What a sequence holds of keys and values: slots, and what lies beside packed slots. Not what is recorded of
        slots (positions, scores, ...)."""
        return self.kv_heads * self.sizes.nbytes(self.slots)

    def metadata_bytes(self, part: Part) -> int:
        """What the policy records of the part's slots, a victim for each row, and what lies beside packed slots."""
        return round_up(part.rows * (self._record_bytes + self.beside_bytes), ALIGN)

    def metadata_end(self, part: Part) -> int:
        """Where whole columns begin."""
        return part.rows * self._record_bytes

    @property
    def _record_bytes(self) -> int:
        """Of a row: what the policy records of its slots, its victim, and what is kept of its prompt's queries."""
        numbers = len(self.record.names) * self.slots + 1 + self.record.query_numbers
        return numbers * METADATA_ITEMSIZE if self.record else 0

    @property
    def whole_columns(self) -> int:
        """Newest columns of a row that have room beside its packed slots."""
        return 0 if self.packing is None else window_of(self.window, self.slots)
