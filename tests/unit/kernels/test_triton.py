"""Triton's kernels against their references, by Triton's interpreter on the CPU; on a card with
FLEXGEN_GPU_TEST_DEVICE=cuda, as the GPU suite does."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch

from flexgen_h2o.core.packing import KVPacking, SlotPacking
from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.decode_step import (
    PLACE,
    StepSlots,
    attend_step,
)
from flexgen_h2o.kernels.packed import (
    pack_columns,
    unpack_columns,
)
from flexgen_h2o.kernels.slot_form import SlotForm, WholeColumns
from tests.extras import needs

pytestmark = needs("gpu")

ON_CARD = os.environ.get("FLEXGEN_GPU_TEST_DEVICE") == "cuda"
HAS_BF16 = not ON_CARD or torch.cuda.is_bf16_supported(including_emulation=False)
DTYPES = (torch.float32, *([torch.bfloat16] if HAS_BF16 else []), torch.float16)
MULTIPLIED = (
    DTYPES if ON_CARD else (torch.float32, torch.float16)
)  # the interpreter has no products of bf16
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def some_slow(*lists: Iterable[Any], fast: tuple[Any, ...]) -> list[Any]:
    """All combinations; the interpreter is slow, so the default suite has one."""
    cases = list(product(*lists))
    assert fast in cases
    return [case if case == fast else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Triton's interpreter run kernels on the CPU."""
    interpreter = import_module("triton.runtime.interpreter")
    patch_tensor = interpreter._patch_lang_tensor

    def patched(
        tensor: Any, scope: Any
    ) -> None:  # Triton 3.6's takes an array for a number, which numpy 2.4 refuses
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda number: int(number.handle.data.item()))

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patched)
    monkeypatch.setattr(triton, "DEVICES", {"cpu"})


@pytest.fixture(autouse=True)
def on_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if ON_CARD:
        with torch.device("cuda"):
            yield
        return
    interpret(monkeypatch)
    yield


Sizes = tuple[
    int, int, int, int, list[int], int
]  # sequences, kv-heads, g, d, filled slots, slots of a segment


