"""Safetensors: find tensors by byte range, refuse damaged files, build headers and indexes.

A file is an 8-byte little-endian header length, that many bytes of JSON, then the tensors' bytes
without gaps. Only headers and the index are read, never a tensor.
"""

from __future__ import annotations

import json
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from flexgen_h2o.checkpoint.atomic_folder import FileState, States, check_unchanged, file_state
from flexgen_h2o.core.config import DTYPE_BYTES, WIDE
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import open_regular, read_json
from flexgen_h2o.core.units import round_up


@dataclass(frozen=True)
class StoredTensor:
    """The place of one tensor's bytes in a file, row-major and little-endian."""

    path: Path
    offset: int  # bytes from the start of the file
    nbytes: int
    # A key of `config.DTYPE_BYTES`, `config.WIDE`, `uint8`, or the safetensors name of a type that
    # is not used for computing (`I8`, ...).
    dtype: str
    shape: tuple[int, ...]
    # State of the file before anything of it was read.
    state: FileState | None = field(default=None, compare=False)

    def rows(self, first: int, end: int) -> StoredTensor:
        """Return rows [first, end) of the tensor, along the first dimension."""
        row = self.nbytes // self.shape[0]
        return replace(
            self,
            offset=self.offset + first * row,
            nbytes=(end - first) * row,
            shape=(end - first, *self.shape[1:]),
        )

    def item(self, index: int) -> StoredTensor:
        """Return slice `index` along the first dimension, without that dimension."""
        return replace(self.rows(index, index + 1), shape=self.shape[1:])


