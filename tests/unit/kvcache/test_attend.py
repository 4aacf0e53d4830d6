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

from flexgen_h2o.kvcache import layout as layout_module
from flexgen_h2o.kvcache.attend import attend_prompts, attend_slots
from flexgen_h2o.kvcache.eviction import H2O, Eviction, Full, H2ONorm, Local, Random, SnapKV, Tova, ValueH2O
from flexgen_h2o.kvcache.eviction.policy import Columns
from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.kvcache.prefixes import PromptGroup
from flexgen_h2o.kvcache.slots import KVRows, PartView, SlotTable, metadata_view, part_view

HEADS, KV_HEADS, WIDTH, SCALE = 8, 2, 4, 0.5
GROUP = HEADS // KV_HEADS
Qkv = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def _short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_module, "SEGMENT_SLOTS", 4)


def random_qkv(tokens: int) -> Qkv:
    return torch.randn(tokens, HEADS, WIDTH), torch.randn(tokens, KV_HEADS, WIDTH), torch.randn(tokens, KV_HEADS, WIDTH)


def cut_views(rows: int, slots: int, cuts: Sequence[int], record: tuple[str, ...] = ()) -> list[PartView]:
    """Parts cut at the given rows, full of what a buffer may hold before: no numbers."""
    views = []
    for a, b in pairwise(sorted({0, rows, *(c for c in cuts if c < rows)})):
        layout = UnitLayout(b - a, 1, slots, WIDTH, 4, (0.0, 1.0, 0.0), record)
        (part,) = layout.parts
        data = torch.full((layout.part_bytes(part) // 4,), math.nan).view(torch.uint8)
        memory = torch.full((layout.metadata_bytes(part),), 255, dtype=torch.uint8)
        view = part_view(layout, part, data, torch.float32, metadata_view(layout, part, memory))
        views.append(view.part(0, b - a, a))
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


def rows_of(policy: Eviction, counts: Sequence[int], steps: int, cuts: Sequence[int]) -> KVRows:
    """The rows of a micro-batch with prompts of these lengths."""
    table = SlotTable(policy, [(count, steps + 1) for count in counts], 1)
    views = cut_views(len(counts) * KV_HEADS, table.most_slots(0), cuts, policy.needs.record)
    return KVRows(policy, 0, KV_HEADS, table.at(0), views)


def prefill(rows: KVRows, qkv: Qkv, groups: Sequence[PromptGroup], stored: torch.Tensor | None = None) -> torch.Tensor:
    out = torch.full((len(qkv[0]), HEADS * WIDTH), math.nan)
    assert attend_prompts(qkv, groups, rows, SCALE, out, stored) is out
    return out.double()


def decode(rows: KVRows, new: Qkv, positions: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(new[0]), HEADS * WIDTH), math.nan)
    assert attend_slots(new, rows, rows.new_columns(positions), SCALE, out) is out
    return out.double()


# ---- all columns


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.lists(st.integers(0, 8), max_size=2), st.integers(0, 3))
def test_generation_of_ragged_rows(counts: list[int], cuts: list[int], steps: int) -> None:
    """Each column in the slot of its position, and nothing behind them."""
    rows, qkv = rows_of(Full(), counts, steps, cuts), random_qkv(sum(counts))
    history = [list(row) for row in zip(*(t.split(counts) for t in qkv), strict=True)]
    out = prefill(rows, qkv, alone(counts))
    assert (out - torch.cat([full_attention(*row) for row in history])).abs().max() < 1e-5
    for step in range(steps):
        new = random_qkv(len(counts))
        out = decode(rows, new, torch.tensor(counts) + step)
        for i, row in enumerate(history):
            row[1], row[2] = (torch.cat([row[j], new[j][i : i + 1]]) for j in (1, 2))
            assert (out[i] - full_attention(new[0][i : i + 1], row[1], row[2])[0]).abs().max() < 1e-5
    for stored, place in (("keys", 1), ("values", 2)):
        parts = [getattr(view, stored).transpose(0, 1).flatten(1, 2) for view in rows.views]
        whole = torch.cat(parts).view(len(counts), KV_HEADS, -1, WIDTH)
        for own, row in zip(whole, history, strict=True):
            assert torch.equal(own[:, : len(row[place])], row[place].transpose(0, 1))
            assert bool(own[:, len(row[place]) :].isnan().all())


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
    H2O(heavy_size=3, recent_size=2, while_decoding=False), H2O(heavy_ratio=0.5),
    H2ONorm(heavy_size=4, recent_size=1, sinks=1, grace=2, decay=0.8), Local(recent_size=4, sinks=2),
    SnapKV(heavy_size=3, recent_size=2, window=3, kernel=3), Tova(heavy_size=2, recent_size=2),
    Random(heavy_size=2, recent_size=2), ValueH2O(heavy_size=4, recent_size=2, sinks=1, grace=1),
    H2O(heavy_size=0, recent_size=3),
]  # fmt: skip


