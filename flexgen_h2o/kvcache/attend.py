"""Attention of one micro-batch over its KV unit, whole prompts or one new token a row; then the eviction step: what a
policy keeps of a prompt, and which column of a row leaves for its next one.

Prompt columns are chosen before the layer's KV unit is written to its tier, so only what is kept is stored and moved.
A victim is only named: the next column of its row overwrites its slot.

A prefix that all rows of a block begin with is held once a transformer block; slots hold only the columns behind it.
The queries of all rows read it together (Hydragen, Juravsky et al. 2024, arXiv 2402.05099), and the result is combined
with that of each row's own slots by both log-sum-exps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby

import torch

from flexgen_h2o.core.packing import window_of
from flexgen_h2o.core.units import ROLLING_CHUNK, SUMMARY_CHUNK, TOKEN_CHUNK
from flexgen_h2o.kernels.elementwise import Rotation
from flexgen_h2o.kernels.prefill_attention import causal_attention, causal_attention_lse, column_sums
from flexgen_h2o.kernels.slots import (
    Pages,
    ScoreState,
    WholeColumns,
    add_to_pages,
    attend,
    attend_lse,
    attend_sparse,
)
from flexgen_h2o.kvcache.eviction.policy import NORMS, POSITIONS, SCORES, Columns, Needs, value_sizes
from flexgen_h2o.kvcache.prefixes import PromptGroup
from flexgen_h2o.kvcache.slots import (
    KVRows,
    NewColumns,
    PartView,
    PromptAttention,
    RowBudgets,
    SlotMetadata,
    put_columns,
    put_first_columns,
)

LEAST_RANGE = 1 / 16  # of a key's channel, of the mean range of a row's channels
NO_RANK = 2**30  # of an empty slot: above all others, so that no rank falls when it is filled

# Column sums (1, kv_heads, tokens) of a shared prefix over its own last so many query rows, the last at full weight.
PrefixSums = Callable[[int], torch.Tensor]

# ---- prompts


def attend_prompts(
    qkv: Sequence[torch.Tensor], groups: Sequence[PromptGroup], rows: KVRows, scale: float, out: torch.Tensor,
    stored_keys: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of packed prompts; the columns that the policy keeps go to slots 0, 1, ... of each row.

    stored_keys: stored in place of k, as it was before its rotary embeddings. A group without rows fills `rows.common`;
    other groups see its columns in front of their own.

    q: (tokens, heads, d); k, v: (tokens, kv_heads, d); out: (tokens, heads x d); all packed as `groups` say. Neighbours
    of equal length are computed together; nothing is ever padded.
    """
    attn_out = out.view(qkv[0].shape)
    packed = qkv if stored_keys is None else (*qkv, stored_keys)
    start = sequence = 0
    for group in groups:
        here = slice(start, start + group.tokens)
        _attend_group([t[here] for t in packed], group, sequence, rows, scale, attn_out[here])
        start, sequence = here.stop, sequence + group.rows
    return out


def _attend_group(
    packed: Sequence[torch.Tensor], group: PromptGroup, sequence: int, rows: KVRows, scale: float,
    attn_out: torch.Tensor,
) -> None:  # fmt: skip
    """`attend_prompts` for one group, the sequences from `sequence` on. packed: q, k, v, and stored_keys if any.

    A shared prefix attends to itself once. The rows' own queries then see its columns in front of their own.
    """
    start, skipped = group.prefix, group.common  # skipped: columns that the common prefix holds
    prefix = [t[:start].unsqueeze(0) for t in packed]
    if group.common:
        assert rows.common is not None
        columns = [t.transpose(1, 2) for t in (rows.common.keys, rows.common.values)]
        prefix[1:] = [torch.cat(pair, dim=1) for pair in zip(columns, prefix[1:], strict=True)] if start else columns
    prefix_sums = _attend_prefix(prefix, rows, scale, attn_out[:start]) if start else None
    if not group.rows:
        assert rows.common is not None
        put_first_columns(rows.common, 0, rows.kv_heads, *(t[0].transpose(0, 1) for t in prefix[1:]))
    for number, count in _equal_rows(group, rows.budgets, sequence):
        end = start + number * count
        queries, *columns = (t[start:end].view(number, count, t.shape[1], -1) for t in packed)
        if group.before:
            before = [t.expand(number, -1, -1, -1) for t in prefix[1:]]
            columns = [torch.cat(pair, dim=1) for pair in zip(before, columns, strict=True)]
        q, k, v = (t.transpose(1, 2) for t in (queries, *columns[:2]))
        attended, lse = causal(rows, q, k, v, scale)
        attn_out[start:end].view(queries.shape).copy_(attended.transpose(1, 2))
        if rows.watch is not None and lse is not None:
            rows.watch(sequence, PromptAttention(q, k, lse, scale))
        kept = keep_prompt_columns(rows, sequence, (q, k[:, :, skipped:], v[:, :, skipped:]), lse, scale, prefix_sums)
        stored, values = columns[-1] if len(columns) > 2 else columns[0], columns[1]
        for view in rows.views:
            write_prompts(view, sequence, (stored[:, skipped:], values[:, skipped:]), kept, rows)
        start, sequence = end, sequence + number


