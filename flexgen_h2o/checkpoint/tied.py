"""Heads that a config ties to the embedding.

transformers ties them only if they are the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from flexgen_h2o.checkpoint.bin_import import load_tensors
from flexgen_h2o.checkpoint.names import HEADS, first_of
from flexgen_h2o.checkpoint.safetensors import (
    BIN,
    SAFETENSORS,
    StoredTensor,
    names_in,
    read_index,
    shards,
)
from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import open_regular
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.core.units import MIB

if TYPE_CHECKING:
    import torch

# pieces in which two tables are compared
_PIECE_BYTES = MIB
_PIECE_ROWS = 64


def has_other_head(spec: ModelSpec, folder: Path) -> bool:
    """Return whether a checkpoint's head differs from the table that `spec` ties it to.

    transformers then uses both, whatever the config says. Returns False if files are missing or
    cannot be read: opening the checkpoint raises the error.
    """
    names = names_in(folder)
    if not (spec.tied and spec.head) or names is None:
        return False
    try:
        if names != SAFETENSORS:
            return _has_other_head_in_bin(spec, folder)
        stored = read_index(folder)
        table = first_of(spec.head[-1].name, spec.prefix, stored)
        return table is not None and other_head(spec.prefix, stored, stored[table]) is not None
    except UsageError:
        return False


def other_head(prefix: str, stored: Mapping[str, StoredTensor], table: StoredTensor) -> str | None:
    """Return the name of a stored head that is not a copy of `table`; None if there is none."""
    for name in _heads(prefix, stored):
        head = stored[name]
        if not _are_equal(head, table, _ctime(head), _ctime(table)):
            return name
    return None


def _heads(prefix: str, stored: Mapping[str, object]) -> list[str]:
    return [own for name in HEADS if (own := first_of(name, prefix, stored)) is not None]


def _has_other_head_in_bin(spec: ModelSpec, folder: Path) -> bool:
    """Return `has_other_head` of .bin files.

    Files of torch before 1.6 cannot be mapped: one file at a time is read whole.
    """
    import torch

    tensors: dict[str, torch.Tensor] = {}
    for path in shards(folder, BIN):
        found, _ = load_tensors(path)
        names = {first_of(spec.head[-1].name, spec.prefix, found), *_heads(spec.prefix, found)}
        tensors.update({name: tensor for name, tensor in found.items() if name in names})
    name = first_of(spec.head[-1].name, spec.prefix, tensors)
    if name is None:
        return False
    table = tensors[name]
    for own in _heads(spec.prefix, tensors):
        head = tensors[own]
        if head.shape != table.shape:
            return True
        if (head.data_ptr(), head.dtype) == (table.data_ptr(), table.dtype):
            continue
        for one, other in zip(head.split(_PIECE_ROWS), table.split(_PIECE_ROWS), strict=True):
            interrupts.check()
            if not torch.equal(one.double(), other.double()):
                return True
    return False


def _ctime(tensor: StoredTensor) -> int:
    return 0 if tensor.state is None else tensor.state.ctime_ns


@lru_cache(maxsize=16)  # a run asks when it reads the config, and again when it opens the weights
def _are_equal(one: StoredTensor, other: StoredTensor, *ctimes: int) -> bool:
    """Return whether both tensors have the same shape and numbers, in whatever float dtype.

    All numbers are compared: training of some tokens changes few rows. ctimes: of the files, so
    that the cache is not used for a file that has changed.
    """
    if one == other:
        return True
    if one.shape != other.shape or not one.nbytes:
        return False
    elements = _PIECE_BYTES // max(tensor.nbytes // prod(tensor.shape) for tensor in (one, other))
    try:
        with open_regular(one.path) as first, open_regular(other.path) as second:
            first.seek(one.offset)
            second.seek(other.offset)
            for at in range(0, prod(one.shape), elements):
                interrupts.check()
                count = min(elements, prod(one.shape) - at)
                pieces = [
                    file.read(count * (tensor.nbytes // prod(tensor.shape)))
                    for file, tensor in ((first, one), (second, other))
                ]
                is_same = one.dtype == other.dtype and pieces[0] == pieces[1]
                if not is_same and not _are_equal_numbers(pieces, (one.dtype, other.dtype)):
                    return False
    except OSError as error:
        raise UsageError(f"{one.path}: {error.strerror or error}") from error
    return True


def _are_equal_numbers(pieces: list[bytes], dtypes: tuple[str, str]) -> bool:
    import torch

    def numbers(piece: bytes, name: str) -> torch.Tensor | None:
        dtype = getattr(torch, name, None)
        if dtype is None or not dtype.is_floating_point or len(piece) % dtype.itemsize:
            return None
        return torch.frombuffer(bytearray(piece), dtype=dtype).double()

    one, other = (numbers(piece, name) for piece, name in zip(pieces, dtypes, strict=True))
    return one is not None and other is not None and torch.equal(one, other)
