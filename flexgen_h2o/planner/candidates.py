"""What the search tries: batch sizes, the side of attention, compression, and a lower bound of what each can reach.

Where budgets leave room for next to nothing: the policy with one row at a time that exceeds them least.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

from flexgen_h2o.core.config import MOST_ROWS, TIERS, ModelSpec, Policy
from flexgen_h2o.core.units import MIB, advice, format_bytes, round_up
from flexgen_h2o.engine.memory_plan import OVERLAPPED, SEQUENTIAL, Depth, MemoryPlan, memory_plan
from flexgen_h2o.engine.workload import WorkloadShape, even_blocks, shape_of
from flexgen_h2o.planner.lp import Percent, find_corner, find_corners, least_excess
from flexgen_h2o.planner.predict import Machine
from flexgen_h2o.planner.work import disk_read_bytes

Budgets = Mapping[str, int | None]
MOST_MICRO_BATCH = 512
BATCHES = (1, 2, 4, 8, 16, 32)  # K that is tried at first
FEW_BATCHES = BATCHES[:3]  # K of the largest blocks that memory holds; around the best the search goes on
LOOK_AHEADS = OVERLAPPED[2:]  # deeper rings are taken where memory is left over
# A KV unit is read as far as it is filled, on average more than this share of what is set aside for it.
LEAST_READ = 0.5
NOTHING: Percent = (0, 0, 0, 0, 0, 0)
IN_MEMORY: Percent = (100, 0, 100, 0, 100, 0)
STREAMED_WEIGHTS: Percent = (0, 0, 100, 0, 100, 0)


@dataclass(frozen=True)
class SearchSpace:
    """Which switches the search may set besides those of the base policy."""

    attention: bool = True
    compress_weight: bool = False
    compress_cache: bool = False


@dataclass(frozen=True)
class Search:
    """A search. base: its switches are kept, batch sizes and shares chosen."""

    spec: ModelSpec
    need: WorkloadShape
    base: Policy
    machine: Machine
    budgets: Budgets
    sides: SearchSpace = SearchSpace()

    def blocks(self, policy: Policy) -> float:
        """Blocks of the pile; a part of one counts as a part, which is the least that it may take."""
        return self.need.rows / min(policy.block_size, self.need.rows)

    def likely_blocks(self, policy: Policy) -> float:
        """Where a part of one counts as half of itself and half of a block: weights are read for any."""
        full, rest = divmod(self.need.rows, policy.block_size)
        if not full or not rest:
            return max(1.0, full)
        return full + (1 + rest / policy.block_size) / 2


@dataclass(frozen=True)
class Candidate:
    """Batch sizes and switches. bound_s: no placement runs the pile faster."""

    policy: Policy
    depth: Depth
    bound_s: float


def candidates(q: Search) -> list[Candidate]:
    """All that may fit, the lowest bound first."""
    even = (policy for gbs, batches in block_sizes(q.need.rows) for policy in with_sides(q, gbs, batches))
    tried = (bounded(q, policy) for policy in dict.fromkeys([*even, *_largest(q)]))
    return sorted((c for c in tried if c is not None), key=lambda c: c.bound_s)


def neighbours(q: Search, policy: Policy) -> list[Candidate]:
    """Candidates with somewhat larger and smaller micro-batches, and more and fewer of them."""
    gbs, batches = policy.gpu_batch_size, policy.num_gpu_batches
    sizes = [
        (gbs * 2 // 3, batches), (gbs * 3 // 2, batches), (gbs, batches * 2 // 3), (gbs, batches * 3 // 2),
        (gbs + 1, batches), (gbs - 1, batches), (gbs, batches + 1), (gbs // 2, 2 * batches), (2 * gbs, batches // 2),
    ]  # fmt: skip
    allowed = [
        (a, b) for a, b in dict.fromkeys(sizes)
        if 1 <= a <= MOST_MICRO_BATCH and b >= 1 and (a, b) != (gbs, batches) and a * b <= min(q.need.rows, MOST_ROWS)
    ]  # fmt: skip
    tried = (bounded(q, other) for a, b in allowed for other in with_sides(q, a, b))
    return [c for c in tried if c is not None]


def with_sides(q: Search, gbs: int, batches: int) -> Iterator[Policy]:
    """Policies of one block size that differ in the side of attention and in compression."""
    base = q.base
    either = q.sides.attention and not q.machine.device_is_host and not base.cpu_cache_compute
    for host in (False, True) if either else (base.cpu_cache_compute,):
        for weight in (False, True) if q.sides.compress_weight else (base.compress_weight,):
            for cache in (False, True) if q.sides.compress_cache else (base.compress_cache,):
                yield replace(
                    base, gpu_batch_size=gbs, num_gpu_batches=batches, cpu_cache_compute=host, compress_weight=weight,
                    compress_cache=cache, percent=NOTHING,
                )  # fmt: skip


def block_sizes(rows: int) -> Iterator[tuple[int, int]]:
    """(micro-batch, micro-batches) of blocks that cut the pile evenly into 1, 2, 4, ... parts."""
    seen, parts, block = set(), 1, rows
    while True:
        block = min(-(-rows // parts), MOST_ROWS)
        for batches in (k for k in BATCHES if k <= block):
            gbs = -(-block // batches)
            if gbs <= MOST_MICRO_BATCH and (gbs, batches) not in seen:
                seen.add((gbs, batches))
                yield gbs, batches
        if block == 1:
            return
        parts *= 2


def _largest(q: Search) -> Iterator[Policy]:
    """For a few numbers of micro-batches the largest ones with which everything is in memory, and all but the weights;
    and of as many blocks those that are equal. Measured with the base policy's switches, tried with all."""
    for batches in (k for k in FEW_BATCHES if k <= q.need.rows):
        for percent in (IN_MEMORY, STREAMED_WEIGHTS):
            gbs = _most_rows(q, replace(q.base, num_gpu_batches=batches), percent)
            if gbs:
                blocks = -(-q.need.rows // (gbs * batches))
                for rows in (gbs, -(-q.need.rows // (blocks * batches))):
                    yield from with_sides(q, rows, batches)


def _most_rows(q: Search, policy: Policy, percent: Percent) -> int:
    """Rows of the largest micro-batches that fit device and host together with these shares; 0 where none do."""
    depth = LOOK_AHEADS[0] if policy.overlap else SEQUENTIAL

    def fits(rows: int) -> bool:
        return not _over_memory(q, _plan(q, replace(policy, gpu_batch_size=rows), percent, depth))

    most = min(-(-q.need.rows // policy.num_gpu_batches), MOST_ROWS // policy.num_gpu_batches, MOST_MICRO_BATCH)
    # The first that does not fit, less one: what is held grows with the rows.
    return most if fits(most) else bisect_left(range(1, most), True, key=lambda rows: not fits(rows))


def _over_memory(q: Search, plan: MemoryPlan) -> float:
    """Bytes that device and host together hold above their budgets, 0 at least; of an unbounded tier 0."""
    fast = q.budgets.get("device"), q.budgets.get("host")
    if fast[0] is None or fast[1] is None:
        return 0.0
    return max(0.0, plan.bytes_on("device") + plan.bytes_on("host") - fast[0] - fast[1])


def bounded(q: Search, policy: Policy) -> Candidate | None:
    """The candidate with its lower bound; None when it cannot fit."""
    depth = _depth(q, policy)
    if depth is None:
        return None
    # Reads take from compute, so that in memory it takes least; but on the host's side of attention a device has less.
    places: tuple[tuple[int, ...], ...] = ((0, 2, 4),) if q.machine.device_is_host else ((0, 2, 4), ())
    corners = [find_corner(q.spec, policy, moved, q.need, q.machine, depth) for moved in places]
    overflow = _over_memory(q, _plan(q, policy, IN_MEMORY, depth))
    read_s = LEAST_READ * overflow / q.machine.profile.disk_read_bytes_per_s
    bound = 0.0
    for phase, count in (("prefill", 1), ("decode", q.need.gen_len - 1)):
        compute_s = min(corner.busy[phase]["device_compute"] for corner in corners)
        bound += count * max(compute_s, read_s if phase == "decode" else 0.0)
    return Candidate(policy, depth, bound * q.blocks(policy))


def _depth(q: Search, policy: Policy) -> Depth | None:
    """The deepest look-ahead that is worth memory and fits: on each tier with what holds least there."""
    places: list[Percent] = [NOTHING, (0, 0, 0, 100, 0, 0), STREAMED_WEIGHTS]
    for depth in LOOK_AHEADS if policy.overlap else (SEQUENTIAL,):
        plans = [_plan(q, policy, percent, depth) for percent in places]
        tight_fit = {tier: min(plan.bytes_on(tier) for plan in plans) for tier in TIERS}
        if all((q.budgets.get(tier) or 0) >= n for tier, n in tight_fit.items() if q.budgets.get(tier) is not None):
            return depth
    return None


def _plan(q: Search, policy: Policy, percent: Percent, depth: Depth) -> MemoryPlan:
    """The buffers of the policy with other shares."""
    placed = replace(policy, percent=percent)
    return memory_plan(q.spec, placed, shape_of(policy, q.need), q.machine.itemsize, q.machine.device_is_host, depth)


STEPS = (32, 8, 4, 2, 1)  # percents that are moved at a time
WORTH_MORE = 1.25  # of a budget: so much more is named where it saves half of what is read from disk, and more
NEARLY = 1.1  # times the fewest bytes that are read with so much more
WHOLE = ((100, 0), (0, 100), (0, 0))  # each kind of bytes on one tier


@dataclass(frozen=True)
class Held:
    """A policy, the buffers it needs, and bytes by which they exceed the budgets in all."""

    policy: Policy
    memory: MemoryPlan
    excess: int


def tight_fit(q: Search) -> Held:
    """The policy that exceeds the budgets least, by the linear program and whole percents around what it says."""
    found = []
    for policy in with_sides(q, 1, 1):
        starts = [min(_whole(q, policy), key=_excess)]
        shares = least_excess(find_corners(q.spec, policy, q.need, q.machine, SEQUENTIAL), q.budgets)
        if shares is not None:
            starts.append(_held(q, replace(policy, percent=_rounded(shares))))
        found.append(min((_descended(q, start) for start in starts), key=_excess))
    return min(found, key=_excess)


def that_fit(q: Search, most: int) -> list[Policy]:
    """At most so many policies with one row at a time that fit: those with most in fast memory."""
    every = [held for policy in with_sides(q, 1, 1) for held in _whole(q, policy)]
    fitting = sorted((h for h in every if not h.excess), key=lambda h: [h.memory.bytes_on(t) for t in reversed(TIERS)])
    found = [held.policy for held in fitting[:most]]
    if not found:
        tried = tight_fit(q)
        found = [] if tried.excess else [tried.policy]
    return found


def too_small(q: Search) -> str:
    """One line: the tiers that are short for one row in any place, and the least that would do."""
    whole = min((held for policy in with_sides(q, 1, 1) for held in _whole(q, policy)), key=_excess)
    found = tight_fit(q)
    # With the budgets that are named the search begins anew, and must arrive.
    held = found if that_fit(replace(q, budgets={**q.budgets, **_enough(q, found)}), 1) else whole
    short, enough = held.memory.overflow(dict(q.budgets)), _enough(q, held)
    given = " and ".join(f"--{tier}-mem {format_bytes(q.budgets.get(tier) or 0)}" for tier in short)
    needed = " ".join(f"--{tier}-mem {nbytes}" for tier, nbytes in enough.items())
    with_it = replace(q, budgets={**q.budgets, **enough})
    reads = disk_reads(q, held.policy)
    more = worth_more(with_it, reads)
    read = f" and {format_bytes(reads)} of disk reads" if reads else ""
    full = next((a for t, n in enough.items() if (a := advice(t, q.budgets.get(t), n)) != f"raise --{t}-mem"), "")
    return (
        f"{given} {'is' if len(short) == 1 else 'are'} too small for any policy by "
        f"{', '.join(map(format_bytes, short.values()))}; the smallest that would do: {needed} "
        f"({', '.join(map(format_bytes, enough.values()))}), with {_switches(q, held.policy)}{read}"
        f"{'' if more is None else '; ' + more.text}{'; ' + full if full else ''}"
    )


@dataclass(frozen=True)
class More:
    """Budgets, by the tiers that have more of them, and what the pile then reads from disk at most."""

    budgets: Mapping[str, int]
    disk_read_bytes: float

    @property
    def text(self) -> str:
        """`with 200.00 MiB (host) at most 4.40 GiB`: a part of a line that has said what is read with less."""
        needed = ", ".join(f"{format_bytes(nbytes)} ({tier})" for tier, nbytes in self.budgets.items())
        return f"with {needed} at most {format_bytes(self.disk_read_bytes)}"


def disk_reads(q: Search, policy: Policy) -> float:
    """Bytes that the pile reads from disk during its sweeps."""
    return disk_read_bytes(q.machine.setting(q.spec, policy, q.need), even_blocks(policy, q.need))


def worth_more(q: Search, reads: float) -> More | None:
    """Budgets that are a little larger, and less than half of what is read; None where there are none.

    Where memory is just enough for one or two rows, all weights are read for each of them; a few MiB hold many.
    """
    found: list[More] = []
    if not reads:
        return None
    for (gbs, batches), places in product(block_sizes(q.need.rows), product(WHOLE[1:], WHOLE, WHOLE[:2])):
        (weights, cache, hidden) = places
        for policy in with_sides(q, gbs, batches):
            held = _held(q, replace(policy, percent=(*weights, *cache, *hidden)))
            more = {tier: round_up(held.memory.bytes_on(tier), MIB) for tier in held.memory.overflow(dict(q.budgets))}
            if all(nbytes <= WORTH_MORE * (q.budgets.get(tier) or 0) for tier, nbytes in more.items()) and more:
                found.append(More(more, disk_reads(q, held.policy)))
    fewest = min((one.disk_read_bytes for one in found), default=reads)
    enough = [one for one in found if one.disk_read_bytes <= NEARLY * fewest]
    return min(enough, key=lambda one: sum(one.budgets.values())) if NEARLY * fewest < reads / 2 else None


def _enough(q: Search, held: Held) -> dict[str, int]:
    return {tier: held.memory.bytes_on(tier) for tier in held.memory.overflow(dict(q.budgets))}


def _switches(q: Search, policy: Policy) -> str:
    """What the search has set besides the placement."""
    said = ["one row at a time"]
    if policy.cpu_cache_compute and not q.base.cpu_cache_compute:
        said.append("--cpu-cache-compute")
    for name in ("compress_weight", "compress_cache"):
        if getattr(q.sides, name):
            flag = f"--{name.replace('_', '-')}"
            said.append(flag if getattr(policy, name) else f"without {flag}")
    return ", ".join(said)


def _excess(held: Held) -> int:
    return held.excess


def _held(q: Search, policy: Policy) -> Held:
    shape = shape_of(policy, q.need)
    plan = memory_plan(q.spec, policy, shape, q.machine.itemsize, q.machine.device_is_host, SEQUENTIAL)
    return Held(policy, plan, sum(plan.overflow(dict(q.budgets)).values()))


def _whole(q: Search, policy: Policy) -> Iterator[Held]:
    for weights, cache, hidden in product(WHOLE, repeat=3):
        yield _held(q, replace(policy, percent=(*weights, *cache, *hidden)))


def _rounded(shares: Sequence[float]) -> Percent:
    a, b, c, d, e, f = (int(100 * share) for share in shares)
    return a, b, c, d, e, f


def _descended(q: Search, start: Held) -> Held:
    """Shares of one kind moved between two tiers as long as that helps."""
    best, step = start, 0
    while best.excess and step < len(STEPS):
        better = min((_held(q, p) for p in _moves(best.policy, STEPS[step])), key=_excess, default=best)
        if better.excess < best.excess:
            best = better
        else:
            step += 1
    return best


def _moves(policy: Policy, count: int) -> Iterator[Policy]:
    """`count` percent of each kind, or what there is, from each tier on each other one."""
    for kind, (source, to) in product(range(3), permutations(range(len(TIERS)), 2)):
        device, host = policy.percent[2 * kind : 2 * kind + 2]
        shares = [device, host, 100 - device - host]
        moved = min(count, shares[source])
        shares[source] -= moved
        shares[to] += moved
        if moved:
            found = list(policy.percent)
            found[2 * kind : 2 * kind + 2] = shares[:2]
            yield replace(policy, percent=(found[0], found[1], found[2], found[3], found[4], found[5]))
