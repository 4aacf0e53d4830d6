"""The safetensors layout: dtype names, file names, building headers and indexes. Opens no checkpoint, knows no model.

A file is an 8-byte little-endian header length, that many bytes of JSON, then the tensors' bytes without gaps.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

from flexgen_h2o.files import write_new
from flexgen_h2o.units import round_up

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
LENGTH_BYTES = 8
# What the safetensors library itself refuses to exceed.
MAX_HEADER_BYTES = 100_000_000

# Bits of one element. Types that are missing here are kept, but their size cannot be checked.
DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
TO_ENGINE = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "U8": "uint8"}
FROM_ENGINE = {ours: theirs for theirs, ours in TO_ENGINE.items()}

# Direct reads fetch whole blocks: data that starts on one costs no extra block.
_DATA_ALIGNMENT = 4096


@dataclass(frozen=True)
class Entry:
    """One tensor of a file to be written: its name, its safetensors dtype (`F32`, ...) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return -(-prod(self.shape) * DTYPE_BITS[self.dtype] // 8)


def header(entries: Iterable[Entry], metadata: dict[str, str] | None = None) -> bytes:
    """The first bytes of a file whose data are `entries` in this order, length prefix included, padded to a block."""
    body: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    for entry in entries:
        begin, end = end, end + entry.nbytes
        body[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [begin, end]}
    text = json.dumps(body, separators=(",", ":")).encode()
    text = text.ljust(round_up(LENGTH_BYTES + len(text), _DATA_ALIGNMENT) - LENGTH_BYTES)
    return struct.pack("<Q", len(text)) + text


def shard_name(index: int, count: int) -> str:
    """The customary name of shard `index` (from 0) of `count`."""
    return f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def write_index(folder: Path, weight_map: dict[str, str], nbytes: int) -> None:
    """Write the index file of a sharded checkpoint: tensor name -> file name, and the sum of the tensors' bytes."""
    body = {"metadata": {"total_size": nbytes}, "weight_map": weight_map}
    write_new(folder / INDEX_NAME, json.dumps(body, indent=2) + "\n")
