"""What stays of a prompt, where new columns go and who leaves for them, against plain loops."""

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
    EvictionStep,
    KeptColumns,
    choose_kept,
    keep_prompt_columns,
    rank_victims,
    record_columns,
    record_prompt,
    unit_columns,
)
from flexgen_h2o.kvcache.eviction import H2O, Evicting, Full, H2ONorm, Local, SnapKV, Tova, ValueH2O
from flexgen_h2o.kvcache.eviction.policy import Columns, Needs
from flexgen_h2o.kvcache.slots import NewColumn, PartView, RowSlots, SlotMetadata, SlotTable

KV_HEADS, GROUP, WIDTH, SCALE = 2, 3, 4, 0.5
NORMS = ("positions", "scores", "norms")


def hook_of(policy: Evicting | Full, prompts: Sequence[int], gen_len: int = 9, block: int = 0) -> EvictionStep:
    rows = SlotTable(policy, [(n, gen_len) for n in prompts], 1).at(0, range(len(prompts)))
    return EvictionStep(policy, block, rows, KV_HEADS)


def split_views(record: SlotMetadata, cuts: Sequence[int]) -> list[PartView]:
    """Parts cut at the given rows; the record's tensors are those of the parts too."""
    rows, slots = record.positions.shape
    bounds = sorted({0, rows, *(c for c in cuts if c < rows)})
    empty = torch.zeros(1, rows, slots, WIDTH)
    return [PartView(a, empty[:, a:b], empty[:, a:b], record.rows(a, b)) for a, b in pairwise(bounds)]


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
        H2ONorm(decay=0.75): (sums * weights).sum(2),
        ValueH2O(decay=0.75): (sums * weights).sum(2),
        Tova(): sums[:, :, -1],
        SnapKV(window=4, kernel=1): sums[:, :, -4:].sum(2) / min(n, 4),
    }
    for policy, scores in expected.items():
        kept = keep_prompt_columns(hook_of(policy, [n, n]), 0, qkv, lse, SCALE)
        assert kept.scores is not None
        torch.testing.assert_close(kept.scores.double(), scores, rtol=1e-4, atol=1e-5)
        if kept.norms is not None:
            torch.testing.assert_close(kept.norms, qkv[2].norm(dim=-1))
        assert (kept.norms is not None) is (policy.needs.record == NORMS)
    assert abs(float(expected[H2O()].sum()) - 2 * n * KV_HEADS * GROUP) < 1e-6  # each query gives away 1


@pytest.mark.parametrize(
    "policy", [H2O(heavy_size=3, recent_size=2), Tova(heavy_size=3), H2ONorm(heavy_size=6, recent_size=2), ValueH2O()]
)
def test_what_stays_of_a_prompt(policy: Evicting) -> None:
    """Sinks, the newest, and of the others the highest ranks; the ranks are of the scores and norms of all columns."""
    n, first = 30, 1
    hook = hook_of(policy, [7, n, n, 4])
    qkv, lse, _ = random_prompts(2, n)
    kept = keep_prompt_columns(hook, first, qkv, lse, SCALE)
    budget = policy.budget(n, 0, 1)
    assert kept.positions.shape == (2, KV_HEADS, budget.columns)
    must = {*range(budget.sinks), *range(n - budget.recent, n)}
    positions = torch.arange(n, dtype=torch.int32).expand(2, KV_HEADS, n)
    may_leave = (positions >= budget.sinks) & (positions < n - budget.recent)
    newest, heavy = torch.full((2,), n - 1), torch.full((2,), budget.heavy)
    rank = policy.rank(Columns(0, positions, may_leave, newest, heavy, kept.scores, kept.norms))
    for i in range(2):
        for head in range(KV_HEADS):
            others = sorted((j for j in range(n) if j not in must), key=lambda j: (float(rank[i, head, j]), j))
            expected = sorted(must | set(others[len(others) - budget.heavy :]))
            assert kept.positions[i, head].tolist() == expected


