"""Writes a real checkpoint of seeded random values at a model's true shape, so that its I/O is honest.

Knows tensors by role and shape only. torch is imported where it is used.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from flexgen_h2o.checkpoint.atomic_folder import building
from flexgen_h2o.checkpoint.file_writer import FileWriter, reserve
from flexgen_h2o.checkpoint.safetensors_format import (
    FROM_ENGINE,
    SINGLE_NAME,
    Entry,
    header,
    shard_name,
    write_index,
)
from flexgen_h2o.config import DTYPE_BYTES, ModelSpec, TensorSpec
from flexgen_h2o.errors import UsageError

if TYPE_CHECKING:
    import torch

RECORD_NAME = "random_weights.json"
SHARD_BYTES = 5 * 10**9
# 2**24 - 3 is prime: the rows of no matrix repeat, as they would with a power of two (equal rows: equal logits).
TABLE_VALUES = 2**24 - 3
_MATRIX_STD, _NORM_STD, _BIAS_STD = 0.02, 0.02, 0.01


@dataclass(frozen=True)
class _Shard:
    """One file to write: its header (bytes) and its tensors in the order of their data."""

    name: str
    head: bytes
    tensors: tuple[TensorSpec, ...]
    nbytes: int  # of the whole file


def write_random_checkpoint(
    spec: ModelSpec, config_json: dict[str, Any], folder: Path, dtype: str, seed: int = 0, progress: bool = False
) -> Path:
    """Write a Hugging Face folder with random weights for `spec` and return it; a folder already there is kept.

    dtype: a key of `config.DTYPE_BYTES`. Matrices are normal with std 0.02, norm weights 1 + 0.02 noise, other vectors
    0.01 noise; the same seed, name and shape give the same values. Files are at most 5 GB (one tensor may exceed it),
    a layer's tensors side by side. Under 256 MB of RAM at any size, torch itself aside; the page cache holds
    nothing of the files afterwards. progress: a bar on stderr.

    Raises DoesNotFitError (needed and free bytes) before writing when the disk has not the room, with nothing left
    behind; UsageError for an unknown dtype, or when `folder` holds something else.
    """
    if dtype not in DTYPE_BYTES:
        raise UsageError(f"--dtype {dtype}: not one of {', '.join(DTYPE_BYTES)}")
    tensors = {t.name: t for unit in spec.layers(sep_layer=False).units for t in unit.tensors}
    record = _record(list(tensors.values()), config_json, dtype, seed)
    shards = _shards(list(tensors.values()), dtype)
    with building(folder, sum(shard.nbytes for shard in shards)) as temp:
        if temp is None:
            _check_record(folder, record)
            return folder
        for shard in shards:
            reserve(temp / shard.name, shard.nbytes)
        _write_small_files(temp, config_json, dtype, record, shards)
        table = _table(dtype, seed)
        with _bar(sum(shard.nbytes for shard in shards), folder.name, progress) as advance:
            for shard in shards:
                _fill(temp / shard.name, shard, table, seed, advance)
    return folder


def _shards(tensors: list[TensorSpec], dtype: str) -> list[_Shard]:
    groups: list[list[TensorSpec]] = [[]]
    room = SHARD_BYTES
    for tensor in tensors:
        nbytes = tensor.numel * DTYPE_BYTES[dtype]
        if nbytes > room and groups[-1]:
            groups.append([])
            room = SHARD_BYTES
        groups[-1].append(tensor)
        room -= nbytes
    shards = []
    for i, group in enumerate(groups):
        entries = [Entry(t.name, FROM_ENGINE[dtype], t.shape) for t in group]
        name = SINGLE_NAME if len(groups) == 1 else shard_name(i, len(groups))
        head = header(entries)
        shards.append(_Shard(name, head, tuple(group), len(head) + sum(e.nbytes for e in entries)))
    return shards


def _record(tensors: list[TensorSpec], config_json: dict[str, Any], dtype: str, seed: int) -> dict[str, Any]:
    """What the values and files depend on."""
    facts = [config_json, [(t.role, t.name, t.shape) for t in tensors]]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return {"seed": seed, "dtype": dtype, "model": digest}


def _check_record(folder: Path, record: dict[str, Any]) -> None:
    try:
        found = json.loads((folder / RECORD_NAME).read_bytes())
    except (OSError, ValueError):
        found = None
    if found != record:
        raise UsageError(f"{folder}: holds something else than these random weights; remove it or give another folder")


def _write_small_files(
    folder: Path, config_json: dict[str, Any], dtype: str, record: dict[str, Any], shards: list[_Shard]
) -> None:
    # The files decide the dtype; a config that says otherwise would mislead whoever reads it first.
    config = {key: value for key, value in config_json.items() if key not in ("dtype", "torch_dtype")}
    config["torch_dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / RECORD_NAME).write_text(json.dumps(record, indent=2) + "\n")
    if len(shards) > 1:
        weight_map = {tensor.name: shard.name for shard in shards for tensor in shard.tensors}
        write_index(folder, weight_map, sum(shard.nbytes - len(shard.head) for shard in shards))


def _table(dtype: str, seed: int) -> torch.Tensor:
    """Shape (TABLE_VALUES,), `dtype`: normal values of matrices, which every tensor takes its own from."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    values = torch.empty(TABLE_VALUES, dtype=torch.float32).normal_(0.0, _MATRIX_STD, generator=generator)
    return values.to(getattr(torch, dtype))


def _fill(path: Path, shard: _Shard, table: torch.Tensor, seed: int, advance: Callable[[int], object]) -> None:
    with FileWriter(path) as file:
        file.write(shard.head)
        advance(len(shard.head))
        for tensor in shard.tensors:
            for piece in _pieces(tensor, table, seed):
                file.write(piece)
                advance(piece.nbytes)


def _pieces(tensor: TensorSpec, table: torch.Tensor, seed: int) -> Iterator[memoryview]:
    """The bytes of one tensor, as views of the table for matrices."""
    digest = hashlib.blake2b(f"{seed}:{tensor.name}".encode(), digest_size=8).digest()
    start = int.from_bytes(digest, "little") % TABLE_VALUES
    left = tensor.numel
    while left:
        values = table[start : start + left]
        left -= values.numel()
        start = 0
        yield _bytes(values if len(tensor.shape) != 1 else _vector(tensor, values))


def _vector(tensor: TensorSpec, values: torch.Tensor) -> torch.Tensor:
    unit = values.float() / _MATRIX_STD
    is_norm = any(text.endswith("norm.weight") for text in (tensor.role, tensor.name))
    return (1 + _NORM_STD * unit if is_norm else _BIAS_STD * unit).to(values.dtype)


def _bytes(values: torch.Tensor) -> memoryview:
    import torch

    return values.contiguous().view(torch.uint8).numpy().data


@contextmanager
def _bar(nbytes: int, what: str, shown: bool) -> Iterator[Callable[[int], object]]:
    """A tqdm bar of bytes on stderr, or nothing; yields what to call with the bytes that were just written."""
    with tqdm(
        total=nbytes, desc=f"random weights {what}", unit="B", unit_scale=True, file=sys.stderr, disable=not shown
    ) as bar:
        yield bar.update
