"""Multiply in int8: weight rows in int8, inputs quantised row by row, sums in int32.

out = (input codes x weight codes) x input's scale x weight row's scale. Inputs are quantised once
for all matrices that they are multiplied with. The compiled loop of kernels/products.py multiplies
if it supports the CPU. Otherwise torch operations do the same, UNPACK_CHUNK elements at a time.
They have never run on a GPU.

Packed rows (packing.int8_row_bytes) may be blocked in place, in the same number of bytes, because
the loop is fastest with blocked rows. A blocked matrix has three regions. First the values:
BLOCK_ROWS rows together, 4 columns after 4 columns. Then the negative row sums, which the product
subtracts for inputs around 128. Then the scales. A look-up gathers a row from its block.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import ClassVar

import torch

from flexgen_h2o.core.packing import GROUP, INT8_ROW_BYTES, WORD, SlotPacking, int8_row_bytes
from flexgen_h2o.core.units import (
    BLOCK_ROWS,
    INT8_TILE,
    REQUANTISE_CHUNK,
    STRIP_ROWS,
    TOKEN_CHUNK,
    UNPACK_CHUNK,
)
from flexgen_h2o.kernels import products
from flexgen_h2o.kernels.linear import (
    Matrix,
    MatrixProduct,
    block_words,
    multiply_all,
    words_of_blocks,
)
from flexgen_h2o.kernels.ops import op, run_loop
from flexgen_h2o.kernels.packed import unpack_rows
from flexgen_h2o.kernels.workspace import (
    Workspace,
    cpu_has,
    is_compiled,
    parallel_rows,
    row_slices,
)

ZERO = 128  # added to the inputs' codes for the compiled loop, which reads them as uint8
_LEVELS = 127.0
_TINY = 1e-30  # largest magnitude that counts as 0, as in compiled/int8.py
_IN_CACHE = 8  # reading a row that is still in the cache costs about 1/8 of reading it from memory
# number of code products (at most 127 x 127) whose sum float32 holds exactly, in any order
_EXACT = 1024
# for the compiled loop: int32 holds the sum of so many products of at most 255 x 127
_MAX_COLUMNS = 2**16
# On a card torch._int_mm refuses 16 or fewer inputs, and a weight whose columns or rows are no
# multiple of 8.
_CARD_INPUTS = 32
_CARD_MULTIPLE = 8


@dataclass
class _Inputs:
    """Hold quantised input rows; made by `Int8Rows.inputs`."""

    codes: torch.Tensor  # (rows, columns) uint8, with `zero` added to each code
    scales: torch.Tensor  # (rows,) float32
    zero: int = 0  # 0 or ZERO

    def around(self, zero: int) -> torch.Tensor:
        """Return the codes with `zero` added, changed in place if they have the other zero."""
        if self.zero != zero:
            self.codes.bitwise_xor_(ZERO)
            self.zero = zero
        return self.codes

    def __getitem__(self, rows: slice) -> _Inputs:
        """Return some of the rows, in the same memory.

        After that, only the holder of the slice changes the zero of its rows, so no row may be
        taken twice.
        """
        return _Inputs(self.codes[rows], self.scales[rows], self.zero)


# names of the slices that a Workspace needs
BUFFERS = "int8 inputs", "int8 input scales", "int8 weight scales", "int8 sums", "int8 rows"


@dataclass(frozen=True)
class Int8Rows(Matrix):
    """Hold rows that are multiplied in int8."""

    # (n, row bytes) uint8 (packing.int8_row_bytes). In blocked layout the number of rows is a
    # multiple of BLOCK_ROWS, and the same bytes contain all values, then all sums, then all scales.
    packed: torch.Tensor
    columns: int  # columns per row
    workspace: Workspace  # buffers of products: "int8 ..." in MemoryPlanner.workspace
    blocked: bool = False  # only the compiled loop multiplies blocked rows
    codes: ClassVar[torch.dtype] = torch.uint8

    def __len__(self) -> int:
        return len(self.packed)

    def inputs(self, x: torch.Tensor) -> Iterator[tuple[slice, _Inputs]]:
        """Quantise x in the workspace, and yield slices of rows with their _Inputs.

        A slice has TOKEN_CHUNK rows, except the last one.
        """
        for start in range(0, len(x), TOKEN_CHUNK):
            rows = slice(start, min(start + TOKEN_CHUNK, len(x)))
            some = x[rows]
            codes = self.workspace.get("int8 inputs", *some.shape, dtype=torch.uint8)
            scales = self.workspace.get("int8 input scales", len(some), dtype=torch.float32)
            zero = ZERO if is_compiled(some) and products.supports(codes, some.shape[1]) else 0
            quantise_rows(some, codes, scales, zero)
            yield rows, _Inputs(codes, scales, zero)

    @property
    def scales(self) -> torch.Tensor:
        """The scales, (n,) float32; a view."""
        if self.blocked:
            return self.packed.view(-1)[-WORD * len(self) :].view(torch.float32)
        return scales_of(self.packed)

    def job(
        self, inputs: _Inputs, bias: torch.Tensor | None, out: torch.Tensor
    ) -> products.ProductJob | None:
        is_taken = is_compiled(out) and self.columns <= _MAX_COLUMNS
        if not (is_taken and products.supports(inputs.codes, self.columns)):
            return None
        packed = self.packed
        n = len(self)
        start = packed.data_ptr()
        if self.blocked:
            row_step = 0
            step = WORD
            zero = ZERO
            sums = start + n * self.columns
            scales = sums + n * WORD
        else:
            row_step = packed.stride(0)
            step = packed.stride(0)
            zero = -ZERO
            scales = start + packed.shape[1] - INT8_ROW_BYTES
            sums = scales + WORD
        return products.job_of(
            inputs.around(ZERO),
            bias,
            out,
            weight=start,
            row_step=row_step,
            rows=n,
            columns=self.columns,
            x_scales=inputs.scales.data_ptr(),
            scales=scales,
            scale_step=step,
            row_sums=sums,
            sum_step=step,
            zero=zero,
        )

    def multiply(
        self, inputs: _Inputs, bias: torch.Tensor | None, out: torch.Tensor, adds: bool
    ) -> None:
        assert not self.blocked
        codes = inputs.around(0).view(torch.int8)
        ws = self.workspace
        weight = codes_of(self.packed, self.columns)
        scales = scales_of(self.packed)
        step = INT8_TILE // len(codes) // _CARD_MULTIPLE * _CARD_MULTIPLE
        for first in range(0, len(self), step):
            rows = slice(first, min(first + step, len(self)))
            sums = ws.get("int8 sums", len(codes), rows.stop - first, dtype=torch.int32)
            int8_products(codes, weight[rows], sums)
            # Copied to be contiguous: otherwise the pass over the sums would stride through the
            # matrix for each of its rows.
            column_scales = ws.get("int8 weight scales", rows.stop - first, dtype=torch.float32)
            column_scales.copy_(scales[rows])
            rescale(
                sums,
                inputs.scales,
                column_scales,
                None if bias is None else bias[rows],
                out[:, rows],
                adds,
            )

    def look_up(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        for some in row_slices(len(ids), self.columns):
            if self.blocked:
                values = self.packed.view(-1)[: len(self) * self.columns]
                codes = words_of_blocks(values, self.columns // WORD, ids[some]).view(torch.int8)
            else:
                codes = codes_of(self.packed.index_select(0, ids[some]), self.columns)
            out[some] = codes.float().mul_(self.scales[ids[some]].unsqueeze(1))


@dataclass(frozen=True)
class RequantisedRows(Int8Rows):
    """Hold rows in 4 bits that are multiplied as the int8 rows of `requantise_rows`.

    packed: (n, packed row bytes) uint8 (kernels/packed.py). The compiled loop converts a panel at a
    time in the caches. Otherwise some rows at a time are converted in the workspace ("int8 rows").
    """

    def job(
        self, inputs: _Inputs, bias: torch.Tensor | None, out: torch.Tensor
    ) -> products.ProductJob | None:
        whole = (
            self.columns % GROUP == 0
            and len(self) % STRIP_ROWS == 0
            and self.columns <= _MAX_COLUMNS
        )
        if not (whole and is_compiled(out) and products.supports(inputs.codes, self.columns)):
            return None
        ends = WORD * SlotPacking(self.columns, 4).value_words
        return products.job_of(
            inputs.around(ZERO),
            bias,
            out,
            weight=self.packed.data_ptr(),
            row_step=self.packed.stride(0),
            rows=len(self),
            columns=self.columns,
            x_scales=inputs.scales.data_ptr(),
            zero=ZERO,
            ends=ends,
        )

    def multiply(
        self, inputs: _Inputs, bias: torch.Tensor | None, out: torch.Tensor, adds: bool
    ) -> None:
        row_bytes = int8_row_bytes(self.columns)
        for rows in row_slices(len(self), self.columns, _CARD_MULTIPLE, REQUANTISE_CHUNK):
            packed = self.packed[rows]
            some = None if bias is None else bias[rows]
            memory = self.workspace.get("int8 rows", len(packed), row_bytes, dtype=torch.uint8)
            weight = self._in_int8(packed, memory)
            multiply_all([MatrixProduct(weight, inputs, some, out[:, rows], adds)])

    def look_up(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        for some in row_slices(len(ids), self.columns):
            packed = self.packed.index_select(0, ids[some])
            memory = packed.new_empty(len(packed), int8_row_bytes(self.columns))
            self._in_int8(packed, memory).look_up(
                torch.arange(len(packed), device=packed.device), out[some]
            )

    def _in_int8(self, packed: torch.Tensor, memory: torch.Tensor) -> Int8Rows:
        requantise_rows(packed, memory, self.columns)
        return Int8Rows(memory, self.columns, self.workspace)


def pack_int8_rows(rows: torch.Tensor) -> torch.Tensor:
    """Pack rows (n, columns) of any float dtype, on the host, as (n, row bytes) uint8.

    |code x scale - value| <= scale / 2, except for the rounding of float32. Raises ValueError if a
    value is not finite.
    """
    values = rows.float().contiguous()
    if not bool(torch.isfinite(values).all()):
        raise ValueError("holds values that are not finite")
    n, columns = values.shape
    packed = torch.empty(n, int8_row_bytes(columns), dtype=torch.uint8, device="cpu")
    fill_packed(values, packed)
    return packed


def fill_packed(values: torch.Tensor, packed: torch.Tensor) -> None:
    """Quantise values (n, columns) float32 to rows in order, (n, row bytes) uint8."""
    packed.zero_()
    codes = codes_of(packed, values.shape[1])
    quantise_rows(values, codes, scales_of(packed))
    packed[:, -INT8_ROW_BYTES:].view(torch.int32)[:, 1] = codes.sum(1, dtype=torch.int32)


def codes_of(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the codes of packed rows, (n, columns) int8; a view."""
    return packed[:, :columns].view(torch.int8)


