"""The linear program (LP) over the nine shares of a placement, for fixed batch sizes.

See FlexGen (Sheng et al. 2023), section 4.3. Bytes and seconds are linear in the shares. Their
coefficients come from the memory plan and the costs of placements with each kind of bytes on one
tier (corners). The LP interpolates between these. A solution is rounded to whole percents that fit
the budgets by the exact memory plan.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import product
from operator import attrgetter
from typing import cast

import pulp

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.config import MAX_ROWS, TIERS, Policy
from flexgen_h2o.core.errors import FlexgenError
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.core.units import GIB, counted, format_seconds
from flexgen_h2o.engine.memory_plan import OVERLAPPED, SEQUENTIAL, Depth, MemoryPlan
from flexgen_h2o.engine.workload import Workload, shape_of
from flexgen_h2o.planner.cost_model import LANES, RESOURCES, CostModel, Machine
from flexgen_h2o.planner.predict import PHASES

KINDS = ("weights", "cache", "hidden")
# The objective counts this share of all busy seconds. So the LP prefers the placement that keeps
# resources idle, if several are equally fast.
TIE_BREAK = 1e-3
# Shares of up to this many percent are added to the largest of their kind, since each tier that is
# used costs transfers of its own.
SNAP = 3
# Percents that are moved at a time. A few percent of a small matrix may be no whole row block.
STEPS = (1, 2, 4, 8, 16, 32, 64, 100)
MAX_MICRO_BATCH = 512  # more sequences make products hardly faster
BATCHES = (1, 2, 4, 8, 16, 32)  # numbers of micro-batches that are tried at first
LOOK_AHEADS = OVERLAPPED[2:]  # deeper rings are only used if memory is left over

# A search of this many seconds says that it is long. Each next line comes after twice as long, and
# at most after a minute.
FIRST_LINE_S = 5.0
LAST_LINE_S = 60.0
LONG_SEARCH = "this search takes longer than usual, up to some minutes; so far"
# PuLP's names of the solvers that may be used. CBC comes with PuLP 2 and 3, except on some
# machines. PuLP 4 brings no solver: setup.py installs HiGHS beside it.
SOLVERS = ("PULP_CBC_CMD", "HiGHS", "COIN_CMD")
OPTIMAL = 1  # PuLP's status of a program that has been solved; the same number in all versions

Budgets = Mapping[str, int | None]  # bytes by tier; None for no limit
# Weights, KV cache and hidden states on device and host, as in Policy.percent. The rest is on disk.
Percent = tuple[int, int, int, int, int, int]
HELD = "GiB"
# Figures of one placement with each kind of bytes on one tier: GiB under (HELD, tier), and busy
# seconds under (phase, resource).
Corner = Mapping[tuple[str, str], float]
# The corners between which the LP interpolates, by what is on a faster tier than disk. Kinds of
# bytes and their tiers are given as indices into `percent`. The shortest key is the base; each
# other key has one more index.
Corners = Mapping[tuple[int, ...], Corner]
NOTHING: Percent = (0, 0, 0, 0, 0, 0)
STREAMED_WEIGHTS: Percent = (0, 0, 100, 0, 100, 0)


class SearchProgress:
    """Says how far a long search is, and lets a signal end it. It is a SearchSpace's `check`.

    say: prints a line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        # Of the first candidate: the machine may be measured before it.
        self._began: float | None = None
        self._said = 0.0
        self._count = 0
        self._wait_s = FIRST_LINE_S

    def __call__(self) -> None:
        interrupts.check()
        self._count += 1
        now = time.monotonic()
        if self._began is None:
            self._began = self._said = now
        if now - self._said < self._wait_s:
            return
        took = format_seconds(now - self._began)
        begins = "still searching" if self._wait_s > FIRST_LINE_S else LONG_SEARCH
        self._say(f"{begins}: {counted(self._count, 'candidate')} in {took}")
        self._said = now
        self._wait_s = min(2 * self._wait_s, LAST_LINE_S)


