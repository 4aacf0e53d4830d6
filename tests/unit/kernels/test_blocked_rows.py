"""Products with blocked rows give what rows in order give, within a bf16 rounding; what cannot be blocked stays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flexgen_h2o.core.units import BLOCK_CHUNK, BLOCK_ROWS, TOKEN_CHUNK
from flexgen_h2o.kernels import blocked as blocked_rows
from flexgen_h2o.kernels.blocked import BlockedRows, block_rows
from flexgen_h2o.kernels.linear import DenseRows, RowParts, add_linear, linear, linear_relu

SHAPES = [(64, 64), (192, 128), (128, 1024), (1024, 320)]
ROUNDING = 2.0**-7  # of bf16, relative: a unit in the last place of the larger neighbour

needs_blocking = pytest.mark.skipif(not blocked_rows._works(), reason="torch does not block here")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def check(found: torch.Tensor, want: torch.Tensor) -> None:
    """want: fp32. Sums round once, or twice where something is added to a product that was rounded before."""
    assert found.dtype == torch.bfloat16
    assert torch.all((found.float() - want).abs() <= 2 * ROUNDING * want.abs().clamp(min=8.0))


@needs_blocking
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("shape", "n"), list(zip(SHAPES, (1, 3, 32, 100), strict=True)))
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
@pytest.mark.parametrize(("n", "has_bias"), [(1, True), (33, False), (TOKEN_CHUNK + 1, True)])
def test_relu_within_a_product_is_that_after_it(has_bias: bool, n: int) -> None:
    """To the bit, whichever way it takes: one part within a pass, or more of them, or too many rows, into `out`."""
    x, weight, bias = normal(n, 128), normal(192, 128), normal(192) if has_bias else None
    want = torch.relu(linear(x, block_rows(weight.clone()), bias, torch.empty(n, 192, dtype=torch.bfloat16)))
    assert (want == 0).any() and (want > 0).any()
    for parts in (block_rows(weight.clone()), (*block_rows(weight[:64].clone()), *block_rows(weight[64:].clone()))):
        out = torch.full((n, 192), torch.nan, dtype=torch.bfloat16)
        found = linear_relu(x, parts, bias, out)
        assert torch.equal(found, want)
        assert bool(out.isnan().all()) == (len(parts) == 1 and n <= TOKEN_CHUNK)


@needs_blocking
def test_more_rows_than_are_multiplied_at_a_time() -> None:
    x, weight = normal(2 * TOKEN_CHUNK + 5, 64), normal(64, 64)
    want = x.float() @ weight.float().t()
    (part,) = block_rows(weight)
    assert isinstance(part, BlockedRows)
    out = torch.empty(len(x), 64, dtype=torch.bfloat16)
    part.multiply(x, None, out, adds=False)
    check(out, want)


@needs_blocking
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
def test_long_parts_are_blocked_some_rows_at_a_time_and_odd_rows_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a part that is split at 16 rows is; and products over all of them, beside a part that is not resident."""
    monkeypatch.setattr(blocked_rows, "BLOCK_CHUNK", 2 * BLOCK_ROWS * 128 * 2 + 100)
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


@pytest.mark.parametrize("gone", ["_reorder_linear_weight", "_linear_pointwise", "_get_mkldnn_serialized_md"])
def test_without_the_private_operations_rows_stay(gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise AttributeError(gone)

    monkeypatch.setattr(torch.ops.mkldnn, gone, missing)
    assert not blocked_rows._works.__wrapped__()


def test_wrong_products_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", lambda x, w, *_: torch.zeros(len(x), w.shape[0]))
    assert not blocked_rows._works.__wrapped__()


def test_where_it_does_not_work_rows_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocked_rows, "_works", lambda: False)
    rows = normal(64, 64)
    before = rows.clone()
    (part,) = block_rows(rows)
    assert isinstance(part, DenseRows) and part.rows is rows and torch.equal(rows, before)


def test_a_chunk_holds_some_blocks_of_the_widest_matrices() -> None:
    """OPT-175B's 4 x 12,288 columns: a chunk is not what memory was not planned for."""
    assert BLOCK_CHUNK // (4 * 12288 * 2) >= 2 * BLOCK_ROWS
