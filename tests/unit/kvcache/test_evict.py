"""What stays of a prompt and which column leaves for the next one, against plain loops."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.kernels.prefill_attention import causal_attention_lse
from flexgen_h2o.kvcache.evict import (
    KeptColumns,
    choose_kept,
    columns_of,
    keep_prompt_columns,
    rank_victims,
    record_columns,
    record_prompt,
)
from flexgen_h2o.kvcache.eviction import H2O, Evicting, Full, H2ONorm, SnapKV, Tova, ValueH2O
from flexgen_h2o.kvcache.eviction.policy import Needs
from flexgen_h2o.kvcache.slots import KVRows, NewColumns, PartView, RowBudgets, SlotMetadata, SlotTable

KV_HEADS, GROUP, WIDTH, SCALE = 2, 3, 4, 0.5
NORMS = ("positions", "scores", "norms")


def rows_of(policy: Evicting | Full, prompts: Sequence[int]) -> KVRows:
    return KVRows(policy, 0, KV_HEADS, SlotTable(policy, [(n, 9) for n in prompts], 1).at(0))


# ---- choosing of a prompt's columns


ranked = st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), st.booleans()), min_size=2, max_size=12)


@given(ranked, st.data())
def test_the_highest_ranks_stay_and_of_equals_the_newer(columns: list[tuple[float, bool]], data: st.DataObject) -> None:
    stays = [i for i, (_, may_leave) in enumerate(columns) if not may_leave]
    count = data.draw(st.integers(len(stays), len(columns) - 1) if len(stays) < len(columns) else st.just(0))
    others = sorted((i for i in range(len(columns)) if i not in stays), key=lambda i: (columns[i][0], i), reverse=True)
    expected = sorted([*stays, *others[: count - len(stays)]])
    rank = torch.tensor([[[r for r, _ in columns]]])
    if count:
        assert choose_kept(rank, torch.tensor([[[m for _, m in columns]]]), count)[0, 0].tolist() == expected


def test_every_sequence_and_head_chooses_for_itself() -> None:
    rank = torch.tensor([[[3.0, 1, 2, 0], [0, 1, 2, 3]], [[9, 0, 0, 9], [0, 0, 0, 0]]])
    may_leave = torch.tensor([True, True, True, False]).expand(2, 2, 4)
    assert choose_kept(rank, may_leave, 2).tolist() == [[[0, 3], [2, 3]], [[0, 3], [2, 3]]]


def test_an_infinite_rank_is_no_protection_against_the_protected() -> None:
    """A policy may rank with infinities (h2o-v); ties among them are settled like others."""
    rank = torch.tensor([[[math.inf, 1.0, math.inf, -math.inf]]])
    may_leave = torch.tensor([[[True, True, True, False]]])
    assert choose_kept(rank, may_leave, 2)[0, 0].tolist() == [2, 3]


# ---- prompts


def random_prompts(b: int, n: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """q, k, v; their log-sum-exp; and probabilities (b, kv_heads, group, n, n) in fp64."""
    q = 2 * torch.randn(b, KV_HEADS * GROUP, n, WIDTH)
    k, v = torch.randn(b, KV_HEADS, n, WIDTH), torch.randn(b, KV_HEADS, n, WIDTH)
    _, lse = causal_attention_lse(q, k, v, SCALE)
    products = torch.einsum("bhgid,bhjd->bhgij", q.double().view(b, KV_HEADS, GROUP, n, WIDTH), k.double()) * SCALE
    p = products.masked_fill(torch.ones(n, n).triu(1).bool(), -math.inf).softmax(-1)
    return [q, k, v], lse, p


@pytest.mark.parametrize("n", [1, 5, 40])
def test_prompt_scores(n: int) -> None:
    """Sums over queries and the heads of a group; of the last few only; and fading with their age."""
    qkv, lse, p = random_prompts(2, n)
    sums = p.sum(2)
    weights = 0.75 ** torch.arange(n - 1, -1, -1).double().view(n, 1)
    expected = {
        H2O(): sums.sum(2),
        H2ONorm(decay=1.0): sums.sum(2),
        ValueH2O(decay=0.75): (sums * weights).sum(2),
        Tova(): sums[:, :, -1],
        SnapKV(window=4, kernel=1): sums[:, :, -4:].sum(2) / min(n, 4),
    }
    for policy, scores in expected.items():
        kept = keep_prompt_columns(rows_of(policy, [n, n]), 0, qkv, lse, SCALE)
        assert kept.scores is not None
        torch.testing.assert_close(kept.scores.double(), scores, rtol=1e-4, atol=1e-5)
        if kept.norms is not None:
            torch.testing.assert_close(kept.norms, qkv[2].norm(dim=-1))
        assert (kept.norms is not None) is (policy.needs.record == NORMS)
    assert abs(float(expected[H2O()].sum()) - 2 * n * KV_HEADS * GROUP) < 1e-6  # each query gives away 1


@pytest.mark.parametrize(("n", "kept"), [(1, 1), (5, 5), (6, 5)])
def test_a_prompt_within_its_budget_stays_whole(n: int, kept: int) -> None:
    qkv, lse, _ = random_prompts(1, n)
    found = keep_prompt_columns(rows_of(H2O(heavy_size=2, recent_size=3), [n]), 0, qkv, lse, SCALE)
    assert found.positions.shape == (1, KV_HEADS, kept)
    if kept == n:
        assert found.positions[0].tolist() == [list(range(n))] * KV_HEADS
    full = keep_prompt_columns(rows_of(Full(), [n]), 0, qkv, None, SCALE)
    assert full.positions[0].tolist() == [list(range(n))] * KV_HEADS and full.scores is full.norms is None


# ---- metadata


def empty_metadata(rows: int, slots: int) -> SlotMetadata:
    nothing = torch.full((rows, slots), math.nan)
    return SlotMetadata(
        torch.full((rows, slots), 77, dtype=torch.int32), torch.full((rows,), -1).int(), nothing, nothing + 0
    )


def test_ranks_are_the_order_of_positions() -> None:
    """While free slots are filled, and when columns replace any others."""
    generator = torch.Generator().manual_seed(0)
    rows, slots, held = 4, 5, 2
    metadata = replace(empty_metadata(rows, slots), ranks=torch.full((rows, slots), 7, dtype=torch.int32))
    zeros = torch.zeros(2, KV_HEADS, 10)
    kept = KeptColumns(torch.tensor([[[0, 2], [1, 2]], [[3, 9], [4, 9]]]), zeros, zeros)
    for sequence in range(2):
        record_prompt(metadata, slice(2 * sequence, 2 * sequence + 2), kept, sequence, slice(0, 2))
    for position in range(10, 40):
        taken = torch.full((rows,), held) if held < slots else torch.randint(0, slots, (rows,), generator=generator)
        held = min(held + 1, slots)
        filled = torch.tensor([held] * rows)
        record_columns(metadata, taken, torch.tensor([position] * rows), filled, torch.zeros(rows, WIDTH))
        assert metadata.ranks is not None
        order = metadata.positions[:, :held].argsort(dim=1).argsort(dim=1)
        assert torch.equal(metadata.ranks[:, :held], order.int())


# ---- who leaves


class ByScore(H2O):
    """H2O whose victims are ranked outside the decode kernel."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, ranks_by_score=False)


