"""Spans: sums by lane and kind, and a Chrome trace that other tools can read."""

from __future__ import annotations

import json
from pathlib import Path

from flexgen_h2o.core.timeline import Timeline


def test_seconds_are_summed_by_lane_and_kind() -> None:
    line = Timeline()
    line.record("compute", "a", 1, 3)
    line.record("compute", "b", 3, 4)
    line.record("compute", "a", 9, 10)
    assert (line.seconds("compute"), line.seconds("compute", "a"), line.seconds("d2h")) == (4, 3, 0)
    assert (line.mean_seconds("compute", "a"), line.mean_seconds("compute", "none")) == (1.5, 0)


def test_the_trace_has_a_line_for_each_worker_and_keeps_starts_and_lengths(tmp_path: Path) -> None:
    line = Timeline()
    line.keep_spans = True
    line.record("h2d", "load", 100.5, 100.75)
    for row in ("disk_read 2", "disk_read"):
        line.record("disk_read", "read", 100.25, 101.25, row)
    line.write_chrome_trace(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert list(rows.values())[:4] == ["compute", "disk_read", "disk_read 2", "disk_write"]
    spans = {rows[e["tid"]]: (e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"}
    reads = dict.fromkeys(("disk_read", "disk_read 2"), ("read", 0, 1e6))
    assert spans == {**reads, "h2d": ("load", 0.25e6, 0.25e6)}
