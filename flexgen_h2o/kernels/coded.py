"""Products with weights in few bits, and with those of experts on a card.

A CPU's compiled loop decodes a panel at a time in its caches: a matrix that is decoded first is written to memory, and
read again. On a card, up to FEW_ROWS input rows a product takes as long as its weight takes to come from memory, and
codes are a quarter of what they are decoded into: they are decoded in registers, in one launch. For more, the weight is
decoded first, and read by each micro-batch. Products of experts with few rows each are one launch.
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
from flexgen_h2o.kernels.linear import DenseRows, Product, RowPart
from flexgen_h2o.kernels.packed import unpack_rows
from flexgen_h2o.kernels.quantised import MX_BLOCK, unpack_mxfp4
from flexgen_h2o.kernels.workspace import cpu_has, is_compiled, upload

ROWS_AT_A_TIME = 32  # of the weight, a program
_COLUMNS_AT_A_TIME = 128


@dataclass(frozen=True)
class Codes:
    """words: (n, W) int32, columns' codes from the lowest bits on. group_params: (n, groups), what `group` columns
    share: a scale and a least value in an int32, or, in MXFP4, an exponent in a uint8. decode: fills (n, columns) of
    any float dtype, and returns it. bits: 0 where words are the columns themselves, of a float dtype."""

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
    _launch(_Few(x, codes, bias, out, adds), partial(multiply_coded_reference, x, codes, bias, out, adds))


def multiply_coded_reference(
    x: torch.Tensor, codes: Codes, bias: torch.Tensor | None, out: torch.Tensor, adds: bool = False
) -> None:
    """`multiply_coded` with the weight decoded first."""
    weight = codes.decode(x.new_empty(len(codes.words), codes.columns))
    DenseRows(weight).multiply(x, bias, out, adds)


def multiply_together(found: Sequence[Product]) -> list[Product]:
    """Multiply at most FEW_ROWS input rows each with weights of one shape and kind, those that are not in few bits too,
    in one launch on a card. Returns the other products, and what would be alone in one."""
    alike, others = dict[Hashable, list[tuple[Product, _Few]]](), list[Product]()
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
            _launch(fews[0], partial(_multiply_each, mine), fews)
    return others


def _few_of(product: Product) -> _Few | None:
    """None: it is not for `multiply_together`."""
    part, inputs, bias, out, adds = product
    if len(inputs) > FEW_ROWS:
        return None
    if isinstance(part, CodedRows):
        return _Few(inputs, part.kept, bias, out, adds)
    if type(part) is DenseRows and part.rows.stride(1) == 1:  # rows of its subclasses are something else
        rows, columns = part.rows, part.rows.shape[1]
        return _Few(inputs, Codes(rows, rows, columns, columns, 0, lambda out: out.copy_(rows)), bias, out, adds)
    return None


def _multiply_each(found: Sequence[Product]) -> None:
    for part, *given in found:
        part.multiply(*given)


class _Few(NamedTuple):
    """A product, as of `multiply_coded`."""

    x: torch.Tensor
    codes: Codes
    bias: torch.Tensor | None
    out: torch.Tensor
    adds: bool

    @property
    def kind(self) -> Hashable:
        """What those have in common that are one launch."""
        codes, bias = self.codes, self.bias
        form = codes.words.shape, codes.columns, codes.group, codes.bits, codes.is_mx
        return *form, *self.strides, self.x.dtype, bias is None, self.adds

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.x, self.codes.words, self.codes.group_params, self.x if self.bias is None else self.bias, self.out

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(t.stride(0) for t in (self.x, self.codes.words, self.codes.group_params, self.out))

    def places(self, first: _Few) -> list[int]:
        """How many numbers behind those of `first` each of the tensors begins."""
        pairs = zip(self.tensors, first.tensors, strict=True)
        return [(own.data_ptr() - its.data_ptr()) // its.itemsize for own, its in pairs]


def _launch(first: _Few, reference: Callable[[], object], all_of: Sequence[_Few] = ()) -> None:
    """all_of: several of one kind, `first` among them."""
    codes, rows, table, is_aligned = first.codes, len(first.codes.words), first.codes.words, False
    if all_of:
        places = [few.places(first) for few in all_of]
        numbers = torch.tensor([[len(few.x), *own] for few, own in zip(all_of, places, strict=True)], device="cpu")
        table, is_aligned = upload(numbers, first.x.device), not any(own[0] % 16 or own[1] % 16 for own in places)
    grid = -(-rows // ROWS_AT_A_TIME), max(1, len(all_of))
    arguments = *first.tensors, table, len(first.x), rows, codes.columns, *first.strides, codes.group
    triton.launch(
        "products.few_rows", grid, reference, arguments, BITS=codes.bits, MX=codes.is_mx,
        BIASED=first.bias is not None, ADDS=first.adds, TABLE=bool(all_of), ALIGNED=is_aligned,
        TOKENS=triton.power_of_two(max(len(few.x) for few in all_of or (first,)), 16), ROWS=ROWS_AT_A_TIME,
        WORDS=_COLUMNS_AT_A_TIME * (codes.bits or 32) // 32,
    )  # fmt: skip


def are_multiplied(codes: Codes, decoded: torch.Tensor) -> bool:
    """Do products take them: on a card, or in the compiled loop? decoded: as of `CodedRows`."""
    if triton.takes(codes.words, codes.group_params):
        return True
    whole = codes.bits == 4 and codes.group == (MX_BLOCK if codes.is_mx else GROUP) and not codes.columns % codes.group
    return whole and is_compiled(decoded) and products.has_loop(decoded.dtype) and cpu_has("avx2")


class CodedRows(RowPart):
    """Rows (n, columns) that are decoded, into `decoded`, when they are first wanted whole."""

    def __init__(self, codes: Codes, decoded: DenseRows) -> None:
        self.kept, self._decoded, self._is_decoded = codes, decoded, False

    def __len__(self) -> int:
        return len(self._decoded)

    def job(self, inputs: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> products.Job | None:
        codes, words, params = self.kept, self.kept.words, self.kept.group_params
        if triton.takes(words, params) or not products.takes(inputs, codes.columns):
            return None
        from flexgen_h2o.kernels.compiled.numbers import MXFP4_TABLES

        weight = words.data_ptr(), words.stride(0) * words.itemsize, len(self), codes.columns
        return products.job_of(
            inputs, weight, bias, out, scales=params.data_ptr(), scale_step=params.stride(0) * params.itemsize,
            coded=products.MXFP4 if codes.is_mx else products.PACKED, tables=MXFP4_TABLES.ctypes.data,
        )  # fmt: skip

    def multiply(self, inputs: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, adds: bool) -> None:
        if len(inputs) <= FEW_ROWS and triton.takes(inputs):
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
