"""Compressed weights on disk, made once from a checkpoint or from random values.

Later runs find them. A store is a safetensors folder with the tensors of a spec under their names.
Matrices are packed rows (core/packing.py), uint8 of (rows, bytes of a packed row). They are first
in each file, so that they start at multiples of 4. Vectors are kept as they were stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flexgen_h2o.checkpoint.atomic_folder import building, fingerprint, label
from flexgen_h2o.checkpoint.formats import (
    Codec,
    StoredRows,
    checkpoint_format,
    warm_up,
)
from flexgen_h2o.checkpoint.safetensors import (
    AGAIN,
    FROM_ENGINE,
    TO_ENGINE,
    Checkpoint,
    Entry,
    StoredTensor,
    read_index,
)
from flexgen_h2o.checkpoint.writing import (
    RandomValues,
    WeightSource,
    plan_shards,
    record_of,
    write_shards,
)
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import read_object, write_new
from flexgen_h2o.core.model import ModelSpec, TensorSpec
from flexgen_h2o.core.packing import GROUP, WORD
from flexgen_h2o.core.units import PACK_CHUNK

if TYPE_CHECKING:
    import torch

    from flexgen_h2o.tiers.disk import DirectFile


RECORD_NAME = "packed_weights.json"


def pack_checkpoint(
    spec: ModelSpec, source: Checkpoint, cache_dir: Path, form: Codec, progress: bool = False
) -> Checkpoint:
    """Return the tensors of `source` with packed matrices, under `cache_dir`/packed/.

    The first call makes them. A source that changes gets a new store, and the old one stays. Less
    than 200 MB of RAM is used at any size. If the source is stored by columns, its largest matrix,
    as stored, is added. Raises UsageError that names a tensor that is not finite, or a damaged
    store. Raises DoesNotFitError if the disk is full. In both cases nothing is left behind.
    """
    paths = sorted({stored.path for stored in source.tensors.values()})
    # With another quantization_config the same files mean something else.
    read_as = [] if spec.quantization is None else [spec.quantization]
    mark = fingerprint(paths, form.record, [(t.key, t.shape) for t in spec.tensors], *read_as)
    folder = cache_dir / "packed" / f"{label(source.folder.resolve().name)}-{form.name}-{mark}"
    with closing(_Reader(spec, source)) as reader:
        packed = _pack(spec, reader, folder, form, progress)
    return replace(packed, sources={**source.sources, **source.files})


def pack_random(
    spec: ModelSpec,
    config_json: dict[str, object],
    folder: Path,
    dtype: str,
    seed: int,
    form: Codec,
    progress: bool = False,
) -> Checkpoint:
    """Return the random weights of `writing.write_random_checkpoint`, packed in `folder`.

    The unpacked weights are not written first. Raises as `pack_checkpoint`.
    """
    mark = fingerprint([], form.record, record_of(spec, config_json, dtype, seed))
    folder = folder.with_name(f"{folder.name}-{form.name}-{mark}")
    return _pack(spec, RandomValues(spec, dtype, seed), folder, form, progress)


def _pack(
    spec: ModelSpec, weights: WeightSource, folder: Path, form: Codec, progress: bool
) -> Checkpoint:
    tensors = sorted(spec.tensors, key=lambda t: form.layout(t).stored[0].is_values)
    shards = plan_shards([_entry(t, weights, form) for t in tensors], {"packed": form.name})
    nbytes = sum(shard.nbytes for shard in shards)
    with building(folder, nbytes, f"{form.name} weights", spec.name) as temp:
        if temp is not None:
            import torch

            from flexgen_h2o.kernels.warm_up import compile_subprocess

            compile_subprocess(
                form.encode, torch.zeros(1, GROUP, dtype=torch.float32, device="cpu")
            )
            if (source := checkpoint_format(spec)).decoded_at == "load":
                compile_subprocess(warm_up, source, torch.device("cpu"), torch.float32)
            write_new(
                temp / RECORD_NAME, json.dumps({**form.record, "model": spec.name}, indent=2) + "\n"
            )
            title = f"{form.name} weights {spec.name}"
            write_shards(temp, shards, title, progress)
    return _open(spec, weights, folder, form)


def _open(spec: ModelSpec, weights: WeightSource, folder: Path, form: Codec) -> Checkpoint:
    """Return a complete store after a check against its record and the spec.

    Somebody may have changed it since it was made.
    """
    record = folder / RECORD_NAME
    try:
        about = read_object(record, str(record))
        if not form.record.items() <= about.items():
            raise UsageError(f"{record}: describes other weights")
        found = read_index(folder)
    except UsageError as error:
        reason = str(error).removesuffix(f"; {AGAIN}")
        raise UsageError(
            f"{folder}: packed weights are damaged ({reason}); remove this folder"
        ) from error
    tensors: dict[str, StoredTensor] = {}
    for tensor in spec.tensors:
        stored = found.get(tensor.key)
        wanted = _entry(tensor, weights, form)
        if stored is None or (stored.shape, stored.dtype) != (
            wanted.shape,
            TO_ENGINE[wanted.dtype],
        ):
            raise UsageError(
                f"{folder}: packed weights lack tensor {tensor.key!r}, {wanted.dtype} of shape "
                f"{wanted.shape};"
                " remove this folder"
            )
        tensors[tensor.key] = stored
    return Checkpoint(folder, tensors)


def _entry(tensor: TensorSpec, weights: WeightSource, form: Codec) -> Entry:
    (stored,) = form.layout(tensor).stored
    return Entry(
        tensor.key,
        FROM_ENGINE[weights.dtype_of(tensor) if stored.is_values else "uint8"],
        stored.shape,
        partial(_pieces, tensor, weights, form),
    )


def _pieces(tensor: TensorSpec, weights: WeightSource, form: Codec) -> Iterator[memoryview]:
    """Yield the bytes of one tensor, some rows at a time."""
    import torch

    step = max(1, PACK_CHUNK // (tensor.numel // tensor.shape[0]))
    for first in range(0, tensor.shape[0], step):
        rows = weights.rows(tensor, first, min(first + step, tensor.shape[0]))
        if not form.layout(tensor).stored[0].is_values:
            try:
                rows = form.encode(rows)
            except ValueError as error:
                raise UsageError(
                    f"{weights.describe(tensor)} {error}; leave {form.converted_by} out"
                ) from error
        yield rows.contiguous().view(-1).view(torch.uint8).numpy().data


class _Reader(WeightSource):
    """The weights of a checkpoint, read past the page cache into one buffer.

    Each read overwrites the buffer.
    """

    def __init__(self, spec: ModelSpec, source: Checkpoint) -> None:
        super().__init__(spec)
        self._tensors = source.tensors
        self._buffer: torch.Tensor | None = None
        self._files: dict[Path, DirectFile] = {}

    def describe(self, tensor: TensorSpec) -> str:
        return f"{self._stored(tensor).path}: tensor {tensor.key!r}"

    def dtype_of(self, tensor: TensorSpec) -> str:
        return self._stored(tensor).dtype

    def _stored(self, tensor: TensorSpec) -> StoredTensor:
        return self._tensors[self._form.layout(tensor).stored[0].key]

    def _bytes_of(
        self, tensor: TensorSpec, stored: StoredRows, first: int, end: int
    ) -> tuple[torch.Tensor, str]:
        source = self._tensors[stored.key].rows(first, end)
        return self._read(source), source.dtype

    def _read(self, source: StoredTensor) -> torch.Tensor:
        from flexgen_h2o.tiers.device import host_buffer
        from flexgen_h2o.tiers.disk import DirectFile, aligned_range

        start, length = aligned_range(source.offset, source.nbytes)
        if self._buffer is None or len(self._buffer) < length:
            self._buffer = host_buffer(length)
        if source.path not in self._files:
            self._files[source.path] = DirectFile(source.path)
        inside = source.offset - start
        self._files[source.path].read(self._buffer[:length], start, inside + source.nbytes)
        found = self._buffer[inside : inside + source.nbytes]
        return found.clone() if inside % WORD else found  # safetensors does not promise alignment

    def close(self) -> None:
        for file in self._files.values():
            file.close()
