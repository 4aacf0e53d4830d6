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
    Shard,
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
    plan_shards,
    record_of,
    write_shards,
)
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import read_mark, read_object, write_new
from flexgen_h2o.core.model import ModelSpec, TensorSpec
from flexgen_h2o.core.packing import GROUP, WORD
from flexgen_h2o.core.units import PACK_CHUNK

if TYPE_CHECKING:
    import torch

    from flexgen_h2o.tiers.disk import DirectFile


RECORD_NAME = "packed_weights.json"
_PACKED_DTYPE = "U8"


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
    with closing(_Reader(source)) as reader:
        packed = _pack(spec, reader, folder, form, progress)
    return replace(packed, sources={**source.sources, **source.files})


def is_packed(spec: ModelSpec, cache_dir: Path, form: Codec) -> bool:
    """Return whether a converted copy of a model with this name is likely there.

    Whether it is of the same weights is known when they are opened.
    """
    folders = (cache_dir / "packed").glob(f"*-{form.name}-*")
    return any((read_mark(folder) or {}).get("model") == spec.name for folder in folders)


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


def _pack(spec: ModelSpec, source: Source, folder: Path, form: Codec, progress: bool) -> Checkpoint:
    stored_form = checkpoint_format(spec)
    entries = [_entry(tensor, source, stored_form, form) for tensor in spec.tensors]
    # Matrices come first: they are bytes, and vectors are numbers.
    shards = plan_shards(
        sorted(entries, key=lambda one: one.dtype != _PACKED_DTYPE), {"packed": form.name}
    )
    nbytes = sum(shard.nbytes for shard in shards)
    with building(folder, nbytes, f"{form.name} weights", spec.name) as temp:
        if temp is not None:
            import torch

            from flexgen_h2o.kernels.warm_up import compile_subprocess

            compile_subprocess(
                form.encode, torch.zeros(1, GROUP, dtype=torch.float32, device="cpu")
            )
            if stored_form.decoded_at == "load":
                compile_subprocess(warm_up, stored_form, torch.device("cpu"), torch.float32)
            write_new(
                temp / RECORD_NAME, json.dumps({**form.record, "model": spec.name}, indent=2) + "\n"
            )
            title = f"{form.name} weights {spec.name}"
            write_shards(temp, shards, title, progress)
    return _open(entries, folder, form)


def _open(entries: list[Entry], folder: Path, form: Codec) -> Checkpoint:
    """Return a complete store after a check against its record and what it should contain.

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
    for wanted in entries:
        stored = found.get(wanted.name)
        if stored is None or (stored.shape, stored.dtype) != (
            wanted.shape,
            TO_ENGINE[wanted.dtype],
        ):
            raise UsageError(
                f"{folder}: packed weights lack tensor {wanted.name!r}, {wanted.dtype} of shape "
                f"{wanted.shape};"
                " remove this folder"
            )
        tensors[wanted.name] = stored
    return Checkpoint(folder, tensors)


def _entry(tensor: TensorSpec, source: Source, stored_form: Codec, form: Codec) -> Entry:
    (packed,) = form.layout(tensor).stored
    dtype = _PACKED_DTYPE
    if packed.is_values:
        dtype = FROM_ENGINE[source.dtype_of(stored_form.layout(tensor).stored[0])]
    pieces = partial(_pieces, tensor, source, stored_form, form)
    return Entry(tensor.key, dtype, packed.shape, pieces)


def _pieces(
    tensor: TensorSpec, source: Source, stored_form: Codec, form: Codec
) -> Iterator[memoryview]:
    """Yield the bytes of one tensor, some rows at a time."""
    import torch

    step = max(1, PACK_CHUNK // (tensor.numel // tensor.shape[0]))
    for rows in decoded_rows(stored_form, tensor, source, step):
        if form.holds(tensor):
            try:
                rows = form.encode(rows)
            except ValueError as error:
                raise UsageError(
                    f"{source.name}: tensor {tensor.key!r} {error}; leave {form.converted_by} out"
                ) from error
        yield rows.contiguous().view(-1).view(torch.uint8).numpy().data


def decoded_rows(
    form: Codec, tensor: TensorSpec, source: Source, step: int
) -> Iterator[torch.Tensor]:
    """Yield the rows of a tensor, `step` at a time, decoded to a float dtype, on the host.

    The next rows may overwrite them. form: the format of the checkpoint. A matrix that is stored by
    columns is read whole first, because any of its rows are spread over all stored bytes.
    """
    import torch

    layout = form.layout(tensor)

    def shard(first: int, end: int) -> Shard:
        pieces = []
        for stored in layout.stored:
            raw = source.read(stored, *stored.rows_of(first, end)).clone()
            pieces.append(stored.held(raw, source.dtype_of(stored)))
        return Shard("host", first, end, pieces)

    whole = shard(0, layout.cut_shape[0]) if layout.by_columns else None
    for first in range(0, tensor.shape[0], step):
        end = min(first + step, tensor.shape[0])
        if layout.decoded_row_bytes:
            out = torch.empty(end - first, tensor.shape[1], dtype=torch.float32, device="cpu")
            yield form.decode_range(layout, [whole or shard(first, end)], first, out)
            continue
        (stored,) = layout.stored
        dtype = getattr(torch, source.dtype_of(stored))
        if whole is None:
            numbers = source.read(stored, first, end).view(dtype)
            yield numbers.view(end - first, *tensor.shape[1:])
        else:
            numbers = whole.pieces[0].view(dtype).view(layout.cut_shape)
            yield numbers[:, first:end].t().contiguous()


class _Reader:
    """The weights of a checkpoint, read past the page cache into one buffer."""

    def __init__(self, source: Checkpoint) -> None:
        self.name = str(source.folder)
        self._tensors = source.tensors
        self._buffer: torch.Tensor | None = None
        self._files: dict[Path, DirectFile] = {}

    def dtype_of(self, stored: StoredRows) -> str:
        """Return the dtype of a stored tensor."""
        return self._tensors[stored.key].dtype

    def read(self, stored: StoredRows, first: int, end: int) -> torch.Tensor:
        """Return the bytes (uint8) of rows [first, end) of a stored tensor.

        The next call may overwrite them.
        """
        from flexgen_h2o.tiers.device import host_buffer
        from flexgen_h2o.tiers.disk import DirectFile, aligned_range

        source = self._tensors[stored.key].rows(first, end)
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


# What gives a model's stored tensors: its name, `dtype_of`, and `read` by rows.
Source = RandomValues | _Reader