@dataclass(frozen=True)
class SearchSpace:
    """The input of a search: model, workload, machine, budgets and switches that it may set."""

    spec: ModelSpec
    need: Workload
    # Its switches are kept; batch sizes and shares are chosen.
    base: Policy
    machine: Machine
    # Bytes by tier; None for no limit.
    budgets: Budgets
    # The compression switches (fields of `Policy`) that the search may set as well.
    compress: Sequence[str] = ()
    # Called between candidates. An exception that it raises ends the search.
    check: Callable[[], None] = interrupts.check

    @property
    def most_micro_batch(self) -> int:
        """Most sequences of a micro-batch.

        In a mixture of experts, each expert computes only per_token / count of the rows. Its
        products become faster until the expert has MAX_MICRO_BATCH rows.
        """
        experts = self.spec.experts
        return MAX_MICRO_BATCH * (experts.count // experts.per_token if experts else 1)

    def memory(self, policy: Policy, depth: Depth) -> MemoryPlan:
        """Return the memory plan of a policy."""
        return self.costs(policy).memory.plan(shape_of(policy, self.need), depth)

    def costs(self, policy: Policy) -> CostModel:
        """Return the costs of a policy."""
        return CostModel(self.spec, policy, self.need, self.machine)

    def overflow(self, policy: Policy, depth: Depth) -> dict[str, int]:
        """Return the bytes over budget by tier; empty if the policy fits."""
        return self.memory(policy, depth).overflow(self.budgets)

    def deepest(self, policy: Policy) -> Depth | None:
        """Return the deepest look-ahead that may fit and is worth its memory; None if none fits.

        A look-ahead is ruled out if some tier overflows in every placement that is tried here.
        These are the placements that hold least on the tiers.
        """
        places: tuple[Percent, ...] = (NOTHING, (0, 0, 0, 100, 0, 0), STREAMED_WEIGHTS)
        for depth in LOOK_AHEADS if policy.overlap else (SEQUENTIAL,):
            over = [self.overflow(replace(policy, percent=percent), depth) for percent in places]
            if not any(all(tier in one for one in over) for tier in TIERS):
                return depth
        return None

    def block_sizes(self) -> Iterator[tuple[int, int]]:
        """Yield (sequences per micro-batch, micro-batches) of blocks.

        The blocks cut the workload evenly into 1, 2, 4, ... parts.
        """
        seen = set()
        parts = 1
        block = self.need.rows
        while True:
            block = min(-(-self.need.rows // parts), MAX_ROWS)
            for batches in (k for k in BATCHES if k <= block):
                gbs = -(-block // batches)
                if gbs <= self.most_micro_batch and (gbs, batches) not in seen:
                    seen.add((gbs, batches))
                    yield gbs, batches
            if block == 1:
                return
            parts *= 2

    def policies(self, gbs: int, batches: int) -> Iterator[Policy]:
        """Yield policies of one block size, with everything on disk.

        They differ in the side that attends (device or host) and in compression.
        """
        base = self.base
        either = (False, True)
        attention = (
            (base.cpu_cache_compute,)
            if self.machine.device_is_host or base.cpu_cache_compute
            else either
        )
        weights, caches = (
            either if name in self.compress else (getattr(base, name),)
            for name in ("compress_weight", "compress_cache")
        )
        for on_host, weight, cache in product(attention, weights, caches):
            yield replace(
                base,
                gpu_batch_size=gbs,
                num_gpu_batches=batches,
                percent=NOTHING,
                cpu_cache_compute=on_host,
                compress_weight=weight,
                compress_cache=cache,
            )


@dataclass(frozen=True)
class Candidate:
    """Batch sizes and switches of a policy, and what a search has found out about them so far."""

    # Its shares do not count.
    policy: Policy
    # The deepest look-ahead that fits.
    depth: Depth
    # Lower bound in seconds: no placement runs the workload faster. `search.bounded` sets it.
    bound_s: float = 0.0
    # Six shares from 0 to 1 of the LP's placement, in the order of `percent`. `solve` sets this and
    # the next field.
    shares: Sequence[float] = ()
    # Seconds of one block with these shares, as the LP counts.
    block_s: float = math.inf
    # Seconds of the workload with these shares. `search` sets it.
    seconds: float = math.inf


def fastest_shares(space: SearchSpace, candidate: Candidate, budgets: Budgets) -> Candidate | None:
    """Return the candidate with the faster of the LP's solutions; None if there is none.

    One LP prices products as if each matrix were split over tiers. If products of few rows can read
    codes as they are, a second LP has all weights on the device. That price is on no line between
    the corners of the first LP.
    """
    space.check()
    policy = candidate.policy
    always: list[tuple[int, ...]] = [()]
    if space.costs(policy).reads_codes:
        always.append((0,))
    decode_sweeps = space.need.gen_len - 1
    solved = (
        solve(
            candidate,
            find_corners(space, policy, candidate.depth, *on_device),
            decode_sweeps,
            budgets,
        )
        for on_device in always
    )
    return min((one for one in solved if one is not None), key=attrgetter("block_s"), default=None)


def find_corners(space: SearchSpace, policy: Policy, depth: Depth, *always: int) -> Corners:
    """Return the corners of a policy, whose shares do not count.

    always: kinds that are on a faster tier in all corners. If it is empty, matrices of weights are
        assumed to be split.
    """
    # If the device is host memory, there is no other host tier.
    indices = range(0, 6, 2 if space.machine.device_is_host else 1)
    free = [i for i in indices if i // 2 not in {j // 2 for j in always}]
    return {
        moved: find_corner(space, policy, moved, depth, splits=not always)
        for moved in (always, *((*always, i) for i in free))
    }


def find_corner(
    space: SearchSpace, policy: Policy, moved: Sequence[int], depth: Depth, splits: bool = False
) -> Corner:
    """Return one corner of a policy, whose shares do not count.

    moved: indices into `percent`, which name kinds of bytes and their tier. Other kinds are on
    disk. splits: see `CostModel`.
    """
    need = space.need
    policy = replace(policy, percent=as_percent(100 if i in moved else 0 for i in range(6)))
    costs = replace(space.costs(policy), splits=splits)
    shape = shape_of(policy, need)
    plan = costs.memory.plan(shape, depth)
    costs = costs.with_head_rows(plan.head_rows)
    block = need.block((shape.rows,) * shape.micro_batches)
    found = {(HELD, tier): plan.bytes_on(tier) / GIB for tier in TIERS}
    for phase, sweep in (("prefill", 0), ("decode", max(1, need.gen_len // 2))):
        found |= {(phase, name): seconds for name, seconds in costs.busy(block, sweep).items()}
    return found


def solve(
    candidate: Candidate, corners: Corners, decode_sweeps: int, budgets: Budgets
) -> Candidate | None:
    """Return the candidate with the fastest shares within the budgets; None if there are none.

    The seconds of a block are prefill + decode_sweeps x decode. If transfers overlap, each phase is
    at least as long as every lane and as all compute. If they do not, it is as long as their sum.
    Raise FlexgenError if the solver cannot run.
    """
    program = _Program(corners)
    problem = program.problem
    overlap = candidate.policy.overlap
    counts = {"prefill": 1, "decode": decode_sweeps}
    seconds = {phase: program.variable(phase) for phase in PHASES}
    objective = pulp.lpSum(counts[phase] * seconds[phase] for phase in PHASES)
    for phase in PHASES:
        busy = {name: program.interpolated(phase, name) for name in RESOURCES}
        objective += TIE_BREAK * counts[phase] * pulp.lpSum(busy.values())
        compute = busy["device_compute"] + busy["host_compute"]
        lanes = [busy[lane] for lane in LANES]
        for i, least in enumerate([compute, *lanes] if overlap else [compute + pulp.lpSum(lanes)]):
            problem += seconds[phase] >= least, f"{phase}_{i}"
    problem += objective
    limits = {tier: budget for tier in TIERS if (budget := budgets.get(tier)) is not None}
    for tier, budget in limits.items():
        problem += program.interpolated(HELD, tier) <= budget / GIB, f"memory_{tier}"
    shares = program.solved_shares()
    if shares is None:
        return None
    return replace(
        candidate,
        shares=shares,
        block_s=sum(counts[phase] * (seconds[phase].value() or 0.0) for phase in PHASES),
    )


def least_excess(corners: Corners, budgets: Budgets) -> Sequence[float] | None:
    """Return the shares whose bytes exceed the budgets least in total; None without a solution."""
    program = _Program(corners)
    limits = {tier: budget for tier in TIERS if (budget := budgets.get(tier)) is not None}
    excess = {tier: program.variable(f"excess_{tier}") for tier in limits}
    program.problem += pulp.lpSum(excess.values())
    for tier, budget in limits.items():
        held = program.interpolated(HELD, tier)
        program.problem += held - excess[tier] <= budget / GIB, f"memory_{tier}"
    return program.solved_shares()


def find_solver() -> pulp.LpSolver:
    """Return the solver that comes with PuLP (CBC, before PuLP 4), or another that is installed.

    Raise FlexgenError if there is none.
    """
    for name in SOLVERS:
        if name in pulp.listSolvers():
            solver = pulp.getSolver(name, msg=False)
            if solver.available():
                return solver
    raise FlexgenError(
        f"PuLP {metadata.version('pulp')} finds no solver for the plan; pip install highspy"
    )


class _Program:
    """A linear program with the shares as variables. Those of one kind are at most 1 together.

    Only this class knows in what PuLP 2.8, 3 and 4 differ.
    """

    def __init__(self, corners: Corners) -> None:
        self.problem = pulp.LpProblem("placement", pulp.LpMinimize)
        self._always, *moved = sorted(corners, key=len)
        self._base = corners[self._always]
        self._moved = {places[-1]: corners[places] for places in moved}
        self._shares = {i: self.variable(f"share_{i}", 1) for i in self._moved}
        for kind, name in enumerate(KINDS):
            pair = [self._shares[i] for i in (2 * kind, 2 * kind + 1) if i in self._shares]
            if pair:
                self.problem += pulp.lpSum(pair) <= 1, f"whole_{name}"

    def interpolated(self, what: str, name: str) -> pulp.LpAffineExpression:
        """Return the expression base + sum of share x (corner - base) of one figure of corners."""
        base = self._base[what, name]
        return base + pulp.lpSum(
            (self._moved[i][what, name] - base) * share for i, share in self._shares.items()
        )

    def variable(self, name: str, most: float | None = None) -> pulp.LpVariable:
        """Return a new variable of at least 0 and at most `most`; None for no limit."""
        if hasattr(self.problem, "add_variable"):  # PuLP 3.3 and newer; PuLP 4 has no other way
            return self.problem.add_variable(name, 0, most)
        return pulp.LpVariable(name, 0, most)

    def solved_shares(self) -> list[float] | None:
        """Solve the program and return the six shares; None without a solution.

        CBC reads and writes files. Raise FlexgenError if there is no room for them, or no solver.
        """
        try:
            with tempfile.TemporaryDirectory(prefix="flexgen-lp-") as folder:
                solver = find_solver()
                solver.tmpDir = folder  # HiGHS writes nothing
                result = self.problem.solve(solver)
        except (OSError, pulp.PulpSolverError) as error:
            reason = " ".join(str(error).split())
            raise FlexgenError(
                f"the solver of the linear program failed ({reason}); is the folder for temporary "
                "files full? Set TMPDIR to one with room"
            ) from error
        if getattr(result, "status", result) != OPTIMAL:  # PuLP 4 returns more than the status
            return None
        values = [
            self._shares[i].value() or 0.0 if i in self._shares else float(i in self._always)
            for i in range(6)
        ]
        return [min(1.0, max(0.0, value)) for value in values]


# ---- whole percents


def as_percent(values: Iterable[int]) -> Percent:
    """Return six values as a `Percent`."""
    return cast(Percent, tuple(values))


def tier_percents(percent: Percent, kind: int) -> list[int]:
    """Return the percents of one kind (an index of KINDS) on device, host and disk."""
    device, host = percent[2 * kind : 2 * kind + 2]
    return [device, host, 100 - device - host]


def moved(policy: Policy, kind: int, source: int, to: int, count: int) -> Policy:
    """Return the policy with `count` percent of one kind moved to another tier.

    kind: an index of KINDS.
    source, to: indices of TIERS.
    """
    shares = tier_percents(policy.percent, kind)
    found = list(policy.percent)
    shares[source] -= count
    shares[to] += count
    found[2 * kind : 2 * kind + 2] = shares[:2]
    return replace(policy, percent=as_percent(found))


def placements(space: SearchSpace, policy: Policy, shares: Sequence[float]) -> Iterator[Policy]:
    """Yield policies that fit, near these shares.

    The shares are rounded once as they are, and once with small shares snapped to whole ones. If
    neither can be made to fit, the policy with everything on disk is tried.
    """
    seen: set[Percent] = set()
    for start in (_rounded(shares), _snapped(_rounded(shares)), NOTHING):
        if seen and start == NOTHING:
            return
        for depth in LOOK_AHEADS if policy.overlap else (SEQUENTIAL,):
            found = _made_to_fit(space, replace(policy, percent=start), depth)
            if found is not None:
                if found.percent not in seen:
                    seen.add(found.percent)
                    yield found
                break


def _rounded(shares: Sequence[float]) -> Percent:
    """Return shares as whole percents. The two of one kind never exceed 100."""
    found = [round(100 * share) for share in shares]
    for i in (0, 2, 4):
        found[i + 1] = min(found[i + 1], 100 - found[i])
    return as_percent(found)


def _snapped(percent: Percent) -> Percent:
    """Return the percents with shares of up to SNAP percent added to the largest of their kind."""
    found: list[int] = []
    for kind in range(3):
        shares = tier_percents(percent, kind)
        largest = shares.index(max(shares))
        kept = [n if i == largest or n > SNAP else 0 for i, n in enumerate(shares)]
        kept[largest] += 100 - sum(kept)
        found += kept[:2]
    return as_percent(found)


def _made_to_fit(space: SearchSpace, policy: Policy, depth: Depth) -> Policy | None:
    """Return the policy with shares moved to slower tiers until it fits; None if it never does.

    Each step moves about as many percent as are missing.
    """
    for _ in range(200):
        over = space.overflow(policy, depth)
        if not over:
            return policy
        relieved = _relieved(space, policy, depth, over)
        if relieved is None:
            return None
        policy = relieved
    return None


def _relieved(
    space: SearchSpace, policy: Policy, depth: Depth, over: Mapping[str, int]
) -> Policy | None:
    """Return the policy after one step that relieves the first tier that is over budget.

    Some percent of the first kind that helps moves to the next slower tier. Weights move first,
    since a whole block uses each load of them. Hidden states move last, since they are moved twice
    per layer. The result is None if no step helps.
    """
    tier = next(iter(over))
    if tier == "disk":
        return None
    # If the device is host memory, "device" shares are on the host tier, and disk is next.
    is_host = space.machine.device_is_host
    source = 0 if is_host else TIERS.index(tier)
    to = 2 if is_host else source + 1
    for kind in range(3):
        share = policy.percent[2 * kind + source]
        for count in (min(n, share) for n in STEPS if share):
            saved = over[tier] - space.overflow(moved(policy, kind, source, to, count), depth).get(
                tier, 0
            )
            if saved > 0:
                return moved(
                    policy, kind, source, to, min(share, max(count, count * over[tier] // saved))
                )
    return None
