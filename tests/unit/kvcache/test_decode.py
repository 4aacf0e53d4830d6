"""The column that leaves a row, by a rank of the policy's own: tests/eviction has every policy."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from flexgen_h2o.kvcache.budgets import Budgets, DecodeStep
from flexgen_h2o.kvcache.eviction import H2O
from flexgen_h2o.kvcache.eviction.policy import Needs
from flexgen_h2o.kvcache.part import KVPart, KVUnit


class ByScore(H2O):
    """H2O whose victims are ranked outside the decode kernel."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, ranks_by_score=False)


# Two sequences of two kv-heads: position and score by slot. Slots behind the filled ones have an
# old row's low scores.
POSITIONS = [
    [9, 0, 4, 2, 8, 6, 1],
    [0, 5, 3, 9, 8, 1, 2],
    [7, 6, 1, 3, 2, 4, 5],
    [2, 7, 0, 5, 1, 3, 6],
]
SCORES = [
    [0.0, 0.0, 1.0, 1.0, 0.0, 2.0, -1.0],
    [0.0, 0.5, 0.5, 0.0, 0.0, 0.2, -1.0],
    [0.0, 2.0, 1.0, 1.0, -1.0, -1.0, -1.0],
    [3.0, 0.0, 3.0, 4.0, -1.0, -1.0, -1.0],
]
FILLED = (6, 4)
SINKS = (1, 0)
HEAVY = (1, 1)
RECENT = (2, 1)
NEWEST = (9, 7)
VICTIMS = [3, 5, 2, 2]  # of equal scores the lowest position


@pytest.mark.parametrize("cuts", [(), (2,), (1, 3)])
def test_the_lowest_rank_leaves_and_of_equals_the_oldest(cuts: tuple[int, ...]) -> None:
    """Never a sink, a recent column or an empty slot, wherever parts are cut."""
    keys = torch.zeros(1, 4, 7, 4)
    whole = KVPart(
        0,
        keys,
        keys,
        positions=torch.tensor(POSITIONS).int(),
        victims=torch.full((4,), -1).int(),
        scores=torch.tensor(SCORES),
    )
    parts = [whole.part(a, b, a) for a, b in pairwise((0, *cuts, 4))]
    ones = torch.ones(2).long()
    budgets = Budgets(ones, *map(torch.tensor, (SINKS, HEAVY, RECENT, FILLED)))
    unit = KVUnit(ByScore(), 5, 2, budgets, parts, 2)
    unit.begin(DecodeStep(budgets, unit.policy.needs, torch.tensor(NEWEST)))
    unit.evict()
    assert torch.cat([part.victims for part in parts]).tolist() == VICTIMS
