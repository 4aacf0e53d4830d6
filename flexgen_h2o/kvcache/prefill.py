"""Attention of whole prompts, and the columns of prompts that stay in the slots of a KV unit.

A column is one KV entry: the key and the value of one token. Columns are chosen before the layer's
KV unit is written to its tier. So only the columns that stay are stored and moved.

Neighbours of equal length and equal budgets are computed together, as a batch. On a GPU, prompts of
any lengths are computed in one launch, packed one behind the other. Both forms are `Prompts`.
Prompts are never padded. Without batches, a layer of OPT-125m would take 7% longer on a CPU for
prompts of 16 tokens and `h2o`, 3% for 32 tokens, and less than 1% from 128 tokens on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import groupby

import torch

from flexgen_h2o.core.packing import window_of
from flexgen_h2o.core.units import TOKEN_CHUNK
from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.hadamard import hadamard
from flexgen_h2o.kernels.prefill_attention import (
    causal_attention,
    causal_attention_lse,
    column_sums,
    packed_attention,
    with_sinks,
)
from flexgen_h2o.kernels.prompt_columns import (
    PromptSlots,
    are_put_together,
    choose_kept,
    choose_packed,
    keep_whole,
    put_prompts,
)
from flexgen_h2o.kernels.workspace import upload
from flexgen_h2o.kvcache.budgets import Budgets
from flexgen_h2o.kvcache.eviction.policy import Columns
from flexgen_h2o.kvcache.part import KVPart, KVUnit, Prompts
from flexgen_h2o.kvcache.prefixes import PromptGroup

# Rank of an empty slot. It is above all others, so that no rank falls when the slot is filled.
NO_RANK = 2**30


def attend_prompts(
    qkv: Sequence[torch.Tensor],
    groups: Sequence[PromptGroup],
    unit: KVUnit,
    scale: float,
    out: torch.Tensor,
    stored_keys: torch.Tensor | None = None,
    first: int = 0,
) -> torch.Tensor:
    """Write the causal attention of packed prompts to `out`, store their columns, and return `out`.

    The columns that the policy keeps go to slots 0, 1, ... of each row. A group without prompts
    fills `unit.common`; other groups see its columns in front of their own.

    All tensors are packed as `groups` describes.
    qkv: q (tokens, heads, d), k and v (tokens, kv_heads, d).
    out: (tokens, heads x d).
    stored_keys: k before its rotary embeddings, which is stored in place of k.
    first: the sequence that the first prompt belongs to; the others follow.
    """
    attn_out = out.view(qkv[0].shape)
    packed = qkv if stored_keys is None else (*qkv, stored_keys)
    start = 0
    sequence = first
    for group in groups:
        here = slice(start, start + group.tokens)
        _attend_group([t[here] for t in packed], group, sequence, unit, scale, attn_out[here])
        start = here.stop
        sequence = sequence + group.num_prompts
    return out


def _attend_group(
    packed: Sequence[torch.Tensor],
    group: PromptGroup,
    sequence: int,
    unit: KVUnit,
    scale: float,
    attn_out: torch.Tensor,
) -> None:
    """Attend to the prompts of one group and store their columns, as `attend_prompts` does for all.

    A shared prefix attends to itself once. The prompts' own queries then see its columns in front
    of their own. Without a prefix, a GPU attends to all prompts in one launch.

    packed: q, k, v, and stored_keys if there are any, of the group's tokens.
    sequence: the first sequence of the group.
    """
    # `unit.common` holds the skipped columns. With a window each prompt's rows have a copy of them.
    start = group.prefix
    skipped = group.common if unit.window is None else 0
    prefix = [t[:start].unsqueeze(0) for t in packed]
    if group.common:
        assert unit.common is not None
        columns = [t.transpose(1, 2) for t in (unit.common.keys, unit.common.values)]
        prefix[1:] = (
            [torch.cat(pair, dim=1) for pair in zip(columns, prefix[1:], strict=True)]
            if start
            else columns
        )
    sums = None
    if start:
        sums = _attend_prefix(prefix, unit, scale, attn_out[:start])
    if not group.num_prompts:
        assert unit.common is not None
        of_prefix = (t[0].transpose(0, 1) for t in prefix[1:])
        unit.common.write_first(slice(0, unit.kv_heads), *of_prefix)
        return
    attended = None
    if not group.before and triton.supports(*packed):
        attended = _attend_packed(packed, group, sequence, unit, scale, attn_out)
        if unit.policy.needs.in_one_launch and (
            attended.lse is not None or not unit.policy.needs.record
        ):
            keep_prompts(unit, attended, [t.unsqueeze(0) for t in packed[1:3]])
            return
    for number, count in _equal_prompts(group, unit.budgets, sequence):
        here = slice(start, start + number * count)
        q, *columns = (t[here].unflatten(0, (number, count)) for t in packed)
        if group.before:
            before = [t.expand(number, -1, -1, -1) for t in prefix[1:]]
            columns = [torch.cat(pair, dim=1) for pair in zip(before, columns, strict=True)]
        q, k, v = (t.transpose(1, 2) for t in (q, *columns[:2]))
        if attended is None:
            found, lse = causal(unit, q, k, v, scale)
            attn_out[here].unflatten(0, (number, count)).copy_(found.transpose(1, 2))
            if unit.watch is not None and lse is not None:
                unit.watch(sequence, Prompts(q, k, v, lse, scale))
        else:
            lse = attended.lse
            if lse is not None:
                lse = lse[0, :, here].unflatten(1, (number, count)).transpose(0, 1)
        own = [t[:, skipped:] for t in columns]
        k, v = (t.transpose(1, 2) for t in own[:2])
        lines = prompt_lines(unit, sequence, [k.shape[2]] * number, is_packed=False)
        prompts = Prompts(q, k, v, lse, scale, sequence, lines, sums)
        keep_prompts(unit, prompts, (own[2] if len(own) > 2 else own[0], own[1]))
        start = here.stop
        sequence = sequence + number


def _attend_packed(
    packed: Sequence[torch.Tensor],
    group: PromptGroup,
    sequence: int,
    unit: KVUnit,
    scale: float,
    attn_out: torch.Tensor,
) -> Prompts:
    """Write the attention of a group without a prefix to `attn_out`, on a GPU in one launch.

    Returns all prompts of the group.
    """
    q, k, v, out = (t.unsqueeze(0).transpose(1, 2) for t in (*packed[:3], attn_out))
    lines = prompt_lines(unit, sequence, group.own)
    lse = packed_attention(q, k, v, lines, scale, unit.window, out)
    if unit.sinks is not None:
        _, lse = with_sinks(out, lse, unit.sinks)
    if unit.policy.needs.query_rows == 0:
        return Prompts(q, k, v, None, scale, sequence, lines)
    if unit.watch is not None:
        for i, line in enumerate(lines):
            own = slice(None), slice(None), line.tokens
            unit.watch(sequence + i, Prompts(q[own], k[own], v[own], lse[own], scale))
    return Prompts(q, k, v, lse, scale, sequence, lines)


def _attend_prefix(
    prefix: Sequence[torch.Tensor], unit: KVUnit, scale: float, attn_out: torch.Tensor
) -> Callable[[int], torch.Tensor] | None:
    """Write the attention within a shared prefix to `attn_out`, and return its column sums.

    The sums are computed at most once, for all prompts that begin with the prefix. Returns None if
    the policy scores no prompts.

    prefix: q (1, m, heads, d), k and v (1, n, kv_heads, d); m < n if a common prefix is in front.
    """
    q, k, v = (t.transpose(1, 2) for t in prefix[:3])
    attended, lse = causal(unit, q, k, v, scale)
    attn_out.copy_(attended[0].transpose(0, 1))
    return None if lse is None else cache(partial(column_sums, q, k, lse, scale))


def causal(
    unit: KVUnit, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return causal attention (b, heads, m, d) and its log-sum-exp (b, heads, m).

    The log-sum-exp is None if the policy scores no prompts. If the layer has sinks, both include
    them.
    """
    scores = unit.policy.needs.query_rows != 0
    if unit.sinks is None and not scores:
        return causal_attention(q, k, v, scale, unit.window), None
    out, lse = causal_attention_lse(q, k, v, scale, unit.window)
    if unit.sinks is not None:
        out, lse = with_sinks(out, lse, unit.sinks)
    return out, lse if scores else None


