"""Decode matrices that checkpoints store in few bits (checkpoint/formats), some rows at a time.

Each function fills `out` (n, columns) in its dtype and returns it; rows of `out` need not be
adjacent. The numbers are computed in float32 and rounded once. Loops are compiled for fp32 and bf16
on a CPU. On other devices, torch operations do the same, UNPACK_CHUNK numbers at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from flexgen_h2o.core.packing import E2M1, GROUP
from flexgen_h2o.core.units import STRIP_ROWS
from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.int8 import Int8Rows, fill_packed
from flexgen_h2o.kernels.ops import op_on
from flexgen_h2o.kernels.packed import parted
from flexgen_h2o.kernels.workspace import (
    cpu_has,
    element_of,
    is_compiled,
    parallel_rows,
    row_slices,
)

MX_BLOCK = 32  # numbers that share a scale; their codes take 16 bytes


@op_on("out")
def unpack_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Decode MXFP4 (OCP Microscaling Formats 1.0, section 5.3.3).

    Two e2m1 numbers share a byte, with the first in the low half. A block of 32 numbers is
    multiplied by 2^(scale - 127).

    blocks: (n, columns / 32, 16), scales: (n, columns / 32), both uint8, contiguous. A scale of 255
    means 2^128, as in transformers, and not NaN.
    """
    numbers = torch.tensor(
        [*E2M1, *(-number for number in E2M1)], device=out.device, dtype=torch.float32
    )
    for some in row_slices(len(out), out.shape[1]):
        codes = torch.stack([blocks[some] & 15, blocks[some] >> 4], dim=-1).flatten(-2)
        exponents = scales[some].int().sub_(127).unsqueeze(-1)
        out[some] = torch.ldexp(numbers[codes.int()], exponents).flatten(1)
    return out


