"""Products in int8: the error of a code, compiled loops and blocked rows against references, odd
shapes, bad values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.core.packing import INT8_ROW_BYTES, int8_row_bytes
from flexgen_h2o.core.units import ALIGN, BLOCK_ROWS, INT8_TILE, round_up
from flexgen_h2o.kernels import int8, products, workspace
from flexgen_h2o.kernels import linear as linear_kernels
from flexgen_h2o.kernels.int8 import (
    Int8Rows,
    RequantisedRows,
    block_int8_rows,
    codes_of,
    int8_products,
    int8_products_reference,
    pack_int8_rows,
    quantise_rows,
    requantise_rows,
    rescale,
    scales_of,
)
from flexgen_h2o.kernels.linear import RowParts, add_linear, linear, linear_shared_input, lookup
from flexgen_h2o.kernels.packed import pack_rows, unpack_rows
from flexgen_h2o.kernels.workspace import Workspace

WIDTHS = [1, 2, 3, 16, 60, 64, 83, 127, 200, 1025]
DTYPES = [torch.float32, torch.bfloat16]
needs_blocking = pytest.mark.skipif(
    not products.has_loop(torch.uint8), reason="int8 rows are not blocked here"
)


def room(rows: int, columns: int, n: int, dtype: torch.dtype = torch.float32) -> Workspace:
    sizes = {
        "int8 inputs": rows * columns,
        "int8 input scales": 4 * rows,
        "int8 weight scales": 4 * n,
        "int8 sums": 4 * min(rows * n, INT8_TILE),
        "int8 rows": n * int8_row_bytes(columns),
    }
    sizes = {name: round_up(nbytes, ALIGN) for name, nbytes in sizes.items()}
    return Workspace(torch.full((sum(sizes.values()),), 77, dtype=torch.uint8), sizes, dtype)


def plain(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What products are, in float64, from the same codes."""
    codes = torch.empty(x.shape, dtype=torch.int8)
    scales = torch.empty(len(x))
    quantise_rows(x, codes, scales)
    packed = pack_int8_rows(weight)
    values = codes_of(packed, weight.shape[1]).double() * scales_of(packed).double()[:, None]
    out = (codes.double() * scales.double()[:, None]) @ values.t()
    return out if bias is None else out + bias.double()


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


@pytest.mark.parametrize(
    ("bad", "dtype"),
    [(float("nan"), torch.float32), (float("inf"), torch.bfloat16), (float("-inf"), torch.float32)],
)
def test_what_is_not_finite(bad: float, dtype: torch.dtype) -> None:
    """In an input it shows in its own row, and in none else; a weight with it is refused."""
    x = torch.randn(3, 40).to(dtype)
    weight = torch.randn(8, 40)
    x[1, 7] = bad
    out = torch.zeros(3, 8, dtype=dtype)
    linear(x, (Int8Rows(pack_int8_rows(weight), 40, room(3, 40, 8)),), None, out)
    assert not torch.isfinite(out[1]).any() and torch.isfinite(out[[0, 2]]).all()
    weight[2, 19] = bad
    with pytest.raises(ValueError, match="not finite"):
        pack_int8_rows(weight)


