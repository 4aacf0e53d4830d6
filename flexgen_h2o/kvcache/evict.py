"""The eviction step: what a policy keeps of a prompt, which column of a row leaves for its next one, and what stays
behind of those that left.

Prompt columns are chosen before the layer's KV unit is written to its tier, so only what is kept is stored and moved.
A victim is only named: the next column of its row overwrites its slot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from flexgen_h2o.core.units import SUMMARY_CHUNK
from flexgen_h2o.kernels.beside import Pages
from flexgen_h2o.kernels.prefill_attention import column_sums
from flexgen_h2o.kernels.prompt_columns import choose_kept
from flexgen_h2o.kernels.slots import add_to_pages
from flexgen_h2o.kernels.workspace import upload
from flexgen_h2o.kvcache.eviction.policy import NORMS, POSITIONS, SCORES, Columns, Needs, value_sizes
from flexgen_h2o.kvcache.rows import query_weight_table
from flexgen_h2o.kvcache.slots import KVRows, NewColumns, PartView, SlotMetadata

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
    norms = value_sizes(policy.needs, v) if NORMS in policy.needs.record else None
    kept, (sinks, heavy, recent) = int(budgets.kept[first]), budgets.stay(first)
    if kept < n and heavy:
        positions = choose_kept(_prompt_rank(rows, first, k, scores, norms), sinks, n - recent, kept)
    else:
        positions = _without_rank(n, sinks if kept < n else 0, kept, k.device).expand(b, kv_heads, kept)
    return KeptColumns(positions, scores, norms)


def _prompt_rank(
    rows: KVRows, first: int, k: torch.Tensor, scores: torch.Tensor | None, norms: torch.Tensor | None
) -> torch.Tensor:
    """(b, kv_heads, n) fp32 of `keep_prompt_columns`, where all rows have the same budgets."""
    (b, kv_heads, n), policy, budgets, where = k.shape[:3], rows.policy, rows.budgets, k.device
    if scores is not None and policy.needs.ranks_by_score:  # what the decode kernel compares
        if not policy.needs.per_query:
            return scores
        table = query_weight_table(policy.needs.decay, 1 << n.bit_length(), where)
        return scores / table[1 : n + 1].flip(0)
    positions = torch.arange(n, device=where).expand(b, kv_heads, n)
    may_leave = (positions >= budgets.sinks[first]) & (positions < n - budgets.recent[first])
    newest, heavy = torch.full((b,), n - 1, device=where), upload(budgets.heavy[first : first + b], where)
    return policy.rank(Columns(rows.block, positions.int(), may_leave, newest, heavy, scores, norms))


def _without_rank(n: int, sinks: int, kept: int, where: torch.device) -> torch.Tensor:
    """(kept,) int64: the first `sinks` of n columns and the newest others."""
    newest = torch.arange(n - kept + sinks, n, device=where)
    return torch.cat([torch.arange(sinks, device=where), newest]) if sinks else newest


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


def record_prompts(metadata: SlotMetadata, rows: slice, kept: KeptColumns, these: slice) -> None:
    """Fill the metadata of `rows`, which hold `these` of the b x kv_heads rows of `kept`."""
    positions = kept.positions.flatten(0, 1)[these]
    count = positions.shape[-1]
    metadata.positions[rows, :count].copy_(positions)
    for target, values in ((metadata.scores, kept.scores), (metadata.norms, kept.norms)):
        if target is not None and values is not None:
            target[rows, :count].copy_(values.flatten(0, 1)[these].gather(-1, positions))
    if metadata.ranks is not None:
        metadata.ranks[rows] = NO_RANK
        metadata.ranks[rows, :count] = torch.arange(count, dtype=torch.int32, device=metadata.ranks.device)


def sum_up_prompt(pages: Pages, page: int, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor) -> None:
    """Fill the pages of some rows with the means of what is not kept of a prompt, SUMMARY_CHUNK numbers at a time.

    k, v: (n, rows, d); kept: (rows, kept) int64. All pages are written.
    """
    n, rows, width = k.shape
    page = min(page, n)  # a longer one holds the prompt as well: nothing is padded to it
    gone = torch.ones(rows, n, device=k.device).scatter_(1, kept, 0.0)
    short = -n % page
    gone = torch.nn.functional.pad(gone, (0, short)).view(rows, -1, 1, page)
    used = gone.shape[1]
    pages.counts.zero_()
    pages.counts[:, :used] = gone.sum(dim=(2, 3)).int()
    weights = gone / pages.counts[:, :used].clamp(min=1).view(rows, used, 1, 1)
    for means, columns in ((pages.keys, k), (pages.values, v)):
        means[:, used:] = 0
        step = max(1, SUMMARY_CHUNK // ((n + short) * width))
        for a in range(0, rows, step):
            some = columns[:, a : a + step].transpose(0, 1).float()
            some = torch.nn.functional.pad(some, (0, 0, 0, short)).view(len(some), used, page, width)
            means[a : a + step, :used] = (weights[a : a + step] @ some).squeeze(2)


def sum_up_replaced(view: PartView, rows: KVRows, new: NewColumns, slots: torch.Tensor) -> None:
    """The columns that new ones replace at `slots` (rows,) join their pages; to be called before they are gone."""
    assert view.metadata is not None
    if not bool(new.numbers.replaces.any()):
        return
    where = torch.arange(view.rows, device=slots.device), slots
    page = torch.div(view.metadata.positions[where].long(), rows.policy.needs.page, rounding_mode="floor")
    replaces = new.numbers.replaces.repeat_interleave(rows.kv_heads)[view.start : view.end].to(slots.device)
    add_to_pages((view.keys, view.values), slots, torch.where(replaces, page, -1), view.form)


def record_columns(
    metadata: SlotMetadata, slots: torch.Tensor, positions: torch.Tensor, filled: torch.Tensor,
    sizes: torch.Tensor | None,
) -> None:  # fmt: skip
    """New columns at `slots` get score 0 and the highest rank; ranks above the replaced column's fall by one.

    slots, positions: (rows,) int64; filled: (rows,) ints; sizes: of values, (rows,); all on the metadata's device.
    """
    rows = torch.arange(len(slots), device=slots.device)
    metadata.positions[rows, slots] = positions.int()
    if metadata.scores is not None:
        metadata.scores[rows, slots] = 0.0
    if metadata.norms is not None and sizes is not None:
        metadata.norms[rows, slots] = sizes
    if metadata.ranks is not None:
        metadata.ranks.sub_((metadata.ranks > metadata.ranks[rows, slots].unsqueeze(1)).int())
        metadata.ranks[rows, slots] = filled.int() - 1


def rank_victims(rows: KVRows, newest: torch.Tensor, filled: torch.Tensor) -> None:
    """Name each row's victim by the policy's own rank, where it is not the score that the decode kernel knows. newest,
    filled: as of `columns_of`."""
    columns = columns_of(rows, newest, filled)
    rank, stays = rows.policy.rank(columns), ~columns.may_leave
    lowest = rank.masked_fill(stays, float("inf")).amin(dim=-1, keepdim=True)
    last = torch.iinfo(torch.int32).max
    victims = columns.positions.masked_fill(stays | (rank > lowest), last).argmin(dim=-1).int().flatten()
    for view in rows.views:
        assert view.metadata is not None
        view.metadata.victims.copy_(victims[view.start : view.end])


def columns_of(rows: KVRows, newest: torch.Tensor, filled: torch.Tensor) -> Columns:
    """The metadata of all rows, on the device of their first part. newest, filled: (sequences,) ints, the positions of
    the newest columns and the slots that are in use."""
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
        t.to(where).view(-1, 1, 1) for t in (filled, budgets.sinks, budgets.recent, budgets.heavy, newest)
    )
    slots = torch.arange(positions.shape[-1], device=where)
    may_leave = (slots < filled) & (positions >= sinks) & (positions <= newest - recent)
    return Columns(
        rows.block, positions, may_leave, newest.flatten(), heavy.flatten(), whole(SCORES), whole(NORMS)
    )  # fmt: skip
