"""Names that a checkpoint may have for a tensor. transformers loads the tensor from any of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from flexgen_h2o.checkpoint.safetensors import (
    SAFETENSORS,
    StoredTensor,
    names_in,
    read_index,
    read_weight_map,
)
from flexgen_h2o.core.errors import UsageError

HEADS = ("lm_head.weight", "embed_out.weight")  # tables of heads that have their own


def variants(name: str, prefix: str) -> list[str]:
    """Return the names that a tensor may have instead of `name`.

    They are `name` with the base model's prefix, without it, or with it twice. If a file has
    several of them, transformers takes the first in alphabetical order.
    """
    found = [name, f"{prefix}.{name}"]
    if name.startswith(f"{prefix}."):
        found.append(name.removeprefix(f"{prefix}."))
    return found


def first_of(name: str, prefix: str, stored: Mapping[str, object]) -> str | None:
    """Return the stored name of a tensor that may have a variant of `name`; None if there is none.

    If several variants are stored, the first in alphabetical order counts.
    """
    there = [variant for variant in variants(name, prefix) if variant in stored]
    return min(there) if there else None


def find(
    names: Iterable[str], prefix: str, stored: Mapping[str, StoredTensor]
) -> StoredTensor | None:
    """Return the tensor with the first of these names that is stored."""
    own = next(filter(None, (first_of(name, prefix, stored) for name in names)), None)
    return None if own is None else stored[own]


def names_of_tensors(folder: Path) -> list[str]:
    """Return the tensor names in a checkpoint's files, without importing them.

    The list is empty if the names cannot be read.
    """
    names = names_in(folder)
    try:
        if names == SAFETENSORS:
            return list(read_index(folder))
        return (
            list(read_weight_map(folder / names[1]))
            if names and (folder / names[1]).is_file()
            else []
        )
    except UsageError:
        return []
