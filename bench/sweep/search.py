"""Each system at its own best batch: rows are doubled until that gains nothing more or is not
possible, and then, where memory has ended it, the most rows that fit are looked for: a system bound
by the disk is as fast as it has rows."""

from __future__ import annotations

from collections.abc import Callable

from bench.sweep.store import DOES_NOT_FIT, MEASURED, OK, OVER, TIMEOUT, Line

GAIN = 1.03  # twice the rows must give so much more than the best so far
MISSES = (
    2  # so often in a row without that, and the search has ended: one may be a neighbour's doing
)
CLOSE = 8  # the most rows that fit are known to one part in so many
Measure = Callable[[int], Line]


def search(measure: Measure, first: int, last: int) -> list[Line]:
    """Measure `first` rows, then twice as many, and so on up to `last`. Halve instead while they do
    not fit.

    Doubling ends when throughput has not grown by GAIN for MISSES steps, or when the system is over
    budget or fails. Where it was still growing when memory ended, rows in between follow.
    """
    found = [measure(first)]
    rows = first
    while found[-1]["status"] != OK and not _hopeless(found[-1]) and rows > 1:
        rows //= 2
        found.append(measure(rows))
    if found[-1]["status"] != OK:
        return found
    if rows < first:
        return found + _between(measure, rows, 2 * rows)
    best = found[-1]["tokens_per_s"]
    misses = 0
    while 2 * rows <= last and misses < MISSES:
        rows *= 2
        line = measure(rows)
        found.append(line)
        if line["status"] != OK:
            break
        misses = 0 if line["tokens_per_s"] >= GAIN * best else misses + 1
        best = max(best, line["tokens_per_s"])
    if found[-1]["status"] in (DOES_NOT_FIT, OVER) and not misses:
        found += _between(measure, rows // 2, rows)
    return found


def _between(measure: Measure, fits: int, too_many: int) -> list[Line]:
    """Halve the gap between rows that fit and rows that do not, until it is narrow or something
    else goes wrong."""
    found: list[Line] = []
    while too_many - fits > max(1, fits // CLOSE):
        rows = (fits + too_many) // 2
        found.append(measure(rows))
        if found[-1]["status"] == OK:
            fits = rows
        elif found[-1]["status"] in (DOES_NOT_FIT, OVER):
            too_many = rows
        else:
            break
    return found


def _hopeless(line: Line) -> bool:
    """A smaller batch would not help: refused, or a failure that is not of memory or time."""
    return line["status"] not in (DOES_NOT_FIT, OVER, TIMEOUT)


def best_line(lines: list[Line]) -> Line | None:
    """Return the line of the highest throughput. One that is over budget counts only where nothing
    is within it."""
    measured = [x for x in lines if x["status"] == OK] or [
        x for x in lines if x["status"] in MEASURED
    ]
    return max(measured, key=lambda x: x["tokens_per_s"]) if measured else None


def best_rows(lines: list[Line]) -> int | None:
    """Rows of the highest throughput."""
    best = best_line(lines)
    return None if best is None else best["rows"]
