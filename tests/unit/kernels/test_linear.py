"""Matrices in row parts give what the whole matrix gives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.kernels.linear import DenseRows, RowParts, add_linear, linear, lookup

DTYPES = [torch.float32, torch.bfloat16]
# Largest difference between two orders of summation of about 20 products of unit normals.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.1}


def cut(matrix: torch.Tensor, at: tuple[int, int]) -> RowParts:
    """Row parts as tiers hold them: tensors of their own, empty ones left out."""
    a, b = sorted(at)
    return tuple(DenseRows(part.clone()) for part in (matrix[:a], matrix[a:b], matrix[b:]) if len(part))


rows, widths = st.integers(1, 9), st.integers(1, 20)
cuts = st.tuples(st.integers(0, 12), st.integers(0, 12))


@given(rows, widths, st.integers(1, 12), cuts, st.booleans(), st.sampled_from(DTYPES))
def test_linear(n: int, width: int, out_width: int, at: tuple[int, int], has_bias: bool, dtype: torch.dtype) -> None:
    x, weight = torch.randn(n, width).to(dtype), torch.randn(out_width, width).to(dtype)
    bias = torch.randn(out_width).to(dtype) if has_bias else None
    out = torch.full((n, out_width), float("nan"), dtype=dtype)
    expected = x.double() @ weight.double().t() + (bias.double() if bias is not None else 0)
    assert linear(x, cut(weight, at), bias, out) is out
    assert (out.double() - expected).abs().max() < TOLERANCE[dtype]


@given(rows, widths, st.integers(1, 12), cuts, st.booleans(), st.sampled_from(DTYPES))
def test_add_linear(
    n: int, width: int, out_width: int, at: tuple[int, int], has_bias: bool, dtype: torch.dtype
) -> None:
    inputs, weight = torch.randn(n, width).to(dtype), torch.randn(out_width, width).to(dtype)
    bias = torch.randn(out_width).to(dtype) if has_bias else None
    x = torch.randn(n, out_width).to(dtype)
    expected = x.double() + inputs.double() @ weight.double().t() + (bias.double() if bias is not None else 0)
    add_linear(x, inputs, cut(weight, at), bias)
    assert (x.double() - expected).abs().max() < 2 * TOLERANCE[dtype]


@given(st.lists(st.integers(0, 11), max_size=20), cuts, st.sampled_from(DTYPES))
def test_lookup(ids: list[int], at: tuple[int, int], dtype: torch.dtype) -> None:
    table = torch.randn(12, 5).to(dtype)
    out = torch.full((len(ids), 5), float("nan"), dtype=dtype)
    assert lookup(torch.tensor(ids, dtype=torch.int64), cut(table, at), out) is out
    assert torch.equal(out, table[ids] if ids else table[:0])


@pytest.mark.parametrize("at", [(0, 0), (5, 9)])
def test_the_output_may_be_a_slice_of_a_larger_buffer(at: tuple[int, int]) -> None:
    """As the runs of tokens of a layer are: rows of a workspace."""
    x, weight, buffer = torch.randn(3, 7), torch.randn(12, 7), torch.zeros(8, 12)
    linear(x, cut(weight, at), None, buffer[2:5])
    assert torch.allclose(buffer[2:5], x @ weight.t(), atol=1e-5)
    assert not bool(buffer[:2].any() or buffer[5:].any())
