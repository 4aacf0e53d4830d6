"""A plan for people and for programs: the tables and the JSON object of `policy_search`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from textwrap import shorten
from typing import Any

from flexgen_h2o.core.config import TIERS, Policy
from flexgen_h2o.core.units import format_bytes, format_seconds
from flexgen_h2o.engine.report import MEASURED_BUSY
from flexgen_h2o.planner.lp import SearchSpace
from flexgen_h2o.planner.predict import PHASES
from flexgen_h2o.planner.search import More, Plan

# Names of planner.costs.RESOURCES for people, in the order of the table.
RESOURCES = {
    "disk_read": "disk read", "disk_write": "disk write", "h2d": "host to device", "d2h": "device to host",
    "device_compute": "device compute", "host_compute": "host compute",
}  # fmt: skip
LARGEST = 3  # buffers of a tier that are named
SOURCE_CHARACTERS = 60  # of a profile's source that are shown
LEAST_GAIN = 1e-4  # of the whole time; less is called nothing
SMALL_GAIN = 1e-3  # less is said with two digits after the point


@dataclass(frozen=True)
class Question:
    """What was asked. eviction: the policy's settings; searched: the policy was looked for, not given, and then
    `space.base` has its switches only."""

    space: SearchSpace
    eviction: Mapping[str, Any]
    searched: bool

    @property
    def workload(self) -> dict[str, Any]:
        need = self.space.need
        return {
            "num_prompts": need.rows,
            "prompt_len": need.prompt_len,
            "gen_len": need.gen_len,
            "eviction": dict(self.eviction),
        }


@dataclass(frozen=True)
class Answer:
    """policy: that was found or given, None when none fits. plan: what it costs, None when it does not fit, and then
    `problem` says why. seconds: of looking for it. Where there is a plan, s_per_gib: seconds that a GiB more on a tier
    saves (search.sensitivity); disk_read_bytes: during the sweeps; more: budgets a little larger that save most."""

    policy: Policy | None
    plan: Plan | None
    seconds: float
    problem: str | None = None
    s_per_gib: Mapping[str, float] = field(default_factory=dict)
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
    space, plan = question.space, answer.plan
    profile = space.machine.profile
    found: dict[str, Any] = {
        "model": space.spec.name,
        "workload": question.workload,
        "dtype": space.machine.dtype,
        "device_is_host": space.machine.device_is_host,
        "profile": {"machine": profile.machine, "date": profile.date, "source": profile.source},
        "budget_bytes": dict(space.budgets),
        "search_s": answer.seconds if question.searched else None,
        "problem": answer.problem,
    }
    if plan is not None:
        duals = answer.s_per_gib
        found["busy_s"] = {phase: dict(busy) for phase, busy in plan.prediction.busy.items()}
        found["binds"] = {phase: plan.prediction.binds(phase) for phase in PHASES}
        found["gain_s_per_gib"] = {tier: duals[tier] for tier in _tiers(space) if tier in duals} or None
        found["gain_found_by"] = "duals" if duals else None
        found["dual_s_per_gib"] = (dict(duals) or None) if question.searched else None
        found["look_ahead"] = asdict(plan.memory.depth)
        found["disk_read_bytes"] = answer.disk_read_bytes
        found["worth_more"] = None if answer.more is None else asdict(answer.more)
        found["buffers"] = [asdict(buffer) for buffer in plan.memory.buffers]
    return found


def to_text(question: Question, answer: Answer, plan: Plan, flags: str, command: str) -> str:
    """The answer's plan for a terminal. flags: the policy's; command: runs it."""
    how = f"found in {format_seconds(answer.seconds)}" if question.searched else "as given"
    policy = [f"policy, {how}:", f"  {flags}", "run it:", f"  {command}"]
    memory = _memory(question.space, plan)
    if answer.disk_read_bytes:
        more = "" if answer.more is None else f"; {answer.more.text}"
        memory.append(f"disk reads in all: {format_bytes(answer.disk_read_bytes)}{more}")
    end = [
        *_gains(question.space, plan, answer.s_per_gib),
        f"throughput: {_number(plan.prediction.tokens_per_s)} new tokens a second",
        f"time for all prompts: {format_seconds(plan.prediction.total_s)}",
    ]
    return "\n".join([*_about(question), "", *policy, "", *memory, "", *_seconds(plan), "", *end])


def _about(question: Question) -> Iterator[str]:
    need, machine = question.space.need, question.space.machine
    columns = max(need.slots) if need.record else None
    kept = "full KV cache" if columns is None else f"{question.eviction['name']}, {columns} KV slots a row"
    yield (
        f"{question.space.spec.name} in {machine.dtype}: {_counted(need.rows, 'prompt')} of "
        f"{_counted(need.prompt_len, 'token')}, {_counted(need.gen_len, 'new token')} each, {kept}"
    )
    where = "device and host are one tier" if machine.device_is_host else "device, host and disk"
    source = shorten(machine.profile.source.partition(":")[0], SOURCE_CHARACTERS, placeholder=" ...")
    busy = f" ({MEASURED_BUSY})" if machine.profile.was_disturbed else ""
    date = machine.profile.date[:10] or "no date"
    yield f"machine: {machine.profile.machine}, {where} (profile of {date}: {source}){busy}"


def _tiers(space: SearchSpace) -> list[str]:
    return [tier for tier in TIERS if tier != "device" or not space.machine.device_is_host]


def _memory(space: SearchSpace, plan: Plan) -> list[str]:
    """Bytes by tier."""
    rows = [["memory", "needed", "budget", ""]]
    for tier in _tiers(space):
        held = sorted((b for b in plan.memory.buffers if b.tier == tier), key=lambda b: -b.nbytes)
        largest = ", ".join(f"{b.name} {format_bytes(b.nbytes)}" for b in held[:LARGEST])
        budget = space.budgets.get(tier)
        limit = "-" if budget is None else format_bytes(budget)
        rows.append([tier, format_bytes(plan.memory.bytes_on(tier)), limit, largest])
    return [*columns(rows, left=(0, 3)), *_look_ahead(plan)]


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


def _seconds(plan: Plan) -> list[str]:
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


def _gains(space: SearchSpace, plan: Plan, s_per_gib: Mapping[str, float]) -> Iterator[str]:
    if not s_per_gib:
        return
    total, said = plan.prediction.total_s, []
    for tier in _tiers(space):
        gain = min(total, s_per_gib.get(tier, 0.0))
        share = gain / total if total else 0.0
        percent = f"{share:.2%}" if share < SMALL_GAIN else f"{share:.1%}"
        said.append(f"{tier} {'nothing' if share < LEAST_GAIN else f'{format_seconds(gain)} ({percent})'}")
    yield f"1 GiB more would save: {', '.join(said)} (with these batch sizes, by the linear program)"


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
