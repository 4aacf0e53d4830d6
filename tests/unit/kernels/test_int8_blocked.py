"""Blocked int8 rows: the same values in the same bytes, the same products to the bit; what cannot be blocked stays."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flexgen_h2o.core.units import BLOCK_ROWS
from flexgen_h2o.kernels import int8 as int8_rows
from flexgen_h2o.kernels import int8_blocked
from flexgen_h2o.kernels.int8 import Int8Rows, codes_of, pack_int8_rows, scales_of
from flexgen_h2o.kernels.int8_blocked import BlockedInt8, block_int8_rows, blocked_products, int8_products_reference
from flexgen_h2o.kernels.linear import RowParts, add_linear, linear, linear_each, lookup
from flexgen_h2o.kernels.workspace import Workspace

SHAPES = [(64, 64), (192, 128), (128, 2048), (320, 1024)]
DTYPES = [torch.float32, torch.bfloat16]

needs_blocking = pytest.mark.skipif(not int8_blocked._works(), reason="torch does not block int8 here")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def room(rows: int, columns: int, n: int) -> Workspace:
    sizes = {
        "int8 inputs": rows * columns, "int8 input scales": 4 * rows, "int8 weight scales": 4 * n,
        "int8 sums": 4 * rows * n,
    }  # fmt: skip
    return Workspace(torch.full((sum(sizes.values()),), 77, dtype=torch.uint8), sizes, torch.float32)


def blocked(packed: torch.Tensor) -> BlockedInt8:
    (part,) = block_int8_rows(packed)
    assert isinstance(part, BlockedInt8)
    return part


@needs_blocking
@pytest.mark.parametrize(("shape", "n"), list(zip(SHAPES, (1, 3, 32, 100), strict=True)))
def test_products_are_the_reference_to_the_bit(shape: tuple[int, int], n: int) -> None:
    """Of the largest codes there are, too."""
    codes = torch.randint(-127, 128, (n, shape[1]), dtype=torch.int8)
    weight = torch.randint(-127, 128, shape).float()
    weight[:, 0] = 127  # a scale of 1: the codes are the values
    codes[0], weight[0], weight[1, 1:] = 127, 127, -127
    want = torch.empty(n, shape[0], dtype=torch.int32)
    int8_products_reference(codes, weight.to(torch.int8), want)
    found = blocked_products(codes.view(torch.uint8) ^ 128, blocked(pack_int8_rows(weight)))
    assert torch.equal(found, want.float()) and want[0, 0] == 127 * 127 * shape[1]


@needs_blocking
def test_rows_are_blocked_where_they_lie() -> None:
    """In as many bytes, and nothing around them is touched. Values and scales are what they were."""
    packed = pack_int8_rows(torch.randn(128, 192))
    arena = torch.full((3, *packed.shape), 77, dtype=torch.uint8)
    arena[1] = packed
    part = blocked(arena[1])
    assert part.memory.data_ptr() == arena[1].data_ptr() == torch.ops.mkldnn.data_ptr(part.opaque)
    assert part.memory.numel() == packed.numel() and len(part) == 128
    assert bool((arena[0] == 77).all() and (arena[2] == 77).all()) and not torch.equal(arena[1], packed)
    assert torch.equal(part.rows_at(torch.arange(128)), codes_of(packed, 192))
    assert torch.equal(part.scales, scales_of(packed))


@needs_blocking
@pytest.mark.parametrize(("has_bias", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_no_bit_depends_on_which_rows_are_blocked(
    has_bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that are blocked some rows at a time, odd rows, and a part that is not resident; few sums at a time."""
    monkeypatch.setattr(int8_blocked, "BLOCK_CHUNK", 2 * BLOCK_ROWS * 128 + 100)
    weight, x = torch.randn(336 + 48, 128), torch.randn(9, 128).to(dtype)
    bias = torch.randn(384).to(dtype) if has_bias else None
    packed, ws = pack_int8_rows(weight), room(9, 128, 384)
    whole: RowParts = (Int8Rows(packed, 128, ws),)
    pieces = (*block_int8_rows(packed[:336].clone()), packed[336:])
    assert [(type(p), len(p)) for p in pieces] == [
        (BlockedInt8, 128), (BlockedInt8, 128), (BlockedInt8, 64), (torch.Tensor, 16), (torch.Tensor, 48),
    ]  # fmt: skip
    parts: RowParts = tuple(Int8Rows(piece, 128, ws) for piece in pieces)
    want = linear(x, whole, bias, torch.empty(9, 384, dtype=dtype))
    monkeypatch.setattr(int8_rows, "INT8_TILE", 4 * 128)
    out = torch.full((9, 391), torch.nan, dtype=dtype)
    linear(x, parts, bias, out[:, 7:])
    assert torch.equal(out[:, 7:], want) and bool(out[:, :7].isnan().all())
    total, other = (torch.ones(9, 384, dtype=dtype) for _ in range(2))
    add_linear(total, x, parts, bias)
    add_linear(other, x, whole, bias)
    assert torch.equal(total, other)
    ids = torch.tensor([383, 0, 64, 129, 335, 336, 64])
    rows = [lookup(ids, table, torch.empty(7, 128, dtype=dtype)) for table in (whole, parts)]
    assert torch.equal(*rows)


