"""Pictures of spans: what is drawn together, which part is shown, what happens to a bad name."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexgen_h2o.core.errors import FlexgenError
from flexgen_h2o.core.timeline import Span, around_prefill_end, draw_timeline
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


@needs("plot")
@pytest.mark.parametrize("spans", [RUN, []], ids=["run", "nothing"])
def test_writes_a_picture(tmp_path: Path, spans: list[Span]) -> None:
    draw_timeline(spans, tmp_path / "p.png", "title", around_prefill_end(spans, 4))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FlexgenError, match=r"^--plot .*p\.unknown"):
        draw_timeline(spans, tmp_path / "p.unknown", "title")
