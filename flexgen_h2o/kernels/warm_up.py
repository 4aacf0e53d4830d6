"""Compile the kernels, or load what was compiled before, so that no sweep of a run waits for it."""

from __future__ import annotations

import torch

from flexgen_h2o.kernels.causal import causal_attention_lse
from flexgen_h2o.kernels.column_sums import column_sums
from flexgen_h2o.kernels.packed_rows import unpack_rows
from flexgen_h2o.kernels.slots import ScoreBook, attend_scored
from flexgen_h2o.packing import packed_row_bytes

_ROWS, _SLOTS, _WIDTH = 1, 4, 64


def warm_up(device: torch.device, dtype: torch.dtype, scored: bool, packed_bits: int | None = None) -> None:
    """Run decode attention once on zeros; where columns are `scored`, prompts' scores as well; and unpack weights.

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
    if packed_bits is not None:
        rows = torch.zeros(_ROWS, packed_row_bytes(_WIDTH, packed_bits), dtype=torch.uint8, device=device)
        unpack_rows(rows, packed_bits, torch.empty(_ROWS, _WIDTH, dtype=dtype, device=device))
