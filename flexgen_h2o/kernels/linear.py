"""Linear maps and row look-ups over a matrix that is held in row parts.

A matrix split over tiers arrives as up to three tensors, each a run of its rows; a whole one as a single part. No
part is ever copied together: each is multiplied where it lies and fills its own columns of the result.
"""

from __future__ import annotations

import torch

RowParts = tuple[torch.Tensor, ...]


def linear(x: torch.Tensor, weight: RowParts, bias: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    """out = x W^T + bias. x: (rows, in), weight parts: (out_i, in), bias: (out,), out: (rows, sum out_i)."""
    start = 0
    for part in weight:
        end = start + part.shape[0]
        if bias is None:
            torch.mm(x, part.t(), out=out[:, start:end])
        else:
            torch.addmm(bias[start:end], x, part.t(), out=out[:, start:end])
        start = end
    return out


def add_linear(x: torch.Tensor, inputs: torch.Tensor, weight: RowParts, bias: torch.Tensor | None) -> None:
    """x += inputs W^T + bias, in place: the residual sum. x: (rows, out), inputs: (rows, in)."""
    start = 0
    for part in weight:
        end = start + part.shape[0]
        x[:, start:end].addmm_(inputs, part.t())
        start = end
    if bias is not None:
        x.add_(bias)


def lookup(ids: torch.Tensor, table: RowParts, out: torch.Tensor) -> torch.Tensor:
    """Rows of `table` by `ids` (int64, (n,)) into out (n, width). Ids must be in range."""
    if len(table) == 1:
        return torch.index_select(table[0], 0, ids, out=out)
    start = 0
    for part in table:
        here = ((ids >= start) & (ids < start + part.shape[0])).nonzero().squeeze(1)
        out[here] = part[ids[here] - start]
        start += part.shape[0]
    return out
