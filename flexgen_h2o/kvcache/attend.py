"""The prefix that all rows of a block begin with: its KV columns in one copy, and decode attention over it and slots.

Its keys and values are held once a transformer block, where layers are computed; slots hold only the columns
behind them. The queries of all rows read the copy together: it is the slots of one row with as many queries (Hydragen,
Juravsky et al. 2024, arXiv 2402.05099). What they get is joined with what they get from their own slots by both
log-sum-exps.

Attention of one micro-batch against its KV unit: whole prompts, then one new token a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from flexgen_h2o.core.units import ROLLING_CHUNK, TOKEN_CHUNK
from flexgen_h2o.kernels.elementwise import Rotation
from flexgen_h2o.kernels.prefill_attention import causal_attention, causal_attention_lse
from flexgen_h2o.kernels.slots import ScoreState, attend, attend_lse, attend_packed, attend_scored
from flexgen_h2o.kvcache.evict import (
    EvictionStep,
    KeptColumns,
    ScoredPrefix,
    keep_prompt_columns,
    rank_victims,
    record_columns,
    record_prompt,
)
from flexgen_h2o.kvcache.prefixes import PromptGroup
from flexgen_h2o.kvcache.slots import NewColumn, PartView, put_columns, put_first_columns


@dataclass(frozen=True)
class CommonColumns:
    """Of one transformer block: the slots of as many rows as there are kv-heads, all of them filled.

    keys, values: (1, kv_heads, columns, d), rotated where the model has rotary embeddings. filled: (kv_heads,) int32.
    """

    keys: torch.Tensor
    values: torch.Tensor
    filled: torch.Tensor

    def put(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys, values: (1, columns, kv_heads, d), as prompts are packed."""
        self.keys.copy_(keys.transpose(1, 2))
        self.values.copy_(values.transpose(1, 2))

    def in_front(self) -> list[torch.Tensor]:
        """Keys and values as `put` takes them."""
        return [t.transpose(1, 2) for t in (self.keys, self.values)]

    def attend(self, q: torch.Tensor, scale: float) -> Attended:
        """q: (rows, g, d), each row a (sequence, kv-head)."""
        (rows, group, width), heads = q.shape, len(self.filled)
        together = q.view(-1, heads, group, width).transpose(0, 1).reshape(heads, -1, width)
        out, lse = attend_lse(together, self.keys, self.values, self.filled, scale)
        out = out.view(heads, -1, group, width).transpose(0, 1).reshape(rows, group, width)
        return Attended(out, lse.view(heads, -1, group).transpose(0, 1).reshape(rows, group))


@dataclass(frozen=True)
class Attended:
    """What queries got from some of their columns. out: (rows, g, d); lse: (rows, g) fp32."""

    out: torch.Tensor
    lse: torch.Tensor

    def rows(self, some: slice, where: torch.device) -> Attended:
        return Attended(self.out[some].to(where), self.lse[some].to(where))


