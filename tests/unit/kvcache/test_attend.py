"""A micro-batch's attention, prefill then decode, against full attention over what each row still holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.core.units import TOKEN_CHUNK
from flexgen_h2o.kernels import slots as slot_kernels
from flexgen_h2o.kvcache import layout as layout_module
from flexgen_h2o.kvcache.attend import attend_prompts, attend_slots
from flexgen_h2o.kvcache.evict import EvictionStep
from flexgen_h2o.kvcache.eviction import H2O, Eviction, Full, H2ONorm, Local, Random, SnapKV, Tova, ValueH2O
from flexgen_h2o.kvcache.eviction.policy import Columns
from flexgen_h2o.kvcache.layout import unit_layout
from flexgen_h2o.kvcache.prefixes import PromptGroup
from flexgen_h2o.kvcache.slots import NewColumn, PartView, SlotTable, carve_record, new_columns, part_view

HEADS, KV_HEADS, WIDTH, SCALE = 8, 2, 4, 0.5
GROUP = HEADS // KV_HEADS
Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "SEGMENT_SLOTS", 4)


def random_qkv(tokens: int) -> Qkv:
    return torch.randn(tokens, HEADS, WIDTH), torch.randn(tokens, KV_HEADS, WIDTH), torch.randn(tokens, KV_HEADS, WIDTH)


def split_views(rows: int, slots: int, cuts: Sequence[int], record: tuple[str, ...] = ()) -> list[PartView]:
    """Parts cut at the given rows, full of what a buffer may hold before: no numbers."""
    views = []
    for a, b in pairwise(sorted({0, rows, *(c for c in cuts if c < rows)})):
        layout = unit_layout(b - a, 1, slots, WIDTH, 4, (0.0, 1.0, 0.0), record)
        (part,) = layout.parts
        data = torch.full((layout.part_bytes(part) // 4,), math.nan).view(torch.uint8)
        memory = torch.full((layout.record_bytes(part),), 255, dtype=torch.uint8)
        view = part_view(layout, part, data, torch.float32, carve_record(layout, part, memory))
        views.append(PartView(a, view.keys, view.values, view.record))
    return views


def probabilities(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """q: (queries, group, d) of one kv-head, k: (columns, d), the last the newest query's own -> (g, queries, columns)
    in fp64, with the whole matrix."""
    scores = torch.einsum("qgd,kd->gqk", q.double(), k.double()) * SCALE
    future = torch.ones(len(q), len(k)).triu(len(k) - len(q) + 1).bool()
    return torch.softmax(scores.masked_fill(future, -math.inf), dim=-1)


def full_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """All queries (n, heads, d) over the columns (m, kv_heads, d) up to their own. Returns (n, heads x d)."""
    found = []
    for head in range(KV_HEADS):
        p = probabilities(q[:, head * GROUP : (head + 1) * GROUP], k[:, head])
        found.append(torch.einsum("gqk,kd->qgd", p, v[:, head].double()))
    return torch.cat(found, dim=1).reshape(len(q), -1)


def alone(counts: Sequence[int]) -> tuple[PromptGroup, ...]:
    """Prompts that share nothing."""
    return (PromptGroup(0, tuple(counts)),)


def hook_of(policy: Eviction, counts: Sequence[int], steps: int) -> tuple[EvictionStep, int]:
    """The hook of a micro-batch, and the slots of its fullest row."""
    table = SlotTable(policy, [(count, steps + 1) for count in counts], 1)
    return EvictionStep(policy, 0, table.at(0, range(len(counts))), KV_HEADS), table.most_slots(0)


def decode(new: Qkv, joined: NewColumn, views: list[PartView], hook: EvictionStep) -> torch.Tensor:
    slots = hook.next_slots(views, joined)
    out = torch.full((len(new[0]), HEADS * WIDTH), math.nan)
    assert attend_slots(new, joined, slots, views, hook, SCALE, slot_kernels.attend, out) is out
    return out.double()


# ---- all columns


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.lists(st.integers(0, 8), max_size=2), st.integers(0, 3))
def test_generation_of_ragged_rows(counts: list[int], cuts: list[int], steps: int) -> None:
    hook, slots = hook_of(Full(), counts, steps)
    views = split_views(len(counts) * KV_HEADS, slots, cuts)
    qkv = random_qkv(sum(counts))
    history = [list(row) for row in zip(*(t.split(counts) for t in qkv), strict=True)]
    out = attend_prompts(qkv, alone(counts), views, hook, SCALE, torch.full((sum(counts), HEADS * WIDTH), math.nan))
    expected = torch.cat([full_attention(*row) for row in history])
    assert (out.double() - expected).abs().max() < 1e-5
    for step in range(steps):
        new = random_qkv(len(counts))
        out = decode(new, new_columns(hook.rows, torch.tensor(counts) + step), views, hook)
        for i, row in enumerate(history):
            row[1], row[2] = (torch.cat([row[j], new[j][i : i + 1]]) for j in (1, 2))
            assert (out[i] - full_attention(new[0][i : i + 1], row[1], row[2])[0]).abs().max() < 1e-5


@pytest.mark.parametrize("cuts", [(), (3,), (1, 5)])
def test_columns_lie_in_the_slots_of_their_positions(cuts: tuple[int, ...]) -> None:
    counts, slots = [2, 4, 1], 5
    qkv = random_qkv(sum(counts))
    views = split_views(len(counts) * KV_HEADS, slots, cuts)
    attend_prompts(
        qkv, alone(counts), views, hook_of(Full(), counts, 2)[0], SCALE, torch.empty(sum(counts), HEADS * WIDTH)
    )  # fmt: skip
    for stored, fed in (("keys", qkv[1]), ("values", qkv[2])):
        parts = [getattr(view, stored).transpose(0, 1).flatten(1, 2) for view in views]
        whole = torch.cat(parts).view(len(counts), KV_HEADS, -1, WIDTH)
        for row, own in zip(whole, fed.split(counts), strict=True):
            assert torch.equal(row[:, : len(own)], own.transpose(0, 1))
            assert bool(row[:, len(own) :].isnan().all())  # nothing is written behind them


def test_a_slot_is_overwritten_in_place_whatever_its_number() -> None:
    """Slots have no order: a new column may take any."""
    views = split_views(KV_HEADS, 3, ())
    q, k, v = random_qkv(3)
    hook = hook_of(Full(), [3], 1)[0]
    attend_prompts((q, k, v), alone([3]), views, hook, SCALE, torch.empty(3, HEADS * WIDTH))
    new, joined = random_qkv(1), NewColumn(torch.tensor([3]), torch.tensor([1]), torch.tensor([3]))
    kept = [0, 2]
    expected = full_attention(new[0], torch.cat([k[kept], new[1]]), torch.cat([v[kept], new[2]]))
    assert (decode(new, joined, views, hook) - expected).abs().max() < 1e-5


# ---- columns that leave


@dataclass
class PlainHead:
    """One kv-head of a row: its whole history, and what lies in its slots, a list each."""

    keys: torch.Tensor
    values: torch.Tensor
    positions: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    victim: int = -1

    def attend(self, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q: (group, d) -> mixed values (group, d) and probabilities (group, slots) over what is held."""
        p = probabilities(q.unsqueeze(0), self.keys[self.positions])[:, 0]
        return p @ self.values[self.positions].double(), p

    def norms(self) -> list[float]:
        return [float(norm) for norm in self.values[self.positions].norm(dim=-1)]


