"""Codes in int8: their error, and compiled loops against references. Products: test_products.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.core.packing import int8_row_bytes
from flexgen_h2o.kernels import workspace
from flexgen_h2o.kernels.int8 import (
    codes_of,
    pack_int8_rows,
    quantise_rows,
    requantise_rows,
    scales_of,
)
from flexgen_h2o.kernels.packed import pack_rows, unpack_rows

WIDTHS = [1, 2, 3, 16, 60, 64, 83, 127, 200, 1025]
DTYPES = [torch.float32, torch.bfloat16]


# ---- codes


@settings(max_examples=60)
@given(
    st.integers(1, 5),
    st.sampled_from(WIDTHS),
    st.sampled_from([*DTYPES, torch.float16]),
    st.floats(-3, 3),
    st.floats(1e-4, 100),
)
def test_a_weight_is_off_by_half_a_step_at_most(
    rows: int, columns: int, dtype: torch.dtype, offset: float, spread: float
) -> None:
    values = (torch.randn(rows, columns) * spread + offset).to(dtype)
    packed = pack_int8_rows(values)
    assert packed.shape == (rows, int8_row_bytes(columns)) and packed.dtype == torch.uint8
    codes = codes_of(packed, columns)
    scales = scales_of(packed)
    assert torch.allclose(scales, values.float().abs().amax(dim=1) / 127, rtol=1e-6)
    off = (codes.float() * scales[:, None] - values.float()).abs()
    assert bool((off <= scales[:, None] * 0.5001 + 1e-30).all()) and int(codes.abs().max()) <= 127


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_is_not_finite_is_refused(bad: float) -> None:
    weight = torch.randn(8, 40)
    weight[2, 19] = bad
    with pytest.raises(ValueError, match="not finite"):
        pack_int8_rows(weight)


def test_the_format() -> None:
    """Codes, padding to a multiple of 4 bytes, the scale in float32 and the sum of the codes in
    int32."""
    packed = pack_int8_rows(torch.tensor([[127.0, -2.0, 64.0, 0.4, 0.6]]))
    assert packed[0, :8].tolist() == [127, 254, 64, 0, 1, 0, 0, 0]
    assert packed[0, 8:12].view(torch.float32).tolist() == [1.0]
    assert packed[0, 12:].view(torch.int32).tolist() == [127 - 2 + 64 + 0 + 1]


@pytest.mark.parametrize(
    ("columns", "dtype"), [(1, DTYPES[1]), (3, DTYPES[0]), (83, DTYPES[1]), (1025, DTYPES[0])]
)
def test_compiled_quantising_is_the_reference_but_for_ties(
    columns: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows may lie apart, and nothing beside them is written; zeros stay zeros."""
    x = torch.randn(50, columns + 3).to(dtype)[:, :columns]
    wide = torch.full((52, columns + 2), 77, dtype=torch.int8)
    x[7] = 0
    codes = wide[1:51, :columns]
    scales = torch.full((50,), 7.0)
    quantise_rows(x, codes, scales)
    want = torch.empty(50, columns, dtype=torch.int8)
    want_scales = torch.empty(50)
    monkeypatch.setattr(workspace, "UNPACK_CHUNK", 300)  # some rows at a time
    quantise_rows.torch(x, want, want_scales)
    assert torch.allclose(scales, want_scales, rtol=1e-6) and not codes[7].any() and not scales[7]
    off = (codes.int() - want.int()).abs()
    assert off.max() <= 1 and (off == 0).float().mean() > 0.99
    assert bool((wide[[0, 51]] == 77).all() and (wide[:, columns:] == 77).all())


# ---- rows of 4 bits as int8 rows

SHAPES = [
    (1, 1),
    (5, 77),
    (40, 72),
    (80, 2048),
    (32, 1216),
    (336, 192),
    (16464, 64),
]


def packed_rows(n: int, columns: int) -> torch.Tensor:
    """Of all sizes; with a row of zeros, one of equal values, one with an outlier at each end, tiny
    and huge ones."""
    values = torch.randn(n, columns) * torch.rand(n, 1)
    for row, scale in enumerate((0.0, 0.0, 1.0, 1e-32, 1e30)[:n]):
        values[row] *= scale
    values[1:2] += 0.3
    values[2:3, 0] = -1000
    values[5:6, -1] = 1000
    return pack_rows(values, 4)


def in_order(packed: torch.Tensor, columns: int) -> torch.Tensor:
    out = torch.full((len(packed), int8_row_bytes(columns)), 77, dtype=torch.uint8)
    requantise_rows(packed, out, columns)
    return out


@pytest.mark.parametrize("shape", SHAPES)
def test_requantised_in_order(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference to the bit, scales, sums and padding too; half a step from the values at
    most."""
    packed = packed_rows(*shape)
    want = torch.full((shape[0], int8_row_bytes(shape[1])), 55, dtype=torch.uint8)
    monkeypatch.setattr(
        workspace, "UNPACK_CHUNK", 3 * shape[1]
    )  # the reference some rows at a time
    requantise_rows.torch(packed[:500], want[:500], shape[1])
    rows = in_order(packed, shape[1])
    assert torch.equal(rows[:500], want[:500])
    values = unpack_rows.torch(packed, 4, torch.empty(shape))
    codes = codes_of(rows, shape[1])
    scales = scales_of(rows).unsqueeze(1)
    usual = values.abs().amax(dim=1, keepdim=True) >= 1e-30
    off = (codes * scales - values).abs()
    assert bool((off <= 0.5001 * scales)[usual.expand_as(off)].all())
    assert bool((codes == 0)[~usual.expand_as(off)].all())
    sums = rows[:, -4:].contiguous().view(torch.int32).squeeze(1)
    assert torch.equal(sums, codes.sum(1, dtype=torch.int32))
    # The scale is of what the groups can hold, hardly more than what they do.
    assert bool((scales * 127 <= values.abs().amax(dim=1, keepdim=True) * 1.1)[usual].all())