@needs_blocking
@pytest.mark.parametrize("blocks_first", [True, False])
def test_inputs_serve_several_matrices(blocks_first: bool) -> None:
    """Blocked ones take them around 128, others around 0, in any order."""
    x, weights, ws = torch.randn(5, 64), torch.randn(3, 64, 64), room(5, 64, 64)
    packed = [pack_int8_rows(weight) for weight in weights]
    want = [linear(x, (Int8Rows(rows, 64, ws),), None, torch.empty(5, 64)) for rows in packed]
    parts = [blocked(rows) if (i % 2 == 0) == blocks_first else rows for i, rows in enumerate(packed)]
    outs = [torch.empty(5, 64) for _ in packed]
    linear_each(x, [((Int8Rows(part, 64, ws),), None, out) for part, out in zip(parts, outs, strict=True)])
    assert all(torch.equal(a, b) for a, b in zip(outs, want, strict=True))


@pytest.mark.parametrize(("rows", "columns"), [(64, 72), (63, 64), (64, 60)])
def test_what_stays_as_it_is(rows: int, columns: int) -> None:
    packed = pack_int8_rows(torch.randn(rows, columns))
    (part,) = block_int8_rows(packed)
    assert part is packed


def test_rows_that_lie_apart_stay() -> None:
    packed = pack_int8_rows(torch.randn(128, 64))[::2]
    (part,) = block_int8_rows(packed)
    assert part is packed


@pytest.mark.parametrize("gone", ["qlinear_prepack", "qlinear_pointwise"])
def test_without_the_private_operations_rows_stay(gone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise AttributeError(gone)

    monkeypatch.setattr(torch.ops.onednn, gone, missing)
    int8_blocked._layout.cache_clear()
    assert not int8_blocked._works.__wrapped__()


@needs_blocking
def test_instructions_that_cut_sums_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of CPUs without VNNI do: neighbours' products are added in 16 bits."""
    exact = torch.ops.onednn.qlinear_pointwise

    def cut(codes: torch.Tensor, *others: object) -> torch.Tensor:
        result: torch.Tensor = exact(codes, *others)
        return result.clamp(-(2.0**24), 2.0**24)

    monkeypatch.setattr(torch.ops.onednn, "qlinear_pointwise", cut)
    assert not int8_blocked._works.__wrapped__()


@needs_blocking
def test_another_layout_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_blocked, "_in_blocks", lambda values: values.contiguous().view(-1).view(torch.uint8))
    assert not int8_blocked._works.__wrapped__()


def test_where_it_does_not_work_rows_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_blocked, "_works", lambda: False)
    packed = pack_int8_rows(torch.randn(64, 64))
    before = packed.clone()
    (part,) = block_int8_rows(packed)
    assert part is packed and torch.equal(packed, before)
