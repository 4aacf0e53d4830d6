"""The eviction hook: what a policy keeps of a prompt, where a new column goes, and which column leaves for the next.

Prompt columns are chosen before the layer's KV unit is written to its tier, so only what is kept is stored and moved.
A victim is only named: the next column of its row overwrites its slot.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexgen_h2o.kernels.prefill_attention import column_sums
from flexgen_h2o.kvcache.eviction.policy import NORMS, POSITIONS, SCORES, Columns, Eviction, Needs
from flexgen_h2o.kvcache.slots import NewColumn, PartView, RowSlots

NO_RANK = 2**30  # of a slot that holds nothing: above all others, so that nothing steps down when it is filled


@dataclass(frozen=True)
class EvictionStep:
    """An eviction policy at work on one (transformer block, micro-batch). A sequence is `kv_heads` rows of its unit."""

    policy: Eviction
    block: int
    rows: RowSlots
    kv_heads: int

    @property
    def scores_prompts(self) -> bool:
        return self.policy.needs.query_rows != 0

    def next_slots(self, views: Sequence[PartView], new: NewColumn) -> list[torch.Tensor]:
        """For each view, (rows,) int64 on its device: the slots that the new columns take."""
        wanted = new.slot.repeat_interleave(self.kv_heads)
        found = []
        for view in views:
            slots = wanted[view.start : view.end].to(view.keys.device)
            if view.record is not None:
                slots = torch.where(slots < 0, view.record.victims, slots)
            found.append(slots)
        return found


@dataclass(frozen=True)
class KeptColumns:
    """What stays of `b` prompts of `n` tokens. positions: (b, kv_heads, kept) int64, ascending.

    scores, norms: (b, kv_heads, n) fp32 of all columns, or None where the policy records none.
    """

    positions: torch.Tensor
    scores: torch.Tensor | None
    norms: torch.Tensor | None


class ScoredPrefix:
    """A shared prefix whose own queries' column sums count for every row that begins with it; summed once.

    q: (1, heads, tokens, d); k: (1, kv_heads, tokens, d); lse: (1, heads, tokens) of their attention.
    """

    def __init__(self, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, scale: float) -> None:
        self._columns = q, k, lse, scale
        self._sums: dict[int, torch.Tensor] = {}

    def sums(self, needs: Needs, query_rows: int) -> torch.Tensor:
        """(1, kv_heads, tokens) fp32: over its last `query_rows` rows, the last of them at full weight."""
        if query_rows not in self._sums:
            self._sums[query_rows] = _column_sums(needs, *self._columns, query_rows)
        return self._sums[query_rows]


def keep_prompt_columns(
    hook: EvictionStep, first: int, qkv: Sequence[torch.Tensor], lse: torch.Tensor | None, scale: float,
    prefix: ScoredPrefix | None = None,
) -> KeptColumns:  # fmt: skip
    """Score the columns of equally long prompts, the sequences `first`, `first` + 1, ..., and choose those that stay.

    q: (b, heads, m, d), the last m rows; k, v: (b, kv_heads, n, d); lse: (b, heads, m) of their attention, where the
    policy scores prompts. prefix: where it does, and m < n: the other rows.
    """
    q, k, v = qkv
    (b, kv_heads, n), policy, rows = k.shape[:3], hook.policy, hook.rows
    scores = _prompt_scores(policy, q, k, lse, scale, prefix) if lse is not None else None
    norms = v.float().norm(dim=-1) if NORMS in policy.needs.record else None
    kept = int(rows.kept[first])
    positions = torch.arange(n, device=k.device).expand(b, kv_heads, n)
    if kept < n:
        may_leave = (positions >= rows.sinks[first]) & (positions < n - rows.recent[first])
        newest, heavy = torch.full((b,), n - 1, device=k.device), rows.heavy[first : first + b].to(k.device)
        columns = Columns(hook.block, positions.int(), may_leave, newest, heavy, scores, norms)
        positions = choose_kept(policy.rank(columns), may_leave, kept)
    return KeptColumns(positions, scores, norms)


def choose_kept(rank: torch.Tensor, may_leave: torch.Tensor, count: int) -> torch.Tensor:
    """(..., count) int64, ascending: the columns that may not leave, and of the others those that rank highest.

    rank, may_leave: (..., n), n > count. Of equal ranks the newer column stays.
    """
    most = torch.finfo(rank.dtype).max
    finite = rank.nan_to_num(nan=-most, posinf=most, neginf=-most)  # no rank is as high as what may not leave
    newest_first = finite.masked_fill(~may_leave, float("inf")).flip(-1)
    order = newest_first.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return (rank.shape[-1] - 1 - order).sort(dim=-1).values


def record_prompt(view: PartView, rows: slice, kept: KeptColumns, sequence: int, heads: slice) -> None:
    """Fill the record of the view's `rows`, the `heads` of prompt `sequence` of `kept`."""
    record = view.record
    assert record is not None
    positions = kept.positions[sequence, heads]
    count = positions.shape[-1]
    record.positions[rows, :count].copy_(positions)
    for target, values in ((record.scores, kept.scores), (record.norms, kept.norms)):
        if target is not None and values is not None:
            target[rows, :count].copy_(values[sequence, heads].gather(-1, positions))
    if record.ranks is not None:
        record.ranks[rows] = NO_RANK
        record.ranks[rows, :count] = torch.arange(count, dtype=torch.int32, device=record.ranks.device)


