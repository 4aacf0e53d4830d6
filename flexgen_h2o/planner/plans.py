"""What `LLM` checks of its arguments before it opens anything.

Plans for this machine: its profile, the policy that `auto` stands for, and what a run will cost.

What rows ask of an engine: their blocks, the policy and the memory plan that they get, what they will cost.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import overload

from flexgen_h2o.core.config import DTYPE_BYTES, MemoryBudget, ModelSpec, Policy, check_bits_used, read_policy
from flexgen_h2o.core.errors import DoesNotFitError, UsageError
from flexgen_h2o.core.files import usable_path
from flexgen_h2o.core.units import GIB
from flexgen_h2o.engine.distributed import Part
from flexgen_h2o.engine.generation import Row, group_rows, need_of_rows, row_blocks, shape_of_blocks
from flexgen_h2o.engine.memory_plan import BlockShape, MemoryPlan, plan_within
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.engine.workload import AutoPolicy, Batch, Block, WorkloadShape, base_of
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.prefixes import SHARINGS, PromptGroup, Sharing, TokenIds
from flexgen_h2o.planner.lp import Budgets
from flexgen_h2o.planner.measure.machine import NOMINAL
from flexgen_h2o.planner.measure.run import calmer, profile_of_this_machine
from flexgen_h2o.planner.predict import Machine, Prediction, predict
from flexgen_h2o.planner.profile import HardwareProfile, find_profile, read_profile
from flexgen_h2o.planner.search import search


@overload
def check_text(name: str, value: object) -> str: ...
@overload
def check_text(name: str, value: object, or_none: bool) -> str | None: ...
def check_text(name: str, value: object, or_none: bool = False) -> str | None:
    """A name or a path as a string; UsageError that names the argument for anything else, an empty one too."""
    text = os.fspath(value) if isinstance(value, str | os.PathLike) else value
    if or_none and text is None:
        return None
    if not isinstance(text, str):
        raise UsageError(f"{name}: {value!r:.60} is not a text")
    if or_none and not text:
        raise UsageError(f"--{name} '': is empty; leave --{name} out")
    return text


def check_budget(budget: object) -> MemoryBudget:
    """None: what is free. UsageError for anything but a MemoryBudget."""
    if budget is not None and not isinstance(budget, MemoryBudget):
        raise UsageError(f'budget: {budget!r:.60} is not a MemoryBudget; write for example MemoryBudget(host="16GiB")')
    return budget or MemoryBudget()


def check_hardware(hardware: object) -> HardwareProfile | str | None:
    """A profile, its file or its name; it is read when a plan is made."""
    known = hardware is None or isinstance(hardware, HardwareProfile)
    return hardware if known else check_text("hardware", hardware)  # type: ignore[return-value]


def check_params(params: object) -> SamplingParams | Sequence[SamplingParams]:
    """One SamplingParams, or a list with one for each prompt; None: the defaults. UsageError names the entry."""
    if params is None:
        return SamplingParams()
    if isinstance(params, SamplingParams):
        return params
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        raise UsageError(f"params: {params!r:.60} is neither a SamplingParams nor a list with one for each prompt")
    for i, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise UsageError(f"params[{i}]: {one!r:.60} is not a SamplingParams")
    return params


def check_watch(watch: object, refill: object) -> None:
    """UsageError for a watch_logits that cannot be called, and a refill that is neither true nor false."""
    if watch is not None and not callable(watch):
        raise UsageError(f"watch_logits: {watch!r:.60} is not a function")
    if not isinstance(refill, bool):
        raise UsageError(f"refill: {refill!r:.60} is not true or false")


def read_policy_argument(policy: Policy | AutoPolicy | str | Path) -> Policy | AutoPolicy:
    """UsageError for a bad file, for bits of what is not compressed, and for what is no policy at all."""
    if isinstance(policy, AutoPolicy | Policy):
        check_bits_used(base_of(policy))
        return policy
    if not isinstance(policy, str | os.PathLike):
        raise UsageError(f'policy: {policy!r:.60} is not a Policy, "auto" or a policy file')
    return AutoPolicy() if policy == "auto" else read_policy(usable_path(policy, "--policy")).policy


def check_together(policy: Policy | AutoPolicy, eviction: Eviction) -> None:
    chosen = base_of(policy)
    if chosen.attn_sparsity != 1 and eviction.needs.record:
        raise UsageError(f"attn_sparsity: is for the full cache, not for {eviction.name}; leave one of them out")


def check_dtype(dtype: str) -> str | None:
    """None means auto."""
    if dtype == "auto":
        return None
    if check_text("dtype", dtype) not in DTYPE_BYTES:
        raise UsageError(f"--dtype {dtype}: not one of auto, {', '.join(DTYPE_BYTES)}")
    return dtype


# Measuring takes about a minute: worth it before a run that will take longer than this.
WORTH_MEASURING_S = 600.0
MEASURING_BYTES = 5 * GIB // 4  # of RAM


@dataclass
class Planner:
    """Plans runs of one model with `dtype`. device: as asked for; hardware: a profile, its file or shipped name; None
    is this machine's own."""

    spec: ModelSpec
    device: str
    device_is_host: bool
    dtype: str
    offload_dir: Path
    hardware: HardwareProfile | str | Path | None
    _profile: HardwareProfile | None = None
    _is_calm: bool = False  # what can be done about a busy machine's profile has been done

    @property
    def profile(self) -> HardwareProfile:
        """Nominal speeds as long as nothing was measured. UsageError for a file that is not a profile."""
        if self._profile is None:
            self._profile = self._find(measure_missing=False)
        return self._profile

    def choose(self, need: WorkloadShape, base: Policy, budgets: Budgets) -> Policy:
        """The fastest policy; DoesNotFitError when there is none. base: its switches are kept.

        Measures this machine first where it has no profile and the run is long enough to be worth it.
        """
        self.check_dtype()
        self._calm(budgets)
        plan = search(self.spec, need, base, self._machine, budgets)
        if self.profile.machine == NOMINAL and plan.prediction.total_s > WORTH_MEASURING_S:
            self._profile = self._find(measure_missing=True)
            plan = search(self.spec, need, base, self._machine, budgets)
        return plan.policy

    def predict(
        self, policy: Policy, need: WorkloadShape, plan: MemoryPlan, blocks: Sequence[Sequence[Sequence[PromptGroup]]]
    ) -> Prediction:
        """The cost of a run. blocks: for each block the prompts of its micro-batches."""
        return predict(self.spec, policy, need, self._machine, plan, _counted(blocks))

    @property
    def can_predict(self) -> bool:
        """Does the profile know the dtype?"""
        return self.dtype in self.profile.compute

    def check_dtype(self) -> None:
        """UsageError where the profile does not know the dtype, so that nothing can be chosen with it."""
        if not self.can_predict:
            raise UsageError(
                f"--hardware {self.profile.machine}: has compute rates of {', '.join(self.profile.compute)}, and this"
                f" run computes in {self.dtype}; leave --hardware out to plan for this machine, or give a profile with"
                f" {self.dtype}"
            )

    @property
    def profile_facts(self) -> dict[str, str | bool | int]:
        """What a report says of the profile that predictions are made with."""
        return {"profile": self.profile.machine, "profile_disturbed": self.profile.was_disturbed}

    def _calm(self, budgets: Budgets) -> None:
        """Once, where the budgets have room for it: measure again what a busy machine disturbed, if it is quiet now."""
        room, self._is_calm = budgets.get("host"), self._is_calm or self.hardware is not None
        if not self._is_calm and self.profile.was_disturbed and (room is None or room >= MEASURING_BYTES):
            self._profile = calmer(self.profile, self.device, self.offload_dir, _say)
        self._is_calm = True

    @property
    def _machine(self) -> Machine:
        return Machine(self.profile, self.dtype, self.device_is_host)

    def _find(self, measure_missing: bool) -> HardwareProfile:
        if isinstance(self.hardware, HardwareProfile):
            return self.hardware
        if self.hardware is not None:
            return read_profile(find_profile(self.hardware))
        return profile_of_this_machine(self.device, self.offload_dir, _say, measure_missing)


