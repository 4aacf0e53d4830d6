"""Where a checkpoint's tensors lie on disk, as plain data. Knows no file format and reads nothing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class StoredTensor:
    """One tensor's bytes: `nbytes` from `offset` (bytes from the start of the file), row-major, little-endian.

    dtype: a key of `config.DTYPE_BYTES`, `uint8` (packed rows), or the safetensors name of a type that the engine does
    not know (`I8`, ...).
    """

    path: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """The stored tensors of one model, keyed by the `TensorSpec.name` of its spec."""

    folder: Path
    tensors: dict[str, StoredTensor]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors of the model."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def dtype(self) -> str:
        """The dtype that most bytes have (`float32`, `bfloat16`, `float16`)."""
        sizes: Counter[str] = Counter()
        for tensor in self.tensors.values():
            sizes[tensor.dtype] += tensor.nbytes
        return sizes.most_common(1)[0][0]
