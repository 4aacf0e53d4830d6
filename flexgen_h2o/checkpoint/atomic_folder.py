"""Fingerprints of files, a check that files have not changed, and folders that are complete or absent.

One process at a time builds a folder. Each folder has the package's mark; one without it belongs to somebody else and
is never removed, whatever its name.
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
from flexgen_h2o.core.errors import CheckpointChangedError, DoesNotFitError, UsageError
from flexgen_h2o.core.files import (
    MARK,
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

WHOLE_BYTES = 32 * 2**20
SAMPLES, SAMPLE_BYTES = 64, 4096  # of a larger file, evenly from its first byte to its last
LABEL_BYTES = 100  # file systems take names of 255 bytes, and ours get endings

_METADATA = "a checkpoint file has another mode, owner, name or number of links, and the same contents; the run goes on"
_STEADY_TRIES = 5  # to find a file in one state before and after its contents are sampled
_GONE_S, _GONE_POLL_S = 0.5, 0.02  # a file that was renamed may be renamed back


@dataclass
class FileState:
    """A file, or what a link leads to, as it was when it was opened.

    The first four say that a file was written to or replaced. A new ctime alone does not: it also comes with another
    mode, owner, name or number of hard links, and then the contents decide.
    """

    nbytes: int
    mtime_ns: int
    inode: int
    device: int
    ctime_ns: int  # the newest one whose contents are known to be the same
    digest: str | None  # of its contents (`sample_digest`); None if they could not be read, or changed meanwhile

    def is_like(self, now: os.stat_result) -> bool:
        """Is it the same file, of the same size and time of change?"""
        then = (self.nbytes, self.mtime_ns, self.inode, self.device)
        return then == (now.st_size, now.st_mtime_ns, now.st_ino, now.st_dev)


States = Mapping[Path, FileState | None]  # None: the file is not there


def fingerprint(paths: Sequence[Path], *more: object) -> str:
    """16 hex digits of names, sizes, times of change, inodes and sampled contents of files.

    `more`: other facts that count, as JSON takes them. A file that is moved with its folder stays the same, and so does
    one whose mode, owner or number of links changes. A copy has another inode and counts as another file.
    """
    facts: list[object] = []
    for path in paths:
        stat = path.stat()
        facts.append((path.name, stat.st_size, stat.st_mtime_ns, stat.st_ino, sample_digest([path])))
    return hashlib.sha256(json.dumps([*facts, *more]).encode()).hexdigest()[:16]


def sample_digest(paths: Sequence[Path]) -> str:
    """16 hex digits of names, sizes and contents, the same for a copy: small files whole, of others SAMPLES pieces.

    Training changes nearly every weight and merged adapters change whole matrices, so some piece differs.
    Raises OSError.
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
    """The state of a file, or of what a link leads to; None if there is none that can be looked at."""
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
    return FileState(before.st_size, before.st_mtime_ns, before.st_ino, before.st_dev, before.st_ctime_ns, digest)


def states_of(paths: Iterable[Path]) -> States:
    return {path: file_state(path) for path in paths}


