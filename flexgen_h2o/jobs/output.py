"""The output file of a job: whole lines only, one writer, safe on disk at most a second or so after a row is done."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flexgen_h2o import interrupts
from flexgen_h2o.errors import FlexgenError, UsageError
from flexgen_h2o.locks import is_still, try_lock

SYNC_EVERY_S = 1.0
# fsync may take at most this share of the time: a slow disk gets rarer syncs, not a slower job.
MOST_SYNC_SHARE = 0.05
_LOCK_TRIES, _LOCK_WAIT_S = 5, 0.1


class OutputFile:
    """Open for appending, and locked until `close`. UsageError where it cannot be, or another job has it.

    A line is written in one piece right when it comes; what a failed write or sync leaves of a line is cut off again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cut_bytes = 0  # of a torn end, by `rows`
        self._is_new = not path.exists()
        self._fd = _open_locked(path)
        self._end = self._synced = os.fstat(self._fd).st_size
        self._last_sync, self._sync_s = time.monotonic(), 0.0

    @property
    def is_empty(self) -> bool:
        return self._end == 0

    def rows(self) -> Iterator[dict[str, Any]]:
        """The rows that are in the file, to be read to their end: then what a crash tore of the last is cut off.

        UsageError for a line that is not a row, with rows behind it: no crash does that.
        """
        good = bad = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                row = whole_row(line)
                if row is None:
                    bad = bad or number
                elif bad:
                    raise UsageError(
                        f"--output {self.path}:{bad}: is not a row that a job has written; remove the line, and its "
                        "request is done again"
                    )
                else:
                    good += len(line)
                    yield row
        if good < self._end:
            self.cut_bytes = self._end - good
            self._cut(good)

    def append(self, lines: Sequence[bytes]) -> None:
        """Write whole lines (without their newlines); synced when it is due. FlexgenError where the disk fails."""
        data = b"".join(line + b"\n" for line in lines)
        if not data:
            return
        with interrupts.held():  # a signal comes before a line or after it
            written = 0
            try:
                while written < len(data):
                    written += os.write(self._fd, data[written:])
            except OSError as error:
                whole = data.rfind(b"\n", 0, written) + 1
                self._cut(self._end + whole)
                raise self._failed(error) from error
            self._end += len(data)
            self.sync_if_due()

    def sync_if_due(self) -> None:
        """Put finished rows safely on disk, if that was long enough ago."""
        wait = max(SYNC_EVERY_S, self._sync_s / MOST_SYNC_SHARE)
        if self._synced < self._end and time.monotonic() - self._last_sync >= wait:
            self.sync()

    def sync(self) -> None:
        """Put finished rows safely on disk now. FlexgenError where that fails: rows since the last sync are cut off."""
        if self._synced == self._end:
            return
        began = time.monotonic()
        try:
            self._check_still_there()
            os.fsync(self._fd)
        except OSError as error:
            # What did not reach the disk is unknown, and a second fsync would not say.
            self._cut(self._synced)
            raise self._failed(error) from error
        self._synced, self._last_sync = self._end, time.monotonic()
        self._sync_s = self._last_sync - began

    def close(self) -> None:
        """Sync and unlock. A file that this job made and never wrote to goes away again."""
        with interrupts.held():
            try:
                self.sync()
                if self._is_new and self.is_empty:
                    self.path.unlink(missing_ok=True)
            finally:
                os.close(self._fd)

    def _check_still_there(self) -> None:
        if not is_still(self.path, self._fd):
            raise FlexgenError(f"--output {self.path}: was removed or replaced while the job wrote to it")

    def _cut(self, size: int) -> None:
        """Best effort on a disk that fails: a line that stays torn is cut off when the job goes on."""
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, size)
            os.fsync(self._fd)
        self._end = size
        self._synced = min(self._synced, size)

    def _failed(self, error: OSError) -> FlexgenError:
        return FlexgenError(
            f"--output {self.path}: {error.strerror or error}; the rows in it are whole: make room, and the same "
            "command does the rest"
        )


def whole_row(line: bytes) -> dict[str, Any] | None:
    """The row that a line of an output holds; None where it is torn."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(row, dict) and isinstance(row.get("custom_id"), str) and {"response", "error"} <= row.keys():
        return row
    return None


def to_line(row: dict[str, Any]) -> bytes:
    """A row as a line; half surrogates, which UTF-8 cannot hold, are escaped."""
    try:
        return json.dumps(row, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        return json.dumps(row, allow_nan=False).encode()


def is_locked(path: Path) -> bool:
    """Is a job writing to this file now? UsageError where it cannot be opened."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UsageError(f"--output {path}: {error.strerror or error}") from error
    try:
        return not try_lock(fd, shared=True)
    finally:
        os.close(fd)


def _open_locked(path: Path) -> int:
    """A descriptor of the file that has the name when the lock is ours."""
    for attempt in range(_LOCK_TRIES):
        try:
            fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise UsageError(f"--output {path}: {error.strerror or error}") from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # of a pipe or a device the end would never come
            os.close(fd)
            raise UsageError(f"--output {path}: is no regular file, and a job reads its rows back; name one")
        try:
            if try_lock(fd) and is_still(path, fd):
                return fd
        except OSError as error:
            os.close(fd)
            raise UsageError(f"--output {path}: cannot be locked here ({error.strerror or error})") from error
        os.close(fd)  # held by another job, or for a moment by somebody's --status; or removed just now
        if attempt < _LOCK_TRIES - 1:
            time.sleep(_LOCK_WAIT_S)
    raise UsageError(f"--output {path}: another job writes to it; wait for its end, or give another --output")
