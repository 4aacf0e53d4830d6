"""Finished measurements as JSON lines: one file, appended to, read back to go on where a sweep was
stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from bench.common import writing
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import try_lock

# ok; over_budget: it ran, and took more memory than the budget; the rest did not give a figure.
OK = "ok"
OVER = "over_budget"
DOES_NOT_FIT = "does_not_fit"
TIMEOUT = "timeout"
FAILED = "failed"
REFUSED = "refused"
MEASURED = (OK, OVER)
STATUSES = (*MEASURED, DOES_NOT_FIT, TIMEOUT, FAILED, REFUSED)
BF16 = "bf16"  # the dtype of all that is not asked for in another
Line = dict[str, Any]
WHOLE = ("prompt_len", "gen_len", "rows", "repeat")


@dataclass(frozen=True)
class Key:
    """Identity of one measurement. repeat: 0 in the search for the best batch, from 1 on
    afterwards."""

    system: str
    model: str
    prompt_len: int
    gen_len: int
    budget: str
    rows: int
    repeat: int

    def of(self, line: Line) -> bool:
        return all(line[name] == value for name, value in vars(self).items())


def cpu_of(line: Line) -> str:
    """The processor that a line was measured on; "not recorded" of those from before 2026-11-25."""
    found: str = line.get("cpu", "not recorded")
    return found


class Store:
    """The lines of one file. A refusal is never kept as finished: a later version, or another
    machine, may run it.

    cpu: lines of another processor are not kept as finished either; None: those of all are. Who
    adds lines has claimed the file.
    """

    def __init__(self, path: Path, cpu: str | None = None) -> None:
        self.path = path
        self.lines: list[Line] = _read(path)
        self._cpu = cpu

    def find(self, key: Key) -> Line | None:
        """The finished measurement, the newest of several."""
        for line in reversed(self.counting()):
            if key.of(line) and line["status"] != REFUSED:
                return line
        return None

    def counting(self) -> list[Line]:
        """All lines that are kept as finished."""
        return [line for line in self.lines if self._cpu in (None, cpu_of(line))]

    def add(self, key: Key, line: Line) -> Line:
        """Append to the file and to `lines`."""
        return self.add_all([vars(key) | line])[0]

    def add_all(self, lines: list[Line]) -> list[Line]:
        """Append in one write: of lines that belong together none is there without the others, but
        for a full disk.

        A last line that was cut off when a sweep was killed is removed before, in place: the claim
        is of this file.
        """
        with self.path.open("a+b") as file:
            _end_last_line(file)
            file.write("".join(json.dumps(line) + "\n" for line in lines).encode())
        self.lines += lines
        return lines


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """`path` is there, and this process alone writes to it; the kernel drops the claim of a process
    that was killed.

    Raises UsageError: it cannot be written to, or another sweep has claimed it.
    """
    with writing("--results", path.parent, "give another folder"):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    with file:
        if not try_lock(file.fileno()):
            raise UsageError(
                f"{path}: another sweep writes to it; wait until it is done, or give other "
                "--results or --name"
            )
        yield


def _read(path: Path) -> list[Line]:
    """All lines, but for a last one that was cut off when a sweep was killed; the file stays as it
    is.

    Raises UsageError that names a line which is none of a sweep.
    """
    if not path.exists():
        return []
    try:
        *whole, last = path.read_text(errors="replace").split("\n")
    except OSError as error:
        raise UsageError(
            f"{path}: not read ({error.strerror}); it is the file of a sweep's measurements"
        ) from error
    if _line_of(last):  # without its end only: an editor's doing
        whole.append(last)
    lines = []
    for number, one in enumerate(whole, 1):
        line = _line_of(one)
        if line is None:
            raise UsageError(f"{path}: line {number} is not a measurement of a sweep; remove it")
        lines.append(line)
    return lines


def _end_last_line(file: IO[bytes]) -> None:
    file.seek(0)
    last = file.read().rpartition(b"\n")[2]
    if last and _line_of(last):
        file.write(b"\n")
    elif last:
        file.truncate(file.tell() - len(last))


def _line_of(text: str | bytes) -> Line | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    if not isinstance(line, dict) or not {*Key.__dataclass_fields__, "status"} <= line.keys():
        return None
    speed = line.get("tokens_per_s") if line["status"] in MEASURED else 1
    known = line["status"] in STATUSES and isinstance(speed, (int, float)) and speed > 0
    return line if known and all(type(line[name]) is int for name in WHOLE) else None
