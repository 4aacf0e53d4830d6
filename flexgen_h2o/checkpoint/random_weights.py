"""Writes a real checkpoint of seeded random values at a model's true shape, so that its I/O is honest.

Knows tensors by role and shape only. torch is imported where it is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_h2o.checkpoint.atomic_folder import building
from flexgen_h2o.checkpoint.safetensors import FROM_ENGINE, Entry
from flexgen_h2o.checkpoint.writing import plan_shards, tensors_of, write_shards
from flexgen_h2o.core.config import DTYPE_BYTES, ModelSpec, TensorSpec
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import read_json, write_new

if TYPE_CHECKING:
    import torch


RECORD_NAME = "random_weights.json"
# 2**24 - 3 is prime: the rows of no matrix repeat, as they would with a power of two (equal rows: equal logits).
TABLE_VALUES = 2**24 - 3
_MATRIX_STD, _NORM_STD, _BIAS_STD = 0.02, 0.02, 0.01


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
    record = record_of(spec, config_json, dtype, seed)
    shards = plan_shards(tensors_of(spec), lambda t: Entry(t.name, FROM_ENGINE[dtype], t.shape))
    with building(folder, sum(shard.nbytes for shard in shards), "random weights", spec.name) as temp:
        if temp is None:
            _check_record(folder, record)
            return folder
        _write_small_files(temp, config_json, dtype, record)
        values = RandomValues(dtype, seed)
        write_shards(temp, shards, values.pieces, f"random weights {folder.name}", progress)
    return folder


class RandomValues:
    """The values of a seed. Under 40 MB of RAM (bf16): every tensor takes its own from one table."""

    def __init__(self, dtype: str, seed: int) -> None:
        self._table, self._seed = _table(dtype, seed), seed

    def pieces(self, tensor: TensorSpec) -> Iterator[memoryview]:
        """The bytes of one tensor, as views of the table for matrices."""
        return (_bytes(values) for values in self._values(tensor, 0, tensor.numel))

    def rows(self, tensor: TensorSpec, first: int, end: int) -> torch.Tensor:
        """Rows [first, end) of a tensor."""
        import torch

        row = tensor.numel // tensor.shape[0]
        values = torch.cat(list(self._values(tensor, first * row, end * row)))
        return values.view(end - first, *tensor.shape[1:])

    def _values(self, tensor: TensorSpec, begin: int, end: int) -> Iterator[torch.Tensor]:
        """The values [begin, end) of a tensor, row-major, in pieces."""
        digest = hashlib.blake2b(f"{self._seed}:{tensor.name}".encode(), digest_size=8).digest()
        start = (int.from_bytes(digest, "little") + begin) % TABLE_VALUES
        left = end - begin
        while left:
            values = self._table[start : start + left]
            left -= values.numel()
            start = 0
            yield values if len(tensor.shape) != 1 else _vector(tensor, values)


def record_of(spec: ModelSpec, config_json: dict[str, Any], dtype: str, seed: int) -> dict[str, Any]:
    """What the values and files depend on."""
    facts = [config_json, [(t.role, t.name, t.shape) for t in tensors_of(spec)]]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    return {"seed": seed, "dtype": dtype, "model": digest}


def _check_record(folder: Path, record: dict[str, Any]) -> None:
    try:
        found = read_json(folder / RECORD_NAME)
    except (OSError, ValueError):
        found = None
    if found != record:
        raise UsageError(f"{folder}: holds something else than these random weights; remove it or give another folder")


def _write_small_files(folder: Path, config_json: dict[str, Any], dtype: str, record: dict[str, Any]) -> None:
    # The files decide the dtype; a config that says otherwise would mislead whoever reads it first.
    config = {key: value for key, value in config_json.items() if key not in ("dtype", "torch_dtype")}
    config["torch_dtype"] = dtype
    write_new(folder / "config.json", json.dumps(config, indent=2) + "\n")
    write_new(folder / RECORD_NAME, json.dumps(record, indent=2) + "\n")


def _table(dtype: str, seed: int) -> torch.Tensor:
    """Shape (TABLE_VALUES,), `dtype`: normal values of matrices, which every tensor takes its own from."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    values = torch.empty(TABLE_VALUES, dtype=torch.float32).normal_(0.0, _MATRIX_STD, generator=generator)
    return values.to(getattr(torch, dtype))


def _vector(tensor: TensorSpec, values: torch.Tensor) -> torch.Tensor:
    unit = values.float() / _MATRIX_STD
    is_norm = any(text.endswith("norm.weight") for text in (tensor.role, tensor.name))
    return (1 + _NORM_STD * unit if is_norm else _BIAS_STD * unit).to(values.dtype)


def _bytes(values: torch.Tensor) -> memoryview:
    import torch

    return values.contiguous().view(torch.uint8).numpy().data
