"""Compressed weights on disk: made once from a checkpoint or from random values, found by later runs.

A safetensors folder with the tensors of a spec under their names: matrices as packed rows (core/packing.py), uint8 of
(rows, bytes of a packed row), first in each file, so that they start at multiples of 4; vectors as they were stored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from flexgen_h2o.checkpoint.atomic_folder import building, fingerprint, label
from flexgen_h2o.checkpoint.random_weights import RandomValues, record_of
from flexgen_h2o.checkpoint.safetensors import (
    AGAIN,
    FROM_ENGINE,
    TO_ENGINE,
    Checkpoint,
    Entry,
    StoredTensor,
    read_index,
)
from flexgen_h2o.checkpoint.writing import plan_shards, tensors_of, write_shards
from flexgen_h2o.core.config import DTYPE_BYTES, ModelSpec, TensorSpec
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import read_json, write_new
from flexgen_h2o.core.packing import GROUP, Packing
from flexgen_h2o.core.units import PACK_CHUNK
from flexgen_h2o.tiers.device import host_buffer
from flexgen_h2o.tiers.disk import DirectFile, aligned_range

if TYPE_CHECKING:
    import torch


RECORD_NAME = "packed_weights.json"


@dataclass(frozen=True)
class _Values:
    """Where the weights come from. name: for errors; dtype: of a tensor; rows: [first, end) of it, on the host."""

    name: Callable[[TensorSpec], str]
    dtype: Callable[[TensorSpec], str]
    rows: Callable[[TensorSpec, int, int], torch.Tensor]


def pack_checkpoint(
    spec: ModelSpec, source: Checkpoint, cache_dir: Path, packing: Packing, progress: bool = False
) -> Checkpoint:
    """The tensors of `source` with matrices packed, under `cache_dir`/packed/; made at the first call.

    A source that changes gets a new store; the old one stays. Under 200 MB of RAM at any size. Raises UsageError that
    names the tensor (not finite) or the store (damaged); DoesNotFitError: the disk is full. Nothing is left then.
    """
    paths = sorted({stored.path for stored in source.tensors.values()})
    mark = fingerprint(paths, packing.format, packing.bits, [(t.name, t.shape) for t in tensors_of(spec)])
    folder = cache_dir / "packed" / f"{label(source.folder.resolve().name)}-{packing.label}-{mark}"
    stored = source.tensors
    reader = _Reader()
    try:
        values = _Values(
            lambda t: f"{stored[t.name].path}: tensor {t.name!r}", lambda t: stored[t.name].dtype,
            lambda t, first, end: reader.rows(stored[t.name], first, end),
        )  # fmt: skip
        packed = _pack(spec, values, folder, packing, progress)
    finally:
        reader.close()
    return replace(packed, sources={**source.sources, **source.files})


def pack_random(
    spec: ModelSpec, config_json: dict[str, object], folder: Path, dtype: str, seed: int, packing: Packing,
    progress: bool = False,
) -> Checkpoint:  # fmt: skip
    """The random weights of `random_weights.write_random_checkpoint`, packed in `folder`; those are not written first.

    Raises as `pack_checkpoint`.
    """
    mark = fingerprint([], packing.format, packing.bits, record_of(spec, config_json, dtype, seed))
    random = RandomValues(dtype, seed)
    values = _Values(lambda t: f"random weights: tensor {t.name!r}", lambda t: dtype, random.rows)
    return _pack(spec, values, folder.with_name(f"{folder.name}-{packing.label}-{mark}"), packing, progress)


def _pack(spec: ModelSpec, values: _Values, folder: Path, packing: Packing, progress: bool) -> Checkpoint:
    tensors = sorted(tensors_of(spec), key=lambda t: not _is_packed(t))
    shards = plan_shards(tensors, lambda t: _entry(t, values.dtype(t), packing), {"packed": packing.label})
    nbytes = sum(shard.nbytes for shard in shards)
    with building(folder, nbytes, f"{packing.label} weights", spec.name) as temp:
        if temp is not None:
            _compile(packing)
            record = {**_record(packing), "model": spec.name}
            write_new(temp / RECORD_NAME, json.dumps(record, indent=2) + "\n")
            title = f"{packing.label} weights {spec.name}"
            write_shards(temp, shards, lambda t: _pieces(t, values, packing), title, progress)
    return _open(spec, values, folder, packing)


def _open(spec: ModelSpec, values: _Values, folder: Path, packing: Packing) -> Checkpoint:
    """A store that is complete, checked against its record and the spec: somebody may have changed it since."""
    try:
        _check_record(folder, packing)
        found = read_index(folder)
    except UsageError as error:
        reason = str(error).removesuffix(f"; {AGAIN}")
        raise UsageError(f"{folder}: packed weights are damaged ({reason}); remove this folder") from error
    tensors: dict[str, StoredTensor] = {}
    for tensor in tensors_of(spec):
        stored, wanted = found.get(tensor.name), _entry(tensor, values.dtype(tensor), packing)
        if stored is None or (stored.shape, stored.dtype) != (wanted.shape, TO_ENGINE[wanted.dtype]):
            raise UsageError(
                f"{folder}: packed weights lack tensor {tensor.name!r}, {wanted.dtype} of shape {wanted.shape};"
                " remove this folder"
            )
        tensors[tensor.name] = stored
    return Checkpoint(folder, tensors)


def _record(packing: Packing) -> dict[str, object]:
    """What the bytes mean."""
    return {"format": packing.format, "bits": packing.bits, "group": None if packing.by_row else GROUP}


def _check_record(folder: Path, packing: Packing) -> None:
    path = folder / RECORD_NAME
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not a readable JSON file ({error})") from error
    if not isinstance(found, dict) or not _record(packing).items() <= found.items():
        raise UsageError(f"{path}: describes other weights")


def _is_packed(tensor: TensorSpec) -> bool:
    return len(tensor.shape) == 2


def _entry(tensor: TensorSpec, dtype: str, packing: Packing) -> Entry:
    if not _is_packed(tensor):
        return Entry(tensor.name, FROM_ENGINE[dtype], tensor.shape)
    return Entry(tensor.name, FROM_ENGINE["uint8"], (tensor.shape[0], packing.row_bytes(tensor.shape[1])))


def _compile(packing: Packing) -> None:
    import torch

    from flexgen_h2o.kernels.warm_up import compile_subprocess

    compile_subprocess(_packed, torch.zeros(1, GROUP), packing)


def _packed(rows: torch.Tensor, packing: Packing) -> torch.Tensor:
    from flexgen_h2o.kernels.int8 import pack_int8_rows
    from flexgen_h2o.kernels.packed import pack_rows

    return pack_int8_rows(rows) if packing.by_row else pack_rows(rows, packing.bits)


def _pieces(tensor: TensorSpec, values: _Values, packing: Packing) -> Iterator[memoryview]:
    """The bytes of one tensor, some rows at a time."""
    import torch

    step = max(1, PACK_CHUNK // (tensor.numel // tensor.shape[0]))
    for first in range(0, tensor.shape[0], step):
        rows = values.rows(tensor, first, min(first + step, tensor.shape[0]))
        if _is_packed(tensor):
            try:
                rows = _packed(rows, packing)
            except ValueError as error:
                flag = "--int8-compute" if packing.by_row else "--compress-weight"
                raise UsageError(f"{values.name(tensor)} {error}; leave {flag} out") from error
        yield rows.contiguous().view(-1).view(torch.uint8).numpy().data


class _Reader:
    """Rows of stored tensors, past the page cache, in one buffer: what was read before is overwritten."""

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None
        self._files: dict[Path, DirectFile] = {}

    def rows(self, stored: StoredTensor, first: int, end: int) -> torch.Tensor:
        import torch

        row = stored.nbytes // stored.shape[0]
        begin, nbytes = stored.offset + first * row, (end - first) * row
        start, length = aligned_range(begin, nbytes)
        if self._buffer is None or len(self._buffer) < length:
            self._buffer = host_buffer(length)
        if stored.path not in self._files:
            self._files[stored.path] = DirectFile(stored.path)
        self._files[stored.path].read(self._buffer[:length], start, begin - start + nbytes)
        found = self._buffer[begin - start : begin - start + nbytes]
        if begin % DTYPE_BYTES[stored.dtype]:
            found = found.clone()  # safetensors promises no alignment
        return found.view(getattr(torch, stored.dtype)).view(-1, *stored.shape[1:])

    def close(self) -> None:
        for file in self._files.values():
            file.close()
