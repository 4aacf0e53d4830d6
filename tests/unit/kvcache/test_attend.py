"""A micro-batch's attention, prefill then decode, against full attention over each row's own history."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.kernels.attention import slot_attention
from flexgen_h2o.kvcache.attend import attend_prompts, attend_slots
from flexgen_h2o.kvcache.store import PartView

HEADS, KV_HEADS, WIDTH, SCALE = 8, 2, 4, 0.5
Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_qkv(tokens: int) -> Qkv:
    return torch.randn(tokens, HEADS, WIDTH), torch.randn(tokens, KV_HEADS, WIDTH), torch.randn(tokens, KV_HEADS, WIDTH)


def split_views(rows: int, slots: int, cuts: Sequence[int]) -> list[PartView]:
    """Parts cut at the given rows, full of what a buffer may hold before: no numbers."""
    bounds = sorted({0, rows, *(c for c in cuts if c < rows)})
    shape = (slots, WIDTH)
    return [
        PartView(a, torch.full((b - a, *shape), math.nan), torch.full((b - a, *shape), math.nan))
        for a, b in pairwise(bounds)
    ]


def full_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """All queries (n, heads, d) over the columns up to their own, with the whole n x n matrix; the last of k is the
    newest query's own. Returns (queries, heads x d)."""
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k.double()) * SCALE
    first = len(k) - len(q)
    future = torch.ones(len(q), len(k)).triu(first + 1).bool()
    p = torch.softmax(scores.masked_fill(future, -math.inf), dim=-1)
    return torch.einsum("hqk,khd->qhd", p, v.double()).reshape(len(q), -1)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.lists(st.integers(0, 8), max_size=2), st.integers(0, 3))
def test_generation_of_ragged_rows(counts: list[int], cuts: list[int], steps: int) -> None:
    slots = max(counts) + steps
    views = split_views(len(counts) * KV_HEADS, slots, cuts)
    qkv = random_qkv(sum(counts))
    history = [list(row) for row in zip(*(t.split(counts) for t in qkv), strict=True)]
    out = attend_prompts(qkv, counts, views, SCALE, torch.full((sum(counts), HEADS * WIDTH), math.nan))
    expected = torch.cat([full_attention(*row) for row in history])
    assert (out.double() - expected).abs().max() < 1e-5
    for step in range(steps):
        new = random_qkv(len(counts))
        past = torch.tensor(counts) + step
        where = past.repeat_interleave(KV_HEADS)
        out = torch.full((len(counts), HEADS * WIDTH), math.nan)
        attend_slots(new, where, where + 1, int(past.max()) + 1, views, SCALE, slot_attention, out)
        for i, row in enumerate(history):
            row[1], row[2] = (torch.cat([row[j], new[j][i : i + 1]]) for j in (1, 2))
            assert (out[i].double() - full_attention(new[0][i : i + 1], row[1], row[2])[0]).abs().max() < 1e-5


@pytest.mark.parametrize("cuts", [(), (3,), (1, 5)])
def test_columns_lie_in_the_slots_of_their_positions_and_the_rest_holds_numbers(cuts: tuple[int, ...]) -> None:
    counts, slots = [2, 4, 1], 5
    qkv = random_qkv(sum(counts))
    views = split_views(len(counts) * KV_HEADS, slots, cuts)
    attend_prompts(qkv, counts, views, SCALE, torch.empty(sum(counts), HEADS * WIDTH))
    for stored, fed in (("keys", qkv[1]), ("values", qkv[2])):
        whole = torch.cat([getattr(view, stored) for view in views]).view(len(counts), KV_HEADS, slots, WIDTH)
        for row, own in zip(whole, fed.split(counts), strict=True):
            assert torch.equal(row[:, : len(own)], own.transpose(0, 1))
            assert not bool(row[:, len(own) :].any())


def test_a_slot_is_overwritten_in_place_whatever_its_number() -> None:
    """Slots have no order: a new column may take any."""
    views = split_views(KV_HEADS, 3, ())
    q, k, v = random_qkv(3)
    attend_prompts((q, k, v), [3], views, SCALE, torch.empty(3, HEADS * WIDTH))
    new = random_qkv(1)
    out = torch.empty(1, HEADS * WIDTH)
    attend_slots(new, torch.tensor([1, 1]), torch.tensor([3, 3]), 3, views, SCALE, slot_attention, out)
    kept = [0, 2]
    expected = full_attention(new[0], torch.cat([k[kept], new[1]]), torch.cat([v[kept], new[2]]))
    assert (out.double() - expected).abs().max() < 1e-5
