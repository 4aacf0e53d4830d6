"""Writes large files in one pass at the disk's speed, past the page cache where the file system allows it.

Knows bytes only.

Writes the tensors of a model as a safetensors folder, piece by piece. Knows tensors by name and shape only.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tqdm import tqdm

from flexgen_h2o.checkpoint.safetensors import SINGLE_NAME, Entry, header, shard_name, write_index
from flexgen_h2o.core import interrupts
from flexgen_h2o.core.config import ModelSpec, TensorSpec
from flexgen_h2o.core.files import open_new
from flexgen_h2o.core.units import MIB

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


SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class Shard:
    """One file to write: its header (bytes) and its tensors in the order of their data."""

    name: str
    head: bytes
    tensors: tuple[TensorSpec, ...]
    nbytes: int  # of the whole file


def tensors_of(spec: ModelSpec) -> list[TensorSpec]:
    """All tensors of a model, those of a layer side by side, tied ones once."""
    return list({t.name: t for unit in spec.layers(sep_layer=False).units for t in unit.tensors}.values())


def plan_shards(
    tensors: Iterable[TensorSpec], entry_of: Callable[[TensorSpec], Entry], metadata: Mapping[str, str] | None = None
) -> list[Shard]:
    """Files of at most SHARD_BYTES (one tensor may exceed it), a layer's tensors side by side."""
    groups: list[list[TensorSpec]] = [[]]
    room = SHARD_BYTES
    for tensor in tensors:
        nbytes = entry_of(tensor).nbytes
        if nbytes > room and groups[-1]:
            groups.append([])
            room = SHARD_BYTES
        groups[-1].append(tensor)
        room -= nbytes
    shards = []
    for i, group in enumerate(groups):
        entries = [entry_of(t) for t in group]
        name = SINGLE_NAME if len(groups) == 1 else shard_name(i, len(groups))
        head = header(entries, dict(metadata or {}))
        shards.append(Shard(name, head, tuple(group), len(head) + sum(e.nbytes for e in entries)))
    return shards


def write_shards(
    folder: Path, shards: list[Shard], pieces: Callable[[TensorSpec], Iterator[memoryview]], title: str, progress: bool
) -> None:
    """Fill `folder`: all files' space is taken first. pieces: a tensor's bytes in order. progress: a bar on stderr.

    Raises OSError (ENOSPC) when the disk is full.
    """
    for shard in shards:
        reserve(folder / shard.name, shard.nbytes)
    if len(shards) > 1:
        weight_map = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
        write_index(folder, weight_map, sum(shard.nbytes - len(shard.head) for shard in shards))
    nbytes = sum(shard.nbytes for shard in shards)
    with tqdm(total=nbytes, desc=title, unit="B", unit_scale=True, file=sys.stderr, disable=not progress) as bar:
        for shard in shards:
            _fill(folder / shard.name, shard, pieces, bar.update)


def _fill(
    path: Path, shard: Shard, pieces: Callable[[TensorSpec], Iterator[memoryview]], advance: Callable[[int], object]
) -> None:
    with FileWriter(path) as file:
        file.write(shard.head)
        advance(len(shard.head))
        for tensor in shard.tensors:
            for piece in pieces(tensor):
                interrupts.check()
                file.write(piece)
                advance(piece.nbytes)
