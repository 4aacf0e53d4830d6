"""What the two kinds of cache layers share: whole prompts, then one token after the other.

Letters: b = sequences of the batch, n = tokens of a forward with padding, d = head width.

A cache layer that drops columns: the engine's own slots, hook and decode kernels, on transformers' tensors.

A cache layer that only masks: the papers' simulation. It keeps every column and saves nothing.

A transformers cache of evicting layers, and what its sequences bring in each forward.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache, CacheLayerMixin

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.kernels.prefill_attention import causal_attention, causal_attention_lse
from flexgen_h2o.kernels.slots import attend
from flexgen_h2o.kvcache.attend import attend_slots
from flexgen_h2o.kvcache.evict import EvictionStep, KeptColumns, keep_prompt_columns, rank_victims, record_prompt
from flexgen_h2o.kvcache.eviction.policy import EVERYTHING, NORMS, SCORES, Eviction
from flexgen_h2o.kvcache.slots import NewColumn, PartView, RowSlots, SlotMetadata, SlotTable, new_columns


@dataclass(frozen=True)
class Arriving:
    """The tokens of one forward. spans: of each sequence, (first, count) of its tokens among the n; others are padding.

    one_by_one: they join as if they were generated; otherwise, where the cache is empty, they are a prompt.
    """

    spans: Sequence[tuple[int, int]]
    one_by_one: bool


class EvictingLayer(CacheLayerMixin):
    """The KV columns of one transformer block, as an eviction policy keeps them.

    transformers gives keys and values to `update` and then calls the attention function, which calls `attend`: only
    there the queries are known, so only there columns are stored, scored and evicted.

    keys, values: (b, kv_heads, slots, d) in the model's dtype. record: what the policy knows of each slot, its rows
    (sequence, kv-head); None for the full cache. past: (b,) int64, the tokens of each sequence so far, without padding.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, policy: Eviction, block: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' has no types
        self._policy, self._block = policy, block
        self.reset()

    def reset(self) -> None:
        """Empty, as new."""
        self.keys = self.values = None
        self.is_initialized = False
        self.record: SlotMetadata | None = None
        self.rows: RowSlots | None = None
        self.past = torch.zeros(0, dtype=torch.int64)
        self._seen = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new columns alone: `attend` finds the others here."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens seen, with padding: positions follow from them, not from the columns that are left."""
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Raises UsageError: what was evicted for these tokens cannot come back."""
        raise UsageError("assisted decoding takes tokens back, and evicted columns do not return: generate without it")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(torch.arange(len(self.past)).repeat_interleave(repeats))

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and record."""
        held = [self.keys, self.values, *(self.record.tensors() if self.record is not None else [])]
        return sum(t.numel() * t.element_size() for t in held if t is not None)

    def begin(self, rows: RowSlots) -> None:
        """Sequences with these budgets come; called once, before the first `attend`."""
        self.rows, self.past = rows, torch.zeros_like(rows.prompts)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, arriving: Arriving
    ) -> torch.Tensor:
        """Attention of new tokens, whose columns join; then the policy evicts.

        q: (b, heads, n, d); k, v: (b, kv_heads, n, d), rotated where the model rotates. Returns (b, n, heads, d), 0
        for padding.
        """
        if not self.is_initialized:
            self.lazy_initialization(k, v)
        out = torch.zeros_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
        if self._seen == 0 and not arriving.one_by_one:
            self._attend_prompts((q, k, v), scale, arriving.spans, out)
        else:
            for i in range(q.shape[2]):
                joins = torch.tensor([first <= i < first + count for first, count in arriving.spans])
                new = (t[:, :, i].contiguous() for t in (q, k, v))
                out[:, i].copy_(self._attend_token(tuple(new), scale, joins).view(out[:, i].shape))
                self.past = self.past + joins
        self._seen += q.shape[2]
        return out

    def _attend_prompts(
        self, qkv: Sequence[torch.Tensor], scale: float, spans: Sequence[tuple[int, int]], out: torch.Tensor
    ) -> None:
        """Full causal attention of each prompt over itself; what the policy keeps of it is stored.

        Neighbours of equal padding are computed together, without it: it never scores and is never kept.
        """
        hook, begin = self._hook(qkv[1].shape[1]), 0
        self._make_room(qkv[1])
        for (first, count), same in groupby(spans):
            some, columns = slice(begin, begin + len(list(same))), slice(first, first + count)
            q, k, v = (t[some, :, columns] for t in qkv)
            lse = None
            if hook.scores_prompts:
                attended, lse = causal_attention_lse(q, k, v, scale)
            else:
                attended = causal_attention(q, k, v, scale)
            out[some, columns].copy_(attended.transpose(1, 2))
            self._store_prompts(some, first, k, v, keep_prompt_columns(hook, begin, (q, k, v), lse, scale))
            begin = some.stop
        self.past = torch.tensor([count for _, count in spans])

    def _hook(self, kv_heads: int) -> EvictionStep:
        assert self.rows is not None
        return EvictionStep(self._policy, self._block, self.rows, kv_heads)

    def _view(self) -> PartView:
        """The slots as the engine sees them, one row for each (sequence, kv-head)."""
        assert self.keys is not None and self.values is not None
        return PartView(0, self.keys.flatten(0, 1)[None], self.values.flatten(0, 1)[None], self.record)

    def _empty_record(self, rows: int, slots: int) -> SlotMetadata | None:
        wanted = self._policy.needs.record
        if not wanted:
            return None
        scores, norms = (
            torch.zeros(rows, slots, device=self.device) if name in wanted else None for name in (SCORES, NORMS)
        )
        positions = torch.full((rows, slots), -1, dtype=torch.int32, device=self.device)
        return SlotMetadata(positions, torch.zeros(rows, dtype=torch.int32, device=self.device), scores, norms)

    def _select(self, index: torch.Tensor) -> None:
        """Sequences `index` take the places 0, 1, ..., with all that is known of them."""
        if self.rows is None or self.keys is None or self.values is None:
            return
        kv_heads, here, there = self.keys.shape[1], index.cpu(), index.to(self.device)
        self.keys, self.values = self.keys.index_select(0, there), self.values.index_select(0, there)
        self.past = self.past[here]
        self.rows = RowSlots(*(getattr(self.rows, name)[here] for name in RowSlots.__dataclass_fields__))
        if self.record is not None:
            rows = (there[:, None] * kv_heads + torch.arange(kv_heads, device=self.device)).flatten()
            fields = {name: getattr(self.record, name) for name in SlotMetadata.__dataclass_fields__}
            self.record = replace(
                self.record, **{name: t.index_select(0, rows) for name, t in fields.items() if t is not None}
            )

    @abstractmethod
    def _make_room(self, k: torch.Tensor) -> None:
        """Storage for what is kept of prompts; k: (b, kv_heads, n, d)."""

    @abstractmethod
    def _store_prompts(self, some: slice, first: int, k: torch.Tensor, v: torch.Tensor, kept: KeptColumns) -> None:
        """Of the sequences `some`, whose tokens begin at `first`: k, v (some, kv_heads, count, d), without padding."""

    @abstractmethod
    def _attend_token(self, qkv: tuple[torch.Tensor, ...], scale: float, joins: torch.Tensor) -> torch.Tensor:
        """One token of each sequence: q (b, heads, d), k and v (b, kv_heads, d). Returns b x heads x d numbers.

        joins: (b,) bool on the host, False where the token is padding.
        """


