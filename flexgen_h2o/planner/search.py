"""The policy search: batch sizes and sides are enumerated, the linear program places each, the simulator decides.

A lower bound (what must be computed, and what cannot but be read from disk) prunes what cannot win before it is solved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from flexgen_h2o.config import MOST_ROWS, TIERS, ModelSpec, Policy
from flexgen_h2o.errors import DoesNotFitError
from flexgen_h2o.planner.lp import Solution, find_corner, find_corners, solve
from flexgen_h2o.planner.memory import OVERLAPPED, SEQUENTIAL, Depth, MemoryPlan, memory_plan, plan_within
from flexgen_h2o.planner.need import Need, even_blocks, shape_of
from flexgen_h2o.planner.predict import Machine, Prediction, predict
from flexgen_h2o.planner.rounding import placements
from flexgen_h2o.units import format_bytes

Budgets = Mapping[str, int | None]
MOST_BATCHES = 32  # K that is tried
MOST_MICRO_BATCH = 512
MOST_SOLVED = 96
MOST_SIMULATED = 10  # placements, best first; more only while none of them can be rounded
LOOK_AHEADS = OVERLAPPED[2:]  # deeper rings are taken where memory is left over
# A KV unit is read as far as it is filled, on average more than this share of what is set aside for it.
LEAST_READ = 0.5


@dataclass(frozen=True)
class Plan:
    """A policy with what it costs. gain_s: seconds that the pile saves with 1 GiB more on each tier, by the program's
    duals; empty where the policy was given."""

    policy: Policy
    memory: MemoryPlan
    prediction: Prediction
    gain_s: Mapping[str, float]


@dataclass(frozen=True)
class _Candidate:
    """bound_s: no placement of this policy's batch sizes runs the pile faster."""

    policy: Policy
    depth: Depth
    bound_s: float


@dataclass(frozen=True)
class Sides:
    """Which switches the search may set besides those of the base policy."""

    attention: bool = True
    compress_weight: bool = False
    compress_cache: bool = False


def evaluate(spec: ModelSpec, policy: Policy, need: Need, machine: Machine, budgets: Budgets) -> Plan:
    """What a given policy costs. DoesNotFitError when it does not fit the budgets."""
    plan = plan_within(spec, policy, shape_of(policy, need), machine.itemsize, machine.device_is_host, dict(budgets))
    return Plan(policy, plan, predict(spec, policy, need, machine, plan, even_blocks(policy, need)), {})


def search(
    spec: ModelSpec, need: Need, base: Policy, machine: Machine, budgets: Budgets, sides: Sides | None = None
) -> Plan:
    """The policy that runs the pile in the least time. base: its switches are kept, batch sizes and shares chosen.

    DoesNotFitError, with the smallest budget that would do, when nothing fits.
    """
    candidates = sorted(
        (c for policy in _batch_sizes(need, base, machine, sides or Sides())
         if (c := _bounded(spec, policy, need, machine, budgets)) is not None),
        key=lambda c: c.bound_s,
    )  # fmt: skip
    if not candidates:
        raise DoesNotFitError(_smallest(spec, need, base, machine, budgets))
    solved: list[tuple[float, _Candidate, Solution]] = []
    for candidate in candidates[:MOST_SOLVED]:
        fastest = min((s for s, *_ in solved), default=math.inf)
        if candidate.bound_s >= fastest:
            break
        corners = find_corners(spec, candidate.policy, need, machine, candidate.depth)
        solution = solve(corners, need.gen_len - 1, base.overlap, budgets)
        if solution is not None:
            solved.append((solution.seconds * _blocks(candidate.policy, need), candidate, solution))
    if not solved:
        raise DoesNotFitError(_smallest(spec, need, base, machine, budgets))
    solved.sort(key=lambda entry: entry[0])
    found: list[Plan] = []
    for i, (_, candidate, solution) in enumerate(solved):
        if i >= MOST_SIMULATED and found:
            break
        found += _simulated(spec, candidate.policy, solution, need, machine, budgets)
    if not found:
        raise DoesNotFitError(_smallest(spec, need, base, machine, budgets))
    return min(found, key=lambda plan: plan.prediction.total_s)


def _simulated(
    spec: ModelSpec, policy: Policy, solution: Solution, need: Need, machine: Machine, budgets: Budgets
) -> Iterator[Plan]:
    """The solution as whole percents that fit, simulated."""
    gains = {tier: gain * _blocks(policy, need) for tier, gain in solution.gain_s_per_gib.items()}
    for placed in placements(spec, policy, solution.shares, need, machine, budgets):
        plan = evaluate(spec, placed, need, machine, budgets)
        yield replace(plan, gain_s=gains)


def _blocks(policy: Policy, need: Need) -> float:
    """Blocks of the pile; a part of one counts as a part, its weights aside."""
    return need.rows / min(policy.block_size, need.rows)


