"""Rows of a matrix into the packed format of core/packing.py, and back into a compute dtype.

Columns packed into a few bits a value (packing.SlotPacking). W = words of a slot.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from flexgen_h2o.core.packing import GROUP, GROUP_BYTES, SlotPacking, num_groups, packed_row_bytes, value_bytes
from flexgen_h2o.core.units import UNPACK_CHUNK
from flexgen_h2o.kernels.workspace import element_of, parallel_rows

if TYPE_CHECKING:
    import numpy as np

    from flexgen_h2o.kernels.compiled.packed_slots import Format


_COMPILED = (torch.float32, torch.bfloat16)
_UNUSABLE = "holds values that are not finite, or too large"
_LOW_BITS = 0xFFFF  # of a float32, which a bfloat16 does not have


def pack_rows(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """rows: (n, columns), any float dtype, on the host. Returns (n, packed_row_bytes) uint8.

    |unpacked - value| <= scale / 2, but for the rounding of float32. Raises ValueError where a value is not finite, or
    a group spans more than float32 does.
    """
    from flexgen_h2o.kernels.compiled import rows as pack_loops

    n, columns = rows.shape
    values, bad = rows.float().contiguous(), torch.zeros(n, dtype=torch.int32)
    packed = torch.zeros(n, packed_row_bytes(columns, bits), dtype=torch.uint8)
    job = pack_loops.PackJob(
        values.data_ptr(), columns, packed.data_ptr(), packed.shape[1], value_bytes(columns, bits), bits, bad.data_ptr()
    )
    parallel_rows(lambda first, end: pack_loops.pack(job, first, end), n, 4 * columns + packed.shape[1])
    if bad.any():
        raise ValueError(_UNUSABLE)
    return packed


def pack_rows_reference(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """`pack_rows` in torch operations; a value in the middle between two codes may get the other one."""
    n, columns = rows.shape
    groups, levels = num_groups(columns), 2**bits - 1
    values = rows.float()
    if padding := groups * GROUP - columns:  # with a value of the last group, which changes neither end of it
        values = torch.cat([values, values[:, -1:].expand(n, padding)], dim=1)
    values = values.reshape(n, groups, GROUP)
    least, most = values.aminmax(dim=2)
    least = _rounded(least, up=False)
    scale = _rounded((most - least) / levels, up=True)
    if not bool(torch.isfinite(scale).all() and torch.isfinite(least).all()):
        raise ValueError(_UNUSABLE)
    steps = scale.masked_fill(scale == 0, 1.0)  # all equal: the codes are 0
    codes = values.sub(least.unsqueeze(2)).div_(steps.unsqueeze(2)).round_().clamp_(0, levels)
    codes = codes.to(torch.uint8).view(n, groups * GROUP)[:, :columns]
    packed = torch.zeros(n, packed_row_bytes(columns, bits), dtype=torch.uint8)
    if bits == 8:
        packed[:, :columns] = codes
    else:
        packed[:, : -(-columns // 2)] = codes[:, ::2]
        packed[:, : columns // 2] |= codes[:, 1::2] << 4
    ends = torch.stack([scale, least], dim=2).to(torch.bfloat16).view(n, 2 * groups)
    packed[:, value_bytes(columns, bits) :] = ends.view(torch.uint8)
    return packed


def unpack_rows(packed: torch.Tensor, bits: int, out: torch.Tensor) -> torch.Tensor:
    """Fill out (n, columns), contiguous, with the values of packed (n, packed_row_bytes), rounded to out's dtype."""
    if out.device.type != "cpu" or out.dtype not in _COMPILED:
        return unpack_rows_reference(packed, bits, out)
    from flexgen_h2o.kernels.compiled import rows as unpack_loops

    n, columns = out.shape
    job = unpack_loops.UnpackJob(
        packed.data_ptr(), packed.shape[1], value_bytes(columns, bits), out.data_ptr(), columns, bits
    )
    element = element_of(out.dtype)
    row_bytes = packed.shape[1] + columns * out.itemsize
    parallel_rows(lambda first, end: unpack_loops.unpack(element, job, first, end), n, row_bytes)
    return out


def unpack_rows_reference(packed: torch.Tensor, bits: int, out: torch.Tensor) -> torch.Tensor:
    """`unpack_rows` in torch operations, UNPACK_CHUNK values at a time. The same bits: code x scale is exact."""
    n, columns = out.shape
    step = max(1, UNPACK_CHUNK // columns)
    for start in range(0, n, step):
        out[start : start + step] = _unpacked(packed[start : start + step], bits, columns)
    return out


def _unpacked(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """(n, columns) float32."""
    n, groups = len(packed), num_groups(columns)
    codes, ends = packed.split([value_bytes(columns, bits), GROUP_BYTES * groups], dim=1)
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], dim=2).view(n, -1)
    scale, least = ends.contiguous().view(torch.bfloat16).float().view(n, groups, 2).unbind(dim=2)
    values = torch.zeros(n, groups * GROUP, dtype=torch.float32, device=packed.device)
    values[:, :columns] = codes[:, :columns]
    grouped = values.view(n, groups, GROUP)
    return grouped.mul_(scale.unsqueeze(2)).add_(least.unsqueeze(2)).view(n, -1)[:, :columns]


def _rounded(values: torch.Tensor, up: bool) -> torch.Tensor:
    """The nearest bfloat16 that is not below (up) or not above, as float32."""
    bits = values.view(torch.int32)
    cut = (bits & ~_LOW_BITS).view(torch.float32)  # towards zero
    away = ((bits & ~_LOW_BITS) + _LOW_BITS + 1).view(torch.float32)
    return torch.where((cut < values) if up else (cut > values), away, cut)


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
    form, element = slot_format(packing), element_of(columns.dtype)
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
    values = (packed[..., : packing.value_words, None] >> shifts) & packing.levels
    values = values.flatten(-2)[..., : packing.width]
    group = torch.arange(packing.width, device=packed.device) // packing.group
    about = packed[..., packing.value_words :].index_select(-1, group)
    scale, least = (about << 16).view(torch.float32), (about & _HIGH).view(torch.float32)
    return (values * scale + least).to(dtype)


@lru_cache
def _table(packing: SlotPacking) -> tuple[int, np.ndarray]:
    from flexgen_h2o.kernels.compiled import packed_slots as packed_loops

    return packed_loops.table_of(packing)


def slot_format(packing: SlotPacking) -> Format:
    """What compiled loops know of a packing."""
    from flexgen_h2o.kernels.compiled.packed_slots import Format

    lanes, table = _table(packing)
    return Format(packing.width, packing.bits, packing.group, packing.value_words, lanes, len(table), table.ctypes.data)


def _outwards(x: torch.Tensor, down: bool) -> torch.Tensor:
    """fp32 numbers rounded down or up to bf16 ones; NaN stays NaN."""
    bits = x.view(torch.int32)
    rounded = (bits + torch.where((x < 0) == down, 0xFFFF, 0).int()) & _HIGH
    return torch.where(x.isnan(), x, rounded.view(torch.float32))
