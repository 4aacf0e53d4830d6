"""Where budgets leave room for next to nothing: the policy with one row at a time that exceeds them least."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

from flexgen_h2o.config import TIERS, Policy
from flexgen_h2o.planner.candidates import Search, block_sizes, with_sides
from flexgen_h2o.planner.lp import find_corners, least_excess
from flexgen_h2o.planner.memory import SEQUENTIAL, MemoryPlan, memory_plan
from flexgen_h2o.planner.need import even_blocks, shape_of
from flexgen_h2o.planner.rounding import Percent
from flexgen_h2o.planner.work import disk_read_bytes
from flexgen_h2o.units import MIB, advice, format_bytes, round_up

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


def least(q: Search) -> Held:
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
        tried = least(q)
        found = [] if tried.excess else [tried.policy]
    return found


def too_small(q: Search) -> str:
    """One line: the tiers that are short for one row in any place, and the least that would do."""
    whole = min((held for policy in with_sides(q, 1, 1) for held in _whole(q, policy)), key=_excess)
    found = least(q)
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
