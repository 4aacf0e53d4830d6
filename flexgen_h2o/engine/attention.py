"""Attention of one micro-batch in one layer.

Sequences that decode come first and feed their newest tokens. Behind them are sequences that enter
and feed their prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch

from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.engine.generation import SweepInput
from flexgen_h2o.kernels.elementwise import Rotation
from flexgen_h2o.kernels.workspace import some_rows
from flexgen_h2o.kvcache.attend import attend_prompts, attend_slots
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.eviction.of_model import Window
from flexgen_h2o.kvcache.eviction.policy import is_rolling
from flexgen_h2o.kvcache.rows import RowBudgets, SlotTable, StepNumbers, copied_together
from flexgen_h2o.kvcache.slots import KVRows, NewColumns, PartView, split_views
from flexgen_h2o.models import Attention, Hidden, Queries, end_attention


@dataclass(frozen=True)
class CacheStep:
    """A KV unit while its layer is computed. UnitAttention.open makes it.

    The sequences that decode come first, and behind them those that enter with prompts.
    """

    # As CacheStore.open returned it: whether the whole unit is stored afterwards.
    store_whole: bool
    # The sequences that decode; None if there are none.
    decoding: KVRows | None
    # The sequences that enter with prompts; None if there are none.
    entering: KVRows | None
    # The new KV entries of the decode steps so far. Those of the first step are known before
    # attention; `attend` appends the others.
    new: list[NewColumns]

    @property
    def held(self) -> int:
        """Slots in use of all sequences, once the layer is computed."""
        decoded = self.new[-1].numbers.held if self.new else 0
        return decoded + (0 if self.entering is None else int(self.entering.budgets.kept.sum()))

    @property
    def most(self) -> int:
        """Slots in use of the fullest sequence, once the layer is computed."""
        decoded = self.new[-1].numbers.most if self.new else 0
        return max(decoded, 0 if self.entering is None else int(self.entering.budgets.kept.max()))

    @property
    def read(self) -> int:
        """KV entries that attention of the decoding sequences reads, in all steps."""
        return sum(new.numbers.held for new in self.new)

    @property
    def slots_to_store(self) -> Sequence[torch.Tensor] | None:
        """The only slots that have changed; None if more than these have changed."""
        return self.new[0].slots if len(self.new) == 1 and not self.store_whole else None


# By the budgets and the window of a transformer block.
NumbersOfSweep = dict[tuple[RowBudgets, int | None], StepNumbers]
Begin = Callable[[torch.Tensor], tuple[torch.Tensor, Attention]]
Attend = Callable[[SweepInput, torch.Tensor, Queries], None]


class JoinedAttention:
    """An attention layer of neighbouring micro-batches, or of one micro-batch in parts.

    Queries and outputs of several micro-batches are computed for all of them at once. Parts of one
    micro-batch are each computed alone (BlockShape.attending). Micro-batches attend one after
    another, each to its own KV unit.

    run: the micro-batches.
    hidden: the hidden states of them all.
    begin: takes hidden states (tokens, hidden). Returns memory for the results of attention,
        (tokens, heads x d), and the attention of the layer.
    """

    def __init__(self, run: tuple[int, ...], hidden: Hidden, begin: Begin) -> None:
        self.run = run
        self.hidden = hidden
        self._begin = begin
        # Indices of tokens: the first one of the part that has begun, and the next one to attend.
        self._first_token = self._next_token = 0

    def attend(self, parts: Sequence[SweepInput], attend: Attend) -> None:
        """Run the attention of the next micro-batch."""
        for part in parts:
            if self._next_token == self._first_token:
                end = self._next_token + len(part.ids) if len(parts) > 1 else len(self.hidden.x)
                self._out, self._attention = self._begin(
                    some_rows(self.hidden.x, slice(self._first_token, end))
                )
                self._queries = next(self._attention)
            start = self._next_token - self._first_token
            here = slice(start, start + len(part.ids))
            q, k, v, sinks = self._queries
            attend(
                part,
                some_rows(self._out, here),
                Queries(some_rows(q, here), some_rows(k, here), some_rows(v, here), sinks),
            )
            self._next_token += len(part.ids)
            if here.stop == len(self._out):
                end_attention(self._attention, self._out)
                self._first_token = self._next_token


class UnitAttention:
    """Attention of a run: over the slots of sequences, and over prompts.

    common: by transformer block, the KV entries that all sequences begin with, if the full cache
        holds them in one copy.
    """

    def __init__(
        self,
        spec: ModelSpec,
        eviction: Eviction,
        policy: Policy,
        device: torch.device,
        common: Sequence[PartView] | None = None,
    ) -> None:
        self._spec = spec
        self._eviction = eviction
        self._kv_heads = spec.num_kv_heads
        self._common = common
        self._sparsity = policy.attn_sparsity
        self._num_whole_entries = policy.cache_window if policy.compress_cache else 0
        self._hadamard = policy.compress_cache and policy.cache_rotation
        self._scale = spec.head_dim**-0.5
        self._rotation: Rotation | None = None
        self._device = device
        self._numbers: WeakKeyDictionary[SlotTable, tuple[SweepInput, NumbersOfSweep]] = (
            WeakKeyDictionary()
        )
        if spec.rotary is not None:
            frequencies = torch.tensor(spec.rotary.frequencies, dtype=torch.float32, device=device)
            self._rotation = Rotation(frequencies, spec.rotary.scaling)

    def inputs(self, table: SlotTable, fed: SweepInput) -> list[torch.Tensor]:
        """Return the tensors that tell a GPU about a decode step of these sequences.

        All blocks read them.
        """
        self._step_numbers(0, table, fed)
        states = [numbers.state(self._device) for numbers in self._numbers[table][1].values()]
        return states if self._rotation is None else [*states, fed.positions]

    def open(
        self,
        block: int,
        table: SlotTable,
        fed: SweepInput,
        views: Sequence[PartView],
        store_whole: bool,
    ) -> CacheStep:
        """Return the KV unit of transformer block `block`, whose sequences are fed `fed`.

        table: the budgets of the sequences.
        views, store_whole: returned by `CacheStore.open`.
        """
        first = fed.decoding
        decoding = None
        entering = None
        budgets = table.at(block)
        window = self._spec.window(block)
        policy = self._policy(block)
        common = self._common[block] if self._common is not None else None
        before, behind = split_views(views, first * self._kv_heads)
        new: list[NewColumns] = []
        if before:
            of_rows = budgets.select(slice(0, first))
            beside = common if window is None else None
            decoding = KVRows(
                policy,
                block,
                self._kv_heads,
                of_rows,
                before,
                beside,
                window=window,
                hadamard=self._hadamard,
                attn_sparsity=self._sparsity if window is None else 1.0,
            )
            new.append(decoding.new_columns(self._step_numbers(block, table, fed)))
        if behind:
            assert store_whole  # a prompt changes more than one slot
            of_rows = budgets.select(slice(first, None))
            entering = KVRows(
                policy,
                block,
                self._kv_heads,
                of_rows,
                behind,
                common,
                window=window,
                hadamard=self._hadamard,
            )
        return CacheStep(store_whole, decoding, entering, new)

    def _policy(self, block: int) -> Eviction:
        window = self._spec.window(block)
        return self._eviction if window is None else Window(window)

    def _step_numbers(self, block: int, table: SlotTable, fed: SweepInput) -> StepNumbers:
        """Return the numbers of the first decode step.

        They are computed for all blocks at the first block of a sweep, once for blocks with equal
        budgets. They are copied to a GPU together.
        """
        key = (table.at(block), self._spec.window(block))
        known, made = self._numbers.get(table, (None, {}))
        if known is not fed or key not in made:
            past = torch.tensor(fed.past[: fed.decoding], device="cpu")
            made = {}
            for b in range(self._spec.num_blocks):
                budgets = table.at(b)
                window = self._spec.window(b)
                if (budgets, window) not in made:
                    own = budgets.select(slice(0, fed.decoding))
                    needs = self._policy(b).needs
                    positions = past if window is None else past + fed.common
                    made[budgets, window] = StepNumbers(
                        own, needs, positions, self._num_whole_entries
                    )
            copied_together(list(made.values()))
            self._numbers[table] = fed, made
        return made[key]

    def attend(
        self, cache: CacheStep, fed: SweepInput, out: torch.Tensor, queries: Queries
    ) -> None:
        """Run the attention of a micro-batch or a part of one.

        out: (tokens, heads x d), filled here.
        queries: queries, keys and values in packed order. They are changed in place.
        """
        *qkv, sinks = queries
        first = fed.decoding * fed.steps
        rows, entering = (
            of if of is None or sinks is None else replace(of, sinks=sinks)
            for of in (cache.decoding, cache.entering)
        )
        if rows is not None and fed.decoding:
            for step in range(fed.steps):
                if step:
                    cache.new.append(
                        rows.new_columns(rows.step_numbers(cache.new[-1].positions + 1))
                    )
                here = slice(step * fed.decoding, (step + 1) * fed.decoding)
                positions, into, *own = (some_rows(t, here) for t in (fed.positions, out, *qkv))
                self._attend_slots(positions, rows, cache.new[-1], into, own)
        if entering is not None and fed.groups:
            behind = [t[first:] for t in qkv]
            self._attend_prompts(fed, entering, out[first:], behind)

    def _attend_prompts(
        self, fed: SweepInput, rows: KVRows, out: torch.Tensor, qkv: Sequence[torch.Tensor]
    ) -> None:
        """Run the attention of prompts.

        Keys are stored rotated by the positions of their tokens; with rolling positions they are
        stored unrotated. KV entries of a window are the newest ones, so their distances are the
        same in both cases.
        """
        q, k, v = qkv
        rotation = self._rotation
        stored = k if is_rolling(rows.policy) else None
        if rotation is not None:
            k = k if stored is None else k.clone()
            rotation.rotate((q, k), fed.positions[fed.decoding * fed.steps :])
        attend_prompts(
            (q, k, v), fed.groups, rows, self._scale, out, stored, fed.num_earlier_prompts
        )

    def _attend_slots(
        self,
        positions: torch.Tensor,
        rows: KVRows,
        new: NewColumns,
        out: torch.Tensor,
        qkv: Sequence[torch.Tensor],
    ) -> None:
        """Run the attention of one decode step.

        With rolling positions, the position of a query is the rank of its own KV entry, the newest
        one.
        """
        q, k, v = qkv
        rotation = self._rotation
        rolling = rotation if is_rolling(rows.policy) else None
        if rolling is not None:
            rolling.rotate((q,), new.filled - 1)
        elif rotation is not None:
            rotation.rotate((q, k), positions)
        attend_slots((q, k, v), rows, new, self._scale, out, rolling)
