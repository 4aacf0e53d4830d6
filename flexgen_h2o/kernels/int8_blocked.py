"""Products of int8 codes, as whole numbers: torch's, or the same by products of float32.

Rows in int8 in oneDNN's blocked layout, in which a CPU multiplies them faster than in order.

Some packed rows (packing.int8_row_bytes) are blocked where they lie, in as many bytes: their values, 64 rows together
and of each 4 columns in turn; the negative sums of these, which the product takes off for inputs around 128; the
scales. Looked up, a row is gathered from its block.

The product and the layout are private to torch: both are tried once against products of int8_sums.py (instructions of
older CPUs cut sums, other CPUs have other layouts); where they are missing or differ, rows stay as they are.

Packed rows of 4 bits (core/packing.py) into int8 rows with one scale each, for products in int8 (kernels/int8.py).

scale = the largest magnitude that the groups of a row can hold, |least| or |least + 15 x scale|, over 127: it follows
from the groups' ends, so values are gone through once. int8 = round(value x 127 / largest). Beside the 4 bits' own
error, a value is off by at most half of a scale.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from flexgen_h2o.core.packing import INT8_ROW_BYTES, WORD, SlotPacking, int8_row_bytes
from flexgen_h2o.core.units import BLOCK_CHUNK, BLOCK_ROWS, INT8_BLOCK_ROWS, UNPACK_CHUNK
from flexgen_h2o.kernels.blocked import opaque_tensor
from flexgen_h2o.kernels.packed import unpack_rows_reference
from flexgen_h2o.kernels.workspace import parallel_rows

_EXACT = 1024  # products of codes (at most 127 x 127) whose sum float32 holds exactly, in any order


def int8_products(codes: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out = codes W^T. codes: (rows, columns), weight: (n, columns), both int8; out: (rows, n) int32, contiguous."""
    if codes.device.type == "cpu" and _int_mm_works():
        torch._int_mm(codes, weight.t(), out=out)
    else:
        int8_products_reference(codes, weight, out)


