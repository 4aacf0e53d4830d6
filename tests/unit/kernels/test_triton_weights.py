"""Triton's products, and kernels that decode weights; they run as test_triton.py says."""

from __future__ import annotations

from unittest.mock import MagicMock

import pytest
import torch

from flexgen_h2o.core.units import FEW_ROWS
from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.coded import CodedRows, Codes, groupwise_codes, mxfp4_codes
from flexgen_h2o.kernels.linear import (
    DenseRows,
    RowParts,
    grouped_linear,
    linear,
    linear_shared_input,
    lookup,
)
from flexgen_h2o.kernels.packed import pack_rows, unpack_rows
from flexgen_h2o.kernels.quantised import unpack_mxfp4
from tests.extras import needs
from tests.unit.kernels.test_triton import CLOSE, DTYPES, MULTIPLIED, ON_CARD, on_card, some_slow

pytestmark = needs("gpu")

__all__ = ["on_card"]  # a fixture of all tests


def packed_rows(n: int, columns: int, bits: int) -> torch.Tensor:
    packed = pack_rows(torch.randn(n, columns, device="cpu"), bits)
    return packed.to(torch.get_default_device())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [8, 120, 2304])
def test_unpacked_weights_are_the_same_to_the_bit(
    dtype: torch.dtype, bits: int, columns: int
) -> None:
    packed = packed_rows(3, columns, bits)
    found, want = (torch.empty(3, columns, dtype=dtype) for _ in range(2))
    unpack_rows(packed, bits, found)
    unpack_rows.torch(packed, bits, want)
    # the interpreter cuts off what a card rounds to bf16
    close = CLOSE[dtype] if dtype == torch.bfloat16 and not ON_CARD else 0.0
    torch.testing.assert_close(found, want, rtol=close, atol=close)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unpacked_mxfp4_is_the_same_to_the_bit(dtype: torch.dtype) -> None:
    """Every code comes with every exponent; the rows of the results lie apart."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(256, 1, 1).view(-1, 64, 16)
    scales = torch.arange(256, dtype=torch.uint8).repeat_interleave(16).view(-1, 64)
    if dtype == torch.bfloat16 and not ON_CARD:  # as above, of numbers near 0
        scales = scales.clamp(min=8)
    found, want = (torch.zeros(64, 2050, dtype=dtype)[:, 2:] for _ in range(2))
    unpack_mxfp4(codes, scales, found)
    unpack_mxfp4.torch(codes, scales, want)
    assert torch.equal(found, want)


def codes_of(kind: str, rows: int, columns: int) -> Codes:
    if kind == "mxfp4":
        blocks = torch.randint(0, 256, (rows, columns // 32, 16), dtype=torch.uint8)
        return mxfp4_codes(blocks, torch.randint(120, 132, (rows, columns // 32)).byte())
    bits = int(kind[0])
    return groupwise_codes(packed_rows(rows, columns, bits), bits, columns)


# Input rows, and rows and columns of the weight.
SHAPES = [(1, 1, 32), (3, 33, 160), (17, 5, 224), (32, 70, 64)]


@pytest.mark.parametrize(
    ("shape", "kind", "adds", "dtype"),
    some_slow(
        SHAPES,
        ["4 bits", "8 bits", "mxfp4"],
        [False, True],
        MULTIPLIED,
        fast=(SHAPES[1], "4 bits", True, torch.float16),
    ),
)
def test_products_with_coded_weights(
    shape: tuple[int, int, int], kind: str, adds: bool, dtype: torch.dtype
) -> None:
    """They decode nothing; rows of inputs and of results lie apart."""
    tokens, rows, columns = shape
    codes = codes_of(kind, rows, columns)
    x = torch.randn(tokens, 2 * columns).to(dtype)[:, :columns] / 8
    found = torch.randn(tokens, rows + 3).to(dtype)[:, 1 : rows + 1]
    bias = torch.randn(rows).to(dtype)
    weight = codes.decode(torch.empty(rows, columns, dtype=dtype)).float()
    want = x.float() @ weight.t() + bias.float() + (found.float() if adds else 0)
    decoded = torch.zeros(rows, columns, dtype=dtype)
    linear_shared_input(x, [((CodedRows(codes, DenseRows(decoded)),), bias, found)], adds)
    torch.testing.assert_close(found, want.to(dtype), rtol=4 * CLOSE[dtype], atol=4 * CLOSE[dtype])
    assert not decoded.any()


@pytest.mark.parametrize(
    ("kind", "biased", "dtype"),
    some_slow(
        ["dense", "4 bits", "mxfp4"], [False, True], MULTIPLIED, fast=("dense", True, torch.float16)
    ),
)
def test_products_of_experts_are_one_launch(
    kind: str, biased: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each expert has two matrices; one has no token, and one has too many."""
    counts = [3, 0, FEW_ROWS + 1, FEW_ROWS, 5]
    rows = 40
    columns = 96
    weights = [*(torch.randn(10 * rows + 1, columns).to(dtype)[1:]).split(rows)]  # at odd places
    parts: list[RowParts] = [(DenseRows(weight),) for weight in weights]
    if kind != "dense":
        coded = [codes_of(kind, rows, columns) for _ in weights]
        weights = [codes.decode(torch.empty(rows, columns, dtype=dtype)) for codes in coded]
        parts = [(CodedRows(codes, DenseRows(torch.empty_like(weights[0]))),) for codes in coded]
    x = torch.randn(sum(counts), columns).to(dtype) / 8
    biases = [torch.randn(rows).to(dtype) for _ in counts] if biased else None
    first, second = torch.empty(2, len(x), rows + 3).to(dtype)[:, :, 1 : rows + 1]
    launch = MagicMock(wraps=triton.launch)
    monkeypatch.setattr(triton, "launch", launch)
    grouped_linear(x, counts, ((parts[:5], biases, first), (parts[5:], biases, second)))
    grids = [call.args[1] for call in launch.call_args_list if call.args[0] == "products.few_rows"]
    assert grids == [(2, 6)]
    close = 4 * CLOSE[dtype]
    for out, some in ((first, weights[:5]), (second, weights[5:])):
        added = biases or [torch.zeros(rows)] * 5
        each = zip(added, x.split(counts), some, strict=True)
        want = [bias.float() + own.float() @ one.float().t() for bias, own, one in each]
        torch.testing.assert_close(out.float(), torch.cat(want), rtol=close, atol=close)


def test_coded_rows_are_decoded_once_for_many_rows() -> None:
    whole = torch.zeros(6, 64)
    codes = codes_of("4 bits", 6, 64)
    rows = CodedRows(codes, DenseRows(whole))
    x = torch.randn(FEW_ROWS + 1, 64)
    few = linear(x[1:], (rows,), None, torch.empty(FEW_ROWS, 6))
    assert not whole.any()
    many = linear(x, (rows,), None, torch.empty(FEW_ROWS + 1, 6))
    torch.testing.assert_close(few, many[1:], rtol=1e-5, atol=1e-5)
    assert torch.equal(whole, codes.decode(torch.empty(6, 64)))
    whole[5] = 7  # it is not decoded again
    assert bool((lookup(torch.tensor([5]), (rows,), torch.empty(1, 64)) == 7).all())
