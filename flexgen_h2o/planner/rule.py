"""`--policy auto` by a simple rule: the fastest tier that fits. The LP search takes its place later.

Candidates differ in rows and in the share of each kind of bytes on each tier; each is checked with the exact memory
plan, and the one whose decode sweep costs the least time a row wins, at nominal speeds of a small machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from flexgen_h2o.config import ModelSpec, Policy
from flexgen_h2o.errors import DoesNotFitError
from flexgen_h2o.planner.memory import OVERLAPPED, Depth, Shape, memory_plan, plan_within, tier_shares

MOST_ROWS = 256
MICRO_BATCH = 32
DISK_BYTES_PER_S = 2e9
LINK_BYTES_PER_S = 1e10
FLOPS_PER_S = 4e11
SHARE_STEP = 5
LOOK_AHEADS = OVERLAPPED[1:]


@dataclass(frozen=True)
class Need:
    """What is to be run: rows in all, the longest prompt (tokens), the KV slots of a row."""

    rows: int
    prompt_len: int
    slots: tuple[int, ...]
    record: tuple[str, ...] = ()


@dataclass(frozen=True)
class AutoPolicy:
    """Batch sizes and shares are chosen for each workload; everything else is taken from `base`."""

    base: Policy = field(default_factory=Policy)


def choose_policy(
    spec: ModelSpec, need: Need, base: Policy, itemsize: int, device_is_host: bool, budgets: dict[str, int | None]
) -> Policy:
    """`base` with batch sizes and shares of the candidate whose decode sweep is the cheapest a row.

    DoesNotFitError when none fits.
    """
    best: tuple[float, Policy] | None = None
    for policy in _candidates(need, base, device_is_host):
        shape = shape_of(policy, need)
        filled = _fill_weights(spec, policy, shape, itemsize, device_is_host, budgets)
        if filled is None:
            continue
        cost = _seconds_a_row(spec, filled, shape, itemsize, device_is_host)
        if best is None or cost < best[0] * 0.999:
            best = (cost, filled)
    if best is None:
        smallest = replace(base, gpu_batch_size=1, num_gpu_batches=1, percent=(0, 0, 0, 0, 0, 0))
        plan_within(spec, smallest, shape_of(smallest, need), itemsize, device_is_host, budgets)
        raise DoesNotFitError("no placement fits the budgets; raise --host-mem or --disk-mem")
    return best[1]


def shape_of(policy: Policy, need: Need) -> Shape:
    rows = min(policy.gpu_batch_size, need.rows)
    batches = min(policy.num_gpu_batches, -(-need.rows // policy.gpu_batch_size))
    return Shape(rows, batches, rows * need.prompt_len, need.slots, need.record)


def _candidates(need: Need, base: Policy, device_is_host: bool) -> Iterator[Policy]:
    """Policies without weight shares, larger blocks first."""
    places = [(100, 0), (0, 0)] if device_is_host else [(100, 0), (0, 100), (0, 0)]
    rows = min(need.rows, MOST_ROWS)
    while rows >= 1:
        gbs = min(rows, MICRO_BATCH)
        for cache in places:
            for hidden in places:
                yield replace(
                    base, gpu_batch_size=gbs, num_gpu_batches=-(-rows // gbs), percent=(0, 0, *cache, *hidden)
                )
        rows //= 2


def _fill_weights(
    spec: ModelSpec, policy: Policy, shape: Shape, itemsize: int, device_is_host: bool, budgets: dict[str, int | None]
) -> Policy | None:
    """The policy with as much of the weights on the fast tiers as fits; None when not even all on disk fits."""

    def fits(device: int, host: int, depth: Depth) -> bool:
        tried = _with_weights(policy, device, host)
        return not memory_plan(spec, tried, shape, itemsize, device_is_host, depth).overflow(budgets)

    # Look-ahead before resident weights, as long as both are to be had.
    depth = next((d for d in LOOK_AHEADS if fits(0, 0, d)), None)
    if depth is None:
        return None
    device = max(share for share in range(0, 101, SHARE_STEP) if share == 0 or fits(share, 0, depth))
    host = 0
    if not device_is_host:
        host = max(share for share in range(0, 101 - device, SHARE_STEP) if share == 0 or fits(device, share, depth))
    return _with_weights(policy, device, host)


def _with_weights(policy: Policy, device: int, host: int) -> Policy:
    return replace(policy, percent=(device, host, *policy.percent[2:]))


def _seconds_a_row(spec: ModelSpec, policy: Policy, shape: Shape, itemsize: int, device_is_host: bool) -> float:
    """Seconds of one decode sweep over its rows: the slowest of disk, link and compute (all overlap)."""
    rows = shape.rows * shape.micro_batches
    weights = spec.num_weights * itemsize
    cache = rows * sum(shape.slots) * spec.kv_bytes_per_token(itemsize) / spec.num_blocks
    hidden = 2 * rows * spec.hidden_size * itemsize * spec.num_blocks
    disk = link = 0.0
    for nbytes, shares in (
        (weights, policy.weight_shares), (cache, policy.cache_shares), (hidden, policy.hidden_shares),
    ):  # fmt: skip
        placed = tier_shares(shares, device_is_host)
        disk += nbytes * placed[2]
        link += nbytes * (placed[1] + placed[2])
    compute = 2 * rows * spec.num_weights / FLOPS_PER_S
    return max(disk / DISK_BYTES_PER_S, 0 if device_is_host else link / LINK_BYTES_PER_S, compute) / rows