def int8_products_reference(codes: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """`int8_products` as products of float32, exact: some columns, and some rows of the weight, at a time."""
    out.zero_()
    step = UNPACK_CHUNK // _EXACT
    for k in range(0, codes.shape[1], _EXACT):
        inputs = codes[:, k : k + _EXACT].float()
        for a in range(0, len(weight), step):
            out[:, a : a + step] += (inputs @ weight[a : a + step, k : k + _EXACT].float().t()).to(torch.int32)


@lru_cache(maxsize=1)
def _int_mm_works() -> bool:
    """torch._int_mm is private, and instructions of older CPUs cut sums of large products: is it there, and exact?"""
    codes, weight = (torch.full((n, 260), 127, dtype=torch.int8) for n in (3, 32))
    codes[0, ::2], weight[1], weight[2, 1::2] = -127, -127, -127
    weight = weight[:, :256]  # rows that lie apart, as packed rows do
    out, want = (torch.empty(3, 32, dtype=torch.int32) for _ in range(2))
    try:
        torch._int_mm(codes[:, :256].contiguous(), weight.t(), out=out)
    except (AttributeError, RuntimeError, TypeError):
        return False
    int8_products_reference(codes[:, :256], weight, want)
    return torch.equal(out, want)


ZERO = 128  # what is added to the inputs' codes: oneDNN takes them as uint8
_WORD = 4  # columns that lie together
_MOST_COLUMNS = 2**16  # of 255 x 127 each int32 holds the sum


@dataclass(frozen=True)
class BlockedInt8:
    """Some rows of a matrix. opaque: what products take, (columns, rows); its values are in `memory` (uint8)."""

    opaque: torch.Tensor
    memory: torch.Tensor

    def __len__(self) -> int:
        return self.opaque.shape[1]

    @property
    def scales(self) -> torch.Tensor:
        """(n,) float32; a view."""
        return self.memory[-_WORD * len(self) :].view(torch.float32)

    def rows_at(self, ids: torch.Tensor) -> torch.Tensor:
        """(len(ids), columns) int8: the values of rows; ids: int64."""
        columns = self.opaque.shape[0]
        words = self.memory[: len(self) * columns].view(torch.int32).view(-1, columns // _WORD, BLOCK_ROWS)
        return words[ids // BLOCK_ROWS, :, ids % BLOCK_ROWS].view(torch.int8)


def block_int8_rows(packed: torch.Tensor) -> tuple[torch.Tensor | BlockedInt8, ...]:
    """Block packed rows (n, row bytes), uint8, where they lie: parts in order, whose memory is that of `packed`.

    A part has at most BLOCK_CHUNK bytes of values and INT8_BLOCK_ROWS rows. What cannot be blocked stays as it is: all
    rows where the device, the number of columns or torch is not right, and those beyond a multiple of BLOCK_ROWS.
    """
    columns = packed.shape[1] - INT8_ROW_BYTES
    if not _can_block(packed, columns):
        return (packed,)
    pieces = _pieces(packed, columns)
    return tuple(_block(piece, columns) if len(piece) % BLOCK_ROWS == 0 else piece for piece in pieces)


def blank_int8_rows(memory: torch.Tensor) -> tuple[torch.Tensor | BlockedInt8, ...]:
    """Parts as `block_int8_rows` makes them, of rows that are yet to be filled (kernels/int8_blocked.py)."""
    columns = memory.shape[1] - INT8_ROW_BYTES
    if not _can_block(memory, columns) or not _can_fill():
        return (memory,)
    pieces = _pieces(memory, columns)
    return tuple(
        _wrapped(piece.view(-1), len(piece), columns) if len(piece) % BLOCK_ROWS == 0 else piece for piece in pieces
    )


def blocked_products(codes: torch.Tensor, part: BlockedInt8) -> torch.Tensor:
    """(codes - ZERO) W^T as float32 (rows, n): the whole numbers, rounded. codes: (rows, columns) uint8, contiguous."""
    one, zero = _numbers()
    product = torch.ops.onednn.qlinear_pointwise
    result: torch.Tensor = product(
        codes, 1.0, ZERO, part.opaque, one, zero, None, 1.0, 0, torch.float32, "none", [], ""
    )  # fmt: skip
    return result


@lru_cache(maxsize=1)
def _numbers() -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and the zero of a matrix whose values are its codes."""
    return torch.ones(1), torch.zeros(1, dtype=torch.int32)


def _can_block(packed: torch.Tensor, columns: int) -> bool:
    right = packed.device.type == "cpu" and packed.is_contiguous() and 0 < columns <= _MOST_COLUMNS
    return right and columns % BLOCK_ROWS == 0 and len(packed) >= BLOCK_ROWS and _works()


@lru_cache(maxsize=1)
def _can_fill() -> bool:
    from flexgen_h2o.kernels.compiled.int8 import is_there

    return is_there()


def _pieces(packed: torch.Tensor, columns: int) -> list[torch.Tensor]:
    """Rows that are blocked together; the last ones are fewer than BLOCK_ROWS where rows are no multiple of it."""
    most = min(BLOCK_CHUNK // columns, INT8_BLOCK_ROWS)
    step = max(BLOCK_ROWS, most // BLOCK_ROWS * BLOCK_ROWS)
    end = len(packed) // BLOCK_ROWS * BLOCK_ROWS
    pieces = [packed[first : min(first + step, end)] for first in range(0, end, step)]
    return pieces if end == len(packed) else [*pieces, packed[end:]]


def _block(packed: torch.Tensor, columns: int) -> BlockedInt8:
    """`packed` in place, and a tensor around it."""
    n, memory = len(packed), packed.view(-1)
    values = _in_blocks(packed[:, :columns])
    scales, sums = packed[:, columns:].contiguous().view(torch.int32).unbind(1)
    ends = torch.cat([-sums, scales])
    memory[: n * columns].copy_(values)
    memory[n * columns :].copy_(ends.view(torch.uint8))
    return _wrapped(memory, n, columns)


def _wrapped(memory: torch.Tensor, n: int, columns: int) -> BlockedInt8:
    """Blocked rows around their memory."""
    return BlockedInt8(opaque_tensor(memory, (columns, n), torch.int8, _layout(n, columns)), memory)


def _in_blocks(values: torch.Tensor) -> torch.Tensor:
    """The bytes of rows (n, columns) in the order of blocks."""
    words = values.view(torch.int32).unflatten(0, (-1, BLOCK_ROWS))
    in_blocks: torch.Tensor = words.transpose(1, 2).contiguous().view(-1).view(torch.uint8)
    return in_blocks


@lru_cache(maxsize=64)
def _layout(n: int, columns: int) -> torch.Tensor:
    """What oneDNN says of a matrix of this shape, serialised."""
    matrix = torch.ops.onednn.qlinear_prepack(torch.empty(n, columns, dtype=torch.int8), None)
    layout: torch.Tensor = torch.ops.mkldnn._get_mkldnn_serialized_md(matrix)
    return layout


@lru_cache(maxsize=1)
def _works() -> bool:
    """Are the private operations there and exact, and is the layout the one that is made here?"""
    if not torch.backends.mkldnn.is_available():
        return False
    n, columns = 2 * BLOCK_ROWS, 2048
    values = (torch.arange(n * columns, dtype=torch.int32) * 40503 % 255 - 127).to(torch.int8).view(n, columns)
    codes = values[:3].clone()
    codes[0], values[0], values[1], values[2, 1::2] = 127, 127, -127, -127  # sums beyond what float32 holds
    packed = torch.zeros(n, columns + INT8_ROW_BYTES, dtype=torch.uint8)
    packed[:, :columns] = values.view(torch.uint8)
    packed[:, -_WORD:] = values.sum(1, dtype=torch.int32).view(torch.uint8).view(n, _WORD)
    want = torch.empty(3, n, dtype=torch.int32)
    int8_products_reference(codes, values, want)
    try:
        theirs = torch.ops.onednn.qlinear_prepack(values, None)
        if torch.ops.mkldnn._nbytes(theirs) != n * (columns + _WORD):
            return False
        part = _block(packed, columns)
        same = ctypes.string_at(torch.ops.mkldnn.data_ptr(theirs), n * (columns + _WORD))
        if same != ctypes.string_at(part.memory.data_ptr(), len(same)):
            return False
        found = blocked_products(codes.view(torch.uint8) ^ ZERO, part)
    except (AttributeError, OSError, RuntimeError, TypeError, ValueError):  # gone, renamed, or not for this CPU
        return False
    return torch.equal(found, want.float())


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

    out: rows in order, (n, int8_row_bytes(columns)) uint8.
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
    ends = packed[:, WORD * SlotPacking(columns, BITS).value_words :].contiguous().view(torch.bfloat16).float()
    scale, least = ends.view(len(packed), -1, 2).unbind(dim=2)
    largest = torch.maximum(least.abs(), (least + _MOST * scale).abs()).amax(dim=1)
    return largest.masked_fill(largest < _NOTHING, 0)


def _fill_in_order(packed: torch.Tensor, out: torch.Tensor, columns: int) -> None:
    from flexgen_h2o.kernels.compiled import int8 as requantise_loops

    packing = SlotPacking(columns, BITS)
    job = requantise_loops.Job(
        packed.data_ptr(), packed.stride(0), WORD * packing.value_words, columns, out.data_ptr(), out.stride(0),
        len(out), 0, packing.group,
    )  # fmt: skip
    parallel_rows(lambda a, b: requantise_loops.in_order(job, a, b), len(packed), packed.shape[1] + columns)


def _fill_blocked(packed: torch.Tensor, first: int, part: BlockedInt8, columns: int) -> None:
    from flexgen_h2o.kernels.compiled import int8 as requantise_loops
    from flexgen_h2o.kernels.compiled.int8 import ROWS

    assert first % ROWS == 0 and len(packed) % ROWS == 0
    packing = SlotPacking(columns, BITS)
    job = requantise_loops.Job(
        packed.data_ptr(), packed.stride(0), WORD * packing.value_words, columns, part.memory.data_ptr(),
        int8_row_bytes(columns), len(part), first, packing.group,
    )  # fmt: skip
    strip_bytes = ROWS * (packed.shape[1] + columns)
    parallel_rows(lambda a, b: requantise_loops.blocked(job, a, b), len(packed) // ROWS, strip_bytes)
