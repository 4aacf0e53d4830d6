"""Triton's products, and what decodes weights, against their references; run as test_triton.py
is."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from flexgen_h2o.checkpoint.formats import Codec, Shard
from flexgen_h2o.checkpoint.formats.groupwise import Groupwise
from flexgen_h2o.checkpoint.formats.mxfp4 import Mxfp4
from flexgen_h2o.core.model import TensorSpec
from flexgen_h2o.core.packing import SlotPacking
from flexgen_h2o.core.units import FEW_ROWS
from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.coded import (
    CodedRows,
    Codes,
    groupwise_codes,
    multiply_coded,
    mxfp4_codes,
)
from flexgen_h2o.kernels.linear import DenseRows, RowParts, grouped_linear, linear, lookup
from flexgen_h2o.kernels.packed import pack_rows, unpack_rows
from flexgen_h2o.kernels.quantised import unpack_mxfp4
from tests.extras import needs
from tests.unit.kernels.test_triton import CLOSE, DTYPES, MULTIPLIED, ON_CARD, on_card, some_slow

pytestmark = needs("gpu")

__all__ = ["on_card"]  # a fixture of all tests


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [8, 64, 120, 1000, 2304])
def test_unpacked_weights_are_the_same_to_the_bit(
    dtype: torch.dtype, bits: int, columns: int
) -> None:
    packed = pack_rows(torch.randn(3, columns, device="cpu"), bits).to(torch.get_default_device())
    assert packed.shape[1] == SlotPacking(columns, bits).slot_bytes
    found, expected = (torch.empty(3, columns, dtype=dtype) for _ in range(2))
    unpack_rows(packed, bits, found)
    unpack_rows.torch(packed, bits, expected)
    if dtype == torch.bfloat16 and not ON_CARD:  # the interpreter cuts off what a card rounds
        torch.testing.assert_close(found, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    else:
        assert torch.equal(found, expected)


CODED = [
    (1, 1, 8),
    (3, 33, 72),
    (17, 5, 200),
    (32, 70, 64),
]  # input rows, rows of the weight, columns


@pytest.mark.parametrize(
    ("shape", "bits", "adds", "dtype"),
    some_slow(CODED, [4, 8], [False, True], MULTIPLIED, fast=(CODED[1], 4, True, torch.float16)),
)
def test_products_with_coded_weights(
    shape: tuple[int, int, int], bits: int, adds: bool, dtype: torch.dtype
) -> None:
    tokens, rows, columns = shape
    packed = pack_rows(torch.randn(rows, columns, device="cpu"), bits).to(
        torch.get_default_device()
    )
    check_coded(
        groupwise_codes(packed, bits, columns), torch.randn(tokens, columns).to(dtype), adds
    )


def mxfp4(rows: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales: all codes."""
    scales = torch.randint(120, 132, (rows, groups), dtype=torch.uint8)
    return torch.randint(0, 256, (rows, groups, 16), dtype=torch.uint8), scales


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    some_slow([(1, 1, 1), (5, 40, 5), (32, 33, 8)], MULTIPLIED, fast=((5, 40, 5), torch.float16)),
)
def test_products_with_mxfp4_weights(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    tokens, rows, groups = sizes
    x = torch.randn(tokens, 32 * groups).to(dtype) / 8
    check_coded(mxfp4_codes(*mxfp4(rows, groups)), x, adds=False)


def check_coded(codes: Codes, x: torch.Tensor, adds: bool) -> None:
    """With inputs and results whose rows lie apart."""
    x = torch.cat([x, x], 1)[:, : codes.columns]
    rows = len(codes.words)
    found = torch.randn(len(x), rows + 3).to(x.dtype)[:, 1 : rows + 1]
    bias = torch.randn(rows).to(x.dtype)
    expected = found.clone()
    multiply_coded(x, codes, bias if adds else None, found, adds)
    weight = codes.decode(torch.empty(rows, codes.columns, dtype=x.dtype)).float()
    exact = x.float() @ weight.t() + (bias.float() + expected.float() if adds else 0)
    torch.testing.assert_close(found, exact.to(x.dtype), rtol=CLOSE[x.dtype], atol=CLOSE[x.dtype])
    multiply_coded.torch(x, codes, bias if adds else None, expected, adds)
    torch.testing.assert_close(found, expected, rtol=4 * CLOSE[x.dtype], atol=4 * CLOSE[x.dtype])


@pytest.mark.parametrize(
    ("kind", "biased", "dtype"),
    some_slow(
        ["dense", "4 bits", "mxfp4"], [False, True], MULTIPLIED, fast=("dense", True, torch.float16)
    ),
)
def test_products_of_experts_are_one_launch(
    kind: str, biased: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two matrices of each expert, of which one has no token and one too many."""
    counts = [3, 0, FEW_ROWS + 1, FEW_ROWS, 5]
    rows = 40
    columns = 96
    memory = torch.randn(10 * rows + 1, columns).to(dtype)[1:]  # at odd places
    weights = list(memory.split(rows))
    parts: list[RowParts] = [(DenseRows(weight),) for weight in weights]
    if kind != "dense":
        packed = [pack_rows(weight.float().cpu(), 4).to(memory.device) for weight in weights]
        coded = [
            mxfp4_codes(*mxfp4(rows, 3)) if kind == "mxfp4" else groupwise_codes(p, 4, columns)
            for p in packed
        ]
        weights = [codes.decode(torch.empty(rows, columns, dtype=dtype)) for codes in coded]
        parts = [(CodedRows(codes, DenseRows(torch.empty_like(weights[0]))),) for codes in coded]
    x = torch.randn(sum(counts), columns).to(dtype) / 8
    launched = list[tuple[Any, ...]]()
    launch = triton.launch
    biases = [torch.randn(rows).to(dtype) for _ in counts] if biased else None
    first, second = torch.empty(2, len(x), rows + 3).to(dtype)[:, :, 1 : rows + 1]

    def watched(name: str, grid: tuple[int, ...], *given: Any, **constants: Any) -> None:
        launched.append((name, *grid))
        launch(name, grid, *given, **constants)

    monkeypatch.setattr(triton, "launch", watched)
    grouped_linear(x, counts, ((parts[:5], biases, first), (parts[5:], biases, second)))
    assert [grid for name, *grid in launched if name == "products.few_rows"] == [[2, 6]]
    at = [0, *accumulate(counts)]
    for out, some in ((first, weights[:5]), (second, weights[5:])):
        for expert, weight in enumerate(some):
            own = slice(at[expert], at[expert + 1])
            exact = x[own].float() @ weight.float().t() + (
                0 if biases is None else biases[expert].float()
            )
            torch.testing.assert_close(
                out[own].float(), exact, rtol=4 * CLOSE[dtype], atol=4 * CLOSE[dtype]
            )


@pytest.mark.parametrize("dtype", DTYPES)
def test_unpacked_mxfp4_is_the_same_to_the_bit(dtype: torch.dtype) -> None:
    """Every code with every exponent; the last columns of a matrix whose rows lie apart."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(256, 1, 1).view(-1, 64, 16)
    scales = torch.arange(256, dtype=torch.uint8).repeat_interleave(16).view(-1, 64)
    if (
        dtype == torch.bfloat16 and not ON_CARD
    ):  # the interpreter cuts off what a card rounds: numbers near 0
        scales = scales.clamp(min=8)
    found, expected = (torch.zeros(64, 2050, dtype=dtype)[:, 2:] for _ in range(2))
    unpack_mxfp4(codes, scales, found)
    unpack_mxfp4.torch(codes, scales, expected)
    assert torch.equal(found, expected)


FORMATS = [Groupwise(4, 4), Groupwise(4, 8), Mxfp4(4)]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_formats_multiply_few_rows_from_codes(form: Codec) -> None:
    """A matrix that is whole; of one in two parts, or to be decoded into int8, they do not."""
    layout = form.layout(TensorSpec("", form.sample_name, (5, 96)))
    memory = torch.zeros(5 * layout.decoded_row_bytes, dtype=torch.uint8)
    decoded = (DenseRows(memory.view(torch.float32).view(5, 96)),)
    if form.converted_by:
        pieces = [form.encode(torch.randn(5, 96, device="cpu")).flatten().to(memory.device)]
    else:
        pieces = [t.flatten() for t in mxfp4(5, 3)]
    held = Shard("device", 0, 5, pieces)
    coded = form.coded_parts(layout, [held], decoded)
    x = torch.randn(2, 96)
    found = linear(x, coded, None, torch.empty(2, 5))
    assert not decoded[0].rows.any()
    form.decode(layout, [held], decoded)
    torch.testing.assert_close(
        found, linear(x, decoded, None, torch.empty(2, 5)), rtol=1e-4, atol=1e-4
    )
    assert not form.coded_parts(layout, [held, held], decoded)
    assert not replace(form, in_int8=True).coded_parts(layout, [held], decoded)


def test_coded_rows_are_decoded_once_for_many_rows() -> None:
    packed = pack_rows(torch.randn(6, 64, device="cpu"), 4).to(torch.get_default_device())
    calls = list[torch.Tensor]()
    whole = torch.zeros(6, 64)
    codes = groupwise_codes(packed, 4, 64)

    def decode(out: torch.Tensor) -> torch.Tensor:
        calls.append(codes.decode(out))
        return out

    rows = CodedRows(replace(codes, decode=decode), DenseRows(whole))
    x = torch.randn(FEW_ROWS + 1, 64)
    few = torch.empty(FEW_ROWS, 6)
    linear(x[1:], (rows,), None, few)
    assert not calls
    many = torch.empty(FEW_ROWS + 1, 6)
    found = torch.empty(2, 64)
    linear(x, (rows,), None, many)
    lookup(torch.tensor([5, 0]), (rows,), found)
    assert len(calls) == 1 and torch.equal(found, whole[[5, 0]])
    torch.testing.assert_close(few, many[1:], rtol=1e-5, atol=1e-5)
