"""Matrices in row parts give what the whole matrix gives, blocked rows within a bf16 rounding of it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.core.units import BLOCK_CHUNK, BLOCK_ROWS, TOKEN_CHUNK
from flexgen_h2o.kernels import linear as linear_kernels
from flexgen_h2o.kernels.linear import (
    BlockedRows,
    DenseRows,
    InputRows,
    RowParts,
    add_linear,
    block_rows,
    linear,
    linear_relu,
    lookup,
)

DTYPES = [torch.float32, torch.bfloat16]
# Largest difference between two orders of summation of about 20 products of unit normals.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.1}


def cut(matrix: torch.Tensor, at: tuple[int, int], kind: type[DenseRows] = DenseRows) -> RowParts:
    """Row parts as tiers hold them: tensors of their own, empty ones left out."""
    a, b = sorted(at)
    return tuple(kind(part.clone()) for part in (matrix[:a], matrix[a:b], matrix[b:]) if len(part))


cuts = st.tuples(st.integers(0, 12), st.integers(0, 12))


@given(
    st.integers(1, 9), st.integers(1, 20), st.integers(1, 12), cuts, st.booleans(), st.booleans(),
    st.sampled_from(DTYPES),
)  # fmt: skip
def test_linear_and_add_linear(
    n: int, width: int, out_width: int, at: tuple[int, int], has_bias: bool, is_transposed: bool, dtype: torch.dtype
) -> None:
    """Parts are runs of outputs, or of inputs where the matrix is stored transposed."""
    x, weight = torch.randn(n, width).to(dtype), torch.randn(out_width, width).to(dtype)
    bias = torch.randn(out_width).to(dtype) if has_bias else None
    wide = torch.full((n, out_width + 2), float("nan"), dtype=dtype)
    expected = x.double() @ weight.double().t() + (bias.double() if bias is not None else 0)
    out, parts = wide[:, 1:-1], cut(weight.t(), at, InputRows) if is_transposed else cut(weight, at)
    assert linear(x, parts, bias, out) is out
    assert (out.double() - expected).abs().max() < TOLERANCE[dtype]
    assert bool(wide[:, [0, -1]].isnan().all()), "wrote beside its rows"
    before = torch.randn(n, out_width).to(dtype)
    out.copy_(before)
    add_linear(out, x, parts, bias)
    assert (out.double() - expected - before.double()).abs().max() < 2 * TOLERANCE[dtype]


@given(st.lists(st.integers(0, 11), max_size=20), cuts, st.sampled_from(DTYPES))
def test_lookup(ids: list[int], at: tuple[int, int], dtype: torch.dtype) -> None:
    table = torch.randn(12, 5).to(dtype)
    out = torch.full((len(ids), 5), float("nan"), dtype=dtype)
    index = torch.tensor(ids, dtype=torch.int64)
    assert torch.equal(lookup(index, cut(table, at), out), table[index])


# ---- blocked rows

ROUNDING = 2.0**-7  # of bf16, relative: a unit in the last place of the larger neighbour
needs_blocking = pytest.mark.skipif(not linear_kernels._works(), reason="torch does not block here")
blocked = torch.inference_mode()


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def check(found: torch.Tensor, want: torch.Tensor) -> None:
    """want: fp32. Sums round once, or twice where something is added to a product that was rounded before."""
    assert found.dtype == torch.bfloat16
    assert torch.all((found.float() - want).abs() <= 2 * ROUNDING * want.abs().clamp(min=8.0))


@needs_blocking
@blocked
@pytest.mark.parametrize(
    ("shape", "n", "has_bias"),
    [
        ((64, 64), 2 * TOKEN_CHUNK + 5, False), ((192, 128), 3, True), ((128, 1024), 32, False),
        ((1024, 320), 100, True),
    ],
)  # fmt: skip
def test_products(shape: tuple[int, int], n: int, has_bias: bool) -> None:
    x, weight, bias = normal(n, shape[1]), normal(*shape), normal(shape[0]) if has_bias else None
    want = x.float() @ weight.float().t() + (bias.float() if bias is not None else 0)
    (part,) = block_rows(weight.clone())
    assert isinstance(part, BlockedRows) and len(part) == shape[0]
    out = torch.full((n, shape[0] + 7), torch.nan, dtype=torch.bfloat16)
    part.multiply(x, bias, out[:, 7:], adds=False)
    check(out[:, 7:], want)
    assert bool(out[:, :7].isnan().all())
    before = normal(n, shape[0])
    total = before.clone()
    part.multiply(x, bias, total, adds=True)
    check(total, want + before.float())


@needs_blocking
@blocked
@pytest.mark.parametrize(("n", "has_bias"), [(1, True), (33, False), (TOKEN_CHUNK + 1, True)])
def test_relu_within_a_product_is_that_after_it(has_bias: bool, n: int) -> None:
    """To the bit, whichever way it takes: one part within a pass, or more of them, or too many rows, into `out`."""
    x, weight, bias = normal(n, 128), normal(192, 128), normal(192) if has_bias else None
    want = torch.relu(linear(x, block_rows(weight.clone()), bias, torch.empty(n, 192, dtype=torch.bfloat16)))
    assert (want == 0).any() and (want > 0).any()
    for parts in (block_rows(weight.clone()), (*block_rows(weight[:64].clone()), *block_rows(weight[64:].clone()))):
        out = torch.full((n, 192), torch.nan, dtype=torch.bfloat16)
        assert torch.equal(linear_relu(x, parts, bias, out), want)
        assert bool(out.isnan().all()) == (len(parts) == 1 and n <= TOKEN_CHUNK)


@needs_blocking
@blocked
def test_rows_are_blocked_where_they_lie() -> None:
    """The same values in the same bytes, and nothing around them is touched."""
    arena = normal(3, 256, 64)
    before = arena.clone()
    (part,) = block_rows(arena[1])
    assert isinstance(part, BlockedRows)
    assert part.memory.data_ptr() == arena[1].data_ptr() == torch.ops.mkldnn.data_ptr(part.opaque)
    assert torch.equal(arena[0], before[0]) and torch.equal(arena[2], before[2])
    in_order = [t.view(torch.int16).flatten().sort().values for t in (arena[1], before[1])]
    assert torch.equal(*in_order) and not torch.equal(arena[1], before[1])


@needs_blocking
@blocked
def test_long_parts_are_blocked_some_rows_at_a_time_and_odd_rows_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a part that is split at 16 rows is; and products over all of them, beside a part that is not resident."""
    monkeypatch.setattr(linear_kernels, "BLOCK_CHUNK", 2 * BLOCK_ROWS * 128 * 2 + 100)
    weight, x, bias = normal(336 + 48, 128), normal(9, 128), normal(336 + 48)
    want = x.float() @ weight.float().t() + bias.float()
    parts: RowParts = (*block_rows(weight[:336].clone()), DenseRows(weight[336:].clone()))
    assert [(type(p), len(p)) for p in parts] == [
        (BlockedRows, 128), (BlockedRows, 128), (BlockedRows, 64), (DenseRows, 16), (DenseRows, 48),
    ]  # fmt: skip
    check(linear(x, parts, bias, torch.empty(9, 384, dtype=torch.bfloat16)), want)
    before = normal(9, 384)
    total = before.clone()
    add_linear(total, x, parts, bias)
    check(total, want + before.float())


