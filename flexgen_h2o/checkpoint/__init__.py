"""Checkpoints: a model's folder, its tensors by byte range, imports of .bin files, random weights.

Model families and tiers are not known here: a spec says which tensors there are, and the tiers read
them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flexgen_h2o.checkpoint.atomic_folder import states_of
from flexgen_h2o.checkpoint.bin_import import import_bin
from flexgen_h2o.checkpoint.matching import match, no_weights
from flexgen_h2o.checkpoint.packed_store import pack_checkpoint, pack_random
from flexgen_h2o.checkpoint.resolve import resolve
from flexgen_h2o.checkpoint.safetensors import (
    SAFETENSORS,
    Checkpoint,
    StoredTensor,
    names_in,
    read_index,
    weight_files,
)
from flexgen_h2o.checkpoint.writing import write_random_checkpoint
from flexgen_h2o.core.model import ModelSpec

__all__ = [
    "Checkpoint",
    "StoredTensor",
    "import_bin",
    "match",
    "open_checkpoint",
    "pack_checkpoint",
    "pack_random",
    "read_index",
    "resolve",
    "weight_files",
    "write_random_checkpoint",
]


def open_checkpoint(spec: ModelSpec, folder: Path, cache_dir: Path) -> Checkpoint:
    """Return the tensors of `spec` in `folder`.

    Safetensors are used in place. Files in .bin format are imported once under `cache_dir`. Raises
    UsageError that names the folder, file or tensor if weights are missing or damaged, or have a
    wrong shape or dtype. Raises DoesNotFitError if an import fills the disk.
    """
    names = names_in(folder)
    if names == SAFETENSORS:
        return match(spec, read_index(folder), folder)
    if names is None:
        raise no_weights(folder)
    sources = states_of(weight_files(folder))
    imported = import_bin(folder, cache_dir)
    return replace(match(spec, read_index(imported), folder), folder=imported, sources=sources)