@pytest.mark.parametrize(
    ("columns", "dtype", "has_bias", "adds"),
    [
        (1, torch.bfloat16, True, True),
        (83, torch.bfloat16, False, True),
        (127, torch.float32, True, False),
        (200, torch.float32, False, False),
        (200, torch.bfloat16, True, False),
        (83, torch.float32, True, True),
    ],
)
def test_compiled_rescaling_is_the_reference(
    columns: int, dtype: torch.dtype, has_bias: bool, adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sums = torch.randint(-(10**6), 10**6, (5, columns), dtype=torch.int32)
    rows = torch.rand(5) / 100
    scales = torch.rand(columns) / 100
    bias = torch.randn(columns).to(dtype) if has_bias else None
    before = torch.randn(7, columns + 3).to(dtype)
    found = before.clone()
    want = before.clone()
    rescale(sums, rows, scales, bias, found[1:6, 1:-2], adds)
    monkeypatch.setattr(workspace, "UNPACK_CHUNK", 300)  # some rows at a time
    rescale.torch(sums, rows, scales, bias, want[1:6, 1:-2], adds)
    assert torch.allclose(
        found.float(), want.float(), rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-4
    )
    assert not torch.equal(found[1:6, 1:-2], before[1:6, 1:-2])
    found[1:6, 1:-2] = before[1:6, 1:-2]
    assert torch.equal(found, before), "wrote beside its rows"


# ---- products


@pytest.mark.parametrize(("rows", "columns"), [(1, 5000), (2, 1), (17, 3), (33, 64), (17, 1025)])
def test_whole_products_are_the_reference_to_the_bit(rows: int, columns: int) -> None:
    """Of the largest codes there are, too; the weight's rows lie apart."""
    codes = torch.randint(-127, 128, (rows, columns), dtype=torch.int8)
    weight = torch.randint(-127, 128, (50, int8_row_bytes(columns)), dtype=torch.int8)[:, :columns]
    codes[0] = 127
    weight[0] = 127
    weight[1] = -127
    found, want = (torch.full((rows, 50), 7, dtype=torch.int32) for _ in range(2))
    int8_products(codes, weight, found)
    int8_products_reference(codes, weight, want)
    assert torch.equal(found, want) and want[0, 0] == 127 * 127 * columns
    assert torch.equal(want, (codes.double() @ weight.double().t()).to(torch.int32))


def test_products_without_int_mm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that has no `_int_mm`, one that refuses, and one whose sums are cut."""
    codes, weight = (torch.randint(-127, 128, (n, 40), dtype=torch.int8) for n in (3, 5))
    want = torch.empty(3, 5, dtype=torch.int32)
    found = torch.empty(3, 5, dtype=torch.int32)
    int8_products_reference(codes, weight, want)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("not here")

    def cut(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_((a.float() @ b.float()).clamp(-(2**15), 2**15))

    for other in (None, refuse, cut):
        int8._int_mm_works.cache_clear()
        with monkeypatch.context() as patch:
            patch.delattr(torch, "_int_mm") if other is None else patch.setattr(
                torch, "_int_mm", other
            )
            int8_products(codes, weight, found.zero_())
        assert torch.equal(found, want)
    int8._int_mm_works.cache_clear()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 9),
    st.sampled_from(WIDTHS),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
    st.sampled_from([*DTYPES, torch.float16]),
    st.integers(0, 40),
)
def test_linear_and_add_linear_over_parts(
    rows: int, columns: int, n: int, has_bias: bool, adds: bool, dtype: torch.dtype, at: int
) -> None:
    x = torch.randn(rows, columns).to(dtype)
    weight = torch.randn(n, columns)
    bias = torch.randn(n).to(dtype) if has_bias else None
    ws = room(rows, columns, n, dtype)
    parts = tuple(
        Int8Rows(pack_int8_rows(part), columns, ws)
        for part in (weight[:at], weight[at:])
        if len(part)
    )
    before = torch.randn(rows, n).to(dtype)
    out = before.clone()
    want = plain(x, weight, bias)
    if adds:
        add_linear(out, x, parts, bias)
        want = want + before.double()
    else:
        linear(x, parts, bias, out)
    assert (
        (out.double() - want).abs()
        <= (2**-8 if dtype != torch.float32 else 1e-5) * (1 + want.abs() + 4)
    ).all()


def test_more_rows_than_are_quantised_at_a_time_and_more_sums_than_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(50, 33)
    weight = torch.randn(70, 33)
    bias = torch.randn(70)
    whole = torch.empty(50, 70)
    found = torch.empty(50, 70)
    packed = pack_int8_rows(weight)
    linear(x, (Int8Rows(packed, 33, room(50, 33, 70)),), bias, whole)
    monkeypatch.setattr(int8, "TOKEN_CHUNK", 16)
    monkeypatch.setattr(int8, "INT8_TILE", 16 * 9)
    sizes = {
        "int8 inputs": 16 * 33,
        "int8 input scales": 64,
        "int8 weight scales": 4 * 70,
        "int8 sums": 4 * 16 * 9,
    }
    ws = Workspace(torch.empty(sum(sizes.values()), dtype=torch.uint8), sizes, torch.float32)
    # So little room: a larger slice would not be found.
    linear(x, (Int8Rows(packed, 33, ws),), bias, found)
    assert torch.equal(found, whole)


@pytest.mark.parametrize(("at", "dtype"), [(0, torch.float32), (5, torch.bfloat16)])
def test_looked_up_rows_are_code_times_scale(
    at: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workspace, "UNPACK_CHUNK", 40)  # some rows at a time
    table = torch.randn(12, 19)
    ids = torch.tensor([3, 11, 0, 3, 7])
    ws = room(1, 1, 1)
    packed = pack_int8_rows(table)
    parts = tuple(Int8Rows(part, 19, ws) for part in (packed[:at], packed[at:]) if len(part))
    want = (codes_of(packed, 19).float() * scales_of(packed)[:, None])[ids].to(dtype)
    assert torch.equal(lookup(ids, parts, torch.empty(5, 19, dtype=dtype)), want)


# ---- blocked rows


def blocked(packed: torch.Tensor, columns: int, ws: Workspace) -> Int8Rows:
    (part,) = block_int8_rows(packed, columns, ws)
    assert part.blocked
    return part


@needs_blocking
@torch.inference_mode()
@pytest.mark.parametrize(
    ("shape", "n"), [((64, 64), 1), ((192, 128), 3), ((128, 2048), 32), ((320, 1024), 100)]
)
def test_blocked_products_are_the_reference_to_the_bit(shape: tuple[int, int], n: int) -> None:
    """Of the largest codes there are, too."""
    codes = torch.randint(-127, 128, (n, shape[1]), dtype=torch.int8)
    weight = torch.randint(-127, 128, shape).float()
    weight[:, 0] = 127  # a scale of 1: the codes are the values
    codes[0] = 127
    weight[0] = 127
    weight[1, 1:] = -127
    codes[:, 0] = 127
    want = torch.empty(n, shape[0], dtype=torch.int32)
    int8_products_reference(codes, weight.to(torch.int8), want)
    parts = (blocked(pack_int8_rows(weight), shape[1], room(n, *shape[::-1])),)
    found = linear(codes.float(), parts, None, torch.empty(n, shape[0]))
    assert torch.equal(found, want.float()) and want[0, 0] == 127 * 127 * shape[1]


@needs_blocking
@torch.inference_mode()
def test_rows_are_blocked_where_they_lie() -> None:
    """In as many bytes, and nothing around them is touched. Values and scales are what they
    were."""
    packed = pack_int8_rows(torch.randn(128, 192))
    arena = torch.full((3, *packed.shape), 77, dtype=torch.uint8)
    arena[1] = packed
    part = blocked(arena[1], 192, room(1, 1, 1))
    assert part.packed.data_ptr() == arena[1].data_ptr()
    assert part.packed.numel() == packed.numel() and len(part) == 128
    assert bool((arena[0] == 77).all() and (arena[2] == 77).all()) and not torch.equal(
        arena[1], packed
    )
    want = codes_of(packed, 192).float() * scales_of(packed)[:, None]
    assert torch.equal(lookup(torch.arange(128), (part,), torch.empty(128, 192)), want)
    assert torch.equal(part.scales, scales_of(packed))


@needs_blocking
@torch.inference_mode()
@pytest.mark.parametrize(("has_bias", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_no_bit_depends_on_which_rows_are_blocked(
    has_bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that are blocked some rows at a time, odd rows, and a part that is not resident; few
    sums at a time."""
    monkeypatch.setattr(linear_kernels, "BLOCK_CHUNK", 2 * BLOCK_ROWS * 128 + 100)
    weight = torch.randn(336 + 48, 128)
    x = torch.randn(9, 128).to(dtype)
    bias = torch.randn(384).to(dtype) if has_bias else None
    packed = pack_int8_rows(weight)
    ws = room(9, 128, 384)
    whole: RowParts = (Int8Rows(packed, 128, ws),)
    resident = block_int8_rows(packed[:336].clone(), 128, ws)
    parts = (*resident, Int8Rows(packed[336:], 128, ws))
    assert [(p.blocked, len(p)) for p in parts] == [(True, 320), (False, 16), (False, 48)]
    want = linear(x, whole, bias, torch.empty(9, 384, dtype=dtype))
    monkeypatch.setattr(int8, "INT8_TILE", 4 * 128)
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
@torch.inference_mode()
@pytest.mark.parametrize("blocks_first", [True, False])
def test_inputs_serve_several_matrices(blocks_first: bool) -> None:
    """Blocked ones take them around 128, others around 0, in any order."""
    x = torch.randn(5, 64)
    weights = torch.randn(3, 64, 64)
    ws = room(5, 64, 64)
    packed = [pack_int8_rows(weight) for weight in weights]
    want = [linear(x, (Int8Rows(rows, 64, ws),), None, torch.empty(5, 64)) for rows in packed]
    parts = [
        blocked(rows, 64, ws) if (i % 2 == 0) == blocks_first else Int8Rows(rows, 64, ws)
        for i, rows in enumerate(packed)
    ]
    outs = [torch.empty(5, 64) for _ in packed]
    linear_shared_input(x, [((part,), None, out) for part, out in zip(parts, outs, strict=True)])
    assert all(torch.equal(a, b) for a, b in zip(outs, want, strict=True))


def test_what_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other widths, too few, apart; and all where the instructions are missing."""
    rows = [
        pack_int8_rows(torch.randn(*shape)) for shape in ((64, 72), (63, 64), (64, 60), (128, 64))
    ]
    for packed in (*rows[:3], rows[3][::2]):
        columns = packed.shape[1] - INT8_ROW_BYTES
        assert not block_int8_rows(packed, columns, room(1, 1, 1))[0].blocked
    monkeypatch.setattr(products, "has_loop", lambda *_: False)
    before = rows[3].clone()
    (part,) = block_int8_rows(rows[3], 64, room(1, 1, 1))
    assert not part.blocked and torch.equal(part.packed, before)


# ---- rows of 4 bits as int8 rows

SHAPES = [
    (1, 1),
    (3, 5),
    (5, 77),
    (16, 64),
    (40, 72),
    (24, 128),
    (80, 2048),
    (32, 1216),
    (192, 128),
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


@torch.inference_mode()
@pytest.mark.parametrize("has_loop", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [1, 7, 600])
@pytest.mark.parametrize("shape", SHAPES[:10])
def test_rows_in_4_bits_are_multiplied_and_looked_up_as_their_int8_rows(
    shape: tuple[int, int],
    tokens: int,
    dtype: torch.dtype,
    has_loop: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the bit, by the compiled loop where this CPU has its instructions, and elsewhere."""
    if not has_loop:
        monkeypatch.setattr(products, "has_loop", lambda *_: False)
    n, columns = shape
    packed = packed_rows(n, columns)
    x = torch.randn(tokens, columns).to(dtype)
    bias = torch.randn(n).to(dtype)
    ws = room(tokens, columns, n, dtype)
    whole = (Int8Rows(in_order(packed, columns), columns, ws),)
    coded = (RequantisedRows(packed, columns, ws),)
    for adds in (False, True):
        want, found = (torch.ones(tokens, n, dtype=dtype) for _ in range(2))
        linear_shared_input(x, [(whole, bias, want)], adds)
        linear_shared_input(x, [(coded, bias, found)], adds)
        assert torch.equal(found, want)
    ids = torch.tensor([n - 1, 0, n // 2])
    rows = torch.zeros(2, 3, columns, dtype=dtype)
    assert torch.equal(lookup(ids, whole, rows[0]), lookup(ids, coded, rows[1]))
