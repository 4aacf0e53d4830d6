"""Attention of one micro-batch over its KV unit: over whole prompts, or for one new token per row.

`evict` scores columns and chooses those that stay. A column is one KV entry: the key and the value
of one token.

A prefix that all rows of a block begin with is held once per transformer block. Slots then hold
only the columns behind it. The queries of all rows read the prefix together (Hydragen, Juravsky et
al. 2024, arXiv 2402.05099). The result is combined with that of each row's own slots by both
log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import groupby

import torch

from flexgen_h2o.core.packing import window_of
from flexgen_h2o.core.units import ROLLING_CHUNK, TOKEN_CHUNK
from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.beside import SlotForm, joined
from flexgen_h2o.kernels.decode_step import InFront, StepSlots, attend_step
from flexgen_h2o.kernels.elementwise import Rotation
from flexgen_h2o.kernels.hadamard import hadamard
from flexgen_h2o.kernels.prefill_attention import (
    causal_attention,
    causal_attention_lse,
    packed_attention,
    with_sinks,
)
from flexgen_h2o.kernels.prompt_columns import (
    PromptSlots,
    are_put_together,
    keep_whole,
    put_prompts,
)
from flexgen_h2o.kernels.slots import Pair, ScoreState, attend, attend_largest, attend_lse
from flexgen_h2o.kvcache.evict import (
    KeptColumns,
    PrefixQueries,
    PrefixSums,
    keep_packed_columns,
    keep_prompt_columns,
    last_column_sums,
    packed_lines,
    query_sums,
    rank_victims,
    record_columns,
    record_prompts,
    score_by_keys,
)
from flexgen_h2o.kvcache.eviction.policy import NORMS, value_sizes
from flexgen_h2o.kvcache.prefixes import PromptGroup
from flexgen_h2o.kvcache.rows import RowBudgets, StepNumbers
from flexgen_h2o.kvcache.slots import (
    KVRows,
    NewColumns,
    PartView,
    PromptAttention,
    put_columns,
    put_first_columns,
)

# ---- prompts


def attend_prompts(
    qkv: Sequence[torch.Tensor],
    groups: Sequence[PromptGroup],
    rows: KVRows,
    scale: float,
    out: torch.Tensor,
    stored_keys: torch.Tensor | None = None,
    first: int = 0,
) -> torch.Tensor:
    """Write the causal attention of packed prompts to `out`, store their columns, and return `out`.

    The columns that the policy keeps go to slots 0, 1, ... of each row. A group without rows fills
    `rows.common`; other groups see its columns in front of their own. Neighbours of equal length
    are computed together; nothing is ever padded.

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
        _attend_group([t[here] for t in packed], group, sequence, rows, scale, attn_out[here])
        start = here.stop
        sequence = sequence + group.rows
    return out


def _attend_group(
    packed: Sequence[torch.Tensor],
    group: PromptGroup,
    sequence: int,
    rows: KVRows,
    scale: float,
    attn_out: torch.Tensor,
) -> None:
    """Do `attend_prompts` for one group, whose first sequence is `sequence`.

    A shared prefix attends to itself once. The rows' own queries then see its columns in front of
    their own.

    packed: q, k, v, and stored_keys if there are any, of the group's tokens.
    """
    # `rows.common` holds the skipped columns. With a window each row stores its own copy of them.
    start = group.prefix
    skipped = group.common if rows.window is None else 0
    prefix = [t[:start].unsqueeze(0) for t in packed]
    if group.common:
        assert rows.common is not None
        columns = [t.transpose(1, 2) for t in (rows.common.keys, rows.common.values)]
        prefix[1:] = (
            [torch.cat(pair, dim=1) for pair in zip(columns, prefix[1:], strict=True)]
            if start
            else columns
        )
    prefix_sums = _attend_prefix(prefix, rows, scale, attn_out[:start]) if start else None
    by_keys = rows.policy.needs.by_keys
    prefix_queries = None
    if start and by_keys is not None:
        prefix_queries = cache(partial(query_sums, by_keys, prefix[0].transpose(1, 2), 0))
    if not group.rows:
        assert rows.common is not None
        put_first_columns(
            rows.common, 0, rows.kv_heads, *(t[0].transpose(0, 1) for t in prefix[1:])
        )
    elif not group.before and triton.supports(*packed):
        _attend_at_once(packed, group, sequence, rows, scale, attn_out)
        return
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
        own = [t[:, skipped:] for t in columns]
        _keep(rows, sequence, (q, own), lse, scale, prefix_sums, prefix_queries)
        start = end
        sequence = sequence + number