def _batch_sizes(need: Need, base: Policy, machine: Machine, sides: Sides) -> Iterator[Policy]:
    """Policies that differ in batch sizes, in the side of attention and in compression."""
    on_host = (False, True) if sides.attention and not machine.device_is_host and not base.cpu_cache_compute else (
        base.cpu_cache_compute,
    )  # fmt: skip
    weights = (False, True) if sides.compress_weight else (base.compress_weight,)
    caches = (False, True) if sides.compress_cache else (base.compress_cache,)
    for gbs, batches in _sizes(need.rows):
        for host in on_host:
            for weight in weights:
                for cache in caches:
                    yield replace(
                        base, gpu_batch_size=gbs, num_gpu_batches=batches, cpu_cache_compute=host,
                        compress_weight=weight, compress_cache=cache, percent=(0, 0, 0, 0, 0, 0),
                    )  # fmt: skip


def _sizes(rows: int) -> Iterator[tuple[int, int]]:
    """(micro-batch, micro-batches) of blocks that cut the pile evenly, and of evenly cut blocks."""
    steps = sorted({round(2 ** (i / 2)) for i in range(40)})
    seen = set()
    for parts in steps:
        block = min(-(-rows // parts), MOST_ROWS)
        for batches in (k for k in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32) if k <= min(block, MOST_BATCHES)):
            gbs = -(-block // batches)
            if gbs <= MOST_MICRO_BATCH and (gbs, batches) not in seen:
                seen.add((gbs, batches))
                yield gbs, batches
        if block == 1:
            return


def _bounded(spec: ModelSpec, policy: Policy, need: Need, machine: Machine, budgets: Budgets) -> _Candidate | None:
    """The candidate with its lower bound; None when not even everything on disk fits."""
    depth = _depth(spec, policy, need, machine, budgets)
    if depth is None:
        return None
    on_disk = find_corner(spec, policy, (), need, machine, depth)
    fast = budgets.get("device"), budgets.get("host")
    overflow = 0.0
    if fast[0] is not None and fast[1] is not None:
        in_memory = find_corner(spec, policy, (0, 2, 4), need, machine, depth)
        overflow = max(0.0, in_memory.nbytes["device"] + in_memory.nbytes["host"] - sum(b or 0 for b in fast))
    read_s = LEAST_READ * overflow / machine.profile.disk_read_bytes_per_s
    bound = 0.0
    for phase, count in (("prefill", 1), ("decode", need.gen_len - 1)):
        bound += count * max(on_disk.busy[phase]["device_compute"], read_s if phase == "decode" else 0.0)
    return _Candidate(policy, depth, bound * _blocks(policy, need))


def _depth(spec: ModelSpec, policy: Policy, need: Need, machine: Machine, budgets: Budgets) -> Depth | None:
    """The deepest look-ahead that is worth memory and fits with everything on disk."""
    shape = shape_of(policy, need)
    for depth in LOOK_AHEADS if policy.overlap else (SEQUENTIAL,):
        plan = memory_plan(spec, policy, shape, machine.itemsize, machine.device_is_host, depth)
        if not plan.overflow(dict(budgets)):
            return depth
    # Everything on disk may itself be what does not fit: the program shares it out over all tiers.
    if _total(budgets) is not None and plan.bytes_on("disk") > (budgets.get("disk") or 0):
        without_disk = {**budgets, "disk": None}
        if not plan.overflow(without_disk):
            return depth
    return None


def _total(budgets: Budgets) -> int | None:
    held = [budgets.get(tier) for tier in TIERS]
    return None if any(b is None for b in held) else sum(b or 0 for b in held)


def _smallest(spec: ModelSpec, need: Need, base: Policy, machine: Machine, budgets: Budgets) -> str:
    """One line: the tiers that are short even for one row with everything on disk, and budgets that would do."""
    plans = {
        policy.percent: memory_plan(
            spec, policy, shape_of(policy, need), machine.itemsize, machine.device_is_host, SEQUENTIAL
        )
        for policy in _one_row(base)
    }
    fitting = [percent for percent, plan in plans.items() if not plan.overflow(dict(budgets))]
    if fitting:  # the program and rounding found no way into budgets that leave room for little more
        percent = " ".join(map(str, fitting[0]))
        return (
            "no policy was found within the budgets, but one row at a time fits: give "
            f"--percent {percent} --gpu-batch-size 1 --num-gpu-batches 1, or raise a budget"
        )
    plan = plans[0, 0, 0, 0, 0, 0]
    short = plan.overflow(dict(budgets))
    given = " and ".join(f"--{tier}-mem {format_bytes(budgets.get(tier) or 0)}" for tier in short)
    needed = " ".join(f"--{tier}-mem {plan.bytes_on(tier)}" for tier in short)
    sizes = ", ".join(format_bytes(plan.bytes_on(tier)) for tier in short)
    return (
        f"{given} {'is' if len(short) == 1 else 'are'} too small for any policy; the smallest that would do: {needed} "
        f"({sizes}), with one row at a time and the rest on disk"
    )


def _one_row(base: Policy) -> Iterator[Policy]:
    """What holds least in memory: weights read anew for each row, KV cache and hidden states whole on one tier."""
    tiers = ((100, 0), (0, 100), (0, 0))
    for cache, hidden in product(tiers, tiers):
        yield replace(base, gpu_batch_size=1, num_gpu_batches=1, percent=(0, 0, *cache, *hidden))