def scales_of(packed: torch.Tensor) -> torch.Tensor:
    """Return the scales of packed rows, (n,) float32; a view."""
    return packed[:, -INT8_ROW_BYTES:].view(torch.float32)[:, 0]


# ---- numbers to codes, and sums to numbers


@op
def quantise_rows(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, zero: int = 0
) -> None:
    """Quantise each row of x (n, columns) to codes (int8 or uint8) and one scale.

    The scale is the row's largest magnitude / 127, and 0 for a row of zeros. zero: 0, or ZERO,
    which is added to each code. Rows need not be adjacent, but the values of a row must be. A value
    that is not finite makes the scale infinite or NaN. With torch operations, a value exactly
    between two codes may get the other code.
    """
    for some in row_slices(*x.shape):
        values = x[some].float()
        largest = values.abs().amax(dim=1)
        largest = largest.masked_fill(largest < _TINY, 0)
        steps = torch.where(largest == 0, 0.0, _LEVELS / largest)
        codes.view(torch.int8)[some] = values.mul_(steps.unsqueeze(1)).round_().to(torch.int8)
        scales[some] = largest / _LEVELS
    if zero:
        codes.view(torch.uint8).bitwise_xor_(zero)


@quantise_rows.loop
def _quantise_loop(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, zero: int = 0
) -> None:

    n, columns = x.shape
    assert x.stride(1) == codes.stride(1) == 1
    numbers = (
        x.data_ptr(),
        x.stride(0) * x.itemsize,
        columns,
        codes.data_ptr(),
        codes.stride(0),
        scales.data_ptr(),
        4 * scales.stride(0),
        zero,
    )
    row_bytes = columns * (x.itemsize + 1) // _IN_CACHE
    run_loop("int8.quantise", x.dtype, n, row_bytes, *numbers)