@pytest.mark.parametrize(("n", "kept"), [(1, 1), (4, 4), (5, 5), (6, 5)])
def test_a_prompt_within_its_budget_stays_whole(n: int, kept: int) -> None:
    qkv, lse, _ = random_prompts(1, n)
    for policy in (H2O(heavy_size=2, recent_size=3), Local(recent_size=5, sinks=2)):
        hook = hook_of(policy, [n])
        found = keep_prompt_columns(hook, 0, qkv, lse if hook.scores_prompts else None, SCALE)
        assert found.positions.shape == (1, KV_HEADS, kept)
        if kept == n:
            assert found.positions[0].tolist() == [list(range(n))] * KV_HEADS
    full = keep_prompt_columns(hook_of(Full(), [n]), 0, qkv, None, SCALE)
    assert full.positions[0].tolist() == [list(range(n))] * KV_HEADS and full.scores is full.norms is None


def test_local_keeps_sinks_and_a_window() -> None:
    qkv, _, _ = random_prompts(1, 12)
    found = keep_prompt_columns(hook_of(Local(recent_size=5, sinks=2), [12]), 0, qkv, None, SCALE)
    assert found.positions[0].tolist() == [[0, 1, 9, 10, 11]] * KV_HEADS


# ---- the record


def empty_record(rows: int, slots: int) -> SlotMetadata:
    nothing = torch.full((rows, slots), math.nan)
    return SlotMetadata(
        torch.full((rows, slots), 77, dtype=torch.int32), torch.full((rows,), -1).int(), nothing, nothing + 0
    )


def test_what_is_kept_is_recorded_of_each_head() -> None:
    kept = KeptColumns(
        torch.tensor([[[0, 3], [1, 2]], [[2, 3], [0, 1]]]),
        torch.arange(16.0).view(2, KV_HEADS, 4), 100 + torch.arange(16.0).view(2, KV_HEADS, 4),
    )  # fmt: skip
    view = split_views(empty_record(3, 3), [])[0]
    record_prompt(view, slice(1, 3), kept, 1, slice(0, 2))
    record_prompt(view, slice(0, 1), kept, 0, slice(1, 2))
    record = view.record
    assert record is not None and record.scores is not None and record.norms is not None
    assert record.positions.tolist() == [[1, 2, 77], [2, 3, 77], [0, 1, 77]]
    assert record.scores[:, :2].tolist() == [[5, 6], [10, 11], [12, 13]]
    assert torch.equal(record.norms[:, :2], 100 + record.scores[:, :2])
    assert bool(record.scores[:, 2].isnan().all())


def test_new_columns_begin_with_nothing() -> None:
    view = split_views(empty_record(2, 3), [])[0]
    filled, values = torch.tensor([3, 4]), torch.tensor([[3.0, 4, 0, 0], [0, 0, 0, 1]])
    record_columns(view, torch.tensor([2, 0]), torch.tensor([8, 9]), filled, values)
    record = view.record
    assert record is not None and record.scores is not None and record.norms is not None
    assert record.positions.tolist() == [[77, 77, 8], [9, 77, 77]]
    assert record.scores[0, 2] == record.scores[1, 0] == 0 and int(record.scores.isnan().sum()) == 4
    assert record.norms[0, 2] == 5 and record.norms[1, 0] == 1


def test_ranks_are_the_order_of_positions() -> None:
    """While free slots are filled, and when columns replace any others."""
    generator = torch.Generator().manual_seed(0)
    rows, slots, held = 4, 5, 2
    ranks = torch.full((rows, slots), 7, dtype=torch.int32)
    view = split_views(replace(empty_record(rows, slots), ranks=ranks), [])[0]
    zeros = torch.zeros(2, KV_HEADS, 10)
    kept = KeptColumns(torch.tensor([[[0, 2], [1, 2]], [[3, 9], [4, 9]]]), zeros, zeros)
    for sequence in range(2):
        record_prompt(view, slice(2 * sequence, 2 * sequence + 2), kept, sequence, slice(0, 2))
    for past in range(10, 40):
        taken = torch.full((rows,), held) if held < slots else torch.randint(0, slots, (rows,), generator=generator)
        held = min(held + 1, slots)
        record_columns(view, taken, torch.tensor([past] * rows), torch.tensor([held] * rows), torch.zeros(rows, WIDTH))
        assert view.record is not None and view.record.ranks is not None
        order = view.record.positions[:, :held].argsort(dim=1).argsort(dim=1)
        assert torch.equal(view.record.ranks[:, :held], order.int())


