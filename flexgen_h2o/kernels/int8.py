"""Products in int8: rows of a weight matrix held in int8, inputs quantised row by row, sums in int32.

out = (input codes x weight codes) x input's scale x weight row's scale. Inputs are quantised once for all matrices that
they are multiplied with; for blocked rows (int8_blocked.py) they are uint8 around 128. Where nothing is compiled for
the device or the dtype, torch operations do the same, UNPACK_CHUNK elements at a time; a GPU has never run them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from flexgen_h2o.core.packing import INT8_ROW_BYTES, int8_row_bytes
from flexgen_h2o.core.units import INT8_TILE, TOKEN_CHUNK, UNPACK_CHUNK
from flexgen_h2o.kernels.int8_blocked import ZERO, BlockedInt8, blocked_products, int8_products
from flexgen_h2o.kernels.linear import RowPart
from flexgen_h2o.kernels.workspace import Workspace, parallel_rows

_COMPILED = (torch.float32, torch.bfloat16)
_LEVELS = 127.0
_NOTHING = 1e-30  # as in int8_loops
_IN_CACHE = 8  # times faster than from memory do rows come that were written just before, or are read just after


@dataclass
class _Inputs:
    """Quantised rows. codes: (rows, columns) int8, or uint8 with ZERO added to each; scales: (rows,) float32."""

    codes: torch.Tensor
    scales: torch.Tensor
    is_raised: bool

    def around_zero(self) -> torch.Tensor:
        return self._raised(False).view(torch.int8)

    def around_128(self) -> torch.Tensor:
        return self._raised(True)

    def _raised(self, wanted: bool) -> torch.Tensor:
        if self.is_raised != wanted:
            self.codes.bitwise_xor_(ZERO)
            self.is_raised = wanted
        return self.codes


@dataclass(frozen=True)
class Int8Rows(RowPart):
    """Some rows of a matrix. packed: (n, row bytes) uint8 (packing.int8_row_bytes), or blocked; columns: of a row.

    workspace: where products find room ("int8 ..." of engine/workspace_sizes.py).
    """

    packed: torch.Tensor | BlockedInt8
    columns: int
    workspace: Workspace

    def __len__(self) -> int:
        return len(self.packed)

    def inputs(self, x: torch.Tensor) -> Iterator[tuple[slice, _Inputs]]:
        """Quantised in the workspace, TOKEN_CHUNK rows at a time."""
        for start in range(0, len(x), TOKEN_CHUNK):
            rows = slice(start, min(start + TOKEN_CHUNK, len(x)))
            some = x[rows]
            codes = self.workspace.get("int8 inputs", *some.shape, dtype=torch.uint8)
            scales = self.workspace.get("int8 input scales", len(some), dtype=torch.float32)
            quantise_rows(some, codes.view(torch.int8), scales)
            yield rows, _Inputs(codes, scales, is_raised=False)

    def multiply(self, inputs: _Inputs, bias: torch.Tensor | None, out: torch.Tensor, adds: bool) -> None:
        if isinstance(self.packed, BlockedInt8):
            _multiply_blocked(inputs, self.packed, bias, out, adds)
            return
        codes, ws = inputs.around_zero(), self.workspace
        weight, scales = codes_of(self.packed, self.columns), scales_of(self.packed)
        step = INT8_TILE // len(codes)
        for first in range(0, len(self), step):
            rows = slice(first, min(first + step, len(self)))
            sums = ws.get("int8 sums", len(codes), rows.stop - first, dtype=torch.int32)
            int8_products(codes, weight[rows], sums)
            # In a row of their own: the sums' pass would jump from row to row of the matrix for each of its rows.
            column_scales = ws.get("int8 weight scales", rows.stop - first, dtype=torch.float32)
            column_scales.copy_(scales[rows])
            rescale(sums, inputs.scales, column_scales, None if bias is None else bias[rows], out[:, rows], adds)

    def look_up(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        for a, b in _slices(len(ids), self.columns):
            if isinstance(self.packed, BlockedInt8):
                codes, scales = self.packed.rows_at(ids[a:b]), self.packed.scales[ids[a:b]]
            else:
                found = self.packed.index_select(0, ids[a:b])
                codes, scales = codes_of(found, self.columns), scales_of(found)
            out[a:b] = codes.float().mul_(scales.unsqueeze(1))


def _multiply_blocked(
    inputs: _Inputs, weight: BlockedInt8, bias: torch.Tensor | None, out: torch.Tensor, adds: bool
) -> None:
    codes, step = inputs.around_128(), max(1, INT8_TILE // len(weight))
    for first in range(0, len(codes), step):
        rows = slice(first, first + step)
        # No name for the sums: they are freed before the next are made, in the memory that they had.
        rescale(blocked_products(codes[rows], weight), inputs.scales[rows], weight.scales, bias, out[rows], adds)


def pack_int8_rows(rows: torch.Tensor) -> torch.Tensor:
    """rows: (n, columns), any float dtype, on the host. Returns (n, row bytes) uint8.

    |code x scale - value| <= scale / 2, but for the rounding of float32. Raises ValueError where a value is not finite.
    """
    values = rows.float().contiguous()
    if not bool(torch.isfinite(values).all()):
        raise ValueError("holds values that are not finite")
    n, columns = values.shape
    packed = torch.zeros(n, int8_row_bytes(columns), dtype=torch.uint8)
    codes = codes_of(packed, columns)
    quantise_rows(values, codes, scales_of(packed))
    packed[:, -INT8_ROW_BYTES:].view(torch.int32)[:, 1] = codes.sum(1, dtype=torch.int32)
    return packed


def codes_of(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """(n, columns) int8 of packed rows; a view."""
    return packed[:, :columns].view(torch.int8)


def scales_of(packed: torch.Tensor) -> torch.Tensor:
    """(n,) float32 of packed rows; a view."""
    return packed[:, -INT8_ROW_BYTES:].view(torch.float32)[:, 0]


def quantise_rows(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Each row of x (n, columns) into int8 codes and one scale, its largest magnitude / 127; 0 for a row of zeros.

    Rows may lie apart, their values may not. A value that is not finite makes the scale infinite or NaN.
    """
    if not _is_compiled(x):
        quantise_rows_reference(x, codes, scales)
        return
    from flexgen_h2o.kernels.compiled import int8 as int8_loops

    n, columns = x.shape
    assert x.stride(1) == codes.stride(1) == 1
    job = int8_loops.QuantiseJob(
        x.data_ptr(), x.stride(0) * x.itemsize, columns, codes.data_ptr(), codes.stride(0), scales.data_ptr(),
        4 * scales.stride(0),
    )  # fmt: skip
    element = _element(x)
    parallel_rows(
        lambda first, end: int8_loops.quantise(element, job, first, end), n, columns * (x.itemsize + 1) // _IN_CACHE
    )