of_each_policy = pytest.mark.parametrize(
    "policy", POLICIES, ids=lambda p: " ".join(f"{k}={v}" for k, v in p.to_json().items())[:50]
)


@of_each_policy
def test_rows_that_drop_columns(policy: Eviction) -> None:
    """Prompts shorter than, as long as and longer than the budget; parts cut within a sequence's heads."""
    counts, steps = [9, 9, 2, 5, 14, 1], 9
    rows, qkv = rows_of(policy, counts, steps, (3, 5)), random_qkv(sum(counts))
    prompts = list(zip(*(t.split(counts) for t in qkv), strict=True))
    plain = [PlainRow(policy, q, k, v, steps + 1) for q, k, v in prompts]
    out = prefill(rows, qkv, alone(counts))
    assert (out - torch.cat([full_attention(*own) for own in prompts])).abs().max() < 1e-5
    check_metadata(rows, plain)
    for step in range(steps):
        new = random_qkv(len(counts))
        out = decode(rows, new, torch.tensor(counts) + step)
        for i, row in enumerate(plain):
            assert (out[i] - row.step(*(t[i] for t in new))).abs().max() < 1e-5
        check_metadata(rows, plain)


@of_each_policy
def test_rows_that_share_a_prefix(policy: Eviction, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups that share, one between them that does not: outputs, metadata and columns are those of whole prompts.

    Own tokens fewer and more than the rows that a policy looks at; several rows of a length, one or two at a time.
    """
    monkeypatch.setattr("flexgen_h2o.kvcache.attend.TOKEN_CHUNK", 20)
    groups = (PromptGroup(6, (1, 3, 3, 3, 8)), PromptGroup(0, (4, 4, 1)), PromptGroup(12, (2, 2)))
    counts = [n for group in groups for n in group.lengths]
    rows = rows_of(policy, counts, 1, (3, 8))
    prompts, fed = [], []
    for group in groups:
        prefix, owns = random_qkv(group.prefix), [random_qkv(n) for n in group.own]
        prompts += [[torch.cat(pair) for pair in zip(prefix, own, strict=True)] for own in owns]
        fed += [prefix, *owns]
    q, k, v = (torch.cat(parts) for parts in zip(*fed, strict=True))
    out = prefill(rows, (q, k, v), groups, k + 1)
    expected = [full_attention(*own) for own in prompts]
    start = row = 0
    for group in groups:
        if group.prefix:
            assert (out[start : start + group.prefix] - expected[row][: group.prefix]).abs().max() < 1e-5
        start += group.prefix
        for n in group.own:
            assert (out[start : start + n] - expected[row][group.prefix :]).abs().max() < 1e-5
            start, row = start + n, row + 1
    check_metadata(rows, [PlainRow(policy, *own, 2) for own in prompts])
    check_columns(rows.views, prompts)


def check_columns(views: Sequence[PartView], prompts: list[list[torch.Tensor]]) -> None:
    """Each slot that is filled holds the column that its metadata names, the key one more than it was."""
    for i, (_, k, v) in enumerate(prompts):
        for head in range(KV_HEADS):
            row = i * KV_HEADS + head
            view = next(one for one in views if one.start <= row < one.end)
            assert view.metadata is not None
            kept = min(len(k), view.metadata.positions.shape[1])
            positions = view.metadata.positions[row - view.start, :kept].long()
            filled = positions < len(k)
            keys, values = (t.transpose(0, 1).flatten(1, 2)[row - view.start, :kept] for t in (view.keys, view.values))
            good = keys.isfinite().all(dim=-1) & filled
            assert bool(good.any())
            assert torch.equal(keys[good], k[positions[good], head] + 1)
            assert torch.equal(values[good], v[positions[good], head])


def check_metadata(rows: KVRows, plain: list[PlainRow]) -> None:
    """Slot by slot: the same columns, with their scores and norms."""
    for i, head in enumerate(head for row in plain for head in row.heads):
        view = next(v for v in rows.views if v.start <= i < v.end)
        own, n = view.metadata, len(head.positions)
        assert own is not None
        assert own.positions[i - view.start, :n].tolist() == head.positions
        for name, expected in (("scores", head.scores), ("norms", head.norms())):
            field_of = getattr(own, name)
            assert (field_of is not None) is (name in rows.policy.needs.record)
            if field_of is not None:
                assert field_of[i - view.start, :n].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
