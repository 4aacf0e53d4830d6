"""Linear maps and row look-ups over a matrix that is held in row parts.

A matrix split over tiers arrives as up to three tensors, each a run of its rows; a whole one as a single part. No
part is ever copied together: each is multiplied where it lies and fills its own columns of the result. A part is in
the compute dtype, in order or blocked (kernels/blocked.py), or in int8 and multiplied so (kernels/int8.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from flexgen_h2o.core.units import TOKEN_CHUNK
from flexgen_h2o.kernels import blocked as blocked_rows
from flexgen_h2o.kernels import int8 as int8_rows
from flexgen_h2o.kernels.blocked import BlockedRows
from flexgen_h2o.kernels.int8 import Int8Rows

RowParts = tuple[torch.Tensor | BlockedRows | Int8Rows, ...]


def linear(x: torch.Tensor, weight: RowParts, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """out = x W^T + bias. x: (rows, in), weight parts: (out_i, in), bias: (out,), out: (rows, sum out_i)."""
    linear_each(x, ((weight, bias, out),))
    return out


def linear_relu(x: torch.Tensor, weight: RowParts, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """relu(x W^T + bias), the shapes as of `linear`, in `out` or in memory of the product's own.

    A matrix that is one blocked part makes it in a single pass; a copy into `out` would be another.
    """
    if len(weight) == 1 and isinstance(weight[0], BlockedRows) and len(x) <= TOKEN_CHUNK:
        return blocked_rows.product(x, weight[0], bias, "relu")
    return torch.relu_(linear(x, weight, bias, out))


def linear_each(x: torch.Tensor, maps: Sequence[tuple[RowParts, torch.Tensor | None, torch.Tensor]]) -> None:
    """`linear` of the same inputs with each (weight, bias, out): in int8 they are quantised once."""
    if _is_int8(maps[0][0]):
        int8_rows.multiply_each(x, [(_int8(weight), bias, out) for weight, bias, out in maps])
        return
    for weight, bias, out in maps:
        start = 0
        for part in weight:
            end = start + len(part)
            some = None if bias is None else bias[start:end]
            if isinstance(part, BlockedRows):
                blocked_rows.multiply(x, part, some, out[:, start:end])
            elif some is None:
                torch.mm(x, _in_order(part).t(), out=out[:, start:end])
            else:
                torch.addmm(some, x, _in_order(part).t(), out=out[:, start:end])
            start = end


def add_linear(x: torch.Tensor, inputs: torch.Tensor, weight: RowParts, bias: torch.Tensor | None) -> None:
    """x += inputs W^T + bias, in place: the residual sum. x: (rows, out), inputs: (rows, in)."""
    if _is_int8(weight):
        int8_rows.multiply_each(inputs, [(_int8(weight), bias, x)], adds=True)
        return
    start = 0
    for part in weight:
        end = start + len(part)
        some = None if bias is None else bias[start:end]
        if isinstance(part, BlockedRows):
            blocked_rows.multiply(inputs, part, some, x[:, start:end], adds=True)
        else:
            x[:, start:end].addmm_(inputs, _in_order(part).t())
            if some is not None:
                x[:, start:end].add_(some)
        start = end


def lookup(ids: torch.Tensor, table: RowParts, out: torch.Tensor) -> torch.Tensor:
    """Rows of `table`, of which none is blocked, by `ids` (int64, (n,)) into out (n, width). Ids must be in range."""
    if len(table) == 1:
        return _rows(table[0], ids, out)
    start = 0
    for part in table:
        here = ((ids >= start) & (ids < start + len(part))).nonzero().squeeze(1)
        out[here] = _rows(part, ids[here] - start, out.new_empty(len(here), out.shape[1]))
        start += len(part)
    return out


def vector(parts: RowParts) -> torch.Tensor:
    """A tensor of one dimension, which is never split and always in the compute dtype."""
    (whole,) = parts
    assert isinstance(whole, torch.Tensor)
    return whole


def optional_vector(tensors: Mapping[str, RowParts], name: str) -> torch.Tensor | None:
    """The vector of that name, None where the layer has none."""
    return vector(tensors[name]) if name in tensors else None


def _is_int8(weight: RowParts) -> bool:
    """Is a matrix in int8? All of its parts are, or none."""
    return isinstance(weight[0], Int8Rows)


def _int8(weight: RowParts) -> list[Int8Rows]:
    return [part for part in weight if isinstance(part, Int8Rows)]


def _in_order(part: torch.Tensor | BlockedRows | Int8Rows) -> torch.Tensor:
    assert isinstance(part, torch.Tensor)
    return part


def _rows(part: torch.Tensor | BlockedRows | Int8Rows, ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    if isinstance(part, torch.Tensor):
        return torch.index_select(part, 0, ids, out=out)
    assert isinstance(part, Int8Rows)
    int8_rows.look_up(ids, part, out)
    return out
