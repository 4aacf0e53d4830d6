"""Rows of a matrix into the packed format of packing.py, and back into a compute dtype."""

from __future__ import annotations

import torch

from flexgen_h2o.kernels.threads import share_rows
from flexgen_h2o.limits import UNPACK_CHUNK
from flexgen_h2o.packing import GROUP, GROUP_BYTES, num_groups, packed_row_bytes, value_bytes

_COMPILED = (torch.float32, torch.bfloat16)
_UNUSABLE = "holds values that are not finite, or too large"
_LOW_BITS = 0xFFFF  # of a float32, which a bfloat16 does not have


def pack_rows(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """rows: (n, columns), any float dtype, on the host. Returns (n, packed_row_bytes) uint8.

    |unpacked - value| <= scale / 2, but for the rounding of float32. Raises ValueError where a value is not finite, or
    a group spans more than float32 does.
    """
    from flexgen_h2o.kernels import pack_loops

    n, columns = rows.shape
    values, bad = rows.float().contiguous(), torch.zeros(n, dtype=torch.int32)
    packed = torch.zeros(n, packed_row_bytes(columns, bits), dtype=torch.uint8)
    job = pack_loops.Job(
        values.data_ptr(), columns, packed.data_ptr(), packed.shape[1], value_bytes(columns, bits), bits, bad.data_ptr()
    )
    share_rows(lambda first, end: pack_loops.pack(job, first, end), n, 4 * columns + packed.shape[1])
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
    import numpy as np

    from flexgen_h2o.kernels import unpack_loops

    n, columns = out.shape
    job = unpack_loops.Job(
        packed.data_ptr(), packed.shape[1], value_bytes(columns, bits), out.data_ptr(), columns, bits
    )
    element = np.float32(0) if out.dtype == torch.float32 else np.uint16(0)
    row_bytes = packed.shape[1] + columns * out.itemsize
    share_rows(lambda first, end: unpack_loops.unpack(element, job, first, end), n, row_bytes)
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
