"""Bytes a second of the columns that wait in RAM for KV units on disk."""

from __future__ import annotations

from itertools import cycle

import torch

from flexgen_h2o.kvcache.layout import UnitLayout, unit_layout
from flexgen_h2o.kvcache.overlay import Overlay
from flexgen_h2o.kvcache.view import PartView, part_view
from flexgen_h2o.limits import SEGMENT_SLOTS, WRITE_BACK_STEPS
from flexgen_h2o.profiling.bench import Bench

HEAD_WIDTH = 64
HEADS = 12  # of each sequence


def overlay_rate(bench: Bench, dtype: torch.dtype) -> float:
    """Bytes read and written a second where the columns that wait are laid over a unit and another one is taken up.

    Of units that are not in a cache, each a step further than the one before, as far as a unit is written back.
    """
    on_disk = (0.0, 0.0, 1.0)
    layout = unit_layout(bench.sizes.step_rows[0], HEADS, SEGMENT_SLOTS, HEAD_WIDTH, dtype.itemsize, on_disk)
    count = max(1, bench.sizes.cache_bytes // layout.part_bytes(layout.parts[0]) // WRITE_BACK_STEPS)
    every = [_unit(bench, layout, dtype, i % WRITE_BACK_STEPS) for i in range(count * WRITE_BACK_STEPS)]
    units = cycle(every)
    rows = layout.parts[0].rows
    slots = torch.full((rows,), SEGMENT_SLOTS - 1, device=every[0][1].keys.device)

    def steps() -> None:
        for _ in range(WRITE_BACK_STEPS):
            overlay, view = next(units)
            overlay.apply(view)
            overlay.add(view, slots)
            if overlay.is_full:
                overlay.clear()

    columns = WRITE_BACK_STEPS * (WRITE_BACK_STEPS + 1) / 2  # waiting and new, of as many steps
    return 2 * columns * rows * 2 * layout.slot_bytes / bench.seconds_of(steps)[0]


def _unit(bench: Bench, layout: UnitLayout, dtype: torch.dtype, waiting: int) -> tuple[Overlay, PartView]:
    """A unit, and an overlay with so many columns."""
    part = layout.parts[0]
    view = part_view(layout, part, bench.empty(torch.uint8, layout.part_bytes(part)), dtype, None)
    overlay = Overlay(layout, part, bench.empty(torch.uint8, layout.overlay_bytes(part)), dtype)
    for slot in range(waiting):
        overlay.add(view, torch.full((part.rows,), slot, device=view.keys.device))
    return overlay, view
