"""Attention of one micro-batch in one layer: rows that decode, and behind them rows that enter with their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from flexgen_h2o.core.config import ModelSpec, Rotary
from flexgen_h2o.engine.generation import SweepInput
from flexgen_h2o.kernels import slots as slot_kernels
from flexgen_h2o.kernels.elementwise import Rotation
from flexgen_h2o.kernels.slots import attend_sparse
from flexgen_h2o.kvcache.attend import CommonColumns, CommonPrefix, SlotAttention, attend_prompts, attend_slots
from flexgen_h2o.kvcache.evict import EvictionStep
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.eviction.policy import RANKS
from flexgen_h2o.kvcache.prefixes import PromptGroup
from flexgen_h2o.kvcache.slots import NewColumn, PartView, RowSlots, new_columns, split_views


@dataclass(frozen=True)
class UnitViews:
    """A KV unit as the store opened it: all its rows."""

    views: list[PartView]
    store_whole: bool


@dataclass(frozen=True)
class DecodingRows:
    """The first rows of a unit, each with one new column a step.

    slots: where the first column goes (`EvictionStep.next_slots`). Which slots the others take is known when the
    step before has named its victims.
    """

    hook: EvictionStep
    views: list[PartView]
    steps: list[NewColumn]
    slots: list[torch.Tensor]

    @property
    def new(self) -> NewColumn:
        """Of the last step."""
        return self.steps[-1]

    @property
    def read(self) -> int:
        """Columns that all rows' attention reads, in all steps."""
        return sum(int(new.filled.sum()) for new in self.steps)


@dataclass(frozen=True)
class EnteringRows:
    """The rows of a unit behind those, with their prompts. The views count from the first of them."""

    hook: EvictionStep
    views: list[PartView]


@dataclass(frozen=True)
class CacheStep:
    """A KV unit while its layer is computed. decoding, entering: None where the micro-batch has no such rows."""

    unit: UnitViews
    decoding: DecodingRows | None
    entering: EnteringRows | None

    @property
    def decoded(self) -> torch.Tensor:
        """(sequences,) slots in use of the rows that decode, once the layer is computed."""
        return torch.zeros(0, dtype=torch.int64) if self.decoding is None else self.decoding.new.filled

    @property
    def entered(self) -> torch.Tensor:
        """(sequences,) the same of the rows that enter."""
        return torch.zeros(0, dtype=torch.int64) if self.entering is None else self.entering.hook.rows.kept

    @property
    def columns(self) -> int:
        """Slots in use of the fullest row."""
        return int(torch.cat([self.decoded, self.entered]).max())

    @property
    def slots_to_store(self) -> list[torch.Tensor] | None:
        """The only slots that have changed; None where more has."""
        one_step = self.decoding is not None and len(self.decoding.steps) == 1
        return self.decoding.slots if self.decoding and one_step and not self.unit.store_whole else None


class UnitAttention:
    """Attention of a run: over the slots of rows, and over prompts.

    sparsity: `Policy.attn_sparsity`. common: of what all rows begin with, where the full cache holds it in one copy.
    """

    def __init__(
        self, spec: ModelSpec, eviction: Eviction, sparsity: float, device: torch.device,
        common: CommonPrefix | None = None,
    ) -> None:  # fmt: skip
        self._eviction, self._kv_heads, self._common = eviction, spec.num_kv_heads, common
        self._slot_attention: SlotAttention = (
            slot_kernels.attend if sparsity == 1 else partial(attend_sparse, share=sparsity)
        )
        self._scale = spec.head_dim**-0.5
        self._rotation = _rotation(spec.rotary, device)
        self._is_rolling = RANKS in eviction.needs.record

    def open(self, block: int, rows: RowSlots, fed: SweepInput, unit: UnitViews) -> CacheStep:
        """The unit of transformer block `block`, for what its rows feed into this sweep."""
        first = fed.decoding
        before, behind = split_views(unit.views, first * self._kv_heads)
        decoding = entering = None
        if before:
            hook = EvictionStep(self._eviction, block, rows.part(0, first), self._kv_heads)
            past = torch.tensor(fed.past[:first])
            steps = [new_columns(hook.rows, past + step) for step in range(fed.steps)]
            decoding = DecodingRows(hook, before, steps, hook.next_slots(before, steps[0]))
        if behind:
            assert unit.store_whole  # a prompt is more than a column
            entering = EnteringRows(EvictionStep(self._eviction, block, rows.part(first, None), self._kv_heads), behind)
        return CacheStep(unit, decoding, entering)

    def attend(self, fed: SweepInput, cache: CacheStep, out: torch.Tensor, *qkv: torch.Tensor) -> torch.Tensor:
        """q: (tokens, heads, d); k, v: (tokens, kv_heads, d), packed; changed in place. out: (tokens, heads x d)."""
        first = fed.decoding * fed.steps
        if cache.decoding is not None:
            self._attend_slots(fed.positions[:first], cache.decoding, out[:first], [t[:first] for t in qkv])
        if cache.entering is not None:
            behind = [t[first:] for t in qkv]
            self._attend_prompts(fed.positions[first:], fed.groups, cache.entering, out[first:], behind)
        return out

    def _attend_prompts(
        self, positions: torch.Tensor, groups: Sequence[PromptGroup], rows: EnteringRows, out: torch.Tensor,
        qkv: Sequence[torch.Tensor],
    ) -> None:  # fmt: skip
        """Keys are kept as they are rotated here, by the positions of their tokens; rolling, as they come."""
        (q, k, v), rotation = qkv, self._rotation
        stored = k if self._is_rolling else None
        if rotation is not None:
            k = k.clone() if self._is_rolling else k
            rotation.rotate((q, k), positions)
        attend_prompts((q, k, v), groups, rows.views, rows.hook, self._scale, out, stored, self._common_of(rows))

    def _attend_slots(
        self, positions: torch.Tensor, rows: DecodingRows, out: torch.Tensor, qkv: Sequence[torch.Tensor]
    ) -> None:
        """One decode step after the other: what is fed of each is a run of as many tokens as there are rows."""
        rotation, rolls, slots = self._rotation, self._is_rolling, rows.slots
        common = self._common_of(rows)
        for step, new in enumerate(rows.steps):
            here = slice(step * len(new.past), (step + 1) * len(new.past))
            q, k, v = (t[here] for t in qkv)
            if rotation is not None:
                rotation.rotate((q,) if rolls else (q, k), new.filled - 1 if rolls else positions[here])
            slots = slots if step == 0 else rows.hook.next_slots(rows.views, new)
            attend_slots(
                (q, k, v), new, slots, rows.views, rows.hook, self._scale, self._slot_attention, out[here],
                rotation if rolls else None, common,
            )  # fmt: skip

    def _common_of(self, rows: DecodingRows | EnteringRows) -> CommonColumns | None:
        return self._common.at(rows.hook.block) if self._common is not None else None


def _rotation(rotary: Rotary | None, device: torch.device) -> Rotation | None:
    """None where a model has no rotary embeddings."""
    if rotary is None:
        return None
    return Rotation(torch.tensor(rotary.frequencies, dtype=torch.float32, device=device), rotary.scaling)
