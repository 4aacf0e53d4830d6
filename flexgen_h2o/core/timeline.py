"""Spans on named lanes, busy seconds by lane, Chrome traces and pictures of them.

Sums are always recorded, spans only while `keep_spans` is set. matplotlib is imported when a
picture is drawn.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from flexgen_h2o.core.files import write_picture, write_result

LANES = ("compute", "disk_read", "disk_write", "h2d", "d2h", "wait")


@dataclass(frozen=True)
class Span:
    """Time during which one line of the trace was busy.

    Times are seconds of `time.perf_counter`.
    """

    row: str  # the line of the trace: a lane, or one of its threads
    name: str
    start: float
    end: float


class Timeline:
    """Collects spans from any thread."""

    def __init__(self) -> None:
        self.keep_spans = False  # set before a run that is to be traced
        self._lock = threading.Lock()
        self.spans: list[Span] = []
        self._busy: dict[tuple[str, str], tuple[float, int]] = defaultdict(lambda: (0.0, 0))

    def reset(self) -> None:
        """Forget all spans and sums."""
        with self._lock:
            self.spans.clear()
            self._busy.clear()

    def take(self) -> list[Span]:
        """Return the kept spans, and forget them."""
        with self._lock:
            taken = self.spans
            self.spans = []
        return taken

    def record(
        self, lane: str, name: str, start: float, end: float, row: str | None = None
    ) -> None:
        """Add a span.

        `name` groups the sums, so it must have no index (`load_weight`, not `load_weight 3`).

        row: the line of the trace, if several threads serve the lane and their spans overlap.
        """
        with self._lock:
            seconds, count = self._busy[lane, name]
            self._busy[lane, name] = (seconds + end - start, count + 1)
            if self.keep_spans:
                self.spans.append(Span(row or lane, name, start, end))

    @contextmanager
    def span(self, lane: str, name: str) -> Iterator[None]:
        """Record the time of a `with` block."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.record(lane, name, start, time.perf_counter())

    def seconds(self, lane: str, name: str | None = None) -> float:
        """Return the busy seconds of a lane, summed over its threads.

        name: the kind of span; None: all kinds.
        """
        with self._lock:
            return sum(
                s
                for (on, what), (s, _) in self._busy.items()
                if on == lane and name in (None, what)
            )

    def count(self, lane: str, name: str) -> int:
        """Return the number of spans of one kind."""
        with self._lock:
            return self._busy.get((lane, name), (0.0, 0))[1]

    def mean_seconds(self, lane: str, name: str) -> float:
        """Return the mean seconds of one kind of span; 0 if there was none."""
        with self._lock:
            seconds, count = self._busy.get((lane, name), (0.0, 0))
        return seconds / count if count else 0.0

    def write_chrome_trace(self, path: Path) -> None:
        """Write the spans as Chrome trace events (JSON, which Perfetto opens).

        There is one line per worker, and times are in microseconds. Raises FlexgenError that names
        the file.
        """
        origin = min((s.start for s in self.spans), default=0.0)
        rows = _rows({*LANES, *(s.row for s in self.spans)})
        events: list[dict[str, object]] = [
            {"ph": "M", "pid": 1, "tid": i, "name": "thread_name", "args": {"name": row}}
            for i, row in enumerate(rows)
        ]
        for s in self.spans:
            events.append(
                {
                    "ph": "X",
                    "pid": 1,
                    "tid": rows.index(s.row),
                    "name": s.name,
                    "ts": (s.start - origin) * 1e6,
                    "dur": (s.end - s.start) * 1e6,
                }
            )
        write_result(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), "--trace")


PIXELS = 2000  # spans of one name are drawn as one if the gap between them is narrower than a pixel
SWEEPS = 3
COLORS = {
    "load_weight": "#3b6fb6",
    "load_cache": "#e08a2c",
    "store_cache": "#b5541c",
    "load_hidden": "#57a773",
    "store_hidden": "#2e7d4f",
    "compute_layer prefill": "#8e6bbf",
    "compute_layer decode": "#c2549c",
}
OTHER_COLOR = "#9a9a9a"
Bars = list[tuple[float, float]]  # start and width in seconds


