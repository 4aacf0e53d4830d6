"""Triton's kernels against their references, by Triton's interpreter on the CPU; on a card with
FLEXGEN_GPU_TEST_DEVICE=cuda, as the GPU suite does."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from flexgen_h2o.checkpoint.formats import Held, PackedFormat, WeightFormat
from flexgen_h2o.checkpoint.formats.groupwise import Groupwise
from flexgen_h2o.checkpoint.formats.mxfp4 import Mxfp4
from flexgen_h2o.core.model import TensorSpec
from flexgen_h2o.core.packing import KVPacking, SlotPacking
from flexgen_h2o.kernels import prefill_attention, triton
from flexgen_h2o.kernels.beside import SlotForm, WholeColumns
from flexgen_h2o.kernels.coded import (
    FEW_ROWS,
    CodedRows,
    Codes,
    groupwise_codes,
    multiply_coded,
    multiply_coded_reference,
    mxfp4_codes,
)
from flexgen_h2o.kernels.decode_step import (
    PLACE,
    StepSlots,
    attend_step,
    attend_step_reference,
    put_prompts,
    put_prompts_reference,
)
from flexgen_h2o.kernels.elementwise import (
    Rotation,
    rms_norm,
    rms_norm_reference,
    silu_gated,
    silu_gated_reference,
)
from flexgen_h2o.kernels.linear import DenseRows, linear, lookup
from flexgen_h2o.kernels.packed import (
    pack_columns_reference,
    pack_rows,
    unpack_columns,
    unpack_rows,
    unpack_rows_reference,
)
from flexgen_h2o.kernels.prefill_attention import (
    causal_attention_lse,
    causal_attention_lse_reference,
    column_sums,
    column_sums_reference,
)
from flexgen_h2o.kernels.quantised import unpack_mxfp4, unpack_mxfp4_reference
from flexgen_h2o.kvcache.rows import query_weight_table
from flexgen_h2o.tiers.stream import Part

interpreter = pytest.importorskip("triton.runtime.interpreter")
ON_CARD = os.environ.get("FLEXGEN_GPU_TEST_DEVICE") == "cuda"
HAS_BF16 = not ON_CARD or torch.cuda.is_bf16_supported(including_emulation=False)
DTYPES = (torch.float32, *([torch.bfloat16] if HAS_BF16 else []), torch.float16)
MULTIPLIED = DTYPES if ON_CARD else (torch.float32, torch.float16)  # the interpreter has no products of bf16
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def some_slow(*lists: Iterable[Any], fast: tuple[Any, ...]) -> list[Any]:
    """All combinations; the interpreter is slow, so the default suite has one."""
    cases = list(product(*lists))
    assert fast in cases
    return [case if case == fast else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.fixture(autouse=True)
def on_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if ON_CARD:
        with torch.device("cuda"):
            yield
        return
    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:  # Triton 3.6's takes an array for a number, which numpy 2.4 refuses
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda number: int(number.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(triton, "DEVICES", {"cpu"})
    monkeypatch.setattr(prefill_attention, "_is_compiled", lambda *tensors: False)
    yield


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("columns", [8, 64, 120, 1000, 2304])
def test_unpacked_weights_are_the_same_to_the_bit(dtype: torch.dtype, bits: int, columns: int) -> None:
    packed = pack_rows(torch.randn(3, columns, device="cpu"), bits).to(torch.get_default_device())
    assert packed.shape[1] == SlotPacking(columns, bits).slot_bytes
    found, expected = (torch.empty(3, columns, dtype=dtype) for _ in range(2))
    unpack_rows(packed, bits, found)
    unpack_rows_reference(packed, bits, expected)
    if dtype == torch.bfloat16 and not ON_CARD:  # the interpreter cuts off what a card rounds
        torch.testing.assert_close(found, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    else:
        assert torch.equal(found, expected)


CODED = [(1, 1, 8), (3, 33, 72), (17, 5, 200), (32, 70, 64)]  # input rows, rows of the weight, columns


@pytest.mark.parametrize(
    ("shape", "bits", "adds", "dtype"),
    some_slow(CODED, [4, 8], [False, True], MULTIPLIED, fast=(CODED[1], 4, True, torch.float16)),
)
def test_products_with_coded_weights(shape: tuple[int, int, int], bits: int, adds: bool, dtype: torch.dtype) -> None:
    tokens, rows, columns = shape
    packed = pack_rows(torch.randn(rows, columns, device="cpu"), bits).to(torch.get_default_device())
    check_coded(groupwise_codes(packed, bits, columns), torch.randn(tokens, columns).to(dtype), adds)


def mxfp4(rows: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales: all codes."""
    scales = torch.randint(120, 132, (rows, groups), dtype=torch.uint8)
    return torch.randint(0, 256, (rows, groups, 16), dtype=torch.uint8), scales


