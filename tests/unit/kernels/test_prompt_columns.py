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
    put_prompts,
)
from flexgen_h2o.kernels.slot_form import SlotForm, WholeColumns

WIDTH = 8


@given(
    st.lists(st.sampled_from([-math.inf, 0.0, 0.5, math.inf]), min_size=2, max_size=12), st.data()
)
def test_the_highest_ranks_stay_and_of_equals_the_newer(
    ranks: list[float], data: st.DataObject
) -> None:
    """A policy may rank with infinities."""
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
    st.sampled_from([1, 2**20]),
)
def test_columns_that_stay_go_to_their_slots(
    n: int, count: int, window: int, first: int, seed: int, smooths: bool, chunk: int
) -> None:
    """Packed, some rows at a time. The newest are whole, each token in the place of its number; a
    part of the rows, and fewer places in use than there are."""
    g = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, 3, n, 2, WIDTH, generator=g)
    scores = torch.rand(3, 2, n)
    kept = torch.stack([torch.randperm(n, generator=g)[:count].sort().values for _ in range(6)])
    count = kept.shape[1]
    packing = KVPacking.of(WIDTH, "4/3")
    rows = 6 - first
    areas = [torch.full((3, rows, 7, of.words), -7).int() for of in (packing.keys, packing.values)]
    whole = beside(rows, 8)
    records = torch.zeros(rows, 21).int(), torch.zeros(rows, 21)
    form = SlotForm(packing, whole=whole)
    slots = PromptSlots(*areas, first, form, window, *records, smooths=smooths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_columns, "PACKED_CHUNK", chunk)
        put_prompts.torch(k, v, kept.view(3, 2, -1), scores, slots)
    for row, tokens in enumerate(kept[first:]):
        batch, head = divmod(first + row, 2)
        keys = k[batch, :, head]
        values = v[batch, :, head]
        for record, own in zip(records, (tokens.int(), scores[batch, head, tokens]), strict=True):
            assert torch.equal(record[row, :count], own) and not record[row, count:].any()
        of_row = whole.map(lambda t, row=row: t[row : row + 1])  # type: ignore[misc]
        smoothed = of_row.smoothed(keys[tokens].unsqueeze(0))[0]
        for area, columns, of in zip(
            areas, (smoothed, values[tokens]), (packing.keys, packing.values), strict=True
        ):
            held = area[:, row].flatten(0, 1)
            assert torch.equal(held[:count], pack_columns.torch(columns, of))
            assert (held[count:] == -7).all()
        expected = {t % window: (i, t) for i, t in enumerate(tokens.tolist()) if t >= n - window}
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
