"""Heads that a config ties to the embedding.

transformers ties them only if they are the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
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

if TYPE_CHECKING:
    import torch

_PIECE_ROWS = 64  # rows of two tables that are compared at a time


def has_other_head(spec: ModelSpec, folder: Path) -> bool:
    """Return whether a checkpoint's head differs from the table that `spec` ties it to.

    transformers then uses both, whatever the config says. Returns False if files are missing or
    cannot be read, or if the table has another shape: opening the checkpoint raises the error.
    """
    names = names_in(folder)
    if not (spec.tied and spec.head) or names is None:
        return False
    wanted = spec.head[-1]
    try:
        stored = read_index(folder) if names == SAFETENSORS else _tables_in_bin(spec, folder)
        table = first_of(wanted.name, spec.prefix, stored)
        if table is None or stored[table].shape != wanted.shape:
            return False
        heads = (first_of(name, spec.prefix, stored) for name in HEADS)
        return any(not _are_equal(stored[head], stored[table]) for head in heads if head)
    except UsageError:
        return False


def _tables_in_bin(spec: ModelSpec, folder: Path) -> dict[str, torch.Tensor]:
    """Return the table and heads of .bin files by name.

    Files of torch before 1.6 cannot be mapped: one file at a time is read whole.
    """
    tables: dict[str, torch.Tensor] = {}
    for path in shards(folder, BIN):
        found = load_tensors(path)
        names = {first_of(name, spec.prefix, found) for name in (spec.head[-1].name, *HEADS)}
        tables.update({name: tensor for name, tensor in found.items() if name in names})
    return tables


def _are_equal(head: StoredTensor | torch.Tensor, table: StoredTensor | torch.Tensor) -> bool:
    """Return whether both have the same shape and numbers, in whatever float dtype.

    All numbers are compared: training of some tokens changes few rows.
    """
    import torch

    if isinstance(head, StoredTensor) and head == table:
        return True
    if head.shape != table.shape:
        return False
    for one, other in zip(_pieces_of(head), _pieces_of(table), strict=True):
        interrupts.check()
        if one.dtype == other.dtype and torch.equal(one, other):
            continue
        if one.shape != other.shape:  # bytes of something that is no float
            return False
        if not torch.allclose(one.double(), other.double(), rtol=0, atol=0, equal_nan=True):
            return False
    return True


def _pieces_of(table: StoredTensor | torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the numbers of a table, some rows at a time; bytes if they are no floats."""
    import torch

    if isinstance(table, torch.Tensor):
        yield from (rows.flatten() for rows in table.split(_PIECE_ROWS))
        return
    dtype = getattr(torch, table.dtype, torch.uint8)
    try:
        with open_regular(table.path) as file:
            for first in range(0, table.shape[0], _PIECE_ROWS):
                rows = table.rows(first, min(first + _PIECE_ROWS, table.shape[0]))
                file.seek(rows.offset)
                data = bytearray(file.read(rows.nbytes))
                yield torch.frombuffer(data, dtype=dtype)
    except (OSError, ValueError) as error:  # ValueError: the file has become shorter
        raise UsageError(f"{table.path}: {getattr(error, 'strerror', None) or error}") from error
