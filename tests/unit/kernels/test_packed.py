"""Packed numbers: what the format loses, and loops and kernels against torch operations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.core.packing import SlotPacking
from flexgen_h2o.kernels import packed as packed_kernels
from flexgen_h2o.kernels.packed import (
    pack_columns,
    pack_rows,
    unpack_columns,
    unpack_rows,
)

WIDTHS = [1, 3, 16, 20, 33, 64, 67, 80, 96, 128, 160, 256, 1024]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BOTH = pytest.mark.parametrize("pack", [pack_columns, pack_columns.torch])
# Bits and dtype have a loop of their own, which takes seconds to compile.
FEW = [(3, torch.float32), (4, torch.float32), (4, torch.bfloat16)]
REST = [(bits, dtype) for bits in (3, 4, 8) for dtype in DTYPES if (bits, dtype) not in FEW]


@pytest.mark.parametrize(
    ("width", "groups", "words"),  # with 3, 4 and 8 bits
    [(16, 1, (3, 3, 5)), (64, 1, (7, 9, 17)), (80, 2, (10, 12, 22)), (128, 2, (14, 18, 34))],
)
def test_bytes_of_a_slot(width: int, groups: int, words: tuple[int, ...]) -> None:
    for bits, count in zip((3, 4, 8), words, strict=True):
        packing = SlotPacking(width, bits)
        assert packing.slot_bytes == 4 * count and packing.groups == groups


@pytest.mark.parametrize(
    ("bits", "dtype"), FEW + [pytest.param(*one, marks=pytest.mark.slow) for one in REST]
)
@BOTH
@settings(max_examples=40)
@given(st.sampled_from(WIDTHS[:-1]), st.floats(-1e4, 1e4), st.floats(1e-6, 1e4))
def test_no_number_is_further_off_than_half_a_step(
    pack: Any, bits: int, dtype: torch.dtype, width: int, offset: float, size: float
) -> None:
    packing = SlotPacking(width, bits)
    columns = (offset + size * torch.randn(5, 3, width)).to(dtype)
    packed = pack(columns, packing)
    assert packed.shape == (5, 3, packing.words) and packed.dtype == torch.int32
    x = columns.double()
    scales = (packed[..., packing.value_words :] << 16).view(torch.float32).double()
    steps = scales[..., torch.arange(width) // packing.group]
    off = (unpack_columns(packed, packing, torch.float32).double() - x).abs()
    assert bool((off <= 0.5 * steps * (1 + 1e-3) + 2.0**-22 * x.abs()).all())
    for part, scale in zip(x.split(packing.group, dim=-1), scales.unbind(-1), strict=True):
        # the steps are no larger than the numbers need, but for bf16's rounding
        needed = (part.amax(-1) - part.amin(-1) + part.amin(-1).abs() * 2.0**-7) / packing.levels
        assert bool((scale <= needed * (1 + 2.0**-7) + 1e-30).all())


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("width", WIDTHS)
def test_whole_numbers_are_packed_exactly_and_alike(bits: int, width: int) -> None:
    """No rounding moves their codes, so loops and torch operations agree bit for bit."""
    packing = SlotPacking(width, bits)
    columns = torch.randint(0, 2**bits, (7, width)).float()
    for group in columns.split(packing.group, dim=1):  # a step of 1
        group[:, 0] = 0
        group[:, 1:2] = 2**bits - 1
    packed = pack_columns(columns, packing)
    assert torch.equal(packed, pack_columns.torch(columns, packing))
    assert torch.equal(unpack_columns(packed, packing, torch.float32), columns)


def by_hand(row: bytes, columns: int, bits: int) -> list[float]:
    """Decode the format value by value."""
    found = []
    packing = SlotPacking(columns, bits)
    for i in range(columns):
        code = row[i] if bits == 8 else (row[i // 2] >> (4 * (i % 2))) & 15
        at = 4 * (packing.value_words + i // packing.group)
        scale, least = torch.frombuffer(bytearray(row[at : at + 4]), dtype=torch.bfloat16).tolist()
        found.append(least + code * scale)
    return found


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", WIDTHS)
def test_rows_are_unpacked_by_the_format(bits: int, columns: int, monkeypatch: Any) -> None:
    """The loop gives the bits of torch operations, and writes nothing beside its rows."""
    packed = pack_rows(torch.randn(19, columns), bits)
    monkeypatch.setattr(packed_kernels, "UNPACK_CHUNK", 300)
    for dtype in DTYPES:
        out = torch.full((21, columns), 7.0, dtype=dtype)
        unpack_rows(packed, bits, out[1:20])
        by_torch = unpack_rows.torch(packed, bits, torch.empty(19, columns, dtype=dtype))
        assert torch.equal(out[1:20], by_torch) and bool((out[[0, 20]] == 7).all())
    want = torch.tensor([by_hand(bytes(row.tolist()), columns, bits) for row in packed[:2]])
    found = unpack_rows(packed[:2], bits, torch.empty(2, columns))
    assert torch.allclose(found, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scale", [1e-36, 1e-30, 1e30])
def test_any_magnitude(scale: float) -> None:
    values = torch.randn(3, 128).mul_(scale)
    found = unpack_rows(pack_rows(values, 8), 8, torch.empty(3, 128))
    assert (found - values).abs().max() <= 0.02 * values.abs().max()
    equal = torch.full((1, 64), scale).bfloat16().float()
    packed = pack_columns(equal, SlotPacking(64, 4))
    assert torch.equal(unpack_columns(packed, SlotPacking(64, 4), torch.float32), equal)


# Kinds of NaN whose bits, cut to bf16 or rounded up, would be those of infinity or of zero.
NANS = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF], dtype=torch.int32)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, 3.3e38, *NANS.view(torch.float32)])
@pytest.mark.parametrize("at", [0, 64, 99])
def test_what_cannot_be_packed(bad: Any, at: int) -> None:
    """A value is not finite, or a group spans more than float32 does."""
    values = torch.randn(3, 100)
    values[1, at] = bad
    if bad == 3.3e38:
        values[1, at - 1 if at == 99 else at + 1] = -bad
    with pytest.raises(ValueError, match="not finite, or too large"):
        pack_rows(values, 4)


@BOTH
@pytest.mark.parametrize("odd", [math.nan, -math.nan, math.inf, -math.inf])
def test_in_a_column_what_is_not_finite_shows_in_its_group(odd: float, pack: Any) -> None:
    packing = SlotPacking(128, 4)
    columns = torch.randn(1, 128)
    columns[0, 70] = odd
    back = unpack_columns(pack(columns, packing), packing, torch.float32)
    assert not bool(back[0, 64:].isfinite().any()) and bool(back[0, :64].isfinite().all())


def test_columns_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="is not of width 64"):
        pack_columns(torch.zeros(3, 63), SlotPacking(64, 4))
