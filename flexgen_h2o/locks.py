"""Locks on files and folders (flock), which the kernel drops when their holder dies, however that comes; and the mark
of folders that the package has made: it removes no other."""

from __future__ import annotations

import fcntl
import json
import os
import stat
from pathlib import Path
from typing import Any

from flexgen_h2o.files import write_whole

MARK = ".flexgen_h2o"  # a file in each folder that the package has made
_MADE_BY = {"made_by": "flexgen_h2o"}
_MARK_BYTES = 2**20


def try_lock(fd: int, shared: bool = False) -> bool:
    """Lock an open file, or a folder, now; False: somebody else holds it. shared: others may share it.

    OSError where the file system has no locks.
    """
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def wait_for_lock(fd: int) -> None:
    """Lock it when nobody else does any more. OSError as above."""
    fcntl.flock(fd, fcntl.LOCK_EX)


def is_still(path: Path, fd: int) -> bool:
    """Is the open file the one at `path`? It may have been removed or replaced, also while its lock was waited for."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def lock_folder(folder: Path, shared: bool = False) -> int | None:
    """A descriptor that holds the lock of a folder with a mark until it is closed; None: somebody else holds it.

    It is the lock of the mark: a lock of the folder itself is whoever's makes folders in it. OSError where there is no
    mark, or its file system has no locks.
    """
    fd = os.open(folder / MARK, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if try_lock(fd, shared) and is_still(folder / MARK, fd):
            return fd
    except BaseException:
        os.close(fd)
        raise
    os.close(fd)
    return None


def mark(folder: Path, **facts: object) -> None:
    """Say in a folder that the package has made it, and what it is. Raises OSError."""
    write_whole(folder / MARK, json.dumps({**_MADE_BY, **facts}) + "\n", follow=False, sync=False)


def read_mark(folder: Path) -> dict[str, Any] | None:
    """What `mark` says of a folder; None for a folder of somebody else, and for a link."""
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            return None
        fd = os.open(folder / MARK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:  # open() refuses a folder, and leaves its descriptor open
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                return None
            with open(fd, "rb", closefd=False) as file:
                found = json.loads(file.read(_MARK_BYTES))
        finally:
            os.close(fd)
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and _MADE_BY.items() <= found.items() else None
