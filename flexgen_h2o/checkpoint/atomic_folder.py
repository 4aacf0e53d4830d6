"""Fingerprints of files, checks for changes, and folders that are complete or absent.

Only one process at a time builds a folder. Each folder has the package's mark. A folder without the
mark belongs to somebody else and is never removed, whatever its name.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import DoesNotFitError, FlexgenError, UsageError
from flexgen_h2o.core.files import (
    MARK,
    close_locked,
    is_still,
    lock_folder,
    mark,
    open_regular,
    read_mark,
    sync_path,
    try_lock,
    wait_for_lock,
)
from flexgen_h2o.core.notes import say_once
from flexgen_h2o.core.units import format_bytes, format_free

# Files of at most this size are sampled whole.
WHOLE_BYTES = 32 * 2**20
# Samples of a larger file, evenly spaced from its first byte to its last.
SAMPLES = 64
SAMPLE_BYTES = 4096
# File systems allow names of 255 bytes, and names of this package get endings.
LABEL_BYTES = 100

_METADATA = (
    "a checkpoint file has another mode, owner, name or number of links, and the same "
    "contents; the run goes on"
)
_STEADY_TRIES = 5  # tries to find a file in one state before and after its contents are sampled
# a file that was renamed may be renamed back
_GONE_S = 0.5
_GONE_POLL_S = 0.02


@dataclass
class FileState:
    """The state of a file, or of the target of a link, when it was opened. `file_state` makes it.

    A change of one of the first four fields shows that the file was written to or replaced. A new
    ctime alone does not show that: it also comes with another mode, owner, name or number of hard
    links. The contents then decide.
    """

    nbytes: int
    mtime_ns: int
    inode: int
    device: int
    ctime_ns: int  # newest ctime at which the contents are known to be the same
    # `sample_digest` of the contents. None if they could not be read or changed meanwhile.
    digest: str | None

    def is_like(self, now: os.stat_result) -> bool:
        """Return whether the file has the same inode, size and time of change."""
        then = (self.nbytes, self.mtime_ns, self.inode, self.device)
        return then == (now.st_size, now.st_mtime_ns, now.st_ino, now.st_dev)


States = Mapping[Path, FileState | None]  # None: there is no such file


def fingerprint(paths: Sequence[Path], *more: object) -> str:
    """Return 16 hex digits of names, sizes, times of change, inodes and sampled contents of files.

    more: other facts that count, as JSON values. The fingerprint stays the same if a file is moved
    with its folder, or if its mode, owner or number of links changes. A copy has another inode and
    counts as another file.
    """
    facts: list[object] = []
    for path in paths:
        stat = path.stat()
        facts.append(
            (path.name, stat.st_size, stat.st_mtime_ns, stat.st_ino, sample_digest([path]))
        )
    return hashlib.sha256(json.dumps([*facts, *more]).encode()).hexdigest()[:16]


def sample_digest(paths: Sequence[Path]) -> str:
    """Return 16 hex digits of names, sizes and contents. They are the same for a copy.

    Small files are read whole, larger ones in SAMPLES pieces. Training changes nearly every weight,
    and merged adapters change whole matrices, so some piece differs. Raises OSError.
    """
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(json.dumps([path.name, size]).encode())
        with open_regular(path) as file:
            if size <= WHOLE_BYTES:
                digest.update(file.read())
                continue
            for i in range(SAMPLES):
                file.seek((size - SAMPLE_BYTES) * i // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def file_state(path: Path) -> FileState | None:
    """Return the state of a file, or of the target of a link.

    None: there is no such file, or it cannot be looked at.
    """
    try:
        before = path.stat()
        for _ in range(_STEADY_TRIES):
            digest = _digest_of(path)
            now = path.stat()
            if now.st_ctime_ns == before.st_ctime_ns:
                break
            before = now
            digest = None
    except OSError:
        return None
    return FileState(
        before.st_size, before.st_mtime_ns, before.st_ino, before.st_dev, before.st_ctime_ns, digest
    )


def states_of(paths: Iterable[Path]) -> States:
    """Return the state of each file."""
    return {path: file_state(path) for path in paths}


def check_unchanged(states: States) -> None:
    """Raise FlexgenError if a file is in another state than in `states`.

    This needs one `stat` per file. Contents are sampled only after a change of a file's ctime
    alone. If they are the same, the user is told once, and the new ctime is kept in `states`.
    """
    for path, before in states.items():
        now = _stat_of(path, waits=before is not None)
        if before is None and now is None:
            continue
        if before is None or now is None or not before.is_like(now):
            raise _changed(path, "removed" if now is None else "written to or replaced")
        if before.ctime_ns != now.st_ctime_ns:
            _check_contents(path, before)


def _stat_of(path: Path, waits: bool) -> os.stat_result | None:
    """Return the file's `stat`, or None if there is no such file.

    waits: look for a missing file again for a moment before None is returned.
    """
    end = time.monotonic() + _GONE_S
    while True:
        try:
            return path.stat()
        except OSError:
            if not waits or time.monotonic() > end:
                return None
        time.sleep(_GONE_POLL_S)


def _check_contents(path: Path, before: FileState) -> None:
    """Accept a file whose ctime alone has changed if its sampled contents are those of `before`."""
    if not os.access(path, os.R_OK, effective_ids=True):
        # The file's mode or owner has changed. Whoever reads it has had it open since before.
        say_once(_METADATA)
        return
    now = file_state(path)
    if now is None or now.digest is None or now.digest != before.digest:
        raise _changed(path, "written to")
    before.ctime_ns = now.ctime_ns
    say_once(_METADATA)


def _changed(path: Path, what: str) -> FlexgenError:
    return FlexgenError(
        f"{path}: was {what} after this run had opened it, and what was computed since is not "
        "handed out; "
        "leave the checkpoint alone while it is in use, and start again"
    )


def _digest_of(path: Path) -> str | None:
    try:
        return sample_digest([path])
    except OSError:
        return None


def label(name: str) -> str:
    """Return `name`, cut to `LABEL_BYTES`, as a part of the name of a fingerprinted folder."""
    return os.fsencode(name)[:LABEL_BYTES].decode(errors="ignore")


_TEMP_SUFFIX = ".flexgen-building"
_LOCK_SUFFIX = ".flexgen-lock"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_log = logging.getLogger(__name__)


@contextmanager
def building(
    folder: Path, nbytes: int = 0, kind: str = "files", model: str = ""
) -> Iterator[Path | None]:
    """Yield a folder to fill, which becomes `folder` at the end.

    It yields None if `folder` is already complete.

    nbytes: about the bytes that will be written. DoesNotFitError is raised before anything is
    written if the disk has less free; otherwise the size is printed to stderr. kind, model: what
    the folder will be, for that line and for the mark.

    If the body raises any exception, what it wrote is removed. A second process waits and then gets
    None. Remains of killed processes in the same parent are removed. Raises DoesNotFitError if the
    disk is full, and UsageError if the parent cannot be written to.
    """
    folder = Path(os.path.abspath(folder))
    if _is_complete(folder):
        yield None
        return
    temp = _sibling(folder, _TEMP_SUFFIX)
    interrupts.check()
    with _exclusively(folder):
        if _is_complete(folder):
            yield None
            return
        is_internal = False
        try:
            if shutil.disk_usage(folder.parent).free < nbytes:
                raise _no_space(folder, nbytes)
            # A marked parent is a scratch folder, which is removed with its run.
            if nbytes and read_mark(folder.parent) is None:
                size = format_bytes(nbytes)
                what = f"{kind} of {model}"
                line = (
                    f"# {size} will be written to {folder} ({what}), and stay there for later runs"
                )
                print(
                    f"{line}; flexgen-h2o cache lists and removes them", file=sys.stderr, flush=True
                )
            temp.mkdir()
            is_internal = True
            mark(temp, kind=kind, model=model)
            yield temp
            mark(
                temp,
                kind=kind,
                model=model,
                files=sorted(p.name for p in temp.iterdir() if p.name != MARK),
            )
            for path in (*temp.rglob("*"), temp):
                sync_path(path)
            os.rename(temp, folder)
            sync_path(folder.parent)
        except BaseException as error:
            if is_internal:
                shutil.rmtree(temp, ignore_errors=True)
            if isinstance(error, FileExistsError) and not is_internal:
                raise UsageError(
                    f"--offload-dir {temp.parent}: {temp.name} is in the way and not of this "
                    "version; remove it"
                ) from error
            if isinstance(error, OSError) and error.errno in _FULL:
                raise _no_space(folder, nbytes) from error
            raise


def is_unfinished(folder: Path) -> bool:
    """Return whether the folder is one that `building` has not finished."""
    return folder.name.endswith(_TEMP_SUFFIX) and read_mark(folder) is not None


def is_in_use(folder: Path) -> bool:
    """Return whether a process uses the folder (`lock_folder`) or is still building it."""
    held = _lock_of(folder) if is_unfinished(folder) else folder / MARK
    try:
        fd = os.open(held, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not try_lock(fd)
    finally:
        close_locked(fd)


def remove_built(folder: Path, files: Collection[str]) -> bool:
    """Remove a folder that `building` has made, complete or not.

    Returns False if the folder is in use or contains more than `files`. It is removed at once: no
    run ever finds half of it. Raises OSError.
    """
    unfinished = is_unfinished(folder)
    with _locked(_lock_of(folder), wait=False) as taken:
        if taken and unfinished:
            return _remove_marked(folder)
        if taken and read_mark(folder) is None:  # made by an older version
            mark(folder)
        fd = lock_folder(folder) if taken else None
        if fd is None:
            return False
        try:
            if not {MARK, *files}.issuperset(os.listdir(folder)):
                return False
            temp = _sibling(folder, _TEMP_SUFFIX)
            os.rename(folder, temp)
            return _remove_marked(temp)
        finally:
            close_locked(fd)


def _is_complete(folder: Path) -> bool:
    try:
        complete = folder.is_dir() and any(folder.iterdir())
        in_the_way = not complete and (
            folder.is_symlink() or (folder.exists() and not folder.is_dir())
        )
    except OSError as error:
        raise UsageError(
            f"--offload-dir {folder.parent}: cannot be used ({error.strerror}); give another one"
        ) from error
    if in_the_way:  # this includes a link without a target: no folder can take its place
        raise UsageError(
            f"--offload-dir {folder.parent}: {folder.name} is in the way and not a folder; remove "
            "it"
        )
    return complete


def _sibling(folder: Path, suffix: str) -> Path:
    return folder.with_name(f".{folder.name}{suffix}")


def _lock_of(folder: Path) -> Path:
    """Return the lock file of a folder that is complete or being built."""
    name = (
        folder.name.removeprefix(".").removesuffix(_TEMP_SUFFIX)
        if is_unfinished(folder)
        else folder.name
    )
    return _sibling(folder.with_name(name), _LOCK_SUFFIX)


@contextmanager
def _exclusively(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`.

    Its parent is made first, and rid of the remains of dead processes.
    """
    with ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(folder.parent)
            stack.enter_context(_locked(_sibling(folder, _LOCK_SUFFIX), wait=True))
            # While this process holds the lock, no other can be filling the folder.
            _remove_marked(_sibling(folder, _TEMP_SUFFIX))
        except OSError as error:
            if error.errno in _FULL:
                raise _no_space(folder, 0) from error
            reason = error.strerror or str(error)
            raise UsageError(
                f"--offload-dir {folder.parent}: cannot be written to ({reason}); give another "
                "folder"
            ) from error
        yield


