"""Files read and written around the page cache, and the run's scratch folder on the disk tier."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from flexgen_h2o.core.errors import DoesNotFitError, TransferError, UsageError
from flexgen_h2o.core.files import MARK, close_locked, lock_folder, mark, read_mark, wait_for_lock
from flexgen_h2o.core.units import PAGE, format_bytes, format_free, round_up

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_FULL = (errno.ENOSPC, errno.EDQUOT)  # no blocks, or no inodes, are left
SCRATCH = "scratch"  # the kind in the mark of a scratch folder
_SCRATCH_NAME = re.compile(r"run-[0-9]+-[0-9a-f]{8}")
# Files that runs write into it, and the lock of the weights that a measurement makes there.
SCRATCH_FILES = ("cache.bin", "hidden.bin", "profile.bin", ".weights.flexgen-lock")


class DirectFile:
    """A file opened with O_DIRECT if the file system supports it.

    Otherwise I/O is buffered, and the bytes are dropped from the page cache. Offsets, lengths and
    buffer addresses are multiples of 4 KiB. Only the end of the file may be short.
    """

    def __init__(self, path: Path, writable: bool = False) -> None:
        self.path = path
        self._flags = os.O_RDWR if writable else os.O_RDONLY
        try:
            self.fd = os.open(path, self._flags | _O_DIRECT)
            self.direct = bool(_O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise UsageError(f"{path}: cannot be opened ({error.strerror})") from error
            self.fd = os.open(path, self._flags)
            self.direct = False

    def read(self, data: torch.Tensor, offset: int, needed: int) -> int:
        """Fill `data` from `offset` and return the bytes read.

        data: uint8, contiguous. needed: bytes that must be there. Raises TransferError if the file
        ends early or the read fails.
        """
        view = data.numpy().data
        got = 0
        while got < needed:
            count = self._move(os.preadv, view[got:], offset + got)
            if count == 0:
                size = os.fstat(self.fd).st_size
                raise TransferError(
                    f"{self.path}: ends at byte {size}, {offset + needed} are needed"
                )
            got += count
        self._forget(offset, got)
        return got

    def write(self, data: torch.Tensor, offset: int) -> int:
        """Write all of `data` (uint8, contiguous) at `offset`.

        Raises DoesNotFitError if the disk is full, and TransferError if the write fails otherwise.
        """
        view = data.numpy().data
        put = 0
        while put < len(view):
            put += self._move(os.pwritev, view[put:], offset + put)
        if not self.direct:
            os.fdatasync(self.fd)
            self._forget(offset, put)
        return put

    def close(self) -> None:
        os.close(self.fd)

    def _move(
        self, call: Callable[[int, list[memoryview], int], int], view: memoryview, offset: int
    ) -> int:
        """Call preadv or pwritev once.

        If the file system refuses O_DIRECT only here, switch to buffered I/O.
        """
        try:
            try:
                return call(self.fd, [view], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # Another thread may have switched already. This request was refused all the same.
                fcntl.fcntl(
                    self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~_O_DIRECT
                )
                self.direct = False
                return call(self.fd, [view], offset)
        except OSError as error:
            if error.errno in _FULL:
                raise DoesNotFitError(
                    f"{self.path.parent}: the disk is full; free space or move --offload-dir"
                ) from error
            raise TransferError(
                f"{self.path}: {call.__name__} failed ({error.strerror})"
            ) from error

    def _forget(self, offset: int, length: int) -> None:
        # Buffered pages would count as RAM of the machine and hide the disk from the next sweep.
        if not self.direct:
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.fd, offset, length, os.POSIX_FADV_DONTNEED)


class FileRange(NamedTuple):
    """Bytes [offset, offset + nbytes) of a file, which are values of `dtype`."""

    file: DirectFile
    offset: int
    nbytes: int
    dtype: torch.dtype = torch.uint8


class Scratch:
    """A folder in the offload dir that belongs to this run alone. It is removed at the end.

    Every run has its own folder and holds its lock, so two runs may share an offload dir. Folders
    whose run is dead (killed with -9) are removed by the next run. A child of os.fork() leaves its
    parent's folder alone.
    """

    def __init__(self, offload_dir: Path) -> None:
        self._lock: int | None = None
        self._owner = os.getpid()
        self.folder = offload_dir / f"run-{self._owner}-{os.urandom(4).hex()}"
        try:
            offload_dir.mkdir(parents=True, exist_ok=True)
            with _locked_folder(offload_dir):
                # Only one run may be here: before a run holds its folder's lock, it would look
                # dead.
                for folder in offload_dir.glob("run-*"):
                    _remove_if_dead(folder)
                self.folder.mkdir()
                mark(self.folder, kind=SCRATCH)
                self._lock = lock_folder(self.folder)
        except OSError as error:
            if self._lock is None:
                _clear(self.folder)
            self.close()
            kind = DoesNotFitError if error.errno in _FULL else UsageError
            raise kind(f"--offload-dir {offload_dir}: cannot be used ({error.strerror})") from error

    def create(self, name: str, nbytes: int) -> DirectFile:
        """Return a new file of `nbytes`.

        Its space is reserved now, so the disk cannot fill up during the run.
        """
        assert name in SCRATCH_FILES, f"{name}: no other file is removed with the folder"
        path = self.folder / name
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(fd, 0, max(1, nbytes))
            finally:
                os.close(fd)
        except OSError as error:
            free = shutil.disk_usage(self.folder).free
            raise DoesNotFitError(
                f"--offload-dir {self.folder.parent}: {format_bytes(nbytes)} are needed on disk, "
                f"{format_free(free, nbytes)} ({error.strerror}); free space, give another "
                "--offload-dir, "
                "or lower the disk shares of --percent"
            ) from error
        return DirectFile(path, writable=True)

    def close(self) -> None:
        """Remove the folder. Further calls do nothing."""
        lock = self._lock
        self._lock = None
        if lock is not None:
            if os.getpid() == self._owner:
                _clear(self.folder)
            close_locked(lock)


def is_scratch(folder: Path) -> bool:
    """Return whether a folder is the scratch folder of some run, by its name and its mark."""
    return (
        bool(_SCRATCH_NAME.fullmatch(folder.name))
        and (read_mark(folder) or {}).get("kind") == SCRATCH
    )


def remove_scratch(folder: Path) -> bool:
    """Remove a scratch folder whose run is dead.

    Returns False if the run is alive or the folder contains something else, too.
    """
    with _locked_folder(folder.parent):
        return _remove_if_dead(folder)


def _remove_if_dead(folder: Path) -> bool:
    if not is_scratch(folder):
        return False
    try:
        lock = lock_folder(folder)  # a living run holds this lock
    except OSError:
        return False
    if lock is None:
        return False
    try:
        return _clear(folder)
    finally:
        close_locked(lock)


def _clear(folder: Path) -> bool:
    """Remove what runs put into a scratch folder, then its mark and the folder.

    No run would remove a folder without a mark. Returns whether the folder has been removed.
    """
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name in SCRATCH_FILES:
                os.unlink(folder / name)
            elif read_mark(folder / name) is not None:
                shutil.rmtree(folder / name, ignore_errors=True)
        if os.listdir(folder) == [MARK]:
            os.unlink(folder / MARK)
        os.rmdir(folder)
    return not os.path.lexists(folder)


@contextlib.contextmanager
def _locked_folder(folder: Path) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY)
    try:
        wait_for_lock(fd)
        yield
    finally:
        close_locked(fd)


def aligned_range(offset: int, nbytes: int) -> tuple[int, int]:
    """Return the smallest 4 KiB aligned (start, length) that covers the bytes."""
    start = offset // PAGE * PAGE
    return start, round_up(offset + nbytes, PAGE) - start
