"""The linear program over the nine shares of a placement, for fixed batch sizes (FlexGen, Sheng et al. 2023, 4.3).

Bytes and seconds are linear in the shares. Their coefficients are not written down a second time: the memory plan and
the costs are worked out for placements with everything on one tier, and the program interpolates between these corners.

Shares of the linear program as whole percents that fit the budgets exactly.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pulp
from pulp.apis.core import PulpSolverError

from flexgen_h2o.core.config import TIERS, ModelSpec, Policy
from flexgen_h2o.core.errors import FlexgenError
from flexgen_h2o.core.units import GIB
from flexgen_h2o.engine.memory_plan import OVERLAPPED, SEQUENTIAL, BlockShape, Depth, memory_plan
from flexgen_h2o.engine.workload import WorkloadShape, shape_of
from flexgen_h2o.planner.costs import LANES, Costs
from flexgen_h2o.planner.predict import PHASES, Machine

KINDS = ("weights", "cache", "hidden")
# Of equally fast placements the one that keeps resources idle: this share of their busy seconds counts.
TIE_BREAK = 1e-3

Shares = tuple[float, float, float, float, float, float]  # of weights, cache, hidden on device and host


@dataclass(frozen=True)
class Corner:
    """One placement with each kind of bytes on one tier: bytes by tier, busy seconds by phase and resource."""

    nbytes: Mapping[str, int]
    busy: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Corners:
    """Everything on disk, and the same with one kind moved to a faster tier, by the index into `percent`."""

    base: Corner
    moved: Mapping[int, Corner]


@dataclass(frozen=True)
class Solution:
    """seconds: of one block by the program; shares: 0 to 1; gain_s_per_gib: seconds a block saves with a GiB more."""

    seconds: float
    shares: Shares
    gain_s_per_gib: Mapping[str, float]


def find_corners(spec: ModelSpec, policy: Policy, need: WorkloadShape, machine: Machine, depth: Depth) -> Corners:
    """policy: batch sizes and switches; its shares do not count."""

    def corner(*moved: int) -> Corner:
        return find_corner(spec, policy, moved, need, machine, depth)

    # Where the device is host memory there is no host tier besides it.
    return Corners(corner(), {i: corner(i) for i in (range(0, 6, 2) if machine.device_is_host else range(6))})


def find_corner(
    spec: ModelSpec, policy: Policy, moved: Sequence[int], need: WorkloadShape, machine: Machine, depth: Depth
) -> Corner:
    """The kinds of bytes at these indices of `percent` are moved there, the others are on disk."""
    w, wc, c, cc, h, hc = (100 if i in moved else 0 for i in range(6))
    policy = replace(policy, percent=(w, wc, c, cc, h, hc))
    shape = shape_of(policy, need)
    plan = memory_plan(spec, policy, shape, machine.itemsize, machine.device_is_host, depth)
    block = need.block((shape.rows,) * shape.micro_batches)
    costs = Costs(machine.setting(spec, policy, need), machine.profile, machine.dtype)
    sweeps = {"prefill": 0, "decode": max(1, need.gen_len // 2)}
    busy = {phase: costs.busy(block, sweep) for phase, sweep in sweeps.items()}
    return Corner({tier: plan.bytes_on(tier) for tier in TIERS}, busy)


def solve(
    corners: Corners, decode_sweeps: int, overlap: bool, budgets: Mapping[str, int | None]
) -> Solution | None:  # fmt: skip
    """The fastest shares within the budgets; None when there are none.

    A block's seconds: prefill + decode_sweeps x decode, each at least as long as every lane and as all compute when
    transfers overlap, their sum when they do not. FlexgenError where the solver cannot run.
    """
    problem = pulp.LpProblem("placement", pulp.LpMinimize)
    share = {i: pulp.LpVariable(f"share_{i}", 0, 1) for i in corners.moved}
    for kind in range(3):
        pair = [share[i] for i in (2 * kind, 2 * kind + 1) if i in share]
        problem += pulp.lpSum(pair) <= 1, f"whole_{KINDS[kind]}"
    counts = {"prefill": 1, "decode": decode_sweeps}
    seconds = {phase: pulp.LpVariable(phase, 0) for phase in PHASES}
    objective = pulp.lpSum(counts[phase] * seconds[phase] for phase in PHASES)
    for phase in PHASES:
        busy = {
            name: _mixed(corners, share, [c.busy[phase][name] for c in _all(corners)])
            for name in corners.base.busy[phase]
        }
        objective += TIE_BREAK * counts[phase] * pulp.lpSum(busy.values())
        compute = busy["device_compute"] + busy["host_compute"]
        lanes = [busy[lane] for lane in LANES]
        for i, least in enumerate([compute, *lanes] if overlap else [compute + pulp.lpSum(lanes)]):
            problem += seconds[phase] >= least, f"{phase}_{i}"
    problem += objective
    for tier in TIERS:
        budget = budgets.get(tier)
        if budget is not None:
            held = _mixed(corners, share, [c.nbytes[tier] / GIB for c in _all(corners)])
            problem += held <= budget / GIB, f"memory_{tier}"
    if pulp.LpStatus[_status(problem)] != "Optimal":
        return None
    gains = {t: -(problem.constraints[f"memory_{t}"].pi or 0.0) for t in TIERS if f"memory_{t}" in problem.constraints}
    found = [min(1.0, max(0.0, share[i].value() or 0.0)) if i in share else 0.0 for i in range(6)]
    total = sum(counts[phase] * (seconds[phase].value() or 0.0) for phase in PHASES)
    return Solution(total, (found[0], found[1], found[2], found[3], found[4], found[5]), gains)


def least_excess(corners: Corners, budgets: Mapping[str, int | None]) -> Shares | None:
    """The shares whose bytes exceed the budgets least in all."""
    problem = pulp.LpProblem("least", pulp.LpMinimize)
    share = {i: pulp.LpVariable(f"share_{i}", 0, 1) for i in corners.moved}
    for kind in range(3):
        problem += pulp.lpSum(share[i] for i in (2 * kind, 2 * kind + 1) if i in share) <= 1, f"whole_{KINDS[kind]}"
    excess = {tier: pulp.LpVariable(f"excess_{tier}", 0) for tier in TIERS if budgets.get(tier) is not None}
    problem += pulp.lpSum(excess.values())
    for tier, more in excess.items():
        held = _mixed(corners, share, [c.nbytes[tier] / GIB for c in _all(corners)])
        problem += held - more <= (budgets[tier] or 0) / GIB, f"memory_{tier}"
    if pulp.LpStatus[_status(problem)] != "Optimal":
        return None
    a, b, c, d, e, f = (min(1.0, max(0.0, share[i].value() or 0.0)) if i in share else 0.0 for i in range(6))
    return a, b, c, d, e, f


def _status(problem: pulp.LpProblem) -> int:
    """The solver's verdict. It reads and writes files: FlexgenError where there is no room for them."""
    try:
        with tempfile.TemporaryDirectory(prefix="flexgen-lp-") as folder:
            solver = pulp.PULP_CBC_CMD(msg=False)
            solver.tmpDir = folder
            status: int = problem.solve(solver)
            return status
    except (OSError, PulpSolverError) as error:
        reason = " ".join(str(error).split())
        raise FlexgenError(
            f"the solver of the linear program failed ({reason}); is the folder for temporary files full? Set TMPDIR to"
            " one with room"
        ) from error


