"""Attention of one micro-batch in one layer.

Sequences that decode come first and feed their newest tokens. Behind them are sequences that enter
and feed their prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from weakref import WeakKeyDictionary

import torch

from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.engine.scheduler import SweepInput
from flexgen_h2o.kernels.elementwise import Rotation
from flexgen_h2o.kernels.workspace import some_rows
from flexgen_h2o.kvcache.budgets import Budgets, BudgetTable, DecodeStep, copy_tables
from flexgen_h2o.kvcache.decode import attend_slots
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.eviction.of_model import Window
from flexgen_h2o.kvcache.eviction.policy import is_rolling
from flexgen_h2o.kvcache.part import KVPart, KVUnit
from flexgen_h2o.kvcache.prefill import attend_prompts
from flexgen_h2o.models import Queries

# By the budgets and the window of a transformer block.
NumbersOfSweep = dict[tuple[Budgets, int | None], DecodeStep]


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
        common: Sequence[KVPart] | None = None,
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
        self._numbers: WeakKeyDictionary[BudgetTable, tuple[SweepInput, NumbersOfSweep]] = (
            WeakKeyDictionary()
        )
        if spec.rotary is not None:
            frequencies = torch.tensor(spec.rotary.frequencies, dtype=torch.float32, device=device)
            self._rotation = Rotation(frequencies, spec.rotary.scaling)

    def inputs(self, table: BudgetTable, fed: SweepInput) -> list[torch.Tensor]:
        """Return the tensors that tell a GPU about a decode step of these sequences.

        All blocks read them.
        """
        self._first_step(0, table, fed)
        states = [step.table_on(self._device) for step in self._numbers[table][1].values()]
        return states if self._rotation is None else [*states, fed.positions]

    def open(
        self,
        block: int,
        table: BudgetTable,
        fed: SweepInput,
        parts: Sequence[KVPart],
        store_whole: bool,
    ) -> KVUnit:
        """Return the KV unit of transformer block `block`, whose sequences are fed `fed`.

        table: the budgets of the sequences.
        parts, store_whole: returned by `CacheStore.open`.
        """
        window = self._spec.window(block)
        unit = KVUnit(
            self._policy(block),
            block,
            self._kv_heads,
            table.at(block),
            parts,
            fed.decoding,
            store_whole,
            self._common[block] if self._common is not None else None,
            window=window,
            hadamard=self._hadamard,
            attn_sparsity=self._sparsity if window is None else 1.0,
        )
        assert store_whole or not unit.enters  # a prompt changes more than one slot
        if fed.decoding:
            unit.begin(self._first_step(block, table, fed))
        return unit

    def _policy(self, block: int) -> Eviction:
        window = self._spec.window(block)
        return self._eviction if window is None else Window(window)

    def _first_step(self, block: int, table: BudgetTable, fed: SweepInput) -> DecodeStep:
        """Return the first decode step.

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
                    made[budgets, window] = DecodeStep(
                        own, needs, positions, self._num_whole_entries
                    )
            copy_tables(list(made.values()), self._device)
            self._numbers[table] = fed, made
        return made[key]

    def attend(self, unit: KVUnit, fed: SweepInput, out: torch.Tensor, queries: Queries) -> None:
        """Run the attention of a micro-batch or a part of one.

        out: (tokens, heads x d), filled here.
        queries: queries, keys and values in packed order. They are changed in place.
        """
        *qkv, sinks = queries
        unit = unit if sinks is None else replace(unit, sinks=sinks)
        first = fed.decoding * fed.steps
        if fed.decoding:
            for step in range(fed.steps):
                if step:
                    unit.begin(unit.steps[-1].next())
                here = slice(step * fed.decoding, (step + 1) * fed.decoding)
                positions, into, *own = (some_rows(t, here) for t in (fed.positions, out, *qkv))
                self._attend_slots(positions, unit, into, own)
        if fed.groups:
            self._attend_prompts(fed, unit, out[first:], [t[first:] for t in qkv])

    def _attend_prompts(
        self, fed: SweepInput, unit: KVUnit, out: torch.Tensor, qkv: Sequence[torch.Tensor]
    ) -> None:
        """Run the attention of prompts.

        Keys are stored rotated by the positions of their tokens; with rolling positions they are
        stored unrotated. KV entries of a window are the newest ones, so their distances are the
        same in both cases.
        """
        q, k, v = qkv
        rotation = self._rotation
        stored = k if is_rolling(unit.policy) else None
        if rotation is not None:
            k = k if stored is None else k.clone()
            rotation.rotate((q, k), fed.positions[fed.decoding * fed.steps :])
        sequence = unit.decoding + fed.num_earlier_prompts
        attend_prompts((q, k, v), fed.groups, unit, self._scale, out, stored, sequence)

    def _attend_slots(
        self,
        positions: torch.Tensor,
        unit: KVUnit,
        out: torch.Tensor,
        qkv: Sequence[torch.Tensor],
    ) -> None:
        """Run the attention of one decode step.

        With rolling positions, the position of a query is the rank of its own KV entry, the newest
        one.
        """
        q, k, v = qkv
        rotation = self._rotation
        rolling = rotation if is_rolling(unit.policy) else None
        if rolling is not None:
            rolling.rotate((q,), unit.steps[-1].filled - 1)
        elif rotation is not None:
            rotation.rotate((q, k), positions)
        attend_slots((q, k, v), unit, self._scale, out, rolling)