def _attend_prefix(
    prefix: Sequence[torch.Tensor], rows: KVRows, scale: float, attn_out: torch.Tensor
) -> PrefixSums | None:
    """Attention within a shared prefix, q, k and v of `prefix` (1, tokens, heads, d). None where nothing is scored.

    The sums are computed once for all rows that begin with the prefix.
    """
    q, k, v = (t.transpose(1, 2) for t in prefix[:3])
    attended, lse = causal(rows, q, k, v, scale)
    attn_out.copy_(attended[0].transpose(0, 1))
    return None if lse is None else cache(partial(weighted_column_sums, rows.policy.needs, q, k, lse, scale))


def causal(
    rows: KVRows, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Causal attention, (b, heads, m, d), and its log-sum-exp where the policy scores prompts."""
    if rows.policy.needs.query_rows != 0:
        return causal_attention_lse(q, k, v, scale)
    return causal_attention(q, k, v, scale), None


def _equal_rows(group: PromptGroup, budgets: RowBudgets, sequence: int) -> Iterator[tuple[int, int]]:
    """(rows, own tokens of each) of neighbours of equal lengths and budgets, which are computed together.

    With a prefix their columns are copied behind it, so they have at most TOKEN_CHUNK columns, or there is one row.
    """
    here = slice(sequence, sequence + group.rows)
    stay = zip(*(t[here].tolist() for t in (budgets.sinks, budgets.heavy, budgets.recent)), strict=True)
    for (count, _), same in groupby(zip(group.own, stay, strict=True)):
        left = len(list(same))
        most = max(1, TOKEN_CHUNK // (group.before + count)) if group.before else left
        while left:
            yield min(most, left), count
            left -= min(most, left)


def write_prompts(
    view: PartView, sequence: int, kv: tuple[torch.Tensor, torch.Tensor], kept: KeptColumns, unit: KVRows
) -> None:
    """Put what is kept of prompts into the rows that the view has of them, and what `unit` has beside slots.

    k, v: (b, n, kv_heads, d).
    """
    k, v = kv
    n, kv_heads, width = k.shape[1:]
    for i, (keys, values) in enumerate(zip(k, v, strict=True)):
        first = (sequence + i) * kv_heads
        a, b = max(first, view.start), min(first + kv_heads, view.end)
        if a >= b:
            continue
        heads, rows = slice(a - first, b - first), slice(a - view.start, b - view.start)
        if view.whole is not None:
            window = window_of(view.whole.slots.shape[1], int(unit.budgets.slots[sequence + i]))
            of_rows = view.whole.map(lambda t, rows=rows: t[rows])  # type: ignore[misc]
            keep_whole(of_rows, keys[:, heads], values[:, heads], kept.positions[i, heads], window)
        if kept.positions.shape[-1] == n:
            put_first_columns(view, rows.start, rows.stop, *(t[:, heads].transpose(0, 1) for t in (keys, values)))
        else:
            positions = kept.positions[i, heads]
            index = positions * kv_heads + torch.arange(a - first, b - first, device=positions.device).unsqueeze(1)
            chosen = (t.reshape(-1, width).index_select(0, index.flatten()) for t in (keys, values))
            put_first_columns(view, rows.start, rows.stop, *(t.view(b - a, -1, width) for t in chosen))
        if view.metadata is not None:
            record_prompt(view.metadata, rows, kept, i, heads)
            if view.metadata.pages is not None:
                pages = view.metadata.pages.map(lambda t, rows=rows: t[rows])  # type: ignore[misc]
                sum_up_prompt(pages, unit.policy.needs.page, keys[:, heads], values[:, heads], kept.positions[i, heads])


# ---- new tokens


def attend_slots(
    qkv: Sequence[torch.Tensor], rows: KVRows, new: NewColumns, scale: float, out: torch.Tensor,
    sparsity: float = 1.0, rotation: Rotation | None = None,
) -> torch.Tensor:  # fmt: skip
    """Put each row's new column into its slot and attend over its filled slots, part by part where the part lies.

    Where the policy scores, the slots' scores grow by what they received and each row's next victim is named.
    sparsity: `Policy.attn_sparsity`, of the full cache. rotation: turns the keys by their ranks as they are read.

    q: (sequences, heads, d); k, v: (sequences, kv_heads, d); out: (sequences, heads x d).
    """
    q, k, v = qkv
    count, width = k.shape[0] * k.shape[1], k.shape[2]
    group = q.shape[1] // k.shape[1]
    q, attn_out = q.view(count, group, width), out.view(count, group, width)
    k, v = k.view(count, width), v.view(count, width)
    common = None if rows.common is None else _attend_common(rows.common, q, scale)
    positions, filled = (t.repeat_interleave(rows.kv_heads) for t in (new.positions, new.filled.int()))
    for view, slots in zip(rows.views, new.slots, strict=True):
        here, where = slice(view.start, view.end), view.keys.device
        queries, keys, values, held = (t[here].to(where) for t in (q, k, v, filled))
        if view.metadata is not None and view.metadata.pages is not None:
            sum_up_replaced(view, rows, new, slots)
        put_columns(view, slots, keys, values)
        if view.whole is not None:
            keep_new_whole(view.whole, rows, view, new.positions, (slots, keys, values))
        state = None
        if view.metadata is not None:
            sizes = None if view.metadata.norms is None else value_sizes(rows.policy.needs, values)
            record_columns(view.metadata, slots, positions[here].to(where), held, sizes)
            state = _score_state(rows, view, positions[here], filled[here])
        if common is not None:
            attn_out[here].copy_(_attend_behind([t[here].to(where) for t in common], queries, view, held, scale))
        elif rotation is not None:
            _attend_rolling(rotation, queries, view, held, scale, state, attn_out[here])
        elif sparsity < 1:
            attn_out[here].copy_(attend_sparse(queries, view.keys, view.values, held, scale, sparsity))
        else:
            attn_out[here].copy_(attend(queries, view.keys, view.values, held, scale, state, view.form))
    if rows.policy.needs.record and not rows.policy.needs.ranks_by_score:
        rank_victims(rows, new)
    return out


def _score_state(rows: KVRows, view: PartView, positions: torch.Tensor, filled: torch.Tensor) -> ScoreState | None:
    """What the decode kernel updates of a view's rows; None without scores. positions, filled: (rows,) on the host."""
    metadata = view.metadata
    if metadata is None or metadata.scores is None:
        return None
    needs, where = rows.policy.needs, view.keys.device
    sinks, recent = (
        t.repeat_interleave(rows.kv_heads)[view.start : view.end] for t in (rows.budgets.sinks, rows.budgets.recent)
    )
    oldest, newest = (t.int().to(where) for t in (sinks, positions - recent))
    gains = needs.gain * (filled / (positions + 1) if needs.even else torch.ones(len(positions)))
    return ScoreState(
        metadata.scores, metadata.positions, oldest, newest, needs.decay, gains.float().to(where), metadata.victims
    )  # fmt: skip


def _attend_rolling(
    rotation: Rotation, q: torch.Tensor, view: PartView, filled: torch.Tensor, scale: float, state: ScoreState | None,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """ROLLING_CHUNK numbers of keys are turned at a time, or those of one row."""
    assert view.metadata is not None and view.metadata.ranks is not None
    (keys,), slots = view.keys, view.keys.shape[2]
    step = max(1, ROLLING_CHUNK // (slots * view.keys.shape[3]))
    for first in range(0, view.rows, step):
        here = slice(first, min(view.rows, first + step))
        rotated = rotation.rotated(keys[here], view.metadata.ranks[here]).unsqueeze(0)
        own = None if state is None else state.rows(here)
        out[here].copy_(attend(q[here], rotated, view.values[:, here], filled[here], scale, own))


def _attend_common(common: PartView, q: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the common prefix, (rows, g, d), and its log-sum-exp, (rows, g) fp32. q: (rows, g, d)."""
    (rows, group, width), (heads, columns) = q.shape, common.keys.shape[1:3]
    by_head = q.view(-1, heads, group, width).transpose(0, 1).reshape(heads, -1, width)
    filled = torch.full((heads,), columns, dtype=torch.int32, device=common.keys.device)
    out, lse = attend_lse(by_head, common.keys, common.values, filled, scale)
    out = out.view(heads, -1, group, width).transpose(0, 1).reshape(rows, group, width)
    return out, lse.view(heads, -1, group).transpose(0, 1).reshape(rows, group)


def _attend_behind(
    common: Sequence[torch.Tensor], q: torch.Tensor, view: PartView, filled: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention over the common prefix and a view's slots, (rows, g, d). common: of `_attend_common` for these rows."""
    before, before_lse = common
    own, own_lse = attend_lse(q, view.keys, view.values, filled, scale)
    share = torch.sigmoid(before_lse - own_lse).unsqueeze(2)  # of exp(before_lse) in the sum of both
    return torch.lerp(own.float(), before.float(), share)


# ---- the eviction step


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


def keep_whole(whole: WholeColumns, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor, window: int) -> None:
    """Fill what some rows have beside packed slots, from their prompt: the middle and the range of each channel of its
    keys, and those of the `window` newest columns that are kept.

    k, v: (n, rows, d); kept: (rows, kept) int64, ascending: column kept[r, i] is in slot i.
    """
    least, most = k.float().aminmax(dim=0)
    ranges = most - least
    # A channel that hardly moves would rule all others once it does: it gets a share of their mean.
    floor = ranges.mean(dim=1, keepdim=True) * LEAST_RANGE
    ranges = torch.maximum(ranges, floor)
    whole.centres.copy_((most + least) / 2)
    whole.ranges.copy_(torch.where(ranges > 0, ranges, 1.0))  # of one column nothing is known
    for t in (whole.keys, whole.values):
        t.zero_()
    whole.slots.fill_(-1)
    if not window:
        return
    first = max(0, kept.shape[1] - window)  # what may be among the newest
    row, entry = (kept[:, first:] >= len(k) - window).nonzero(as_tuple=True)
    positions = kept[row, first + entry]
    place = row, positions % window
    whole.keys[place], whole.values[place] = k[positions, row], v[positions, row]
    whole.slots[place] = (first + entry).int()


def keep_new_whole(
    whole: WholeColumns, rows: KVRows, view: PartView, positions: torch.Tensor, new: tuple[torch.Tensor, ...]
) -> None:
    """New columns (slots (rows,) int64, keys and values (rows, d)) take the places of those that leave the window.

    positions: (sequences,) int64 on the host.
    """
    slots, keys, values = new
    most = whole.slots.shape[1]
    if not most:
        return
    whole.slots.masked_fill_(whole.slots == slots.int().unsqueeze(1), -1)  # evicted within the window
    windows = torch.tensor([window_of(most, held) for held in rows.budgets.slots.tolist()])
    place = torch.where(windows > 0, positions % windows.clamp(min=1), -1)
    place = place.repeat_interleave(rows.kv_heads)[view.start : view.end].to(slots.device)
    row = (place >= 0).nonzero().squeeze(1)
    at = row, place[row]
    whole.keys[at], whole.values[at] = keys[row], values[row]
    whole.slots[at] = slots[row].int()


def sum_up_prompt(pages: Pages, page: int, k: torch.Tensor, v: torch.Tensor, kept: torch.Tensor) -> None:
    """Fill the pages of some rows with the means of what is not kept of a prompt, SUMMARY_CHUNK numbers at a time.

    k, v: (n, rows, d); kept: (rows, kept) int64. All pages are written.
    """
    n, rows, width = k.shape
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
    assert view.metadata is not None and new.replaces is not None
    if not bool(new.replaces.any()):
        return
    where = torch.arange(view.rows, device=slots.device), slots
    page = torch.div(view.metadata.positions[where].long(), rows.policy.needs.page, rounding_mode="floor")
    replaces = new.replaces.repeat_interleave(rows.kv_heads)[view.start : view.end].to(slots.device)
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
