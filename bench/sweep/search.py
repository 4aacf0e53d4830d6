"""Each system at its own best batch: rows are doubled until that gains nothing more or is not possible."""

from __future__ import annotations

from collections.abc import Callable

from sweep.store import MEASURED, OK, Line

GAIN = 1.03  # twice the rows must give so much more than the best so far
MISSES = 2  # so often in a row without that, and the search has ended: one may be a neighbour's doing
Measure = Callable[[int], Line]


def search(measure: Measure, first: int, last: int) -> list[Line]:
    """Measure `first` rows, then twice as many, and so on up to `last`. Halve instead while `first` does not fit.

    Ends when throughput has not grown by GAIN for MISSES steps, or when the system is over its budget or fails.
    """
    found = [measure(first)]
    rows = first
    while found[-1]["status"] not in MEASURED and not _hopeless(found[-1]) and rows > 1:
        rows //= 2
        found.append(measure(rows))
    if rows < first or found[-1]["status"] != OK:
        return found
    best, misses = found[-1]["tokens_per_s"], 0
    while 2 * rows <= last and misses < MISSES:
        rows *= 2
        line = measure(rows)
        found.append(line)
        if line["status"] != OK:
            break
        misses = 0 if line["tokens_per_s"] >= GAIN * best else misses + 1
        best = max(best, line["tokens_per_s"])
    return found


def _hopeless(line: Line) -> bool:
    """A smaller batch would not help: refused, or a failure that is not of memory or time."""
    return line["status"] not in ("does_not_fit", "timeout")


def best_rows(lines: list[Line]) -> int | None:
    """Rows of the highest throughput. One that is over budget counts only where nothing is within it."""
    measured = [x for x in lines if x["status"] == OK] or [x for x in lines if x["status"] in MEASURED]
    return max(measured, key=lambda x: x["tokens_per_s"])["rows"] if measured else None
