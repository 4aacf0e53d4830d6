"""The linear program over the nine shares of a placement, for fixed batch sizes (FlexGen, Sheng et al. 2023, 4.3).

Bytes and seconds are linear in the shares. Their coefficients come from the memory plan and the costs of placements
with everything on one tier (corners); the LP interpolates between these. A solution is rounded to whole percents
that fit the budgets by the exact memory plan.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from operator import attrgetter
from typing import cast

import pulp
from pulp.apis.core import PulpSolverError

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.config import MOST_ROWS, TIERS, Policy
from flexgen_h2o.core.errors import FlexgenError
from flexgen_h2o.core.model import ModelSpec, with_head_rows
from flexgen_h2o.core.units import GIB
from flexgen_h2o.engine.memory_plan import OVERLAPPED, SEQUENTIAL, Depth, MemoryPlan, memory_plan
from flexgen_h2o.engine.workload import WorkloadShape, shape_of
from flexgen_h2o.planner.costs import LANES, Machine
from flexgen_h2o.planner.predict import PHASES
from flexgen_h2o.planner.work import CostContext

KINDS = ("weights", "cache", "hidden")
# Of equally fast placements the one that keeps resources idle: this share of their busy seconds counts.
TIE_BREAK = 1e-3
# A share this close to nothing or to everything is rounded to it: each tier that is used costs transfers of its own.
SNAP = 3
# Percents that are moved at a time; a few percent of a small matrix may be no whole row block.
STEPS = (1, 2, 4, 8, 16, 32, 64, 100)
MOST_MICRO_BATCH = 512  # more rows make products hardly faster
BATCHES = (1, 2, 4, 8, 16, 32)  # K that is tried at first
LOOK_AHEADS = OVERLAPPED[2:]  # deeper rings are taken where memory is left over

Budgets = Mapping[str, int | None]
Percent = tuple[int, int, int, int, int, int]  # of weights, cache, hidden on device and host; the rest is on disk
NOTHING: Percent = (0, 0, 0, 0, 0, 0)
STREAMED_WEIGHTS: Percent = (0, 0, 100, 0, 100, 0)


@dataclass(frozen=True)
class SearchSpace:
    """What a search chooses from. base: its switches are kept, batch sizes and shares are chosen.

    compress: the compression switches (fields of `Policy`) that may be set as well. budgets: bytes by tier, None for
    no limit. check: called between candidates; what it raises ends the search.
    """

    spec: ModelSpec
    need: WorkloadShape
    base: Policy
    machine: Machine
    budgets: Budgets
    compress: Sequence[str] = ()
    check: Callable[[], None] = interrupts.check

    @property
    def most_micro_batch(self) -> int:
        """Rows of a micro-batch at most. Of a mixture's rows each expert computes per_token / count, so that its
        products go on to gain until it has as many rows as others have at MOST_MICRO_BATCH."""
        experts = self.spec.experts
        return MOST_MICRO_BATCH * (experts.count // experts.per_token if experts else 1)

    def memory(self, policy: Policy, depth: Depth) -> MemoryPlan:
        """The buffers of a policy."""
        shape, machine = shape_of(policy, self.need), self.machine
        return memory_plan(self.spec, policy, shape, machine.itemsize, machine.device_is_host, depth)

    def setting(self, policy: Policy) -> CostContext:
        """What fixes the bytes that a policy moves."""
        rows = self.memory(policy, SEQUENTIAL).head_rows
        return self.machine.setting(with_head_rows(self.spec, rows), policy, self.need)

    def overflow(self, policy: Policy, depth: Depth) -> dict[str, int]:
        """Bytes over budget by tier."""
        return self.memory(policy, depth).overflow(dict(self.budgets))

    def deepest(self, policy: Policy) -> Depth | None:
        """The deepest look-ahead that is worth memory and fits: on each tier with what holds least there."""
        places: tuple[Percent, ...] = (NOTHING, (0, 0, 0, 100, 0, 0), STREAMED_WEIGHTS)
        for depth in LOOK_AHEADS if policy.overlap else (SEQUENTIAL,):
            over = [self.overflow(replace(policy, percent=percent), depth) for percent in places]
            if not any(all(tier in one for one in over) for tier in TIERS):
                return depth
        return None

    def block_sizes(self) -> Iterator[tuple[int, int]]:
        """(micro-batch, micro-batches) of blocks that cut the pile evenly into 1, 2, 4, ... parts."""
        seen, parts, block = set(), 1, self.need.rows
        while True:
            block = min(-(-self.need.rows // parts), MOST_ROWS)
            for batches in (k for k in BATCHES if k <= block):
                gbs = -(-block // batches)
                if gbs <= self.most_micro_batch and (gbs, batches) not in seen:
                    seen.add((gbs, batches))
                    yield gbs, batches
            if block == 1:
                return
            parts *= 2

    def policies(self, gbs: int, batches: int) -> Iterator[Policy]:
        """Policies of one block size, all on disk, that differ in the side of attention and in compression."""
        base, either = self.base, (False, True)
        attention = (base.cpu_cache_compute,) if self.machine.device_is_host or base.cpu_cache_compute else either
        weights, caches = (
            either if name in self.compress else (getattr(base, name),)
            for name in ("compress_weight", "compress_cache")
        )
        for on_host, weight, cache in product(attention, weights, caches):
            yield replace(
                base, gpu_batch_size=gbs, num_gpu_batches=batches, percent=NOTHING, cpu_cache_compute=on_host,
                compress_weight=weight, compress_cache=cache,
            )  # fmt: skip


@dataclass(frozen=True)
class Corner:
    """One placement with each kind of bytes on one tier: bytes by tier, busy seconds by phase and resource."""

    nbytes: Mapping[str, int]
    busy: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Corners:
    """Everything on disk but what is `always` elsewhere, and the same with one kind moved to a faster tier, both by the
    index into `percent`."""

    base: Corner
    moved: Mapping[int, Corner]
    always: tuple[int, ...] = ()


@dataclass(frozen=True)
class Solution:
    """seconds: of one block by the LP; shares: 0 to 1; gain_s_per_gib: seconds a block saves with a GiB more."""

    seconds: float
    shares: Sequence[float]
    gain_s_per_gib: Mapping[str, float]


def fastest_shares(space: SearchSpace, policy: Policy, depth: Depth, budgets: Budgets) -> Solution | None:
    """What `solve` says of shares of weights that split every matrix, or of all weights on the device, where products
    of few rows may read codes as they are: no such price lies on a line between corners."""
    space.check()
    reads_codes = space.machine.setting(space.spec, policy, space.need).reads_codes
    tried = (find_corners(space, policy, depth, *on_device) for on_device in [(), (0,)][: 1 + reads_codes])
    solved = (solve(corners, space.need.gen_len - 1, space.base.overlap, budgets) for corners in tried)
    return min((one for one in solved if one is not None), key=attrgetter("seconds"), default=None)


def find_corners(space: SearchSpace, policy: Policy, depth: Depth, *always: int) -> Corners:
    """policy: batch sizes and switches; its shares do not count. always: as of `Corners`; without, weights are taken to
    be split."""
    # Where the device is host memory there is no host tier besides it.
    indices = range(0, 6, 2 if space.machine.device_is_host else 1)
    free, splits = [i for i in indices if i // 2 not in {j // 2 for j in always}], not always
    moved = {i: find_corner(space, policy, (*always, i), depth, splits) for i in free}
    return Corners(find_corner(space, policy, always, depth, splits), moved, always)


def find_corner(space: SearchSpace, policy: Policy, moved: Sequence[int], depth: Depth, splits: bool = False) -> Corner:
    """The kinds of bytes at these indices of `percent` are moved there, the others are on disk. splits: as of
    `CostContext`."""
    need, machine = space.need, space.machine
    policy = replace(policy, percent=as_percent(100 if i in moved else 0 for i in range(6)))
    plan, shape = space.memory(policy, depth), shape_of(policy, need)
    block = need.block((shape.rows,) * shape.micro_batches)
    costs = machine.costs(with_head_rows(space.spec, plan.head_rows), policy, need, splits)
    sweeps = {"prefill": 0, "decode": max(1, need.gen_len // 2)}
    busy = {phase: costs.busy(block, sweep) for phase, sweep in sweeps.items()}
    return Corner({tier: plan.bytes_on(tier) for tier in TIERS}, busy)


def solve(corners: Corners, decode_sweeps: int, overlap: bool, budgets: Budgets) -> Solution | None:
    """The fastest shares within the budgets; None when there are none.

    A block's seconds: prefill + decode_sweeps x decode, each at least as long as every lane and as all compute when
    transfers overlap, their sum when they do not. FlexgenError where the solver cannot run.
    """
    program = _Program(corners)
    problem, counts = program.problem, {"prefill": 1, "decode": decode_sweeps}
    seconds = {phase: pulp.LpVariable(phase, 0) for phase in PHASES}
    objective = pulp.lpSum(counts[phase] * seconds[phase] for phase in PHASES)
    for phase in PHASES:
        busy = {name: program.interpolated(_busy(phase, name)) for name in corners.base.busy[phase]}
        objective += TIE_BREAK * counts[phase] * pulp.lpSum(busy.values())
        compute = busy["device_compute"] + busy["host_compute"]
        lanes = [busy[lane] for lane in LANES]
        for i, least in enumerate([compute, *lanes] if overlap else [compute + pulp.lpSum(lanes)]):
            problem += seconds[phase] >= least, f"{phase}_{i}"
    problem += objective
    for tier in TIERS:
        budget = budgets.get(tier)
        if budget is not None:
            problem += program.gib_on(tier) <= budget / GIB, f"memory_{tier}"
    shares = program.solved_shares()
    if shares is None:
        return None
    gains = {t: -(problem.constraints[f"memory_{t}"].pi or 0.0) for t in TIERS if f"memory_{t}" in problem.constraints}
    return Solution(sum(counts[phase] * (seconds[phase].value() or 0.0) for phase in PHASES), shares, gains)


def least_excess(corners: Corners, budgets: Budgets) -> Sequence[float] | None:
    """The shares whose bytes exceed the budgets least in all."""
    program = _Program(corners)
    excess = {tier: pulp.LpVariable(f"excess_{tier}", 0) for tier in TIERS if budgets.get(tier) is not None}
    program.problem += pulp.lpSum(excess.values())
    for tier, more in excess.items():
        program.problem += program.gib_on(tier) - more <= (budgets[tier] or 0) / GIB, f"memory_{tier}"
    return program.solved_shares()


def _busy(phase: str, name: str) -> Callable[[Corner], float]:
    return lambda corner: corner.busy[phase][name]


class _Program:
    """Shares as variables, of each kind at most all of it."""

    def __init__(self, corners: Corners) -> None:
        self.problem, self._corners = pulp.LpProblem("placement", pulp.LpMinimize), corners
        self._shares = {i: pulp.LpVariable(f"share_{i}", 0, 1) for i in corners.moved}
        for kind, name in enumerate(KINDS):
            pair = [self._shares[i] for i in (2 * kind, 2 * kind + 1) if i in self._shares]
            if pair:
                self.problem += pulp.lpSum(pair) <= 1, f"whole_{name}"

    def interpolated(self, value: Callable[[Corner], float]) -> pulp.LpAffineExpression:
        """base + sum of share x (corner - base)."""
        base = value(self._corners.base)
        return base + pulp.lpSum((value(self._corners.moved[i]) - base) * share for i, share in self._shares.items())

    def gib_on(self, tier: str) -> pulp.LpAffineExpression:
        return self.interpolated(lambda corner: corner.nbytes[tier] / GIB)

    def solved_shares(self) -> list[float] | None:
        """None without a solution. The solver reads and writes files: FlexgenError where there is no room for them."""
        try:
            with tempfile.TemporaryDirectory(prefix="flexgen-lp-") as folder:
                solver = pulp.PULP_CBC_CMD(msg=False)
                solver.tmpDir = folder
                status = self.problem.solve(solver)
        except (OSError, PulpSolverError) as error:
            reason = " ".join(str(error).split())
            raise FlexgenError(
                f"the solver of the linear program failed ({reason}); is the folder for temporary files full? Set "
                "TMPDIR to one with room"
            ) from error
        if pulp.LpStatus[status] != "Optimal":
            return None
        always = self._corners.always
        values = [self._shares[i].value() or 0.0 if i in self._shares else float(i in always) for i in range(6)]
        return [min(1.0, max(0.0, value)) for value in values]


# ---- whole percents


def as_percent(values: Iterable[int]) -> Percent:
    return cast(Percent, tuple(values))


def tier_percents(percent: Percent, kind: int) -> list[int]:
    """Percents of one kind on device, host and disk."""
    device, host = percent[2 * kind : 2 * kind + 2]
    return [device, host, 100 - device - host]


def moved(policy: Policy, kind: int, source: int, to: int, count: int) -> Policy:
    """The policy with `count` percent of one kind on another tier, tiers as indices of TIERS."""
    shares, found = tier_percents(policy.percent, kind), list(policy.percent)
    shares[source] -= count
    shares[to] += count
    found[2 * kind : 2 * kind + 2] = shares[:2]
    return replace(policy, percent=as_percent(found))


def placements(space: SearchSpace, policy: Policy, shares: Sequence[float]) -> Iterator[Policy]:
    """Policies near the shares that fit: as they are rounded, and with small shares snapped to whole ones.

    Where neither can be made to fit, everything on disk if that does.
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
    """Whole percents; pairs never exceed 100."""
    found = [round(100 * share) for share in shares]
    for i in (0, 2, 4):
        found[i + 1] = min(found[i + 1], 100 - found[i])
    return as_percent(found)


