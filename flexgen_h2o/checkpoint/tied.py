"""Heads that a config ties to the embedding.

transformers ties them only if they are the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
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
        if not _are_equal_in_files(head, table, _ctime(head), _ctime(table)):
            return name
    return None


def _heads(prefix: str, stored: Mapping[str, object]) -> list[str]:
    return [own for name in HEADS if (own := first_of(name, prefix, stored)) is not None]


def _has_other_head_in_bin(spec: ModelSpec, folder: Path) -> bool:
    """Return `has_other_head` of .bin files.

    Files of torch before 1.6 cannot be mapped: one file at a time is read whole.
    """

    tensors: dict[str, torch.Tensor] = {}
    for path in shards(folder, BIN):
        found, _ = load_tensors(path)
        names = {first_of(spec.head[-1].name, spec.prefix, found), *_heads(spec.prefix, found)}
        tensors.update({name: tensor for name, tensor in found.items() if name in names})
    name = first_of(spec.head[-1].name, spec.prefix, tensors)
    if name is None:
        return False
    return any(not _are_equal(tensors[own], tensors[name]) for own in _heads(spec.prefix, tensors))


def _are_equal(head: torch.Tensor, table: torch.Tensor) -> bool:
    if (head.data_ptr(), head.dtype, head.shape) == (table.data_ptr(), table.dtype, table.shape):
        return True
    pieces = (tensor.split(_PIECE_ROWS) for tensor in (head, table))
    return head.shape == table.shape and _are_equal_numbers(*pieces)


def _ctime(tensor: StoredTensor) -> int:
    return 0 if tensor.state is None else tensor.state.ctime_ns


@lru_cache(maxsize=16)  # a run asks when it reads the config, and again when it opens the weights
def _are_equal_in_files(one: StoredTensor, other: StoredTensor, *ctimes: int) -> bool:
    """Return whether both tensors have the same shape and numbers, in whatever float dtype.

    All numbers are compared: training of some tokens changes few rows. ctimes: of the files, so
    that the cache is not used for a file that has changed.
    """
    if one == other:
        return True
    if one.shape != other.shape or not one.nbytes:
        return False
    count = _PIECE_BYTES // max(tensor.nbytes // prod(tensor.shape) for tensor in (one, other))
    return _are_equal_numbers(_pieces_of(one, count), _pieces_of(other, count))


def _pieces_of(tensor: StoredTensor, count: int) -> Iterator[torch.Tensor]:
    """Yield the numbers of a stored tensor, `count` at a time; bytes if they are no floats."""
    import torch

    dtype = getattr(torch, tensor.dtype, torch.uint8)
    step = count * (tensor.nbytes // prod(tensor.shape))
    try:
        with open_regular(tensor.path) as file:
            file.seek(tensor.offset)
            for at in range(0, tensor.nbytes, step):
                piece = file.read(min(step, tensor.nbytes - at))
                yield torch.frombuffer(bytearray(piece), dtype=dtype)
    except (OSError, ValueError) as error:  # ValueError: the file has become shorter
        raise UsageError(f"{tensor.path}: {getattr(error, 'strerror', None) or error}") from error


def _are_equal_numbers(ones: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    import torch

    for one, other in zip(ones, others, strict=True):
        interrupts.check()
        if one.dtype == other.dtype and torch.equal(one, other):
            continue
        if not (one.is_floating_point() and other.is_floating_point()):
            return False
        if not torch.allclose(one.double(), other.double(), rtol=0, atol=0, equal_nan=True):
            return False
    return True
