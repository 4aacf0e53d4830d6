"""The column that leaves a row, against plain loops: tests/eviction has scores and every policy."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.kvcache.budgets import Budgets, DecodeStep
from flexgen_h2o.kvcache.eviction import H2O
from flexgen_h2o.kvcache.eviction.policy import Needs
from flexgen_h2o.kvcache.part import KVPart, KVUnit

KV_HEADS = 2
WIDTH = 4


class ByScore(H2O):
    """H2O whose victims are ranked outside the decode kernel."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, ranks_by_score=False)


@given(st.integers(1, 4), st.lists(st.integers(0, 8), max_size=2), st.data())
def test_the_lowest_rank_leaves_and_of_equals_the_oldest(
    count: int, cuts: list[int], data: st.DataObject
) -> None:
    """Never a sink, a recent column or an empty slot; rows have budgets and lengths of their
    own."""
    slots = 7
    one_row = st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(0, 3))
    limits = data.draw(st.lists(one_row, min_size=count, max_size=count))
    sinks, recent, more = (torch.tensor(t) for t in zip(*limits, strict=True))
    filled = torch.clamp(sinks + recent + 1 + more, max=slots)
    newest = filled + 4  # some columns are gone
    positions = torch.full((count * KV_HEADS, slots), 77).int()
    victims = torch.full((count * KV_HEADS,), -1).int()
    scores = torch.full((count * KV_HEADS, slots), math.nan)
    for row in range(len(positions)):
        place = int(filled[row // KV_HEADS])
        i = row // KV_HEADS
        held = [
            *range(int(sinks[i])),
            *torch.randperm(int(newest[i]) - int(sinks[i])).add(int(sinks[i])).tolist(),
        ]
        held = [*held[: place - 1], int(newest[i])]
        positions[row, :place] = torch.tensor(held)[torch.randperm(place)]
        scores[row, :place] = torch.randint(0, 3, (place,)).float()
        # left by an old row
        positions[row, place:] = int(sinks[i])
        scores[row, place:] = -1.0
    ones = torch.ones(count).long()
    empty = torch.zeros(1, count * KV_HEADS, slots, WIDTH)
    whole = KVPart(0, empty, empty, positions=positions, victims=victims, scores=scores)
    views = [
        whole.part(a, b, a)
        for a, b in pairwise(sorted({0, whole.rows, *(c for c in cuts if c < whole.rows)}))
    ]
    budgets = Budgets(ones, sinks, ones, recent, filled)
    unit = KVUnit(ByScore(), 5, KV_HEADS, budgets, views, count)
    unit.begin(DecodeStep(budgets, unit.policy.needs, newest))
    unit.evict()
    columns = unit.columns()
    assert (
        columns.block == 5
        and torch.equal(columns.newest, newest)
        and torch.equal(columns.heavy, ones)
    )
    assert columns.norms is None and columns.scores is not None  # what the policy records
    for row in range(count * KV_HEADS):
        i = row // KV_HEADS
        candidates = [
            (float(scores[row, j]), int(positions[row, j]), j)
            for j in range(int(filled[i]))
            if sinks[i] <= positions[row, j] <= newest[i] - recent[i]
        ]
        may_leave = columns.may_leave.flatten(0, 1)[row].nonzero().flatten().tolist()
        assert may_leave == sorted(j for _, _, j in candidates)
        if candidates:
            assert int(victims[row]) == min(candidates)[2]
