"""Where the slots of one KV unit lie: geometry in bytes, no tensors.

A unit is one (layer, micro-batch). Its rows are (sequence, kv-head) pairs, cut into at most three parts by the cache
shares. Where a cache grows and travels its slots are cut into segments, so that it moves only what it holds: a part is
`segments` times a key and a value area, each (rows, segment slots, bytes of a slot) and starting on a page, so that it
can be read and written with O_DIRECT. What an eviction policy records of each slot lies apart, where attention runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flexgen_h2o.core.packing import SlotPacking
from flexgen_h2o.core.units import ALIGN, PAGE, SEGMENT_SLOTS, WRITE_BACK_STEPS, round_up
from flexgen_h2o.tiers.placement import Part, Shares, split_rows

RECORD_ITEMSIZE = 4  # int32 positions, float32 scores and norms, int32 victims


@dataclass(frozen=True)
class UnitLayout:
    """`rows` = sequences x kv_heads. Sizes in bytes unless named otherwise.

    record: what is kept of each slot besides its key and value (kvcache/eviction/policy.py); () for the full cache.
    streamed: some part is brought from another tier for each use. packing: how compressed columns lie in their slots;
    None where a slot holds `width` numbers of `itemsize` bytes.
    """

    sequences: int
    kv_heads: int
    slots: int
    width: int
    itemsize: int
    parts: tuple[Part, ...]
    record: tuple[str, ...] = ()
    streamed: bool = True
    packing: SlotPacking | None = None

    @property
    def slot_bytes(self) -> int:
        """A key (or a value) of one slot."""
        return self.width * self.itemsize if self.packing is None else self.packing.slot_bytes

    @property
    def segments(self) -> int:
        """One, but where slots fill up step by step and travel: attention reads long runs of slots faster."""
        return -(-self.slots // SEGMENT_SLOTS) if self.streamed and not self.record else 1

    @property
    def segment_slots(self) -> int:
        """Slots of a segment; all segments are equal, so the last may hold a few slots that are never used."""
        return -(-self.slots // self.segments)

    @property
    def row_bytes(self) -> int:
        """Keys (or values) of one row in one segment."""
        return self.segment_slots * self.slot_bytes

    def area_bytes(self, part: Part) -> int:
        """The key (or value) area of one segment of a part, whole pages."""
        return round_up(part.rows * self.row_bytes, PAGE)

    def part_bytes(self, part: Part) -> int:
        return 2 * self.segments * self.area_bytes(part)

    def room_bytes(self, part: Part) -> int:
        """Bytes that hold this part in this layout and in any with fewer slots or rows.

        `part_bytes` alone do not: with fewer slots a segment may round up to more whole pages.
        """
        most_slots = self.slots + self.segments - 1
        return 2 * (part.rows * most_slots * self.slot_bytes + self.segments * PAGE)

    def live_ranges(self, part: Part, sequences: int, columns: int) -> list[tuple[int, int]]:
        """(offset, bytes) within the part that hold the first `columns` slots of the first `sequences` sequences.

        Ranges that touch are one.
        """
        area = self.area_bytes(part)
        live = min(part.rows, max(0, sequences * self.kv_heads - part.start)) * self.row_bytes
        areas = 2 * min(self.segments, -(-columns // self.segment_slots))
        if not live or not areas:
            return []
        if round_up(live, PAGE) == area:
            return [(0, (areas - 1) * area + live)]
        return [(i * area, live) for i in range(areas)]

    def most_part_rows(self, share: float) -> int:
        """Most rows that the tier with this share gets of a unit of these or fewer rows.

        With fewer rows, rounding may give a part one more than here.
        """
        rows = self.sequences * self.kv_heads
        return min(rows, math.ceil(rows * share) + 1) if 0 < share < 1 else round(rows * share)

    def overlay_bytes(self, part: Part) -> int:
        """RAM for the columns of a disk part that wait to be written back, with their slot numbers (int64)."""
        return part.rows * WRITE_BACK_STEPS * (2 * self.slot_bytes + 8)

    def record_bytes(self, part: Part) -> int:
        """What the policy records of the part's slots, and a victim for each row."""
        words = part.rows * (len(self.record) * self.slots + 1) if self.record else 0
        return round_up(words * RECORD_ITEMSIZE, ALIGN)


def unit_layout(
    sequences: int, kv_heads: int, slots: int, width: int, itemsize: int, shares: Shares, record: tuple[str, ...] = (),
    streamed: bool = True, packing: SlotPacking | None = None,
) -> UnitLayout:  # fmt: skip
    parts = split_rows(sequences * kv_heads, shares)
    return UnitLayout(sequences, kv_heads, slots, width, itemsize, parts, record, streamed, packing)
