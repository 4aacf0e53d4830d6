"""Plans for this machine: its profile, the policy that `auto` stands for, and what a run will cost."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flexgen_h2o.config import ModelSpec, Policy
from flexgen_h2o.errors import UsageError
from flexgen_h2o.planner.candidates import Budgets
from flexgen_h2o.planner.memory import MemoryPlan
from flexgen_h2o.planner.need import Batch, Block, Need
from flexgen_h2o.planner.predict import Machine, Prediction, predict
from flexgen_h2o.planner.search import search
from flexgen_h2o.prefixes import PromptGroup
from flexgen_h2o.profile import HardwareProfile, find_profile, read_profile
from flexgen_h2o.profiling.choose import calmer, profile_of_this_machine
from flexgen_h2o.profiling.nominal import NOMINAL
from flexgen_h2o.units import GIB

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

    def choose(self, need: Need, base: Policy, budgets: Budgets) -> Policy:
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
        self, policy: Policy, need: Need, plan: MemoryPlan, blocks: Sequence[Sequence[Sequence[PromptGroup]]]
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
