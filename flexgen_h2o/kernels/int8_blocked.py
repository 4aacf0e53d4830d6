"""Rows in int8 in oneDNN's blocked layout, in which a CPU multiplies them faster than in order.

Some packed rows (packing.Packing.by_row) are blocked where they lie, in as many bytes: their values, 64 rows together
and of each 4 columns in turn; the negative sums of these, which the product takes off for inputs around 128; the
scales. Looked up, a row is gathered from its block.

The product and the layout are private to torch: both are tried once against products of int8_sums.py (instructions of
older CPUs cut sums, other CPUs have other layouts); where they are missing or differ, rows stay as they are.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import lru_cache

import torch

from flexgen_h2o.kernels.int8_sums import int8_products_reference
from flexgen_h2o.kernels.opaque import opaque_tensor
from flexgen_h2o.limits import BLOCK_CHUNK, BLOCK_ROWS, INT8_BLOCK_ROWS
from flexgen_h2o.packing import INT8_ROW_BYTES

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
    """Parts as `block_int8_rows` makes them, of rows that are yet to be filled (kernels/requantised.py)."""
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
    from flexgen_h2o.kernels.requantise_vectors import is_there

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