def step(
    dtype: torch.dtype, sizes: Sizes, rows: slice = slice(None), per_query: bool = False
) -> tuple[list[torch.Tensor], StepSlots]:
    """q, k and v of a step, and the rows of a unit; what is not filled holds NaN."""
    sequences, kv_heads, group, width, filled, segment = sizes
    every = sequences * kv_heads
    most = max(filled)
    segments = -(-most // segment)
    keys, values = (torch.randn(segments, every, segment, width).to(dtype) for _ in range(2))
    held = torch.tensor(filled).repeat_interleave(kv_heads)
    for area in (keys, values):
        flat = (
            area.transpose(0, 1).reshape(every, segments * segment, width).clone()
        )  # of one row it is a view
        flat[torch.arange(segments * segment) >= held.unsqueeze(1)] = float("nan")
        area.copy_(flat.view(every, segments, segment, width).transpose(0, 1))
    positions = torch.stack(
        [torch.randperm(2 * segments * segment)[: segments * segment] for _ in range(every)]
    ).int()
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
    keys = keys[:, rows].clone()
    values = values[:, rows].clone()
    return qkv, StepSlots(
        keys, values, first, kv_heads, state, taken, *of_rows, decay=0.9, per_query=per_query
    )


SHAPES = {
    "one row": (1, 1, 1, 64, [1], 4),
    "ragged": (3, 2, 1, 16, [5, 1, 70], 8),
    "grouped queries": (4, 2, 4, 32, [33, 64, 65, 130], 64),
    "a width that is no power of two": (2, 2, 3, 80, [17, 90], 30),
    "many columns": (1, 1, 2, 128, [4096], 512),
}


@pytest.mark.parametrize(
    ("shape", "dtype", "recorded"),
    some_slow(
        SHAPES.values(),
        MULTIPLIED,
        (False, True),
        fast=(SHAPES["grouped queries"], torch.float32, True),
    ),
)
def test_a_decode_step(shape, dtype: torch.dtype, recorded: bool) -> None:
    torch.manual_seed(0)
    check(*step(dtype, shape), dtype, recorded)


def test_a_score_that_is_no_number_names_the_victim() -> None:
    """Of all of a row, and of one column; what names none would be written before the row's
    slots."""
    torch.manual_seed(0)
    (q, k, v), slots = step(torch.float32, (2, 1, 1, 16, [9, 9], 16))
    q[0] = float("nan")
    slots.scores[1, 3] = float("nan")
    slots.positions[1, 3] = int(slots.state[3, 1])  # the oldest that may go
    attend_step(q, k, v, slots, 0.25, torch.empty_like(q))
    oldest, newest = slots.state[3:5, 0].tolist()
    places = enumerate(slots.positions[0, :9].tolist())
    earliest = min((place, j) for j, place in places if oldest <= place <= newest)[1]
    assert slots.victims.tolist() == [earliest, 3]


@pytest.mark.parametrize(
    ("rows", "values", "recorded"),
    [
        (slice(1, 4), False, True),
        (slice(3, 6), False, True),
        (slice(6), True, False),
        (slice(6), False, False),
    ],
)
def test_a_decode_step_of_a_part_behind_other_columns(
    rows: slice, values: bool, recorded: bool
) -> None:
    """A part may begin within the kv-heads of a sequence.

    In front of the slots of all rows are a common prefix, or sinks, which have no values. Victims
    are those of the lowest score per query.
    """
    torch.manual_seed(0)
    qkv, slots = step(torch.float32, (3, 2, 2, 16, [5, 9, 70], 8), rows, per_query=True)
    mixed = torch.randn(6, 2, 16) if values else None
    check(qkv, replace(slots, before=(mixed, 3 * torch.randn(6, 2))), torch.float32, recorded)


WIDTHS = [(64, 8), (128, 16), (80, 4), (64, 0)]  # and whole columns


@pytest.mark.parametrize(
    ("bits", "recorded", "sizes", "dtype"),
    some_slow(
        ["3/4", 3, 4, 8],
        [False, True],
        WIDTHS,
        MULTIPLIED,
        fast=("3/4", True, (80, 4), torch.float32),
    ),
)
def test_a_decode_step_of_packed_slots(
    bits: int | str, recorded: bool, sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    """Every number of a slot, and those columns that are whole beside it: one enters, one has left
    its slot."""
    torch.manual_seed(0)
    width, window = sizes
    filled = [5, 70, 33]
    packing = KVPacking.of(width, bits)
    qkv, slots = step(dtype, (3, 2, 4, width, filled, 32))
    held = torch.tensor(filled).repeat_interleave(2)
    areas = [torch.randn(*slots.keys.shape) for _ in range(2)]
    packed = [
        pack_columns.torch(t, of) for t, of in zip(areas, vars(packing).values(), strict=True)
    ]
    places = [torch.randperm(int(n))[:window] if n > window else -torch.ones(window) for n in held]
    whole = WholeColumns(
        torch.randn(len(held), width).bfloat16(),
        (torch.rand(len(held), width) + 0.5).bfloat16(),
        *(torch.randn(len(held), window, width).to(dtype) for _ in range(2)),
        torch.stack(places).int(),
    )
    state = slots.state.clone()
    if window:
        state[PLACE] = torch.tensor([-1, window - 1, 0])
    form = SlotForm(packing, whole=whole)
    before = (None, torch.randn(len(held), 4)) if bits == 8 else None  # sinks
    slots = replace(slots, keys=packed[0], values=packed[1], state=state, form=form, before=before)
    check(qkv, slots, dtype, recorded)


def check(qkv: list[torch.Tensor], slots: StepSlots, dtype: torch.dtype, recorded: bool) -> None:
    q, k, v = qkv
    scale = qkv[0].shape[2] ** -0.5
    if not recorded:
        state = slots.state.clone()
        state[1] = state[0] - 1
        slots = replace(
            slots, state=state, scores=None, positions=None, victims=None, per_query=False
        )
    names = [name for name in vars(slots) if isinstance(getattr(slots, name), torch.Tensor)]
    form = slots.form
    whole = slots.form.whole
    form = form if whole is None else replace(form, whole=whole.map(torch.clone))
    expected_slots = replace(
        slots, **{name: getattr(slots, name).clone() for name in names}, form=form
    )
    found = torch.zeros_like(q)
    expected = torch.zeros_like(q)
    attend_step(q, k, v, slots, scale, found)
    attend_step.torch(q, k, v, expected_slots, scale, expected)
    torch.testing.assert_close(found, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    assert found.isfinite().all()
    for name in names:
        mine = getattr(slots, name)
        theirs = getattr(expected_slots, name)
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
    return (
        bool(((found - expected).abs() <= 1.01 * level).all())
        and float((found != expected).float().mean()) < 0.01
    )
