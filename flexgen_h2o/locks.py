"""Locks on files (flock), which the kernel drops when their holder dies, however that comes."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


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