class PlainRow:
    """A row under a policy, column by column. Only the policy's own `prompt_scores` and `rank` are not written out."""

    def __init__(self, policy: Eviction, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gen_len: int) -> None:
        self.policy, self.length = policy, len(q)
        self.budget = policy.budget(len(q), 0, 1)
        self.room = policy.slots(len(q), gen_len, 0, 1)
        self.heads = [PlainHead(k[:, i], v[:, i], list(range(len(q)))) for i in range(KV_HEADS)]
        rows = len(q) if policy.needs.query_rows is None else min(len(q), policy.needs.query_rows)
        if rows:
            weights = policy.needs.query_decay ** torch.arange(rows - 1, -1, -1).double()
            sums = []
            for i in range(KV_HEADS):
                p = probabilities(q[:, i * GROUP : (i + 1) * GROUP], k[:, i]).sum(0)
                sums.append((p[len(q) - rows :] * weights.unsqueeze(1)).sum(0))
            scores = policy.prompt_scores(torch.stack(sums).unsqueeze(0).float(), rows)[0]
        for i, own in enumerate(self.heads):
            own.scores = scores[i].tolist() if rows else [0.0] * len(q)
        leaving = max(0, len(q) - self.budget.columns)
        for head, ranks in zip(self.heads, self._ranks() if leaving else [[]] * KV_HEADS, strict=True):
            for _ in range(leaving):
                slot = self._least(head, ranks)
                for kept in (head.positions, head.scores, ranks):
                    del kept[slot]

    def step(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """One new token, (heads, d) and (kv_heads, d): its attention (heads x d)."""
        attn_out = []
        for i, head in enumerate(self.heads):
            head.keys, head.values = torch.cat([head.keys, k[i : i + 1]]), torch.cat([head.values, v[i : i + 1]])
            if len(head.positions) < self.room:
                head.positions.append(self.length)
                head.scores.append(0.0)
            else:
                head.positions[head.victim], head.scores[head.victim] = self.length, 0.0
            # The newest query's own column may lie in any slot, and all slots are seen.
            out, p = head.attend(q[i * GROUP : (i + 1) * GROUP])
            attn_out.append(out)
            needs = self.policy.needs
            received = p.sum(0).tolist()
            gain = needs.gain * (len(head.positions) / (self.length + 1) if needs.even else 1)
            head.scores = [needs.decay * s + gain * r for s, r in zip(head.scores, received, strict=True)]
        self.length += 1
        if len(self.heads[0].positions) > self.budget.columns and self.room == self.budget.columns + 1:
            for head, ranks in zip(self.heads, self._ranks(), strict=True):
                head.victim = self._least(head, ranks)
        return torch.cat(attn_out).flatten()

    def _may_leave(self, position: int) -> bool:
        return self.budget.sinks <= position < self.length - self.budget.recent

    def _least(self, head: PlainHead, ranks: list[float]) -> int:
        positions = head.positions
        return min((i for i, p in enumerate(positions) if self._may_leave(p)), key=lambda i: (ranks[i], positions[i]))

    def _ranks(self) -> list[list[float]]:
        positions = torch.tensor([[head.positions for head in self.heads]], dtype=torch.int32)
        may_leave = torch.tensor([[[self._may_leave(p) for p in head.positions] for head in self.heads]])
        scores = torch.tensor([[head.scores for head in self.heads]])
        norms = torch.tensor([[head.norms() for head in self.heads]])
        newest, heavy = torch.tensor([self.length - 1]), torch.tensor([self.budget.heavy])
        found: list[list[float]] = self.policy.rank(
            Columns(0, positions, may_leave, newest, heavy, scores, norms)
        )[0].tolist()  # fmt: skip
        return found


POLICIES: list[Eviction] = [
    H2O(heavy_size=3, recent_size=2), H2O(heavy_size=3, recent_size=2, while_decoding=False), H2O(heavy_ratio=0.5),
    H2ONorm(heavy_size=4, recent_size=1, sinks=1, grace=2, decay=0.8), Local(recent_size=4, sinks=2),
    SnapKV(heavy_size=3, recent_size=2, window=3, kernel=3), Tova(heavy_size=2, recent_size=2),
    Random(heavy_size=2, recent_size=2), ValueH2O(heavy_size=4, recent_size=2, sinks=1, grace=1),
    H2O(heavy_size=0, recent_size=3),
]  # fmt: skip


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: " ".join(f"{k}={v}" for k, v in p.to_json().items())[:50])
@pytest.mark.parametrize("cuts", [(), (3, 5)])
def test_rows_that_drop_columns(policy: Eviction, cuts: tuple[int, ...]) -> None:
    """Prompts shorter than, as long as and longer than the budget; parts cut within a sequence's heads."""
    counts, steps = [9, 9, 2, 5, 14, 1], 9
    hook, slots = hook_of(policy, counts, steps)
    record = policy.needs.record
    views = split_views(len(counts) * KV_HEADS, slots, cuts, record)
    qkv = random_qkv(sum(counts))
    prompts = list(zip(*(t.split(counts) for t in qkv), strict=True))
    rows = [PlainRow(policy, q, k, v, steps + 1) for q, k, v in prompts]
    out = attend_prompts(qkv, alone(counts), views, hook, SCALE, torch.full((sum(counts), HEADS * WIDTH), math.nan))
    assert (out.double() - torch.cat([full_attention(*own) for own in prompts])).abs().max() < 1e-5
    check_records(views, rows, record)
    for step in range(steps):
        new = random_qkv(len(counts))
        out = decode(new, new_columns(hook.rows, torch.tensor(counts) + step), views, hook)
        for i, row in enumerate(rows):
            assert (out[i] - row.step(*(t[i] for t in new))).abs().max() < 1e-5
        check_records(views, rows, record)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: " ".join(f"{k}={v}" for k, v in p.to_json().items())[:50])
