"""Where a checkpoint's tensors lie on disk, as plain data. Knows no file format and reads no file."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from flexgen_h2o.checkpoint.fingerprint import FileState, States, check_unchanged


@dataclass(frozen=True)
class StoredTensor:
    """One tensor's bytes: `nbytes` from `offset` (bytes from the start of the file), row-major, little-endian.

    dtype: a key of `config.DTYPE_BYTES`, `uint8` (packed rows), or the safetensors name of a type that the engine does
    not know (`I8`, ...). state: of the file, before anything of it was read.
    """

    path: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    state: FileState | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Checkpoint:
    """The stored tensors of one model, keyed by the `TensorSpec.name` of its spec.

    sources: the files that these were made from (imported, packed), as they were before that.
    """

    folder: Path
    tensors: dict[str, StoredTensor]
    sources: States = field(default_factory=dict, compare=False)

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

    @property
    def files(self) -> States:
        """The files that tensors lie in, as they were before anything of them was read."""
        return {t.path: t.state for t in self.tensors.values()}

    def check_unchanged(self) -> None:
        """CheckpointChangedError where one of its files, or of those it was made from, is not as it was."""
        check_unchanged({**self.sources, **self.files})
