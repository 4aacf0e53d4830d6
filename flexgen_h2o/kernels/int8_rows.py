"""Products in int8: rows of a weight matrix held in int8, inputs quantised row by row, sums in int32.

out = (input codes x weight codes) x input's scale x weight row's scale. Where nothing is compiled for the device or
the dtype, torch operations do the same, UNPACK_CHUNK elements at a time; a GPU has never run them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch

from flexgen_h2o.kernels.threads import share_rows
from flexgen_h2o.kernels.workspace import Workspace
from flexgen_h2o.limits import INT8_TILE, TOKEN_CHUNK, UNPACK_CHUNK
from flexgen_h2o.packing import INT8, SCALE_BYTES

_COMPILED = (torch.float32, torch.bfloat16)
_LEVELS = 127.0
_NOTHING = 1e-30  # as in int8_loops
_EXACT = 1024  # products of codes (at most 127 x 127) whose sum float32 holds exactly, in any order


@dataclass(frozen=True)
class Int8Rows:
    """Packed rows of a matrix (packing.Packing.by_row). packed: (n, row bytes) uint8; columns: values of a row.

    workspace: where products find room ("int8 ..." of planner/int8_sizes.py).
    """

    packed: torch.Tensor
    columns: int
    workspace: Workspace

    def __len__(self) -> int:
        return len(self.packed)

    @property
    def codes(self) -> torch.Tensor:
        """(n, columns) int8; a view."""
        return self.packed[:, : self.columns].view(torch.int8)

    @property
    def scales(self) -> torch.Tensor:
        """(n,) float32; a view."""
        return self.packed[:, -SCALE_BYTES:].view(torch.float32)[:, 0]


def pack_int8_rows(rows: torch.Tensor) -> torch.Tensor:
    """rows: (n, columns), any float dtype, on the host. Returns (n, row bytes) uint8.

    |code x scale - value| <= scale / 2, but for the rounding of float32. Raises ValueError where a value is not finite.
    """
    values = rows.float().contiguous()
    if not bool(torch.isfinite(values).all()):
        raise ValueError("holds values that are not finite")
    n, columns = values.shape
    packed = torch.zeros(n, INT8.row_bytes(columns), dtype=torch.uint8)
    quantise_rows(values, packed[:, :columns].view(torch.int8), packed[:, -SCALE_BYTES:].view(torch.float32)[:, 0])
    return packed


def multiply(x: torch.Tensor, part: Int8Rows, bias: torch.Tensor | None, out: torch.Tensor, adds: bool = False) -> None:
    """out = x W^T + bias; adds: to what is there. x: (rows, columns), bias: (n,), out: (rows, n). Rows may be apart."""
    for start in range(0, len(x), TOKEN_CHUNK):
        end = min(start + TOKEN_CHUNK, len(x))
        rows, ws = end - start, part.workspace
        codes = ws.get("int8 inputs", rows, part.columns, dtype=torch.int8)
        scales = ws.get("int8 input scales", rows, dtype=torch.float32)
        quantise_rows(x[start:end], codes, scales)
        step = INT8_TILE // rows
        for first in range(0, len(part), step):
            last = min(first + step, len(part))
            sums = ws.get("int8 sums", rows, last - first, dtype=torch.int32)
            int8_products(codes, part.codes[first:last], sums)
            # In a row of their own: the sums' pass would jump from row to row of the matrix for each of its rows.
            column_scales = ws.get("int8 weight scales", last - first, dtype=torch.float32)
            column_scales.copy_(part.scales[first:last])
            some = None if bias is None else bias[first:last]
            rescale(sums, scales, column_scales, some, out[start:end, first:last], adds)


def look_up(ids: torch.Tensor, part: Int8Rows, out: torch.Tensor) -> None:
    """Rows of the matrix by `ids` (int64, (n,)) into out (n, columns)."""
    for a, b in _slices(len(ids), part.columns):
        found = Int8Rows(part.packed.index_select(0, ids[a:b]), part.columns, part.workspace)
        out[a:b] = found.codes.float().mul_(found.scales.unsqueeze(1))


def quantise_rows(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
    """Each row of x (n, columns) into int8 codes and one scale, its largest magnitude / 127; 0 for a row of zeros.

    Rows may lie apart, their values may not. A value that is not finite makes the scale infinite or NaN.
    """
    if not _is_compiled(x):
        quantise_rows_reference(x, codes, scales)
        return
    from flexgen_h2o.kernels import int8_loops

    n, columns = x.shape
    assert x.stride(1) == codes.stride(1) == 1
    job = int8_loops.QuantiseJob(
        x.data_ptr(), x.stride(0) * x.itemsize, columns, codes.data_ptr(), codes.stride(0), scales.data_ptr(),
        4 * scales.stride(0),
    )  # fmt: skip
    element = _element(x)
    share_rows(lambda first, end: int8_loops.quantise(element, job, first, end), n, columns * (x.itemsize + 1))


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

    sums: (rows, columns) int32, contiguous; scales: float32; bias: (columns,) and out (rows, columns) of one dtype.
    """
    if not _is_compiled(out):
        rescale_reference(sums, row_scales, column_scales, bias, out, adds)
        return
    from flexgen_h2o.kernels import int8_loops

    rows, columns = sums.shape
    assert out.stride(1) == 1 and (bias is None or (bias.dtype == out.dtype and bias.is_contiguous()))
    job = int8_loops.RescaleJob(
        sums.data_ptr(), columns, row_scales.data_ptr(), column_scales.data_ptr(),
        0 if bias is None else bias.data_ptr(), out.data_ptr(), out.stride(0) * out.itemsize, adds,
    )  # fmt: skip
    element = _element(out)
    share_rows(lambda first, end: int8_loops.rescale(element, job, first, end), rows, columns * (4 + out.itemsize))


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


def int8_products(codes: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out = codes W^T. codes: (rows, columns), weight: (n, columns), both int8; out: (rows, n) int32, contiguous."""
    if codes.device.type == "cpu" and _int_mm_works():
        torch._int_mm(codes, weight.t(), out=out)
    else:
        int8_products_reference(codes, weight, out)


def int8_products_reference(codes: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """`int8_products` as products of float32, exact: some columns, and some rows of the weight, at a time."""
    out.zero_()
    for k in range(0, codes.shape[1], _EXACT):
        inputs = codes[:, k : k + _EXACT].float()
        for a, b in _slices(len(weight), _EXACT):
            out[:, a:b] += (inputs @ weight[a:b, k : k + _EXACT].float().t()).to(torch.int32)


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


def _is_compiled(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in _COMPILED


def _element(x: torch.Tensor) -> object:
    """The number whose type tells the loops what elements are."""
    import numpy as np

    return np.float32(0) if x.dtype == torch.float32 else np.uint16(0)


def _slices(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """[first, end) of so many rows that their elements are at most UNPACK_CHUNK."""
    step = max(1, UNPACK_CHUNK // columns)
    for first in range(0, rows, step):
        yield first, min(first + step, rows)
