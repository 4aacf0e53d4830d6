"""What the search tries: batch sizes, the side of attention, compression, and a lower bound of what each can reach."""

from __future__ import annotations

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
LOOK_AHEADS = OVERLAPPED[2:]  # deeper rings are taken where memory is left over
# A KV unit is read as far as it is filled, on average more than this share of what is set aside for it.
LEAST_READ = 0.5
NOTHING: Percent = (0, 0, 0, 0, 0, 0)
IN_MEMORY: Percent = (100, 0, 100, 0, 100, 0)


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
        """Blocks of the pile; a part of one counts as a part."""
        return self.need.rows / min(policy.block_size, self.need.rows)


@dataclass(frozen=True)
class Candidate:
    """Batch sizes and switches. bound_s: no placement runs the pile faster."""

    policy: Policy
    depth: Depth
    bound_s: float


def candidates(q: Search) -> list[Candidate]:
    """All that may fit, the lowest bound first."""
    tried = (bounded(q, policy) for gbs, batches in _sizes(q.need.rows) for policy in with_sides(q, gbs, batches))
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


def _sizes(rows: int) -> Iterator[tuple[int, int]]:
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


def bounded(q: Search, policy: Policy) -> Candidate | None:
    """The candidate with its lower bound; None when it cannot fit."""
    depth = _depth(q, policy)
    if depth is None:
        return None
    on_disk = find_corner(q.spec, policy, (), q.need, q.machine, depth)
    fast = q.budgets.get("device"), q.budgets.get("host")
    overflow = 0.0
    if fast[0] is not None and fast[1] is not None:
        in_memory = _plan(q, policy, IN_MEMORY, depth)
        overflow = max(0.0, in_memory.bytes_on("device") + in_memory.bytes_on("host") - sum(b or 0 for b in fast))
    read_s = LEAST_READ * overflow / q.machine.profile.disk_read_bytes_per_s
    bound = 0.0
    for phase, count in (("prefill", 1), ("decode", q.need.gen_len - 1)):
        bound += count * max(on_disk.busy[phase]["device_compute"], read_s if phase == "decode" else 0.0)
    return Candidate(policy, depth, bound * q.blocks(policy))


def _depth(q: Search, policy: Policy) -> Depth | None:
    """The deepest look-ahead that is worth memory and fits: on each tier with what holds least there."""
    places: list[Percent] = [NOTHING, (0, 0, 0, 100, 0, 0), (0, 0, 100, 0, 100, 0)]
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
