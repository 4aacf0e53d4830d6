"""The policy search: enumerate batch sizes and switches, place each by the LP, simulate, choose.

A lower bound prunes candidates that cannot win before the LP is solved for them. It counts what
must be computed, and what must be read from disk. Around the best candidate of a coarse grid the
search continues in smaller steps. If budgets leave room for almost nothing, it looks for the policy
with one sequence at a time that exceeds them least.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations, product
from operator import attrgetter

from flexgen_h2o.core.config import MAX_ROWS, TIERS, Policy
from flexgen_h2o.core.errors import DoesNotFitError
from flexgen_h2o.core.units import GIB, MIB, advice, format_bytes, less_margin, round_up
from flexgen_h2o.engine.memory_plan import SEQUENTIAL, Depth, MemoryPlan
from flexgen_h2o.engine.workload import Workload, even_blocks, shape_of
from flexgen_h2o.planner.cost_model import disk_read_bytes
from flexgen_h2o.planner.lp import (
    BATCHES,
    LOOK_AHEADS,
    NOTHING,
    STREAMED_WEIGHTS,
    Budgets,
    Candidate,
    Percent,
    SearchSpace,
    as_percent,
    fastest_shares,
    find_corner,
    find_corners,
    least_excess,
    moved,
    placements,
    tier_percents,
)
from flexgen_h2o.planner.predict import CUT_BLOCKS, MAX_WALKED, Prediction, cut_blocks, predict
from flexgen_h2o.planner.report import More, advice_on

# Numbers of micro-batches that `_largest` tries. Around the best candidate, others are tried.
FEW_BATCHES = BATCHES[:3]
# Only the filled part of a KV unit is read: on average more than this share of its size.
MIN_READ = 0.5
MEMORY = TIERS[:2]
IN_MEMORY: Percent = (100, 0, 100, 0, 100, 0)
MAX_SOLVED = 64
# The LP knows no waits and no contention. A plan may take this many times as long as it says.
OPTIMISM = 1.25
# Candidates are simulated in the LP's order. The first 6 are always simulated, and up to 24 until
# their schedules have 40,000 steps. After that only candidates of at most 4,000 steps that the LP
# rates faster than the best are simulated. Blocks of many micro-batches take most steps and wait
# most, which the LP does not know: alone they would hide better candidates. A candidate of more
# than 150,000 steps is only simulated if nothing else is. 32 micro-batches of a model with 128
# experts per block may have as many.
MIN_SIMULATED = 6
MAX_SIMULATED = 24
QUICK_STEPS = 40_000
FEW_STEPS = 4_000
LONG_STEPS = 150_000
MAX_STEPS = 4  # moves from the best plan to a better neighbour
EQUAL = 1.003  # plans whose seconds differ by less are equally fast
WORTH_READING = 1.05  # a plan in memory is taken unless one that uses the disk is faster by more
TIGHTER = 0.95  # share of the budgets for the LP if no rounded placement fits the real ones
WHOLE = ((100, 0), (0, 100), (0, 0))  # each kind of bytes on one tier
DESCENT_STEPS = (32, 8, 4, 2, 1)  # percents that are moved at a time
# A larger budget is named if it is at most this many times the given one, and if it saves more than
# half of the bytes that are read from disk.
WORTH_MORE = 1.25
# It must also run the workload in less than this share of its time.
WORTH_A_HINT = 0.95
# Of such larger budgets, the smallest is named that reads at most this many times the fewest bytes.
NEARLY = 1.1


@dataclass(frozen=True)
class Plan:
    """A policy for a workload, with the buffers that it needs. `evaluate` and Planner make it."""

    policy: Policy
    need: Workload
    memory: MemoryPlan
    # Predicted cost; None if it was not asked for.
    predicted: Prediction | None = None

    @property
    def prediction(self) -> Prediction:
        """Predicted cost of a plan that has one."""
        assert self.predicted is not None
        return self.predicted

    @property
    def seconds(self) -> float:
        """Predicted seconds of the workload."""
        return self.prediction.total_s

    @property
    def uses_disk(self) -> bool:
        """Whether a share of the weights, the KV cache or the hidden states is on disk."""
        policy = self.policy
        return any(
            shares[2]
            for shares in (policy.weight_shares, policy.cache_shares, policy.hidden_shares)
        )


def evaluate(space: SearchSpace, policy: Policy) -> Plan:
    """Return the plan of a given policy. Raise DoesNotFitError if it does not fit the budgets."""
    space.check()
    need = space.need
    costs = space.costs(policy)
    plan = costs.memory.plan_within(shape_of(policy, need), space.budgets)
    return Plan(policy, need, plan, predict(costs, plan, even_blocks(policy, need)))


def search(space: SearchSpace) -> Plan:
    """Return the plan that runs the workload in the least time.

    Raise DoesNotFitError if nothing fits. The error names the smallest budget that would do.
    """
    found = _fastest(space)
    if found is None:
        raise DoesNotFitError(too_small(space))
    return found


def _fastest(space: SearchSpace) -> Plan | None:
    """Return the plan that `search` returns; None if nothing fits."""
    # If nothing of the coarse grid fits, one sequence at a time may.
    found = _coarse(space) or [
        evaluate(space, policy) for policy in single_row_policies(space, MAX_SIMULATED)
    ]
    if not found:
        return None
    # Plans that are all in memory and plans that use the disk improve in different directions.
    kinds = [[p for p in found if p.uses_disk is on_disk] for on_disk in (False, True)]
    found += [_improved(space, min(kind, key=attrgetter("seconds"))) for kind in kinds if kind]
    best = min(found, key=attrgetter("seconds"))
    if best.uses_disk:
        with suppress(DoesNotFitError):
            found.append(evaluate(space, replace(best.policy, percent=IN_MEMORY)))
    found = [
        p for p in found if not p.uses_disk and p.seconds <= WORTH_READING * best.seconds
    ] or found
    fastest = min(plan.seconds for plan in found)
    # Plans within EQUAL count as equally fast. The one that uses least of the slowest tiers wins.
    return min(
        (plan for plan in found if plan.seconds <= EQUAL * fastest),
        key=lambda plan: (
            *(plan.memory.bytes_on(tier) // GIB for tier in reversed(TIERS)),
            plan.seconds,
        ),
    )


def _coarse(space: SearchSpace) -> list[Plan]:
    """Return simulated plans of the best candidates of the coarse grid; empty if nothing fits."""
    found: list[Plan] = []
    tried = steps = 0
    fastest = math.inf
    solved = [(_steps(space, candidate.policy), candidate) for candidate in _solved(space)]
    for own, candidate in sorted(solved, key=lambda one: one[0] > LONG_STEPS):
        is_quick = steps <= QUICK_STEPS or (own <= FEW_STEPS and candidate.seconds < fastest)
        is_late = tried == MAX_SIMULATED or (tried >= MIN_SIMULATED and not is_quick)
        if found and (is_late or own > LONG_STEPS):
            continue
        tried = tried + 1
        steps = steps + own
        found += _simulated(space, candidate)
        fastest = min((plan.seconds for plan in found), default=math.inf)
    return found


def _steps(space: SearchSpace, policy: Policy) -> int:
    """Return the number of steps of the schedule that a simulation of the policy walks."""
    layers = len(space.costs(policy).layers.layers)
    walked = layers * cut_blocks(space.spec.num_blocks, layers) // CUT_BLOCKS
    return walked * policy.num_gpu_batches * min(space.need.gen_len, MAX_WALKED)


def sensitivity(space: SearchSpace, plan: Plan) -> dict[str, float]:
    """Return the seconds that one GiB more saves the workload, by tier with a budget.

    The result is empty if the LP has no solution.

    The LP is solved at the plan's batch sizes and switches, with its budgets and with one GiB more.
    The share of the seconds that this saves is the plan's too. But memory saves only what the plan
    waits, as computing takes as long as before. Larger batches that more memory allows are ignored.
    """
    asked = Candidate(plan.policy, space.deepest(plan.policy) or SEQUENTIAL)
    now = fastest_shares(space, asked, space.budgets)
    if now is None or not now.block_s:
        return {}
    most = plan.prediction.waits_s
    found = {}
    for tier in TIERS:
        budget = space.budgets.get(tier)
        if budget is not None:
            more = fastest_shares(space, asked, {**space.budgets, tier: budget + GIB}) or now
            saved = plan.seconds * (1 - more.block_s / now.block_s)
            found[tier] = max(0.0, min(saved, most))
    return found


def disk_reads(space: SearchSpace, policy: Policy) -> float:
    """Return the bytes that the workload reads from disk during its sweeps."""
    costs = space.costs(policy).with_head_rows(space.memory(policy, SEQUENTIAL).head_rows)
    return disk_read_bytes(costs, even_blocks(policy, space.need))


def _blocks(space: SearchSpace, policy: Policy) -> float:
    """Return the number of blocks of the workload.

    A partial block counts as its part of a block, which is the least that it may cost.
    """
    return space.need.rows / min(policy.block_size, space.need.rows)


def _likely_blocks(space: SearchSpace, policy: Policy) -> float:
    """Return the likely number of blocks of the workload, for ranking candidates.

    A partial block counts as the mean of its part and a whole block, since its weights are read
    whatever its size.
    """
    full, rest = divmod(space.need.rows, policy.block_size)
    if not full or not rest:
        return max(1.0, full)
    return full + (1 + rest / policy.block_size) / 2


def _solved(space: SearchSpace) -> list[Candidate]:
    """Return candidates of the coarse grid with the LP's shares and seconds, fastest first.

    If some hidden states move, no micro-batches are joined, which the LP does not see. Its seconds
    are then too few, and such a candidate rules out no other.
    """
    found: list[Candidate] = []
    fastest = math.inf
    for candidate in candidates(space)[:MAX_SOLVED]:
        if candidate.bound_s >= OPTIMISM * fastest:
            break
        solved = fastest_shares(space, candidate, space.budgets)
        if solved is not None:
            seconds = solved.block_s * _likely_blocks(space, candidate.policy)
            found.append(replace(solved, seconds=seconds))
            if round(solved.shares[4], 2) in (0, 1):
                fastest = min(fastest, seconds)
    return sorted(found, key=attrgetter("seconds"))


def _simulated(space: SearchSpace, candidate: Candidate) -> list[Plan]:
    """Return the plans of placements in whole percents that fit, near a candidate's shares."""
    policy = candidate.policy
    placed = list(placements(space, policy, candidate.shares))
    if not placed:
        tighter = {
            tier: None if b is None else int(b * TIGHTER) for tier, b in space.budgets.items()
        }
        other = fastest_shares(space, candidate, tighter)
        placed = [] if other is None else list(placements(space, policy, other.shares))
    found = []
    for one in placed:
        # If the whole KV cache is on the device, --cpu-cache-compute would do nothing.
        does_nothing = one.percent[2] == 100 and not space.base.cpu_cache_compute
        on_host = one.cpu_cache_compute and not does_nothing
        found.append(evaluate(space, replace(one, cpu_cache_compute=on_host)))
    return found