def _all(corners: Corners) -> list[Corner]:
    return [corners.base, *corners.moved.values()]


def _mixed(corners: Corners, share: Mapping[int, pulp.LpVariable], values: Sequence[float]) -> pulp.LpAffineExpression:
    """base + sum of share x (corner - base). values: at the base and at each moved corner."""
    base, *others = values
    return base + pulp.lpSum((value - base) * share[i] for i, value in zip(corners.moved, others, strict=True))


# Shares this close to nothing or to everything are taken as such: a sliver on a tier costs transfers of its own.
SNAP = 3
# What makes room first: weights serve a whole block with each load, hidden states move twice a layer.
GIVES_WAY = (0, 2, 4)
# Percents that are moved at a time, as many as it takes to save anything.
STEPS = (1, 2, 4, 8, 16, 32, 64, 100)
Percent = tuple[int, int, int, int, int, int]


def placements(
    spec: ModelSpec, policy: Policy, shares: Sequence[float], need: WorkloadShape, machine: Machine,
    budgets: Mapping[str, int | None],
) -> Iterator[Policy]:  # fmt: skip
    """Policies near the shares that fit: as they are rounded, and with small shares snapped to whole ones.

    Where neither can be made to fit, everything on disk if that does.
    """
    seen: set[Percent] = set()
    for start in (_rounded(shares), _snapped(_rounded(shares)), (0, 0, 0, 0, 0, 0)):
        if seen and not any(start):
            return
        for depth in OVERLAPPED[2:] if policy.overlap else (SEQUENTIAL,):
            found = _made_to_fit(spec, replace(policy, percent=start), need, machine, budgets, depth)
            if found is not None:
                if found.percent not in seen:
                    seen.add(found.percent)
                    yield found
                break


