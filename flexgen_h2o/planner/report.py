"""Reports on a plan: as tables for people and as an object for programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from flexgen_h2o.core.config import MAX_ROWS, TIERS, Policy
from flexgen_h2o.core.units import MIB, aligned, counted, format_bytes, format_seconds, three_digits
from flexgen_h2o.engine.memory_plan import checkpoint_bytes
from flexgen_h2o.engine.report import MEASURED_BUSY, NOT_MEASURED
from flexgen_h2o.planner.cost_model import LANES
from flexgen_h2o.planner.predict import PHASES
from flexgen_h2o.planner.profile import NOMINAL
from flexgen_h2o.synonyms import shown_name

if TYPE_CHECKING:
    from flexgen_h2o.kvcache.eviction.mixes import KeptWhole
    from flexgen_h2o.planner.lp import SearchSpace
    from flexgen_h2o.planner.predict import Prediction
    from flexgen_h2o.planner.search import Plan

# Names of cost_model.RESOURCES for people, in the order of the table.
RESOURCES = {
    "disk_read": "disk read",
    "disk_write": "disk write",
    "h2d": "RAM to GPU",
    "d2h": "GPU to RAM",
    "device_compute": "GPU compute",
    "host_compute": "CPU compute",
}
# Without a GPU, the device that computes is a CPU. FlexGen's device tier is ordinary memory then.
RESOURCES_OF_CPU = {
    **RESOURCES,
    "h2d": "RAM to memory",
    "d2h": "memory to RAM",
    "device_compute": "CPU compute",
}
TIER_NAMES = {"device": "GPU", "host": "RAM", "disk": "disk"}
TIER_NAMES_OF_CPU = {**TIER_NAMES, "device": "memory"}
LARGEST = 3  # buffers of a tier that are named
SOURCE_CHARACTERS = 60  # characters of a profile's source that are shown
# A resource binds a phase if it works for at least this share of it. If no resource does, they wait
# for one another.
BINDS = 0.8
# Guesses of the sequences that balance computing and loading; each starts from the one before.
GUESSES = 8
NIGHT_HOURS = 10
MIN_GAIN = 0.01  # share of the whole time; a smaller gain is called nothing
# Larger budgets in bytes, only of the tiers that get more, and the disk reads that are then left.
More = tuple[Mapping[str, int], float]


@dataclass(frozen=True)
class SearchResult:
    """A question to the planner, and a plan or the reason why there is none.

    The `plan` command or Planner.answer makes it.
    """

    space: SearchSpace
    # Settings of the eviction policy.
    eviction: Mapping[str, Any]
    # True if the policy was searched for, and not given. Then `space.base` has only its switches.
    searched: bool
    # None if nothing fits.
    plan: Plan | None = None
    # Seconds of the search.
    seconds: float = 0.0
    # Why there is no plan.
    problem: str | None = None
    # By tier, the seconds that one GiB more saves (search.sensitivity); empty without a plan.
    s_per_gib: Mapping[str, float] = field(default_factory=dict)
    # Bytes that the sweeps read from disk; 0 without a plan.
    disk_read_bytes: float = 0.0
    # Slightly larger budgets that save most disk reads, and time.
    more: More | None = None
    # A flag that lowers precision, and the seconds that the search predicts with it. None if these
    # are not fewer.
    faster: tuple[str, float] | None = None
    # Bytes of a checkpoint that is not downloaded yet.
    download_bytes: int = 0
    # Whether the plan is for another machine than this one.
    is_elsewhere: bool = False
    # With --kv-loss small, the eviction policy's loss by its table (kvcache/eviction/mixes.py).
    kv_loss: KeptWhole | None = None
    # Whether all sequences are equally long.
    is_even: bool = True

    @property
    def policy(self) -> Policy | None:
        """Policy that was found or given; None if a search found none that fits."""
        if self.plan is not None:
            return self.plan.policy
        return None if self.searched else self.space.base

    @property
    def workload(self) -> dict[str, Any]:
        """The workload as JSON values."""
        need = self.space.need
        return {
            "num_prompts": need.rows,
            "prompt_len": need.prompt_len,
            "gen_len": need.gen_len,
            "eviction": dict(self.eviction),
        }

    @property
    def tiers(self) -> dict[str, str]:
        """Tiers to show, with their names: without the device if it is host memory."""
        machine = self.space.machine
        names = TIER_NAMES if machine.has_card else TIER_NAMES_OF_CPU
        return {t: names[t] for t in TIERS if t != "device" or not machine.device_is_host}


def to_json(answer: SearchResult) -> dict[str, Any]:
    """Return the object that docs/reference/commands/plan.md describes.

    All other facts of the plan are under `details`.
    """
    predicted = None if answer.plan is None else answer.plan.prediction
    return {
        "policy": None if answer.policy is None else answer.policy.to_json(),
        "fits": predicted is not None,
        "predicted": None if predicted is None else predicted.to_json(),
        "bound_by": None if predicted is None else predicted.bound_by,
        "eta_s": None if predicted is None else predicted.total_s,
        "details": _details(answer),
    }


def _details(answer: SearchResult) -> dict[str, Any]:
    """Return the `details` of `to_json`."""
    space = answer.space
    plan = answer.plan
    profile = answer.space.machine.profile
    found: dict[str, Any] = {
        "model": space.spec.name,
        "workload": answer.workload,
        "dtype": space.machine.dtype,
        "device_is_host": space.machine.device_is_host,
        "profile": {
            "machine": profile.machine,
            "date": profile.date,
            "source": profile.source,
            "was_disturbed": profile.was_disturbed,
        },
        "budget_bytes": dict(space.budgets),
        "search_s": answer.seconds if answer.searched else None,
        "problem": answer.problem,
        "kv_loss_kl": None if answer.kv_loss is None else answer.kv_loss.kl,
        "download_bytes": answer.download_bytes,
    }
    if plan is None:
        return found
    gains = answer.s_per_gib
    memory = space.costs(plan.policy).memory
    return found | {
        "busy_s": {phase: dict(busy) for phase, busy in plan.prediction.busy.items()},
        "binds": {phase: plan.prediction.binds(phase) for phase in PHASES},
        "gain_s_per_gib": {tier: gains[tier] for tier in answer.tiers if tier in gains} or None,
        "look_ahead": asdict(plan.memory.depth),
        "disk_read_bytes": answer.disk_read_bytes,
        "faster": None
        if answer.faster is None
        else {"flag": answer.faster[0], "total_s": answer.faster[1]},
        "worth_more": None
        if answer.more is None
        else {"budgets": answer.more[0], "disk_read_bytes": answer.more[1]},
        "balanced_rows": balanced_rows(space, plan.policy),
        "active_weights": space.spec.num_active,
        "buffers": [asdict(buffer) for buffer in plan.memory.buffers],
        "sequence_bytes": memory.sequence_bytes(space.need.slots, space.need.record),
    }


def to_text(
    answer: SearchResult, flags: str, command: str | None = None, benchmark: str = ""
) -> str:
    """Return the text that a terminal shows of the answer's plan.

    flags: the flags of the policy.
    command: the command that answers a file of prompts with the plan. None if the user has just
        called this command.
    benchmark: the command that runs one batch of the plan.
    """
    plan = answer.plan
    assert plan is not None
    took = f"found in a search of {format_seconds(answer.seconds)}" if answer.seconds else "found"
    policy = [f"plan, {took if answer.searched else 'as given'}:", f"  {flags}"]
    if command is not None:
        policy += ["run it:", f"  {command}", "benchmark it:", f"  {benchmark}"]
    profile = answer.space.machine.profile
    doubt = (
        NOT_MEASURED
        if profile.machine == NOMINAL
        else "the machine's figures are nominal, from data sheets"
        if profile.is_nominal
        else MEASURED_BUSY
        if profile.was_disturbed
        else ""
    )
    end = [
        *_gains(answer, plan),
        *_faster(answer),
        *([f"seconds may be several times off: {doubt}"] if doubt else ()),
        f"throughput: {three_digits(plan.prediction.tokens_per_s)} new tokens a second",
        f"time for all prompts: {format_seconds(plan.prediction.total_s)}",
        *_night(answer, plan),
    ]
    seconds = [*_seconds(answer, plan), *_experts(answer, plan)]
    return "\n".join(
        [*_about(answer), "", *policy, "", *_memory(answer, plan), "", *seconds, "", *end]
    )


def _about(answer: SearchResult) -> Iterator[str]:
    """Yield lines about the model, the workload, quality, the machine and the checkpoint."""
    need = answer.space.need
    machine = answer.space.machine
    most = "" if answer.is_even else "at most "
    kept = (
        f"{answer.eviction['name']}, {counted(max(need.slots), 'KV slot')} per prompt"
        if need.needs.record
        else "full KV cache"
    )
    yield (
        f"{answer.space.spec.name} in {machine.dtype}: {counted(need.rows, 'prompt')} of "
        f"{most}{counted(need.prompt_len, 'token')}, {most}{counted(need.gen_len, 'new token')} "
        f"each, {kept}"
    )
    where = "GPU, RAM and disk" if machine.has_card else "no GPU, so all is in RAM or on disk"
    source = shorten(
        machine.profile.source.partition(":")[0], SOURCE_CHARACTERS, placeholder=" ..."
    )
    date = machine.profile.date[:10] or "no date"
    if answer.kv_loss is not None:
        loss = (
            f"KL {answer.kv_loss.kl:.2g} nats to the full cache, measured on {answer.kv_loss.model}"
        )
        yield f"quality: {loss} (docs/lab/quality.md)"
    about = f"profile of {date}: {source}"
    if machine.profile.is_nominal:
        about = machine.profile.source.partition(":")[0]
    yield f"machine: {machine.profile.machine}, {where} ({about})"
    yield _checkpoint(answer)


def _checkpoint(answer: SearchResult) -> str:
    """Return the line with bytes and format of the checkpoint.

    The files of the checkpoint do not count in the disk's budget.
    """
    spec = answer.space.spec
    itemsize = answer.space.machine.itemsize
    config = spec.quantization or {}
    nbytes = format_bytes(checkpoint_bytes(spec, itemsize))
    stored = (
        f"as published ({config['quant_method']})" if config else f"in {8 * itemsize} bits a number"
    )
    if answer.download_bytes:
        return (
            f"checkpoint: {nbytes}, {stored}, not downloaded yet: this disk space is needed besides"
        )
    if answer.is_elsewhere:
        return f"checkpoint: {nbytes}, {stored}; that machine needs this disk space besides"
    return f"checkpoint: {nbytes}, {stored}, read in place and not in the disk's budget"


def _night(answer: SearchResult, plan: Plan) -> Iterator[str]:
    """Yield a line with the work of one night, if all prompts take longer than a night."""
    need = answer.space.need
    seconds = plan.prediction.total_s
    if seconds > NIGHT_HOURS * 3600:
        nights = seconds / NIGHT_HOURS / 3600
        rows = int(need.rows / nights)
        done = f"{rows:,} prompts, {rows * need.gen_len:,} new tokens"
        yield f"a night of {NIGHT_HOURS} hours: {done}; all take {nights:.1f} nights"


def _memory(answer: SearchResult, plan: Plan) -> Iterator[str]:
    """Yield lines with the bytes by tier, the units loaded ahead and the bytes read from disk."""
    memory = plan.memory
    rows = [["memory", "needed", "budget"]]
    largest = [""]
    for tier, name in answer.tiers.items():
        budget = answer.space.budgets.get(tier)
        limit = "-" if budget is None else format_bytes(budget)
        rows.append([name, format_bytes(memory.bytes_on(tier)), limit])
        held = sorted((b for b in memory.buffers if b.tier == tier), key=lambda b: -b.nbytes)[
            :LARGEST
        ]
        largest.append(", ".join(f"{b.name} {format_bytes(b.nbytes)}" for b in held))
    yield from (
        f"{row}  {names}".rstrip()
        for row, names in zip(aligned(rows, right=True), largest, strict=True)
    )
    depths = {
        "weight": memory.depth.weights,
        "cache": memory.depth.cache,
        "hidden": memory.depth.hidden,
    }
    units = {"weight": "weight unit", "cache": "KV unit", "hidden": "hidden state"}
    rings = [
        counted(depth, units[kind]) for kind, depth in depths.items() if memory.size(f"{kind} ring")
    ]
    if rings:
        yield f"loaded ahead: {', '.join(rings)}"
    if answer.disk_read_bytes:
        more = advice_on(answer.more)
        need = answer.space.need
        blocks = -(-need.rows // plan.policy.block_size)
        each = format_bytes(answer.disk_read_bytes / blocks / need.gen_len)
        passes = f"{need.gen_len:,} {'pass' if need.gen_len == 1 else 'passes'}"
        walked = (
            f"{each} per pass ({blocks:,} {'batch' if blocks == 1 else 'batches'}, {passes} each)"
        )
        most = "" if answer.is_even else "at most "
        yield f"disk reads in all: {most}{format_bytes(answer.disk_read_bytes)}, {walked}{more}"


def advice_on(more: More | None) -> str:
    """Return text such as `; --ram 200MiB would cut disk reads to at most 4.40 GiB`."""
    if more is None:
        return ""
    budgets, reads = more
    needed = " ".join(
        f"{shown_name(f'--{tier}-mem')} {nbytes // MIB}MiB" for tier, nbytes in budgets.items()
    )
    return f"; {needed} would cut disk reads to at most {format_bytes(reads)}"


def _seconds(answer: SearchResult, plan: Plan) -> Iterator[str]:
    """Yield a table of seconds by resource and phase, and the resource that binds each phase."""
    found = plan.prediction
    names = RESOURCES if answer.space.machine.has_card else RESOURCES_OF_CPU
    total = {"prefill": found.prefill_s, "decode": found.decode_s}
    rows = [["seconds", *(cell for phase in PHASES for cell in (phase, "share"))]]
    for name, words in names.items():
        if any(found.busy[phase][name] for phase in PHASES):
            cells = [(found.busy[phase][name], total[phase]) for phase in PHASES]
            shares = [
                (three_digits(busy), f"{busy / whole:.0%}" if whole else "-")
                for busy, whole in cells
            ]
            rows.append([words, *(cell for pair in shares for cell in pair)])
    rows.append(["phase", *(cell for phase in PHASES for cell in (three_digits(total[phase]), ""))])
    yield from aligned(rows, right=True)
    yield "bound: " + "; ".join(
        bound_text(found, phase, seconds, names) for phase, seconds in total.items() if seconds
    )


def bound_text(
    found: Prediction, phase: str, seconds: float, names: Mapping[str, str] = RESOURCES
) -> str:
    """Return text on what binds a phase of this many seconds, such as `decode by disk read`.

    names: the names of the resources for people.
    """
    name = found.binds(phase)
    share = found.busy[phase][name] / seconds
    return (
        f"{phase} by {names[name] if share >= BINDS else f'none alone ({names[name]} {share:.0%})'}"
    )


def balanced_rows(space: SearchSpace, policy: Policy) -> float | None:
    """Return the sequences of a block whose decode sweeps compute for as long as they load.

    A sweep loads weights once, and KV entries and hidden states of each sequence. The result is
    None if loading a sequence's KV entries takes longer than computing it.
    """
    rows = float(policy.block_size)
    # Products of more rows are faster, so the balance is found by iteration.
    for _ in range(GUESSES):
        batches = policy.num_gpu_batches
        each = min(round(min(rows, MAX_ROWS) / batches), MAX_ROWS // batches)
        policy = replace(policy, gpu_batch_size=max(1, each))
        block = space.need.block((policy.gpu_batch_size,) * policy.num_gpu_batches)
        costs = space.costs(policy)
        busy = costs.busy(block, max(1, space.need.gen_len // 2))
        weights_s = costs.weights_s(policy.block_size)
        compute_s = busy["device_compute"] + busy["host_compute"]
        others_s = max(0.0, max(busy[lane] for lane in LANES) - weights_s)
        if compute_s <= others_s:
            return None
        rows = policy.block_size * weights_s / (compute_s - others_s)
    return rows


def _experts(answer: SearchResult, plan: Plan) -> Iterator[str]:
    """Yield lines about a mixture of experts; none for other models.

    They show how much of the model a token uses. If blocks have too few sequences to compute for as
    long as weights load, they also show how many would do.
    """
    space = answer.space
    policy = plan.policy
    spec = space.spec
    if spec.experts is None:
        return
    used = f"{spec.experts.per_token} of {spec.experts.count} experts"
    yield (
        f"a token uses {used} of a layer, {spec.num_active / 1e9:.3g} of "
        f"{spec.num_weights / 1e9:.3g} billion weights"
    )
    balanced = balanced_rows(space, policy)
    rows = policy.block_size
    if balanced is None or balanced <= rows:
        return
    beside = sum(plan.memory.size(name) for name in ("hidden", "workspace")) / rows
    held = (
        f"{format_bytes(plan.memory.size('cache') / rows)} of KV and {format_bytes(beside)} for "
        "prefill"
    )
    enough = f"with {balanced:,.0f} prompts computing takes as long as loading weights"
    yield f"batches have {rows:,} prompts, each {held}; {enough}"


def _gains(answer: SearchResult, plan: Plan) -> Iterator[str]:
    """Yield a line with the time that one GiB more saves on each tier."""
    if not answer.s_per_gib:
        return
    total = plan.prediction.total_s
    said = []
    for tier, name in answer.tiers.items():
        gain = answer.s_per_gib.get(tier, 0.0)
        share = gain / total if total else 0.0
        said.append(
            f"{name} {'nothing' if share < MIN_GAIN else f'{format_seconds(gain)} ({share:.0%})'}"
        )
    yield f"1 GiB more would save: {', '.join(said)} (with these batch sizes)"


def _faster(answer: SearchResult) -> Iterator[str]:
    """Yield a line with the flag that is predicted to save time, and what it costs."""
    if answer.faster is not None:
        flag, seconds = answer.faster
        yield (
            f"what makes it faster: {flag}, predicted {format_seconds(seconds)}; it multiplies "
            "in lower precision"
        )
