"""The names that a checkpoint may have for a tensor: transformers loads it from any of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from flexgen_h2o.checkpoint.safetensors import SAFETENSORS, StoredTensor, names_in, read_index, read_weight_map
from flexgen_h2o.core.errors import UsageError

HEADS = ("lm_head.weight", "embed_out.weight")  # of heads with a table of their own


def variants(name: str, prefix: str) -> list[str]:
    """The names that a tensor may have in place of `name`: with the base model's prefix, without it, or with it twice.

    If a file has several of them, transformers takes the first in the order of the alphabet.
    """
    found = [name, f"{prefix}.{name}"]
    if name.startswith(f"{prefix}."):
        found.append(name.removeprefix(f"{prefix}."))
    return found


def first_of(name: str, prefix: str, stored: Mapping[str, object]) -> str | None:
    """The one of the names that a tensor may have in place of `name` that counts among those that are stored."""
    there = [variant for variant in variants(name, prefix) if variant in stored]
    return min(there) if there else None


class Names:
    """The stored tensors by name, and which of them have been found."""

    def __init__(self, prefix: str, stored: Mapping[str, StoredTensor]) -> None:
        self.prefix = prefix
        self.stored = stored
        self._found: set[tuple[Path, int]] = set()

    def find(self, names: Iterable[str]) -> StoredTensor | None:
        """The tensor that has the first of these names that there is."""
        for name in names:
            own = first_of(name, self.prefix, self.stored)
            if own is not None:
                found = self.stored[own]
                self._found.add((found.path, found.offset))
                return found
        return None

    @property
    def unused(self) -> list[str]:
        """Names of tensors that have not been found. Further names of one that was found are not among them."""
        return [name for name, one in self.stored.items() if (one.path, one.offset) not in self._found and one.nbytes]


def names_of_tensors(folder: Path) -> list[str]:
    """The names that a checkpoint's files have, without importing them; none where they cannot be told."""
    names = names_in(folder)
    try:
        if names == SAFETENSORS:
            return list(read_index(folder))
        return list(read_weight_map(folder / names[1])) if names and (folder / names[1]).is_file() else []
    except UsageError:
        return []
