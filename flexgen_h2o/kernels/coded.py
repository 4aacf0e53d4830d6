"""Products with weights in few bits on a card: of few input rows from the codes, in one launch; of more, decoded first.

Up to FEW_ROWS input rows a product takes as long as its weight takes to come from memory, and codes are a quarter of
what they are decoded into. A weight that is decoded first is written, and read again by each micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from flexgen_h2o.core.packing import SlotPacking
from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.linear import DenseRows, RowPart
from flexgen_h2o.kernels.packed import unpack_rows
from flexgen_h2o.kernels.quantised import MX_BLOCK, unpack_mxfp4

FEW_ROWS = 32
ROWS_AT_A_TIME = 32  # of the weight, a program
_COLUMNS_AT_A_TIME = 128


@dataclass(frozen=True)
class Codes:
    """words: (n, W) int32, columns' codes from the lowest bits on. group_params: (n, groups), what `group` columns
    share: a scale and a least value in an int32, or, in MXFP4, an exponent in a uint8. decode: fills (n, columns) of
    any float dtype, and returns it."""

    words: torch.Tensor
    group_params: torch.Tensor
    columns: int
    group: int
    bits: int
    decode: Callable[[torch.Tensor], torch.Tensor]

    @property
    def is_mx(self) -> bool:
        return self.group_params.dtype == torch.uint8


def groupwise_codes(packed: torch.Tensor, bits: int, columns: int) -> Codes:
    """packed: (n, row bytes) uint8, as `packed.pack_rows` gives it in 4 or 8 bits."""
    packing, words = SlotPacking(columns, bits), packed.view(torch.int32)
    params = words[:, packing.value_words :]
    return Codes(words, params, columns, packing.group, bits, partial(unpack_rows, packed, bits))


def mxfp4_codes(blocks: torch.Tensor, scales: torch.Tensor) -> Codes:
    """blocks, scales: as of `quantised.unpack_mxfp4`."""
    decode = partial(unpack_mxfp4, blocks, scales)
    return Codes(blocks.flatten(1).view(torch.int32), scales, scales.shape[1] * MX_BLOCK, MX_BLOCK, 4, decode)


def multiply_coded(
    x: torch.Tensor, codes: Codes, bias: torch.Tensor | None, out: torch.Tensor, adds: bool = False
) -> None:
    """out = x W^T + bias; adds: to what is there. x: (at most FEW_ROWS, columns), out: (rows, n), of one dtype, whose
    rows may lie apart; bias: (n,). Weights are rounded to that dtype; sums are in fp32 and rounded once."""
    (tokens, columns), rows = x.shape, len(codes.words)
    assert tokens <= FEW_ROWS and columns == codes.columns and out.shape == (tokens, rows)
    assert x.stride(1) == out.stride(1) == codes.words.stride(1) == codes.group_params.stride(1) == 1
    tensors = x, codes.words, codes.group_params, x if bias is None else bias, out
    strides = (t.stride(0) for t in (x, codes.words, codes.group_params, out))
    reference = partial(multiply_coded_reference, x, codes, bias, out, adds)
    arguments = *tensors, tokens, rows, columns, *strides, codes.group
    triton.launch(
        "products.coded", (-(-rows // ROWS_AT_A_TIME),), reference, arguments, BITS=codes.bits, MX=codes.is_mx,
        BIASED=bias is not None, ADDS=adds, TOKENS=triton.power_of_two(tokens, 16), ROWS=ROWS_AT_A_TIME,
        WORDS=_COLUMNS_AT_A_TIME * codes.bits // 32,
    )  # fmt: skip


def multiply_coded_reference(
    x: torch.Tensor, codes: Codes, bias: torch.Tensor | None, out: torch.Tensor, adds: bool = False
) -> None:
    """`multiply_coded` with the weight decoded first."""
    weight = codes.decode(x.new_empty(len(codes.words), codes.columns))
    DenseRows(weight).multiply(x, bias, out, adds)


class CodedRows(RowPart):
    """Rows (n, columns) that are decoded, into `decoded`, when they are first wanted whole."""

    def __init__(self, codes: Codes, decoded: DenseRows) -> None:
        self._codes, self._decoded, self._is_decoded = codes, decoded, False

    def __len__(self) -> int:
        return len(self._decoded)

    def job(self, inputs: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> None:
        """The compiled loop is a CPU's."""

    def multiply(self, inputs: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, adds: bool) -> None:
        if len(inputs) <= FEW_ROWS:
            multiply_coded(inputs, self._codes, bias, out, adds)
        else:
            self._whole().multiply(inputs, bias, out, adds)

    def look_up(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        self._whole().look_up(ids, out)

    def _whole(self) -> DenseRows:
        if not self._is_decoded:
            self._codes.decode(self._decoded.rows)
            self._is_decoded = True
        return self._decoded
