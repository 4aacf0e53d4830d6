"""Write the output file of a job.

The file has only whole lines and one writer. A row is on disk about a second after it is done.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import FlexgenError, UsageError
from flexgen_h2o.core.files import (
    close_locked,
    guard_of,
    has_guard,
    is_still,
    json_line,
    open_patiently,
    open_regular,
    replacing,
    try_lock,
)

SYNC_EVERY_S = 1.0
# fsync may take at most this share of the time. A slow disk gets fewer syncs, not a slower job.
MAX_SYNC_SHARE = 0.05
_LOCK_TRIES = 5
_LOCK_WAIT_S = 0.1
_TAIL_BYTES = 64  # bytes at the end of the output that are compared with what was written
# pieces in which a line is read; a row has at most as many
_PIECE_BYTES = 2**20
_MAX_PIECES = 128
_LONG_ROW_BYTES = 2**20
# Members of a row that are kept of a long row.
_OF_ROW = ("custom_id", "response", "error", "code", "message")


class OutputFile:
    """A file that is open for appending, and locked until `close`.

    rests: hold neither descriptor nor lock between two calls. The file must be unchanged then.
    charge: gets the number of bytes before they are appended, and raises if they have no room.

    Raise UsageError if it cannot be opened or locked, or if another job has it.

    A line is written in one piece. If a write or sync fails, the incomplete part is cut off again.
    Before each append and sync the file must be as the job left it. If somebody else has moved it,
    cut it or written to it, raise FlexgenError and write nothing. At worst the last line is torn
    then, and the next run mends it.
    """

    def __init__(
        self,
        path: Path,
        rests: bool = False,
        charge: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self.path = path
        self._rests = rests
        self._charge = charge
        self.cut_bytes = 0  # bytes of a torn end that `rows` cut off
        self._is_new = not path.exists()
        self._open_fd: int | None = _open_locked(path)
        self._tail = b""
        self._synced = os.fstat(self._fd).st_size
        self._set_end()
        self._last_sync = time.monotonic()
        self._sync_s = 0.0
        if rests:
            self._let_go()

    @property
    def is_empty(self) -> bool:
        return self._end == 0

    @property
    def has_guard(self) -> bool:
        """Whether the file system has no locks, and a guard file is in the place of one."""
        return self._open_fd is not None and has_guard(self._open_fd)

    @property
    def _fd(self) -> int:
        """The file's descriptor, which is opened again after a rest.

        Raise FlexgenError if the file is gone.
        """
        if self._open_fd is None:
            if not self.path.exists():  # opening it would create a new file
                raise self._moved()
            self._open_fd = _open_locked(self.path)
        return self._open_fd

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """Release descriptor and lock afterwards, if the file rests."""
        try:
            yield
        finally:
            if self._rests:
                self._let_go()

    def _let_go(self) -> None:
        if self._open_fd is not None:
            close_locked(self._open_fd)
            self._open_fd = None

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows in the file. When all are read, cut off what a crash left at its end.

        A long row has its id and its error only. What a crash left is a line without its newline,
        or a hole of NUL bytes. Raise UsageError for any other line that is not a row.
        """
        good = bad = 0
        is_hole = False
        with self.path.open("rb") as file:
            for number, line in enumerate(_lines(file), start=1):
                row = whole_row(line, is_short=True)
                if row is not None and not bad:
                    good += len(line)
                    yield row
                    continue
                bad = bad or number
                is_hole = is_hole or b"\0" in line
                if row is not None or (line.endswith(b"\n") and not is_hole):
                    raise UsageError(
                        f"--output {self.path}:{bad}: is not a row that a job has written; remove "
                        "the line, and its "
                        "request is done again, or give another --output"
                    )
        with self._using():
            self._check_unchanged()
            if good < self._end:
                self.cut_bytes = self._end - good
                self._cut(good, self._end)

    def drop(self, custom_id: str) -> None:
        """Remove the rows with this id, if there are any. The file is written anew for it.

        Raise FlexgenError if that fails.
        """
        if not any(row["custom_id"] == custom_id for _, row in rows_of(self.path)):
            return
        with self._using(), interrupts.held():
            self._check_unchanged()
            try:
                with self.path.open("rb") as file, replacing(self.path, in_place=False) as kept:
                    for line in _lines(file):
                        row = whole_row(line)
                        if row is None or row["custom_id"] != custom_id:
                            kept.buffer.write(line)
            except OSError as error:
                raise self._failed(error) from error
            self._let_go()
            self._synced = os.fstat(self._fd).st_size
            self._set_end()

    def check_rows(self, rows: int) -> None:
        """Count the rows in the file when all are written.

        Raise FlexgenError if somebody wrote over some.
        """
        found, _ = count_rows(self.path)
        if found < rows:
            raise FlexgenError(
                f"--output {self.path}: has {found} rows, and the job wrote {rows}: somebody else "
                "wrote over some "
                "while it ran; the same command names the first line that is not a row"
            )

    def append(self, lines: Sequence[bytes]) -> None:
        """Write whole lines, given without their newlines, and sync if it is due.

        Raise FlexgenError if the disk fails, or if the file is not as the job left it.
        """
        data = b"".join(line + b"\n" for line in lines)
        if not data:
            return
        self._charge(len(data))
        with self._using(), interrupts.held():  # a signal comes before a line or after it
            self._check_unchanged()
            written = 0
            try:
                while written < len(data):
                    written += os.write(self._fd, data[written:])
            except OSError as error:
                self._take_back(written, data.rfind(b"\n", 0, written) + 1)
                raise self._failed(error) from error
            if os.lseek(self._fd, 0, os.SEEK_CUR) != self._end + written:  # changed since the check
                self._take_back(written, 0)
                raise self._changed()
            self._end += written
            self._tail = (self._tail + data)[-_TAIL_BYTES:]
            self.sync_if_due()

    def sync_if_due(self) -> None:
        """Check the file and sync finished rows to disk, if the last sync was long enough ago."""
        if time.monotonic() - self._last_sync >= max(SYNC_EVERY_S, self._sync_s / MAX_SYNC_SHARE):
            self.sync()

    def sync(self) -> None:
        """Sync finished rows to disk now.

        Raise FlexgenError if that fails; rows since the last sync are cut off then. Raise it also
        if the file is not as the job left it.
        """
        with self._using():
            self._check_unchanged()
            began = self._last_sync = time.monotonic()
            if self._synced == self._end:
                return
            try:
                os.fsync(self._fd)
            except OSError as error:
                # It is unknown what did not reach the disk, and a second fsync would not tell.
                self._cut(self._synced, self._end)
                raise self._failed(error) from error
        self._synced = self._end
        self._last_sync = time.monotonic()
        self._sync_s = self._last_sync - began

    def close(self) -> None:
        """Sync and unlock. Remove a file that this job created and never wrote to."""
        with interrupts.held():
            try:
                self.sync()
                if self._is_new and self.is_empty:
                    self.path.unlink(missing_ok=True)
            finally:
                self._let_go()

    def _check_unchanged(self) -> None:
        try:
            is_there = is_still(self.path, self._fd)
        except OSError as error:
            raise self._failed(error) from error
        if not is_there:
            raise self._moved()
        if os.fstat(self._fd).st_size != self._end or self._read_tail() != self._tail:
            raise self._changed()

    def _moved(self) -> FlexgenError:
        return FlexgenError(
            f"--output {self.path}: was removed or replaced while the job wrote to it; put it "
            "back, and the same "
            "command does the rest"
        )

    def _changed(self) -> FlexgenError:
        size = os.fstat(self._fd).st_size
        return FlexgenError(
            f"--output {self.path}: somebody else cut it or wrote to it while the job ran ({size} "
            "bytes, the job left "
            f"{self._end}); leave it alone, and the same command does what is missing"
        )

    def _read_tail(self) -> bytes:
        """Return the last bytes, which differ if the file was cut and has grown again."""
        start = max(0, self._end - _TAIL_BYTES)
        try:
            return os.pread(self._fd, self._end - start, start)
        except OSError as error:
            raise self._failed(error) from error

    def _set_end(self) -> None:
        """Record the file's size and end as the state in which the job leaves it."""
        self._end = os.fstat(self._fd).st_size
        self._tail = self._read_tail()
        self._synced = min(self._synced, self._end)

    def _take_back(self, written: int, keep: int) -> None:
        """Cut off what an append has written, except its first `keep` bytes."""
        start = os.lseek(self._fd, 0, os.SEEK_CUR) - written if written else self._end
        is_internal = start == self._end  # false: somebody has moved the end of the file
        self._cut(start + (keep if is_internal else 0), start + written, is_internal)

    def _cut(self, size: int, end: int, is_internal: bool = True) -> None:
        """Shorten the file if it still ends at `end`.

        It never grows, and no bytes of others are cut off. On a disk that fails this is best
        effort: a line that stays torn is cut off when the job resumes.
        """
        if end != os.fstat(self._fd).st_size:
            return
        with contextlib.suppress(OSError):
            if size < end:
                os.ftruncate(self._fd, size)
                os.fsync(self._fd)
        if is_internal:
            self._set_end()

    def _failed(self, error: OSError) -> FlexgenError:
        return FlexgenError(
            f"--output {self.path}: {error.strerror or error}; the rows in it are whole: make "
            "room, and the same "
            "command does the rest"
        )