def record_columns(
    view: PartView, slots: torch.Tensor, past: torch.Tensor, filled: torch.Tensor, values: torch.Tensor
) -> None:
    """New columns join the record with score 0 and the highest rank; those above the one that they replace step down.

    slots, past: (rows,) int64; filled: (rows,) ints; values: (rows, width), on its device.
    """
    record = view.record
    assert record is not None
    rows = torch.arange(len(slots), device=slots.device)
    record.positions[rows, slots] = past.int()
    if record.scores is not None:
        record.scores[rows, slots] = 0.0
    if record.norms is not None:
        record.norms[rows, slots] = values.float().norm(dim=-1)
    if record.ranks is not None:
        record.ranks.sub_((record.ranks > record.ranks[rows, slots].unsqueeze(1)).int())
        record.ranks[rows, slots] = filled.int() - 1


def rank_victims(hook: EvictionStep, views: Sequence[PartView], new: NewColumn) -> None:
    """Name each row's victim by the policy's own rank, where it is not the score that the decode kernel knows."""
    columns = unit_columns(hook, views, new)
    rank, stays = hook.policy.rank(columns), ~columns.may_leave
    lowest = rank.masked_fill(stays, float("inf")).amin(dim=-1, keepdim=True)
    last = torch.iinfo(torch.int32).max
    victims = columns.positions.masked_fill(stays | (rank > lowest), last).argmin(dim=-1).int().flatten()
    for view in views:
        assert view.record is not None
        view.record.victims.copy_(victims[view.start : view.end])


def unit_columns(hook: EvictionStep, views: Sequence[PartView], new: NewColumn) -> Columns:
    """The records of all rows of a unit, together on the device of its first part."""
    records = [view.record for view in views if view.record is not None]
    where = records[0].positions.device

    def whole(name: str) -> torch.Tensor | None:
        parts = [getattr(record, name) for record in records]
        if name not in hook.policy.needs.record:
            return None
        joined = parts[0] if len(parts) == 1 else torch.cat([p.to(where) for p in parts])
        return joined.view(-1, hook.kv_heads, joined.shape[-1])

    positions = whole(POSITIONS)
    assert positions is not None
    filled, sinks, recent, heavy, past = (
        t.to(where).view(-1, 1, 1) for t in (new.filled, hook.rows.sinks, hook.rows.recent, hook.rows.heavy, new.past)
    )
    slots = torch.arange(positions.shape[-1], device=where)
    may_leave = (slots < filled) & (positions >= sinks) & (positions <= past - recent)
    return Columns(
        hook.block, positions, may_leave, past.flatten(), heavy.flatten(), whole(SCORES), whole(NORMS)
    )  # fmt: skip


def _prompt_scores(
    policy: Eviction, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, scale: float, prefix: ScoredPrefix | None
) -> torch.Tensor:
    own, n, needs = q.shape[2], k.shape[2], policy.needs
    query_rows = n if needs.query_rows is None else min(n, needs.query_rows)
    sums = _column_sums(needs, q, k, lse, scale, min(own, query_rows))
    if prefix is not None and query_rows > own:
        sums[..., : n - own] += prefix.sums(needs, query_rows - own) * needs.query_decay**own
    return policy.prompt_scores(sums, query_rows)


def _column_sums(
    needs: Needs, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, scale: float, query_rows: int
) -> torch.Tensor:
    """(b, kv_heads, n) fp32: sums over the last `query_rows` rows, each with the weight that its age has."""
    if needs.query_decay != 1:  # a weight of a row is an offset of its log-sum-exp
        before_last = torch.arange(q.shape[2] - 1, -1, -1, device=lse.device, dtype=torch.float32)
        lse = lse - before_last * math.log(needs.query_decay)
    return column_sums(q, k, lse, scale, k.shape[2] - query_rows)
