"""Matrices in row parts give what the whole matrix gives. What is multiplied by the compiled loop:
test_products.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.core.units import BLOCK_ROWS
from flexgen_h2o.kernels import linear as linear_kernels
from flexgen_h2o.kernels import products, workspace
from flexgen_h2o.kernels.linear import (
    DenseRows,
    add_linear,
    block_rows,
    linear,
    lookup,
)

DTYPES = [torch.float32, torch.bfloat16]
# Largest difference between two orders of summation of about 20 products of unit normals.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.1}


def cut(matrix: torch.Tensor, at: tuple[int, int]) -> tuple[DenseRows, ...]:
    """Row parts as tiers hold them: tensors of their own, empty ones left out."""
    a, b = sorted(at)
    return tuple(
        DenseRows(part.clone()) for part in (matrix[:a], matrix[a:b], matrix[b:]) if len(part)
    )


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


cuts = st.tuples(st.integers(0, 12), st.integers(0, 12))


@given(
    st.integers(1, 9),
    st.integers(1, 20),
    st.integers(1, 12),
    cuts,
    st.booleans(),
    st.booleans(),
    st.sampled_from(DTYPES),
)
def test_linear_and_add_linear(
    n: int,
    width: int,
    out_width: int,
    at: tuple[int, int],
    has_bias: bool,
    is_transposed: bool,
    dtype: torch.dtype,
) -> None:
    """Parts are runs of outputs, or of inputs where the matrix is stored transposed."""
    x = torch.randn(n, width).to(dtype)
    weight = torch.randn(out_width, width).to(dtype)
    bias = torch.randn(out_width).to(dtype) if has_bias else None
    wide = torch.full((n, out_width + 2), float("nan"), dtype=dtype)
    expected = x.double() @ weight.double().t() + (bias.double() if bias is not None else 0)
    out = wide[:, 1:-1]
    parts = cut(weight.t() if is_transposed else weight, at)
    if is_transposed:
        parts = tuple(DenseRows(part.rows.t()) for part in parts)
    assert linear(x, parts, bias, out) is out
    assert (out.double() - expected).abs().max() < TOLERANCE[dtype]
    assert bool(wide[:, [0, -1]].isnan().all()), "wrote beside its rows"
    before = torch.randn(n, out_width).to(dtype)
    out.copy_(before)
    add_linear(out, x, parts, bias)
    assert (out.double() - expected - before.double()).abs().max() < 2 * TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [7, 40])
def test_products_in_fp32(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch multiplies bf16 number by number: rows of inputs, and rows that the loop does not
    take, which have half a word too many; some inputs and some outputs at a time."""
    monkeypatch.setattr(workspace, "UNPACK_CHUNK", 2**11)
    monkeypatch.setattr(linear_kernels, "_INPUTS", 9)
    monkeypatch.setattr(
        linear_kernels, "multiplies_slowly", lambda device, dtype: dtype == torch.bfloat16
    )
    x = normal(rows, 321)
    weight = normal(321, 214) / 18
    bias = normal(214)
    before = normal(rows, 214)
    expected = x.double() @ weight.double() + bias.double()
    kinds = (
        tuple(DenseRows(part.t()) for part in weight.split([64, 35, 222])),
        (DenseRows(weight.t().contiguous()),),
    )
    for parts in kinds:
        assert (
            linear(x, parts, bias, torch.empty(rows, 214).bfloat16()).double() - expected
        ).abs().max() < 0.1
        add_linear(out := before.clone(), x, parts, bias)
        assert (out.double() - expected - before.double()).abs().max() < 0.1


@given(st.lists(st.integers(0, 11), max_size=20), cuts, st.sampled_from(DTYPES))
def test_lookup(ids: list[int], at: tuple[int, int], dtype: torch.dtype) -> None:
    table = torch.randn(12, 5).to(dtype)
    out = torch.full((len(ids), 5), float("nan"), dtype=dtype)
    index = torch.tensor(ids, dtype=torch.int64)
    assert torch.equal(lookup(index, cut(table, at), out), table[index])


# ---- blocked rows

needs_loop = pytest.mark.skipif(
    not products.has_loop(torch.bfloat16), reason="nothing is compiled for bf16 here"
)


@needs_loop
def test_rows_are_blocked_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same values in the same bytes, some rows at a time, and nothing around them is
    touched."""
    arena = normal(3, 256, 64)
    before = arena.clone()
    again = arena[1].clone()
    (part,) = block_rows(arena[1])
    assert part.blocked and part.rows.data_ptr() == arena[1].data_ptr()
    assert torch.equal(arena[0], before[0]) and torch.equal(arena[2], before[2])
    words = [before[1, 64 * i : 64 * i + 64].view(torch.int32).t().reshape(-1) for i in range(4)]
    assert torch.equal(arena[1].view(torch.int32).view(-1), torch.cat(words))
    monkeypatch.setattr(linear_kernels, "BLOCK_CHUNK", 2 * BLOCK_ROWS * 64 * 2 + 100)
    block_rows(again)
    assert torch.equal(again, arena[1])


@needs_loop
def test_odd_rows_stay() -> None:
    """As a part has them that is split at 16 rows."""
    weight = normal(336, 128)
    whole, rest = block_rows(memory := weight.clone())
    assert whole.blocked and len(whole) == 320
    assert not rest.blocked and torch.equal(rest.rows, weight[320:])
    assert rest.rows.data_ptr() == memory[320:].data_ptr()


@needs_loop
@pytest.mark.parametrize("columns", [64, 128, 2112])
def test_rows_are_looked_up_in_blocks(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside rows in order; any ids, some more than once; none; some at a time."""
    monkeypatch.setattr(linear_kernels, "BLOCK_CHUNK", 100 * columns * 2)
    weight = normal(208, columns)
    parts = block_rows(weight.clone())
    assert [part.blocked for part in parts] == [True, False]
    for ids in (
        torch.arange(208),
        torch.tensor([207, 0, 63, 64, 64, 191, 192]),
        torch.tensor([5, 9, 7])[::2],
    ):
        out = torch.zeros(len(ids), columns + 6, dtype=torch.bfloat16)
        lookup(ids, parts, out[:, 2:-4])
        assert (
            torch.equal(out[:, 2:-4], weight[ids])
            and not out[:, :2].any()
            and not out[:, -4:].any()
        )
    assert lookup(torch.zeros(0, dtype=torch.int64), parts[:1], normal(0, columns)).shape == (
        0,
        columns,
    )


@pytest.mark.parametrize(
    "rows",
    [
        torch.zeros(64, 72, dtype=torch.bfloat16),
        torch.zeros(48, 64, dtype=torch.bfloat16),
        torch.zeros(64, 64),
        torch.zeros(64, 64, dtype=torch.float16),
        torch.zeros(64, 128, dtype=torch.bfloat16)[:, :64],
    ],
    ids=["columns", "few rows", "fp32", "fp16", "apart"],
)
def test_what_stays_as_it_is(rows: torch.Tensor) -> None:
    (part,) = block_rows(rows)
    assert isinstance(part, DenseRows) and part.rows is rows
