"""Shares of the linear program as whole percents that fit the budgets exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from flexgen_h2o.config import ModelSpec, Policy
from flexgen_h2o.planner.memory import OVERLAPPED, SEQUENTIAL, Depth, Shape, memory_plan
from flexgen_h2o.planner.need import Need, shape_of
from flexgen_h2o.planner.predict import Machine

# Shares this close to nothing or to everything are taken as such: a sliver on a tier costs transfers of its own.
SNAP = 3
# What makes room first: weights serve a whole block with each load, hidden states move twice a layer.
GIVES_WAY = (0, 2, 4)
# Percents that are moved at a time, as many as it takes to save anything.
STEPS = (1, 2, 4, 8, 16, 32, 64, 100)
Percent = tuple[int, int, int, int, int, int]


def placements(
    spec: ModelSpec, policy: Policy, shares: Sequence[float], need: Need, machine: Machine,
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
    spec: ModelSpec, policy: Policy, need: Need, machine: Machine, budgets: Mapping[str, int | None], depth: Depth
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
    spec: ModelSpec, policy: Policy, shape: Shape, machine: Machine, budgets: Mapping[str, int | None], depth: Depth
) -> dict[str, int]:
    plan = memory_plan(spec, policy, shape, machine.itemsize, machine.device_is_host, depth)
    return plan.overflow(dict(budgets))


def _moved(
    spec: ModelSpec, policy: Policy, shape: Shape, machine: Machine, budgets: Mapping[str, int | None], depth: Depth,
    over: Mapping[str, int],
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
