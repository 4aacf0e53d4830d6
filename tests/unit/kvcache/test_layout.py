"""Geometry of KV units: areas on pages, rows covered once, bytes for the overlay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.config import Policy
from flexgen_h2o.kvcache.layout import unit_layout
from flexgen_h2o.limits import PAGE, WRITE_BACK_STEPS

pairs = st.integers(0, 100).flatmap(lambda a: st.tuples(st.just(a), st.integers(0, 100 - a)))
few = st.integers(1, 40)


@given(few, few, few, st.sampled_from([1, 8, 80, 128]), st.sampled_from([2, 4]), pairs)
def test_areas(sequences: int, kv_heads: int, slots: int, width: int, itemsize: int, pair: tuple[int, int]) -> None:
    shares = Policy(percent=(0, 0, *pair, 0, 0)).cache_shares
    layout = unit_layout(sequences, kv_heads, slots, width, itemsize, shares)
    assert sum(part.rows for part in layout.parts) == sequences * kv_heads
    for part in layout.parts:
        values = part.rows * slots * width * itemsize
        assert layout.area_bytes(part) % PAGE == 0 and 0 <= layout.area_bytes(part) - values < PAGE
        assert layout.part_bytes(part) == 2 * layout.area_bytes(part)
        share = dict(zip(("device", "host", "disk"), shares, strict=True))[part.tier]
        assert abs(part.rows - share * sequences * kv_heads) <= 1
        columns = part.rows * WRITE_BACK_STEPS
        assert layout.overlay_bytes(part) == 2 * columns * width * itemsize + 8 * columns
    assert layout.row_bytes == slots * width * itemsize
