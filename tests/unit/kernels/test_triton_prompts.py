"""Triton's kernels for prompts against their references; run as test_triton.py is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch

from flexgen_h2o.core.packing import KVPacking
from flexgen_h2o.kernels import prompt_columns, triton
from flexgen_h2o.kernels.packed import unpack_columns
from flexgen_h2o.kernels.prefill_attention import (
    causal_attention_lse,
    column_sums,
    packed_attention,
)
from flexgen_h2o.kernels.prompt_columns import (
    PromptSlots,
    begin_whole,
    choose_kept,
    choose_packed,
    put_prompts,
)
from flexgen_h2o.kernels.slot_form import WHOLE, SlotForm, WholeColumns
from tests.extras import needs
from tests.parity.cases import thinned
from tests.unit.kernels.test_triton import CLOSE, DTYPES, MULTIPLIED, on_card, some_slow

pytestmark = needs("gpu")

__all__ = ["on_card"]  # a fixture of all tests


PROMPTS = [
    (1, 1, 1, 1, 1, 16),
    (2, 4, 2, 70, 70, 64),
    (1, 4, 1, 5, 130, 80),
    (3, 2, 2, 65, 129, 32),
]


@pytest.mark.parametrize(
    ("shape", "window", "dtype"),
    some_slow(PROMPTS, [None, 1, 40], MULTIPLIED, fast=(PROMPTS[2], None, torch.float16)),
)
def test_attention_over_prompts(
    shape: tuple[int, ...], window: int | None, dtype: torch.dtype
) -> None:
    """All rows of prompts, or the last of them; and what columns received, without a window."""
    batch, heads, kv_heads, rows, keys, width = shape
    torch.manual_seed(0)
    tokens = [(rows, heads), (keys, kv_heads), (keys, kv_heads)]
    q, k, v = (torch.randn(batch, *of, width).to(dtype).transpose(1, 2) for of in tokens)
    scale = width**-0.5
    close = CLOSE[dtype]
    found, lse = causal_attention_lse(q, k, v, scale, window)
    expected, expected_lse = causal_attention_lse.torch(q, k, v, scale, window)
    torch.testing.assert_close(found, expected, rtol=close, atol=close)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=close)
    if window is None:
        for first in {0, keys - rows, keys - 1}:
            last = keys - first
            mine = column_sums(q, k, expected_lse, scale, last)
            theirs = column_sums.torch(q.float(), k.float(), expected_lse, scale, last)
            torch.testing.assert_close(mine, theirs, rtol=close, atol=10 * close)


RAGGED = {"one": (7,), "tiles": (1, 15, 16, 17), "far apart": (1, 300), "equals": (33, 5, 5, 64)}


def lines_of(lengths: Iterable[int], share: float = 1.0, window: int = 0) -> triton.PromptPlaces:
    """Prompts one behind the other, which keep some columns each, their first and newest ones among
    them."""
    found = list[triton.PromptPlace]()
    start = 0
    kept_start = 0
    for n in lengths:
        kept = max(1, int(share * n))
        ranked = (0, 0) if kept == n else (kept // 4, n - kept // 4)
        found.append(triton.PromptPlace(start, n, n, kept_start, kept, *ranked, min(window, kept)))
        start = start + n
        kept_start = kept_start + kept
    return tuple(found)


@pytest.mark.parametrize(
    ("lengths", "group", "width", "window", "dtype"),
    some_slow(
        RAGGED.values(),
        [1, 4],
        [64, 80],
        [None, 9],
        MULTIPLIED,
        fast=((1, 15, 16, 17), 4, 80, None, torch.float16),
    ),
)
def test_prompts_of_all_lengths_in_one_launch(
    lengths: tuple[int, ...], group: int, width: int, window: int | None, dtype: torch.dtype
) -> None:
    """Each as by itself: attention, written where it belongs, and what columns received of all
    queries or the last."""
    torch.manual_seed(0)
    lines = lines_of(lengths)
    tokens = sum(lengths)
    scale = width**-0.5
    close = CLOSE[dtype]
    q, k, v = (
        torch.randn(1, tokens, of, width).to(dtype).transpose(1, 2) for of in (2 * group, 2, 2)
    )
    out = torch.full((1, tokens, 2 * group, width), torch.nan).to(dtype).transpose(1, 2)
    lse = packed_attention(q, k, v, lines, scale, window, out)
    want = torch.empty_like(out)
    want_lse = packed_attention.torch(q, k, v, lines, scale, window, want)
    torch.testing.assert_close(out, want, rtol=close, atol=close)
    torch.testing.assert_close(lse, want_lse, rtol=1e-4, atol=close)
    for last in (None, 1, 16) if window is None else ():
        found = column_sums(q, k, lse, scale, last, lines)
        theirs = column_sums.torch(q.float(), k.float(), lse, scale, last, lines)
        torch.testing.assert_close(found, theirs, rtol=close, atol=10 * close)


def test_no_axis_of_a_grid_but_the_first_grows_with_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A card's others end at 65,535."""
    grids = list[tuple[int, ...]]()
    monkeypatch.setattr(triton, "launch", lambda name, grid, *_, **__: grids.append(grid))
    q = torch.zeros(70_000, 1, 1, 16)
    column_sums(q, q, causal_attention_lse(q, q, q, 1.0)[1], 1.0)
    assert grids == [(70_000, 1)] * 2


