"""Packed rows: the error of a value, the compiled loop against torch operations, and what cannot be packed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.core.packing import SlotPacking
from flexgen_h2o.kernels import packed as packed_rows
from flexgen_h2o.kernels.packed import pack_rows, unpack_rows, unpack_rows_reference

WIDTHS = [1, 2, 3, 60, 63, 64, 65, 83, 127, 128, 200, 1024]
BITS = [4, 8]


def unpacked(packed: torch.Tensor, bits: int, columns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return unpack_rows(packed, bits, torch.full((len(packed), columns), float("nan"), dtype=dtype))


def scales(packed: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """(rows, columns): the scale of each value."""
    packing = SlotPacking(columns, bits)
    ends = packed[:, 4 * packing.value_words :].contiguous().view(torch.bfloat16).float()
    return ends[:, ::2].repeat_interleave(packing.group, dim=1)[:, :columns]


def by_hand(row: bytes, columns: int, bits: int) -> list[float]:
    """The format, value by value."""
    found, packing = [], SlotPacking(columns, bits)
    for i in range(columns):
        code = row[i] if bits == 8 else (row[i // 2] >> (4 * (i % 2))) & 15
        at = 4 * (packing.value_words + i // packing.group)
        scale, least = (torch.frombuffer(bytearray(row[a : a + 2]), dtype=torch.bfloat16).item() for a in (at, at + 2))
        found.append(least + code * scale)
    return found


@settings(max_examples=150)
@given(
    st.integers(1, 5), st.sampled_from(WIDTHS), st.sampled_from(BITS), st.integers(0, 10**6),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.floats(-3, 3), st.floats(1e-4, 100),
)  # fmt: skip
def test_a_value_is_off_by_half_a_step_at_most(
    rows: int,
    columns: int,
    bits: int,
    seed: int,
    dtype: torch.dtype,
    offset: float,
    spread: float,
) -> None:
    """And a step is hardly larger than it must be, unless all values are far from 0 for their spread."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * spread + offset
    values = values.to(dtype).float()
    packed = pack_rows(values.to(dtype), bits)
    assert packed.shape == (rows, SlotPacking(columns, bits).slot_bytes) and packed.dtype == torch.uint8
    step = scales(packed, bits, columns)
    found = unpacked(packed, bits, columns)
    rounding = 1e-6 * values.abs().max()
    assert bool(((found - values).abs() <= step / 2 + rounding).all())
    ideal = (values.max() - values.min()) / (2**bits - 1)
    assert step.max() <= 1.02 * ideal + values.abs().max() / (64 * (2**bits - 1)) + 1e-38


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_is_the_reference_to_the_bit(bits: int, columns: int, dtype: torch.dtype) -> None:
    packed = pack_rows(torch.randn(19, columns), bits)
    out = torch.full((21, columns), 7.0, dtype=dtype)
    unpack_rows(packed, bits, out[1:20])
    assert torch.equal(out[1:20], unpack_rows_reference(packed, bits, torch.empty(19, columns, dtype=dtype)))
    assert bool((out[[0, 20]] == 7).all()), "wrote beside its rows"


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("columns", WIDTHS)
def test_the_format(bits: int, columns: int) -> None:
    values = torch.randn(2, columns)
    packed = pack_rows(values, bits)
    want = [by_hand(bytes(row.tolist()), columns, bits) for row in packed]
    assert torch.allclose(unpacked(packed, bits, columns), torch.tensor(want), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bits", BITS)
def test_constant_groups(bits: int) -> None:
    """Exact where bfloat16 has the value; else as near as any."""
    values = torch.tensor([0.0, -2.5, 1e-30, 1e30]).view(4, 1).expand(4, 100)
    found = unpacked(pack_rows(values, bits), bits, 100)
    assert torch.equal(found[:2], values[:2])
    assert torch.allclose(found, values, rtol=1e-2)


@pytest.mark.parametrize("scale", [1e-36, 1e-30, 1e30])
def test_any_magnitude(scale: float) -> None:
    values = torch.randn(3, 128).mul_(scale)
    found = unpacked(pack_rows(values, 8), 8, 128)
    assert (found - values).abs().max() <= 0.02 * values.abs().max()


def test_outliers_stay_within_their_group() -> None:
    values = torch.randn(1, 256)
    values[0, 70] = 1000.0
    off = (unpacked(pack_rows(values, 8), 8, 256) - values).abs()[0]
    assert off[:64].max() < 0.02 and off[128:].max() < 0.02


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 3.3e38])
@pytest.mark.parametrize("at", [0, 64, 99])
def test_what_cannot_be_packed(bad: float, at: int) -> None:
    values = torch.randn(3, 100)
    values[1, at] = bad
    if bad == 3.3e38:
        values[1, at - 1 if at > 64 or at == 99 else at + 1] = -bad
    with pytest.raises(ValueError, match="not finite, or too large"):
        pack_rows(values, 4)


@pytest.mark.parametrize("bits_of_it", [0x7FFFFFFF, 0x7F800001, -1, -0x7FFFFF])
def test_no_kind_of_nan_can_be_packed(bits_of_it: int) -> None:
    """Cut to bf16, or rounded up as a number is, its bits would be those of infinity or of zero."""
    values = torch.randn(3, 100)
    values.view(torch.int32)[1, 5] = bits_of_it
    assert values[1, 5].isnan()
    with pytest.raises(ValueError, match="not finite, or too large"):
        pack_rows(values, 4)


def test_torch_operations_take_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, whole = pack_rows(torch.randn(23, 70), 4), torch.empty(23, 70)
    unpack_rows_reference(packed, 4, whole)
    monkeypatch.setattr(packed_rows, "UNPACK_CHUNK", 300)
    assert torch.equal(unpack_rows_reference(packed, 4, torch.empty(23, 70)), whole)


def test_a_dtype_that_nothing_is_compiled_for() -> None:
    packed = pack_rows(torch.randn(3, 70), 4)
    assert torch.equal(unpacked(packed, 4, 70, torch.float16), unpacked(packed, 4, 70).half())


def test_on_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack_rows(torch.randn(700, 1000), 4)
    torch.set_num_threads(1)
    one = unpacked(packed, 4, 1000)
    torch.set_num_threads(2)
    assert torch.equal(unpacked(packed, 4, 1000), one)
