"""Checkpoints: finding a model's folder, its tensors by byte range, importing .bin files, random weights.

Model families and tiers are not known here: a spec says which tensors, the tiers read them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from flexgen_h2o.checkpoint.atomic_folder import states_of
from flexgen_h2o.checkpoint.bin_import import BIN_INDEX_NAME, BIN_NAME, has_bin, import_bin
from flexgen_h2o.checkpoint.packed_store import pack_checkpoint, pack_random
from flexgen_h2o.checkpoint.resolve import ModelSource, match, resolve
from flexgen_h2o.checkpoint.safetensors import (
    INDEX_NAME,
    SINGLE_NAME,
    Checkpoint,
    StoredTensor,
    has_safetensors,
    read_index,
    read_weight_map,
    shard_path,
)
from flexgen_h2o.checkpoint.writing import write_random_checkpoint
from flexgen_h2o.core.config import ModelSpec
from flexgen_h2o.core.errors import UsageError

__all__ = [
    "Checkpoint",
    "ModelSource",
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
    """The tensors of `spec` in `folder`: safetensors in place, or .bin files imported once under `cache_dir`.

    Raises UsageError that names the folder, file or tensor: no weights, damaged, missing, wrong shape or dtype;
    DoesNotFitError when an import fills the disk.
    """
    if has_safetensors(folder):
        return match(spec, read_index(folder), folder)
    if not has_bin(folder):
        raise UsageError(f"--model {folder}: no weights there (no {SINGLE_NAME}, no {BIN_NAME}, no index of either)")
    sources = states_of(weight_files(folder))
    imported = import_bin(folder, cache_dir)
    return replace(match(spec, read_index(imported), imported), sources=sources)


def weight_files(folder: Path) -> list[Path]:
    """The files in `folder` that `open_checkpoint` takes weights from; none where there are none. UsageError names a
    damaged index or a missing shard."""
    for single, index in ((SINGLE_NAME, INDEX_NAME), (BIN_NAME, BIN_INDEX_NAME)):
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            shards = sorted(set(read_weight_map(folder / index).values()))
            return [shard_path(folder / index, shard) for shard in shards]
    return []