def draw_timeline(
    spans: Sequence[Span], path: Path, title: str, window: tuple[float, float] | None = None
) -> None:
    """Draw the spans of a run, real or simulated.

    window: seconds as in the spans; None: from the first to the last. The suffix of `path` names
    the format. Raises FlexgenError that names --plot if the file cannot be written.
    """
    from matplotlib.figure import Figure

    low, high = window or (
        min((s.start for s in spans), default=0.0),
        max((s.end for s in spans), default=1.0),
    )
    seen = _cut(spans, low, high)
    rows = _rows({s.row for s in seen})
    figure = Figure(figsize=(14, 1.6 + 0.5 * len(rows)), layout="constrained")
    ax = figure.subplots()
    labels = set()
    for (row, kind), bars in _bars(seen, (high - low) / PIXELS).items():
        label = None if kind in labels else kind
        labels.add(kind)
        ax.broken_barh(
            bars,
            (rows.index(row) - 0.38, 0.76),
            facecolors=COLORS.get(kind, OTHER_COLOR),
            linewidth=0,
            label=label,
        )
    turn = _prefill_end(spans)
    if turn is not None and low < turn < high:
        ax.axvline(turn - low, color="black", linewidth=1, linestyle="--", label="prefill ends")
    ax.set_yticks(range(len(rows)), rows)
    ax.set(title=title, xlabel=f"seconds, from {low:.4g} s after the start", xlim=(0, high - low))
    ax.set_ylim(max(0.5, len(rows) - 0.5), -0.5)
    ax.grid(axis="x", alpha=0.3)
    if seen:
        figure.legend(loc="outside lower center", ncols=8, fontsize=8)
    write_picture(path, figure)


def around_prefill_end(spans: Sequence[Span], steps: int) -> tuple[float, float] | None:
    """Return a window around the end of prefill and the first decode sweeps.

    None: there are no decode sweeps. steps: steps of a sweep (layers x micro-batches)."""
    turn = _prefill_end(spans)
    decode = sorted(s.end for s in spans if s.name == "compute_layer decode")[: SWEEPS * steps]
    if turn is None or not decode:
        return None
    first = min(s.start for s in spans)
    sweeps = max(1.0, len(decode) / steps)
    return max(first, turn - (decode[-1] - turn) / sweeps), decode[-1]


def _prefill_end(spans: Sequence[Span]) -> float | None:
    return max((s.end for s in spans if s.name == "compute_layer prefill"), default=None)


def _rows(found: set[str]) -> list[str]:
    """Return rows in the order of the lanes. A lane's workers are together, other rows last."""
    lanes = [row for lane in LANES for row in sorted(found) if row.startswith(lane)]
    return list(dict.fromkeys([*lanes, *sorted(found)]))


def _cut(spans: Sequence[Span], low: float, high: float) -> list[Span]:
    """Return the parts of spans that lie in the window, in seconds from its beginning."""
    return [
        Span(s.row, s.name, max(s.start, low) - low, min(s.end, high) - low)
        for s in spans
        if s.end > low and s.start < high
    ]


def _bars(spans: Sequence[Span], gap: float) -> dict[tuple[str, str], Bars]:
    """Return the bars of each row and kind.

    Bars are joined across gaps narrower than `gap` seconds.
    """
    found: dict[tuple[str, str], Bars] = defaultdict(list)
    for span in sorted(spans, key=lambda s: s.start):
        bars = found[span.row, _kind(span.name)]
        if bars and span.start - sum(bars[-1]) < gap:
            before, width = bars[-1]
            bars[-1] = (before, max(width, span.end - before))
        else:
            bars.append((span.start, span.end - span.start))
    return found


def _kind(name: str) -> str:
    """Return the kind as which a span is drawn: loads and stores of both phases look alike."""
    return name if name in COLORS else name.split(" ")[0]
