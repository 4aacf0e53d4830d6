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

from flexgen_h2o.errors import FlexgenError
from flexgen_h2o.files import write_whole

LANES = ("compute", "disk_read", "disk_write", "h2d", "d2h", "wait")


@dataclass(frozen=True)
class Span:
    """A line of the trace (`row`) was busy from `start` to `end`, in seconds of `time.perf_counter`."""

    row: str
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

    def reset(self) -> None:
        """Forget all spans and sums."""
        with self._lock:
            self.spans.clear()
            self._busy.clear()

    def record(self, lane: str, name: str, start: float, end: float, row: str | None = None) -> None:
        """Add a span; `name` groups the sums, so keep it free of indices (`load_weight`, not `load_weight 3`).

        row: the line of the trace where several threads serve the lane, whose spans overlap.
        """
        with self._lock:
            seconds, count = self._busy[lane, name]
            self._busy[lane, name] = (seconds + end - start, count + 1)
            if self.keep_spans:
                self.spans.append(Span(row or lane, name, start, end))

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

    def count(self, lane: str, name: str) -> int:
        """How many spans of one kind there were."""
        with self._lock:
            return self._busy.get((lane, name), (0.0, 0))[1]

    def mean_seconds(self, lane: str, name: str) -> float:
        """Mean seconds of one kind of span; 0 when there was none."""
        with self._lock:
            seconds, count = self._busy.get((lane, name), (0.0, 0))
        return seconds / count if count else 0.0

    def write_chrome_trace(self, path: Path) -> None:
        """Write the spans as Chrome trace events (JSON; opens in Perfetto), a line for each worker, times in us.

        Raises FlexgenError naming the file.
        """
        origin = min((s.start for s in self.spans), default=0.0)
        others = sorted({s.row for s in self.spans} - set(LANES))
        rows = [row for lane in LANES for row in (lane, *(r for r in others if r.startswith(lane)))]
        rows += [row for row in others if row not in rows]
        events: list[dict[str, object]] = [
            {"ph": "M", "pid": 1, "tid": i, "name": "thread_name", "args": {"name": row}} for i, row in enumerate(rows)
        ]
        for s in self.spans:
            events.append(
                {
                    "ph": "X", "pid": 1, "tid": rows.index(s.row), "name": s.name,
                    "ts": (s.start - origin) * 1e6, "dur": (s.end - s.start) * 1e6,
                }
            )  # fmt: skip
        try:
            write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
        except OSError as error:
            raise FlexgenError(f"--trace {path}: {error.strerror or error}") from error