@dataclass(frozen=True)
class Checkpoint:
    """The stored tensors of one model. `open_checkpoint` and packed_store.py make it."""

    folder: Path
    # Stored tensors, and slices of them, by their keys (formats.StoredRows.key). In most formats
    # these are the `TensorSpec.key` of the model's spec.
    tensors: dict[str, StoredTensor]
    # States of the files that this checkpoint was made from (imported, packed), taken before that.
    sources: States = field(default_factory=dict, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the model."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def dtype(self) -> str:
        """Float dtype of most bytes: `float32` (or float64), `bfloat16` or `float16`."""
        sizes: Counter[str] = Counter()
        for tensor in self.tensors.values():
            dtype = "float32" if tensor.dtype == WIDE else tensor.dtype
            if dtype in DTYPE_BYTES:
                sizes[dtype] += tensor.nbytes
        return sizes.most_common(1)[0][0]

    @property
    def files(self) -> States:
        """Files that contain the tensors, with their states before anything of them was read."""
        return {t.path: t.state for t in self.tensors.values()}

    def check_unchanged(self) -> None:
        """Raise FlexgenError if one of its files or source files has changed."""
        check_unchanged({**self.sources, **self.files})


# Name of a checkpoint's single file, and of its index if it has several files.
Names = tuple[str, str]
SAFETENSORS: Names = ("model.safetensors", "model.safetensors.index.json")
BIN: Names = ("pytorch_model.bin", "pytorch_model.bin.index.json")
LENGTH_BYTES = 8

# Bits of one element.
DTYPE_BITS = {
    "F64": 64,
    "F32": 32,
    "F16": 16,
    "BF16": 16,
    "C64": 64,
    "I64": 64,
    "I32": 32,
    "I16": 16,
    "I8": 8,
    "U64": 64,
    "U32": 32,
    "U16": 16,
    "U8": 8,
    "BOOL": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
TO_ENGINE = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": WIDE, "U8": "uint8"}
FROM_ENGINE = {ours: theirs for theirs, ours in TO_ENGINE.items()}


def bytes_of_dtype(dtype: str) -> int:
    """Return the bytes of one element. dtype: as StoredTensor.dtype."""
    return DTYPE_BITS[FROM_ENGINE.get(dtype, dtype)] // 8


# Direct reads fetch whole blocks, so data that starts at one needs no extra block.
_DATA_ALIGNMENT = 4096


@dataclass(frozen=True)
class Entry:
    """One tensor of a file that is to be written."""

    name: str
    dtype: str  # safetensors name (`F32`, ...)
    shape: tuple[int, ...]
    # Returns the tensor's bytes in order.
    pieces: Callable[[], Iterable[memoryview]] = field(default=tuple, compare=False)

    @property
    def nbytes(self) -> int:
        return -(-prod(self.shape) * DTYPE_BITS[self.dtype] // 8)


def header(entries: Iterable[Entry], metadata: dict[str, str] | None = None) -> bytes:
    """Return the first bytes of a file that contains `entries` in this order.

    The length prefix is included, and the header is padded to a block.
    """
    body: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for entry in entries:
        begin = end
        end = end + entry.nbytes
        body[entry.name] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(body, separators=(",", ":")).encode()
    text = text.ljust(round_up(LENGTH_BYTES + len(text), _DATA_ALIGNMENT) - LENGTH_BYTES)
    return struct.pack("<Q", len(text)) + text


def shard_name(index: int, count: int) -> str:
    """Return the customary name of shard `index` (from 0) of `count`."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


AGAIN = "download it again"
MAX_INDEX_BYTES = 16 * 2**20


def names_in(folder: Path) -> Names | None:
    """Return the file names of the checkpoint in `folder`, SAFETENSORS before BIN.

    None: there is no checkpoint. No file is opened."""
    both = (SAFETENSORS, BIN)
    return next((names for names in both if any((folder / name).is_file() for name in names)), None)


def shards(folder: Path, names: Names) -> list[Path]:
    """Return the files of a checkpoint with these names, sorted by name.

    Raises UsageError for a missing checkpoint, a damaged index or a missing shard.
    """
    single, index = (folder / name for name in names)
    if single.is_file():
        return [single]
    if not index.is_file():
        raise UsageError(
            f"{folder}: there is no {single.name} and no {index.name}; give a folder that has one"
        )
    return [_shard_path(index, shard) for shard in sorted(set(read_weight_map(index).values()))]


def weight_files(folder: Path) -> list[Path]:
    """Return the files in `folder` from which `open_checkpoint` reads weights.

    The list is empty if there are none. Raises UsageError that names a damaged index or a missing
    shard.
    """
    names = names_in(folder)
    return shards(folder, names) if names else []


def read_index(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the safetensors checkpoint in `folder`, by its name in the files.

    As in transformers, an index only says which files there are. A tensor may be in another of them
    than the index says, or not be listed at all. If two files have one name, the last file counts.
    Metadata of a file may give another name for a stored tensor (tied weights): that name points at
    the same bytes. Raises UsageError that names the file: missing or truncated shard, damaged
    header or index.
    """
    found: dict[str, StoredTensor] = {}
    aliases: dict[str, StoredTensor] = {}
    for path in shards(folder, SAFETENSORS):
        tensors, also = _read_file(path)
        found.update(tensors)
        aliases.update(also)
    return {**aliases, **found}


def read_weight_map(index: Path) -> dict[str, str]:
    """Return the `weight_map` of an index file: file name by tensor name.

    Raises UsageError that names the file.
    """
    try:
        body = read_json(index, MAX_INDEX_BYTES)
    except OSError as error:
        raise UsageError(f"{index}: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{index}: not a JSON file ({error}); {AGAIN}") from error
    weight_map = body.get("weight_map") if isinstance(body, dict) else None
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(v, str) for v in weight_map.values())
    ):
        raise UsageError(f"{index}: weight_map is missing or not a table of file names; {AGAIN}")
    return weight_map


def _shard_path(index: Path, shard: str) -> Path:
    """Return the path of a shard that `index` lists.

    Raises UsageError if the file is missing or its name leads out of the folder.
    """
    shown = repr(shard) if len(shard) <= 80 else f"{shard[:60]!r}... ({len(shard)} characters)"
    parts = Path(shard).parts
    if not parts or Path(shard).is_absolute() or ".." in parts or "\0" in shard:
        raise UsageError(f"{index}: {shown} is not the name of a file in this folder; {AGAIN}")
    path = index.parent / shard
    try:
        is_there = path.is_file()
    except OSError as error:  # a name that no file can have
        raise UsageError(
            f"{index}: lists the shard {shown} ({error.strerror or error}); {AGAIN}"
        ) from error
    if not is_there:
        raise UsageError(f"{path}: {index.name} lists this shard, but it is missing; {AGAIN}")
    return path


def _read_file(path: Path) -> tuple[dict[str, StoredTensor], dict[str, StoredTensor]]:
    """Return the tensors of a file by name, and by further names that its metadata gives them.

    The safetensors library checks header and size. Raises UsageError that names the file and what
    is wrong with it.
    """
    state = file_state(path)  # taken first, so that any later write is noticed
    try:
        with open_regular(path) as file:  # the library would wait for a named pipe
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            with safe_open(path, framework="np"):
                head = json.loads(file.read(length), object_pairs_hook=_table_of)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except (SafetensorError, ValueError) as error:
        raise UsageError(
            f"{path}: truncated, damaged or not a safetensors file (a git-lfs pointer?): {error};"
            f" {AGAIN}"
        ) from error
    metadata = head.pop("__metadata__", None) or {}
    start = LENGTH_BYTES + length
    tensors = {}
    for name, entry in head.items():
        begin, end = entry["data_offsets"]
        dtype = TO_ENGINE.get(entry["dtype"], entry["dtype"])
        tensors[name] = StoredTensor(
            path, start + begin, end - begin, dtype, tuple(entry["shape"]), state
        )
    # safetensors.torch.save_model records tied weights like this, and so does the import of .bin
    # files.
    return tensors, {a: tensors[kept] for a, kept in metadata.items() if kept in tensors}


def _table_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError for a repeated name, which the format forbids."""
    found = dict(pairs)
    if len(found) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"{counts.most_common(1)[0][0]!r} is there twice")
    return found
