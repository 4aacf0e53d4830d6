"""What more memory would save: plans are looked for again with more of it on one tier at a time.

The linear program's duals do not tell: they hold where its own bottleneck lies, and a rounded policy may have another.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from flexgen_h2o.config import TIERS, Policy
from flexgen_h2o.errors import DoesNotFitError
from flexgen_h2o.planner.candidates import Budgets, Search
from flexgen_h2o.planner.memory import memory_plan
from flexgen_h2o.planner.need import shape_of
from flexgen_h2o.planner.predict import Prediction
from flexgen_h2o.planner.search import Plan, around, evaluate, search
from flexgen_h2o.units import GIB

# What is added to a budget: of a large one a GiB is less than the percent by which shares are moved.
MORE_BYTES, MORE_SHARE = GIB, 0.05
IDLE = 2  # a plan that leaves a tier this many times what would be added has no use for it

FoundBy = Literal["search", "neighbourhood", "placement"]


@dataclass(frozen=True)
class Gains:
    """s_per_gib: seconds that the pile saves with a GiB more, for each tier that has a budget.

    found_by: what was done with more memory. search: the whole search; neighbourhood: placements and batch sizes near
    the plan's; placement: the plan's own batch sizes and switches, and shares moved to the tier.
    """

    s_per_gib: Mapping[str, float]
    found_by: FoundBy


def gains_of_search(q: Search, plan: Plan, whole: bool) -> Gains:
    """Of a plan that a search found. whole: search again, not only near the plan."""

    def best(budgets: Budgets) -> Plan:
        more = replace(q, budgets=budgets)
        near = around(more, plan)
        found = [near, search(q.spec, q.need, q.base, q.machine, budgets, q.sides)] if whole else [near]
        return min(found, key=lambda one: one.prediction.total_s)

    now = best(q.budgets).prediction.total_s  # what near plans save without more memory is no gain of it
    found = {}
    for tier, more in _additions(q):
        idle = (q.budgets.get(tier) or 0) - plan.memory.bytes_on(tier) >= IDLE * more
        after = now if idle else best(_raised(q.budgets, tier, more)).prediction.total_s
        found[tier] = _per_gib(now - after, more)
    return Gains(found, "search" if whole else "neighbourhood")


def gains_of_policy(q: Search, plan: Plan) -> Gains:
    """Of a given policy: more is moved to the tier than the policy has there, from the slower ones."""
    found = {}
    for tier, more in _additions(q):
        raised = _raised(q.budgets, tier, more)
        tried = [_evaluated(q, policy, raised) for policy in _moved_to(q, plan, tier, more)]
        after = min((one.total_s for one in tried if one is not None), default=plan.prediction.total_s)
        found[tier] = _per_gib(plan.prediction.total_s - after, more)
    return Gains(found, "placement")


def _additions(q: Search) -> Iterator[tuple[str, int]]:
    """Tiers with a budget, and what is added to it."""
    for tier in TIERS:
        budget = q.budgets.get(tier)
        if budget is not None and not (tier == "device" and q.machine.device_is_host):
            yield tier, max(MORE_BYTES, int(MORE_SHARE * budget))


def _raised(budgets: Budgets, tier: str, more: int) -> Budgets:
    return {**budgets, tier: (budgets.get(tier) or 0) + more}


def _per_gib(saved_s: float, more: int) -> float:
    return max(0.0, saved_s) * GIB / more


def _evaluated(q: Search, policy: Policy, budgets: Budgets) -> Prediction | None:
    try:
        return evaluate(q.spec, policy, q.need, q.machine, budgets).prediction
    except DoesNotFitError:
        return None


def _moved_to(q: Search, plan: Plan, tier: str, more: int) -> Iterator[Policy]:
    """The policy itself (it may load further ahead), and each kind of bytes from each slower tier as far as `more`
    holds it."""
    yield plan.policy
    room = plan.memory.bytes_on(tier) + more
    to = 0 if q.machine.device_is_host else TIERS.index(tier)
    for kind in range(3):
        for source in range(to + 1, len(TIERS)):
            steps = _steps(plan.policy, kind, source, to)
            moved = [policy for policy in steps if _held(q, plan, policy, tier) <= room]
            if moved:
                yield moved[-1]


def _held(q: Search, plan: Plan, policy: Policy, tier: str) -> int:
    shape, is_host = shape_of(policy, q.need), q.machine.device_is_host
    return memory_plan(q.spec, policy, shape, q.machine.itemsize, is_host, plan.memory.depth).bytes_on(tier)


def _steps(policy: Policy, kind: int, source: int, to: int) -> Iterator[Policy]:
    """One percent of a kind after the other, from one tier on another."""
    device, host = policy.percent[2 * kind : 2 * kind + 2]
    for moved in range(1, 1 + (device, host, 100 - device - host)[source]):
        shares = [device, host, 100 - device - host]
        shares[source] -= moved
        shares[to] += moved
        yield replace(policy, percent=_with_pair(policy.percent, kind, shares))


def _with_pair(percent: Sequence[int], kind: int, shares: Sequence[int]) -> tuple[int, int, int, int, int, int]:
    a, b, c, d, e, f = (*percent[: 2 * kind], *shares[:2], *percent[2 * kind + 2 :])
    return a, b, c, d, e, f