@given(st.integers(1, 4), st.lists(st.integers(0, 8), max_size=2), st.data())
def test_the_lowest_rank_leaves_and_of_equals_the_oldest(count: int, cuts: list[int], data: st.DataObject) -> None:
    """Never a sink, a recent column or an empty slot; rows have budgets and lengths of their own."""
    slots = 7
    one_row = st.tuples(st.integers(0, 2), st.integers(1, 3), st.integers(0, 3))
    limits = data.draw(st.lists(one_row, min_size=count, max_size=count))
    sinks, recent, more = (torch.tensor(t) for t in zip(*limits, strict=True))
    filled = torch.clamp(sinks + recent + 1 + more, max=slots)
    newest = filled + 4  # some columns are gone
    metadata = empty_metadata(count * KV_HEADS, slots)
    assert metadata.scores is not None
    for row in range(len(metadata.positions)):
        place, i = int(filled[row // KV_HEADS]), row // KV_HEADS
        held = [*range(int(sinks[i])), *torch.randperm(int(newest[i]) - int(sinks[i])).add(int(sinks[i])).tolist()]
        held = [*held[: place - 1], int(newest[i])]
        metadata.positions[row, :place] = torch.tensor(held)[torch.randperm(place)]
        metadata.scores[row, :place] = torch.randint(0, 3, (place,)).float()
        metadata.positions[row, place:], metadata.scores[row, place:] = int(sinks[i]), -1.0  # left by an old row
    ones, empty = torch.ones(count).long(), torch.zeros(1, count * KV_HEADS, slots, WIDTH)
    whole = PartView(0, empty, empty, metadata)
    views = [whole.part(a, b, a) for a, b in pairwise(sorted({0, whole.rows, *(c for c in cuts if c < whole.rows)}))]
    rows = KVRows(ByScore(), 5, KV_HEADS, RowBudgets(ones, sinks, ones, recent, filled), views)
    new = NewColumns(newest, filled, [])
    rank_victims(rows, new)
    columns = columns_of(rows, new)
    assert columns.block == 5 and torch.equal(columns.newest, newest) and torch.equal(columns.heavy, ones)
    assert columns.norms is None and columns.scores is not None  # what the policy records
    for row in range(count * KV_HEADS):
        i = row // KV_HEADS
        candidates = [
            (float(metadata.scores[row, j]), int(metadata.positions[row, j]), j)
            for j in range(int(filled[i]))
            if sinks[i] <= metadata.positions[row, j] <= newest[i] - recent[i]
        ]
        may_leave = columns.may_leave.flatten(0, 1)[row].nonzero().flatten().tolist()
        assert may_leave == sorted(j for _, _, j in candidates)
        if candidates:
            assert int(metadata.victims[row]) == min(candidates)[2]
