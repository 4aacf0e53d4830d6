"""The state of files: a short name for it, so that what was made from them is made anew when they change, and a check
that they have not changed since they were opened."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from flexgen_h2o.errors import CheckpointChangedError
from flexgen_h2o.files import open_regular

WHOLE_BYTES = 32 * 2**20
SAMPLES, SAMPLE_BYTES = 64, 4096  # of a larger file, evenly from its first byte to its last
LABEL_BYTES = 100  # file systems take names of 255 bytes, and ours get endings

FileState = tuple[int, int, int, int]  # bytes, mtime and ctime in ns, inode
States = Mapping[Path, FileState | None]  # None: the file is not there


def fingerprint(paths: Sequence[Path], *more: object) -> str:
    """16 hex digits of names and states; `more`: other facts that count, as JSON takes them.

    No byte is read. A copy of a file, and one that was written to, have another inode or ctime, which no program can
    set back, as it can the mtime. A file that is moved with its folder stays the same; one that is restored or whose
    mode is changed counts as another: what was made is then made again, and never taken for what it is not.
    """
    facts = [(path.name, *_state(path.stat())) for path in paths]
    return hashlib.sha256(json.dumps([*facts, *more]).encode()).hexdigest()[:16]


def sample_digest(paths: Sequence[Path]) -> str:
    """16 hex digits of names, sizes and contents, the same for a copy: small files whole, of others SAMPLES pieces.

    Training changes nearly every weight, and merged adapters whole matrices: some piece shows it. Raises OSError.
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
    """Of a file, or of what a link leads to; None where there is none that can be looked at."""
    try:
        return _state(path.stat())
    except OSError:
        return None


def states_of(paths: Iterable[Path]) -> States:
    return {path: file_state(path) for path in paths}


def check_unchanged(states: States) -> None:
    """CheckpointChangedError where a file is in another state than in `states`. One `stat` a file, no byte is read."""
    for path, before in states.items():
        now = file_state(path)
        if now != before:
            what = "removed" if now is None else "written to or replaced"
            raise CheckpointChangedError(
                f"{path}: was {what} after this run had opened it, and what was computed since is not handed out; "
                "leave the checkpoint alone while it is in use, and start again"
            )


def _state(stat: os.stat_result) -> FileState:
    return stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino


def label(name: str) -> str:
    """`name`, cut to `LABEL_BYTES`, for the names of folders that a fingerprint tells apart."""
    return os.fsencode(name)[:LABEL_BYTES].decode(errors="ignore")