@pytest.mark.parametrize("cuts", [(), (3,), (1, 5)])
def test_a_full_row_gives_the_slot_of_its_victim(cuts: tuple[int, ...]) -> None:
    record = empty_record(6, 9)
    record.victims.copy_(torch.tensor([5, 6, 0, 1, 7, 8]))
    new = NewColumn(torch.tensor([20, 30, 40]), torch.tensor([-1, 4, -1]), torch.tensor([9, 5, 9]))
    hook = hook_of(H2O(), [10, 10, 10])
    slots = hook.next_slots(split_views(record, cuts), new)
    assert torch.cat(slots).tolist() == [5, 6, 4, 4, 7, 8]
    assert all(t.dtype == torch.int64 for t in slots)
    bare = [PartView(0, *torch.zeros(2, 1, 6, 9, WIDTH))]
    grown = NewColumn(new.past, torch.tensor([3, 4, 5]), torch.tensor([4, 5, 6]))
    assert hook.next_slots(bare, grown)[0].tolist() == [3, 3, 4, 4, 5, 5]


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
    past = filled + 4  # some columns are gone
    record = empty_record(count * KV_HEADS, slots)
    assert record.scores is not None
    for row in range(len(record.positions)):
        place, i = int(filled[row // KV_HEADS]), row // KV_HEADS
        held = [*range(int(sinks[i])), *torch.randperm(int(past[i]) - int(sinks[i])).add(int(sinks[i])).tolist()]
        held = [*held[: place - 1], int(past[i])]
        record.positions[row, :place] = torch.tensor(held)[torch.randperm(place)]
        record.scores[row, :place] = torch.randint(0, 3, (place,)).float()
        record.positions[row, place:], record.scores[row, place:] = int(sinks[i]), -1.0  # what an old row left there
    rows = RowSlots(torch.ones(count).long(), sinks, torch.ones(count).long(), recent, filled)
    hook, new = EvictionStep(ByScore(), 0, rows, KV_HEADS), NewColumn(past, torch.full((count,), -1), filled)
    views = split_views(record, cuts)
    rank_victims(hook, views, new)
    columns = unit_columns(hook, views, new)
    assert columns.block == 0 and torch.equal(columns.newest, past) and torch.equal(columns.heavy, rows.heavy)
    for row in range(count * KV_HEADS):
        i = row // KV_HEADS
        candidates = [
            (float(record.scores[row, j]), int(record.positions[row, j]), j)
            for j in range(int(filled[i]))
            if sinks[i] <= record.positions[row, j] <= past[i] - recent[i]
        ]
        may_leave = columns.may_leave.flatten(0, 1)[row].nonzero().flatten().tolist()
        assert may_leave == sorted(j for _, _, j in candidates)
        if candidates:
            assert int(record.victims[row]) == min(candidates)[2]


def test_columns_of_a_unit_have_what_the_policy_records() -> None:
    record = empty_record(4, 3)
    new = NewColumn(torch.tensor([2, 2]), torch.tensor([2, 2]), torch.tensor([3, 3]))
    for policy, names in ((H2O(), {"scores"}), (ValueH2O(), {"scores", "norms"}), (Local(), set())):
        columns = unit_columns(hook_of(policy, [2, 2], block=5), split_views(record, [1, 3]), new)
        assert columns.positions.shape == columns.may_leave.shape == (2, KV_HEADS, 3) and columns.block == 5
        assert {name for name in ("scores", "norms") if getattr(columns, name) is not None} == names


def test_queries_that_saw_a_column_are_counted_with_its_own() -> None:
    record = empty_record(2, 2)
    record.positions.copy_(torch.tensor([[0, 9], [4, 9]]))
    new = NewColumn(torch.tensor([9]), torch.tensor([1]), torch.tensor([2]))
    columns = unit_columns(hook_of(H2O(), [2]), split_views(record, []), new)
    assert columns.seen()[0].tolist() == [[10, 1], [6, 1]]
