"""A micro-batch's attention, prefill then decode, against full attention over what each row still
holds; who leaves, against plain loops (tests/eviction has scores, ranks and every policy)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.kvcache import layout as layout_module
from flexgen_h2o.kvcache.budgets import Budgets, BudgetTable, DecodeStep
from flexgen_h2o.kvcache.decode import attend_slots, columns_of, rank_victims
from flexgen_h2o.kvcache.eviction import H2O, Full
from flexgen_h2o.kvcache.eviction.policy import Needs
from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.kvcache.part import KVPart, KVUnit, part_view
from flexgen_h2o.kvcache.prefill import attend_prompts
from flexgen_h2o.kvcache.prefixes import PromptGroup

HEADS = 8
KV_HEADS = 2
WIDTH = 4
SCALE = 0.5
GROUP = HEADS // KV_HEADS
Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "SEGMENT_SLOTS", 4)


def random_qkv(tokens: int) -> Qkv:
    return (
        torch.randn(tokens, HEADS, WIDTH),
        torch.randn(tokens, KV_HEADS, WIDTH),
        torch.randn(tokens, KV_HEADS, WIDTH),
    )


def cut_views(rows: int, slots: int, cuts: Sequence[int]) -> list[KVPart]:
    """Parts cut at the given rows, full of what a buffer may hold before: no numbers."""
    views = []
    for a, b in pairwise(sorted({0, rows, *(c for c in cuts if c < rows)})):
        layout = UnitLayout(b - a, 1, slots, WIDTH, 4, (0.0, 1.0, 0.0))
        (part,) = layout.parts
        data = torch.full((layout.part_bytes(part) // 4,), math.nan).view(torch.uint8)
        views.append(part_view(layout, part, data, torch.float32).part(0, b - a, a))
    return views


def probabilities(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q: (queries, group, d) of one kv-head, k: (columns, d), the last the newest query's own ->
    (g, queries, columns) in fp64, with the whole matrix."""
    scores = torch.einsum("qgd,kd->gqk", q.double(), k.double()) * SCALE
    future = torch.ones(len(q), len(k)).triu(len(k) - len(q) + 1).bool()
    return torch.softmax(scores.masked_fill(future, -math.inf), dim=-1)


def full_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """All queries (n, heads, d) over the columns (m, kv_heads, d) up to their own. Returns (n,
    heads x d)."""
    found = []
    for head in range(KV_HEADS):
        p = probabilities(q[:, head * GROUP : (head + 1) * GROUP], k[:, head])
        found.append(torch.einsum("gqk,kd->qgd", p, v[:, head].double()))
    return torch.cat(found, dim=1).reshape(len(q), -1)


def rows_of(counts: Sequence[int], steps: int, cuts: Sequence[int]) -> KVUnit:
    """The rows of a micro-batch with prompts of these lengths."""
    table = BudgetTable(Full(), [(count, steps + 1) for count in counts], 1)
    views = cut_views(len(counts) * KV_HEADS, table.most_slots(0), cuts)
    return KVUnit(Full(), 0, KV_HEADS, table.at(0), views)


def decode(unit: KVUnit, new: Qkv, positions: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(new[0]), HEADS * WIDTH), math.nan)
    unit = replace(unit, decoding=len(positions))
    unit.begin(DecodeStep(unit.budgets, unit.policy.needs, positions))
    assert attend_slots(new, unit, SCALE, out) is out
    return out.double()


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.lists(st.integers(0, 8), max_size=2),
    st.integers(0, 3),
)
def test_generation_of_ragged_rows(counts: list[int], cuts: list[int], steps: int) -> None:
    """Each column in the slot of its position, and nothing behind them."""
    rows = rows_of(counts, steps, cuts)
    qkv = random_qkv(sum(counts))
    history = [list(row) for row in zip(*(t.split(counts) for t in qkv), strict=True)]
    out = torch.full((sum(counts), HEADS * WIDTH), math.nan)
    assert attend_prompts(qkv, (PromptGroup(0, tuple(counts)),), rows, SCALE, out) is out
    assert (out.double() - torch.cat([full_attention(*row) for row in history])).abs().max() < 1e-5
    for step in range(steps):
        new = random_qkv(len(counts))
        out = decode(rows, new, torch.tensor(counts) + step)
        for i, row in enumerate(history):
            row[1], row[2] = (torch.cat([row[j], new[j][i : i + 1]]) for j in (1, 2))
            assert (
                out[i] - full_attention(new[0][i : i + 1], row[1], row[2])[0]
            ).abs().max() < 1e-5
    for stored, place in (("keys", 1), ("values", 2)):
        parts = [getattr(view, stored).transpose(0, 1).flatten(1, 2) for view in rows.parts]
        whole = torch.cat(parts).view(len(counts), KV_HEADS, -1, WIDTH)
        for own, row in zip(whole, history, strict=True):
            assert torch.equal(own[:, : len(row[place])], row[place].transpose(0, 1))
            assert bool(own[:, len(row[place]) :].isnan().all())


# ---- who leaves


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
    step = DecodeStep(budgets, unit.policy.needs, newest)
    rank_victims(unit, step, filled)
    columns = columns_of(unit, step, filled)
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