def _improved(space: SearchSpace, best: Plan) -> Plan:
    """Return the plan that repeated moves to the best neighbour reach, at most MAX_STEPS."""
    tried = {replace(best.policy, percent=NOTHING)}
    most_steps = max(LONG_STEPS, _steps(space, best.policy))
    for _ in range(MAX_STEPS):
        found = [best]
        for candidate in _neighbours(space, best.policy):
            policy = candidate.policy
            if (
                policy in tried
                or candidate.bound_s >= best.seconds
                or _steps(space, policy) > most_steps
            ):
                continue
            tried.add(policy)
            solved = fastest_shares(space, candidate, space.budgets)
            if solved is not None and solved.block_s * _blocks(space, policy) < best.seconds:
                found += _simulated(space, solved)
        better = min(found, key=attrgetter("seconds"))
        if better is best:
            return best
        best = better
    return best


# ---- what is tried


def candidates(space: SearchSpace) -> list[Candidate]:
    """Return all candidates of the coarse grid that may fit, the lowest bound first."""
    even = (
        policy for gbs, batches in space.block_sizes() for policy in space.policies(gbs, batches)
    )
    tried = (bounded(space, policy) for policy in dict.fromkeys([*even, *_largest(space)]))
    return sorted((c for c in tried if c is not None), key=attrgetter("bound_s"))


