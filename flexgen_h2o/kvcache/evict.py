"""The eviction step: which columns of a prompt stay, and which column leaves for a row's next one.

Prompt columns are chosen before the layer's KV unit is written to its tier. So only the columns
that stay are stored and moved. A victim is only named: the next column of its row overwrites its
slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import torch

from flexgen_h2o.core.packing import window_of
from flexgen_h2o.core.units import QUERY_CHUNK
from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.beside import unpacked
from flexgen_h2o.kernels.hadamard import hadamard
from flexgen_h2o.kernels.prefill_attention import column_sums, packed_column_sums
from flexgen_h2o.kernels.prompt_columns import choose_kept, choose_packed
from flexgen_h2o.kernels.workspace import upload
from flexgen_h2o.kvcache.eviction.policy import (
    NORMS,
    POSITIONS,
    SCORES,
    Columns,
    KeyScores,
    value_sizes,
)
from flexgen_h2o.kvcache.rows import StepNumbers
from flexgen_h2o.kvcache.slots import KVRows, PartView, SlotMetadata

# Rank of an empty slot. It is above all others, so that no rank falls when the slot is filled.
NO_RANK = 2**30

# Returns the column sums (1, kv_heads, tokens) of a shared prefix over its last query rows.
# Argument: the number of these rows.
PrefixSums = Callable[[int], torch.Tensor]
# Returns `KeyScores.query_sums` (1, heads, any) of a shared prefix.
PrefixQueries = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class KeptColumns:
    """The columns that stay of `b` prompts of `n` tokens, and what is recorded of the prompts.

    `keep_prompt_columns` and `keep_packed_columns` make it.
    """

    positions: torch.Tensor  # (b, kv_heads, kept) int64, ascending: of the columns that stay
    # (b, kv_heads, n) fp32: scores of all columns. None if the policy records none.
    scores: torch.Tensor | None
    # (b, kv_heads, n) fp32: sizes of all values (`value_sizes`). None if the policy records none.
    norms: torch.Tensor | None
    # (b, kv_heads, numbers) fp32: summary of the prompts' queries (`KeyScores.of_prompt`). None
    # unless the policy scores by keys.
    queries: torch.Tensor | None = None


def keep_prompt_columns(
    rows: KVRows,
    first: int,
    qkv: Sequence[torch.Tensor],
    lse: torch.Tensor | None,
    scale: float,
    prefix_sums: PrefixSums | None = None,
    prefix_queries: PrefixQueries | None = None,
) -> KeptColumns:
    """Score the columns of b equally long prompts and choose those that stay.

    The prompts belong to the sequences `first`, `first` + 1, ...

    qkv: q (b, heads, m, d), the last m query rows; k and v (b, kv_heads, n, d).
    lse: (b, heads, m), log-sum-exp of their attention. None if the policy scores no prompts.
    prefix_sums: sums of the other query rows; given if m < n and the policy scores prompts.
    prefix_queries: as prefix_sums, for a policy that scores by keys.
    """
    q, k, v = qkv
    b, kv_heads, n = k.shape[:3]
    policy = rows.policy
    budgets = rows.budgets
    scores = _prompt_scores(rows, (q, k), lse, scale, prefix_sums) if lse is not None else None
    norms = value_sizes(policy.needs, v) if NORMS in policy.needs.record else None
    kept = int(budgets.kept[first])
    sinks, heavy, recent = budgets.stay(first)
    chooses = kept < n and heavy > 0
    queries = None
    if policy.needs.by_keys is not None:
        queries = _queries_of_prompts(policy.needs.by_keys, q, n, kv_heads, prefix_queries)
        scores = torch.zeros(b, kv_heads, n, dtype=torch.float32, device=k.device)
        if chooses:
            _score_prompts_by_keys(policy.needs.by_keys, k, queries, (sinks, n - recent), scores)
    if chooses:
        positions = choose_kept(
            _prompt_rank(rows, first, k, scores, norms), sinks, n - recent, kept
        )
    else:
        positions = _without_rank(n, sinks if kept < n else 0, kept, k.device).expand(
            b, kv_heads, kept
        )
    return KeptColumns(positions, scores, norms, queries)


def query_sums(by_keys: KeyScores, q: torch.Tensor, first: int) -> torch.Tensor:
    """Return `KeyScores.query_sums`, (b, heads, any) fp32, for queries q (b, heads, m, d).

    One sequence is summed at a time, in chunks of at most QUERY_CHUNK numbers.
    first: position of the first query.
    """
    heads, count, width = q.shape[1:]
    step = max(1, QUERY_CHUNK // (heads * width))
    found = []
    for own in q.split(1):
        of_chunks = [
            by_keys.query_sums(own[:, :, a : a + step], first + a) for a in range(0, count, step)
        ]
        found.append(torch.stack(of_chunks).sum(dim=0))
    return torch.cat(found)


def _queries_of_prompts(
    by_keys: KeyScores, q: torch.Tensor, n: int, kv_heads: int, prefix_queries: PrefixQueries | None
) -> torch.Tensor:
    """Return the summary of the queries of prompts of n tokens, (b, kv_heads, numbers) fp32.

    q: (b, heads, m, d), the last m queries of each prompt. prefix_queries: sums of the others.
    """
    own = q.shape[2]
    sums = query_sums(by_keys, q, n - own)
    if prefix_queries is None:
        return by_keys.of_prompt(sums, own, kv_heads)
    return by_keys.of_prompt(sums + prefix_queries(), n, kv_heads)


def _score_prompts_by_keys(
    by_keys: KeyScores,
    k: torch.Tensor,
    queries: torch.Tensor,
    leaves: tuple[int, int],
    scores: torch.Tensor,
) -> None:
    """Write the scores of prompts to `scores` (b, kv_heads, n).

    One sequence is scored at a time, in chunks of kv-heads with at most QUERY_CHUNK numbers.

    k: (b, kv_heads, n, d). queries: (b, kv_heads, numbers).
    leaves: range [begin, end) of the positions that may leave.
    """
    b, kv_heads, n, width = k.shape
    places = torch.arange(n, device=k.device)
    may_leave = (places >= leaves[0]) & (places < leaves[1])
    for sequence in range(b):
        step = max(1, QUERY_CHUNK // (n * width))
        for a in range(0, kv_heads, step):
            keys = k[sequence, a : a + step]
            newest = torch.full((len(keys),), n - 1, device=k.device)
            own = queries[sequence, a : a + step]
            scores[sequence, a : a + step] = by_keys.scores(
                keys, own, newest, may_leave.expand(len(keys), n)
            )


def _prompt_rank(
    rows: KVRows,
    first: int,
    k: torch.Tensor,
    scores: torch.Tensor | None,
    norms: torch.Tensor | None,
) -> torch.Tensor:
    """Return the ranks (b, kv_heads, n) fp32 of the columns in `keep_prompt_columns`.

    All b sequences must have the same budgets.
    """
    b, kv_heads, n = k.shape[:3]
    policy = rows.policy
    budgets = rows.budgets
    where = k.device
    if scores is not None and policy.needs.ranks_by_score:  # the same ranks as in the decode kernel
        if not policy.needs.per_query:
            return scores
        return scores / torch.arange(
            n, 0, -1, device=where, dtype=torch.float32
        )  # queries that saw each column
    positions = torch.arange(n, device=where).expand(b, kv_heads, n)
    may_leave = (positions >= budgets.sinks[first]) & (positions < n - budgets.recent[first])
    newest = torch.full((b,), n - 1, device=where)
    heavy = upload(budgets.heavy[first : first + b], where)
    return policy.rank(
        Columns(rows.block, positions.int(), may_leave, newest, heavy, scores, norms)
    )


def _without_rank(n: int, sinks: int, kept: int, where: torch.device) -> torch.Tensor:
    """Return (kept,) int64: the first `sinks` of n columns, then the newest kept - sinks."""
    newest = torch.arange(n - kept + sinks, n, device=where)
    return torch.cat([torch.arange(sinks, device=where), newest]) if sinks else newest


def _prompt_scores(
    rows: KVRows,
    qk: Sequence[torch.Tensor],
    lse: torch.Tensor,
    scale: float,
    prefix_sums: PrefixSums | None,
) -> torch.Tensor:
    """Return the scores (b, kv_heads, n) fp32 that the columns of prompts start with."""
    q, k = qk
    needs = rows.policy.needs
    own = q.shape[2]
    n = k.shape[2]
    query_rows = n if needs.query_rows is None else min(n, needs.query_rows)
    sums = last_column_sums(q, k, lse, scale, min(own, query_rows))
    if prefix_sums is not None and query_rows > own:
        sums[..., : n - own] += prefix_sums(query_rows - own)
    return rows.policy.prompt_scores(sums, query_rows)


def last_column_sums(
    q: torch.Tensor, k: torch.Tensor, lse: torch.Tensor, scale: float, query_rows: int
) -> torch.Tensor:
    """Return the column sums over the last `query_rows` rows, (b, kv_heads, n) fp32."""
    return column_sums(q, k, lse, scale, k.shape[2] - query_rows)


# ---- prompts of any lengths, packed one behind the other on a GPU


def packed_lines(rows: KVRows, first: int, lengths: Sequence[int]) -> triton.PromptPlaces:
    """Return one PromptPlace per prompt: where its tokens are packed, and which of its columns
    stay.

    The prompts have the given lengths and belong to the sequences `first`, `first` + 1, ...
    """
    here = slice(first, first + len(lengths))
    room = [v.whole.slots.shape[1] for v in rows.views if v.whole is not None]
    budgets = rows.budgets.select(here)
    most = max(room, default=0)
    columns = zip(
        *(t.tolist() for t in (budgets.kept, budgets.sinks, budgets.recent, budgets.slots)),
        strict=True,
    )
    found = list[triton.PromptPlace]()
    start = 0
    kept_start = 0
    for n, (kept, sinks, recent, slots) in zip(lengths, columns, strict=True):
        begin, end = (sinks, n - recent) if kept < n else (0, 0)
        found.append(
            triton.PromptPlace(start, n, n, kept_start, kept, begin, end, window_of(most, slots))
        )
        start = start + n
        kept_start = kept_start + kept
    return tuple(found)


def keep_packed_columns(
    rows: KVRows,
    lines: triton.PromptPlaces,
    qk: Sequence[torch.Tensor],
    lse: torch.Tensor | None,
    scale: float,
) -> KeptColumns:
    """Do `keep_prompt_columns` for prompts that are packed one behind the other; b is 1.

    The policy must rank by scores alone, or not at all. Positions count from 0 in each prompt;
    `PromptPlace.stays` is the range of a prompt's positions in the result.
    """
    q, k = qk
    needs = rows.policy.needs
    where = qk[1].device
    scores = None
    lengths = tuple(line.keys for line in lines)
    if lse is not None:
        scores = packed_column_sums(q, k, lse, lines, scale, needs.query_rows)
        _score_alike(rows, scores, lines)
    if scores is None or not any(line.kept - line.keys + line.end - line.begin for line in lines):
        stay = tuple((line.keys, line.begin, line.kept) for line in lines)
        return KeptColumns(_unranked(stay, where).expand(1, k.shape[1], -1), scores, None)
    rank = scores
    if needs.per_query:
        rank = scores / _seen(lengths, where)
    return KeptColumns(choose_packed(rank, lines), scores, None)


def _score_alike(rows: KVRows, sums: torch.Tensor, lines: triton.PromptPlaces) -> None:
    """Turn column sums (1, kv_heads, tokens) into the policy's scores, in place.

    Neighbours of equal length are converted together.
    """
    query_rows = rows.policy.needs.query_rows
    for n, same in groupby(lines, key=lambda line: line.keys):
        alike = [line.tokens for line in same]
        own = (
            sums[0, :, alike[0].start : alike[-1].stop]
            .unflatten(1, (len(alike), n))
            .transpose(0, 1)
        )
        made = rows.policy.prompt_scores(own, n if query_rows is None else min(n, query_rows))
        if made is not own:
            own.copy_(made)


# These tensors are equal in all layers, so each is copied to a GPU once. Each layer goes through
# the micro-batches in turn, so the cache holds the tensors of up to 16 micro-batches.
@lru_cache(maxsize=16)
def _seen(lengths: tuple[int, ...], where: torch.device) -> torch.Tensor:
    """Return (tokens,) fp32: how many queries of its prompt see each token's column."""
    counts = [torch.arange(n, 0, -1, dtype=torch.float32, device="cpu") for n in lengths]
    return upload(torch.cat(counts), where)