@pytest.mark.parametrize("chunk", [TOKEN_CHUNK, 20])
def test_rows_that_share_a_prefix(policy: Eviction, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups that share, one between them that does not: outputs, records and columns are those of whole prompts.

    Own tokens fewer and more than the rows that a policy looks at; several rows of a length, one or two at a time.
    """
    monkeypatch.setattr("flexgen_h2o.kvcache.attend.TOKEN_CHUNK", chunk)
    groups = (PromptGroup(6, (1, 3, 3, 3, 8)), PromptGroup(0, (4, 4, 1)), PromptGroup(12, (2, 2)))
    counts = [n for group in groups for n in group.lengths]
    hook, slots = hook_of(policy, counts, 1)
    record = policy.needs.record
    views = split_views(len(counts) * KV_HEADS, slots, (3, 8), record)
    prompts, fed = [], []
    for group in groups:
        prefix, owns = random_qkv(group.prefix), [random_qkv(n) for n in group.own]
        prompts += [[torch.cat(pair) for pair in zip(prefix, own, strict=True)] for own in owns]
        fed += [prefix, *owns]
    qkv = [torch.cat(parts) for parts in zip(*fed, strict=True)]
    stored = qkv[1] + 1
    out = torch.full((len(stored), HEADS * WIDTH), math.nan)
    attend_prompts(qkv, groups, views, hook, SCALE, out, stored)
    expected = [full_attention(*own) for own in prompts]
    start = row = 0
    for group in groups:
        if group.prefix:
            assert (out[start : start + group.prefix].double() - expected[row][: group.prefix]).abs().max() < 1e-5
        start += group.prefix
        for n in group.own:
            assert (out[start : start + n].double() - expected[row][group.prefix :]).abs().max() < 1e-5
            start, row = start + n, row + 1
    check_records(views, [PlainRow(policy, *own, 2) for own in prompts], record)
    check_columns(views, prompts)


def check_columns(views: list[PartView], prompts: list[list[torch.Tensor]]) -> None:
    """Each slot that is filled holds the column that its record names, the key one more than it was."""
    for i, (_, k, v) in enumerate(prompts):
        for head in range(KV_HEADS):
            row = i * KV_HEADS + head
            view = next(one for one in views if one.start <= row < one.end)
            assert view.record is not None
            kept = min(len(k), view.record.positions.shape[1])
            positions = view.record.positions[row - view.start, :kept].long()
            filled = positions < len(k)
            keys, values = (t.transpose(0, 1).flatten(1, 2)[row - view.start, :kept] for t in (view.keys, view.values))
            good = keys.isfinite().all(dim=-1) & filled
            assert bool(good.any())
            assert torch.equal(keys[good], k[positions[good], head] + 1)
            assert torch.equal(values[good], v[positions[good], head])


def check_records(views: list[PartView], rows: list[PlainRow], record: tuple[str, ...]) -> None:
    """Slot by slot: the same columns, with their scores and norms."""
    for i, head in enumerate(head for row in rows for head in row.heads):
        view = next(v for v in views if v.start <= i < v.end)
        own, n = view.record, len(head.positions)
        assert own is not None
        assert own.positions[i - view.start, :n].tolist() == head.positions
        for name, expected in (("scores", head.scores), ("norms", head.norms())):
            field_of = getattr(own, name)
            assert (field_of is not None) is (name in record)
            if field_of is not None:
                assert field_of[i - view.start, :n].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
