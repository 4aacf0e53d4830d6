"""Where the slots of one KV unit lie: geometry in bytes, no tensors.

A unit is one (layer, micro-batch). Its rows are (sequence, kv-head) pairs, cut into at most three parts by the cache
shares. A part is two areas, keys then values, each (rows, slots, head width), each starting on a page so that it can be
read and written with O_DIRECT.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from flexgen_h2o.limits import PAGE, WRITE_BACK_STEPS
from flexgen_h2o.tiers.placement import Part, Shares, split_rows
from flexgen_h2o.units import round_up


@dataclass(frozen=True)
class UnitLayout:
    """`rows` = sequences x kv_heads. Sizes in bytes unless named otherwise."""

    sequences: int
    kv_heads: int
    slots: int
    width: int
    itemsize: int
    parts: tuple[Part, ...]

    @property
    def row_bytes(self) -> int:
        """Keys (or values) of one row."""
        return self.slots * self.width * self.itemsize

    def area_bytes(self, part: Part) -> int:
        """The key (or value) area of a part, whole pages."""
        return round_up(part.rows * self.row_bytes, PAGE)

    def part_bytes(self, part: Part) -> int:
        return 2 * self.area_bytes(part)

    def most_part_rows(self, share: float) -> int:
        """Most rows that the tier with this share gets of a unit of these or fewer rows.

        With fewer rows, rounding may give a part one more than here.
        """
        rows = self.sequences * self.kv_heads
        return min(rows, math.ceil(rows * share) + 1) if 0 < share < 1 else round(rows * share)

    def overlay_bytes(self, part: Part) -> int:
        """RAM for the columns of a disk part that wait to be written back, with their slot numbers (int64)."""
        return part.rows * WRITE_BACK_STEPS * (2 * self.width * self.itemsize + 8)


def unit_layout(sequences: int, kv_heads: int, slots: int, width: int, itemsize: int, shares: Shares) -> UnitLayout:
    parts = split_rows(sequences * kv_heads, shares)
    return UnitLayout(sequences, kv_heads, slots, width, itemsize, parts)
