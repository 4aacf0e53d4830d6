"""Convert a pytorch_model.bin checkpoint to a safetensors folder, once.

Pickled code is never run. The module does not depend on models. torch is imported only where it is
used, because code that only looks at folders must not wait for it.
"""

from __future__ import annotations

import pickle
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flexgen_h2o.checkpoint.atomic_folder import building, fingerprint, label
from flexgen_h2o.checkpoint.resolve import is_model_file
from flexgen_h2o.checkpoint.safetensors import (
    BIN,
    Entry,
    header,
    shard_name,
    shards,
)
from flexgen_h2o.checkpoint.writing import ShardFile, reserve, write_file, write_index
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.units import MIB

if TYPE_CHECKING:
    import torch

_ZIP_MAGIC = b"PK\x03\x04"
# Files of a tokenizer reach tens of MB. Anything larger is weights of some other format.
_CARRIED_BYTES = 64 * MIB
_TORCH_TO_SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "bool": "BOOL",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}


def import_bin(folder: Path, cache_dir: Path) -> Path:
    """Return the safetensors copy of the .bin checkpoint in `folder`. The first call makes it.

    The copy lies in `cache_dir`/imported/<folder>-<fingerprint>/. It is a full Hugging Face folder:
    one file per shard, an index, and every small file of the model that is not weights (config,
    tokenizer). A source that changes gets a new copy, and the old one stays. Files that do not
    belong to the model do not count. Dtypes and values are kept.

    Memory: files in torch's zip format (torch >= 1.6) are mapped, so the system may drop what was
    read. Older files cannot be mapped, so a whole shard is in RAM at a time.

    Raises UsageError that names the file if it is missing, truncated or more than plain tensors.
    Raises DoesNotFitError if the disk of `cache_dir` is full. In both cases nothing is left behind.
    """
    sources = shards(folder, BIN)
    carried = _carried_files(folder)
    target = (
        cache_dir
        / "imported"
        / f"{label(folder.resolve().name)}-{fingerprint([*sources, *carried])}"
    )
    nbytes = sum(path.stat().st_size for path in sources)
    with building(target, nbytes, "imported checkpoint", folder.resolve().name) as temp:
        if temp is not None:
            for path in carried:
                shutil.copyfile(path, temp / path.name)
            _convert(sources, temp)
    return target


def _carried_files(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.iterdir()
        if is_model_file(path.name, weights=False)
        and path.is_file()
        and not path.name.startswith(".")
        and path.stat().st_size <= _CARRIED_BYTES
    )


def _convert(sources: list[Path], out: Path) -> None:
    count = len(sources)
    write_index(
        out, [_convert_shard(path, out, shard_name(i, count)) for i, path in enumerate(sources)]
    )


def _convert_shard(path: Path, out: Path, name: str) -> ShardFile:
    """Write the tensors of one .bin file. Returns what was written, without the tensors.

    Tied tensors (same storage, offset and shape) are written once. Their other names are in the
    metadata.
    """
    tensors = load_tensors(path)
    every = [_entry(path, name, tensor) for name, tensor in tensors.items()]
    kept: dict[tuple[object, ...], str] = {}
    aliases: dict[str, str] = {}
    for own, tensor in tensors.items():
        first = kept.setdefault(_identity(own, tensor), own)
        if first != own:
            aliases[own] = first
    entries = [entry for entry in every if entry.name not in aliases]
    shard = ShardFile(name, header(entries, aliases), entries)
    reserve(out / name, shard.nbytes)
    write_file(out / name, shard.pieces)
    return replace(shard, entries=[replace(entry, pieces=tuple) for entry in entries])


def _pieces(tensor: torch.Tensor) -> Iterator[memoryview]:
    import torch

    if tensor.numel():
        yield tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _identity(name: str, tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that is equal for tensors that read the same bytes in the same way.

    Empty tensors have no bytes to compare, so each has its own key.
    """
    if not tensor.numel():
        return (name,)
    address = tensor.untyped_storage().data_ptr()
    return (address, tensor.storage_offset(), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _entry(path: Path, name: str, tensor: torch.Tensor) -> Entry:
    dtype = _TORCH_TO_SAFETENSORS.get(str(tensor.dtype).removeprefix("torch."))
    is_plain = str(tensor.layout) == "torch.strided" and not (
        tensor.is_quantized or tensor.is_nested or tensor.is_meta
    )
    if dtype is None or not is_plain:
        kind = f"{tensor.layout}, {tensor.device}"
        raise UsageError(
            f"{path}: tensor {name!r} is {tensor.dtype} ({kind}), which cannot be imported"
        )
    entry = Entry(name, dtype, tuple(tensor.shape), partial(_pieces, tensor))
    stored = tensor.untyped_storage().nbytes()
    if entry.nbytes > stored:  # the tensor repeats its bytes: a tiny file could fill the disk
        raise UsageError(
            f"{path}: tensor {name!r} of shape {entry.shape} takes {entry.nbytes} bytes, and the "
            f"file has {stored} of"
            " it; give a checkpoint with all of its values"
        )
    return entry


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a .bin file by name. They are mapped from the file if that is possible.

    Raises UsageError that names the file.
    """
    import torch

    try:
        with path.open("rb") as file:
            mapped = file.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except MemoryError:
        raise
    except pickle.UnpicklingError as error:
        raise UsageError(
            f"{path}: damaged, or it holds more than plain tensors, and pickled code is never run; "
            "download it again"
            " or get the model as safetensors"
        ) from error
    except Exception as error:  # a damaged file can fail anywhere inside torch
        raise UsageError(
            f"{path}: truncated or damaged, torch cannot read it ({type(error).__name__}); "
            "download it again"
        ) from error
    found = state.items() if isinstance(state, dict) else ()
    tensors = {
        name: t for name, t in found if isinstance(name, str) and isinstance(t, torch.Tensor)
    }
    if not tensors:
        raise UsageError(
            f"{path}: it holds no named tensors; give a folder with a model's state_dict"
        )
    return tensors