def _keep(
    rows: KVRows,
    sequence: int,
    of_prompts: tuple[torch.Tensor, Sequence[torch.Tensor]],
    lse: torch.Tensor | None,
    scale: float,
    prefix_sums: PrefixSums | None = None,
    prefix_queries: PrefixQueries | None = None,
) -> None:
    """Choose the columns that stay of equally long prompts, and write them to slots.

    of_prompts: q (b, heads, m, d), and a sequence of keys, values and, if there are any, stored
    keys, each (b, n, kv_heads, d).
    """
    q, columns = of_prompts
    k, v = (t.transpose(1, 2) for t in columns[:2])
    kept = keep_prompt_columns(rows, sequence, (q, k, v), lse, scale, prefix_sums, prefix_queries)
    stored = columns[-1] if len(columns) > 2 else columns[0]
    values = columns[1]
    if rows.hadamard:  # Attention and scores are done, so nothing else reads these tensors.
        stored, values = (_transformed(t) for t in (stored, values))
    for view in rows.views:
        write_prompts(view, sequence, (stored, values), kept, rows)


def _transformed(columns: torch.Tensor) -> torch.Tensor:
    """Return columns (b, n, kv_heads, d) after the Hadamard transform.

    Contiguous columns are transformed in place.
    """
    columns = columns.contiguous()
    hadamard(columns.view(-1, *columns.shape[2:]))
    return columns


def _attend_at_once(
    packed: Sequence[torch.Tensor],
    group: PromptGroup,
    sequence: int,
    rows: KVRows,
    scale: float,
    attn_out: torch.Tensor,
) -> None:
    """Do `_attend_group` on a GPU for a group without a prefix.

    One launch takes all prompts, whatever their lengths.
    """
    q, k, v, out = (t.unsqueeze(0).transpose(1, 2) for t in (*packed[:3], attn_out))
    lines = packed_lines(rows, sequence, group.own)
    needs = rows.policy.needs
    sums = packed_attention(q, k, v, lines, scale, rows.window, out)
    if rows.sinks is not None:
        _, sums = with_sinks(out, sums, rows.sinks)
    lse = sums if needs.query_rows != 0 else None
    if rows.watch is not None and lse is not None:
        for i, line in enumerate(lines):
            own = slice(None), slice(None), line.tokens
            rows.watch(sequence + i, PromptAttention(q[own], k[own], lse[own], scale))
    if needs.in_one_launch and (lse is not None or not needs.record):
        kept = keep_packed_columns(rows, lines, (q, k), lse, scale)
        if rows.hadamard:
            hadamard(packed[1])
            hadamard(packed[2])
        for view in rows.views:
            _write_packed(view, sequence, packed[1:3], kept, rows, lines)
        return
    start = 0
    for number, count in _equal_rows(group, rows.budgets, sequence):
        here = slice(start, start + number * count)
        shape = (number, count)
        queries, *columns = (t[here].unflatten(0, shape) for t in packed)
        of_queries = None if lse is None else lse[0, :, here].unflatten(1, shape).transpose(0, 1)
        _keep(rows, sequence, (queries.transpose(1, 2), columns), of_queries, scale)
        start = here.stop
        sequence = sequence + number


def _attend_prefix(
    prefix: Sequence[torch.Tensor], rows: KVRows, scale: float, attn_out: torch.Tensor
) -> PrefixSums | None:
    """Write the attention within a shared prefix to `attn_out`, and return its column sums.

    The sums are computed at most once, for all rows that begin with the prefix. Returns None if the
    policy scores no prompts.

    prefix: q (1, m, heads, d), k and v (1, n, kv_heads, d); m < n if a common prefix is in front.
    """
    q, k, v = (t.transpose(1, 2) for t in prefix[:3])
    attended, lse = causal(rows, q, k, v, scale)
    attn_out.copy_(attended[0].transpose(0, 1))
    return None if lse is None else cache(partial(last_column_sums, q, k, lse, scale))


