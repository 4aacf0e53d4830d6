"""What stays of prompts and goes into slots, by torch operations, against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.core.packing import KVPacking
from flexgen_h2o.kernels import prompt_columns
from flexgen_h2o.kernels.packed import pack_columns
from flexgen_h2o.kernels.prompt_columns import (
    PromptSlots,
    choose_kept,
    keep_whole,
    put_prompts,
)
from flexgen_h2o.kernels.slot_form import SlotForm, WholeColumns

WIDTH = 8


@given(st.lists(st.sampled_from([-math.inf, 0.0, 0.5, math.inf]), min_size=2, max_size=12), st.data())
def test_the_highest_ranks_stay_and_of_equals_the_newer(
    ranks: list[float], data: st.DataObject
) -> None:
    """A policy may rank with infinities (h2o-v)."""
    n = len(ranks)
    begin = data.draw(st.integers(0, n - 1))
    end = data.draw(st.integers(begin + 1, n))
    heavy = data.draw(st.integers(0, end - begin - 1))
    by_rank = sorted(range(begin, end), key=lambda i: (ranks[i], i), reverse=True)
    expected = sorted([*range(begin), *by_rank[:heavy], *range(end, n)])
    assert (
        choose_kept(torch.tensor([[ranks]]), begin, end, begin + heavy + n - end)[0, 0].tolist()
        == expected
    )


def beside(rows: int, windows: int) -> WholeColumns:
    """Full of what a buffer may hold before."""
    odd = [torch.full(size, torch.nan) for size in ((rows, WIDTH), (rows, windows, WIDTH))]
    centres, ranges = (odd[0].bfloat16() for _ in range(2))
    return WholeColumns(
        centres, ranges, odd[1].clone(), odd[1].clone(), torch.full((rows, windows), 3).int()
    )


@given(
    st.integers(1, 20),
    st.integers(1, 20),
    st.sampled_from([0, 4, 8]),
    st.integers(0, 5),
    st.integers(0, 99),
    st.booleans(),
)
def test_the_newest_that_stay_are_whole(
    n: int, count: int, window: int, first: int, seed: int, smooths: bool
) -> None:
    """Each token in the place of its number; a part of the rows, and fewer places in use than there
    are."""
    g = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, 3, n, 2, WIDTH, generator=g)
    kept = torch.stack(
        [torch.randperm(n, generator=g)[:count].sort().values for _ in range(6)]
    ).view(3, 2, -1)
    whole = beside(6 - first, 8)
    keep_whole(whole, k, v, kept, first, window, smooths)
    for row in range(6 - first):
        keys, values = (t[(first + row) // 2, :, (first + row) % 2] for t in (k, v))
        expected = {
            t % window: (slot, t)
            for slot, t in enumerate(kept.view(6, -1)[first + row].tolist())
            if t >= n - window
        }
        for place in range(8):
            slot, token = expected.get(place, (-1, None))
            assert whole.slots[row, place] == slot
            for found, columns in ((whole.keys, keys), (whole.values, values)):
                assert torch.equal(
                    found[row, place], torch.zeros(WIDTH) if token is None else columns[token]
                )
        if not smooths:
            assert not whole.centres[row].any() and bool((whole.ranges[row] == 1).all())
            continue
        least = keys.amin(0)
        most = keys.amax(0)
        assert torch.equal(whole.centres[row], ((least + most) / 2).bfloat16())
        spread = (most - least).clamp(min=float((most - least).mean()) / 16)
        assert torch.allclose(whole.ranges[row].float(), spread.where(spread > 0, 1.0), rtol=2**-7)


@pytest.mark.parametrize("chunk", [1, 2**20])
def test_columns_go_to_their_slots_some_rows_at_a_time(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_columns, "PACKED_CHUNK", chunk)
    torch.manual_seed(0)
    k, v = torch.randn(2, 3, 30, 2, WIDTH)
    scores = torch.rand(3, 2, 30)
    packing = KVPacking.of(WIDTH, "4/3")
    kept = torch.stack([torch.randperm(30)[:20].sort().values for _ in range(6)]).view(3, 2, 20)
    areas = [torch.full((3, 5, 7, of.words), -7).int() for of in (packing.keys, packing.values)]
    whole = beside(5, 8)
    positions = torch.zeros(5, 21).int()
    given_scores = torch.zeros(5, 21)
    slots = PromptSlots(*areas, 1, SlotForm(packing, whole=whole), 8, positions, given_scores)
    put_prompts.torch(k, v, kept, scores, slots)
    tokens = kept.view(6, 20)[1:]
    assert torch.equal(positions[:, :20], tokens.int()) and not positions[:, 20].any()
    for row in range(5):
        batch, head = divmod(row + 1, 2)
        assert torch.equal(given_scores[row, :20], scores[batch, head, tokens[row]])
        of_row = whole.map(lambda t, row=row: t[row : row + 1])  # type: ignore[misc]
        columns = (
            of_row.smoothed(k[batch, tokens[row], head].unsqueeze(0))[0],
            v[batch, tokens[row], head],
        )
        for area, some, of in zip(areas, columns, (packing.keys, packing.values), strict=True):
            held = area[:, row].flatten(0, 1)
            assert torch.equal(held[:20], pack_columns.torch(some, of)) and bool(
                (held[20:] == -7).all()
            )