def quantise_rows_reference(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """`quantise_rows` in torch operations; a value in the middle between two codes may get the other one."""
    for a, b in _slices(*x.shape):
        values = x[a:b].float()
        largest = values.abs().amax(dim=1)
        largest = largest.masked_fill(largest < _NOTHING, 0)
        steps = torch.where(largest == 0, 0.0, _LEVELS / largest)
        codes[a:b] = values.mul_(steps.unsqueeze(1)).round_().to(torch.int8)
        scales[a:b] = largest / _LEVELS


def rescale(
    sums: torch.Tensor, row_scales: torch.Tensor, column_scales: torch.Tensor, bias: torch.Tensor | None,
    out: torch.Tensor, adds: bool,
) -> None:  # fmt: skip
    """out = sums x row scale x column scale + bias, worked out in float32; adds: to what is there.

    sums: (rows, columns) int32 or float32, contiguous; scales: float32; bias: (columns,) and out (rows, columns) of one
    dtype.
    """
    if not _is_compiled(out):
        rescale_reference(sums, row_scales, column_scales, bias, out, adds)
        return
    from flexgen_h2o.kernels.compiled import int8 as int8_loops

    rows, columns = sums.shape
    assert out.stride(1) == 1 and (bias is None or (bias.dtype == out.dtype and bias.is_contiguous()))
    job = int8_loops.RescaleJob(
        sums.data_ptr(), columns, row_scales.data_ptr(), column_scales.data_ptr(),
        0 if bias is None else bias.data_ptr(), out.data_ptr(), out.stride(0) * out.itemsize, adds,
    )  # fmt: skip
    element, counted = _element(out), _element(sums)
    row_bytes = columns * (sums.itemsize + out.itemsize) // _IN_CACHE
    parallel_rows(lambda first, end: int8_loops.rescale(element, counted, job, first, end), rows, row_bytes)


def rescale_reference(
    sums: torch.Tensor, row_scales: torch.Tensor, column_scales: torch.Tensor, bias: torch.Tensor | None,
    out: torch.Tensor, adds: bool,
) -> None:  # fmt: skip
    """`rescale` in torch operations."""
    for a, b in _slices(*sums.shape):
        values = sums[a:b].float().mul_(row_scales[a:b].unsqueeze(1)).mul_(column_scales)
        if bias is not None:
            values.add_(bias)
        out[a:b] = values.add_(out[a:b]) if adds else values


def _is_compiled(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in _COMPILED


def _element(x: torch.Tensor) -> object:
    """The number whose type tells the loops what elements are."""
    import numpy as np

    return {torch.float32: np.float32(0), torch.int32: np.int32(0), torch.bfloat16: np.uint16(0)}[x.dtype]


def _slices(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """[first, end) of so many rows that their elements are at most UNPACK_CHUNK."""
    step = max(1, UNPACK_CHUNK // columns)
    for first in range(0, rows, step):
        yield first, min(first + step, rows)
