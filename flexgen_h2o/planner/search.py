"""The policy search: batch sizes and sides are enumerated, the linear program places each, the simulator decides.

A lower bound (what must be computed, and what cannot but be read from disk) prunes what cannot win before it is solved;
around the best of a coarse grid the search goes on in smaller steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.config import TIERS, ModelSpec, Policy
from flexgen_h2o.core.errors import DoesNotFitError
from flexgen_h2o.core.units import GIB
from flexgen_h2o.engine.memory_plan import MemoryPlan, plan_within
from flexgen_h2o.engine.workload import WorkloadShape, even_blocks, shape_of
from flexgen_h2o.planner.candidates import (
    Budgets,
    Candidate,
    Search,
    SearchSpace,
    bounded,
    candidates,
    neighbours,
    that_fit,
    too_small,
)
from flexgen_h2o.planner.lp import Solution, find_corners, placements, solve
from flexgen_h2o.planner.predict import Machine, Prediction, predict

MOST_SOLVED = 64
OPTIMISM = 1.25  # the program knows no waits and no contention: what it says of a plan may come out so much longer
# Of the coarse grid, best first: at least so many, and more while that is quick (steps of the schedule, all told).
LEAST_SIMULATED, MOST_SIMULATED, QUICK_STEPS = 6, 24, 40_000
MOST_STEPS = 4  # around the best
EQUAL = 1.003  # plans whose seconds differ by less are equally fast
TIGHTER = 0.95  # budgets for the program where rounding found no way into the real ones


@dataclass(frozen=True)
class Plan:
    """A policy with what it costs. dual_s_per_gib: seconds of the pile by the program's duals, for each tier; empty
    where the policy was given."""

    policy: Policy
    memory: MemoryPlan
    prediction: Prediction
    dual_s_per_gib: Mapping[str, float]


def evaluate(spec: ModelSpec, policy: Policy, need: WorkloadShape, machine: Machine, budgets: Budgets) -> Plan:
    """What a given policy costs. DoesNotFitError when it does not fit the budgets."""
    interrupts.check()
    plan = plan_within(spec, policy, shape_of(policy, need), machine.itemsize, machine.device_is_host, dict(budgets))
    return Plan(policy, plan, predict(spec, policy, need, machine, plan, even_blocks(policy, need)), {})


def search(
    spec: ModelSpec,
    need: WorkloadShape,
    base: Policy,
    machine: Machine,
    budgets: Budgets,
    sides: SearchSpace | None = None,
) -> Plan:
    """The policy that runs the pile in the least time. base: its switches are kept, batch sizes and shares chosen.

    DoesNotFitError, with the smallest budget that would do, when nothing fits.
    """
    q = Search(spec, need, base, machine, budgets, sides or SearchSpace())
    found: list[Plan] = []
    steps, layers = 0, len(spec.layers(base.sep_layer).layers)
    for i, (candidate, solution) in enumerate(_solved(q)):
        if found and (i >= MOST_SIMULATED or (i >= LEAST_SIMULATED and steps > QUICK_STEPS)):
            break
        steps += layers * candidate.policy.num_gpu_batches * min(need.gen_len, 8)
        found += _simulated(q, candidate, solution)
    if not found:
        # One row at a time, where budgets leave room for little more.
        found = [evaluate(spec, policy, need, machine, budgets) for policy in that_fit(q, MOST_SIMULATED)]
    if not found:
        raise DoesNotFitError(too_small(q))
    # What is all in memory, and what is not, improve in different directions.
    kinds = [[p for p in found if _uses_disk(p) is on_disk] for on_disk in (False, True)]
    return _thriftiest([*found, *(_improved(q, min(kind, key=_seconds)) for kind in kinds if kind)])


def around(q: Search, plan: Plan) -> Plan:
    """The best of a plan that fits, its batch sizes with other shares, and better and better neighbours of these."""
    found = [evaluate(q.spec, plan.policy, q.need, q.machine, q.budgets)]
    same = bounded(q, plan.policy)
    solution = None if same is None else _solve(q, same, q.budgets)
    if same is not None and solution is not None:
        found += _simulated(q, same, solution)
    return _improved(q, min(found, key=_seconds))


def _seconds(plan: Plan) -> float:
    return plan.prediction.total_s


def _uses_disk(plan: Plan) -> bool:
    policy = plan.policy
    return any(on_disk for *_, on_disk in (policy.weight_shares, policy.cache_shares, policy.hidden_shares))


def _thriftiest(found: Sequence[Plan]) -> Plan:
    """Of the plans that are as good as the fastest, the one that takes the least of the slowest tiers."""
    fastest = _seconds(min(found, key=_seconds))
    equal = (plan for plan in found if _seconds(plan) <= EQUAL * fastest)
    return min(
        equal, key=lambda plan: (*(plan.memory.bytes_on(tier) // GIB for tier in reversed(TIERS)), _seconds(plan))
    )


def _solved(q: Search) -> list[tuple[Candidate, Solution]]:
    """The coarse grid's candidates with the program's placements, fastest first."""
    found: list[tuple[float, Candidate, Solution]] = []
    fastest = math.inf
    for candidate in candidates(q)[:MOST_SOLVED]:
        if candidate.bound_s >= OPTIMISM * fastest:
            break
        solution = _solve(q, candidate, q.budgets)
        if solution is not None:
            found.append((solution.seconds * q.likely_blocks(candidate.policy), candidate, solution))
            fastest = min(fastest, found[-1][0])
    found.sort(key=lambda entry: entry[0])
    return [(candidate, solution) for _, candidate, solution in found]


def _solve(q: Search, candidate: Candidate, budgets: Budgets) -> Solution | None:
    interrupts.check()
    corners = find_corners(q.spec, candidate.policy, q.need, q.machine, candidate.depth)
    return solve(corners, q.need.gen_len - 1, q.base.overlap, budgets)


def _simulated(q: Search, candidate: Candidate, solution: Solution) -> list[Plan]:
    """The solution as whole percents that fit, simulated."""
    policy = candidate.policy
    placed = list(placements(q.spec, policy, solution.shares, q.need, q.machine, q.budgets))
    if not placed:
        tighter = {tier: None if b is None else int(b * TIGHTER) for tier, b in q.budgets.items()}
        other = _solve(q, candidate, tighter)
        if other is not None:
            placed = list(placements(q.spec, policy, other.shares, q.need, q.machine, q.budgets))
    duals = {tier: dual * q.blocks(policy) for tier, dual in solution.gain_s_per_gib.items()}
    needed = (_without_idle_switch(q, p) for p in placed)
    return [replace(evaluate(q.spec, p, q.need, q.machine, q.budgets), dual_s_per_gib=duals) for p in needed]


def _without_idle_switch(q: Search, policy: Policy) -> Policy:
    """Without --cpu-cache-compute where no KV is off the device: it would do nothing."""
    idle = policy.percent[2] == 100 and not q.base.cpu_cache_compute
    return replace(policy, cpu_cache_compute=False) if idle else policy


def _improved(q: Search, best: Plan) -> Plan:
    """Steps to the best neighbour, as long as there is a better one."""
    tried = {(best.policy.gpu_batch_size, best.policy.num_gpu_batches, best.policy.cpu_cache_compute)}
    for _ in range(MOST_STEPS):
        found = [best]
        for candidate in neighbours(q, best.policy):
            policy = candidate.policy
            key = (policy.gpu_batch_size, policy.num_gpu_batches, policy.cpu_cache_compute)
            if key in tried or candidate.bound_s >= _seconds(best):
                continue
            tried.add(key)
            solution = _solve(q, candidate, q.budgets)
            if solution is not None and solution.seconds * q.blocks(policy) < _seconds(best):
                found += _simulated(q, candidate, solution)
        better = min(found, key=_seconds)
        if better is best:
            return best
        best = better
    return best
