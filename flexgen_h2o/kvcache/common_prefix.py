"""The prefix that all rows of a block begin with: its KV columns in one copy, and decode attention over it and slots.

Its keys and values are held once a transformer block, where layers are computed; slots hold only the columns
behind them. The queries of all rows read the copy together: it is the slots of one row with as many queries (Hydragen,
Juravsky et al. 2024, arXiv 2402.05099). What they get is joined with what they get from their own slots by both
log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexgen_h2o.kernels.slots import attend_lse
from flexgen_h2o.kvcache.view import PartView


@dataclass(frozen=True)
class CommonColumns:
    """Of one transformer block: the slots of as many rows as there are kv-heads, all of them filled.

    keys, values: (1, kv_heads, columns, d), rotated where the model has rotary embeddings. filled: (kv_heads,) int32.
    """

    keys: torch.Tensor
    values: torch.Tensor
    filled: torch.Tensor

    def put(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys, values: (1, columns, kv_heads, d), as prompts are packed."""
        self.keys.copy_(keys.transpose(1, 2))
        self.values.copy_(values.transpose(1, 2))

    def in_front(self) -> list[torch.Tensor]:
        """Keys and values as `put` takes them."""
        return [t.transpose(1, 2) for t in (self.keys, self.values)]

    def attend(self, q: torch.Tensor, scale: float) -> Attended:
        """q: (rows, g, d), each row a (sequence, kv-head)."""
        (rows, group, width), heads = q.shape, len(self.filled)
        together = q.view(-1, heads, group, width).transpose(0, 1).reshape(heads, -1, width)
        out, lse = attend_lse(together, self.keys, self.values, self.filled, scale)
        out = out.view(heads, -1, group, width).transpose(0, 1).reshape(rows, group, width)
        return Attended(out, lse.view(heads, -1, group).transpose(0, 1).reshape(rows, group))


@dataclass(frozen=True)
class Attended:
    """What queries got from some of their columns. out: (rows, g, d); lse: (rows, g) fp32."""

    out: torch.Tensor
    lse: torch.Tensor

    def rows(self, some: slice, where: torch.device) -> Attended:
        return Attended(self.out[some].to(where), self.lse[some].to(where))


def attend_behind(
    before: Attended, q: torch.Tensor, view: PartView, filled: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention over the columns that `before` is of and a view's slots: (rows, g, d). q, filled: as of `attend`."""
    own, lse = attend_lse(q, view.keys, view.values, filled, scale)
    share = torch.sigmoid(before.lse - lse).unsqueeze(2)  # of exp(before.lse) in the sum of both
    return torch.lerp(own.float(), before.out.float(), share)


class CommonPrefix:
    """The columns of all transformer blocks in one buffer. Written by the first micro-batch of a block of rows."""

    def __init__(self, memory: torch.Tensor, dtype: torch.dtype, columns: int, shape: Sequence[int]) -> None:
        """memory: bytes, room for as many `columns` and more. shape: transformer blocks, kv-heads and d."""
        blocks, heads, width = shape
        copies = memory.view(dtype)[: 2 * blocks * heads * columns * width].view(blocks, 2, 1, heads, columns, width)
        filled = torch.full((heads,), columns, dtype=torch.int32, device=memory.device)
        self._blocks = [CommonColumns(keys, values, filled) for keys, values in copies]

    def at(self, block: int) -> CommonColumns:
        return self._blocks[block]
