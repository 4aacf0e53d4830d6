"""Products in int8: the error of a code, compiled loops and `_int_mm` against references, odd shapes, bad values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.core.packing import int8_row_bytes
from flexgen_h2o.core.units import ALIGN, INT8_TILE, round_up
from flexgen_h2o.kernels import int8 as int8_rows
from flexgen_h2o.kernels import int8_blocked as int8_sums
from flexgen_h2o.kernels.int8 import (
    Int8Rows,
    codes_of,
    pack_int8_rows,
    quantise_rows,
    quantise_rows_reference,
    rescale,
    rescale_reference,
    scales_of,
)
from flexgen_h2o.kernels.int8_blocked import int8_products, int8_products_reference
from flexgen_h2o.kernels.linear import add_linear, linear, lookup
from flexgen_h2o.kernels.workspace import Workspace

WIDTHS = [1, 2, 3, 16, 60, 64, 83, 127, 200, 1025]
DTYPES = [torch.float32, torch.bfloat16]


def room(rows: int, columns: int, n: int, dtype: torch.dtype = torch.float32) -> Workspace:
    sizes = {
        "int8 inputs": rows * columns, "int8 input scales": 4 * rows, "int8 weight scales": 4 * n,
        "int8 sums": 4 * min(rows * n, INT8_TILE),
    }  # fmt: skip
    sizes = {name: round_up(nbytes, ALIGN) for name, nbytes in sizes.items()}
    return Workspace(torch.full((sum(sizes.values()),), 77, dtype=torch.uint8), sizes, dtype)


def multiply(x: torch.Tensor, part: Int8Rows, bias: torch.Tensor | None, out: torch.Tensor) -> None:
    linear(x, (part,), bias, out)


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = torch.full(x.shape, 77, dtype=torch.int8), torch.full((len(x),), float("nan"))
    quantise_rows(x, codes, scales)
    return codes, scales


def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What `multiply` is, in float64, from the same codes."""
    codes, scales = quantised(x)
    packed = pack_int8_rows(weight)
    values = codes_of(packed, weight.shape[1]).double() * scales_of(packed).double()[:, None]
    out = (codes.double() * scales.double()[:, None]) @ values.t()
    return out if bias is None else out + bias.double()


@settings(max_examples=100)
@given(
    st.integers(1, 5), st.sampled_from(WIDTHS), st.integers(0, 10**6), st.sampled_from([*DTYPES, torch.float16]),
    st.floats(-3, 3), st.floats(1e-4, 100),
)  # fmt: skip
def test_a_weight_is_off_by_half_a_step_at_most(
    rows: int, columns: int, seed: int, dtype: torch.dtype, offset: float, spread: float
) -> None:
    values = (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * spread + offset).to(dtype)
    packed = pack_int8_rows(values)
    assert packed.shape == (rows, int8_row_bytes(columns)) and packed.dtype == torch.uint8
    codes, scales = codes_of(packed, columns), scales_of(packed)
    largest = values.float().abs().amax(dim=1)
    assert torch.allclose(scales, largest / 127, rtol=1e-6)
    off = (codes.float() * scales[:, None] - values.float()).abs()
    assert bool((off <= scales[:, None] * 0.5001 + 1e-30).all())
    assert int(codes.abs().max()) <= 127


def test_the_format() -> None:
    """Codes, padding to a multiple of 4 bytes, the scale in float32 and the sum of the codes in int32."""
    packed = pack_int8_rows(torch.tensor([[127.0, -2.0, 64.0, 0.4, 0.6]]))
    assert packed[0, :8].tolist() == [127, 254, 64, 0, 1, 0, 0, 0]
    assert packed[0, 8:12].view(torch.float32).tolist() == [1.0]
    assert packed[0, 12:].view(torch.int32).tolist() == [127 - 2 + 64 + 0 + 1]