def _rounded(shares: Sequence[float]) -> Percent:
    """Whole percents; pairs never exceed 100."""
    found = [round(100 * share) for share in shares]
    for i in (0, 2, 4):
        found[i + 1] = min(found[i + 1], 100 - found[i])
    return found[0], found[1], found[2], found[3], found[4], found[5]


def _snapped(percent: Percent) -> Percent:
    found = []
    for i in (0, 2, 4):
        three = [percent[i], percent[i + 1], 100 - percent[i] - percent[i + 1]]
        largest = three.index(max(three))
        for tier in range(3):
            if tier != largest and three[tier] <= SNAP:
                three[largest] += three[tier]
                three[tier] = 0
        found += three[:2]
    return found[0], found[1], found[2], found[3], found[4], found[5]


def _made_to_fit(
    spec: ModelSpec,
    policy: Policy,
    need: WorkloadShape,
    machine: Machine,
    budgets: Mapping[str, int | None],
    depth: Depth,
) -> Policy | None:
    """Shares are moved a percent at a time, as many as are missing, to the next slower tier until the plan fits."""
    shape = shape_of(policy, need)
    for _ in range(200):
        over = _overflow(spec, policy, shape, machine, budgets, depth)
        if not over:
            return policy
        moved = _moved(spec, policy, shape, machine, budgets, depth, over)
        if moved is None:
            return None
        policy = moved
    return None


def _overflow(
    spec: ModelSpec,
    policy: Policy,
    shape: BlockShape,
    machine: Machine,
    budgets: Mapping[str, int | None],
    depth: Depth,
) -> dict[str, int]:
    plan = memory_plan(spec, policy, shape, machine.itemsize, machine.device_is_host, depth)
    return plan.overflow(dict(budgets))


def _moved(
    spec: ModelSpec, policy: Policy, shape: BlockShape, machine: Machine, budgets: Mapping[str, int | None],
    depth: Depth, over: Mapping[str, int],
) -> Policy | None:  # fmt: skip
    """One step: of the tier that is short, some percent of the kind that gives way first and helps."""
    tier = next(iter(over))
    # Where the device is host memory, "device" shares live on the host tier.
    offset = {"device": 0, "host": 0 if machine.device_is_host else 1}.get(tier)
    for i in () if offset is None else (kind + offset for kind in GIVES_WAY):
        # Rows move in blocks: of a small matrix a percent may be nothing.
        for count in (min(n, policy.percent[i]) for n in STEPS if policy.percent[i]):
            tried = replace(policy, percent=_shifted(policy.percent, i, count, machine.device_is_host))
            saved = over[tier] - _overflow(spec, tried, shape, machine, budgets, depth).get(tier, 0)
            if saved > 0:
                needed = min(policy.percent[i], max(count, count * over[tier] // saved))
                return replace(policy, percent=_shifted(policy.percent, i, needed, machine.device_is_host))
    return None


def _shifted(percent: Percent, i: int, count: int, device_is_host: bool) -> Percent:
    """`count` percent of share `i` on the next slower tier: the one after it, or disk, which is what is left."""
    found = list(percent)
    found[i] -= count
    if i % 2 == 0 and not device_is_host:
        found[i + 1] += count
    return found[0], found[1], found[2], found[3], found[4], found[5]
