"""Numbers packed into a few bits each (packing.SlotPacking): KV columns, weights, and attention over packed slots.

Letters as in `slots`; W = words of a slot. On the CPU, in fp32 and bf16, columns are packed and read by compiled loops
(`packed_loops`): what is read is dequantised in registers. Everything else goes through torch operations, which unpack
`PACKED_CHUNK` values at a time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from flexgen_h2o.core.packing import WORD, SlotPacking
from flexgen_h2o.core.units import PACKED_CHUNK, UNPACK_CHUNK
from flexgen_h2o.kernels.slots import (
    ScoreState,
    attend_reference,
    attend_scored_reference,
    check_slots,
    score_addresses,
)
from flexgen_h2o.kernels.workspace import parallel_rows

if TYPE_CHECKING:
    import numpy as np

    from flexgen_h2o.kernels.compiled.packed_slots import Format


_COMPILED = (torch.float32, torch.bfloat16)
_EXPONENT = 0x7F80  # of a bfloat16; all set: infinite, or not a number


def pack_rows(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """`pack_columns` of weights: rows (n, columns), any float dtype, on the host, as (n, row bytes) uint8.

    Raises ValueError where a value is not finite, or a group spans more than float32 does.
    """
    packing = SlotPacking(rows.shape[1], bits)
    packed = pack_columns(rows if rows.dtype in _COMPILED else rows.float(), packing)
    scale, least = packed[:, packing.value_words :], packed[:, packing.value_words :] >> 16
    if bool(((scale & _EXPONENT == _EXPONENT) | (least & _EXPONENT == _EXPONENT)).any()):
        raise ValueError("holds values that are not finite, or too large")
    return packed.view(torch.uint8)


def unpack_rows(packed: torch.Tensor, bits: int, out: torch.Tensor) -> torch.Tensor:
    """Fill out (n, columns), contiguous, with the values of packed (n, row bytes) uint8, rounded to out's dtype."""
    if out.device.type != "cpu" or out.dtype not in _COMPILED:
        return unpack_rows_reference(packed, bits, out)
    from flexgen_h2o.kernels.compiled import rows as unpack_loops

    n, columns = out.shape
    packing = SlotPacking(columns, bits)
    job = unpack_loops.UnpackJob(
        packed.data_ptr(), packed.stride(0), WORD * packing.value_words, out.data_ptr(), columns, bits, packing.group
    )
    element, row_bytes = _element(out.dtype), packing.slot_bytes + columns * out.itemsize
    parallel_rows(lambda first, end: unpack_loops.unpack(element, job, first, end), n, row_bytes)
    return out


def unpack_rows_reference(packed: torch.Tensor, bits: int, out: torch.Tensor) -> torch.Tensor:
    """`unpack_rows` in torch operations, UNPACK_CHUNK values at a time. The same bits: code x scale is exact."""
    packing, step = SlotPacking(out.shape[1], bits), max(1, UNPACK_CHUNK // out.shape[1])
    for start in range(0, len(out), step):
        words = packed[start : start + step].view(torch.int32)
        out[start : start + step] = unpack_columns(words, packing, out.dtype)
    return out


_HIGH = -65536  # the upper half of a word


def pack_columns(columns: torch.Tensor, packing: SlotPacking) -> torch.Tensor:
    """(..., d) numbers as (..., W) int32. Each is off by at most half its group's scale; NaN makes its group NaN."""
    if columns.device.type != "cpu" or columns.dtype not in _COMPILED:
        return pack_columns_reference(columns, packing)
    from flexgen_h2o.kernels.compiled import packed_slots as packed_loops

    if columns.shape[-1] != packing.width:
        raise ValueError(f"pack_columns: {tuple(columns.shape)} is not of width {packing.width}")
    columns = columns.contiguous()
    packed = torch.empty(*columns.shape[:-1], packing.words, dtype=torch.int32)
    form, element = _format(packing), _element(columns.dtype)
    rows = columns.numel() // packing.width
    parallel_rows(
        lambda first, end: packed_loops.pack_rows(
            element, form, columns.data_ptr(), packed.data_ptr(), packing.words, first, end
        ),
        rows,
        8 * packing.width * columns.itemsize,
    )
    return packed


def pack_columns_reference(columns: torch.Tensor, packing: SlotPacking) -> torch.Tensor:
    """`pack_columns` in torch operations; a scale or a value may differ by a rounding."""
    x = columns.float()
    short = packing.groups * packing.group - packing.width
    x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], short)], dim=-1).unflatten(-1, (packing.groups, packing.group))
    least = _outwards(x.amin(dim=-1, keepdim=True), down=True)
    scale = _outwards((x.amax(dim=-1, keepdim=True) - least) / packing.levels, down=False)
    values = ((x - least) / scale).add_(0.5).nan_to_num_(0.0).floor_().clamp_(0, packing.levels).int().flatten(-2)
    values = torch.nn.functional.pad(
        values[..., : packing.width], (0, packing.value_words * packing.per_word - packing.width)
    )
    shifts = packing.bits * torch.arange(packing.per_word, device=x.device, dtype=torch.int32)
    words = (values.unflatten(-1, (-1, packing.per_word)) << shifts).sum(dim=-1, dtype=torch.int32)
    high, low = least.view(torch.int32) & _HIGH, (scale.view(torch.int32) >> 16) & 0xFFFF
    return torch.cat([words, (high | low).squeeze(-1)], dim=-1)