@contextmanager
def _locked(path: Path, wait: bool) -> Iterator[bool]:
    """Hold a lock on `path`, a file that exists only while somebody holds the lock.

    Yields False if another process holds it and `wait` is not set. The package's lock files are
    empty: a file with contents belongs to somebody else and stays.
    """
    fd = _take(path, wait)
    if fd is None:
        yield False
        return
    try:
        yield True
    finally:
        if not os.fstat(fd).st_size:
            path.unlink(missing_ok=True)
        close_locked(fd)


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
            close_locked(fd)
            raise
        # The last holder has removed the file that this process waited for. The file there now
        # counts.
        close_locked(fd)


def _remove_stale(parent: Path) -> None:
    """Remove unfinished folders whose process is dead.

    The kernel drops the lock of a killed process, so a lock that can be taken has lost its owner.
    """
    for lock in parent.glob(f".*{_LOCK_SUFFIX}"):
        if lock.is_symlink() or not lock.is_file():
            continue
        with _locked(lock, wait=False) as taken:
            if taken:
                _remove_marked(lock.with_name(lock.name.removesuffix(_LOCK_SUFFIX) + _TEMP_SUFFIX))


def _remove_marked(temp: Path) -> bool:
    """Remove the unfinished folder of a dead process.

    Returns False if a folder is still there, because it has no mark of the package.
    """
    if read_mark(temp) is not None:
        shutil.rmtree(temp, ignore_errors=True)
    else:
        # The process may have been killed before it marked the folder, which is then empty.
        with suppress(OSError):
            os.rmdir(temp)
    return not temp.exists()


def _no_space(folder: Path, nbytes: int) -> DoesNotFitError:
    free = shutil.disk_usage(folder.parent).free
    need = f"needs {format_bytes(nbytes)}" if nbytes else "the disk is full"
    return DoesNotFitError(
        f"--offload-dir {folder.parent}: {folder.name}: {need}, {format_free(free, nbytes)}; "
        "make room or give another folder"
    )