@lru_cache(maxsize=16)
def _unranked(stay: tuple[tuple[int, int, int], ...], where: torch.device) -> torch.Tensor:
    """Return `_without_rank` of all prompts, joined: (columns that stay,) int64.

    stay: for each prompt (tokens, sinks, columns that stay).
    """
    host = torch.device("cpu")
    return upload(
        torch.cat([_without_rank(n, sinks, kept, host) for n, sinks, kept in stay]), where
    )


def record_prompts(metadata: SlotMetadata, rows: slice, kept: KeptColumns, these: slice) -> None:
    """Write the metadata of `rows`, which hold rows `these` of the b x kv_heads rows of `kept`."""
    positions = kept.positions.flatten(0, 1)[these]
    count = positions.shape[-1]
    metadata.positions[rows, :count].copy_(positions)
    for target, values in ((metadata.scores, kept.scores), (metadata.norms, kept.norms)):
        if target is not None and values is not None:
            target[rows, :count].copy_(values.flatten(0, 1)[these].gather(-1, positions))
    if metadata.queries is not None and kept.queries is not None:
        metadata.queries[rows] = kept.queries.flatten(0, 1)[these].to(metadata.queries.device)
    if metadata.ranks is not None:
        metadata.ranks[rows] = NO_RANK
        metadata.ranks[rows, :count] = torch.arange(
            count, dtype=torch.int32, device=metadata.ranks.device
        )