@pytest.mark.parametrize(
    "rows", [
        torch.zeros(64, 72, dtype=torch.bfloat16), torch.zeros(48, 64, dtype=torch.bfloat16), torch.zeros(64, 64),
        torch.zeros(64, 64, dtype=torch.float16), torch.zeros(64, 128, dtype=torch.bfloat16)[:, :64],
    ], ids=["columns", "few rows", "fp32", "fp16", "apart"],
)  # fmt: skip
def test_what_stays_as_it_is(rows: torch.Tensor) -> None:
    (part,) = block_rows(rows)
    assert isinstance(part, DenseRows) and part.rows is rows


def test_pieces_are_whole_blocks_and_what_is_left() -> None:
    for most, sizes in ((1, [64, 64, 64, 10]), (150, [128, 64, 10]), (1000, [192, 10])):
        found = list(linear_kernels.pieces(torch.arange(202), most))
        assert [len(some) for some in found] == sizes and torch.equal(torch.cat(found), torch.arange(202))
    assert [len(some) for some in linear_kernels.pieces(torch.arange(128), 64)] == [64, 64]


@pytest.mark.parametrize("gone", ["_reorder_linear_weight", "_linear_pointwise", "_get_mkldnn_serialized_md"])
def test_without_the_private_operations_rows_stay(gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise AttributeError(gone)

    monkeypatch.setattr(torch.ops.mkldnn, gone, missing)
    assert not linear_kernels._works.__wrapped__()
    monkeypatch.setattr(linear_kernels, "_works", lambda: False)
    (part,) = block_rows(rows := normal(64, 64))
    assert isinstance(part, DenseRows) and part.rows is rows


def test_wrong_products_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda x, w, *_: torch.zeros(len(x), w.shape[0]))
    assert not linear_kernels._works.__wrapped__()


def test_a_chunk_holds_some_blocks_of_the_widest_matrices() -> None:
    """OPT-175B's 4 x 12,288 columns: a chunk is not what memory was not planned for."""
    assert BLOCK_CHUNK // (4 * 12288 * 2) >= 2 * BLOCK_ROWS
