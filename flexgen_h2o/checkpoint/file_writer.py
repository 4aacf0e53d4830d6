"""Writes large files in one pass at the disk's speed, past the page cache where the file system allows it.

Knows bytes only.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from pathlib import Path
from types import TracebackType

from flexgen_h2o.files import open_new
from flexgen_h2o.units import MIB

# Also a multiple of every block size that O_DIRECT may ask for.
BUFFER_BYTES = 16 * MIB
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def reserve(path: Path, nbytes: int) -> None:
    """Make the file and take its blocks, so that a full disk shows before minutes of writing.

    Raises OSError (ENOSPC) when the disk has not the room, FileExistsError.
    """
    fd = open_new(path)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise
    finally:
        os.close(fd)


class FileWriter:
    """Appends to a reserved file from its start; after the `with` block the bytes are on disk, not in the page cache.

    Buffered writes and the kernel's write-back reach a third of what direct ones do, and the cached pages would hide
    the reads that follow. RAM: `BUFFER_BYTES`. Raises OSError (ENOSPC when the disk is full).
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags | os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd = os.open(path, flags)
        self._buffer = mmap.mmap(-1, BUFFER_BYTES)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._buffer.madvise(mmap.MADV_HUGEPAGE)
        self._used = 0

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`."""
        view = memoryview(data).cast("B")
        while view:
            taken = min(BUFFER_BYTES - self._used, view.nbytes)
            self._buffer[self._used : self._used + taken] = view[:taken]
            self._used += taken
            view = view[taken:]
            if self._used == BUFFER_BYTES:
                self._flush()

    def _flush(self) -> None:
        pending = memoryview(self._buffer)[: self._used]
        while pending:
            pending = pending[os.write(self._fd, pending) :]
        self._used = 0

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if error is None:
                # The last piece is of any length, which direct writes refuse.
                fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
                self._flush()
                os.fsync(self._fd)
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(self._fd)