def _say(line: str) -> None:
    print(f"# {line}", file=sys.stderr, flush=True)


def _counted(blocks: Sequence[Sequence[Sequence[PromptGroup]]]) -> list[tuple[Block, int]]:
    """Blocks of equal micro-batches together, as (block, how many)."""
    found: dict[Block, int] = {}
    for block in blocks:
        key = tuple(Batch.of(groups) for groups in block)
        found[key] = found.get(key, 0) + 1
    return list(found.items())


@dataclass(frozen=True)
class Planned:
    """A policy with its memory plan, and what it was made for."""

    need: WorkloadShape
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

    def need(self, rows: Sequence[Row], policy: Policy) -> WorkloadShape:
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
        self, rows: Sequence[Row], asked: Policy | AutoPolicy, own: WorkloadShape, before: Planned | None,
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

    def _shape(self, rows: Sequence[Row], policy: Policy, need: WorkloadShape) -> BlockShape:
        return shape_of_blocks(
            self._groups(rows, policy, need.common), need, max(row.max_tokens_per_sweep for row in rows)
        )

    def _groups(self, rows: Sequence[Row], policy: Policy, common: int) -> list[list[tuple[PromptGroup, ...]]]:
        """The prompts of each micro-batch of each block, as they will be fed."""
        return [
            [group_rows(batch, self.sharing, common, opens=k == 0) for k, batch in enumerate(block)]
            for block in self.blocks(rows, policy)
        ]

    def _need(self, rows: Sequence[Row], sharing: Sharing | None) -> WorkloadShape:
        return need_of_rows(self.part.eviction, rows, self.part.spec.num_blocks, sharing)

    def _takes_one_copy(self, policy: Policy) -> bool:
        """Do rows keep all columns, uncompressed, and read all of them? Stages of a pipeline do not."""
        keeps_all = not self.part.eviction.needs.record and not policy.compress_cache
        return keeps_all and policy.attn_sparsity == 1 and self.part.pipeline is None
