"""What the search tries: batch sizes, the side of attention, compression, and a lower bound of what each can reach."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from flexgen_h2o.config import MOST_ROWS, TIERS, ModelSpec, Policy
from flexgen_h2o.planner.lp import find_corner
from flexgen_h2o.planner.memory import OVERLAPPED, SEQUENTIAL, Depth, MemoryPlan, memory_plan
from flexgen_h2o.planner.need import Need, shape_of
from flexgen_h2o.planner.predict import Machine
from flexgen_h2o.planner.rounding import Percent

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
class Sides:
    """Which switches the search may set besides those of the base policy."""

    attention: bool = True
    compress_weight: bool = False
    compress_cache: bool = False


@dataclass(frozen=True)
class Search:
    """A search. base: its switches are kept, batch sizes and shares chosen."""

    spec: ModelSpec
    need: Need
    base: Policy
    machine: Machine
    budgets: Budgets
    sides: Sides = Sides()

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
        least = {tier: min(plan.bytes_on(tier) for plan in plans) for tier in TIERS}
        if all((q.budgets.get(tier) or 0) >= n for tier, n in least.items() if q.budgets.get(tier) is not None):
            return depth
    return None


def _plan(q: Search, policy: Policy, percent: Percent, depth: Depth) -> MemoryPlan:
    """The buffers of the policy with other shares."""
    placed = replace(policy, percent=percent)
    return memory_plan(q.spec, placed, shape_of(policy, q.need), q.machine.itemsize, q.machine.device_is_host, depth)
