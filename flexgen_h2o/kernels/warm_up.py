"""Compile the kernels, or load what was compiled before, so that no sweep of a run waits for it."""

from __future__ import annotations

import torch

from flexgen_h2o.kernels.causal import causal_attention_lse
from flexgen_h2o.kernels.column_sums import column_sums
from flexgen_h2o.kernels.int8_rows import Int8Rows, multiply
from flexgen_h2o.kernels.packed_rows import unpack_rows
from flexgen_h2o.kernels.slots import ScoreBook, attend_scored
from flexgen_h2o.kernels.workspace import Workspace
from flexgen_h2o.packing import Packing

_ROWS, _SLOTS, _WIDTH = 1, 4, 64


def warm_up(device: torch.device, dtype: torch.dtype, scored: bool, packing: Packing | None = None) -> None:
    """Run decode attention once on zeros; where columns are `scored`, prompts' scores as well; and unpack
    weights, or multiply by them in int8.

    A few seconds the first time on a machine, then some tenths of one.
    """
    columns = torch.zeros(1, _ROWS, _SLOTS, _WIDTH, dtype=dtype, device=device)
    q = columns[0, :, :1].contiguous()
    whole, single = ((_ROWS, _SLOTS), (_ROWS,))
    positions, oldest, newest, victims = (
        torch.zeros(size, dtype=torch.int32, device=device) for size in (whole, single, single, single)
    )
    scores, gains = torch.zeros(whole, device=device), torch.ones(single, device=device)
    book = ScoreBook(scores, positions, oldest, newest, 1.0, gains, victims)
    attend_scored(q, columns, columns, victims.new_full(single, _SLOTS), 1.0, book)
    if scored:
        _, lse = causal_attention_lse(columns, columns, columns, 1.0)
        column_sums(columns, columns, lse, 1.0)
    if packing is not None:
        rows = torch.zeros(_ROWS, packing.row_bytes(_WIDTH), dtype=torch.uint8, device=device)
        out = torch.empty(_ROWS, _WIDTH, dtype=dtype, device=device)
        if packing.by_row:
            _multiply(rows, out)
        else:
            unpack_rows(rows, packing.bits, out)


def _multiply(packed: torch.Tensor, x: torch.Tensor) -> None:
    """A product in int8 with packed rows."""
    sizes = dict.fromkeys(("int8 inputs", "int8 input scales", "int8 weight scales", "int8 sums"), _WIDTH)
    room = torch.empty(sum(sizes.values()), dtype=torch.uint8, device=x.device)
    multiply(x, Int8Rows(packed, _WIDTH, Workspace(room, sizes, x.dtype)), None, x[:, : len(packed)].clone())
