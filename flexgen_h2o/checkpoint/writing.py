"""Write checkpoints: files at the disk's speed, safetensors folders, seeded random weights.

Each file is written in one pass. The module knows tensors only by role, name and shape. torch is
imported only where it is used.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from flexgen_h2o.checkpoint.atomic_folder import building
from flexgen_h2o.checkpoint.formats import StoredRows, checkpoint_format
from flexgen_h2o.checkpoint.safetensors import (
    FROM_ENGINE,
    SAFETENSORS,
    Entry,
    bytes_of_dtype,
    header,
    shard_name,
)
from flexgen_h2o.core import interrupts
from flexgen_h2o.core.config import DTYPE_BYTES
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import open_new, read_json, write_new
from flexgen_h2o.core.model import ModelSpec, TensorSpec
from flexgen_h2o.core.units import MIB

if TYPE_CHECKING:
    import torch

# This is also a multiple of every block size that O_DIRECT may ask for.
BUFFER_BYTES = 16 * MIB
_NO_FALLOCATE = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def reserve(path: Path, nbytes: int) -> None:
    """Create the file and reserve its blocks, so that a full disk shows before minutes of writing.

    Raises OSError (ENOSPC) if the disk is too full, and FileExistsError.
    """
    fd = open_new(path)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno not in _NO_FALLOCATE:
            raise
    finally:
        os.close(fd)


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Write the pieces to a reserved file, one after the other.

    Then the bytes are on disk, not in the page cache. Buffered writes with the kernel's write-back
    reach only a third of the speed of direct ones, and the cached pages would hide the reads that
    follow. Uses `BUFFER_BYTES` of RAM. Raises OSError (ENOSPC if the disk is full).
    """
    flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(path, flags | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fd = os.open(path, flags)
    buffer = mmap.mmap(-1, BUFFER_BYTES)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    used = 0
    try:
        for piece in pieces:
            interrupts.check()
            view = memoryview(piece).cast("B")
            while view:
                taken = min(BUFFER_BYTES - used, view.nbytes)
                buffer[used : used + taken] = view[:taken]
                used += taken
                view = view[taken:]
                if used == BUFFER_BYTES:
                    _write_all(fd, memoryview(buffer))
                    used = 0
        # The last piece has any length, which direct writes refuse.
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        _write_all(fd, memoryview(buffer)[:used])
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def _write_all(fd: int, pending: memoryview) -> None:
    while pending:
        pending = pending[os.write(fd, pending) :]


SHARD_BYTES = 5 * 10**9


@dataclass(frozen=True)
class ShardFile:
    """One safetensors file that is to be written."""

    name: str
    head: bytes  # the header, with its length prefix
    entries: Sequence[Entry]  # in the order of their data

    @property
    def nbytes(self) -> int:
        return len(self.head) + sum(entry.nbytes for entry in self.entries)

    @property
    def pieces(self) -> Iterator[bytes | memoryview]:
        """The bytes of the file, in order."""
        yield self.head
        for entry in self.entries:
            yield from entry.pieces()


def plan_shards(
    entries: Iterable[Entry], metadata: Mapping[str, str] | None = None
) -> list[ShardFile]:
    """Return files of at most SHARD_BYTES for the tensors, in order.

    One tensor may exceed that size.
    """
    groups: list[list[Entry]] = [[]]
    room = SHARD_BYTES
    for entry in entries:
        if entry.nbytes > room and groups[-1]:
            groups.append([])
            room = SHARD_BYTES
        groups[-1].append(entry)
        room -= entry.nbytes
    count = len(groups)
    names = [shard_name(i, count) for i in range(count)] if count > 1 else [SAFETENSORS[0]]
    return [
        ShardFile(name, header(group, dict(metadata or {})), group)
        for name, group in zip(names, groups, strict=True)
    ]


def write_shards(folder: Path, shards: list[ShardFile], title: str, progress: bool) -> None:
    """Write all shards into `folder`. The space of all files is reserved first.

    progress: show a bar on stderr. Raises OSError (ENOSPC) if the disk is full.
    """
    for shard in shards:
        reserve(folder / shard.name, shard.nbytes)
    if len(shards) > 1:
        write_index(folder, shards)
    with interrupts.held():  # tqdm starts a thread
        bar = tqdm(
            total=sum(shard.nbytes for shard in shards),
            desc=title,
            unit="B",
            unit_scale=True,
            file=sys.stderr,
            disable=not progress,
        )

    def shown(pieces: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
        for piece in pieces:
            yield piece
            bar.update(len(piece))

    with bar:
        for shard in shards:
            write_file(folder / shard.name, shown(shard.pieces))


def write_index(folder: Path, shards: Iterable[ShardFile]) -> None:
    """Write the index file of a sharded checkpoint."""
    weight_map = {entry.name: shard.name for shard in shards for entry in shard.entries}
    nbytes = sum(entry.nbytes for shard in shards for entry in shard.entries)
    body = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
    write_new(folder / SAFETENSORS[1], json.dumps(body, indent=2) + "\n")


# ---- random weights

RANDOM_RECORD_NAME = "random_weights.json"
# 2**24 - 3 is prime, so no matrix repeats its rows. With a power of two it would, and equal rows
# give equal logits.
TABLE_VALUES = 2**24 - 3
_MATRIX_STD = 0.02
_NORM_STD = 0.02
_BIAS_STD = 0.01


def write_random_checkpoint(
    spec: ModelSpec,
    config_json: dict[str, Any],
    folder: Path,
    dtype: str,
    seed: int = 0,
    progress: bool = False,
) -> Path:
    """Write a Hugging Face folder with random weights for `spec` and return it.

    An existing one is kept.

    dtype: a key of `config.DTYPE_BYTES`. progress: show a bar on stderr.

    Matrices are normal with std 0.02, norm weights are 1 + 0.02 noise, other vectors are 0.01
    noise. In a quantised format matrices have random codes, and scales that give about that std.
    The same seed, name and shape give the same values. Files are at most 5 GB (one tensor may
    exceed it), and a layer's tensors are side by side. Less than 256 MB of RAM is used at any size,
    not counting torch itself. The page cache holds nothing of the files afterwards.

    Raises DoesNotFitError (needed and free bytes) before writing if the disk is too full; nothing
    is left behind. Raises UsageError for an unknown dtype, or if `folder` contains something else.
    """
    if dtype not in DTYPE_BYTES:
        raise UsageError(f"--dtype {dtype}: not one of {', '.join(DTYPE_BYTES)}")
    record = record_of(spec, config_json, dtype, seed)
    values = RandomValues(spec, dtype, seed)
    shards = plan_shards(values.stored())
    with building(
        folder, sum(shard.nbytes for shard in shards), "random weights", spec.name
    ) as temp:
        if temp is None:
            with suppress(OSError, ValueError):
                if read_json(folder / RANDOM_RECORD_NAME) == record:
                    return folder
            raise UsageError(
                f"{folder}: holds something else than these random weights; remove it or give "
                "another folder"
            )
        # The files decide the dtype. A config with another one would mislead whoever reads it
        # first.
        config = {
            key: value for key, value in config_json.items() if key not in ("dtype", "torch_dtype")
        }
        for name, body in (
            ("config.json", config | {"torch_dtype": dtype}),
            (RANDOM_RECORD_NAME, record),
        ):
            write_new(temp / name, json.dumps(body, indent=2) + "\n")
        write_shards(temp, shards, f"random weights {folder.name}", progress)
    return folder


class RandomValues:
    """The random weights of a seed, in the format of the model's checkpoints.

    Every tensor takes its values from one table of numbers, or from one of bytes. This uses less
    than 60 MB of RAM (bf16).
    """

    def __init__(self, spec: ModelSpec, dtype: str, seed: int) -> None:
        self.name = f"random weights of {spec.name}"
        self._spec = spec
        self._dtype = dtype
        self._seed = seed

    @cached_property
    def _table(self) -> torch.Tensor:
        import torch

        generator = torch.Generator().manual_seed(self._seed)
        values = torch.empty(TABLE_VALUES, dtype=torch.float32, device="cpu").normal_(
            0.0, _MATRIX_STD, generator=generator
        )
        return values.to(getattr(torch, self._dtype))

    @cached_property
    def _bytes(self) -> torch.Tensor:
        return _uniform_bytes(TABLE_VALUES, self._seed)

    def stored(self) -> list[Entry]:
        """Return what a checkpoint of the model stores.

        Slices of one stored tensor are together.
        """
        form = checkpoint_format(self._spec)
        slices: dict[str, list[StoredRows]] = {}
        for tensor in self._spec.tensors:
            for rows in form.layout(tensor).stored:
                slices.setdefault(rows.name, []).append(rows)
        found = []
        for name, parts in slices.items():
            parts.sort(key=lambda rows: rows.index or 0)
            rows = parts[0]
            dtype = self.dtype_of(rows)
            shape = rows.shape if rows.index is None else (len(parts), *rows.shape)
            pieces = partial(self._pieces, parts)
            found.append(Entry(name, FROM_ENGINE.get(dtype, dtype), shape, pieces))
        return found

    def dtype_of(self, rows: StoredRows) -> str:
        """Return the dtype of a stored tensor."""
        return self._dtype if rows.is_values else rows.dtypes[0]

    def read(self, rows: StoredRows, first: int, end: int) -> torch.Tensor:
        """Return the bytes (uint8) of rows [first, end) of a stored tensor."""
        import torch

        return torch.cat(list(self._of_rows(rows, first, end))).view(torch.uint8)

    def _pieces(self, slices: Iterable[StoredRows]) -> Iterator[memoryview]:
        """Yield the bytes of slices one after the other. Those of matrices are views of a table."""
        import torch

        for rows in slices:
            for values in self._of_rows(rows, 0, rows.shape[0]):
                yield values.contiguous().view(torch.uint8).numpy().data

    def _of_rows(self, rows: StoredRows, first: int, end: int) -> Iterator[torch.Tensor]:
        """Yield rows [first, end) of a stored tensor, in pieces of numbers or bytes."""
        digest = hashlib.blake2b(f"{self._seed}:{rows.name}".encode(), digest_size=8).digest()
        table = self._table if rows.is_values else self._bytes
        row = math.prod(rows.shape[1:])
        if not rows.is_values:
            row *= bytes_of_dtype(rows.dtypes[0])
        begin = row * (rows.shape[0] * (rows.index or 0) + first)
        offset = (int.from_bytes(digest, "little") + begin) % TABLE_VALUES
        left = (end - first) * row
        done = first * row
        while left:
            values = table[offset : offset + left]
            if not rows.is_values:
                yield _masked(values, done, *rows.random)
            else:
                yield values if len(rows.shape) != 1 else _vector(rows.tensor, values)
            left -= values.numel()
            done += values.numel()
            offset = 0


def _uniform_bytes(count: int, seed: int) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator, device="cpu")


def any_bytes(rows: StoredRows) -> torch.Tensor:
    """Return random bytes (uint8) of a whole stored tensor.

    The tensor holds bytes, or numbers that become float32.
    """
    nbytes = math.prod(rows.shape) * bytes_of_dtype(rows.dtypes[0])
    return _masked(_uniform_bytes(nbytes, 0), 0, *rows.random)


def _masked(values: torch.Tensor, begin: int, mask: bytes, base: bytes) -> torch.Tensor:
    """Return (byte & mask) + base for each byte.

    begin: index in the tensor of the first byte. mask and base repeat.
    """
    import torch

    if (mask, base) == (b"\xff", b"\0"):
        return values

    def repeated(pattern: bytes) -> torch.Tensor:
        once = torch.tensor(list(pattern), dtype=torch.uint8, device="cpu").roll(-begin)
        return (
            once
            if len(pattern) == 1
            else once.repeat(-(-len(values) // len(pattern)))[: len(values)]
        )

    return (values & repeated(mask)) + repeated(base)


def record_of(
    spec: ModelSpec, config_json: dict[str, Any], dtype: str, seed: int
) -> dict[str, Any]:
    """Return what the values and files depend on."""
    facts = [config_json, [(t.role, t.key, t.shape) for t in spec.tensors]]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return {"seed": seed, "dtype": dtype, "model": digest}


def _vector(tensor: TensorSpec, values: torch.Tensor) -> torch.Tensor:
    unit = values.float() / _MATRIX_STD
    is_norm = any(text.endswith("norm.weight") for text in (tensor.role, tensor.name))
    return (1 + _NORM_STD * unit if is_norm else _BIAS_STD * unit).to(values.dtype)