def _neighbours(space: SearchSpace, policy: Policy) -> list[Candidate]:
    """Return candidates with larger and smaller micro-batches, and with more and fewer of them."""
    gbs = policy.gpu_batch_size
    batches = policy.num_gpu_batches
    sizes = [
        (gbs * 2 // 3, batches),
        (gbs * 3 // 2, batches),
        (gbs, batches * 2 // 3),
        (gbs, batches * 3 // 2),
        (gbs + 1, batches),
        (gbs - 1, batches),
        (gbs, batches + 1),
        (gbs // 2, 2 * batches),
        (2 * gbs, batches // 2),
    ]
    most = min(space.need.rows, MAX_ROWS)
    allowed = [
        (a, b)
        for a, b in dict.fromkeys(sizes)
        if 1 <= a <= space.most_micro_batch and b >= 1 and a * b <= most
    ]
    tried = (
        bounded(space, p)
        for a, b in allowed
        if (a, b) != (gbs, batches)
        for p in space.policies(a, b)
    )
    return [candidate for candidate in tried if candidate is not None]


def _largest(space: SearchSpace) -> Iterator[Policy]:
    """Yield policies with the largest micro-batches that memory holds, for a few numbers of them.

    There are three ways to hold data: everything on the device, everything in memory, or everything
    but the weights in memory. A card adds a fourth: only hidden states on the card. For each, the
    micro-batches that cut the workload into as many equal blocks are tried too. The sizes are found
    with the base policy's switches, and tried with all switches.
    """
    rows = space.need.rows
    kinds = [(IN_MEMORY, MEMORY[:1]), (IN_MEMORY, MEMORY), (STREAMED_WEIGHTS, MEMORY)]
    kinds += [] if space.machine.device_is_host else [((0, 100, 0, 100, 100, 0), MEMORY[:1])]
    for batches in (k for k in FEW_BATCHES if k <= rows):
        for percent, tiers in kinds:
            gbs = _most_rows(
                space, replace(space.base, num_gpu_batches=batches, percent=percent), tiers
            )
            if gbs:
                blocks = -(-rows // (gbs * batches))
                for size in (gbs, -(-rows // (blocks * batches))):
                    yield from space.policies(size, batches)


def _most_rows(space: SearchSpace, policy: Policy, tiers: Sequence[str]) -> int:
    """Return the sequences of the largest micro-batches that fit these tiers together.

    The policy's shares count. The result is 0 if no micro-batches fit.
    """
    depth = LOOK_AHEADS[0] if policy.overlap else SEQUENTIAL

    def is_over(rows: int) -> bool:
        return _over_memory(space, replace(policy, gpu_batch_size=rows), depth, tiers) > 0

    batches = policy.num_gpu_batches
    most = min(-(-space.need.rows // batches), MAX_ROWS // batches, space.most_micro_batch)
    # Memory grows with the sequences, so bisection finds the first number that does not fit. Its
    # index into the range is the number before it.
    return bisect_left(range(1, most), True, key=is_over) if is_over(most) else most


def _over_memory(
    space: SearchSpace, policy: Policy, depth: Depth, tiers: Sequence[str] = MEMORY
) -> float:
    """Return the bytes that these tiers together hold above their budgets, at least 0.

    The result is 0 if one of the tiers has no budget.
    """
    budgets = [budget for tier in tiers if (budget := space.budgets.get(tier)) is not None]
    if len(budgets) < len(tiers):
        return 0.0
    return float(max(0, sum(map(space.memory(policy, depth).bytes_on, tiers)) - sum(budgets)))


def bounded(space: SearchSpace, policy: Policy) -> Candidate | None:
    """Return the candidate of a policy with its lower bound; None if it cannot fit."""
    space.check()
    depth = space.deepest(policy)
    least = (replace(policy, percent=percent) for percent in (IN_MEMORY, STREAMED_WEIGHTS))
    if depth is None or all(_over_memory(space, one, SEQUENTIAL, TIERS) for one in least):
        return None
    # Disk reads slow down compute, so a step computes fastest if everything is in memory. But the
    # device computes less if the KV cache is off it and the host attends. So both corners count.
    places: tuple[tuple[int, ...], ...] = (
        ((0, 2, 4),) if space.machine.device_is_host else ((0, 2, 4), ())
    )
    corners = [find_corner(space, policy, place, depth) for place in places]
    overflow = _over_memory(space, replace(policy, percent=IN_MEMORY), depth)
    least_s = {
        "prefill": 0.0,
        "decode": MIN_READ * overflow / space.machine.profile.disk_read_bytes_per_s,
    }
    for phase in least_s:
        least_s[phase] = max(
            least_s[phase], min(corner[phase, "device_compute"] for corner in corners)
        )
    bound_s = least_s["prefill"] + (space.need.gen_len - 1) * least_s["decode"]
    return Candidate(policy, depth, bound_s * _blocks(space, policy))


# ---- one row at a time, where budgets are tight


def _excess(space: SearchSpace, plan: Plan) -> int:
    """Return the bytes over budget of all tiers together."""
    return sum(plan.memory.overflow(space.budgets).values())


def _enough(space: SearchSpace, plan: Plan) -> dict[str, int]:
    """Return budgets in bytes that would do, of the tiers that are short."""
    return {tier: plan.memory.bytes_on(tier) for tier in plan.memory.overflow(space.budgets)}


def tight_fit(space: SearchSpace) -> Plan:
    """Return the policy with one sequence at a time that exceeds the budgets least.

    The search moves whole percents, from the LP's shares and from kinds on whole tiers.
    """
    found = []
    excess = partial(_excess, space)
    for policy in space.policies(1, 1):
        starts = [min(_on_whole_tiers(space, policy), key=excess)]
        shares = least_excess(find_corners(space, policy, SEQUENTIAL), space.budgets)
        if shares is not None:
            starts.append(_held(space, policy, as_percent(int(100 * share) for share in shares)))
        found += [_descended(space, start) for start in starts]
    return min(found, key=excess)


def single_row_policies(space: SearchSpace, most: int) -> list[Policy]:
    """Return at most `most` policies with one sequence at a time that fit.

    The policies with most bytes in fast memory come first.
    """
    every = [held for policy in space.policies(1, 1) for held in _on_whole_tiers(space, policy)]
    fitting = sorted(
        (h for h in every if not _excess(space, h)),
        key=lambda h: [h.memory.bytes_on(t) for t in reversed(TIERS)],
    )
    if fitting:
        return [held.policy for held in fitting[:most]]
    tried = tight_fit(space)
    return [] if _excess(space, tried) else [tried.policy]


def _held(space: SearchSpace, policy: Policy, percent: Percent) -> Plan:
    """Return the policy with this placement, and its buffers without look-ahead."""
    placed = replace(policy, percent=percent)
    return Plan(placed, space.need, space.memory(placed, SEQUENTIAL))


def _on_whole_tiers(space: SearchSpace, policy: Policy) -> list[Plan]:
    """Return the 27 placements with each kind of bytes on one tier."""
    return [_held(space, policy, (*w, *c, *h)) for w, c, h in product(WHOLE, repeat=3)]


def _descended(space: SearchSpace, best: Plan) -> Plan:
    """Return a better placement: move shares of one kind between two tiers while that helps."""
    step = 0
    excess = _excess(space, best)
    while excess and step < len(DESCENT_STEPS):
        tried = [_held(space, p, p.percent) for p in _moves(best.policy, DESCENT_STEPS[step])]
        better = min(tried, key=partial(_excess, space), default=best)
        less = _excess(space, better)
        if less < excess:
            best = better
            excess = less
        else:
            step += 1
    return best


def _moves(policy: Policy, most: int) -> Iterator[Policy]:
    """Yield the policy with at most `most` percent moved, for each kind and each pair of tiers."""
    for kind, (source, to) in product(range(3), permutations(range(len(TIERS)), 2)):
        count = min(most, tier_percents(policy.percent, kind)[source])
        if count:
            yield moved(policy, kind, source, to, count)


def too_small(space: SearchSpace) -> str:
    """Return one line: tiers that are too small even for one sequence, and what would do."""
    held = tight_fit(space)
    # The line names budgets. A search with these budgets must find a policy.
    if not single_row_policies(_with_budgets(space, _enough(space, held)), 1):
        every = (one for policy in space.policies(1, 1) for one in _on_whole_tiers(space, policy))
        held = min(every, key=partial(_excess, space))
    enough = _enough(space, held)
    short = held.memory.overflow(space.budgets)
    given = " and ".join(
        f"--{tier}-mem {format_bytes(space.budgets.get(tier) or 0)}" for tier in enough
    )
    needed = " ".join(f"--{tier}-mem {nbytes}" for tier, nbytes in enough.items())
    reads = disk_reads(space, held.policy)
    more = advice_on(worth_more(_with_budgets(space, enough), reads))
    read = f" and {format_bytes(reads)} of disk reads" if reads else ""
    said = (
        (advice(tier, space.budgets.get(tier), n), f"raise --{tier}-mem")
        for tier, n in enough.items()
    )
    full = [text for text, usual in said if text != usual]
    return (
        f"{given} {'is' if len(enough) == 1 else 'are'} too small by "
        f"{', '.join(map(format_bytes, short.values()))}; the least that would do: {needed} "
        f"({', '.join(map(format_bytes, enough.values()))}), with "
        f"{_switches(space, held.policy)}{read}"
        f"{more}{'; ' + full[0] if full else ''}"
    )


def _with_budgets(space: SearchSpace, budgets: Budgets) -> SearchSpace:
    """Return the search space with these budgets in place of its own ones of the same tiers."""
    return replace(space, budgets={**space.budgets, **budgets})


def _switches(space: SearchSpace, policy: Policy) -> str:
    """Return, as text, the switches that the search has set besides the placement."""
    said = ["one prompt at a time"]
    if policy.cpu_cache_compute and not space.base.cpu_cache_compute:
        said.append("--cpu-cache-compute")
    for name in space.compress:
        flag = f"--{name.replace('_', '-')}"
        said.append(flag if getattr(policy, name) else f"without {flag}")
    return ", ".join(said)


def worth_more(space: SearchSpace, reads: float, seconds: float = math.inf) -> More | None:
    """Return slightly larger budgets that more than halve the disk reads; None if there are none.

    With them are the bytes that the workload then reads from disk at most. The machine has that
    much memory, and the workload takes less than WORTH_A_HINT of its time.

    reads: bytes that the workload reads from disk now.
    seconds: predicted seconds of the workload now; infinite if they do not matter.

    If memory is just enough for one or two sequences, all weights are read for each of them. A few
    MiB more hold many sequences. A plan that reads more may be faster still, so the plan counts
    that the search finds with the larger budgets.
    """
    found: list[More] = []
    if not reads:
        return None
    profile = space.machine.profile
    there = {tier: less_margin(getattr(profile, f"{tier}_mem_bytes")) for tier in TIERS}
    for (gbs, batches), (w, c, h) in product(
        space.block_sizes(), product(WHOLE[1:], WHOLE, WHOLE[:2])
    ):
        for policy in space.policies(gbs, batches):
            held = _held(space, policy, (*w, *c, *h))
            more = {tier: round_up(nbytes, MIB) for tier, nbytes in _enough(space, held).items()}
            if more and all(
                nbytes <= min(WORTH_MORE * (space.budgets.get(tier) or 0), there[tier])
                for tier, nbytes in more.items()
            ):
                found.append((more, disk_reads(space, held.policy)))
    fewest = min((left for _, left in found), default=reads)
    if NEARLY * fewest >= reads / 2:
        return None
    enough = [more for more, left in found if left <= NEARLY * fewest]
    budgets = min(enough, key=lambda more: sum(more.values()))
    larger = _with_budgets(space, budgets)
    plan = _fastest(larger)
    if plan is None or plan.seconds >= WORTH_A_HINT * seconds:
        return None
    fewer = disk_reads(larger, plan.policy)
    return (budgets, fewer) if fewer < reads / 2 else None
