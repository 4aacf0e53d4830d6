"""Attention of one micro-batch in one layer: rows that decode, and behind them rows that enter with their prompts."""

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
    """A KV unit while its layer is computed: first the rows that decode, behind them those that enter with prompts.

    store_whole: as the store opened the unit. decoding, entering: None without such rows. new: the new columns of the
    decode steps so far, the first of them known before attention.
    """

    store_whole: bool
    decoding: KVRows | None
    entering: KVRows | None
    new: list[NewColumns]

    @property
    def held(self) -> int:
        """Slots in use of all rows, once the layer is computed."""
        decoded = self.new[-1].numbers.held if self.new else 0
        return decoded + (0 if self.entering is None else int(self.entering.budgets.kept.sum()))

    @property
    def most(self) -> int:
        """Slots in use of the fullest row, once the layer is computed."""
        decoded = self.new[-1].numbers.most if self.new else 0
        return max(decoded, 0 if self.entering is None else int(self.entering.budgets.kept.max()))

    @property
    def read(self) -> int:
        """Columns that attention of the decoding rows reads, in all steps."""
        return sum(new.numbers.held for new in self.new)

    @property
    def slots_to_store(self) -> Sequence[torch.Tensor] | None:
        """The only slots that have changed; None where more has."""
        return self.new[0].slots if len(self.new) == 1 and not self.store_whole else None


NumbersOfSweep = dict[tuple[RowBudgets, int | None], StepNumbers]  # by budgets and window of a transformer block
Begin = Callable[[torch.Tensor], tuple[torch.Tensor, Attention]]
Attend = Callable[[SweepInput, torch.Tensor, Queries], None]


class JoinedAttention:
    """An attention layer of neighbouring micro-batches, whose queries and outputs are computed for all of them at once;
    or of one micro-batch in parts of its rows, each computed by itself (BlockShape.attending).

    run: the micro-batches; hidden: of them all. They attend one after the other, each to its own KV unit. begin: of
    hidden states (tokens, hidden), memory for what they attend to, (tokens, heads x d), and the layer's attention.
    """

    def __init__(self, run: tuple[int, ...], hidden: Hidden, begin: Begin) -> None:
        self.run, self.hidden, self._begin = run, hidden, begin
        self._first = self._done = 0  # of the tokens: where what has begun starts, and the next one to attend

    def attend(self, parts: Sequence[SweepInput], attend: Attend) -> None:
        """The next micro-batch."""
        for part in parts:
            if self._done == self._first:
                end = self._done + len(part.ids) if len(parts) > 1 else len(self.hidden.x)
                self._out, self._attention = self._begin(some_rows(self.hidden.x, slice(self._first, end)))
                self._queries = next(self._attention)
            start = self._done - self._first
            here, (q, k, v, sinks) = slice(start, start + len(part.ids)), self._queries
            attend(
                part,
                some_rows(self._out, here),
                Queries(some_rows(q, here), some_rows(k, here), some_rows(v, here), sinks),
            )
            self._done += len(part.ids)
            if here.stop == len(self._out):
                end_attention(self._attention, self._out)
                self._first = self._done


