"""Multiply by weights in few bits, and by the weights of experts on a card.

On a CPU, the compiled loop decodes a panel at a time in its caches. If a matrix were decoded first,
it would be written to memory and read again.

On a card with at most FEW_ROWS input rows, a product takes as long as reading its weight from
memory. Codes are a quarter of what they are decoded to, so they are decoded in registers, in one
launch. With more input rows, the weight is decoded first, and every micro-batch reads it. Products
of experts with few rows each are one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch

from flexgen_h2o.core.packing import GROUP, SlotPacking
from flexgen_h2o.core.units import FEW_ROWS
from flexgen_h2o.kernels import products, triton
from flexgen_h2o.kernels.linear import DenseRows, Matrix, MatrixProduct
from flexgen_h2o.kernels.ops import op
from flexgen_h2o.kernels.packed import unpack_rows
from flexgen_h2o.kernels.quantised import MX_BLOCK, unpack_mxfp4
from flexgen_h2o.kernels.workspace import cpu_has, is_compiled, upload

ROWS_AT_A_TIME = 32  # rows of the weight per program
_COLUMNS_AT_A_TIME = 128  # columns of the weight that a program multiplies at a time


@dataclass(frozen=True)
class Codes:
    """Hold the rows of a matrix as codes; made by `groupwise_codes`, `mxfp4_codes` or `_few_of`."""

    # (n, W) int32; a word holds the codes of adjacent columns, from the lowest bits on. With bits =
    # 0 the columns themselves, in a float dtype.
    words: torch.Tensor
    # (n, groups), shared by `group` columns: a scale and a least value in an int32, or in MXFP4 an
    # exponent in a uint8.
    group_params: torch.Tensor
    columns: int  # columns per row
    group: int  # columns per group
    bits: int  # bits per code; 0: `words` are the columns themselves
    # fills (n, columns) of any float dtype, and returns it
    decode: Callable[[torch.Tensor], torch.Tensor]

    @property
    def is_mx(self) -> bool:
        return self.group_params.dtype == torch.uint8


def groupwise_codes(packed: torch.Tensor, bits: int, columns: int) -> Codes:
    """Return the Codes of packed rows (n, row bytes) uint8.

    packed: made by `packed.pack_rows` in 4 or 8 bits.
    """
    packing = SlotPacking(columns, bits)
    words = packed.view(torch.int32)
    params = words[:, packing.value_words :]
    return Codes(words, params, columns, packing.group, bits, partial(unpack_rows, packed, bits))


def mxfp4_codes(blocks: torch.Tensor, scales: torch.Tensor) -> Codes:
    """Return the Codes of an MXFP4 matrix; blocks and scales as in `quantised.unpack_mxfp4`."""
    decode = partial(unpack_mxfp4, blocks, scales)
    return Codes(
        blocks.flatten(1).view(torch.int32), scales, scales.shape[1] * MX_BLOCK, MX_BLOCK, 4, decode
    )


@op
def multiply_coded(
    x: torch.Tensor, codes: Codes, bias: torch.Tensor | None, out: torch.Tensor, adds: bool = False
) -> None:
    """Set out = x W^T + bias in one launch on a card; `adds`: add to what `out` contains.

    Torch operations decode the weight first.

    x: (at most FEW_ROWS, columns), out: (rows, n), both of one dtype; their rows need not be
    adjacent. bias: (n,). Weights are rounded to that dtype. Sums are in fp32 and rounded once.
    """
    weight = codes.decode(x.new_empty(len(codes.words), codes.columns))
    DenseRows(weight).multiply(x, bias, out, adds)


@multiply_coded.kernel
def _multiply_coded_kernel(
    x: torch.Tensor, codes: Codes, bias: torch.Tensor | None, out: torch.Tensor, adds: bool = False
) -> None:
    tokens, columns = x.shape
    rows = len(codes.words)
    assert tokens <= FEW_ROWS and columns == codes.columns and out.shape == (tokens, rows)
    assert (
        x.stride(1) == out.stride(1) == codes.words.stride(1) == codes.group_params.stride(1) == 1
    )
    _launch(_Few(x, codes, bias, out, adds))


def multiply_together(found: Sequence[MatrixProduct]) -> list[MatrixProduct]:
    """Run products with few input rows in one launch on a card, for each shape and kind of weights.

    Few are at most FEW_ROWS per product. Weights that are not in few bits are included. Returns the
    other products, and those that would be alone in a launch.
    """
    alike = dict[Hashable, list[tuple[MatrixProduct, _Few]]]()
    others = list[MatrixProduct]()
    for product in found:
        few = _few_of(product)
        if few is None:
            others.append(product)
        else:
            alike.setdefault(few.kind, []).append((product, few))
    for some in alike.values():
        mine, fews = zip(*some, strict=True)
        if len(some) == 1:
            others += mine
        else:
            _multiply_each(fews)
    return others


def _few_of(product: MatrixProduct) -> _Few | None:
    """Return the product for `multiply_together`, or None if that does not support it.

    It supports at most FEW_ROWS input rows, and CodedRows or DenseRows as the part.
    """
    part, inputs, bias, out, adds = product
    if len(inputs) > FEW_ROWS:
        return None
    if isinstance(part, CodedRows):
        return _Few(inputs, part.kept, bias, out, adds)
    if isinstance(part, DenseRows) and not part.blocked and part.rows.stride(1) == 1:
        rows = part.rows
        columns = rows.shape[1]
        whole = Codes(rows, rows, columns, columns, 0, lambda out: out.copy_(rows))
        return _Few(inputs, whole, bias, out, adds)
    return None


class _Few(NamedTuple):
    """Hold the arguments of one product, as in `multiply_coded`."""

    x: torch.Tensor
    codes: Codes
    bias: torch.Tensor | None
    out: torch.Tensor
    adds: bool

    @property
    def kind(self) -> Hashable:
        """The properties that products must share to run in one launch."""
        codes = self.codes
        bias = self.bias
        form = codes.words.shape, codes.columns, codes.group, codes.bits, codes.is_mx
        return *form, *self.strides, self.x.dtype, bias is None, self.adds

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (
            self.x,
            self.codes.words,
            self.codes.group_params,
            self.x if self.bias is None else self.bias,
            self.out,
        )

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(
            t.stride(0) for t in (self.x, self.codes.words, self.codes.group_params, self.out)
        )

    def places(self, first: _Few) -> list[int]:
        """Return for each tensor how many numbers after the same tensor of `first` it begins."""
        pairs = zip(self.tensors, first.tensors, strict=True)
        return [(own.data_ptr() - its.data_ptr()) // its.itemsize for own, its in pairs]


@op
def _multiply_each(fews: Sequence[_Few]) -> None:
    """Compute `multiply_coded` for several products of one kind, in one launch on a card."""
    for few in fews:
        multiply_coded.torch(*few)


@_multiply_each.kernel_if(lambda fews: triton.supports(fews[0].x))
def _multiply_each_kernel(fews: Sequence[_Few]) -> None:
    _launch(fews[0], fews)


def _launch(first: _Few, all_of: Sequence[_Few] = ()) -> None:
    """Launch one product, or several of one kind.

    first: the product whose tensors are the kernel's arguments. all_of: the products of the launch,
    including `first`; empty: only `first`.
    """
    codes = first.codes
    rows = len(first.codes.words)
    table = first.codes.words
    is_aligned = False
    if all_of:
        places = [few.places(first) for few in all_of]
        numbers = torch.tensor(
            [[len(few.x), *own] for few, own in zip(all_of, places, strict=True)], device="cpu"
        )
        table = upload(numbers, first.x.device)
        is_aligned = not any(own[0] % 16 or own[1] % 16 for own in places)
    grid = -(-rows // ROWS_AT_A_TIME), max(1, len(all_of))
    arguments = (
        *first.tensors,
        table,
        len(first.x),
        rows,
        codes.columns,
        *first.strides,
        codes.group,
    )
    triton.launch(
        "products.few_rows",
        grid,
        arguments,
        BITS=codes.bits,
        MX=codes.is_mx,
        BIASED=first.bias is not None,
        ADDS=first.adds,
        TABLE=bool(all_of),
        ALIGNED=is_aligned,
        TOKENS=triton.power_of_two(max(len(few.x) for few in all_of or (first,)), 16),
        ROWS=ROWS_AT_A_TIME,
        WORDS=_COLUMNS_AT_A_TIME * (codes.bits or 32) // 32,
    )


def can_multiply_codes(codes: Codes, decoded: torch.Tensor) -> bool:
    """Return whether codes can be multiplied without decoding them first.

    They can on a card, and in the compiled loop.

    decoded: tensor to which they would be decoded, as in `CodedRows`.
    """
    if triton.supports(codes.words, codes.group_params):
        return True
    whole = (
        codes.bits == 4
        and codes.group == (MX_BLOCK if codes.is_mx else GROUP)
        and not codes.columns % codes.group
    )
    return whole and is_compiled(decoded) and products.has_loop(decoded.dtype) and cpu_has("avx2")


class CodedRows(Matrix):
    """Hold rows (n, columns) as codes, and decode them to `decoded` when that is first needed."""

    def __init__(self, codes: Codes, decoded: DenseRows) -> None:
        self.kept = codes
        self._decoded = decoded
        self._is_decoded = False

    def __len__(self) -> int:
        return len(self._decoded)

    def job(
        self, inputs: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
    ) -> products.ProductJob | None:
        codes = self.kept
        words = self.kept.words
        params = self.kept.group_params
        if triton.supports(words, params) or not products.supports(inputs, codes.columns):
            return None
        from flexgen_h2o.kernels.compiled.codes import MXFP4_TABLES

        return products.job_of(
            inputs,
            bias,
            out,
            weight=words.data_ptr(),
            row_step=words.stride(0) * words.itemsize,
            rows=len(self),
            columns=codes.columns,
            scales=params.data_ptr(),
            scale_step=params.stride(0) * params.itemsize,
            coded=products.MXFP4 if codes.is_mx else products.PACKED,
            tables=MXFP4_TABLES.ctypes.data,
        )

    def multiply(
        self, inputs: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, adds: bool
    ) -> None:
        if len(inputs) <= FEW_ROWS and triton.supports(inputs):
            multiply_coded(inputs, self.kept, bias, out, adds)
        else:
            self._whole().multiply(inputs, bias, out, adds)

    def look_up(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        self._whole().look_up(ids, out)

    def _whole(self) -> DenseRows:
        if not self._is_decoded:
            self.kept.decode(self._decoded.rows)
            self._is_decoded = True
        return self._decoded
