"""What rows ask of an engine: their blocks, the policy and the memory plan that they get, what they will cost."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flexgen_h2o.config import DTYPE_BYTES, ModelSpec, Policy
from flexgen_h2o.errors import DoesNotFitError
from flexgen_h2o.eviction_need import need_of_rows, shape_of_blocks
from flexgen_h2o.generation import Row, group_rows, row_blocks
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.pipeline import Part
from flexgen_h2o.planner.memory import MemoryPlan, Shape, plan_within
from flexgen_h2o.planner.need import AutoPolicy, Need, base_of
from flexgen_h2o.planner.predict import Prediction
from flexgen_h2o.planning import Planner
from flexgen_h2o.prefixes import SHARINGS, PromptGroup, Sharing, TokenIds


@dataclass(frozen=True)
class Planned:
    """A policy with its memory plan, and what it was made for."""

    need: Need
    policy: Policy
    memory: MemoryPlan


class RowPlans:
    """Plans for the rows of a model. dtype: as of config.DTYPE_BYTES.

    part: of the model, as this process runs it. share_prefix: a key of prefixes.SHARINGS. job_rows: of the job that all
    rows are parts of, 0 for none. `planned`: the newest plan that an engine was opened for.
    """

    def __init__(self, spec: ModelSpec, eviction: Eviction, planner: Planner, dtype: str, device_is_host: bool) -> None:
        self.part, self._planner = Part(spec, eviction), planner
        self._itemsize, self._device_is_host = DTYPE_BYTES[dtype], device_is_host
        self.share_prefix = "auto"
        self.job_rows = 0
        self.planned: Planned | None = None

    @property
    def sharing(self) -> Sharing | None:
        """When rows of a micro-batch share a prefix; None: never."""
        return SHARINGS[self.share_prefix]

    def need(self, rows: Sequence[Row], policy: Policy) -> Need:
        """policy: its switches count."""
        need = self._need(rows, self.sharing)
        return need.in_one_copy(need.prefix) if need.prefix and self._takes_one_copy(policy) else need

    def common(self, rows: Sequence[Row], policy: Policy) -> TokenIds:
        """What all rows begin with, where its KV is held in one copy; else nothing."""
        return rows[0].prompt.token_ids[: self.need(rows, policy).common]

    def blocks(self, rows: Sequence[Row], policy: Policy) -> list[list[list[Row]]]:
        """As micro-batches; those of a pipeline that are in flight together are one block."""
        return row_blocks(rows, policy.gpu_batch_size, policy.num_gpu_batches * self.part.in_flight, self.sharing)

    def plan(self, rows: Sequence[Row], asked: Policy | AutoPolicy, budgets: dict[str, int | None]) -> Planned:
        """Raises DoesNotFitError. In a job the buffers serve its earlier parts as well, if both fit."""
        own, before = self.need(rows, base_of(asked)), self.planned
        if not self.job_rows:
            return self._plan(rows, asked, own, None, budgets)
        own = replace(own, rows=max(own.rows, self.job_rows))
        if before is not None:
            with contextlib.suppress(DoesNotFitError):
                return self._plan(rows, asked, own, before, budgets)
        return self._plan(rows, asked, own, None, budgets)

    def serves(self, plan: MemoryPlan, policy: Policy, asked: Policy | AutoPolicy, rows: Sequence[Row]) -> bool:
        """Do the buffers of an open engine suffice, and was its policy not chosen for fewer rows?"""
        enough = plan.shape.covers(self._shape(rows, policy, self.need(rows, policy)))
        for_fewer = self.planned is None or len(rows) > self.planned.need.rows
        return enough and (asked == policy or not for_fewer)

    def has_room(self, plan: MemoryPlan, rows: Sequence[Row], common: TokenIds) -> bool:
        """Can these rows enter a running block of an engine with this plan? common: of the rows of the block."""
        shape, count = plan.shape, len(common)
        if any(len(r.prompt.token_ids) <= count or r.prompt.token_ids[:count] != common for r in rows):
            return False
        need = self._need(rows, None).in_one_copy(count)
        fits = need.prompt_len - count <= max(shape.tokens, shape.rows) and shape.has_slots(need.slots)
        return fits and (not count or need.prompt_len <= shape.sharing)

    def predict(self, rows: Sequence[Row], policy: Policy, plan: MemoryPlan) -> Prediction | None:
        """What the run will cost if no row ends early; None where the profile does not know the dtype, and in a job,
        where to simulate every ragged block of every part would take longer than it tells, or of a pipeline's stage."""
        if self.job_rows or self.part.pipeline is not None or not self._planner.can_predict:
            return None
        need = self.need(rows, policy)
        return self._planner.predict(policy, need, plan, self._groups(rows, policy, need.common))

    def _plan(
        self, rows: Sequence[Row], asked: Policy | AutoPolicy, own: Need, before: Planned | None,
        budgets: dict[str, int | None],
    ) -> Planned:  # fmt: skip
        """own: the need of the rows. before: a plan whose rows are served too."""
        need = own if before is None else own.union(before.need)
        policy = self._planner.choose(need, asked.base, budgets) if isinstance(asked, AutoPolicy) else asked
        shape = self._shape(rows, policy, own)
        if before is not None and before.policy == policy:
            shape = shape.union(before.memory.shape)
        memory = plan_within(self.part.spec, policy, shape, self._itemsize, self._device_is_host, budgets)
        return Planned(need, policy, memory)

    def _shape(self, rows: Sequence[Row], policy: Policy, need: Need) -> Shape:
        return shape_of_blocks(self._groups(rows, policy, need.common), need, max(row.at_once for row in rows))

    def _groups(self, rows: Sequence[Row], policy: Policy, common: int) -> list[list[tuple[PromptGroup, ...]]]:
        """The prompts of each micro-batch of each block, as they will be fed."""
        return [
            [group_rows(batch, self.sharing, common, opens=k == 0) for k, batch in enumerate(block)]
            for block in self.blocks(rows, policy)
        ]

    def _need(self, rows: Sequence[Row], sharing: Sharing | None) -> Need:
        return need_of_rows(self.part.eviction, rows, self.part.spec.num_blocks, sharing)

    def _takes_one_copy(self, policy: Policy) -> bool:
        """Do rows keep all columns, uncompressed, and read all of them? Stages of a pipeline do not."""
        keeps_all = not self.part.eviction.needs.record and not policy.compress_cache
        return keeps_all and policy.attn_sparsity == 1 and self.part.pipeline is None