def attend_behind(
    before: Attended, q: torch.Tensor, view: PartView, filled: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attention over the columns that `before` is of and a view's slots: (rows, g, d). q, filled: as of `attend`."""
    own, lse = attend_lse(q, view.keys, view.values, filled, scale)
    share = torch.sigmoid(before.lse - lse).unsqueeze(2)  # of exp(before.lse) in the sum of both
    return torch.lerp(own.float(), before.out.float(), share)


class CommonPrefix:
    """The columns of all transformer blocks in one buffer. Written by the first micro-batch of a block of rows."""

    def __init__(self, memory: torch.Tensor, dtype: torch.dtype, columns: int, shape: Sequence[int]) -> None:
        """memory: bytes, room for as many `columns` and more. shape: transformer blocks, kv-heads and d."""
        blocks, heads, width = shape
        copies = memory.view(dtype)[: 2 * blocks * heads * columns * width].view(blocks, 2, 1, heads, columns, width)
        filled = torch.full((heads,), columns, dtype=torch.int32, device=memory.device)
        self._blocks = [CommonColumns(keys, values, filled) for keys, values in copies]

    def at(self, block: int) -> CommonColumns:
        return self._blocks[block]


# (q, keys, values, filled, scale) -> (R, g, d); kernels/slots.py
SlotAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


def attend_prompts(
    qkv: Sequence[torch.Tensor], groups: Sequence[PromptGroup], views: Sequence[PartView], hook: EvictionStep,
    scale: float, out: torch.Tensor, stored_keys: torch.Tensor | None = None, common: CommonColumns | None = None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of packed prompts; the columns that the policy keeps go to slots 0, 1, ... of each row.

    stored_keys: what is kept in place of k, as it was before its rotary embeddings. common: of the full cache, where
    the columns of a group without rows go, and where the others find those in front of them.

    q: (tokens, heads, d); k, v: (tokens, kv_heads, d); out: (tokens, heads x d); all packed as `groups` say. Neighbours
    of equal length are computed together; nothing is ever padded.
    """
    attn_out = out.view(qkv[0].shape)
    packed = qkv if stored_keys is None else (*qkv, stored_keys)
    start = sequence = 0
    for group in groups:
        here = slice(start, start + group.tokens)
        _attend_group([t[here] for t in packed], group, sequence, views, hook, scale, attn_out[here], common)
        start, sequence = here.stop, sequence + group.rows
    return out


def _attend_group(
    packed: Sequence[torch.Tensor], group: PromptGroup, first: int, views: Sequence[PartView], hook: EvictionStep,
    scale: float, attn_out: torch.Tensor, common: CommonColumns | None,
) -> None:  # fmt: skip
    """`attend_prompts` for one group, the sequences `first`, `first` + 1, ... packed: q, k, v, and stored_keys if any.

    A shared prefix attends to itself once. The rows' own queries then see its columns in front of their own.
    """
    sequence, start = first, group.prefix
    prefix = [t[:start].unsqueeze(0) for t in packed]
    if group.common:
        assert common is not None
        columns = common.in_front()
        prefix[1:] = [torch.cat(pair, dim=1) for pair in zip(columns, prefix[1:], strict=True)] if start else columns
    scored = _attend_prefix(prefix, hook, scale, attn_out[:start]) if group.prefix else None
    if not group.rows:
        assert common is not None
        common.put(*prefix[1:])
    for number, count in _equal_rows(group):
        end = start + number * count
        queries, *columns = (t[start:end].view(number, count, t.shape[1], -1) for t in packed)
        if group.before:
            before = [t.expand(number, -1, -1, -1) for t in prefix[1:]]
            columns = [torch.cat(pair, dim=1) for pair in zip(before, columns, strict=True)]
        q, k, v = (t.transpose(1, 2) for t in (queries, *columns[:2]))
        lse = None
        if hook.scores_prompts:
            attended, lse = causal_attention_lse(q, k, v, scale)
        else:
            attended = causal_attention(q, k, v, scale)
        attn_out[start:end].view(queries.shape).copy_(attended.transpose(1, 2))
        own = [t[:, group.common :] for t in columns]  # all but what the common prefix's copy has
        k, v = (t[:, :, group.common :] for t in (k, v))
        kept = keep_prompt_columns(hook, sequence, (q, k, v), lse, scale, scored)
        for view in views:
            _write_prompts(view, sequence, own[2] if len(own) > 2 else own[0], own[1], kept)
        start, sequence = end, sequence + number


def _attend_prefix(
    prefix: Sequence[torch.Tensor], hook: EvictionStep, scale: float, attn_out: torch.Tensor
) -> ScoredPrefix | None:
    """Attention within a shared prefix, q, k and v of `prefix` (1, tokens, heads, d). None where nothing is scored."""
    q, k, v = (t.transpose(1, 2) for t in prefix[:3])
    if not hook.scores_prompts:
        attn_out.copy_(causal_attention(q, k, v, scale)[0].transpose(0, 1))
        return None
    attended, lse = causal_attention_lse(q, k, v, scale)
    attn_out.copy_(attended[0].transpose(0, 1))
    return ScoredPrefix(q, k, lse, scale)


def _equal_rows(group: PromptGroup) -> Iterator[tuple[int, int]]:
    """(rows, own tokens of each) of neighbours that are computed together.

    With a prefix their columns are put together anew, so there are at most TOKEN_CHUNK of them, or those of one row.
    """
    for count, same in groupby(group.own):
        left = len(list(same))
        most = max(1, TOKEN_CHUNK // (group.before + count)) if group.before else left
        while left:
            yield min(most, left), count
            left -= min(most, left)


def attend_slots(
    qkv: Sequence[torch.Tensor], new: NewColumn, slots: Sequence[torch.Tensor], views: Sequence[PartView],
    hook: EvictionStep, scale: float, attention: SlotAttention, out: torch.Tensor, rolling: Rotation | None = None,
    common: CommonColumns | None = None,
) -> torch.Tensor:  # fmt: skip
    """Put each row's new column into its slot and attend over its filled slots, part by part where the part lies.

    Where the policy scores, the slots' scores grow by what they received and each row's next victim is named. rolling:
    turns the keys by their ranks as they are read. common: of the full cache, columns that all rows have in front.

    q: (sequences, heads, d); k, v: (sequences, kv_heads, d); slots: of `EvictionStep.next_slots`; out:
    (sequences, heads x d).
    """
    q, k, v = qkv
    rows, width = k.shape[0] * k.shape[1], k.shape[2]
    group = q.shape[1] // k.shape[1]
    q, k, v, attn_out = (
        q.view(rows, group, width),
        k.view(rows, width),
        v.view(rows, width),
        out.view(rows, group, width),
    )
    before = None if common is None else common.attend(q, scale)
    past, filled = (t.repeat_interleave(hook.kv_heads) for t in (new.past, new.filled.int()))
    for view, taken in zip(views, slots, strict=True):
        here, where = slice(view.start, view.end), view.keys.device
        queries, keys, values = (t[here].to(where) for t in (q, k, v))
        put_columns(view, taken, keys, values)
        if view.record is not None:
            record_columns(view, taken, past[here].to(where), filled[here].to(where), values)
        seen = filled[here].to(where)
        scores = None if view.record is None else view.record.scores
        book = None if scores is None else _book(hook, view, scores, past[here], filled[here])
        if before is not None:
            attn_out[here].copy_(attend_behind(before.rows(here, where), queries, view, seen, scale))
        elif rolling is None:
            attn_out[here].copy_(_attend_view(queries, view, seen, scale, attention, book))
        else:
            _attend_rolling(rolling, queries, view, seen, scale, book, attn_out[here])
    if hook.policy.needs.record and not hook.policy.needs.ranks_by_score:
        rank_victims(hook, views, new)
    return out


def _attend_view(
    q: torch.Tensor, view: PartView, filled: torch.Tensor, scale: float, attention: SlotAttention,
    book: ScoreState | None,
) -> torch.Tensor:  # fmt: skip
    """`attention` is for the full cache that is not packed."""
    if view.packing is not None:
        return attend_packed(q, view.keys, view.values, filled, scale, view.packing, book)
    if book is None:
        return attention(q, view.keys, view.values, filled, scale)
    return attend_scored(q, view.keys, view.values, filled, scale, book)


def _attend_rolling(
    rotation: Rotation, q: torch.Tensor, view: PartView, filled: torch.Tensor, scale: float, book: ScoreState | None,
    out: torch.Tensor,
) -> None:  # fmt: skip
    """ROLLING_CHUNK numbers of keys are turned at a time, or those of one row."""
    assert view.record is not None and view.record.ranks is not None
    (keys,), slots = view.keys, view.keys.shape[2]
    for rows in torch.arange(view.rows).split(max(1, ROLLING_CHUNK // (slots * view.keys.shape[3]))):
        here = slice(int(rows[0]), int(rows[-1]) + 1)
        rotated = rotation.rotated(keys[here], view.record.ranks[here]).unsqueeze(0)
        columns = (q[here], rotated, view.values[:, here], filled[here], scale)
        out[here].copy_(attend(*columns) if book is None else attend_scored(*columns, book.rows(here)))


def _book(
    hook: EvictionStep, view: PartView, scores: torch.Tensor, past: torch.Tensor, filled: torch.Tensor
) -> ScoreState:
    """What the decode kernel needs to keep the scores of a view's rows; past, filled: (rows,) ints on the host."""
    assert view.record is not None
    needs, where = hook.policy.needs, view.keys.device
    sinks, recent = (
        t.repeat_interleave(hook.kv_heads)[view.start : view.end] for t in (hook.rows.sinks, hook.rows.recent)
    )
    oldest, newest = (t.int().to(where) for t in (sinks, past - recent))
    gains = needs.gain * (filled / (past + 1) if needs.even else torch.ones(len(past)))
    return ScoreState(
        scores, view.record.positions, oldest, newest, needs.decay, gains.float().to(where), view.record.victims
    )  # fmt: skip


def _write_prompts(view: PartView, sequence: int, k: torch.Tensor, v: torch.Tensor, kept: KeptColumns) -> None:
    """Put what is kept of prompts into the rows that the view has of them. k, v: (b, n, kv_heads, d)."""
    n, kv_heads, width = k.shape[1:]
    for i, (keys, values) in enumerate(zip(k, v, strict=True)):
        first = (sequence + i) * kv_heads
        a, b = max(first, view.start), min(first + kv_heads, view.end)
        if a >= b:
            continue
        heads, rows = slice(a - first, b - first), slice(a - view.start, b - view.start)
        if kept.positions.shape[-1] == n:
            put_first_columns(view, rows.start, rows.stop, *(t[:, heads].transpose(0, 1) for t in (keys, values)))
        else:
            positions = kept.positions[i, heads]
            index = positions * kv_heads + torch.arange(a - first, b - first, device=positions.device).unsqueeze(1)
            chosen = (t.reshape(-1, width).index_select(0, index.flatten()) for t in (keys, values))
            put_first_columns(view, rows.start, rows.stop, *(t.view(b - a, -1, width) for t in chosen))
        if view.record is not None:
            record_prompt(view, rows, kept, i, heads)
