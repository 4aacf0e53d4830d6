"""What more memory would save: plans are looked for again with more of it on one tier at a time.

The linear program's duals do not tell: they hold where its own bottleneck lies, and a rounded policy may have another.

A plan for people and for programs: the tables and the JSON object of `policy_search`. Prints nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from textwrap import shorten
from typing import Any, Literal

from flexgen_h2o.core.config import TIERS, Policy
from flexgen_h2o.core.errors import DoesNotFitError
from flexgen_h2o.core.units import GIB, format_bytes, format_seconds
from flexgen_h2o.engine.memory_plan import memory_plan
from flexgen_h2o.engine.report import MEASURED_BUSY
from flexgen_h2o.engine.workload import WorkloadShape, shape_of
from flexgen_h2o.planner.candidates import Budgets, More, Search
from flexgen_h2o.planner.predict import PHASES, Machine, Prediction
from flexgen_h2o.planner.search import Plan, around, evaluate, search

# What is added to a budget: of a large one a GiB is less than the percent by which shares are moved.
MORE_BYTES, MORE_SHARE = GIB, 0.05
IDLE = 2  # a plan that leaves a tier this many times what would be added has no use for it

FoundBy = Literal["search", "neighbourhood", "placement"]


@dataclass(frozen=True)
class Gains:
    """s_per_gib: seconds that the pile saves with a GiB more, for each tier that has a budget.

    found_by: what was done with more memory. search: the whole search; neighbourhood: placements and batch sizes near
    the plan's; placement: the plan's own batch sizes and switches, and shares moved to the tier.
    """

    s_per_gib: Mapping[str, float]
    found_by: FoundBy


def gains_of_search(q: Search, plan: Plan, whole: bool) -> Gains:
    """Of a plan that a search found. whole: search again, not only near the plan."""

    def best(budgets: Budgets) -> Plan:
        more = replace(q, budgets=budgets)
        near = around(more, plan)
        found = [near, search(q.spec, q.need, q.base, q.machine, budgets, q.sides)] if whole else [near]
        return min(found, key=lambda one: one.prediction.total_s)

    now = best(q.budgets).prediction.total_s  # what near plans save without more memory is no gain of it
    found = {}
    for tier, more in _additions(q):
        idle = (q.budgets.get(tier) or 0) - plan.memory.bytes_on(tier) >= IDLE * more
        after = now if idle else best(_raised(q.budgets, tier, more)).prediction.total_s
        found[tier] = _per_gib(now - after, more)
    return Gains(found, "search" if whole else "neighbourhood")


def gains_of_policy(q: Search, plan: Plan) -> Gains:
    """Of a given policy: more is moved to the tier than the policy has there, from the slower ones."""
    found = {}
    for tier, more in _additions(q):
        raised = _raised(q.budgets, tier, more)
        tried = [_evaluated(q, policy, raised) for policy in _moved_to(q, plan, tier, more)]
        after = min((one.total_s for one in tried if one is not None), default=plan.prediction.total_s)
        found[tier] = _per_gib(plan.prediction.total_s - after, more)
    return Gains(found, "placement")


def _additions(q: Search) -> Iterator[tuple[str, int]]:
    """Tiers with a budget, and what is added to it."""
    for tier in TIERS:
        budget = q.budgets.get(tier)
        if budget is not None and not (tier == "device" and q.machine.device_is_host):
            yield tier, max(MORE_BYTES, int(MORE_SHARE * budget))


def _raised(budgets: Budgets, tier: str, more: int) -> Budgets:
    return {**budgets, tier: (budgets.get(tier) or 0) + more}


def _per_gib(saved_s: float, more: int) -> float:
    return max(0.0, saved_s) * GIB / more


def _evaluated(q: Search, policy: Policy, budgets: Budgets) -> Prediction | None:
    try:
        return evaluate(q.spec, policy, q.need, q.machine, budgets).prediction
    except DoesNotFitError:
        return None


def _moved_to(q: Search, plan: Plan, tier: str, more: int) -> Iterator[Policy]:
    """The policy itself (it may load further ahead), and each kind of bytes from each slower tier as far as `more`
    holds it."""
    yield plan.policy
    room = plan.memory.bytes_on(tier) + more
    to = 0 if q.machine.device_is_host else TIERS.index(tier)
    for kind in range(3):
        for source in range(to + 1, len(TIERS)):
            steps = _steps(plan.policy, kind, source, to)
            moved = [policy for policy in steps if _held(q, plan, policy, tier) <= room]
            if moved:
                yield moved[-1]


def _held(q: Search, plan: Plan, policy: Policy, tier: str) -> int:
    shape, is_host = shape_of(policy, q.need), q.machine.device_is_host
    return memory_plan(q.spec, policy, shape, q.machine.itemsize, is_host, plan.memory.depth).bytes_on(tier)


def _steps(policy: Policy, kind: int, source: int, to: int) -> Iterator[Policy]:
    """One percent of a kind after the other, from one tier on another."""
    device, host = policy.percent[2 * kind : 2 * kind + 2]
    for moved in range(1, 1 + (device, host, 100 - device - host)[source]):
        shares = [device, host, 100 - device - host]
        shares[source] -= moved
        shares[to] += moved
        yield replace(policy, percent=_with_pair(policy.percent, kind, shares))


def _with_pair(percent: Sequence[int], kind: int, shares: Sequence[int]) -> tuple[int, int, int, int, int, int]:
    a, b, c, d, e, f = (*percent[: 2 * kind], *shares[:2], *percent[2 * kind + 2 :])
    return a, b, c, d, e, f


# Names of planner.costs.RESOURCES for people, in the order of the table.
RESOURCES = {
    "disk_read": "disk read", "disk_write": "disk write", "h2d": "host to device", "d2h": "device to host",
    "device_compute": "device compute", "host_compute": "host compute",
}  # fmt: skip
LARGEST = 3  # buffers of a tier that are named
SOURCE_CHARACTERS = 60  # of a profile's source that are shown
LEAST_GAIN = 1e-4  # of the whole time; less is called nothing
SMALL_GAIN = 1e-3  # less is said with two digits after the point
# planner.gains.FoundBy for people.
FOUND_BY = {
    "search": "searched again", "neighbourhood": "with batch sizes near these",
    "placement": "with these batch sizes, moved from slower tiers",
}  # fmt: skip


@dataclass(frozen=True)
class Question:
    """What was asked: of which model, for which prompts, on which machine within which budgets (bytes by tier).

    eviction: the policy's settings. searched: the policy was looked for, not given.
    """

    model: str
    need: WorkloadShape
    eviction: Mapping[str, Any]
    machine: Machine
    budgets: Budgets
    searched: bool

    @property
    def workload(self) -> dict[str, Any]:
        need = self.need
        return {
            "num_prompts": need.rows,
            "prompt_len": need.prompt_len,
            "gen_len": need.gen_len,
            "eviction": dict(self.eviction),
        }


@dataclass(frozen=True)
class Answer:
    """policy: that was found or given, None when none fits. plan: what it costs, None when it does not fit, and then
    `problem` says why. seconds: of looking for it. Where there is a plan, gains: what more memory would save;
    disk_read_bytes: during the sweeps; more: budgets a little larger that save most of these."""

    policy: Policy | None
    plan: Plan | None
    seconds: float
    problem: str | None = None
    gains: Gains | None = None
    disk_read_bytes: float = 0.0
    more: More | None = None


def to_json(question: Question, answer: Answer) -> dict[str, Any]:
    """The object of DESIGN 3.3, and whatever else there is to know under `details`."""
    plan = answer.plan
    predicted = None if plan is None else plan.prediction
    return {
        "policy": None if answer.policy is None else answer.policy.to_json(),
        "fits": plan is not None,
        "predicted": None if predicted is None else predicted.to_json(),
        "bound_by": None if predicted is None else predicted.bound_by,
        "eta_s": None if predicted is None else predicted.total_s,
        "details": _details(question, answer),
    }


def _details(question: Question, answer: Answer) -> dict[str, Any]:
    profile, plan = question.machine.profile, answer.plan
    found: dict[str, Any] = {
        "model": question.model,
        "workload": question.workload,
        "dtype": question.machine.dtype,
        "device_is_host": question.machine.device_is_host,
        "profile": {"machine": profile.machine, "date": profile.date, "source": profile.source},
        "budget_bytes": dict(question.budgets),
        "search_s": answer.seconds if question.searched else None,
        "problem": answer.problem,
    }
    if plan is not None:
        found["busy_s"] = {phase: dict(busy) for phase, busy in plan.prediction.busy.items()}
        found["binds"] = {phase: plan.prediction.binds(phase) for phase in PHASES}
        found["gain_s_per_gib"] = None if answer.gains is None else dict(answer.gains.s_per_gib)
        found["gain_found_by"] = None if answer.gains is None else answer.gains.found_by
        found["dual_s_per_gib"] = {tier: max(0.0, dual) for tier, dual in plan.dual_s_per_gib.items()} or None
        found["look_ahead"] = asdict(plan.memory.depth)
        found["disk_read_bytes"] = answer.disk_read_bytes
        found["worth_more"] = None if answer.more is None else asdict(answer.more)
        found["buffers"] = [asdict(buffer) for buffer in plan.memory.buffers]
    return found


def to_text(question: Question, answer: Answer, plan: Plan, flags: str, command: str) -> str:
    """The answer's plan for a terminal. flags: the policy's; command: runs it."""
    how = f"found in {format_seconds(answer.seconds)}" if question.searched else "as given"
    lines = [
        *_about(question),
        "",
        f"policy, {how}:",
        f"  {flags}",
        "run it:",
        f"  {command}",
    ]
    gains = () if answer.gains is None else _gains(question, plan, answer.gains)
    memory = [*_memory(question, plan), *_disk_reads(answer)]
    return "\n".join([*lines, "", *memory, "", *_seconds(question, plan), "", *gains, *_eta(plan)])


def _about(question: Question) -> Iterator[str]:
    need, machine = question.need, question.machine
    columns = max(need.slots) if need.record else None
    kept = "full KV cache" if columns is None else f"{question.eviction['name']}, {columns} KV slots a row"
    yield (
        f"{question.model} in {machine.dtype}: {_counted(need.rows, 'prompt')} of "
        f"{_counted(need.prompt_len, 'token')}, {_counted(need.gen_len, 'new token')} each, {kept}"
    )
    where = "device and host are one tier" if machine.device_is_host else "device, host and disk"
    source = shorten(machine.profile.source.partition(":")[0], SOURCE_CHARACTERS, placeholder=" ...")
    busy = f" ({MEASURED_BUSY})" if machine.profile.was_disturbed else ""
    date = machine.profile.date[:10] or "no date"
    yield f"machine: {machine.profile.machine}, {where} (profile of {date}: {source}){busy}"


def _tiers(question: Question) -> list[str]:
    return [tier for tier in TIERS if tier != "device" or not question.machine.device_is_host]


def _memory(question: Question, plan: Plan) -> list[str]:
    """Bytes by tier."""
    rows = [["memory", "needed", "budget", ""]]
    for tier in _tiers(question):
        held = sorted((b for b in plan.memory.buffers if b.tier == tier), key=lambda b: -b.nbytes)
        largest = ", ".join(f"{b.name} {format_bytes(b.nbytes)}" for b in held[:LARGEST])
        budget = question.budgets.get(tier)
        limit = "-" if budget is None else format_bytes(budget)
        rows.append([tier, format_bytes(plan.memory.bytes_on(tier)), limit, largest])
    return [*columns(rows, left=(0, 3)), *_look_ahead(plan)]


def _disk_reads(answer: Answer) -> Iterator[str]:
    """Of weights, KV and hidden states in all sweeps."""
    if answer.disk_read_bytes:
        more = "" if answer.more is None else f"; {answer.more.text}"
        yield f"disk reads in all: {format_bytes(answer.disk_read_bytes)}{more}"


def _look_ahead(plan: Plan) -> Iterator[str]:
    """Units of each kind that are on their way at a time."""
    memory, depth = plan.memory, plan.memory.depth
    kinds = (
        ("weight ring", depth.weights, "weight unit"), ("cache ring", depth.cache, "KV unit"),
        ("hidden ring", depth.hidden, "hidden state"),
    )  # fmt: skip
    rings = [_counted(units, what) for name, units, what in kinds if memory.size(name)]
    if rings:
        yield f"loaded ahead: {', '.join(rings)}"


def _seconds(question: Question, plan: Plan) -> list[str]:
    """Seconds by resource and phase; the one that works longest is marked."""
    found = plan.prediction
    total = {"prefill": found.prefill_s, "decode": found.decode_s}
    rows = [["seconds", *(cell for phase in PHASES for cell in (phase, "share"))]]
    for name, words in RESOURCES.items():
        if any(found.busy[phase][name] for phase in PHASES):
            cells = [(found.busy[phase][name], total[phase]) for phase in PHASES]
            rows.append([words, *(cell for busy, whole in cells for cell in (_number(busy), _share(busy, whole)))])
    rows.append(["phase", *(cell for phase in PHASES for cell in (_number(total[phase]), ""))])
    bound = "; ".join(f"{phase} by {RESOURCES[found.binds(phase)]}" for phase in PHASES if total[phase])
    return [*columns(rows, left=(0,)), f"bound: {bound}"]


def _gains(question: Question, plan: Plan, gains: Gains) -> Iterator[str]:
    total, said = plan.prediction.total_s, []
    for tier in _tiers(question):
        gain = min(total, gains.s_per_gib.get(tier, 0.0))
        share = gain / total if total else 0.0
        percent = f"{share:.2%}" if share < SMALL_GAIN else f"{share:.1%}"
        said.append(f"{tier} {'nothing' if share < LEAST_GAIN else f'{format_seconds(gain)} ({percent})'}")
    yield f"1 GiB more would save: {', '.join(said)} ({FOUND_BY[gains.found_by]})"


def _eta(plan: Plan) -> Iterator[str]:
    found = plan.prediction
    yield f"throughput: {_number(found.tokens_per_s)} new tokens a second"
    yield f"time for all prompts: {format_seconds(found.total_s)}"


def columns(rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Rows as aligned lines. left: the columns that are flush left; the others are flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    signs = ["<" if i in left else ">" for i in range(len(widths))]
    aligned = [[f"{c:{s}{w}}" for c, s, w in zip(row, signs, widths, strict=True)] for row in rows]
    return ["  ".join(row).rstrip() for row in aligned]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _number(value: float) -> str:
    """Three significant digits or all before the point, never an exponent."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"
