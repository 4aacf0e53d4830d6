"""What the two kinds of cache layers share: whole prompts, then one token after the other.

Letters: b = sequences of the batch, n = tokens of a forward with padding, d = head width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin

from flexgen_h2o.errors import UsageError
from flexgen_h2o.kernels.causal import causal_attention, causal_attention_lse
from flexgen_h2o.kvcache.eviction.policy import NORMS, SCORES, Eviction
from flexgen_h2o.kvcache.hook import Hook, KeptColumns, keep_prompt_columns
from flexgen_h2o.kvcache.slots import RowSlots
from flexgen_h2o.kvcache.view import PartView, Record


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
        self.record: Record | None = None
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

    def _hook(self, kv_heads: int) -> Hook:
        assert self.rows is not None
        return Hook(self._policy, self._block, self.rows, kv_heads)

    def _view(self) -> PartView:
        """The slots as the engine sees them, one row for each (sequence, kv-head)."""
        assert self.keys is not None and self.values is not None
        return PartView(0, self.keys.flatten(0, 1)[None], self.values.flatten(0, 1)[None], self.record)

    def _empty_record(self, rows: int, slots: int) -> Record | None:
        wanted = self._policy.needs.record
        if not wanted:
            return None
        scores, norms = (
            torch.zeros(rows, slots, device=self.device) if name in wanted else None for name in (SCORES, NORMS)
        )
        positions = torch.full((rows, slots), -1, dtype=torch.int32, device=self.device)
        return Record(positions, torch.zeros(rows, dtype=torch.int32, device=self.device), scores, norms)

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
            fields = {name: getattr(self.record, name) for name in Record.__dataclass_fields__}
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