def rescale(
    sums: torch.Tensor,
    row_scales: torch.Tensor,
    column_scales: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    adds: bool,
) -> None:
    """Set out = sums x row scale x column scale + bias, computed in float32.

    adds: add to what `out` contains. sums: (rows, columns) int32, contiguous; scales: float32;
    bias: (columns,) and out: (rows, columns), of one dtype.
    """
    for some in row_slices(*sums.shape):
        values = sums[some].float().mul_(row_scales[some].unsqueeze(1)).mul_(column_scales)
        if bias is not None:
            values.add_(bias)
        out[some] = values.add_(out[some]) if adds else values


# ---- products of codes, as integers


def int8_products(codes: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Set out = codes W^T.

    codes: (rows, columns), weight: (n, columns), both int8; out: (rows, n) int32, contiguous.
    """
    on_card = codes.device.type != "cpu"
    refused = on_card and (codes.shape[1] % _CARD_MULTIPLE or len(weight) % _CARD_MULTIPLE)
    if refused or not _int_mm_works(codes.device):
        int8_products_in_fp32(codes, weight, out)
    else:
        _int_mm(codes, weight, out)


def _int_mm(codes: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Compute `int8_products` with torch._int_mm.

    On a card, too few inputs are padded, and then some rows of the weight are multiplied at a time.
    """
    more = 0 if codes.device.type == "cpu" else _CARD_INPUTS - len(codes)
    if more <= 0:
        torch._int_mm(codes, weight.t(), out=out)
        return
    filled = torch.nn.functional.pad(codes, (0, 0, 0, more))
    for some in row_slices(len(weight), _CARD_INPUTS, _CARD_MULTIPLE, INT8_TILE):
        sums = out.new_empty(_CARD_INPUTS, some.stop - some.start)
        torch._int_mm(filled, weight[some].t(), out=sums)
        out[:, some] = sums[: len(codes)]


def int8_products_in_fp32(codes: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Compute `int8_products` as exact products in float32.

    Some columns and some rows of the weight are multiplied at a time.
    """
    out.zero_()
    step = UNPACK_CHUNK // _EXACT
    for k in range(0, codes.shape[1], _EXACT):
        inputs = codes[:, k : k + _EXACT].float()
        for a in range(0, len(weight), step):
            out[:, a : a + step] += (inputs @ weight[a : a + step, k : k + _EXACT].float().t()).to(
                torch.int32
            )


@lru_cache
def _int_mm_works(where: torch.device) -> bool:
    """Return whether torch._int_mm exists and is exact here.

    It is private, and instructions of older CPUs saturate sums of large products.
    """
    codes, weight = (
        torch.full((n, int8_row_bytes(256)), 127, dtype=torch.int8, device="cpu") for n in (3, 32)
    )
    codes[0, ::2] = -127
    weight[1] = -127
    weight[2, 1::2] = -127
    # packed rows are not adjacent, so the test's are not either
    codes = codes[:, :256].to(where).contiguous()
    weight = weight.to(where)[:, :256]
    out, want = (torch.empty(3, 32, dtype=torch.int32, device=where) for _ in range(2))
    try:
        _int_mm(codes, weight, out)
    except (AttributeError, RuntimeError, TypeError):
        return False
    int8_products_in_fp32(codes, weight, want)
    return torch.equal(out, want)


# ---- blocked rows


def block_int8_rows(
    packed: torch.Tensor, columns: int, workspace: Workspace
) -> tuple[Int8Rows, ...]:
    """Block packed rows (n, row bytes), uint8, in place.

    Returns parts in order, which share the memory of `packed`. Rows that cannot be blocked stay as
    they are. These are all rows if the device, number of columns or CPU is not supported, and rows
    beyond a multiple of BLOCK_ROWS.
    """
    parts = blank_int8_rows(packed, columns, workspace)
    for part in parts:
        if part.blocked:
            memory = part.packed
            scales, sums = memory[:, columns:].contiguous().view(torch.int32).unbind(1)
            ends = torch.cat([-sums, scales]).view(torch.uint8)
            block_words(memory[:, :columns].view(torch.int32), memory.view(-1))
            memory.view(-1)[len(part) * columns :].copy_(ends)
    return parts


def blank_int8_rows(
    packed: torch.Tensor, columns: int, workspace: Workspace
) -> tuple[Int8Rows, ...]:
    """Return parts as `block_int8_rows` does, for rows that are still to be filled."""
    end = len(packed) // BLOCK_ROWS * BLOCK_ROWS
    right = packed.is_contiguous() and columns % BLOCK_ROWS == 0 and columns <= _MAX_COLUMNS
    if not (right and products.supports(packed, columns)):
        end = 0
    parts = (
        Int8Rows(packed[:end], columns, workspace, blocked=True),
        Int8Rows(packed[end:], columns, workspace),
    )
    return tuple(part for part in parts if len(part))


# ---- packed rows of 4 bits (kernels/packed.py) to int8 rows


@op
def requantise_rows(packed: torch.Tensor, out: torch.Tensor, columns: int) -> None:
    """Fill int8 rows in order from packed rows of 4 bits.

    packed: (n, packed row bytes) uint8; out: (n, int8_row_bytes(columns)) uint8.

    A row's scale is the largest magnitude that its groups can hold, |least| or |least + 15 x
    scale|, divided by 127. It follows from the scales and least values of the groups, so the values
    are read only once. int8 = round(value x 127 / largest). In addition to the error of 4 bits, a
    value is off by at most half of a scale. All versions give the same bits. Torch operations
    convert UNPACK_CHUNK values at a time.
    """
    for some in row_slices(len(packed), columns):
        here = packed[some]
        rows = out[some]
        values = unpack_rows.torch(
            here, 4, torch.empty(len(here), columns, device=packed.device, dtype=torch.float32)
        )
        ends = (
            here[:, WORD * SlotPacking(columns, 4).value_words :]
            .contiguous()
            .view(torch.bfloat16)
            .float()
        )
        scale, least = ends.view(len(here), -1, 2).unbind(dim=2)
        largest = torch.maximum(least.abs(), (least + 15 * scale).abs()).amax(dim=1)
        largest = largest.masked_fill(largest < _TINY, 0)
        # a Python number divided by a tensor would be rounded twice
        steps = torch.full_like(largest, _LEVELS) / largest
        codes = values.mul_(steps.masked_fill(largest == 0, 0).unsqueeze(1)).round_().to(torch.int8)
        rows.zero_()
        rows[:, :columns] = codes.view(torch.uint8)
        ends = torch.stack(
            [(largest * (1 / _LEVELS)).view(torch.int32), codes.sum(1, dtype=torch.int32)], dim=1
        )
        rows[:, -INT8_ROW_BYTES:] = ends.view(torch.uint8)


@requantise_rows.loop_if(
    lambda packed, out, columns: packed.is_cpu and columns % GROUP == 0 and cpu_has("avx2")
)
def _requantise_loop(packed: torch.Tensor, out: torch.Tensor, columns: int) -> None:
    from flexgen_h2o.kernels.compiled import int8 as loops

    packing = SlotPacking(columns, 4)
    numbers = (
        packed.data_ptr(),
        packed.stride(0),
        WORD * packing.value_words,
        columns,
        out.data_ptr(),
        out.stride(0),
    )
    parallel_rows(partial(loops.in_order, *numbers), len(packed), packed.shape[1] + columns)