def _snapped(percent: Percent) -> Percent:
    """Shares of up to SNAP percent are added to the largest of their kind."""
    found: list[int] = []
    for kind in range(3):
        shares = tier_percents(percent, kind)
        largest = shares.index(max(shares))
        kept = [n if i == largest or n > SNAP else 0 for i, n in enumerate(shares)]
        kept[largest] += 100 - sum(kept)
        found += kept[:2]
    return as_percent(found)


def _made_to_fit(space: SearchSpace, policy: Policy, depth: Depth) -> Policy | None:
    """Shares are moved to the next slower tier, as many percent as are missing, until the plan fits."""
    for _ in range(200):
        over = space.overflow(policy, depth)
        if not over:
            return policy
        relieved = _relieved(space, policy, depth, over)
        if relieved is None:
            return None
        policy = relieved
    return None


def _relieved(space: SearchSpace, policy: Policy, depth: Depth, over: Mapping[str, int]) -> Policy | None:
    """One step for the first tier that is over budget: some percent of the first kind that helps goes to the next
    slower tier. Weights go first: a whole block uses each load of them; hidden states last: they move twice a layer."""
    tier = next(iter(over))
    if tier == "disk":
        return None
    # Where the device is host memory, "device" shares live on the host tier, and disk is next.
    is_host = space.machine.device_is_host
    source = 0 if is_host else TIERS.index(tier)
    to = 2 if is_host else source + 1
    for kind in range(3):
        share = policy.percent[2 * kind + source]
        for count in (min(n, share) for n in STEPS if share):
            saved = over[tier] - space.overflow(moved(policy, kind, source, to, count), depth).get(tier, 0)
            if saved > 0:
                return moved(policy, kind, source, to, min(share, max(count, count * over[tier] // saved)))
    return None
