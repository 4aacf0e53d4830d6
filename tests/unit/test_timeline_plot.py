"""Pictures of spans: what is drawn together, which part is shown, what happens to a bad name."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexgen_h2o.core.errors import FlexgenError
from flexgen_h2o.core.timeline import Span, _bars, _cut, around_prefill_end, draw_timeline
from tests.extras import needs

PREFILL = "compute_layer prefill"
DECODE = "compute_layer decode"
RUN = [
    Span("wait", "load_weight", 10.0, 10.5),
    *(Span("compute", PREFILL, 10.5 + i, 11.5 + i) for i in range(4)),
    *(Span("compute", DECODE, 14.5 + i / 10, 14.6 + i / 10) for i in range(20)),
    Span("disk_read 2", "load_weight", 10.0, 16.0),
    Span("disk_read", "load_weight", 10.0, 10.4),
    Span("other", "thing", 10.0, 10.1),
]


def test_shows_the_end_of_prefill_and_three_decode_sweeps() -> None:
    assert around_prefill_end(RUN, steps=4) == pytest.approx((14.1, 15.7))
    assert around_prefill_end(RUN, steps=1000) == pytest.approx(
        (12.5, 16.5)
    )  # less than a sweep: all there is
    assert around_prefill_end(RUN[:5], steps=4) is None


def test_neighbours_are_one_bar_and_bars_end_at_the_window() -> None:
    bars = _bars(_cut(RUN, 12.0, 16.0), gap=0.01)
    assert bars["compute", PREFILL] == [pytest.approx((0.0, 2.5))]
    assert len(bars["compute", DECODE]) == 1
    assert bars["disk_read 2", "load_weight"] == [pytest.approx((0.0, 4.0))]


@needs("plot")
@pytest.mark.parametrize("spans", [RUN, []], ids=["run", "nothing"])
def test_writes_a_picture(tmp_path: Path, spans: list[Span]) -> None:
    draw_timeline(spans, tmp_path / "p.png", "title", around_prefill_end(spans, 4))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FlexgenError, match=r"^--plot .*p\.unknown"):
        draw_timeline(spans, tmp_path / "p.unknown", "title")
