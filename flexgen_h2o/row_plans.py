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
from flexgen_h2o.planner.need import AutoPolicy, Need
from flexgen_h2o.planner.predict import Prediction
from flexgen_h2o.planning import Planner
from flexgen_h2o.prefixes import SHARINGS, PromptGroup, Sharing


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

    def need(self, rows: Sequence[Row]) -> Need:
        return need_of_rows(self.part.eviction, rows, self.part.spec.num_blocks, self.sharing)

    def blocks(self, rows: Sequence[Row], policy: Policy) -> list[list[list[Row]]]:
        """As micro-batches; those of a pipeline that are in flight together are one block."""
        return row_blocks(rows, policy.gpu_batch_size, policy.num_gpu_batches * self.part.in_flight, self.sharing)

    def plan(self, rows: Sequence[Row], asked: Policy | AutoPolicy, budgets: dict[str, int | None]) -> Planned:
        """Raises DoesNotFitError. In a job the buffers serve its earlier parts as well, if both fit."""
        own, before = self.need(rows), self.planned
        if not self.job_rows:
            return self._plan(rows, asked, own, None, budgets)
        own = replace(own, rows=max(own.rows, self.job_rows))
        if before is not None:
            with contextlib.suppress(DoesNotFitError):
                return self._plan(rows, asked, own, before, budgets)
        return self._plan(rows, asked, own, None, budgets)

    def serves(self, plan: MemoryPlan, policy: Policy, asked: Policy | AutoPolicy, rows: Sequence[Row]) -> bool:
        """Do the buffers of an open engine suffice, and was its policy not chosen for fewer rows?"""
        enough = plan.shape.covers(self._shape(rows, policy, self.need(rows)))
        for_fewer = self.planned is None or len(rows) > self.planned.need.rows
        return enough and (asked == policy or not for_fewer)

    def has_room(self, plan: MemoryPlan, rows: Sequence[Row]) -> bool:
        """Can these rows enter a running block of an engine with this plan?"""
        shape, need = plan.shape, self.need(rows)
        return need.prompt_len <= max(shape.tokens, shape.rows) and shape.has_slots(need.slots)

    def predict(self, rows: Sequence[Row], policy: Policy, plan: MemoryPlan) -> Prediction | None:
        """What the run will cost if no row ends early; None where the profile does not know the dtype, and in a job,
        where to simulate every ragged block of every part would take longer than it tells, or of a pipeline's stage."""
        if self.job_rows or self.part.pipeline is not None or not self._planner.can_predict:
            return None
        return self._planner.predict(policy, self.need(rows), plan, self._groups(rows, policy))

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
        return shape_of_blocks(self._groups(rows, policy), need, max(row.at_once for row in rows))

    def _groups(self, rows: Sequence[Row], policy: Policy) -> list[list[tuple[PromptGroup, ...]]]:
        """The prompts of each micro-batch of each block, as they will be fed."""
        return [[group_rows(batch, self.sharing) for batch in block] for block in self.blocks(rows, policy)]
