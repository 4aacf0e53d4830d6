"""Pack numbers into a few bits each (packing.SlotPacking): KV columns and weights.

W = words of a slot.
"""

from __future__ import annotations

from functools import partial

import torch

from flexgen_h2o.core.packing import WORD, SlotPacking
from flexgen_h2o.core.units import UNPACK_CHUNK
from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.ops import op, op_on, run_loop
from flexgen_h2o.kernels.workspace import (
    element_of,
    is_compiled,
    is_compiled_beside_card,
    parallel_rows,
)

_EXPONENT = 0x7F80  # exponent bits of a bfloat16; if all are set, it is infinite or NaN


def pack_rows(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack weights with `pack_columns`: rows (n, columns), any float dtype, on the host.

    Returns (n, row bytes) uint8. Raises ValueError if a value is not finite, or a group spans more
    than float32 does.
    """
    packing = SlotPacking(rows.shape[1], bits)
    packed = pack_columns(rows if is_compiled(rows) else rows.float(), packing)
    scale = packed[:, packing.value_words :]
    least = packed[:, packing.value_words :] >> 16
    if bool(((scale & _EXPONENT == _EXPONENT) | (least & _EXPONENT == _EXPONENT)).any()):
        raise ValueError("holds values that are not finite, or too large")
    return packed.view(torch.uint8)


@op_on("out")
def unpack_rows(packed: torch.Tensor, bits: int, out: torch.Tensor) -> torch.Tensor:
    """Decode packed (n, row bytes) uint8 to out (n, columns), contiguous.

    Values are rounded to out's dtype. All versions give the same bits, because code x scale is
    exact. Torch operations decode UNPACK_CHUNK values at a time.
    """
    packing = SlotPacking(out.shape[1], bits)
    step = max(1, UNPACK_CHUNK // out.shape[1])
    for start in range(0, len(out), step):
        words = packed[start : start + step].view(torch.int32)
        out[start : start + step] = unpack_columns(words, packing, out.dtype)
    return out


@unpack_rows.loop
def _unpack_loop(packed: torch.Tensor, bits: int, out: torch.Tensor) -> torch.Tensor:
    n, columns = out.shape
    packing = SlotPacking(columns, bits)
    row_bytes = packing.slot_bytes + columns * out.itemsize
    value_bytes = WORD * packing.value_words
    addresses = packed.data_ptr(), out.data_ptr()
    numbers = *addresses, packed.stride(0), value_bytes, columns, bits, packing.group
    run_loop("rows.unpack", out.dtype, n, row_bytes, *numbers)
    return out


@unpack_rows.kernel_if(
    lambda packed, bits, out: triton.supports(out) and packed.stride(0) % WORD == 0
)
def _unpack_kernel(packed: torch.Tensor, bits: int, out: torch.Tensor) -> torch.Tensor:
    packing = SlotPacking(out.shape[1], bits)
    block = 1024
    sizes = packed.stride(0) // WORD, packing.width, packing.value_words, packing.group
    grid = len(out), -(-packing.width // block)
    arguments = packed.view(torch.int32), out, *sizes
    triton.launch("rows.unpack", grid, arguments, BITS=bits, BLOCK=block)
    return out


def look_up_packed(packed: torch.Tensor, bits: int, ids: torch.Tensor, out: torch.Tensor) -> None:
    """Decode the rows `ids` (int64, (n,)) of packed rows to out (n, columns)."""
    step = max(1, UNPACK_CHUNK // out.shape[1])
    for some, found in zip(ids.split(step), out.split(step), strict=True):
        unpack_rows(packed.index_select(0, some), bits, found)


_HIGH = -65536  # mask of the upper half of a word


@op
def pack_columns(columns: torch.Tensor, packing: SlotPacking) -> torch.Tensor:
    """Pack (..., d) numbers as (..., W) int32.

    Each number is off by at most half its group's scale. NaN makes its whole group NaN. With torch
    operations, a scale or a value may differ by a rounding.
    """
    x = columns.float()
    short = packing.groups * packing.group - packing.width
    width = packing.width
    x = torch.cat([x, x[..., -1:].expand(*x.shape[:-1], short)], dim=-1).unflatten(
        -1, (packing.groups, packing.group)
    )
    least = _outwards(x.amin(dim=-1, keepdim=True), down=True)
    # If the divisor is a Python number, a card multiplies by its reciprocal, which gives another
    # quotient.
    scale = _outwards(
        (x.amax(dim=-1, keepdim=True) - least) / torch.full_like(least, packing.levels), down=False
    )
    values = (
        ((x - least) / scale)
        .add_(0.5)
        .nan_to_num_(0.0)
        .floor_()
        .clamp_(0, packing.levels)
        .int()
        .flatten(-2)
    )
    words = [_joined(values[..., :width] & _low_mask(packing), packing.low_bits)]
    if packing.bits == 3:
        words.append(_joined(values[..., :width] >> 2, 1))
    high = least.view(torch.int32) & _HIGH
    low = (scale.view(torch.int32) >> 16) & 0xFFFF
    return torch.cat([*words, (high | low).squeeze(-1)], dim=-1)


@pack_columns.loop_if(lambda columns, packing: is_compiled_beside_card(columns))
def _pack_loop(columns: torch.Tensor, packing: SlotPacking) -> torch.Tensor:
    from flexgen_h2o.kernels.compiled import slots as packed_loops

    if columns.shape[-1] != packing.width:
        raise ValueError(f"pack_columns: {tuple(columns.shape)} is not of width {packing.width}")
    columns = columns.contiguous()
    packed = torch.empty(
        *columns.shape[:-1], packing.words, dtype=torch.int32, device=columns.device
    )
    job = (
        element_of(columns.dtype),
        packed_loops.packed_format(packing),
        columns.data_ptr(),
        packed.data_ptr(),
    )
    rows = columns.numel() // packing.width
    row_bytes = 8 * packing.width * columns.itemsize
    parallel_rows(partial(packed_loops.pack_rows, *job, packing.words), rows, row_bytes)
    return packed


def _low_mask(packing: SlotPacking) -> int:
    return (1 << packing.low_bits) - 1


def _joined(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack (..., n) int32 codes of `bits` bits into words, from the lowest bit on."""
    per_word = 32 // bits
    values = torch.nn.functional.pad(values, (0, -values.shape[-1] % per_word)).unflatten(
        -1, (-1, per_word)
    )
    shifts = bits * torch.arange(per_word, device=values.device, dtype=torch.int32)
    joined: torch.Tensor = (values << shifts).sum(dim=-1, dtype=torch.int32)
    return joined


def parted(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the codes of words (..., n) int32 as (..., n x 32 / bits), from the lowest bits on."""
    shifts = bits * torch.arange(32 // bits, device=words.device, dtype=torch.int32)
    return (words[..., None] >> shifts).bitwise_and_((1 << bits) - 1).flatten(-2)


def unpack_columns(packed: torch.Tensor, packing: SlotPacking, dtype: torch.dtype) -> torch.Tensor:
    """Decode (..., W) int32 to (..., d) numbers."""
    width = packing.width
    low = packing.low_words
    words, ends = packed.split([packing.value_words, packing.groups], dim=-1)
    codes = parted(words[..., :low], packing.low_bits)[..., :width]
    if packing.bits == 3:
        codes = codes.bitwise_or_(parted(words[..., low:], 1)[..., :width] << 2)
    values = torch.nn.functional.pad(codes, (0, packing.groups * packing.group - width)).float()
    scale = (ends << 16).view(torch.float32)
    least = (ends & _HIGH).view(torch.float32)
    values = (
        values.unflatten(-1, (packing.groups, -1)).mul_(scale[..., None]).add_(least[..., None])
    )
    unpacked: torch.Tensor = values.flatten(-2)[..., : packing.width].to(dtype)
    return unpacked


def _outwards(x: torch.Tensor, down: bool) -> torch.Tensor:
    """Round fp32 numbers down or up to a bf16 number; NaN stays NaN."""
    bits = x.view(torch.int32)
    rounded = (bits + torch.where((x < 0) == down, 0xFFFF, 0).int()) & _HIGH
    return torch.where(x.isnan(), x, rounded.view(torch.float32))