def check_unchanged(states: States) -> None:
    """Raise CheckpointChangedError if a file is in another state than in `states`.

    This takes one `stat` per file. Contents are sampled only after a change of a file's ctime alone; if they are the
    same, that is said once, and the new ctime is kept in `states`.
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
    """None if there is no such file; `waits`: a moment later either."""
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
        # Its mode or owner is what has changed. What reads it has it open since before.
        say_once(_METADATA)
        return
    now = file_state(path)
    if now is None or now.digest is None or now.digest != before.digest:
        raise _changed(path, "written to")
    before.ctime_ns = now.ctime_ns
    say_once(_METADATA)


def _changed(path: Path, what: str) -> CheckpointChangedError:
    return CheckpointChangedError(
        f"{path}: was {what} after this run had opened it, and what was computed since is not handed out; "
        "leave the checkpoint alone while it is in use, and start again"
    )


def _digest_of(path: Path) -> str | None:
    try:
        return sample_digest([path])
    except OSError:
        return None


def label(name: str) -> str:
    """`name`, cut to `LABEL_BYTES`, for the names of folders that a fingerprint tells apart."""
    return os.fsencode(name)[:LABEL_BYTES].decode(errors="ignore")


_TEMP_SUFFIX = ".flexgen-building"
_LOCK_SUFFIX = ".flexgen-lock"
_FULL = (errno.ENOSPC, errno.EDQUOT)
_log = logging.getLogger(__name__)


@contextmanager
def building(folder: Path, nbytes: int = 0, kind: str = "files", model: str = "") -> Iterator[Path | None]:
    """Yield a folder to fill with files, which becomes `folder` at the end; or None: `folder` is already complete.

    nbytes: about what will be written; refused before anything is written if the disk has less free, else said on
    stderr. kind, model: what it will be, for that line and the mark. When the body fails, by whatever exception, what
    it wrote is removed. A second process waits and then gets None; what killed processes left in the same parent is
    removed. Raises DoesNotFitError when the disk is full, UsageError when the parent cannot be written to.
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
        is_ours = False
        try:
            if shutil.disk_usage(folder.parent).free < nbytes:
                raise _no_space(folder, nbytes)
            if nbytes and read_mark(folder.parent) is None:  # a scratch folder goes with its run
                size, what = format_bytes(nbytes), f"{kind} of {model}"
                line = f"# {size} will be written to {folder} ({what}), and stay there for later runs"
                print(f"{line}; flexgen-h2o cache lists and removes them", file=sys.stderr, flush=True)
            temp.mkdir()
            is_ours = True
            mark(temp, kind=kind, model=model)
            yield temp
            mark(temp, kind=kind, model=model, files=sorted(p.name for p in temp.iterdir() if p.name != MARK))
            for path in (*temp.rglob("*"), temp):
                sync_path(path)
            os.rename(temp, folder)
            sync_path(folder.parent)
        except BaseException as error:
            if is_ours:
                shutil.rmtree(temp, ignore_errors=True)
            if isinstance(error, FileExistsError) and not is_ours:
                raise UsageError(
                    f"--offload-dir {temp.parent}: {temp.name} is in the way and not of this version; remove it"
                ) from error
            if isinstance(error, OSError) and error.errno in _FULL:
                raise _no_space(folder, nbytes) from error
            raise


def is_unfinished(folder: Path) -> bool:
    """Is it one that `building` has not finished?"""
    return folder.name.endswith(_TEMP_SUFFIX) and read_mark(folder) is not None


def is_in_use(folder: Path) -> bool:
    """Does a process use what `building` has made (`lock_folder`), or is one still building it?"""
    held = _lock_of(folder) if is_unfinished(folder) else folder / MARK
    try:
        fd = os.open(held, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return not try_lock(fd)
    finally:
        os.close(fd)


def remove_built(folder: Path, files: Collection[str]) -> bool:
    """Remove what `building` has made, complete or not. False: it is in use, or has more than `files` in it.

    It goes at once: no run ever finds half of it. Raises OSError.
    """
    unfinished = is_unfinished(folder)
    with _locked(_lock_of(folder), wait=False) as taken:
        if taken and unfinished:
            return _remove_marked(folder)
        if taken and read_mark(folder) is None:  # of an older version
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
            os.close(fd)


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


def _sibling(folder: Path, suffix: str) -> Path:
    return folder.with_name(f".{folder.name}{suffix}")


def _lock_of(folder: Path) -> Path:
    """Of a folder that is complete or being built."""
    name = folder.name.removeprefix(".").removesuffix(_TEMP_SUFFIX) if is_unfinished(folder) else folder.name
    return _sibling(folder.with_name(name), _LOCK_SUFFIX)


@contextmanager
def _exclusively(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder`, its parent made and rid of what dead processes left."""
    with ExitStack() as stack:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            _remove_stale(folder.parent)
            stack.enter_context(_locked(_sibling(folder, _LOCK_SUFFIX), wait=True))
            # Under the lock nobody else can be filling it.
            _remove_marked(_sibling(folder, _TEMP_SUFFIX))
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
    """Hold a lock on `path`, which exists only while somebody holds it; False: somebody else does (not `wait`).

    Locks of ours are empty: a file that is not is somebody else's, and stays.
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
        if lock.is_symlink() or not lock.is_file():
            continue
        with _locked(lock, wait=False) as taken:
            if taken:
                _remove_marked(lock.with_name(lock.name.removesuffix(_LOCK_SUFFIX) + _TEMP_SUFFIX))


def _remove_marked(temp: Path) -> bool:
    """Remove what a dead process was building. False: it is not one's of ours, or not there."""
    if read_mark(temp) is not None:
        shutil.rmtree(temp, ignore_errors=True)
    else:
        with suppress(OSError):  # killed before it could mark it: nothing is in it
            os.rmdir(temp)
    return not temp.exists()


def _no_space(folder: Path, nbytes: int) -> DoesNotFitError:
    free = shutil.disk_usage(folder.parent).free
    need = f"needs {format_bytes(nbytes)}" if nbytes else "the disk is full"
    return DoesNotFitError(
        f"--offload-dir {folder.parent}: {folder.name}: {need}, {format_free(free, nbytes)}; "
        "make room or give another folder"
    )