@pytest.mark.parametrize(
    ("sizes", "dtype"), some_slow([(1, 1, 1), (5, 40, 5), (32, 33, 8)], MULTIPLIED, fast=((5, 40, 5), torch.float16))
)
def test_products_with_mxfp4_weights(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    tokens, rows, groups = sizes
    x = torch.randn(tokens, 32 * groups).to(dtype) / 8
    check_coded(mxfp4_codes(*mxfp4(rows, groups)), x, adds=False)


def check_coded(codes: Codes, x: torch.Tensor, adds: bool) -> None:
    """With inputs and results whose rows lie apart."""
    x, rows = torch.cat([x, x], 1)[:, : codes.columns], len(codes.words)
    found, bias = torch.randn(len(x), rows + 3).to(x.dtype)[:, 1 : rows + 1], torch.randn(rows).to(x.dtype)
    expected = found.clone()
    multiply_coded(x, codes, bias if adds else None, found, adds)
    weight = codes.decode(torch.empty(rows, codes.columns, dtype=x.dtype)).float()
    exact = x.float() @ weight.t() + (bias.float() + expected.float() if adds else 0)
    torch.testing.assert_close(found, exact.to(x.dtype), rtol=CLOSE[x.dtype], atol=CLOSE[x.dtype])
    multiply_coded_reference(x, codes, bias if adds else None, expected, adds)
    torch.testing.assert_close(found, expected, rtol=4 * CLOSE[x.dtype], atol=4 * CLOSE[x.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_unpacked_mxfp4_is_the_same_to_the_bit(dtype: torch.dtype) -> None:
    """Every code with every exponent; the last columns of a matrix whose rows lie apart."""
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(256, 1, 1).view(-1, 64, 16)
    scales = torch.arange(256, dtype=torch.uint8).repeat_interleave(16).view(-1, 64)
    if dtype == torch.bfloat16 and not ON_CARD:  # the interpreter cuts off what a card rounds: numbers near 0
        scales = scales.clamp(min=8)
    found, expected = (torch.zeros(64, 2050, dtype=dtype)[:, 2:] for _ in range(2))
    unpack_mxfp4(codes, scales, found)
    unpack_mxfp4_reference(codes, scales, expected)
    assert torch.equal(found, expected)


FORMATS = [Groupwise(4, 4), Groupwise(4, 8), Mxfp4(4)]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_formats_multiply_few_rows_from_codes(form: WeightFormat) -> None:
    """A matrix that is whole; of one in two parts, or to be decoded into int8, they do not."""
    layout = form.layout(TensorSpec("", form.sample_name or "a", (5, 96)))
    part, memory = Part("device", 0, 5), torch.zeros(5 * layout.decoded_row_bytes, dtype=torch.uint8)
    decoded = (DenseRows(memory.view(torch.float32).view(5, 96)),)
    if isinstance(form, PackedFormat):
        pieces = [form.encode(torch.randn(5, 96, device="cpu")).flatten().to(memory.device)]
    else:
        pieces = [t.flatten() for t in mxfp4(5, 3)]
    held = Held(part, pieces)
    coded = form.coded_parts(layout, [held], decoded)
    x = torch.randn(2, 96)
    found = linear(x, coded, None, torch.empty(2, 5))
    assert not decoded[0].rows.any()
    form.decode(layout, [held], decoded)
    torch.testing.assert_close(found, linear(x, decoded, None, torch.empty(2, 5)), rtol=1e-4, atol=1e-4)
    assert not form.coded_parts(layout, [held, held], decoded)
    assert not replace(form, to_int8=True).coded_parts(layout, [held], decoded)


def test_coded_rows_are_decoded_once_for_many_rows() -> None:
    packed = pack_rows(torch.randn(6, 64, device="cpu"), 4).to(torch.get_default_device())
    calls, whole, codes = list[torch.Tensor](), torch.zeros(6, 64), groupwise_codes(packed, 4, 64)

    def decode(out: torch.Tensor) -> torch.Tensor:
        calls.append(codes.decode(out))
        return out

    rows = CodedRows(replace(codes, decode=decode), DenseRows(whole))
    x, few = torch.randn(FEW_ROWS + 1, 64), torch.empty(FEW_ROWS, 6)
    linear(x[1:], (rows,), None, few)
    assert not calls
    many, found = torch.empty(FEW_ROWS + 1, 6), torch.empty(2, 64)
    linear(x, (rows,), None, many)
    lookup(torch.tensor([5, 0]), (rows,), found)
    assert len(calls) == 1 and torch.equal(found, whole[[5, 0]])
    torch.testing.assert_close(few, many[1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 8), (5, 100), (2, 3, 64)])
@pytest.mark.parametrize("once", [False, True])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...], once: bool) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.rand(shape[-1]).to(dtype)
    found, expected = torch.empty_like(x), torch.empty_like(x)
    rms_norm(x, weight, 1e-6, found, once)
    rms_norm_reference(x, weight, 1e-6, expected, once)
    torch.testing.assert_close(found, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 700), (7, 1024)])