GROWTH = 64  # slots that are added at a time, where a budget is larger than what is held so far


class DroppingLayer(EvictingLayer):
    """Slots for sinks + heavy + recent + 1 columns a row; a new column overwrites the row's victim."""

    def _make_room(self, k: torch.Tensor) -> None:
        assert self.rows is not None
        batch, kv_heads, _, width = k.shape
        slots = min(int(self.rows.slots.max()), int(self.rows.kept.max()) + GROWTH)
        self.keys, self.values = (
            torch.zeros(batch, kv_heads, slots, width, dtype=self.dtype, device=self.device) for _ in range(2)
        )
        self.record = self._empty_record(batch * kv_heads, slots)

    def _grow(self, filled: int) -> None:
        """Room for `filled` slots: a large budget does not take its memory before it is needed."""
        assert self.rows is not None and self.keys is not None and self.values is not None
        held = self.keys.shape[2]
        if filled <= held:
            return
        more = min(int(self.rows.slots.max()), held + max(GROWTH, held // 4)) - held
        self.keys, self.values = (F.pad(t, (0, 0, 0, more)) for t in (self.keys, self.values))
        if self.record is not None:
            wide = {name: getattr(self.record, name) for name in ("positions", "scores", "norms")}
            self.record = replace(
                self.record, **{name: F.pad(t, (0, more)) for name, t in wide.items() if t is not None}
            )

    def _store_prompts(self, some: slice, first: int, k: torch.Tensor, v: torch.Tensor, kept: KeptColumns) -> None:
        assert self.keys is not None and self.values is not None
        kv_heads, count, width = k.shape[1], kept.positions.shape[-1], k.shape[3]
        index = kept.positions.unsqueeze(-1).expand(*kept.positions.shape, width)
        for home, columns in ((self.keys, k), (self.values, v)):
            home[some, :, :count] = columns.gather(2, index)
        if self.record is not None:
            for i in range(some.stop - some.start):
                row = (some.start + i) * kv_heads
                record_prompt(self._view(), slice(row, row + kv_heads), kept, i, slice(None))

    def _attend_token(self, qkv: tuple[torch.Tensor, ...], scale: float, joins: torch.Tensor) -> torch.Tensor:
        assert self.rows is not None and bool(joins.all())
        new = new_columns(self.rows, self.past)
        self._grow(int(new.filled.max()))
        view, hook = self._view(), self._hook(qkv[1].shape[1])
        out = torch.empty_like(qkv[0]).flatten(1)
        return attend_slots(qkv, new, hook.next_slots([view], new), [view], hook, scale, attend, out)


class MaskingLayer(EvictingLayer):
    """Slot j holds column j of the batch, padding and all; columns that were evicted have position -1."""

    def _make_room(self, k: torch.Tensor) -> None:
        batch, kv_heads, n, _ = k.shape
        self.keys, self.values = torch.zeros_like(k), torch.zeros_like(k)
        self.record = self._empty_record(batch * kv_heads, n)

    def _empty_record(self, rows: int, slots: int) -> SlotMetadata:
        """Also where the policy has no use for one: positions are the mask."""
        positions = torch.full((rows, slots), -1, dtype=torch.int32, device=self.device)
        victims = torch.zeros(rows, dtype=torch.int32, device=self.device)
        return super()._empty_record(rows, slots) or SlotMetadata(positions, victims)

    def _store_prompts(self, some: slice, first: int, k: torch.Tensor, v: torch.Tensor, kept: KeptColumns) -> None:
        assert self.keys is not None and self.values is not None and self.record is not None
        here = slice(first, first + k.shape[2])
        self.keys[some, :, here], self.values[some, :, here] = k, v
        positions = torch.full(k.shape[:3], -1, dtype=torch.int32, device=self.device)
        positions.scatter_(2, kept.positions, kept.positions.int())
        of_rows = slice(some.start * k.shape[1], some.stop * k.shape[1])
        for target, values in (
            (self.record.positions, positions), (self.record.scores, kept.scores), (self.record.norms, kept.norms),
        ):  # fmt: skip
            if target is not None and values is not None:
                target[of_rows, here] = values.flatten(0, 1)

    def _attend_token(self, qkv: tuple[torch.Tensor, ...], scale: float, joins: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv
        batch, kv_heads, width = k.shape
        record = self._append(k, v, joins)
        assert self.keys is not None and self.values is not None and self.rows is not None
        held = (record.positions >= 0).view(batch, kv_heads, 1, -1)
        products = q.view(batch, kv_heads, -1, width).float() @ self.keys.float().transpose(-1, -2) * scale
        p = products.masked_fill(~held, -math.inf).softmax(-1).nan_to_num(0.0)  # padding sees nothing
        filled = held.sum(-1)[:, 0, 0].cpu()  # as many in each kv-head
        if record.scores is not None:
            self._add(record.scores, p.sum(2).flatten(0, 1), filled, joins)
        if self._policy.needs.record:
            self._evict(record, filled, kv_heads)
        return (p @ self.values.float()).to(q.dtype)

    def _append(self, k: torch.Tensor, v: torch.Tensor, joins: torch.Tensor) -> SlotMetadata:
        """The new columns in a slot of their own, with score 0; the record with them."""
        batch, kv_heads, _ = k.shape
        if self.keys is None or self.values is None or self.record is None:
            self._make_room(k[:, :, None][:, :, :0])
        assert self.keys is not None and self.values is not None and self.record is not None
        self.keys, self.values = (
            torch.cat([old, new[:, :, None]], dim=2) for old, new in ((self.keys, k), (self.values, v))
        )
        new = self._empty_record(batch * kv_heads, 1)
        new.positions[:, 0] = torch.where(joins, self.past, -1).repeat_interleave(kv_heads).int()
        if new.norms is not None:
            new.norms[:, 0] = v.float().norm(dim=-1).flatten()
        fields = {
            name: torch.cat([getattr(self.record, name), getattr(new, name)], dim=1)
            for name in ("positions", SCORES, NORMS)
            if getattr(new, name) is not None
        }
        self.record = SlotMetadata(victims=new.victims, **fields)
        return self.record

    def _add(self, scores: torch.Tensor, received: torch.Tensor, filled: torch.Tensor, joins: torch.Tensor) -> None:
        """scores, received: (rows, slots), received being 0 where masked; a padding token leaves scores as they are."""
        needs = self._policy.needs
        gains = needs.gain * (filled / (self.past + 1) if needs.even else torch.ones(len(self.past)))
        kv_heads = len(scores) // len(gains)
        gain, real = (t.repeat_interleave(kv_heads)[:, None].to(scores.device) for t in (gains.float(), joins))
        scores.copy_(torch.where(real, needs.decay * scores + gain * received, scores))

    def _evict(self, record: SlotMetadata, filled: torch.Tensor, kv_heads: int) -> None:
        """Mask one column of each row that holds one more than its budget."""
        assert self.rows is not None
        full = (filled >= self.rows.slots).repeat_interleave(kv_heads).to(record.positions.device)
        if not bool(full.any()):
            return
        every = torch.full_like(
            self.past, record.positions.shape[1]
        )  # what is not held has a position that no policy drops
        rank_victims(self._hook(kv_heads), [self._view()], NewColumn(self.past, every, every))
        victims = record.victims.long()[:, None]
        gone = torch.where(full[:, None], -1, record.positions.gather(1, victims))
        record.positions.scatter_(1, victims, gone)


MODES: Mapping[str, type[EvictingLayer]] = {"drop": DroppingLayer, "mask": MaskingLayer}


class EvictingCache(Cache):
    """What `past_key_values` is while eviction is enabled.

    eviction: a policy of `flexgen_h2o.kvcache.eviction`. num_layers: transformer blocks. mode: "drop" or "mask".
    keeps: False for a forward without a cache; each layer is emptied after its attention.
    """

    def __init__(self, eviction: Eviction, num_layers: int, mode: str = "drop", keeps: bool = True) -> None:
        self._blocks = [MODES[mode](eviction, block) for block in range(num_layers)]
        super().__init__(layers=[*self._blocks])
        self._policy, self._keeps = eviction, keeps
        self._table: SlotTable | None = None
        self._arriving: Arriving | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and of what the policy records of them."""
        return sum(layer.nbytes for layer in self._blocks)

    def arrive(self, sequences: int, tokens: int, attention_mask: torch.Tensor | None, one_by_one: bool) -> None:
        """A forward with (sequences, tokens) ids begins.

        attention_mask: (sequences, tokens seen so far + tokens), 0 for padding; None for none. one_by_one: as in
        `Arriving`. Raises UsageError for a mask that eviction cannot follow.
        """
        seen = self.get_seq_length()
        spans = [(0, tokens)] * sequences
        if attention_mask is not None:
            spans = _spans(attention_mask, seen + tokens)
            if seen and any(first + count != seen + tokens for first, count in spans):
                raise UsageError("attention_mask: tokens that follow on a cache are padding; pad on the left")
            spans = [(0, tokens)] * sequences if seen else spans
        if not seen:
            self._table = SlotTable(self._policy, [(count, EVERYTHING) for _, count in spans], len(self._blocks))
        self._arriving = Arriving(spans, one_by_one)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new columns alone. Raises UsageError where no attention of ours will follow."""
        if self._arriving is None:
            raise UsageError("past_key_values: made while eviction was enabled, which it is no longer; give a new one")
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def attend(self, block: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        """Attention of the tokens that arrived, in one block: `EvictingLayer.attend`."""
        assert self._table is not None and self._arriving is not None
        layer = self._blocks[block]
        if layer.rows is None:
            layer.begin(self._table.at(block, range(len(q))))
        out = layer.attend(q, k, v, scale, self._arriving)
        if not self._keeps:
            layer.reset()
        if block == len(self._blocks) - 1:
            self._arriving = None
        return out


def _spans(mask: torch.Tensor, length: int) -> list[tuple[int, int]]:
    """(first, count) of the tokens of each sequence."""
    if mask.dim() != 2 or mask.shape[1] != length:
        raise UsageError(f"attention_mask: shape {tuple(mask.shape)}, but eviction needs (sequences, {length})")
    real = mask.cpu() != 0
    counts, firsts = real.sum(1), real.int().argmax(1)
    lasts = length - real.flip(1).int().argmax(1)
    if bool((counts == 0).any()):
        raise UsageError(f"attention_mask: sequence {int(counts.argmin())} is nothing but padding")
    if bool((lasts - firsts != counts).any()):
        raise UsageError("attention_mask: padding between the tokens of a sequence; put it on the left")
    return list(zip(firsts.tolist(), counts.tolist(), strict=True))
