"""The eviction step: what a policy keeps of a prompt, and which column of a row leaves for its next one.

Prompt columns are chosen before the layer's KV unit is written to its tier, so only what is kept is stored and moved.
A victim is only named: the next column of its row overwrites its slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flexgen_h2o.kernels.prefill_attention import column_sums
from flexgen_h2o.kvcache.eviction.policy import NORMS, POSITIONS, SCORES, Columns, Needs
from flexgen_h2o.kvcache.slots import KVRows, NewColumns, SlotMetadata

NO_RANK = 2**30  # of an empty slot: above all others, so that no rank falls when it is filled

# Column sums (1, kv_heads, tokens) of a shared prefix over its own last so many query rows, the last at full weight.
PrefixSums = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class KeptColumns:
    """What stays of `b` prompts of `n` tokens. positions: (b, kv_heads, kept) int64, ascending.

    scores, norms: (b, kv_heads, n) fp32 of all columns, or None where the policy records none.
    """

    positions: torch.Tensor
    scores: torch.Tensor | None
    norms: torch.Tensor | None


def keep_prompt_columns(
    rows: KVRows, first: int, qkv: Sequence[torch.Tensor], lse: torch.Tensor | None, scale: float,
    prefix_sums: PrefixSums | None = None,
) -> KeptColumns:  # fmt: skip
    """Score the columns of equally long prompts, the sequences `first`, `first` + 1, ..., and choose those that stay.

    q: (b, heads, m, d), the last m rows; k, v: (b, kv_heads, n, d); lse: (b, heads, m) of their attention, where the
    policy scores prompts. prefix_sums: of the other query rows, where m < n and the policy scores prompts.
    """
    q, k, v = qkv
    (b, kv_heads, n), policy, budgets = k.shape[:3], rows.policy, rows.budgets
    scores = _prompt_scores(rows, (q, k), lse, scale, prefix_sums) if lse is not None else None
    norms = v.float().norm(dim=-1) if NORMS in policy.needs.record else None
    kept = int(budgets.kept[first])
    positions = torch.arange(n, device=k.device).expand(b, kv_heads, n)
    if kept < n:
        may_leave = (positions >= budgets.sinks[first]) & (positions < n - budgets.recent[first])
        newest, heavy = torch.full((b,), n - 1, device=k.device), budgets.heavy[first : first + b].to(k.device)
        columns = Columns(rows.block, positions.int(), may_leave, newest, heavy, scores, norms)
        positions = choose_kept(policy.rank(columns), may_leave, kept)
    return KeptColumns(positions, scores, norms)


def choose_kept(rank: torch.Tensor, may_leave: torch.Tensor, count: int) -> torch.Tensor:
    """(..., count) int64, ascending: the columns that may not leave, and of the others those that rank highest.

    rank, may_leave: (..., n), n > count. Of equal ranks the newer column stays.
    """
    most = torch.finfo(rank.dtype).max
    finite = rank.nan_to_num(nan=-most, posinf=most, neginf=-most)  # below the rank of what may not leave
    newest_first = finite.masked_fill(~may_leave, float("inf")).flip(-1)
    order = newest_first.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return (rank.shape[-1] - 1 - order).sort(dim=-1).values


def _prompt_scores(
    rows: KVRows, qk: Sequence[torch.Tensor], lse: torch.Tensor, scale: float, prefix_sums: PrefixSums | None
) -> torch.Tensor:
    (q, k), needs = qk, rows.policy.needs
    own, n = q.shape[2], k.shape[2]
    query_rows = n if needs.query_rows is None else min(n, needs.query_rows)
    sums = weighted_column_sums(needs, q, k, lse, scale, min(own, query_rows))
    if prefix_sums is not None and query_rows > own:
        sums[..., : n - own] += prefix_sums(query_rows - own) * needs.query_decay**own
    return rows.policy.prompt_scores(sums, query_rows)


def weighted_column_sums(
    needs: Needs, q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, scale: float, query_rows: int
) -> torch.Tensor:
    """(b, kv_heads, n) fp32: sums over the last `query_rows` rows, each weighted by its age (`Needs.query_decay`)."""
    if needs.query_decay != 1:  # a weight of a row is an offset of its log-sum-exp
        before_last = torch.arange(q.shape[2] - 1, -1, -1, device=lse.device, dtype=torch.float32)
        lse = lse - before_last * math.log(needs.query_decay)
    return column_sums(q, k, lse, scale, k.shape[2] - query_rows)


def record_prompt(metadata: SlotMetadata, rows: slice, kept: KeptColumns, sequence: int, heads: slice) -> None:
    """Fill the metadata of `rows`, which hold the `heads` of prompt `sequence` of `kept`."""
    positions = kept.positions[sequence, heads]
    count = positions.shape[-1]
    metadata.positions[rows, :count].copy_(positions)
    for target, values in ((metadata.scores, kept.scores), (metadata.norms, kept.norms)):
        if target is not None and values is not None:
            target[rows, :count].copy_(values[sequence, heads].gather(-1, positions))
    if metadata.ranks is not None:
        metadata.ranks[rows] = NO_RANK
        metadata.ranks[rows, :count] = torch.arange(count, dtype=torch.int32, device=metadata.ranks.device)


def record_columns(
    metadata: SlotMetadata, slots: torch.Tensor, positions: torch.Tensor, filled: torch.Tensor, values: torch.Tensor
) -> None:
    """New columns at `slots` get score 0 and the highest rank; ranks above the replaced column's fall by one.

    slots, positions: (rows,) int64; filled: (rows,) ints; values: (rows, width), all on the metadata's device.
    """
    rows = torch.arange(len(slots), device=slots.device)
    metadata.positions[rows, slots] = positions.int()
    if metadata.scores is not None:
        metadata.scores[rows, slots] = 0.0
    if metadata.norms is not None:
        metadata.norms[rows, slots] = values.float().norm(dim=-1)
    if metadata.ranks is not None:
        metadata.ranks.sub_((metadata.ranks > metadata.ranks[rows, slots].unsqueeze(1)).int())
        metadata.ranks[rows, slots] = filled.int() - 1


def rank_victims(rows: KVRows, new: NewColumns) -> None:
    """Name each row's victim by the policy's own rank, where it is not the score that the decode kernel knows."""
    columns = columns_of(rows, new)
    rank, stays = rows.policy.rank(columns), ~columns.may_leave
    lowest = rank.masked_fill(stays, float("inf")).amin(dim=-1, keepdim=True)
    last = torch.iinfo(torch.int32).max
    victims = columns.positions.masked_fill(stays | (rank > lowest), last).argmin(dim=-1).int().flatten()
    for view in rows.views:
        assert view.metadata is not None
        view.metadata.victims.copy_(victims[view.start : view.end])


def columns_of(rows: KVRows, new: NewColumns) -> Columns:
    """The metadata of all rows, on the device of their first part."""
    parts = [view.metadata for view in rows.views if view.metadata is not None]
    where = parts[0].positions.device

    def whole(name: str) -> torch.Tensor | None:
        if name not in rows.policy.needs.record:
            return None
        found = [getattr(part, name) for part in parts]
        joined = found[0] if len(found) == 1 else torch.cat([t.to(where) for t in found])
        return joined.view(-1, rows.kv_heads, joined.shape[-1])

    positions, budgets = whole(POSITIONS), rows.budgets
    assert positions is not None
    filled, sinks, recent, heavy, newest = (
        t.to(where).view(-1, 1, 1) for t in (new.filled, budgets.sinks, budgets.recent, budgets.heavy, new.positions)
    )
    slots = torch.arange(positions.shape[-1], device=where)
    may_leave = (slots < filled) & (positions >= sinks) & (positions <= newest - recent)
    return Columns(
        rows.block, positions, may_leave, newest.flatten(), heavy.flatten(), whole(SCORES), whole(NORMS)
    )  # fmt: skip
