"""Linear maps and row look-ups over a matrix that is held in row parts.

A matrix split over tiers arrives as several parts, each a run of its rows; a whole one as a single part. No part is
ever copied together: each is multiplied where it lies and fills its own columns of the result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


class RowPart(ABC):
    """Some rows of a matrix in the form in which they are multiplied. All parts of a matrix have inputs of one kind."""

    @abstractmethod
    def __len__(self) -> int: ...

    def inputs(self, x: torch.Tensor) -> Iterator[tuple[slice, Any]]:
        """x (rows, columns) as `multiply` takes it, some rows at a time: which rows, and these. One is used before the
        next is made."""
        yield slice(0, len(x)), x

    @abstractmethod
    def multiply(self, inputs: Any, bias: torch.Tensor | None, out: torch.Tensor, adds: bool) -> None:
        """out = x W^T + bias; adds: to what is there. bias: (n,), out: (rows, n), whose rows need not be adjacent."""

    def multiply_relu(self, x: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
        """relu(x W^T + bias) in `out`, or in memory of the product's own."""
        return torch.relu_(linear(x, (self,), bias, out))

    @abstractmethod
    def look_up(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        """The rows `ids` (int64, (n,)) into out (n, columns)."""


RowParts = tuple[RowPart, ...]


@dataclass(frozen=True)
class DenseRows(RowPart):
    """Rows (n, columns) in the compute dtype, in order; or a vector (n,), which is never split."""

    rows: torch.Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def multiply(self, inputs: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, adds: bool) -> None:
        if adds:
            out.addmm_(inputs, self.rows.t())
            if bias is not None:
                out.add_(bias)
        elif bias is None:
            torch.mm(inputs, self.rows.t(), out=out)
        else:
            torch.addmm(bias, inputs, self.rows.t(), out=out)

    def look_up(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        torch.index_select(self.rows, 0, ids, out=out)


def linear(x: torch.Tensor, weight: RowParts, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """out = x W^T + bias. x: (rows, in), weight parts: (out_i, in), bias: (out,), out: (rows, sum out_i)."""
    linear_each(x, ((weight, bias, out),))
    return out


def linear_relu(x: torch.Tensor, weight: RowParts, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """relu(x W^T + bias), the shapes as of `linear`, in `out` or in memory of the product's own."""
    if len(weight) == 1:
        return weight[0].multiply_relu(x, bias, out)
    return torch.relu_(linear(x, weight, bias, out))


def linear_each(
    x: torch.Tensor, maps: Sequence[tuple[RowParts, torch.Tensor | None, torch.Tensor]], adds: bool = False
) -> None:
    """`linear` of the same inputs with each (weight, bias, out); adds: to what is there. Inputs are prepared once."""
    for rows, inputs in maps[0][0][0].inputs(x):
        for weight, bias, out in maps:
            start = 0
            for part in weight:
                end = start + len(part)
                part.multiply(inputs, None if bias is None else bias[start:end], out[rows, start:end], adds)
                start = end


def add_linear(x: torch.Tensor, inputs: torch.Tensor, weight: RowParts, bias: torch.Tensor | None) -> None:
    """x += inputs W^T + bias, in place: the residual sum. x: (rows, out), inputs: (rows, in)."""
    linear_each(inputs, ((weight, bias, x),), adds=True)


def lookup(ids: torch.Tensor, table: RowParts, out: torch.Tensor) -> torch.Tensor:
    """Rows of `table` by `ids` (int64, (n,)) into out (n, width). Ids must be in range."""
    if len(table) == 1:
        table[0].look_up(ids, out)
        return out
    start = 0
    for part in table:
        here = ((ids >= start) & (ids < start + len(part))).nonzero().squeeze(1)
        found = out.new_empty(len(here), out.shape[1])
        part.look_up(ids[here] - start, found)
        out[here] = found
        start += len(part)
    return out


def vector(parts: RowParts) -> torch.Tensor:
    """A tensor of one dimension, which is never split and always in the compute dtype."""
    (whole,) = parts
    assert isinstance(whole, DenseRows)
    return whole.rows


def optional_vector(tensors: Mapping[str, RowParts], name: str) -> torch.Tensor | None:
    """The vector of that name, None where the layer has none."""
    return vector(tensors[name]) if name in tensors else None
