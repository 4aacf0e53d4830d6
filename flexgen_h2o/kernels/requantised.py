"""Packed rows of 4 bits (packing.py) into int8 rows with one scale each, for products in int8 (kernels/int8_rows.py).

scale = the largest magnitude that the groups of a row can hold, |least| or |least + 15 x scale|, over 127: it follows
from the groups' ends, so values are gone through once. int8 = round(value x 127 / largest). Beside the 4 bits' own
error, a value is off by at most half of a scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexgen_h2o.kernels.int8_blocked import BlockedInt8
from flexgen_h2o.kernels.packed_rows import unpack_rows_reference
from flexgen_h2o.kernels.threads import share_rows
from flexgen_h2o.limits import UNPACK_CHUNK
from flexgen_h2o.packing import GROUP_BYTES, INT8, INT8_ROW_BYTES, num_groups, value_bytes

BITS = 4
_MOST = 2**BITS - 1
_LEVELS = 127.0
_NOTHING = 1e-30  # as in requantise_loops


def requantise_rows(
    packed: torch.Tensor, first: int, parts: Sequence[torch.Tensor | BlockedInt8], columns: int
) -> None:
    """Fill rows of an int8 matrix from `first` on. packed: (n, packed row bytes) uint8; parts: of the whole matrix.

    Of a blocked part, rows are filled 16 at a time: `first` and, where more rows follow, n are multiples of 16.
    """
    start = 0
    for part in parts:
        begin, end = max(first, start), min(first + len(packed), start + len(part))
        if begin < end:
            some = packed[begin - first : end - first]
            if isinstance(part, BlockedInt8):
                _fill_blocked(some, begin - start, part, columns)
            elif part.device.type == "cpu":
                _fill_in_order(some, part[begin - start : end - start], columns)
            else:
                requantise_rows_reference(some, part[begin - start : end - start], columns)
        start += len(part)


def requantise_rows_reference(packed: torch.Tensor, out: torch.Tensor, columns: int) -> None:
    """`requantise_rows` in torch operations, UNPACK_CHUNK values at a time, with the same bits.

    out: rows in order, (n, INT8.row_bytes(columns)) uint8.
    """
    step = max(1, UNPACK_CHUNK // columns)
    for start in range(0, len(packed), step):
        some, rows = packed[start : start + step], out[start : start + step]
        values = unpack_rows_reference(some, BITS, torch.empty(len(some), columns, device=packed.device))
        largest = _largest(some, columns)
        steps = torch.full_like(largest, _LEVELS) / largest  # a number over a tensor would be rounded twice
        codes = values.mul_(steps.masked_fill(largest == 0, 0).unsqueeze(1)).round_().to(torch.int8)
        rows.zero_()
        rows[:, :columns] = codes.view(torch.uint8)
        ends = torch.stack([(largest * (1 / _LEVELS)).view(torch.int32), codes.sum(1, dtype=torch.int32)], dim=1)
        rows[:, -INT8_ROW_BYTES:] = ends.view(torch.uint8)


def _largest(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """(n,) float32: of each row the largest magnitude that its groups can hold."""
    groups, at = num_groups(columns), value_bytes(columns, BITS)
    ends = packed[:, at : at + GROUP_BYTES * groups].contiguous().view(torch.bfloat16).float()
    scale, least = ends.view(len(packed), groups, 2).unbind(dim=2)
    largest = torch.maximum(least.abs(), (least + _MOST * scale).abs()).amax(dim=1)
    return largest.masked_fill(largest < _NOTHING, 0)


def _fill_in_order(packed: torch.Tensor, out: torch.Tensor, columns: int) -> None:
    from flexgen_h2o.kernels import requantise_loops

    job = requantise_loops.Job(
        packed.data_ptr(), packed.stride(0), value_bytes(columns, BITS), columns, out.data_ptr(), out.stride(0),
        len(out), 0,
    )  # fmt: skip
    share_rows(lambda a, b: requantise_loops.in_order(job, a, b), len(packed), packed.shape[1] + columns)


def _fill_blocked(packed: torch.Tensor, first: int, part: BlockedInt8, columns: int) -> None:
    from flexgen_h2o.kernels import requantise_loops
    from flexgen_h2o.kernels.requantise_vectors import ROWS

    assert first % ROWS == 0 and len(packed) % ROWS == 0
    job = requantise_loops.Job(
        packed.data_ptr(), packed.stride(0), value_bytes(columns, BITS), columns, part.memory.data_ptr(),
        INT8.row_bytes(columns), len(part), first,
    )  # fmt: skip
    strip_bytes = ROWS * (packed.shape[1] + columns)
    share_rows(lambda a, b: requantise_loops.blocked(job, a, b), len(packed) // ROWS, strip_bytes)