class UnitAttention:
    """Attention of a run: over the slots of rows, and over prompts.

    common: of what all rows begin with, where the full cache holds it in one copy.
    """

    def __init__(
        self, spec: ModelSpec, eviction: Eviction, policy: Policy, device: torch.device,
        common: Sequence[PartView] | None = None,
    ) -> None:  # fmt: skip
        self._spec, self._eviction, self._kv_heads, self._common = spec, eviction, spec.num_kv_heads, common
        self._sparsity = policy.attn_sparsity
        self._whole = policy.cache_window if policy.compress_cache else 0
        self._hadamard = policy.compress_cache and policy.cache_rotation
        self._scale = spec.head_dim**-0.5
        self._rotation: Rotation | None = None
        self._device = device
        self._numbers: WeakKeyDictionary[SlotTable, tuple[SweepInput, NumbersOfSweep]] = WeakKeyDictionary()
        if spec.rotary is not None:
            frequencies = torch.tensor(spec.rotary.frequencies, dtype=torch.float32, device=device)
            self._rotation = Rotation(frequencies, spec.rotary.scaling)

    def inputs(self, table: SlotTable, fed: SweepInput) -> list[torch.Tensor]:
        """What a card is told of a decode step of these rows, which all blocks read."""
        self._step_numbers(0, table, fed)
        states = [numbers.state(self._device) for numbers in self._numbers[table][1].values()]
        return states if self._rotation is None else [*states, fed.positions]

    def open(
        self, block: int, table: SlotTable, fed: SweepInput, views: Sequence[PartView], store_whole: bool
    ) -> CacheStep:
        """The unit of transformer block `block`, whose rows are fed `fed`. table: their budgets. views, store_whole: of
        `CacheStore.open`."""
        first, decoding, entering, budgets = fed.decoding, None, None, table.at(block)
        window, policy = self._spec.window(block), self._policy(block)
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
            assert store_whole  # a prompt is more than a column
            of_rows = budgets.select(slice(first, None))
            entering = KVRows(
                policy, block, self._kv_heads, of_rows, behind, common, window=window, hadamard=self._hadamard
            )
        return CacheStep(store_whole, decoding, entering, new)

    def _policy(self, block: int) -> Eviction:
        window = self._spec.window(block)
        return self._eviction if window is None else Window(window)

    def _step_numbers(self, block: int, table: SlotTable, fed: SweepInput) -> StepNumbers:
        """Of the first decode step: worked out at a sweep's first block for all blocks, once for those that share
        budgets, and copied to a card together."""
        key, (known, made) = (table.at(block), self._spec.window(block)), self._numbers.get(table, (None, {}))
        if known is not fed or key not in made:
            past, made = torch.tensor(fed.past[: fed.decoding], device="cpu"), {}
            for b in range(self._spec.num_blocks):
                budgets, window = table.at(b), self._spec.window(b)
                if (budgets, window) not in made:
                    own, needs = budgets.select(slice(0, fed.decoding)), self._policy(b).needs
                    positions = past if window is None else past + fed.common
                    made[budgets, window] = StepNumbers(own, needs, positions, self._whole)
            copied_together(list(made.values()))
            self._numbers[table] = fed, made
        return made[key]

    def attend(self, cache: CacheStep, fed: SweepInput, out: torch.Tensor, queries: Queries) -> None:
        """Of a micro-batch or a part of one. queries, with keys and values, packed: changed in place. out: (tokens,
        heads x d)."""
        *qkv, sinks = queries
        first = fed.decoding * fed.steps
        rows, entering = (
            of if of is None or sinks is None else replace(of, sinks=sinks) for of in (cache.decoding, cache.entering)
        )
        if rows is not None and fed.decoding:
            for step in range(fed.steps):
                if step:
                    cache.new.append(rows.new_columns(rows.step_numbers(cache.new[-1].positions + 1)))
                here = slice(step * fed.decoding, (step + 1) * fed.decoding)
                positions, into, *own = (some_rows(t, here) for t in (fed.positions, out, *qkv))
                self._attend_slots(positions, rows, cache.new[-1], into, own)
        if entering is not None and fed.groups:
            behind = [t[first:] for t in qkv]
            self._attend_prompts(fed, entering, out[first:], behind)

    def _attend_prompts(self, fed: SweepInput, rows: KVRows, out: torch.Tensor, qkv: Sequence[torch.Tensor]) -> None:
        """Keys are stored rotated by the positions of their tokens; with rolling positions, as they come. The columns
        of a window are the newest, and as far from each other at either."""
        (q, k, v), rotation = qkv, self._rotation
        stored = k if is_rolling(rows.policy) else None
        if rotation is not None:
            k = k if stored is None else k.clone()
            rotation.rotate((q, k), fed.positions[fed.decoding * fed.steps :])
        attend_prompts((q, k, v), fed.groups, rows, self._scale, out, stored, fed.entered)

    def _attend_slots(
        self, positions: torch.Tensor, rows: KVRows, new: NewColumns, out: torch.Tensor, qkv: Sequence[torch.Tensor]
    ) -> None:
        """One decode step. With rolling positions a query stands at the rank of its own column, the newest."""
        (q, k, v), rotation = qkv, self._rotation
        rolling = rotation if is_rolling(rows.policy) else None
        if rolling is not None:
            rolling.rotate((q,), new.filled - 1)
        elif rotation is not None:
            rotation.rotate((q, k), positions)
        attend_slots((q, k, v), rows, new, self._scale, out, rolling)