def _equal_prompts(
    group: PromptGroup, budgets: Budgets, sequence: int
) -> Iterator[tuple[int, int]]:
    """Yield (prompts, own tokens of each) of neighbours that are computed together.

    They have equal lengths and equal budgets. If there is a prefix, each prompt gets a copy of
    its columns in front of its own. So prompts of at most TOKEN_CHUNK columns in all are computed
    together, but at least one.
    """
    here = slice(sequence, sequence + group.num_prompts)
    stay = zip(
        *(t[here].tolist() for t in (budgets.sinks, budgets.heavy, budgets.recent)), strict=True
    )
    for (count, _), same in groupby(zip(group.own, stay, strict=True)):
        left = len(list(same))
        most = max(1, TOKEN_CHUNK // (group.before + count)) if group.before else left
        while left:
            yield min(most, left), count
            left -= min(most, left)


def prompt_lines(
    unit: KVUnit, first: int, lengths: Sequence[int], is_packed: bool = True
) -> triton.PromptPlaces:
    """Return one PromptPlace per prompt: where its tokens are, and which of its columns stay.

    The prompts have the given lengths and belong to the sequences `first`, `first` + 1, ...
    is_packed: they are packed one behind the other; otherwise they are a batch.
    """
    all_whole = [part.form.whole for part in unit.parts]
    max_window = max((whole.slots.shape[1] for whole in all_whole if whole), default=0)
    budgets = unit.budgets.select(slice(first, first + len(lengths)))
    columns = zip(
        *(t.tolist() for t in (budgets.kept, budgets.sinks, budgets.recent, budgets.slots)),
        strict=True,
    )
    found = list[triton.PromptPlace]()
    start = 0
    kept_start = 0
    for n, (kept, sinks, recent, slots) in zip(lengths, columns, strict=True):
        begin, end = (sinks, n - recent) if kept < n else (0, 0)
        window = window_of(max_window, slots)
        found.append(triton.PromptPlace(start, n, n, kept_start, kept, begin, end, window))
        if is_packed:
            start = start + n
            kept_start = kept_start + kept
    return tuple(found)


def keep_prompts(unit: KVUnit, prompts: Prompts, kv: Sequence[torch.Tensor]) -> None:
    """Choose the columns of prompts that stay, and write them to their slots.

    kv: keys and values to store, each (b, n, kv_heads, d).
    """
    prompts = choose_columns(unit, prompts)
    if unit.hadamard:  # Attention and scores are done, so nothing else reads these tensors.
        kv = [_transformed(t) for t in kv]
    for part in unit.parts:
        write_prompts(part, unit, prompts, kv)


def _transformed(columns: torch.Tensor) -> torch.Tensor:
    """Return columns (b, n, kv_heads, d) after the Hadamard transform.

    Contiguous columns are transformed in place.
    """
    columns = columns.contiguous()
    hadamard(columns.view(-1, *columns.shape[2:]))
    return columns


# ---- the choice


def choose_columns(unit: KVUnit, prompts: Prompts) -> Prompts:
    """Score the columns of prompts, choose those that stay, and return the prompts with both.

    If prompts are packed, the policy must rank columns by their scores alone, or rank none.
    """
    k = prompts.k
    b, kv_heads = k.shape[:2]
    lines = prompts.lines
    each = lines if prompts.is_packed else lines[:1]
    scores = None if prompts.lse is None else _prompt_scores(unit, prompts)
    # Columns that stay by rank: those that may leave, less those that do leave (keys - kept).
    chooses = any(line.kept - line.keys + line.end - line.begin for line in each)
    if not chooses or (scores is None and prompts.is_packed):
        stay = tuple((line.keys, line.begin, line.kept) for line in each)
        kept = _unranked(stay, k.device).expand(b, kv_heads, -1)
    else:
        rank = _prompt_rank(unit, prompts, scores)
        line = each[0]
        kept = (
            choose_packed(rank, lines)
            if prompts.is_packed
            else choose_kept(rank, line.begin, line.end, line.kept)
        )
    return replace(prompts, kept=kept, scores=scores)


def _prompt_rank(unit: KVUnit, prompts: Prompts, scores: torch.Tensor | None) -> torch.Tensor:
    """Return the ranks (b, kv_heads, n) fp32 of the columns of prompts.

    The sequences of a batch must have the same budgets.
    """
    policy = unit.policy
    where = prompts.k.device
    if scores is not None and policy.needs.ranks_by_score:  # the same ranks as in the decode kernel
        if not policy.needs.per_query:
            return scores
        each = prompts.lines if prompts.is_packed else prompts.lines[:1]
        return scores / _seen(tuple(line.keys for line in each), where)
    b, kv_heads, n = prompts.k.shape[:3]
    line = prompts.lines[0]
    positions = torch.arange(n, device=where).expand(b, kv_heads, n)
    may_leave = (positions >= line.begin) & (positions < line.end)
    newest = torch.full((b,), n - 1, device=where)
    return policy.rank(Columns(unit.block, positions.int(), may_leave, newest, scores))


def _prompt_scores(unit: KVUnit, prompts: Prompts) -> torch.Tensor:
    """Return the scores (b, kv_heads, n) fp32 that the columns of prompts start with."""
    assert prompts.lse is not None
    policy = unit.policy
    query_rows = policy.needs.query_rows
    q = prompts.q
    k = prompts.k
    if prompts.is_packed:
        sums = column_sums(q, k, prompts.lse, prompts.scale, query_rows, prompts.lines)
        _score_alike(unit, sums, prompts.lines)
        return sums
    own = q.shape[2]
    n = k.shape[2]
    query_rows = n if query_rows is None else min(n, query_rows)
    sums = column_sums(q, k, prompts.lse, prompts.scale, min(own, query_rows))
    if prompts.prefix_sums is not None and query_rows > own:
        sums[..., : n - own] += prompts.prefix_sums(query_rows - own)
    return policy.prompt_scores(sums, query_rows)


def _score_alike(unit: KVUnit, sums: torch.Tensor, lines: triton.PromptPlaces) -> None:
    """Turn column sums (1, kv_heads, tokens) into the policy's scores, in place.

    Neighbours of equal length are converted together.
    """
    query_rows = unit.policy.needs.query_rows
    for n, same in groupby(lines, key=lambda line: line.keys):
        alike = [line.tokens for line in same]
        own = (
            sums[0, :, alike[0].start : alike[-1].stop]
            .unflatten(1, (len(alike), n))
            .transpose(0, 1)
        )
        made = unit.policy.prompt_scores(own, n if query_rows is None else min(n, query_rows))
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
    """Return the first and the newest columns of prompts: (columns that stay,) int64.

    stay: for each prompt (tokens, first columns that stay, all columns that stay).
    """
    found = []
    for n, sinks, kept in stay:
        ends = (range(sinks), range(n - kept + sinks, n))
        found += [torch.arange(end.start, end.stop, device="cpu") for end in ends]
    return upload(torch.cat(found), where)


# ---- the slots


def write_prompts(part: KVPart, unit: KVUnit, prompts: Prompts, kv: Sequence[torch.Tensor]) -> None:
    """Write the kept columns of prompts to those of their rows that the part holds.

    The record and the whole columns beside packed slots are written too.

    kv: keys and values, each (b, n, kv_heads, d).
    """
    assert prompts.kept is not None
    k, v = kv
    kv_heads, width = k.shape[2:]
    start = prompts.first * kv_heads
    begin = max(start, part.start)
    end = min(start + len(prompts.lines) * kv_heads, part.end)
    if begin >= end:
        return
    if are_put_together(k, part.keys) and unit.policy.needs.in_one_launch:
        own = part.part(begin - part.start, end - part.start, 0)
        slots = PromptSlots(
            own.keys,
            own.values,
            begin - start,
            own.form,
            positions=own.positions,
            scores=own.scores,
            smooths=not unit.hadamard,
        )
        scores = None if part.positions is None else prompts.scores
        put_prompts(k, v, prompts.kept, scores, slots, prompts.lines)
        return
    for i, line in enumerate(prompts.lines):
        first = start + i * kv_heads
        a = max(first, part.start)
        b = min(first + kv_heads, part.end)
        if a >= b:
            continue
        batch = 0 if prompts.is_packed else i
        heads = slice(a - first, b - first)
        rows = slice(a - part.start, b - part.start)
        # Packing and recording happen on the device of the slots, which may differ from the device
        # that computes prompts.
        here = (
            k.device
            if part.form.whole is None and unit.policy.needs.in_one_launch
            else part.keys.device
        )
        keys, values = (t[batch, line.tokens, heads].to(here) for t in kv)
        positions = prompts.kept[batch, heads, line.stays].to(here)
        whole = part.form.rows(rows).whole
        if whole is not None:
            columns = keys[None], values[None], positions[None]
            keep_whole(whole, *columns, 0, line.window, not unit.hadamard)
        if line.kept == line.keys:
            part.write_first(rows, keys.transpose(0, 1), values.transpose(0, 1))
        else:
            index = positions * (b - a) + torch.arange(b - a, device=here).unsqueeze(1)
            chosen = (
                t.reshape(-1, width).index_select(0, index.flatten()).view(b - a, -1, width)
                for t in (keys, values)
            )
            part.write_first(rows, *chosen)
        if part.positions is not None:
            _record_prompt(part, rows, prompts, (batch, heads), line)


def _record_prompt(
    part: KVPart,
    rows: slice,
    prompts: Prompts,
    source: tuple[int, slice],
    line: triton.PromptPlace,
) -> None:
    """Write the record of a prompt's columns to `rows` of a part.

    source: index of the prompt in the tensors of `prompts`, and its heads.
    """
    assert part.positions is not None and prompts.kept is not None
    positions = prompts.kept[source][:, line.stays]
    part.positions[rows, : line.kept].copy_(positions)
    if part.scores is not None and prompts.scores is not None:
        scores = prompts.scores[source][:, line.tokens].gather(-1, positions)
        part.scores[rows, : line.kept].copy_(scores)
    if part.ranks is not None:
        part.ranks[rows] = NO_RANK
        part.ranks[rows, : line.kept] = torch.arange(
            line.kept, dtype=torch.int32, device=part.ranks.device
        )
