"""Attention that reads some columns: compiled loops against torch, and what a sketch has."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.core.packing import KVPacking, sketch_bytes, sketch_shape
from flexgen_h2o.kernels import select as kernels
from flexgen_h2o.kernels.beside import SlotForm, WholeColumns
from flexgen_h2o.kernels.packed import pack_columns
from flexgen_h2o.kernels.select import (
    Selection,
    Sketch,
    add_to_sketch,
    add_to_sketch_reference,
    attend_selected,
    attend_selected_reference,
    fill_sketch,
    fill_sketch_reference,
)
from flexgen_h2o.kernels.slots import attend

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-6}
DTYPES = [torch.float32, torch.bfloat16]
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def columns_of(filled: list[int], group: int, width: int, dtype: torch.dtype, seed: int = 0) -> Case:
    """q (R, g, d), keys and values (R, C, d), NaN where nothing is filled, and filled."""
    g = torch.Generator().manual_seed(seed)
    rows, slots = len(filled), max(filled) + 2
    q = torch.randn(rows, group, width, generator=g).to(dtype)
    scale = torch.rand(1, 1, width, generator=g)
    keys, values = ((torch.randn(rows, slots, width, generator=g) * scale + 0.3).to(dtype) for _ in range(2))
    for r, n in enumerate(filled):
        keys[r, n:], values[r, n:] = math.nan, math.nan
    return q, keys, values, torch.tensor(filled, dtype=torch.int32)


def empty(rows: int, slots: int, width: int) -> Sketch:
    """Of nonsense, which filling must overwrite."""
    blocks, numbers = sketch_shape(slots, width)
    centres, steps = torch.full((rows, width), math.nan), torch.full((rows, width), math.nan)
    codes = torch.full((rows, blocks, numbers, 32), 12345, dtype=torch.int16)
    return Sketch(centres, steps, codes, torch.full((rows, blocks, width), math.nan))


def sketched(keys: torch.Tensor, values: torch.Tensor, filled: torch.Tensor, compiled: bool = True) -> Sketch:
    """Two thirds of each row as a prompt, the others one by one."""
    sketch = empty(len(keys), keys.shape[1], keys.shape[2])
    fill, add = (fill_sketch, add_to_sketch) if compiled else (fill_sketch_reference, add_to_sketch_reference)
    for r, n in enumerate(filled.tolist()):
        own, prompt = sketch.map(lambda t, r=r: t[r : r + 1]), max(1, 2 * n // 3)  # type: ignore[misc]
        fill(own, *(t[r : r + 1, :prompt].transpose(0, 1) for t in (keys, values)))
        for j in range(prompt, n):
            add(own, torch.tensor([j]), keys[r : r + 1, j].contiguous(), values[r : r + 1, j].contiguous())
    return sketch


def in_segments(columns: torch.Tensor, length: int) -> torch.Tensor:
    rows, slots, width = columns.shape
    padded = torch.nn.functional.pad(columns, (0, 0, 0, -slots % length), value=math.nan)
    return padded.view(rows, -1, length, width).transpose(0, 1).contiguous()


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool((a.float() - b.float()).abs().max() <= TOLERANCE[a.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 5, 8, 24, 64, 80, 128])
def test_compiled_sketches_are_those_of_torch(width: int, dtype: torch.dtype) -> None:
    """But for codes at an edge, which fp32 sums in another order may move."""
    _, keys, values, filled = columns_of([70, 1, 33, 2], 1, width, dtype)
    ours, theirs = (sketched(keys, values, filled, compiled) for compiled in (True, False))
    for name in ("centres", "steps", "sums"):
        assert torch.allclose(getattr(ours, name), getattr(theirs, name), rtol=1e-5, atol=1e-5), name
    assert (ours.codes != theirs.codes).float().mean() < 1e-3


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 150), min_size=1, max_size=4), st.integers(1, 5), st.sampled_from([2, 8, 15, 33, 64, 80]),
    st.sampled_from([0.01, 0.1, 0.3, 0.77, 1.0]), st.integers(3, 200), st.sampled_from(DTYPES), st.integers(0, 99),
    st.booleans(),
)  # fmt: skip
def test_compiled_attention_is_that_of_torch(filled, group, width, share, segment, dtype, seed, has_sinks) -> None:
    """Of the same sketch; a row does not depend on the others."""
    q, keys, values, ends = columns_of(filled, group, width, dtype, seed)
    sketch, counts = sketched(keys, values, ends), (share * ends).int().clamp(min=1)
    areas = in_segments(keys, segment), in_segments(values, segment)
    form = SlotForm(sinks=2 * q[:, :, 0].float().contiguous() if has_sinks else None)
    found = attend_selected(q, *areas, ends, width**-0.5, Selection(sketch, counts), form)
    assert close(found, attend_selected_reference(q, *areas, ends, width**-0.5, Selection(sketch, counts), form))
    if share == 1.0:
        assert close(found, attend(q, *areas, ends, width**-0.5, None, form))
    last = slice(len(filled) - 1, None)
    alone = [t[:, last].contiguous() for t in areas]
    own = sketch.map(lambda t: t[last].contiguous())
    assert torch.equal(
        attend_selected(q[last], *alone, ends[last], width**-0.5, Selection(own, counts[last]), form.rows(last)),
        found[last],
    )


@pytest.mark.parametrize(
    ("bits", "window", "width", "dtype"),
    [
        (3, 0, 24, torch.float32),
        # A loop each, which takes seconds to compile.
        pytest.param("4/3", 16, 80, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(3, 8, 32, torch.float32, marks=pytest.mark.slow),
        pytest.param(2, 16, 64, torch.bfloat16, marks=pytest.mark.slow),
        pytest.param(8, 0, 24, torch.float32, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_packed_columns(bits: int | str, window: int, width: int, dtype: torch.dtype) -> None:
    q, keys, values, filled = columns_of([150, 7, 40], 3, width, dtype)
    packing, rows = KVPacking.of(width, bits), len(filled)
    centres, ranges = torch.zeros(rows, width).bfloat16() + 0.3, torch.ones(rows, width).bfloat16() * 2
    whole = WholeColumns(
        centres, ranges, *(torch.zeros(rows, window, width, dtype=dtype) for _ in range(2)),
        torch.full((rows, window), -1, dtype=torch.int32),
    )  # fmt: skip
    for r, n in enumerate(filled.tolist()):
        for j in range(max(0, n - window), n):
            whole.keys[r, j % window], whole.values[r, j % window] = keys[r, j], values[r, j]
            whole.slots[r, j % window] = j
    sketch, form = sketched(keys, values, filled), SlotForm(packing, whole)
    areas = (
        pack_columns(in_segments(whole.smoothed(keys), 50), packing.keys),
        pack_columns(in_segments(values, 50), packing.values),
    )
    for share in (0.05, 0.4, 1.0):
        counts = (share * filled).int().clamp(min=1)
        found = attend_selected(q, *areas, filled, 0.1, Selection(sketch, counts), form)
        assert close(found, attend_selected_reference(q, *areas, filled, 0.1, Selection(sketch, counts), form))
    assert close(found, attend(q, *areas, filled, 0.1, None, form))


def test_reading_all_columns_is_attention() -> None:
    q, keys, values, filled = columns_of([90, 1, 32], 2, 64, torch.float32)
    areas = in_segments(keys, 92), in_segments(values, 92)
    found = attend_selected(q, *areas, filled, 0.125, Selection(sketched(keys, values, filled), filled))
    assert close(found, attend(q, *areas, filled, 0.125))


def test_equal_columns_are_taken_from_the_oldest_on() -> None:
    """Ties of all columns: the newest two and the first two of the others are read, whose values are not the mean."""
    keys, values = torch.ones(1, 10, 8), torch.arange(10.0).view(1, 10, 1).expand(1, 10, 8).contiguous()
    filled, counts = torch.tensor([10], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    sketch = sketched(keys, values, filled)
    unread = values.clone()
    unread[:, 2:8] = math.nan  # a NaN that is read shows
    for attention in (attend_selected, attend_selected_reference):
        areas, reads = (in_segments(keys, 10), in_segments(unread, 10)), Selection(sketch, counts)
        out = attention(torch.ones(1, 1, 8), *areas, filled, 1.0, reads)
        assert torch.allclose(out, torch.tensor(4.5))


def test_products_of_any_size() -> None:
    """Estimates and products in the thousands, and a query of zeros."""
    q, keys, values, filled = columns_of([60, 60], 1, 64, torch.float32)
    q[0], q[1] = q[0] * 1000, 0
    areas, counts = (in_segments(keys, 62), in_segments(values, 62)), torch.full((2,), 20, dtype=torch.int32)
    sketch = sketched(keys, values, filled)
    found = attend_selected(q, *areas, filled, 1.0, Selection(sketch, counts))
    assert torch.isfinite(found).all()
    assert (found - attend_selected_reference(q, *areas, filled, 1.0, Selection(sketch, counts))).abs().max() < 1e-4
    assert torch.allclose(found[1], values[1, :60].mean(0), atol=1e-5)


def test_some_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    q, keys, values, filled = columns_of([9, 30, 4, 17], 2, 16, torch.float32)
    areas, counts = (in_segments(keys, 8), in_segments(values, 8)), (filled // 3).clamp(min=1)
    sketch = sketched(keys, values, filled)
    want = attend_selected_reference(q, *areas, filled, 0.25, Selection(sketch, counts))
    monkeypatch.setattr(kernels, "PACKED_CHUNK", 100)
    assert close(attend_selected_reference(q, *areas, filled, 0.25, Selection(sketch, counts)), want)


def test_wrong_shapes_are_refused_before_memory_is_touched() -> None:
    q, keys, values, filled = columns_of([40, 5], 1, 64, torch.float32)
    areas, sketch, counts = (in_segments(keys, 42), in_segments(values, 42)), sketched(keys, values, filled), filled
    short = Sketch(sketch.centres, sketch.steps, sketch.codes[:, :0].contiguous(), sketch.sums[:, :0].contiguous())
    for wrong in (short, sketch.map(lambda t: t[:1]), Sketch(*(t.double() for t in vars(sketch).values()))):
        with pytest.raises(ValueError, match="do not go together"):
            attend_selected(q, *areas, filled, 1.0, Selection(wrong, counts))
    with pytest.raises(ValueError, match="do not go together"):
        attend_selected(q, *areas, filled, 1.0, Selection(sketch, counts.long()))


def test_bytes_of_a_sketch() -> None:
    """2 bits a number of a key, a sum of 32 values and two numbers a channel, in fp32."""
    assert sketch_bytes(2048, 64) == 2048 * 16 + 64 * 64 * 4 + 2 * 64 * 4
    for slots, width in ((1, 5), (33, 24), (2048, 128)):
        sketch = empty(1, slots, width)
        assert sum(t.numel() * t.itemsize for t in vars(sketch).values()) == sketch_bytes(slots, width)