def causal(
    rows: KVRows, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return causal attention (b, heads, m, d) and its log-sum-exp (b, heads, m).

    The log-sum-exp is None if the policy scores no prompts. If the layer has sinks, both include
    them.
    """
    scores = rows.policy.needs.query_rows != 0
    if rows.sinks is None and not scores:
        return causal_attention(q, k, v, scale, rows.window), None
    out, lse = causal_attention_lse(q, k, v, scale, rows.window)
    if rows.sinks is not None:
        out, lse = with_sinks(out, lse, rows.sinks)
    return out, lse if scores else None


def _equal_rows(
    group: PromptGroup, budgets: RowBudgets, sequence: int
) -> Iterator[tuple[int, int]]:
    """Yield (rows, own tokens per row) of neighbours that are computed together.

    They have equal lengths and equal budgets. Rows with a shared prefix are copied behind it, at
    most TOKEN_CHUNK columns at a time, but at least one row.
    """
    here = slice(sequence, sequence + group.rows)
    stay = zip(
        *(t[here].tolist() for t in (budgets.sinks, budgets.heavy, budgets.recent)), strict=True
    )
    for (count, _), same in groupby(zip(group.own, stay, strict=True)):
        left = len(list(same))
        most = max(1, TOKEN_CHUNK // (group.before + count)) if group.before else left
        while left:
            yield min(most, left), count
            left -= min(most, left)


def write_prompts(
    view: PartView,
    sequence: int,
    kv: tuple[torch.Tensor, torch.Tensor],
    kept: KeptColumns,
    unit: KVRows,
) -> None:
    """Write the kept columns of prompts to those of their rows that the view holds.

    Metadata and the whole columns beside packed slots are written too.

    sequence: the first of the b sequences. kv: keys and values, each (b, n, kv_heads, d).
    unit: the rows of the unit that the view is a part of.
    """
    k, v = kv
    n, kv_heads, width = k.shape[1:]
    if are_put_together(k, view.keys) and unit.is_plain:
        _write_at_once(view, sequence, kv, kept, unit)
        return
    for i, (keys, values) in enumerate(zip(k, v, strict=True)):
        first = (sequence + i) * kv_heads
        a = max(first, view.start)
        b = min(first + kv_heads, view.end)
        if a >= b:
            continue
        heads = slice(a - first, b - first)
        rows = slice(a - view.start, b - view.start)
        # Packing and recording happen on the device of the slots, which may differ from the device
        # that computes prompts.
        here = k.device if view.whole is None and unit.is_plain else view.keys.device
        own = keys[:, heads].to(here), values[:, heads].to(here)
        positions = kept.positions[i, heads].to(here)
        if view.whole is not None:
            window = window_of(view.whole.slots.shape[1], int(unit.budgets.slots[sequence + i]))
            of_rows = view.whole.map(lambda t, rows=rows: t[rows])  # type: ignore[misc]
            keep_whole(
                of_rows, own[0][None], own[1][None], positions[None], 0, window, not unit.hadamard
            )
        if kept.positions.shape[-1] == n:
            put_first_columns(view, rows.start, rows.stop, *(t.transpose(0, 1) for t in own))
        else:
            index = positions * (b - a) + torch.arange(b - a, device=here).unsqueeze(1)
            chosen = (t.reshape(-1, width).index_select(0, index.flatten()) for t in own)
            put_first_columns(
                view, rows.start, rows.stop, *(t.view(b - a, -1, width) for t in chosen)
            )
        if view.metadata is not None:
            record_prompts(
                view.metadata,
                rows,
                kept,
                slice(i * kv_heads + heads.start, i * kv_heads + heads.stop),
            )


def _write_at_once(
    view: PartView,
    sequence: int,
    kv: tuple[torch.Tensor, torch.Tensor],
    kept: KeptColumns,
    unit: KVRows,
) -> None:
    """Do `write_prompts` in a few launches, one per run of rows with equally many whole columns."""
    most = 0 if view.whole is None else view.whole.slots.shape[1]
    end = sequence + len(kept.positions)
    windows = [window_of(most, held) for held in unit.budgets.slots[sequence:end].tolist()]
    first = 0
    for window, same in groupby(windows):
        some = slice(first, first + len(list(same)))
        start, stop = ((sequence + i) * unit.kv_heads for i in (some.start, some.stop))
        a = max(start, view.start)
        b = min(stop, view.end)
        first = some.stop
        if a >= b:
            continue
        scores = None if kept.scores is None or view.metadata is None else kept.scores[some]
        slots = _slots_of_prompts(view, a, b, start, unit, window)
        put_prompts(kv[0][some], kv[1][some], kept.positions[some], scores, slots)


def _slots_of_prompts(
    view: PartView, a: int, b: int, start: int, unit: KVRows, window: int = 0
) -> PromptSlots:
    """Return the unit's rows [a, b), all of them in the view, as PromptSlots.

    start: the unit's row at which the prompts begin.
    window: newest tokens that stay whole beside packed slots.
    """
    part = view.part(a - view.start, b - view.start, 0)
    positions, scores = (
        (None, None) if part.metadata is None else (part.metadata.positions, part.metadata.scores)
    )
    return PromptSlots(
        part.keys, part.values, a - start, part.form, window, positions, scores, not unit.hadamard
    )


def _write_packed(
    view: PartView,
    sequence: int,
    kv: Sequence[torch.Tensor],
    kept: KeptColumns,
    unit: KVRows,
    lines: triton.PromptPlaces,
) -> None:
    """Do `write_prompts` for prompts that are packed one behind the other.

    kv: keys and values, each (tokens, kv_heads, d). lines: one per prompt.
    """
    k, v = (t.unsqueeze(0) for t in kv)
    if are_put_together(k, view.keys) and unit.is_plain:
        start, stop = (i * unit.kv_heads for i in (sequence, sequence + len(lines)))
        a = max(start, view.start)
        b = min(stop, view.end)
        if a < b:
            slots = _slots_of_prompts(view, a, b, start, unit)
            scores = None if view.metadata is None else kept.scores
            put_prompts(k, v, kept.positions, scores, slots, lines)
        return
    for i, line in enumerate(lines):
        scores = None if kept.scores is None else kept.scores[..., line.tokens]
        own = KeptColumns(kept.positions[..., line.stays], scores, None)
        write_prompts(view, sequence + i, (k[:, line.tokens], v[:, line.tokens]), own, unit)


# ---- new tokens


def attend_slots(
    qkv: Sequence[torch.Tensor],
    rows: KVRows,
    new: NewColumns,
    scale: float,
    out: torch.Tensor,
    rotation: Rotation | None = None,
) -> torch.Tensor:
    """Store each row's new column, attend over the row's filled slots, and return `out`.

    The attention is written to `out`. Each part is computed on the device that holds it. If the
    policy scores columns, each slot's score grows by the attention that it received, and the next
    victim of each row is named.

    qkv: q (sequences, heads, d), k and v (sequences, kv_heads, d); all are changed in place if
    `rows.hadamard` is set.
    out: (sequences, heads x d).
    rotation: turns the keys by their ranks as they are read; None if keys are stored rotated.
    """
    q, k, v = qkv
    count = k.shape[0] * k.shape[1]
    width = k.shape[2]
    group = q.shape[1] // k.shape[1]
    sizes = (
        value_sizes(rows.policy.needs, v.view(count, width))
        if NORMS in rows.policy.needs.record
        else None
    )
    if rows.hadamard:
        for heads in qkv:
            hadamard(heads)
    q = q.view(count, group, width)
    attn_out = out.view(count, group, width)
    k = k.view(count, width)
    v = v.view(count, width)
    common = None if rows.common is None else _attend_common(rows.common, q, scale)
    sinks = rows.sinks_of_rows(len(new.positions))
    before = _in_front(common, sinks) if any(map(rows.is_one_launch, rows.views)) else None
    for view, slots in zip(rows.views, new.slots, strict=True):
        if rows.is_one_launch(view):
            slots_of_view = _step_slots(rows, view, new, slots, before)
            attend_step(qkv[0], qkv[1], qkv[2], slots_of_view, scale, out.view(qkv[0].shape))
            continue
        here = slice(view.start, view.end)
        where = view.keys.device
        queries, keys, values = (t[here].to(where) for t in (q, k, v))
        numbers = new.numbers.of_rows(rows.kv_heads, view.start, view.end, where)
        held = numbers.filled
        form = view.form if sinks is None else replace(view.form, sinks=sinks[here].to(where))
        put_columns(view, slots, keys, values, rows.whole_places(view, new.numbers))
        state = None
        if view.metadata is not None:
            of_values = None if sizes is None else sizes[here].to(where)
            record_columns(view.metadata, slots, numbers.positions, held, of_values)
            if rows.policy.needs.by_keys is not None:
                score_by_keys(view, rows, rows.policy.needs.by_keys, new.numbers)
            state = _score_state(rows, view, new.numbers)
        if common is not None:
            before_rows = common[0][here].to(where), common[1][here].to(where)
            own = attend_lse(queries, view.keys, view.values, held, scale, form.sinks)
            attn_out[here].copy_(joined(before_rows, own))
        elif rotation is not None:
            _attend_rolling(rotation, (queries, held, state, form), view, scale, attn_out[here])
        elif rows.attn_sparsity < 1:
            attn_out[here].copy_(
                attend_largest(
                    queries, view.keys, view.values, held, scale, rows.attn_sparsity, form
                )
            )
        else:
            attn_out[here].copy_(attend(queries, view.keys, view.values, held, scale, state, form))
    if rows.policy.needs.record and not rows.policy.needs.ranks_by_score:
        rank_victims(rows, new.positions, new.filled)
    if rows.hadamard:
        hadamard(out.view(qkv[0].shape))
    return out


def _step_slots(
    rows: KVRows, view: PartView, new: NewColumns, taken: torch.Tensor, before: InFront | None
) -> StepSlots:
    """Return the input of `attend_step` for one view.

    taken: (rows of the view,) int64, which `attend_step` fills with the slots of the new columns.
    before: attention in front of the slots, for all rows of the unit.
    """
    state = new.numbers.state(view.keys.device)
    found = StepSlots(
        view.keys,
        view.values,
        view.start,
        rows.kv_heads,
        state,
        taken,
        form=view.form,
        before=before,
    )
    if view.metadata is None:
        return found
    m = view.metadata
    needs = rows.policy.needs
    return replace(
        found,
        scores=m.scores,
        positions=m.positions,
        victims=m.victims,
        decay=needs.decay,
        per_query=needs.per_query,
    )


def _score_state(rows: KVRows, view: PartView, numbers: StepNumbers) -> ScoreState | None:
    """Return the scores of a view's rows, which the decode kernel updates.

    Returns None if no scores are recorded.
    """
    metadata = view.metadata
    where = view.keys.device
    if metadata is None or metadata.scores is None:
        return None
    of_rows = numbers.of_rows(rows.kv_heads, view.start, view.end, where)
    needs = rows.policy.needs
    return ScoreState(
        metadata.scores,
        metadata.positions,
        of_rows.oldest,
        of_rows.newest,
        needs.decay,
        of_rows.gains,
        metadata.victims,
        of_rows.positions if needs.per_query else None,
    )


def _attend_rolling(
    rotation: Rotation,
    rows: tuple[torch.Tensor, torch.Tensor, ScoreState | None, SlotForm],
    view: PartView,
    scale: float,
    out: torch.Tensor,
) -> None:
    """Write to `out` the attention of rows whose keys are rotated by their ranks.

    At most ROLLING_CHUNK numbers of keys are rotated at a time, but at least those of one row.

    rows: q, the filled slots of each row, the scores (or None) and the form of the slots.
    """
    q, filled, state, form = rows
    assert view.metadata is not None and view.metadata.ranks is not None
    (keys,) = view.keys
    slots = view.keys.shape[2]
    step = max(1, ROLLING_CHUNK // (slots * view.keys.shape[3]))
    for first in range(0, view.rows, step):
        here = slice(first, min(view.rows, first + step))
        rotated = rotation.rotated(keys[here], view.metadata.ranks[here]).unsqueeze(0)
        own = None if state is None else state.rows(here)
        out[here].copy_(
            attend(
                q[here], rotated, view.values[:, here], filled[here], scale, own, form.rows(here)
            )
        )


def _attend_common(common: PartView, q: torch.Tensor, scale: float) -> Pair:
    """Return attention (rows, g, d) over the common prefix and its log-sum-exp (rows, g) fp32.

    q: (rows, g, d).
    """
    rows, group, width = q.shape
    heads = common.keys.shape[1]
    by_head = q.view(-1, heads, group, width).transpose(0, 1).reshape(heads, -1, width)
    out, lse = attend_lse(by_head, common.keys, common.values, None, scale)
    out = out.view(heads, -1, group, width).transpose(0, 1).reshape(rows, group, width)
    return out, lse.view(heads, -1, group).transpose(0, 1).reshape(rows, group)


def _in_front(common: Pair | None, sinks: torch.Tensor | None) -> InFront | None:
    """Return what queries attend to in front of all slots, in the form of `StepSlots.before`.

    A sink counts as one more column, which has no value. Returns None if there is nothing.

    common: the result of `_attend_common`, or None. sinks: (rows, g) fp32, or None.
    """
    if common is None:
        return None if sinks is None else (None, sinks)
    if sinks is None:
        return common
    lse = torch.logaddexp(common[1], sinks)
    return (common[0] * torch.exp(common[1] - lse).unsqueeze(2)).to(common[0].dtype), lse