def record_columns(
    metadata: SlotMetadata,
    slots: torch.Tensor,
    positions: torch.Tensor,
    filled: torch.Tensor,
    sizes: torch.Tensor | None,
) -> None:
    """Write the metadata of new columns, one per row, which were put at `slots`.

    They get score 0 and the highest rank. Ranks above that of the replaced column fall by one.

    All tensors are on the metadata's device.
    slots, positions: (rows,) int64.
    filled: (rows,) ints, the slots in use with the new column.
    sizes: (rows,), sizes of the new values (`value_sizes`). None if they are not recorded.
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


def score_by_keys(view: PartView, rows: KVRows, by_keys: KeyScores, numbers: StepNumbers) -> None:
    """Write new scores of the view's rows that have no slot left for their next column.

    The new columns are in their slots already. At most QUERY_CHUNK numbers of keys are scored at a
    time, but at least one row.

    Scores stay valid for `by_keys.interval` steps if at least as many recent columns are protected:
    then no column may leave before it has a score. Otherwise rows are scored in every step.
    """
    metadata = view.metadata
    assert metadata is not None and metadata.scores is not None and metadata.queries is not None
    budgets = rows.budgets
    positions = numbers.positions
    held = budgets.kept + positions - budgets.prompts + 1
    is_new = (
        (positions % by_keys.interval == 0)
        | (held == budgets.slots)
        | (budgets.recent < by_keys.interval)
    )
    due = (
        ((held >= budgets.slots) & is_new)
        .repeat_interleave(rows.kv_heads)[view.start : view.end]
        .nonzero()[:, 0]
    )
    if not len(due):
        return
    where = view.keys.device
    slots = view.keys.shape[2]  # Rows with a record have only one segment.
    width = view.keys.shape[3] if view.packing is None else view.packing.width
    of_rows = numbers.of_rows(rows.kv_heads, view.start, view.end, where)
    for some in due.split(max(1, QUERY_CHUNK // (slots * width))):
        index = some.to(where)
        keys = view.keys[:, index]
        if view.packing is not None:
            keys, _ = unpacked(keys, view.values[:, index], view.form.rows(index), torch.float32)
        if rows.hadamard:  # The transform is its own inverse: this restores the rotated keys.
            hadamard(keys[0])
        place = metadata.positions[index]
        may_leave = (place >= of_rows.oldest[index].unsqueeze(1)) & (
            place <= of_rows.newest[index].unsqueeze(1)
        )
        may_leave &= torch.arange(slots, device=where) < of_rows.filled[index].unsqueeze(1)
        newest = of_rows.positions[index]
        metadata.scores[index] = by_keys.scores(keys[0], metadata.queries[index], newest, may_leave)


def rank_victims(rows: KVRows, newest: torch.Tensor, filled: torch.Tensor) -> None:
    """Write each row's victim by the policy's own rank.

    This is for policies that do not rank by score; otherwise the decode kernel finds the victim.

    newest, filled: as in `columns_of`.
    """
    columns = columns_of(rows, newest, filled)
    rank = rows.policy.rank(columns)
    stays = ~columns.may_leave
    lowest = rank.masked_fill(stays, float("inf")).amin(dim=-1, keepdim=True)
    last = torch.iinfo(torch.int32).max
    victims = (
        columns.positions.masked_fill(stays | (rank > lowest), last).argmin(dim=-1).int().flatten()
    )
    for view in rows.views:
        assert view.metadata is not None
        view.metadata.victims.copy_(victims[view.start : view.end])


def columns_of(rows: KVRows, newest: torch.Tensor, filled: torch.Tensor) -> Columns:
    """Return what a policy may know of the columns of all rows, on the device of the first part.

    newest: (sequences,) ints, the positions of the newest columns.
    filled: (sequences,) ints, the slots in use.
    """
    parts = [view.metadata for view in rows.views if view.metadata is not None]
    where = parts[0].positions.device

    def whole(name: str) -> torch.Tensor | None:
        if name not in rows.policy.needs.record:
            return None
        found = [getattr(part, name) for part in parts]
        joined = found[0] if len(found) == 1 else torch.cat([t.to(where) for t in found])
        return joined.view(-1, rows.kv_heads, joined.shape[-1])

    positions = whole(POSITIONS)
    budgets = rows.budgets
    assert positions is not None
    filled, sinks, recent, heavy, newest = (
        t.to(where).view(-1, 1, 1)
        for t in (filled, budgets.sinks, budgets.recent, budgets.heavy, newest)
    )
    slots = torch.arange(positions.shape[-1], device=where)
    may_leave = (slots < filled) & (positions >= sinks) & (positions <= newest - recent)
    return Columns(
        rows.block,
        positions,
        may_leave,
        newest.flatten(),
        heavy.flatten(),
        whole(SCORES),
        whole(NORMS),
    )