def rows_of(path: Path, is_short: bool = False) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield the lines of an output that are whole rows, each with its row, even while a job writes
    to it.

    is_short: as in `whole_row`.

    One line is in memory at a time. Yield nothing if there is no file. Raise UsageError if it
    cannot be read.
    """
    try:
        with open_regular(path) as file:
            for line in _lines(file):
                if (row := whole_row(line, is_short)) is not None:
                    yield line, row
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"--output {path}: {error.strerror or error}") from error


def count_rows(path: Path) -> tuple[int, int]:
    """Return the number of rows of an output, as `rows_of` finds them, and of error rows among
    them.
    """
    rows = errors = 0
    for _, row in rows_of(path, is_short=True):
        rows = rows + 1
        errors = errors + (row["error"] is not None)
    return rows, errors


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield lines with their newlines.

    A line that is longer than any row, or a hole, comes in pieces, none of which is a row.
    """
    while piece := file.readline(_PIECE_BYTES):
        parts = [piece]
        while not piece.endswith(b"\n") and b"\0" not in piece and len(parts) < _MAX_PIECES:
            piece = file.readline(_PIECE_BYTES)
            if not piece:
                break
            parts.append(piece)
        yield b"".join(parts)


def whole_row(line: bytes, is_short: bool = False) -> dict[str, Any] | None:
    """Return the row that a line of an output holds, or None if the line is torn.

    is_short: of a long row, only its id and its error are wanted. Parsed, its log-probabilities
    would take twenty times the memory of the line.
    """
    if not line.endswith(b"\n"):
        return None
    try:
        hook = _without_answer if is_short and len(line) > _LONG_ROW_BYTES else None
        row = json.loads(line, object_pairs_hook=hook)
    except (ValueError, RecursionError):
        return None
    if (
        isinstance(row, dict)
        and isinstance(row.get("custom_id"), str)
        and {"response", "error"} <= row.keys()
    ):
        return row
    return None


