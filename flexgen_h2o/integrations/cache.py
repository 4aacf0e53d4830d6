"""A transformers cache whose layers evict KV entries.

`EvictingLayer` drops KV entries, with the engine's own slots and decode kernels. `MaskingLayer` is
the papers' simulation, which masks evicted KV entries and saves no memory. Both take whole prompts,
then one token at a time.

Shapes: b = sequences of the batch, n = tokens of a forward with padding, d = head width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache, CacheLayerMixin

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.kvcache.budgets import Budgets, BudgetTable, DecodeStep
from flexgen_h2o.kvcache.decode import attend_slots
from flexgen_h2o.kvcache.eviction.of_model import OfModel
from flexgen_h2o.kvcache.eviction.policy import (
    EVERYTHING,
    POSITIONS,
    SCORES,
    Eviction,
    RowBudget,
)
from flexgen_h2o.kvcache.part import KVPart, KVUnit, Prompts
from flexgen_h2o.kvcache.prefill import causal, choose_columns, prompt_lines, write_prompts

# For each sequence, (first, count) of its tokens among the n; the others are padding.
Spans = Sequence[tuple[int, int]]


GROWTH = 64  # slots that are added at a time, if a budget is larger than what is held so far


class EvictingLayer(CacheLayerMixin):
    """The KV entries of one transformer block, as an eviction policy keeps them.

    A row has slots for sinks + heavy + recent + 1 KV entries, and a new entry overwrites the row's
    victim.

    transformers passes keys and values to `update`, and then calls the attention function, which
    calls `attend`. Queries are known only there, so KV entries are stored, scored and evicted
    there.

    keys, values: (b, kv_heads, slots, d) in the model's dtype.
    record: of each slot, in rows (sequence, kv-head), by field of KVPart.
    past: (b,) int64, the tokens of each sequence so far, without padding.
    """

    is_compileable = False
    is_croppable = False
    is_sliding = False
    _drops = True  # whether evicted KV entries are dropped; the full cache then needs no record

    def __init__(self, policy: Eviction, block: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers' has no types
        self._policy = policy
        self._block = block
        self.reset()

    def reset(self) -> None:
        """Empty the layer."""
        self.keys = self.values = None
        self.is_initialized = False
        self.record: dict[str, Any] = {}
        self.budgets: Budgets | None = None
        self.past = torch.zeros(0, dtype=torch.int64, device="cpu")
        self._seen = 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype = key_states.dtype
        self.device = key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return only the new KV entries: `attend` finds the others in this layer."""
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Return the number of tokens seen, with padding.

        Positions follow from it, not from the KV entries left.
        """
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._seen + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Raise UsageError: what was evicted for these tokens cannot come back."""
        raise UsageError(
            "assisted decoding takes tokens back, and evicted KV entries do not return; generate "
            "without it"
        )

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(
            torch.arange(len(self.past), device="cpu").repeat_interleave(repeats)
        )

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Move sequences `indices` to the places 0, 1, ..., with all their state."""
        if self.budgets is None or self.keys is None or self.values is None:
            return
        kv_heads = self.keys.shape[1]
        here = indices.cpu()
        there = indices.to(self.device)
        self.keys = self.keys.index_select(0, there)
        self.values = self.values.index_select(0, there)
        self.budgets = self.budgets.select(here)
        self.past = self.past[here]
        rows = (there[:, None] * kv_heads + torch.arange(kv_heads, device=self.device)).flatten()
        self.record = {name: t.index_select(0, rows) for name, t in self.record.items()}

    @property
    def nbytes(self) -> int:
        """The bytes of keys, values and the record."""
        held = [self.keys, self.values, *self.record.values()]
        return sum(t.numel() * t.element_size() for t in held if t is not None)

    def attend(
        self, qkv: Sequence[torch.Tensor], scale: float, spans: Spans, one_by_one: bool
    ) -> torch.Tensor:
        """Return the attention of new tokens, (b, n, heads, d), with 0 for padding.

        Add their KV entries, then evict.

        qkv: q (b, heads, n, d); k and v (b, kv_heads, n, d), rotated if the model rotates them.
        one_by_one: the tokens count as generated. Otherwise, if the cache is empty, they are a
        prompt.
        """
        q, k, v = qkv
        if not self.is_initialized:
            self.lazy_initialization(k, v)
        out = torch.zeros_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
        if self._seen == 0 and not one_by_one:
            self._attend_prompts(qkv, scale, spans, out)
        else:
            for i in range(q.shape[2]):
                is_token = torch.tensor(
                    [first <= i < first + count for first, count in spans], device="cpu"
                )
                new = tuple(t[:, :, i].contiguous() for t in qkv)
                out[:, i].copy_(self._attend_token(new, scale, is_token).view(out[:, i].shape))
                self.past = self.past + is_token
        self._seen += q.shape[2]
        return out

    def _attend_prompts(
        self, qkv: Sequence[torch.Tensor], scale: float, spans: Spans, out: torch.Tensor
    ) -> None:
        """Compute full causal attention of each prompt, and store the KV entries that the policy
        keeps.

        Neighbours with equal padding are computed together, without the padding. Padding never
        scores and is never kept.
        """
        batch, kv_heads, n, width = qkv[1].shape
        self._allocate(batch, kv_heads, self._prompt_slots(n), width)
        unit = self._unit()
        begin = 0
        for (first, count), same in groupby(spans):
            some = slice(begin, begin + len(list(same)))
            columns = slice(first, first + count)
            q, k, v = (t[some, :, columns] for t in qkv)
            attended, lse = causal(unit, q, k, v, scale)
            out[some, columns].copy_(attended.transpose(1, 2))
            lines = prompt_lines(unit, begin, [count] * len(q), is_packed=False)
            prompts = choose_columns(unit, Prompts(q, k, v, lse, scale, begin, lines))
            self._store_prompts(unit, prompts, first)
            begin = some.stop
        self.past = torch.tensor([count for _, count in spans], device="cpu")

    def _unit(self) -> KVUnit:
        """Return the slots in the engine's form, one row per (sequence, kv-head)."""
        assert self.budgets is not None and self.keys is not None and self.values is not None
        keys = self.keys.flatten(0, 1)[None]
        values = self.values.flatten(0, 1)[None]
        part = KVPart(0, keys, values, **self.record)
        count = len(self.past)
        return KVUnit(self._policy, self._block, self.keys.shape[1], self.budgets, [part], count)

    def _allocate(self, batch: int, kv_heads: int, slots: int, width: int) -> None:
        """Allocate empty slots, with position -1."""
        self.keys, self.values = (
            torch.zeros(batch, kv_heads, slots, width, dtype=self.dtype, device=self.device)
            for _ in range(2)
        )
        rows = batch * kv_heads
        wanted = self._policy.needs.record
        if not wanted and self._drops:
            return
        positions = torch.full((rows, slots), -1, dtype=torch.int32, device=self.device)
        victims = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self.record = {POSITIONS: positions, "victims": victims}
        if SCORES in wanted:
            self.record[SCORES] = torch.zeros(rows, slots, device=self.device, dtype=torch.float32)

    def _widen(self, more: int) -> None:
        """Add `more` slots of zeros."""
        assert self.keys is not None and self.values is not None
        self.keys, self.values = (F.pad(t, (0, 0, 0, more)) for t in (self.keys, self.values))
        self.record = {
            name: t if t.dim() == 1 else F.pad(t, (0, more)) for name, t in self.record.items()
        }

    def _prompt_slots(self, n: int) -> int:
        """Return the slots for what is kept of prompts of n tokens with padding."""
        assert self.budgets is not None
        return min(int(self.budgets.slots.max()), int(self.budgets.kept.max()) + GROWTH)

    def _store_prompts(self, unit: KVUnit, prompts: Prompts, first: int) -> None:
        """Store what is kept of prompts without padding, whose tokens begin at `first`."""
        kv = [t.transpose(1, 2) for t in (prompts.k, prompts.v)]
        write_prompts(unit.parts[0], unit, prompts, kv)

    def _attend_token(
        self, qkv: tuple[torch.Tensor, ...], scale: float, is_token: torch.Tensor
    ) -> torch.Tensor:
        """Return the attention of one token of each sequence, as b x heads x d numbers.

        qkv: q (b, heads, d); k and v (b, kv_heads, d).
        is_token: (b,) bool on the host, False if the token is padding.
        """
        assert self.budgets is not None and self.keys is not None and bool(is_token.all())
        slots = self.keys.shape[2]
        step = DecodeStep(self.budgets, self._policy.needs, self.past)
        if step.max_filled > slots:  # a large budget gets its memory only when it is needed
            self._widen(min(int(self.budgets.slots.max()), slots + max(GROWTH, slots // 4)) - slots)
        unit = self._unit()
        unit.begin(step)
        return attend_slots(qkv, unit, scale, torch.empty_like(qkv[0]).flatten(1))


class MaskingLayer(EvictingLayer):
    """Slot j holds KV entry j of the batch, with padding. Evicted KV entries have position -1."""

    _drops = False

    def _prompt_slots(self, n: int) -> int:
        return n

    def _store_prompts(self, unit: KVUnit, prompts: Prompts, first: int) -> None:
        assert self.keys is not None and self.values is not None and prompts.kept is not None
        k = prompts.k
        v = prompts.v
        some = slice(prompts.first, prompts.first + len(k))
        here = slice(first, first + k.shape[2])
        self.keys[some, :, here] = k
        self.values[some, :, here] = v
        positions = torch.full(k.shape[:3], -1, dtype=torch.int32, device=self.device)
        positions.scatter_(2, prompts.kept, prompts.kept.int())
        of_rows = slice(some.start * k.shape[1], some.stop * k.shape[1])
        if POSITIONS in self.record:
            self.record[POSITIONS][of_rows, here] = positions.flatten(0, 1)
        if SCORES in self.record and prompts.scores is not None:
            self.record[SCORES][of_rows, here] = prompts.scores.flatten(0, 1)

    def _attend_token(
        self, qkv: tuple[torch.Tensor, ...], scale: float, is_token: torch.Tensor
    ) -> torch.Tensor:
        q, k, v = qkv
        batch, kv_heads, width = k.shape
        if self.keys is None:
            self._allocate(batch, kv_heads, 0, width)
        self._widen(1)
        assert self.keys is not None and self.values is not None
        positions = self.record[POSITIONS]
        self.keys[:, :, -1] = k
        self.values[:, :, -1] = v
        positions[:, -1] = torch.where(is_token, self.past, -1).repeat_interleave(kv_heads).int()
        held = (positions >= 0).view(batch, kv_heads, 1, -1)
        products = (
            q.view(batch, kv_heads, -1, width).float() @ self.keys.float().transpose(-1, -2) * scale
        )
        # Padding attends to nothing.
        p = products.masked_fill(~held, -math.inf).softmax(-1).nan_to_num(0.0)
        filled = held.sum(-1)[:, 0, 0].cpu()  # each kv-head has as many
        if SCORES in self.record:
            self._add_scores(self.record[SCORES], p.sum(2).flatten(0, 1), filled, is_token)
        if self._policy.needs.record:
            self._evict(positions, self.record["victims"], filled)
        return (p @ self.values.float()).to(q.dtype)

    def _add_scores(
        self,
        scores: torch.Tensor,
        received: torch.Tensor,
        filled: torch.Tensor,
        is_token: torch.Tensor,
    ) -> None:
        """Add the attention that slots received to their scores. A padding token changes no score.

        scores, received: (rows, slots); received is 0 for masked slots.
        """
        needs = self._policy.needs
        gains = torch.full((len(self.past),), needs.gain, dtype=torch.float32, device="cpu")
        if needs.even:
            gains = gains * (filled.float() / (self.past + 1))
        kv_heads = len(scores) // len(gains)
        gain, real = (
            t.repeat_interleave(kv_heads)[:, None].to(scores.device) for t in (gains, is_token)
        )
        scores.copy_(torch.where(real, needs.decay * scores + gain * received, scores))

    def _evict(self, positions: torch.Tensor, victims: torch.Tensor, filled: torch.Tensor) -> None:
        """Mask one KV entry of each row that holds one more than its budget."""
        unit = self._unit()
        full = (filled >= unit.budgets.slots).repeat_interleave(unit.kv_heads).to(positions.device)
        if not bool(full.any()):
            return
        step = DecodeStep(unit.budgets, self._policy.needs, self.past)
        # Masked slots have a position that is never evicted.
        step.filled = torch.full_like(self.past, positions.shape[1])
        unit.begin(step)
        unit.evict()
        index = victims.long()[:, None]
        positions.scatter_(1, index, torch.where(full[:, None], -1, positions.gather(1, index)))


@dataclass(frozen=True, kw_only=True)
class LimitedGrowth(OfModel):
    """A policy with a kv_budget, in a model where prompts grow by a limited number of tokens.

    Its slots are those of sequences that grow without an end, so that no layer is full one step
    early.
    """

    most_new: int  # most tokens that are generated after a prompt
    positions: int  # positions of the model, which limit them further

    def new_tokens(self, prompt_len: int) -> int:
        """Return the most tokens that are generated after a prompt.

        The newest token needs no position.
        """
        return max(1, min(self.most_new, self.positions - prompt_len + 1))

    def budget(self, prompt_len: int, gen_len: int, block: int) -> RowBudget:
        return self.policy.budget(prompt_len, min(gen_len, self.new_tokens(prompt_len)), block)

    def slots(self, prompt_len: int, gen_len: int, block: int) -> int:
        drops = getattr(self.policy, "while_decoding", True)
        return self.budget(prompt_len, gen_len, block).columns + 1 if drops else EVERYTHING


MODES: Mapping[str, type[EvictingLayer]] = {"drop": EvictingLayer, "mask": MaskingLayer}


class EvictingCache(Cache):
    """The `past_key_values` of a model while eviction is enabled.

    eviction: a policy of `flexgen_h2o.kvcache.eviction`.
    num_layers: transformer blocks.
    mode: "drop" or "mask".
    keeps: False for a forward without a cache. Each layer is emptied after its attention then.
    """

    def __init__(
        self, eviction: Eviction, num_layers: int, mode: str = "drop", keeps: bool = True
    ) -> None:
        self._blocks = [MODES[mode](eviction, block) for block in range(num_layers)]
        super().__init__(layers=[*self._blocks])
        self._policy = eviction
        self._keeps = keeps
        self._table: BudgetTable | None = None
        self._spans: Spans | None = None  # spans of the current forward
        self._one_by_one = False

    @property
    def nbytes(self) -> int:
        """The bytes of keys, values and metadata."""
        return sum(layer.nbytes for layer in self._blocks)

    def arrive(
        self, sequences: int, tokens: int, attention_mask: torch.Tensor | None, one_by_one: bool
    ) -> None:
        """Begin a forward with (sequences, tokens) ids.

        attention_mask: (sequences, tokens seen so far + tokens), 0 for padding; None for no mask.
        one_by_one: as in `EvictingLayer.attend`.

        Raise UsageError for a mask that eviction cannot follow.
        """
        seen = self.get_seq_length()
        spans = [(0, tokens)] * sequences
        if attention_mask is not None:
            spans = _spans_of(attention_mask, seen + tokens)
            if seen and any(first + count != seen + tokens for first, count in spans):
                raise UsageError(
                    "attention_mask: tokens that follow on a cache are padding; pad on the left"
                )
            spans = [(0, tokens)] * sequences if seen else spans
        if not seen:
            # A text that is scored is a whole sequence. A prompt may be followed by any number of
            # tokens.
            more = 0 if one_by_one and isinstance(self._policy, LimitedGrowth) else EVERYTHING
            self._table = BudgetTable(
                self._policy, [(count, more) for _, count in spans], len(self._blocks)
            )
        elif isinstance(self._policy, LimitedGrowth):
            self._check_promise(self._policy, tokens)
        self._spans = spans
        self._one_by_one = one_by_one

    def _check_promise(self, policy: LimitedGrowth, tokens: int) -> None:
        """Raise UsageError if `tokens` more tokens, and one generated after each forward, exceed
        the promise.
        """
        layer = self._blocks[0]
        assert layer.budgets is not None
        new = layer.past + tokens - layer.budgets.prompts + 1
        for prompt, wanted in zip(layer.budgets.prompts.tolist(), new.tolist(), strict=True):
            if wanted > policy.new_tokens(prompt):
                raise UsageError(
                    f"max_new_tokens: a prompt of {prompt} tokens was to grow by at most "
                    f"{policy.new_tokens(prompt)} "
                    f"(max_new_tokens {policy.most_new}, {policy.positions} positions), and a "
                    "share of these is kept; "
                    "enable eviction with a larger number, or generate fewer"
                )

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return only the new KV entries.

        Raise UsageError if the evicting attention will not follow.
        """
        if self._spans is None:
            raise UsageError(
                "past_key_values: made while eviction was enabled, which it is no longer; give a "
                "new one"
            )
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def attend(self, block: int, qkv: Sequence[torch.Tensor], scale: float) -> torch.Tensor:
        """Return the attention of the new tokens in one block, as `EvictingLayer.attend` does."""
        assert self._table is not None and self._spans is not None
        layer = self._blocks[block]
        if layer.budgets is None:
            layer.budgets = self._table.at(block)
            layer.past = torch.zeros_like(layer.budgets.prompts)
        out = layer.attend(qkv, scale, self._spans, self._one_by_one)
        if not self._keeps:
            layer.reset()
        if block == len(self._blocks) - 1:
            self._spans = None
        return out


def _spans_of(mask: torch.Tensor, length: int) -> list[tuple[int, int]]:
    """Return (first, count) of the tokens of each sequence."""
    if mask.dim() != 2 or mask.shape[1] != length:
        raise UsageError(
            f"attention_mask: shape {tuple(mask.shape)}, but eviction needs (sequences, {length})"
        )
    real = mask.cpu() != 0
    counts = real.sum(1)
    firsts = real.int().argmax(1)
    lasts = length - real.flip(1).int().argmax(1)
    if bool((counts == 0).any()):
        raise UsageError(
            f"attention_mask: sequence {int(counts.argmin())} is nothing but padding; give it a "
            "token"
        )
    if bool((lasts - firsts != counts).any()):
        raise UsageError(
            "attention_mask: padding between the tokens of a sequence; put it on the left"
        )
    return list(zip(firsts.tolist(), counts.tolist(), strict=True))