@pytest.mark.parametrize("columns", [1, 3, 83, 1025])
@pytest.mark.parametrize("dtype", DTYPES)
def test_compiled_quantising_is_the_reference_but_for_ties(columns: int, dtype: torch.dtype) -> None:
    """Rows may lie apart, and nothing beside them is written."""
    x, wide = torch.randn(50, columns + 3).to(dtype)[:, :columns], torch.full((52, columns + 2), 77, dtype=torch.int8)
    codes, scales = wide[1:51, :columns], torch.empty(50)
    quantise_rows(x, codes, scales)
    want, want_scales = torch.empty(50, columns, dtype=torch.int8), torch.empty(50)
    quantise_rows_reference(x, want, want_scales)
    assert torch.allclose(scales, want_scales, rtol=1e-6)
    off = (codes.int() - want.int()).abs()
    assert off.max() <= 1 and (off == 0).float().mean() > 0.99
    assert bool((wide[[0, 51]] == 77).all() and (wide[:, columns:] == 77).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_stay_zeros(dtype: torch.dtype) -> None:
    for quantise in (quantise_rows, quantise_rows_reference):
        codes, scales = torch.full((2, 9), 77, dtype=torch.int8), torch.full((2,), 7.0)
        quantise(torch.zeros(2, 9, dtype=dtype), codes, scales)
        assert not codes.any() and not scales.any()


@pytest.mark.parametrize(
    ("bad", "dtype"), [(float("nan"), torch.float32), (float("inf"), torch.bfloat16), (float("-inf"), torch.float32)]
)
def test_a_broken_input_shows(bad: float, dtype: torch.dtype) -> None:
    """In its own row, and in none else."""
    x, weight = torch.randn(3, 40).to(dtype), torch.randn(8, 40)
    x[1, 7] = bad
    out = torch.zeros(3, 8, dtype=dtype)
    multiply(x, Int8Rows(pack_int8_rows(weight), 40, room(3, 40, 8)), None, out)
    assert not torch.isfinite(out[1]).any() and torch.isfinite(out[[0, 2]]).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite(bad: float) -> None:
    values = torch.randn(3, 20)
    values[2, 19] = bad
    with pytest.raises(ValueError, match="not finite"):
        pack_int8_rows(values)


@pytest.mark.parametrize(("rows", "columns"), [(1, 5000), (2, 1), (17, 3), (33, 64), (2, 83), (17, 1025)])
def test_products_are_the_reference_to_the_bit(rows: int, columns: int) -> None:
    """Of the largest codes there are, too; the weight's rows lie apart."""
    codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    weight = torch.randint(-127, 128, (50, int8_row_bytes(columns)), dtype=torch.int8)[:, :columns]
    codes[0], weight[0], weight[1] = 127, 127, -127
    found, want = (torch.full((rows, 50), 7, dtype=torch.int32) for _ in range(2))
    int8_products(codes, weight, found)
    int8_products_reference(codes, weight, want)
    assert torch.equal(found, want) and want[0, 0] == 127 * 127 * columns
    assert torch.equal(want, (codes.double() @ weight.double().t()).to(torch.int32))


def test_products_without_int_mm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that has no `_int_mm`, one that refuses, and one whose sums are cut."""
    codes, weight = (torch.randint(-127, 128, (n, 40), dtype=torch.int8) for n in (3, 5))
    want, found = torch.empty(3, 5, dtype=torch.int32), torch.empty(3, 5, dtype=torch.int32)
    int8_products_reference(codes, weight, want)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("not here")

    def cut(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_((a.float() @ b.float()).clamp(-(2**15), 2**15))

    for other in (None, refuse, cut):
        int8_sums._int_mm_works.cache_clear()
        with monkeypatch.context() as patch:
            patch.delattr(torch, "_int_mm") if other is None else patch.setattr(torch, "_int_mm", other)
            int8_products(codes, weight, found.zero_())
        assert torch.equal(found, want)
    int8_sums._int_mm_works.cache_clear()


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize(
    ("columns", "dtype", "counted"),
    [
        (1, torch.bfloat16, torch.int32), (83, torch.bfloat16, torch.float32), (127, torch.float32, torch.float32),
        (200, torch.float32, torch.int32),
    ],
)  # fmt: skip
def test_compiled_rescaling_is_the_reference(
    columns: int, adds: bool, has_bias: bool, dtype: torch.dtype, counted: torch.dtype
) -> None:
    sums = torch.randint(-(10**6), 10**6, (5, columns), dtype=torch.int32).to(counted)
    rows, scales = torch.rand(5) / 100, torch.rand(columns) / 100
    bias = torch.randn(columns).to(dtype) if has_bias else None
    before = torch.randn(7, columns + 3).to(dtype)
    found, want = before.clone(), before.clone()
    rescale(sums, rows, scales, bias, found[1:6, 1:-2], adds)
    rescale_reference(sums, rows, scales, bias, want[1:6, 1:-2], adds)
    assert torch.allclose(found.float(), want.float(), rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-4)
    assert not torch.equal(found[1:6, 1:-2], before[1:6, 1:-2])
    found[1:6, 1:-2] = before[1:6, 1:-2]
    assert torch.equal(found, before), "wrote beside its rows"


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9), st.sampled_from(WIDTHS), st.integers(1, 40), st.booleans(), st.booleans(),
    st.sampled_from([*DTYPES, torch.float16]), st.integers(0, 40),
)  # fmt: skip
def test_linear_and_add_linear_over_parts(
    rows: int, columns: int, n: int, has_bias: bool, adds: bool, dtype: torch.dtype, at: int
) -> None:
    x, weight = torch.randn(rows, columns).to(dtype), torch.randn(n, columns)
    bias = torch.randn(n).to(dtype) if has_bias else None
    ws = room(rows, columns, n, dtype)
    parts = tuple(
        Int8Rows(pack_int8_rows(part), columns, ws) for part in (weight[:at], weight[at:]) if len(part)
    )  # fmt: skip
    before = torch.randn(rows, n).to(dtype)
    out, want = before.clone(), plain(x, weight, bias)
    if adds:
        add_linear(out, x, parts, bias)
        want = want + before.double()
    else:
        assert linear(x, parts, bias, out) is out
    assert ((out.double() - want).abs() <= (2**-8 if dtype != torch.float32 else 1e-5) * (1 + want.abs() + 4)).all()


def test_more_rows_than_are_quantised_at_a_time_and_more_sums_than_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = torch.randn(50, 33), torch.randn(70, 33), torch.randn(70)
    whole, found = torch.empty(50, 70), torch.empty(50, 70)
    packed = pack_int8_rows(weight)
    multiply(x, Int8Rows(packed, 33, room(50, 33, 70)), bias, whole)
    monkeypatch.setattr(int8_rows, "TOKEN_CHUNK", 16)
    monkeypatch.setattr(int8_rows, "INT8_TILE", 16 * 9)
    sizes = {"int8 inputs": 16 * 33, "int8 input scales": 64, "int8 weight scales": 4 * 70, "int8 sums": 4 * 16 * 9}
    ws = Workspace(torch.empty(sum(sizes.values()), dtype=torch.uint8), sizes, torch.float32)
    # So little room: a larger slice would not be found.
    multiply(x, Int8Rows(packed, 33, ws), bias, found)
    assert torch.equal(found, whole)


@pytest.mark.parametrize(("at", "dtype"), [(0, torch.float32), (5, torch.bfloat16), (12, torch.float32)])
def test_looked_up_rows_are_code_times_scale(at: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8_rows, "UNPACK_CHUNK", 40)  # some rows at a time
    table, ids = torch.randn(12, 19), torch.tensor([3, 11, 0, 3, 7])
    ws = room(1, 1, 1)
    parts = tuple(Int8Rows(pack_int8_rows(part), 19, ws) for part in (table[:at], table[at:]) if len(part))
    whole = Int8Rows(packed := pack_int8_rows(table), 19, ws)
    want = (codes_of(packed, 19).float() * scales_of(packed)[:, None])[ids].to(dtype)
    assert torch.equal(lookup(ids, parts, torch.empty(5, 19, dtype=dtype)), want)
    whole.look_up(ids, out := torch.empty(5, 19, dtype=dtype))
    assert torch.equal(out, want)


def test_torch_operations_take_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x, sums = (torch.randint(-127, 128, (23, 70), dtype=torch.int32) for _ in range(2))
    x[:, 0] = 127  # a scale of 1: no code is near to another
    whole, parts = [], []
    for found, chunk in ((whole, 10**6), (parts, 300)):
        monkeypatch.setattr(int8_rows, "UNPACK_CHUNK", chunk)
        codes, scales, out = torch.empty(23, 70, dtype=torch.int8), torch.empty(23), torch.empty(23, 70)
        quantise_rows_reference(x.float(), codes, scales)
        rescale_reference(sums, scales, torch.ones(70), None, out, adds=False)
        found += [codes, scales, out]
    assert torch.equal(whole[0], x.to(torch.int8))
    assert all(torch.allclose(a.float(), b.float(), rtol=1e-6) for a, b in zip(whole, parts, strict=True))


def test_on_two_threads() -> None:
    x, weight = torch.randn(700, 1000), torch.randn(90, 1000)
    part, found = Int8Rows(pack_int8_rows(weight), 1000, room(700, 1000, 90)), []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        multiply(x, part, None, out := torch.empty(700, 90))
        found.append(out)
    assert torch.equal(*found)