# ---- the columns that stay


STAY = ((2, 0, 2, 1), (7, 2, 4, 1), (1500, 4, 1300, 700), (1024, 0, 1024, 1023))


@pytest.mark.parametrize(("n", "begin", "end", "heavy"), thinned(STAY, 2))
def test_columns_that_stay(n: int, begin: int, end: int, heavy: int) -> None:
    """Ranks of which some are equal, both zeros, infinite or no numbers."""
    torch.manual_seed(0)
    rank = torch.randn(2, 2, n).round()
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, -3.4028234663852886e38])
    rank[0, 1] = odd[torch.randint(0, len(odd), (n,))]
    count = begin + heavy + n - end
    expected = choose_kept.torch(rank, begin, end, count)
    assert torch.equal(choose_kept(rank, begin, end, count), expected)


@pytest.mark.parametrize("lengths", [(1, 2), (1, 15, 16, 17), (1, 1500, 300)])
def test_columns_that_stay_of_all_lengths(lengths: tuple[int, ...]) -> None:
    """Some of them keep all, and one keeps none but its first and newest."""
    torch.manual_seed(0)
    short = lines_of(lengths, 0.6)[:-1]
    start = short[-1].tokens.stop
    kept_start = short[-1].stays.stop
    lines = (
        *short,
        triton.PromptPlace(start, 9, 9, kept_start, 5, 2, 6),
        triton.PromptPlace(start + 9, 4, 4, kept_start + 5, 4),
    )
    rank = torch.randn(1, 2, start + 13).round()
    found = choose_packed(rank, lines)
    for line in lines:
        expected = choose_kept.torch(rank[..., line.tokens], line.begin, line.end, line.kept)
        assert torch.equal(found[..., line.stays], expected)


# ---- their way into slots


def rows_of_prompts(
    packing: KVPacking | None,
    windows: int,
    window: int,
    width: int,
    dtype: torch.dtype,
    rows: slice,
    records: bool,
) -> PromptSlots:
    """Some rows of three prompts with two kv-heads, of more than one segment; they hold NaN."""
    sizes = (width, width) if packing is None else (packing.keys.words, packing.values.words)
    area = dtype if packing is None else torch.int32
    keys, values = (torch.full((3, 6, 32, size), -7).to(area)[:, rows] for size in sizes)
    form = WHOLE
    count = keys.shape[1]
    if packing is not None:
        odd = [torch.full((count, width), torch.nan).bfloat16() for _ in range(2)]
        odd += [torch.full((count, windows, width), torch.nan, dtype=dtype) for _ in range(2)]
        form = SlotForm(packing, whole=WholeColumns(*odd, torch.full((count, windows), 5).int()))
    recorded = (torch.zeros(6, 99).int()[rows], torch.zeros(6, 99)[rows]) if records else ()
    return PromptSlots(keys, values, rows.start, form, window, *recorded)


def tensors_of(slots: PromptSlots) -> list[torch.Tensor]:
    whole = slots.form.whole
    beside = [] if whole is None else list(vars(whole).values())
    return [
        t
        for t in (slots.keys, slots.values, slots.positions, slots.scores, *beside)
        if t is not None
    ]


