"""Geometry of KV units: segments on pages, rows covered once, what moves of a part, bytes for
overlay and record."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.packing import KVPacking
from flexgen_h2o.core.units import ALIGN, PAGE, SEGMENT_SLOTS, WRITE_BACK_STEPS, round_up
from flexgen_h2o.kvcache.layout import UnitLayout

pairs = st.integers(0, 100).flatmap(lambda a: st.tuples(st.just(a), st.integers(0, 100 - a)))
few = st.integers(1, 40)
SCORED = ("positions", "scores")
records = st.sampled_from([(), ("positions",), SCORED, (*SCORED, "ranks")])
all_shares = pairs.map(lambda pair: Policy(percent=(0, 0, *pair, 0, 0)).cache_shares)
layouts = st.builds(
    UnitLayout,
    sequences=few,
    kv_heads=few,
    slots=st.integers(1, 300),
    width=st.sampled_from([1, 8, 80, 128]),
    itemsize=st.sampled_from([2, 4]),
    shares=all_shares,
    record=records,
)
packed = st.builds(
    lambda layout, bits: replace(layout, packing=KVPacking.of(layout.width, bits)),
    layouts,
    st.sampled_from([4, "4/3", "3/8"]),
)


@given(layouts)
def test_areas(layout: UnitLayout) -> None:
    rows = layout.sequences * layout.kv_heads
    assert sum(part.rows for part in layout.parts) == rows
    assert layout.column_bytes == 2 * layout.width * layout.itemsize
    for part in layout.parts:
        share = dict(zip(("device", "host", "disk"), layout.shares, strict=True))[part.tier]
        assert abs(part.rows - share * rows) <= 1 and part.rows <= layout.most_part_rows(share)
        areas = layout.area_bytes(part)
        for area, row_bytes in zip(areas, layout.row_bytes, strict=True):
            assert area % PAGE == 0 and 0 <= area - part.rows * row_bytes < PAGE
        waiting = part.rows * WRITE_BACK_STEPS * (layout.column_bytes + 8)
        assert layout.overlay_bytes(part) == waiting
        words = layout.slots * len(layout.record) + 1 if layout.record else 0
        beside = layout.metadata_bytes(part) - 4 * part.rows * words
        assert layout.metadata_bytes(part) % ALIGN == 0 and 0 <= beside < ALIGN


# ---- what moves


@given(layouts | packed, st.data())
def test_live_ranges_hold_the_live_rows_and_no_other(
    layout: UnitLayout, data: st.DataObject
) -> None:
    """Pages are moved whole, so what two ranges share but a page's end is one range."""
    sequences = data.draw(st.integers(0, layout.sequences))
    columns = data.draw(st.integers(0, layout.slots))
    for part in layout.parts:
        areas = layout.area_bytes(part)
        rows = min(part.rows, max(0, sequences * layout.kv_heads - part.start))
        segments = -(-columns // layout.segment_slots)
        # [start, end) of the rows that hold the first columns of the first sequences.
        live = [
            (start, start + rows * row_bytes)
            for segment in range(segments if rows else 0)
            for start, row_bytes in zip(
                (segment * sum(areas), segment * sum(areas) + areas[0]),
                layout.row_bytes,
                strict=True,
            )
        ]
        ranges = [(at, at + size) for at, size in layout.live_ranges(part, sequences, columns)]
        assert all(start % PAGE == 0 and start < end for start, end in ranges)
        # Apart by at least a page, so that neighbours whose pages touch are one range.
        assert all(round_up(end, PAGE) < start for (_, end), (start, _) in pairwise(ranges))
        assert all(any(a <= start and end <= b for a, b in ranges) for start, end in live)
        # Nothing else but the ends of pages.
        assert {end for _, end in ranges} <= {end for _, end in live}
        moved = sum(end - start for start, end in ranges)
        assert moved - sum(end - start for start, end in live) < PAGE * 2 * layout.segments


@pytest.mark.parametrize("slots", [1, SEGMENT_SLOTS, SEGMENT_SLOTS + 1])
@pytest.mark.parametrize(
    ("record", "streamed", "is_cut"),
    [((), True, True), ((), False, False), (SCORED, True, False)],
)
def test_only_a_cache_that_grows_and_travels_is_cut(
    record: tuple[str, ...], streamed: bool, is_cut: bool, slots: int
) -> None:
    """Into equal segments, which hold every slot."""
    layout = UnitLayout(2, 4, slots, 8, 2, (0.0, 1.0, 0.0), record, streamed)
    assert layout.segments == (-(-slots // SEGMENT_SLOTS) if is_cut else 1)
    assert 0 <= layout.segments * layout.segment_slots - slots < layout.segments