def unpack_columns(packed: torch.Tensor, packing: SlotPacking, dtype: torch.dtype) -> torch.Tensor:
    """(..., W) int32 as (..., d) numbers."""
    shifts = packing.bits * torch.arange(packing.per_word, device=packed.device, dtype=torch.int32)
    words, ends = packed.split([packing.value_words, packing.groups], dim=-1)
    words = torch.nn.functional.pad(words, (0, packing.groups * packing.group_words - packing.value_words))
    values = (words[..., None] >> shifts).bitwise_and_(packing.levels).float()
    scale, least = (ends << 16).view(torch.float32), (ends & _HIGH).view(torch.float32)
    values = values.flatten(-2).unflatten(-1, (packing.groups, -1)).mul_(scale[..., None]).add_(least[..., None])
    unpacked: torch.Tensor = values.flatten(-2)[..., : packing.width].to(dtype)
    return unpacked


def attend_packed(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, filled: torch.Tensor, scale: float, packing: SlotPacking,
    book: ScoreState | None = None,
) -> torch.Tensor:  # fmt: skip
    """`slots.attend`, or with a book `slots.attend_scored`, over packed slots.

    q: (R, g, d). keys, values: (segments, R, S, W) int32, strides as there. Returns (R, g, d) in q's dtype.
    """
    if q.device.type != "cpu" or q.dtype not in _COMPILED:
        return attend_packed_reference(q, keys, values, filled, scale, packing, book)
    from flexgen_h2o.kernels.compiled import packed_slots as packed_loops
    from flexgen_h2o.kernels.compiled import slots as slot_loops

    q, filled = q.contiguous(), filled.contiguous()
    rows, group, width = q.shape
    most = int(filled.max())
    check_slots(q, keys, values, filled, most, (packing.words, torch.int32))
    if width != packing.width:
        raise ValueError(f"attend_packed: queries of width {width}, slots of width {packing.width}")
    out = torch.empty_like(q)
    slots = slot_loops.Slots(
        group, packing.words, keys.shape[2], keys.stride(0), most,
        q.data_ptr(), keys.data_ptr(), values.data_ptr(), filled.data_ptr(), out.data_ptr(), 0,
    )  # fmt: skip
    scores = slot_loops.NO_SCORES if book is None else score_addresses(book, rows, most)
    form, element = _format(packing), _element(q.dtype)
    parallel_rows(
        lambda first, end: packed_loops.attend_rows(element, form, slots, scale, scores, first, end),
        rows,
        2 * most * packing.slot_bytes,
    )
    return out


def attend_packed_reference(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, filled: torch.Tensor, scale: float, packing: SlotPacking,
    book: ScoreState | None = None,
) -> torch.Tensor:  # fmt: skip
    """`attend_packed` in torch operations: some rows at a time are unpacked into q's dtype."""
    out = torch.empty_like(q)
    step = max(1, PACKED_CHUNK // (keys.shape[0] * keys.shape[2] * packing.width))
    for a in range(0, len(q), step):
        rows = slice(a, a + step)
        k, v = (unpack_columns(t[:, rows], packing, q.dtype) for t in (keys, values))
        if book is None:
            out[rows] = attend_reference(q[rows], k, v, filled[rows], scale)
        else:
            out[rows] = attend_scored_reference(q[rows], k, v, filled[rows], scale, book.rows(rows))
    return out


@lru_cache
def _table(packing: SlotPacking) -> tuple[int, np.ndarray]:
    from flexgen_h2o.kernels.compiled import packed_slots as packed_loops

    return packed_loops.table_of(packing)


def _format(packing: SlotPacking) -> Format:
    from flexgen_h2o.kernels.compiled.packed_slots import Format

    lanes, table = _table(packing)
    return Format(packing.width, packing.bits, packing.group, packing.value_words, lanes, len(table), table.ctypes.data)


def _element(dtype: torch.dtype) -> np.number[Any]:
    import numpy as np

    return np.float32(0) if dtype == torch.float32 else np.uint16(0)


def _outwards(x: torch.Tensor, down: bool) -> torch.Tensor:
    """fp32 numbers rounded down or up to bf16 ones; NaN stays NaN."""
    bits = x.view(torch.int32)
    rounded = (bits + torch.where((x < 0) == down, 0xFFFF, 0).int()) & _HIGH
    return torch.where(x.isnan(), x, rounded.view(torch.float32))
