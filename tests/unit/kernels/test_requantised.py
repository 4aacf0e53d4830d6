"""Rows of 4 bits as int8 rows: the bits of the reference, in order and blocked, half a step from the values at most."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flexgen_h2o.core.packing import int8_row_bytes
from flexgen_h2o.kernels import int8_blocked
from flexgen_h2o.kernels import int8_blocked as requantised
from flexgen_h2o.kernels.int8 import codes_of, scales_of
from flexgen_h2o.kernels.int8_blocked import (
    BlockedInt8,
    blank_int8_rows,
    block_int8_rows,
    requantise_rows,
    requantise_rows_reference,
)
from flexgen_h2o.kernels.packed import pack_rows, unpack_rows_reference

SHAPES = [(1, 1), (3, 5), (5, 77), (16, 64), (64, 64), (80, 2048), (192, 128), (336, 192), (16464, 64)]

needs_blocking = pytest.mark.skipif(
    not (int8_blocked._works() and int8_blocked._can_fill()), reason="int8 rows are not blocked here"
)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def packed_rows(n: int, columns: int) -> torch.Tensor:
    """Of all sizes; with a row of zeros, one of equal values, one with an outlier, tiny and huge ones."""
    values = torch.randn(n, columns) * torch.rand(n, 1)
    for row, scale in enumerate((0.0, 0.0, 1.0, 1e-32, 1e30)[:n]):
        values[row] *= scale
    values[1:2] += 0.3
    values[2:3, 0] = -1000
    return pack_rows(values, 4)


def in_order(packed: torch.Tensor, columns: int) -> torch.Tensor:
    out = torch.full((len(packed), int8_row_bytes(columns)), 77, dtype=torch.uint8)
    requantise_rows(packed, 0, (out,), columns)
    return out


@pytest.mark.parametrize("shape", SHAPES)
def test_in_order_it_is_the_reference(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, scales, sums and padding too; the reference some rows at a time."""
    packed, want = packed_rows(*shape), torch.full((shape[0], int8_row_bytes(shape[1])), 55, dtype=torch.uint8)
    monkeypatch.setattr(requantised, "UNPACK_CHUNK", 3 * shape[1])
    requantise_rows_reference(packed[:500], want[:500], shape[1])
    assert torch.equal(in_order(packed, shape[1])[:500], want[:500])


@pytest.mark.parametrize("shape", SHAPES)
def test_no_value_is_off_by_more_than_half_a_step(shape: tuple[int, int]) -> None:
    packed = packed_rows(*shape)
    values = unpack_rows_reference(packed, 4, torch.empty(shape))
    rows = in_order(packed, shape[1])
    codes, scales = codes_of(rows, shape[1]), scales_of(rows).unsqueeze(1)
    usual = values.abs().amax(dim=1, keepdim=True) >= 1e-30
    off = (codes * scales - values).abs()
    assert bool((off <= 0.5001 * scales)[usual.expand_as(off)].all())
    assert bool((codes == 0)[~usual.expand_as(off)].all())
    sums = rows[:, -4:].contiguous().view(torch.int32).squeeze(1)
    assert torch.equal(sums, codes.sum(1, dtype=torch.int32))
    # The scale is of what the groups can hold, hardly more than what they do.
    assert bool((scales * 127 <= values.abs().amax(dim=1, keepdim=True) * 1.1)[usual].all())


@needs_blocking
@pytest.mark.parametrize("at", [0, 16, 48, 64, 160])
@pytest.mark.parametrize("shape", SHAPES[4:])
def test_blocked_it_is_the_same_rows_blocked(shape: tuple[int, int], at: int) -> None:
    """Filled in two parts, as a matrix comes that is split over tiers; what is left of the rows stays in order."""
    n, columns = shape
    packed, memory = packed_rows(n, columns), torch.full((n, int8_row_bytes(columns)), 77, dtype=torch.uint8)
    parts = blank_int8_rows(memory)
    assert isinstance(parts[0], BlockedInt8) and sum(map(len, parts)) == n
    at = min(at, n)
    requantise_rows(packed[at:], at, parts, columns)
    requantise_rows(packed[:at], 0, parts, columns)
    want = in_order(packed, columns)
    for part, other in zip(parts, block_int8_rows(want), strict=True):
        assert type(part) is type(other)
    assert torch.equal(memory, want)


def test_without_the_instructions_rows_are_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_blocked, "_can_fill", lambda: False)
    (whole,) = blank_int8_rows(memory := torch.empty(128, int8_row_bytes(64), dtype=torch.uint8))
    assert whole is memory