@unpack_mxfp4.loop_if(lambda blocks, scales, out: is_compiled(out) and cpu_has("avx2"))
def _unpack_mxfp4_loop(
    blocks: torch.Tensor, scales: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    from flexgen_h2o.kernels.compiled import quantised as loops
    from flexgen_h2o.kernels.compiled.codes import MXFP4_TABLES

    groups = scales.shape[1]
    tables = MXFP4_TABLES.ctypes.data
    numbers = (
        blocks.data_ptr(),
        scales.data_ptr(),
        groups,
        out.data_ptr(),
        out.stride(0) * out.itemsize,
        tables,
    )
    row_bytes = groups * (MX_BLOCK // 2 + 1 + MX_BLOCK * out.itemsize)
    parallel_rows(partial(loops.unpack_mxfp4, element_of(out.dtype), *numbers), len(out), row_bytes)
    return out


@unpack_mxfp4.kernel
def _unpack_mxfp4_kernel(
    blocks: torch.Tensor, scales: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    rows, columns = out.shape
    block = 1024
    words = blocks.flatten(1).view(torch.int32)
    arguments = words, scales, out, words.shape[1], out.stride(0), columns
    triton.launch("products.unpack_mxfp4", (rows, -(-columns // block)), arguments, BLOCK=block)
    return out


@op_on("out")
def unpack_fp8(
    codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], first: int, out: torch.Tensor
) -> torch.Tensor:
    """Decode FP8 in blocks: e4m3 numbers times the scale of their block.

    The format is OCP 8-bit Floating Point 1.0: it has no infinity, and 127 and 255 are NaN.

    codes: (n, columns) uint8; scales: (block rows, ceil(columns / block[1])) float32, both
    contiguous; block: rows and columns that share a scale; first: index of the first row within the
    first block.
    """
    columns = codes.shape[1]
    for some in row_slices(len(out), columns):
        rows = torch.arange(first + some.start, first + some.stop, device=out.device) // block[0]
        wide = scales[rows].repeat_interleave(block[1], dim=1)[:, :columns]
        out[some] = codes[some].view(torch.float8_e4m3fn).float().mul_(wide)
    return out


@unpack_fp8.loop
def _unpack_fp8_loop(
    codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], first: int, out: torch.Tensor
) -> torch.Tensor:
    from flexgen_h2o.kernels.compiled import quantised as loops

    columns = codes.shape[1]
    numbers = (
        codes.data_ptr(),
        columns,
        scales.data_ptr(),
        scales.shape[1],
        first,
        *block,
        out.data_ptr(),
        out.stride(0) * out.itemsize,
    )
    parallel_rows(
        partial(loops.unpack_fp8, element_of(out.dtype), *numbers),
        len(out),
        columns * (1 + out.itemsize),
    )
    return out


@dataclass(frozen=True)
class Groups:
    """Map each column to the group whose scale it uses."""

    size: int  # columns that share a scale; an even number
    at: int = 0  # position of the first column in the first group; an even number
    # (columns,) int32: the group of each column, if columns are not in order; otherwise None.
    index: torch.Tensor | None = None

    def of_columns(self, columns: int, device: torch.device) -> torch.Tensor:
        """Return the group of each column, (columns,) int64."""
        if self.index is not None:
            return self.index.long()
        return (torch.arange(columns, device=device) + self.at) // self.size


@op_on("out")
def unpack_integers(
    codes: torch.Tensor,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    groups: Groups,
    out: torch.Tensor,
    signed: bool = False,
) -> torch.Tensor:
    """Decode integers: (code - zero) x scale of its group.

    Two codes of 4 bits share a byte, with the first in the low half.

    codes: (n, row bytes) uint8; scales, zeros: (n, groups) float32, all contiguous. zeros: None if
    the zero is half of the number of codes, and columns are in order. signed: codes are bytes in
    two's complement, but zeros refer to unsigned codes.
    """
    columns = out.shape[1]
    which = groups.of_columns(columns, out.device)
    for some in row_slices(len(out), columns):
        here = codes[some] ^ 128 if signed else codes[some]
        if bits == 4:
            here = torch.stack([here & 15, here >> 4], dim=-1).flatten(1)
        zero = torch.full_like(scales[some], 2 ** (bits - 1)) if zeros is None else zeros[some]
        out[some] = here[:, :columns].float().sub_(zero[:, which]).mul_(scales[some][:, which])
    return out


@unpack_integers.loop
def _unpack_integers_loop(
    codes: torch.Tensor,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    groups: Groups,
    out: torch.Tensor,
    signed: bool = False,
) -> torch.Tensor:
    from flexgen_h2o.kernels.compiled import quantised as loops

    columns = out.shape[1]
    index = groups.index
    numbers = (
        codes.data_ptr(),
        codes.shape[1],
        bits,
        128 if signed else 0,
        scales.data_ptr(),
        0 if zeros is None else zeros.data_ptr(),
        scales.shape[1],
        groups.size,
        groups.at,
        0 if index is None else index.data_ptr(),
        columns,
        out.data_ptr(),
        out.stride(0) * out.itemsize,
    )
    row_bytes = codes.shape[1] + columns * out.itemsize
    parallel_rows(
        partial(loops.unpack_integers, element_of(out.dtype), *numbers), len(out), row_bytes
    )
    return out


# ---- matrices that are stored by columns: out[n, k] is stored at [k, n]


_STORED_GROUPS: Any = WeakTensorKeyDictionary()
_ONE_WORDS: Any = WeakTensorKeyDictionary()


def stored_groups(stored: torch.Tensor, count: int, size: int, at: int) -> Groups:
    """Return the Groups of GPTQ's g_idx.

    Raise ValueError if it names a group that does not exist, or has too many columns of one.

    stored: the bytes of (columns,) int32, the group of each column; count: number of groups. If
    columns are in order, `size` per group with the first column at position `at`, the result has no
    index. It is cached as long as the tensor exists. Neither the loops nor a card's look-up would
    notice a missing group.
    """
    if stored not in _STORED_GROUPS:
        index = stored.view(torch.int32)
        in_order = Groups(size, at)
        least, most = (int(end) for end in torch.aminmax(index))
        if not 0 <= least <= most < count:
            raise ValueError(f"has columns of the groups {least} to {most}, of {count}")
        # Some writers leave zeros where columns are in order, and readers differ about these.
        fullest = int(torch.bincount(index.long()).max())
        if fullest > size:
            raise ValueError(f"puts {fullest} columns into a group of {size}")
        is_in_order = torch.equal(index.long(), in_order.of_columns(len(index), index.device))
        _STORED_GROUPS[stored] = in_order if is_in_order else Groups(size, at, index)
    found: Groups = _STORED_GROUPS[stored]
    return found


def the_one_word(stored: torch.Tensor) -> int | None:
    """Return the word, unsigned, that all 32-bit words of `stored` (uint8) are; None: they differ.

    The result is cached as long as the tensor exists.
    """
    if stored not in _ONE_WORDS:
        least, most = (int(end) for end in torch.aminmax(stored.view(torch.int32)))
        _ONE_WORDS[stored] = least % 2**32 if least == most else None
    found: int | None = _ONE_WORDS[stored]
    return found


def unpack_gptq(
    words: torch.Tensor,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    groups: Groups,
    out: torch.Tensor,
) -> torch.Tensor:
    """Run `unpack_integers` on a matrix in GPTQ's order.

    words: (columns x bits / 32, n) int32; a word holds codes of adjacent columns, from the lowest
    bits on. scales, zeros: (groups, n) float32. Rows of each tensor need not be adjacent. zeros:
    None if they are half of the number of codes. groups: from `stored_groups`.
    """
    for some in row_slices(len(out), out.shape[1]):
        codes = _turned(words[:, some])
        scale = _turned(scales[:, some])
        zero = None if zeros is None else _turned(zeros[:, some])
        unpack_integers(codes.view(torch.uint8), bits, scale, zero, groups, out[some])
    return out


def _turned(stored: torch.Tensor) -> torch.Tensor:
    """Return `stored` (n, m) transposed to (m, n); rows of `stored` need not be adjacent.

    torch transposes contiguous tensors 5 to 10 times as fast, so `stored` is made contiguous first.
    """
    n, m = stored.shape
    return stored.contiguous().t().flatten().view(m, n)  # the last stride is 1 even if n or m is 1


# for each of the 8 rows of a word, the index of its code in the word
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]


def awq_parted(words: torch.Tensor) -> torch.Tensor:
    """Return the codes of words (n, m) int32 in AWQ's order, 4 bits, as (n, m x 8) float32."""
    codes: torch.Tensor = parted(words, 4).unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1)
    return codes.float()


def unpack_awq(
    words: torch.Tensor,
    skip: int,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    groups: Groups,
    out: torch.Tensor,
) -> torch.Tensor:
    """Decode a matrix in AWQ's order, 4 bits: (code - zero) x scale.

    words: (columns, ceil((skip + n) / 8)) int32; each word holds 8 rows of a column. skip: rows of
    the first words that are not wanted. scales, zeros: (groups, n) float32. Rows of each tensor
    need not be adjacent.
    """
    for some in row_slices(len(out), out.shape[1]):
        begin = (some.start + skip) // 8
        end = -(-(some.stop + skip) // 8)
        codes = _turned(words[:, begin:end])
        scale = _turned(scales[:, some])
        zero = _turned(zeros[:, some])
        unpack_awq_rows(codes, some.start + skip - 8 * begin, scale, zero, groups, out[some])
    return out


@op_on("out")
def unpack_awq_rows(
    words: torch.Tensor,
    skip: int,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    groups: Groups,
    out: torch.Tensor,
) -> torch.Tensor:
    """Decode AWQ words that are already transposed.

    words: (ceil((skip + n) / 8), columns) int32; scales, zeros: (n, groups) float32, all
    contiguous. skip: rows of the first words that are not wanted.
    """
    which = groups.of_columns(out.shape[1], out.device)
    codes = awq_parted(words.t()).t()[skip : skip + len(out)]
    return out.copy_((codes - zeros[:, which]).mul_(scales[:, which]))


@unpack_awq_rows.loop
def _unpack_awq_rows_loop(
    words: torch.Tensor,
    skip: int,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    groups: Groups,
    out: torch.Tensor,
) -> torch.Tensor:
    from flexgen_h2o.kernels.compiled import quantised as loops

    columns = out.shape[1]
    numbers = (
        words.data_ptr(),
        skip,
        scales.data_ptr(),
        zeros.data_ptr(),
        scales.shape[1],
        groups.size,
        groups.at,
        columns,
        out.data_ptr(),
        out.stride(0) * out.itemsize,
    )
    parallel_rows(
        partial(loops.unpack_awq, element_of(out.dtype), *numbers),
        len(out),
        columns * (1 + out.itemsize),
    )
    return out


# ---- numbers to int8 rows


def fill_int8_rows(values: torch.Tensor, first: int, parts: Sequence[Int8Rows]) -> None:
    """Quantise values and fill rows of an int8 matrix (kernels/int8.py), from row `first` on.

    values: (n, columns) float32, contiguous; parts: of the whole matrix. `first` is a multiple of
    BLOCK_ROWS.
    """
    start = 0
    for part in parts:
        begin = max(first, start)
        end = min(first + len(values), start + len(part))
        if begin < end:
            _fill_part(values[begin - first : end - first], begin - start, part)
        start += len(part)


def _fill_part(values: torch.Tensor, first: int, part: Int8Rows) -> None:
    if part.blocked:
        from flexgen_h2o.kernels.compiled import quantised as loops

        assert _fills_strips(len(values), first, part)
        loop = partial(loops.float_strips, *_strip_numbers(first, part), values.data_ptr())
        parallel_rows(loop, len(values) // STRIP_ROWS, STRIP_ROWS * 5 * part.columns)
    else:
        fill_packed(values, part.packed[first : first + len(values)])


def _fills_strips(rows: int, first: int, out: Int8Rows) -> bool:
    """Return whether a loop fills these rows.

    It fills strips of STRIP_ROWS rows of whole groups of GROUP columns.

    The loop needs a CPU with AVX2.
    """
    return rows % STRIP_ROWS == first % STRIP_ROWS == out.columns % GROUP == 0 and cpu_has("avx2")


def _strip_numbers(first: int, out: Int8Rows) -> tuple[int, ...]:
    """Return the first arguments of the loops that fill strips (compiled/quantised.py)."""
    memory = out.packed.data_ptr()
    return memory, out.columns, memory + len(out) * out.columns, out.scales.data_ptr(), first


def fill_blocks_from_mxfp4(
    blocks: torch.Tensor, scales: torch.Tensor, first: int, out: Int8Rows
) -> bool:
    """Run `fill_int8_rows` on the result of `unpack_mxfp4`, in one pass over the codes.

    out: blocked. The result has the same bits. Returns False, and does nothing, if there is no loop
    for such rows.
    """
    if not _fills_strips(len(scales), first, out):
        return False
    from flexgen_h2o.kernels.compiled import quantised as loops

    loop = partial(
        loops.mxfp4_strips, *_strip_numbers(first, out), blocks.data_ptr(), scales.data_ptr()
    )
    parallel_rows(loop, len(scales) // STRIP_ROWS, STRIP_ROWS * 2 * out.columns)
    return True
