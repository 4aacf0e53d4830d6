"""Folders that are there complete or not at all, made by one process at a time. Knows nothing of what is in them."""

from __future__ import annotations

import errno
import glob
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from flexgen_h2o.errors import DoesNotFitError, UsageError
from flexgen_h2o.locks import is_still, try_lock, wait_for_lock
from flexgen_h2o.units import format_bytes, format_free

_TEMP_SUFFIX = ".flexgen-building"
_LOCK_SUFFIX = ".flexgen-lock"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_log = logging.getLogger(__name__)


@contextmanager
def building(folder: Path, nbytes: int = 0) -> Iterator[Path | None]:
    """Yield an empty folder to fill, which becomes `folder` at the end; or None: `folder` is already complete.

    nbytes: about what will be written; refused before anything is written if the disk has less free. When the body
    fails, by whatever exception, what it wrote is removed. A second process waits and then gets None; what killed
    processes left in the same parent is removed. Raises DoesNotFitError when the disk is full, UsageError when the
    parent cannot be written to.
    """
    folder = Path(os.path.abspath(folder))
    if _is_complete(folder):
        yield None
        return
    temp = _beside(folder, f"{_TEMP_SUFFIX}-{secrets.token_hex(8)}")
    with _exclusively(folder):
        if _is_complete(folder):
            yield None
            return
        try:
            _require_space(folder, nbytes)
            temp.mkdir()
            yield temp
            _sync_tree(temp)
            os.rename(temp, folder)
            _sync(folder.parent)
        except BaseException as error:
            shutil.rmtree(temp, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in _FULL:
                raise _no_space(folder, nbytes) from error
            raise


def _is_complete(folder: Path) -> bool:
    try:
        complete = folder.is_dir() and any(folder.iterdir())
        in_the_way = not complete and (folder.is_symlink() or (folder.exists() and not folder.is_dir()))
    except OSError as error:
        raise UsageError(
            f"--offload-dir {folder.parent}: cannot be used ({error.strerror}); give another one"
        ) from error
    if in_the_way:  # a link that leads nowhere, too: no folder can take its place
        raise UsageError(f"--offload-dir {folder.parent}: {folder.name} is in the way and not a folder; remove it")
    return complete


def _beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(f".{folder.name}{suffix}")


@contextmanager
def _exclusively(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`, its parent made and rid of what dead processes left."""
    with ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(folder.parent)
            stack.enter_context(_locked(_beside(folder, _LOCK_SUFFIX), wait=True))
            # Under the lock nobody else can be filling it.
            _remove_temps(folder)
        except OSError as error:
            if error.errno in _FULL:
                raise _no_space(folder, 0) from error
            reason = error.strerror or str(error)
            raise UsageError(
                f"--offload-dir {folder.parent}: cannot be written to ({reason}); give another folder"
            ) from error
        yield


@contextmanager
def _locked(path: Path, wait: bool) -> Iterator[bool]:
    """Hold a lock on `path`, which exists only while somebody holds it; False: somebody else does (not `wait`)."""
    fd = _take(path, wait)
    if fd is None:
        yield False
        return
    try:
        yield True
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)


def _take(path: Path, wait: bool) -> int | None:
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        try:
            if not try_lock(fd):
                if not wait:
                    os.close(fd)
                    return None
                _log.warning("waiting for another process that is working on %s", path.parent)
                wait_for_lock(fd)
            if is_still(path, fd):
                return fd
        except BaseException:
            os.close(fd)
            raise
        # The last holder removed the file that we waited on: what counts is the one there now.
        os.close(fd)


def _remove_stale(parent: Path) -> None:
    """The kernel drops the lock of a killed process, so a lock file that can be taken has lost its owner."""
    for lock in parent.glob(f".*{_LOCK_SUFFIX}"):
        if lock.is_symlink():  # none of ours
            continue
        with _locked(lock, wait=False) as taken:
            if taken:
                _remove_temps(lock.with_name(lock.name.removesuffix(_LOCK_SUFFIX)[1:]))


def _remove_temps(folder: Path) -> None:
    """What was begun for `folder` and not ended."""
    pattern = glob.escape(_beside(folder, _TEMP_SUFFIX).name) + "-" + "[0-9a-f]" * 16
    for temp in folder.parent.glob(pattern):
        shutil.rmtree(temp, ignore_errors=True)


def _require_space(folder: Path, nbytes: int) -> None:
    if shutil.disk_usage(folder.parent).free < nbytes:
        raise _no_space(folder, nbytes)


def _no_space(folder: Path, nbytes: int) -> DoesNotFitError:
    free = shutil.disk_usage(folder.parent).free
    need = f"needs {format_bytes(nbytes)}" if nbytes else "the disk is full"
    return DoesNotFitError(
        f"--offload-dir {folder.parent}: {folder.name}: {need}, {format_free(free, nbytes)}; "
        "make room or give another folder"
    )


def _sync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