@pytest.mark.parametrize(
    ("bits", "rows", "records", "dtype"),
    some_slow(
        [None, 4, "3/4"],
        [slice(0, 6), slice(1, 5)],
        [False, True],
        DTYPES,
        fast=(4, slice(1, 5), True, torch.float16),
    ),
)
def test_columns_of_prompts_of_all_lengths(
    bits: int | str | None, rows: slice, records: bool, dtype: torch.dtype
) -> None:
    """As each prompt's are put by itself, with its own number of whole columns beside packed
    slots."""
    torch.manual_seed(0)
    lengths = (1, 90, 17)
    packing = None if bits is None else KVPacking.of(36, bits)
    lines = tuple(
        line._replace(window=window)
        for line, window in zip(lines_of(lengths, 0.7), (0, 8, 4), strict=True)
    )
    k, v = (torch.randn(1, sum(lengths), 2, 36).to(dtype) for _ in range(2))
    scores = torch.rand(1, 2, sum(lengths)) if records else None
    kept = choose_packed(torch.randn(1, 2, sum(lengths)), lines)
    found, expected = (rows_of_prompts(packing, 8, 0, 36, dtype, rows, records) for _ in range(2))
    put_prompts(k, v, kept, scores, found, lines)
    for number, line in enumerate(lines):
        part = expected.of_prompts(number, 1, 2, line.window)
        own = (kept[..., line.stays],)
        given = None if scores is None else scores[..., line.tokens]
        if part.keys.shape[1]:
            put_prompts(k[:, line.tokens], v[:, line.tokens], *own, given, part)
    for mine, theirs in zip(tensors_of(found), tensors_of(expected), strict=True):
        assert mine.any() and torch.equal(mine, theirs)


PACKED = {
    "all stay": (64, 90, 90, 8, 8),
    "some stay": (128, 90, 70, 16, 12),
    "one token": (80, 1, 1, 4, 4),
    "a short prompt": (20, 5, 5, 16, 12),
    "nothing whole": (36, 33, 9, 0, 0),
    "a narrow head": (4, 40, 17, 4, 4),
}


@pytest.mark.parametrize("smooths", [True, False])
@pytest.mark.parametrize(
    ("sizes", "bits", "dtype"),
    some_slow(
        PACKED.values(),
        [None, "3/4", 3, 4, 8],
        DTYPES,
        fast=(PACKED["some stay"], "3/4", torch.float16),
    ),
)
def test_columns_of_prompts_are_those_of_torch(
    sizes: tuple[int, ...],
    bits: int | str | None,
    dtype: torch.dtype,
    smooths: bool,
    monkeypatch: Any,
) -> None:
    """To the bit, once centres and ranges are the same, which are sums of another order.

    Nothing is left of what was there before.
    """
    torch.manual_seed(0)
    width, n, count, windows, window = sizes
    k, v = (3 * torch.randn(3, n, 2, width).to(dtype) + 1 for _ in range(2))
    # channels that hardly move, and a group of equals
    k[1, :, 1, :3] = 0.5
    v[2, 0, 1] = 5
    kept = torch.stack([torch.randperm(n)[:count].sort().values for _ in range(6)])
    kept = kept.view(3, 2, count)
    packing = None if bits is None else KVPacking.of(width, bits)
    rows = slice(1, 6)
    scores = torch.rand(3, 2, n)
    found, expected = (
        replace(
            rows_of_prompts(packing, windows, window, width, dtype, rows, True), smooths=smooths
        )
        for _ in range(2)
    )
    put_prompts(k, v, kept, scores, found)
    mine = found.form.whole

    def begin(whole: WholeColumns, *given: Any) -> None:
        begin_whole(whole, *given)
        assert mine is not None
        for ours, theirs in ((mine.centres, whole.centres), (mine.ranges, whole.ranges)):
            close = 2**-7 if smooths else 0.0
            torch.testing.assert_close(ours, theirs, rtol=close, atol=close)
            theirs.copy_(ours)

    monkeypatch.setattr(prompt_columns, "begin_whole", begin)
    put_prompts.torch(k, v, kept, scores, expected)
    for ours, theirs in zip(tensors_of(found), tensors_of(expected), strict=True):
        assert torch.equal(ours, theirs)
    newest = kept.flatten(0, 1)[rows] >= n - window
    assert mine is None or int((mine.slots >= 0).sum()) == int(newest.sum())


def test_what_is_no_number_shows_in_its_group() -> None:
    """Of a value; no other group does."""
    packing = KVPacking.of(128, 4)
    k, v = torch.randn(2, 3, 1, 2, 128)
    v[0, 0, 0, 70] = torch.nan
    v[2, 0, 1, 3] = torch.inf
    slots = rows_of_prompts(packing, 4, 0, 128, torch.float32, slice(0, 6), False)
    put_prompts(k, v, torch.zeros(3, 2, 1).long(), None, slots)
    odd = unpack_columns(slots.values[0, :, 0], packing.values, torch.float32).isnan()
    assert odd.view(12, 64).all(1).nonzero().tolist() == [[1], [10]]
    assert int(odd.sum()) == 2 * 64