def _without_answer(members: list[tuple[str, Any]]) -> dict[str, Any] | None:
    """Return the members of a row or of its error; None for objects within its answer."""
    return {name: value for name, value in members if name in _OF_ROW} or None


def to_line(row: dict[str, Any]) -> bytes:
    """Return a row as a line without its newline (json_line)."""
    return json_line(row).encode()


def is_locked(path: Path) -> bool:
    """Return whether a job is writing to this file now. Raise UsageError if it cannot be opened."""
    try:
        with open_regular(path) as file:
            return not try_lock(file.fileno(), shared=True)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise UsageError(f"--output {path}: {error.strerror or error}") from error


def _open_locked(path: Path) -> int:
    """Open and lock the file. Return a descriptor of the file that has the name when locked."""
    for attempt in range(_LOCK_TRIES):
        try:
            fd = open_patiently(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(f"--output {path}: {error.strerror or error}") from error
        if not stat.S_ISREG(os.fstat(fd).st_mode):  # the end of a pipe or a device would never come
            os.close(fd)
            raise UsageError(
                f"--output {path}: is no regular file, and a job reads its rows back; name one"
            )
        try:
            if try_lock(fd):
                if is_still(path, fd):
                    return fd
                close_locked(fd)
                continue
        except OSError as error:
            os.close(fd)
            raise UsageError(
                f"--output {path}: cannot be locked here ({error.strerror or error})"
            ) from error
        # Locked by another job, or for a moment by a --status command; or just removed.
        os.close(fd)
        if attempt < _LOCK_TRIES - 1:
            time.sleep(_LOCK_WAIT_S)
    guard = guard_of(path.resolve())
    or_else = f", or remove {guard} if that job has ended" if guard.exists() else ""
    raise UsageError(
        f"--output {path}: another job writes to it; wait for its end, or give another "
        f"--output{or_else}"
    )