def test_silu_gated(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    gate, up = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    expected = silu_gated_reference(gate.clone(), up)
    torch.testing.assert_close(silu_gated(gate, up), expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "width", "pairs"), [(4, 2, 64, 32), (3, 3, 20, 5), (1, 1, 2, 1)])
def test_rotate(dtype: torch.dtype, heads: int, kv_heads: int, width: int, pairs: int) -> None:
    """All of a head, or the first numbers of it."""
    rotation = Rotation(1.0 / 100 ** (torch.arange(pairs) / pairs), 1.5)
    tokens = torch.tensor([0, 7, 1000])
    given = [torch.randn(3, count, width).to(dtype) for count in (heads, kv_heads)]
    expected = [t.clone() for t in given]
    rotation.rotate_reference(expected, tokens)
    rotation.rotate(given, tokens)
    for mine, theirs in zip(given, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=CLOSE[dtype], atol=CLOSE[dtype])


Sizes = tuple[int, int, int, int, list[int], int]  # sequences, kv-heads, g, d, filled slots, slots of a segment


def step(
    dtype: torch.dtype, sizes: Sizes, rows: slice = slice(None), per_query: bool = False
) -> tuple[list[torch.Tensor], StepSlots]:  # fmt: skip
    """q, k and v of a step, and the rows of a unit; what is not filled holds NaN."""
    sequences, kv_heads, group, width, filled, segment = sizes
    every, most = sequences * kv_heads, max(filled)
    segments = -(-most // segment)
    keys, values = (torch.randn(segments, every, segment, width).to(dtype) for _ in range(2))
    held = torch.tensor(filled).repeat_interleave(kv_heads)
    for area in (keys, values):
        flat = area.transpose(0, 1).reshape(every, segments * segment, width).clone()  # of one row it is a view
        flat[torch.arange(segments * segment) >= held.unsqueeze(1)] = float("nan")
        area.copy_(flat.view(every, segments, segment, width).transpose(0, 1))
    positions = torch.stack([torch.randperm(2 * segments * segment)[: segments * segment] for _ in range(every)]).int()
    now = torch.tensor(filled)
    full = torch.arange(sequences) % 2 == 0  # these lose a column
    slot = torch.where(full, -1, now - 1)
    newest = torch.full((sequences,), 2 * segments * segment)
    gains = torch.rand(1, sequences).view(torch.int32)
    fields = torch.stack([now, slot, newest, newest // 8, newest - 3]).int()
    state = torch.cat([fields, gains, torch.full((1, sequences), -1).int()])
    victims = torch.stack([torch.randint(0, int(n), ()) for n in held]).int()
    scores = torch.randint(0, 3, (every, segments * segment)).float()
    heads = group * kv_heads
    qkv = [torch.randn(sequences, count, width).to(dtype) for count in (heads, kv_heads, kv_heads)]
    of_rows = [t[rows].clone() for t in (scores, positions, victims)]
    first = rows.start or 0
    count = len(victims[rows])
    taken = torch.empty(count, dtype=torch.int64)
    keys, values = keys[:, rows].clone(), values[:, rows].clone()
    weights = None
    if per_query:
        weights = query_weight_table(0.9, 2 * segments * segment + 2, of_rows[0].device)
    return qkv, StepSlots(keys, values, first, kv_heads, state, taken, *of_rows, weights, decay=0.9)


PROMPTS = [(1, 1, 1, 1, 1, 16), (2, 4, 2, 70, 70, 64), (1, 4, 1, 5, 130, 80), (3, 2, 2, 65, 129, 32)]


@pytest.mark.parametrize(
    ("shape", "window", "dtype"), some_slow(PROMPTS, [None, 1, 40], MULTIPLIED, fast=(PROMPTS[2], None, torch.float16))
)
def test_attention_over_prompts(shape: tuple[int, ...], window: int | None, dtype: torch.dtype) -> None:
    """All rows of prompts, or the last of them; and what columns received, without a window."""
    batch, heads, kv_heads, rows, keys, width = shape
    torch.manual_seed(0)
    tokens = [(rows, heads), (keys, kv_heads), (keys, kv_heads)]
    q, k, v = (torch.randn(batch, *of, width).to(dtype).transpose(1, 2) for of in tokens)
    scale, close = width**-0.5, CLOSE[dtype]
    found, lse = causal_attention_lse(q, k, v, scale, window)
    expected, expected_lse = causal_attention_lse_reference(q, k, v, scale, window)
    torch.testing.assert_close(found, expected, rtol=close, atol=close)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=close)
    if window is None:
        for first in {0, keys - rows, keys - 1}:
            mine = column_sums(q, k, expected_lse, scale, first)
            theirs = column_sums_reference(q.float(), k.float(), expected_lse, scale, first)
            torch.testing.assert_close(mine, theirs, rtol=close, atol=10 * close)


def test_no_axis_of_a_grid_but_the_first_grows_with_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card's others end at 65,535."""
    grids = list[tuple[int, ...]]()
    monkeypatch.setattr(triton, "launch", lambda name, grid, *_, **__: grids.append(grid))
    q = torch.zeros(70_000, 1, 1, 16)
    column_sums(q, q, causal_attention_lse(q, q, q, 1.0)[1], 1.0)
    assert grids == [(70_000, 1)] * 2


SHAPES = {
    "one row": (1, 1, 1, 64, [1], 4),
    "ragged": (3, 2, 1, 16, [5, 1, 70], 8),
    "grouped queries": (4, 2, 4, 32, [33, 64, 65, 130], 64),
    "a width that is no power of two": (2, 2, 3, 80, [17, 90], 30),
}


@pytest.mark.parametrize(
    ("shape", "dtype", "recorded"),
    some_slow(SHAPES.values(), MULTIPLIED, (False, True), fast=(SHAPES["grouped queries"], torch.float32, True)),
)
def test_a_decode_step(shape, dtype: torch.dtype, recorded: bool) -> None:
    torch.manual_seed(0)
    check(*step(dtype, shape), dtype, recorded)


@pytest.mark.parametrize("shape", [(3, 2, 2, 16, [5, 9, 70], 8)])
def test_the_victim_is_that_of_the_lowest_score_per_query(shape) -> None:
    torch.manual_seed(0)
    check(*step(torch.float32, shape, per_query=True), torch.float32, True)


def test_a_score_that_is_no_number_names_the_victim() -> None:
    """Of all of a row, and of one column; what names none would be written before the row's slots."""
    torch.manual_seed(0)
    (q, k, v), slots = step(torch.float32, (2, 1, 1, 16, [9, 9], 16))
    q[0] = float("nan")
    slots.scores[1, 3], slots.positions[1, 3] = float("nan"), int(slots.state[3, 1])  # the oldest that may go
    other = replace(slots, **{n: t.clone() for n, t in vars(slots).items() if isinstance(t, torch.Tensor)})
    attend_step(q, k, v, slots, 0.25, torch.empty_like(q))
    attend_step_reference(q, k, v, other, 0.25, torch.empty_like(q))
    assert torch.equal(slots.victims, other.victims) and slots.victims[0] >= 0 and slots.victims[1] == 3


@pytest.mark.parametrize("rows", [slice(1, 4), slice(3, 6)])
def test_rows_of_a_part(rows: slice) -> None:
    """A part may begin within the kv-heads of a sequence; what is in front of slots is of all rows."""
    qkv, slots = step(torch.float32, (3, 2, 2, 16, [5, 9, 3], 4), rows)
    check(qkv, replace(slots, before=(None, torch.randn(6, 2))), torch.float32, True)


@pytest.mark.parametrize("values", [True, False])
def test_a_decode_step_behind_other_columns(values: bool) -> None:
    """A common prefix, and sinks, which have no values."""
    torch.manual_seed(0)
    qkv, slots = step(torch.float32, SHAPES["grouped queries"])
    mixed = torch.randn(8, 4, 32) if values else None
    check(qkv, replace(slots, before=(mixed, 3 * torch.randn(8, 4))), torch.float32, False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("first", "rows"), [(0, 6), (1, 4)])
def test_columns_of_prompts(first: int, rows: int, dtype: torch.dtype) -> None:
    """More than one segment; all rows of three prompts, or a part of them."""
    k, v = (torch.randn(3, 90, 2, 20).to(dtype) for _ in range(2))
    kept = torch.stack([torch.randperm(90)[:70].sort().values for _ in range(6)]).view(3, 2, 70)
    found, expected = ([torch.zeros(3, 6, 32, 20, dtype=dtype)[:, 1 : rows + 1] for _ in range(2)] for _ in range(2))
    put_prompts(k, v, kept, tuple(found), first)
    put_prompts_reference(k, v, kept, tuple(expected), first)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.any() and torch.equal(mine, theirs)


@pytest.mark.slow
def test_many_columns() -> None:
    check(*step(torch.float32, (1, 1, 2, 128, [4096], 512)), torch.float32, True)


WIDTHS = [(64, 8), (128, 16), (80, 4), (64, 0)]  # and whole columns


@pytest.mark.parametrize(
    ("bits", "recorded", "sizes", "dtype"),
    some_slow(["3/2", 2, 3, 4, 8], [False, True], WIDTHS, MULTIPLIED, fast=("3/2", True, (80, 4), torch.float32)),
)
def test_a_decode_step_of_packed_slots(
    bits: int | str, recorded: bool, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    """Every number of a slot, and those columns that are whole beside it: one enters, one has left its slot."""
    torch.manual_seed(0)
    (width, window), filled = sizes, [5, 70, 33]
    packing = KVPacking.of(width, bits)
    qkv, slots = step(dtype, (3, 2, 4, width, filled, 32))
    held = torch.tensor(filled).repeat_interleave(2)
    areas = [torch.randn(*slots.keys.shape) for _ in range(2)]
    packed = [pack_columns_reference(t, of) for t, of in zip(areas, vars(packing).values(), strict=True)]
    places = [torch.randperm(int(n))[:window] if n > window else -torch.ones(window) for n in held]
    whole = WholeColumns(
        torch.randn(len(held), width).bfloat16(), (torch.rand(len(held), width) + 0.5).bfloat16(),
        *(torch.randn(len(held), window, width).to(dtype) for _ in range(2)), torch.stack(places).int(),
    )  # fmt: skip
    state = slots.state.clone()
    if window:
        state[PLACE] = torch.tensor([-1, window - 1, 0])
    form = SlotForm(packing, whole=whole)
    before = (None, torch.randn(len(held), 4)) if bits == 8 else None  # sinks
    slots = replace(slots, keys=packed[0], values=packed[1], state=state, form=form, before=before)
    check(qkv, slots, dtype, recorded)


def check(qkv: list[torch.Tensor], slots: StepSlots, dtype: torch.dtype, recorded: bool) -> None:
    (q, k, v), scale = qkv, qkv[0].shape[2] ** -0.5
    if not recorded:
        state = slots.state.clone()
        state[1] = state[0] - 1
        slots = replace(slots, state=state, scores=None, positions=None, victims=None, query_weights=None)
    names = [name for name in vars(slots) if isinstance(getattr(slots, name), torch.Tensor)]
    form, whole = slots.form, slots.form.whole
    form = form if whole is None else replace(form, whole=whole.map(torch.clone))
    expected_slots = replace(slots, **{name: getattr(slots, name).clone() for name in names}, form=form)
    found, expected = torch.zeros_like(q), torch.zeros_like(q)
    attend_step(q, k, v, slots, scale, found)
    attend_step_reference(q, k, v, expected_slots, scale, expected)
    torch.testing.assert_close(found, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    assert found.isfinite().all()
    for name in names:
        mine, theirs = getattr(slots, name), getattr(expected_slots, name)
        if name == "scores":
            torch.testing.assert_close(mine, theirs, rtol=CLOSE[dtype], atol=CLOSE[dtype])
        elif name in ("keys", "values") and slots.form.packing is not None:
            assert off_by_a_rounding(mine, theirs, getattr(slots.form.packing, name)), name
        elif name != "victims" or dtype == torch.float32:  # rounded scores may tie otherwise
            assert torch.equal(mine.nan_to_num(7), theirs.nan_to_num(7)), name
    if whole is not None and form.whole is not None:
        for mine, theirs in zip(vars(whole).values(), vars(form.whole).values(), strict=True):
            assert torch.equal(mine, theirs)


def off_by_a_rounding(mine: torch.Tensor, theirs: torch.Tensor, packing: SlotPacking) -> bool:
    """Packed numbers that are equal but for a level here and there."""
    found, expected = (unpack_columns(t, packing, torch.float32) for t in (mine, theirs))
    level = (expected.amax() - expected.amin()) / packing.levels
    return bool(((found - expected).abs() <= 1.01 * level).all()) and float((found != expected).float().mean()) < 0.01
