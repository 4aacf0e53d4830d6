"""What happened when: spans on named lanes, busy seconds by lane, and the Chrome trace of them.

Knows nothing of what the spans mean. Recording is always on for sums (two additions a span); spans are
kept only when a trace was asked for.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LANES = ("compute", "disk_read", "disk_write", "h2d", "d2h", "wait")


@dataclass(frozen=True)
class Span:
    """`start` and `end` in seconds of `time.perf_counter`."""

    lane: str
    name: str
    start: float
    end: float


class Timeline:
    """Collects spans from any thread."""

    def __init__(self) -> None:
        self.keep_spans = False  # set it before the run for a trace
        self._lock = threading.Lock()
        self.spans: list[Span] = []
        self._busy: dict[tuple[str, str], tuple[float, int]] = defaultdict(lambda: (0.0, 0))

    def record(self, lane: str, name: str, start: float, end: float) -> None:
        """Add a span; `name` groups the sums, so keep it free of indices (`load_weight`, not `load_weight 3`)."""
        with self._lock:
            seconds, count = self._busy[lane, name]
            self._busy[lane, name] = (seconds + end - start, count + 1)
            if self.keep_spans:
                self.spans.append(Span(lane, name, start, end))

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.record(lane, name, start, time.perf_counter())

    def seconds(self, lane: str, name: str | None = None) -> float:
        """Busy seconds of a lane (summed over its threads), of one kind of span or of all."""
        with self._lock:
            return sum(s for (on, what), (s, _) in self._busy.items() if on == lane and name in (None, what))

    def mean_seconds(self, lane: str, name: str) -> float:
        """Mean seconds of one kind of span; 0 when there was none."""
        with self._lock:
            seconds, count = self._busy.get((lane, name), (0.0, 0))
        return seconds / count if count else 0.0

    def write_chrome_trace(self, path: Path) -> None:
        """Write the spans as Chrome trace events (JSON; opens in Perfetto): a lane is a thread row, times in us."""
        origin = min((s.start for s in self.spans), default=0.0)
        lanes = [*LANES, *sorted({s.lane for s in self.spans} - set(LANES))]
        events: list[dict[str, object]] = [
            {"ph": "M", "pid": 1, "tid": i, "name": "thread_name", "args": {"name": lane}}
            for i, lane in enumerate(lanes)
        ]
        for s in self.spans:
            events.append(
                {
                    "ph": "X", "pid": 1, "tid": lanes.index(s.lane), "name": s.name,
                    "ts": (s.start - origin) * 1e6, "dur": (s.end - s.start) * 1e6,
                }
            )  # fmt: skip
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
