"""The report of a run: the run report as JSON, FlexGen's summary and log lines.

This module imports no torch: commands check the files that they will write before anything heavy is
loaded.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import FlexgenError, UsageError
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.core.timeline import LANES
from flexgen_h2o.core.units import GIB
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.memory_plan import checkpoint_bytes, kv_sizes_of
from flexgen_h2o.engine.workload import Workload, workload_of

if TYPE_CHECKING:
    from flexgen_h2o.engine.distributed import ModelPart
    from flexgen_h2o.engine.generation import BlockStats
    from flexgen_h2o.engine.resources import Engine
    from flexgen_h2o.engine.scheduler import Scheduler

MEASURED_BUSY = (
    "profile measured while other programs were busy: run flexgen-h2o hardware again "
    "when the machine is quiet"
)
NOT_MEASURED = "this machine was not measured (flexgen-h2o hardware: 1 to 2 minutes)"
PREDICTIONS = ("prefill_s", "decode_s")
# FlexGen counts the first two decode sweeps as measured. The mean of the later ones stands for the
# rest.
_WARM_SWEEPS = 2


@dataclass(frozen=True)
class PhaseReport:
    """One phase of a run."""

    seconds: float
    # Prompt tokens processed (prefill), or tokens generated (decode, total).
    tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second; 0.0 for a phase that took no time, so that it stays a JSON number."""
        return (
            self.tokens / self.seconds if self.seconds > 0 and math.isfinite(self.seconds) else 0.0
        )

    def to_json(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "tokens_per_s": self.tokens_per_s, "tokens": self.tokens}


@dataclass(frozen=True)
class RunReport:
    """The run report (docs/reference/files.md).

    `make_report` makes it. Bytes are ints and times are seconds.
    """

    # The name of the model.
    model: str
    policy: Policy
    # The eviction policy as JSON.
    eviction: Mapping[str, Any]
    # Tokens of the longest prompt.
    prompt_len: int
    # The most new tokens that were asked for.
    gen_len: int
    num_prompts: int
    prefill: PhaseReport
    # Its tokens are those generated after the first one of each sequence.
    decode: PhaseReport
    # The most bytes held, by kind and tier. Kinds are `weights`, `kv`, `hidden`, and the other
    # buffers of the memory plan.
    peak_bytes_by_kind: Mapping[str, Mapping[str, int]]
    # Bytes moved, by kind (`weights`, `kv`, `hidden`) and link: disk_read, disk_write, h2d, d2h.
    io_bytes_by_kind: Mapping[str, Mapping[str, int]]
    # Keys: slots, bytes, full_bytes (`_kv_facts`).
    kv: Mapping[str, int]
    # Keys: `PREDICTIONS`. None if nothing was predicted.
    predicted: Mapping[str, float | None]
    # The three sizes in FlexGen's summary (`sizes_of`).
    model_bytes: int
    cache_bytes: int
    hidden_bytes: int
    # Whether decode was cut short and scaled up.
    projected: bool = False
    # More facts, as JSON values.
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def peak_bytes(self) -> dict[str, int]:
        """The most bytes held by tier: device, host, disk."""
        return _over_kinds(self.peak_bytes_by_kind)

    @property
    def io_bytes(self) -> dict[str, int]:
        """Bytes moved by link."""
        return _over_kinds(self.io_bytes_by_kind)

    @property
    def total(self) -> PhaseReport:
        """Generated tokens over prefill and decode time, as FlexGen counts.

        Prefill gives each sequence its first token.
        """
        return PhaseReport(
            self.prefill.seconds + self.decode.seconds, self.num_prompts + self.decode.tokens
        )

    @property
    def spared_tokens(self) -> int:
        """Prompt tokens that prefill was not fed, because sequences that begin alike share them."""
        return self.prefill.tokens - int(self.extra.get("prefill_fed_tokens", self.prefill.tokens))

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values.

        A number that JSON cannot hold (NaN, infinity) becomes None.
        """
        body: dict[str, Any] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            body[one.name] = value.to_json() if hasattr(value, "to_json") else value
            if one.name == "decode":
                body["total"] = self.total.to_json()
                body["peak_bytes"] = self.peak_bytes
                body["io_bytes"] = self.io_bytes
        return {key: _json_safe(value) for key, value in body.items()}


def make_report(
    engine: Engine,
    part: ModelPart,
    model: str,
    scheduler: Scheduler,
    before: Mapping[str, Mapping[str, int]],
    predicted: Mapping[str, float | None],
    facts: Mapping[str, Any],
) -> RunReport:
    """Return the report of a finished run. In a pipeline it covers all ranks.

    before: the bytes that the engine had moved before the run, by kind and lane.
    facts: more entries for `extra`.
    """
    blocks = scheduler.stats
    common = scheduler.common
    eviction = part.eviction
    now = engine.io_bytes_by_kind
    moved = {kind: {lane: n - before[kind][lane] for lane, n in now[kind].items()} for kind in now}
    spec = engine.spec
    itemsize = engine.dtype.itemsize
    shape = workload_of(
        eviction, scheduler.sizes.total(), set(scheduler.sizes), spec.num_blocks, spec.windows
    )
    copied = common * spec.kv_bytes_per_token(itemsize)
    model_bytes, cache_bytes, hidden_bytes = sizes_of(spec, scheduler.sizes, itemsize)
    joined = {"refilled": scheduler.joined} if scheduler.is_continuous else {}
    report = RunReport(
        model=model,
        policy=engine.policy,
        eviction=eviction.to_json(),
        prompt_len=shape.prompt_len,
        gen_len=shape.gen_len,
        num_prompts=shape.rows,
        prefill=PhaseReport(sum(b.prefill_s for b in blocks), scheduler.prompt_tokens),
        decode=PhaseReport(sum(b.decode_s for b in blocks), scheduler.decoded),
        peak_bytes_by_kind=engine.peak_bytes_by_kind,
        io_bytes_by_kind=moved,
        kv=_kv_facts(
            column_bytes(spec, engine.policy, itemsize),
            row_bytes(spec, engine.policy, shape, itemsize),
            max(shape.slots) - common,
            blocks,
            copied,
        ),
        predicted=predicted,
        model_bytes=model_bytes,
        cache_bytes=cache_bytes,
        hidden_bytes=hidden_bytes,
        extra={
            "dtype": str(engine.dtype).removeprefix("torch."),
            "device": str(engine.device.torch_device),
            "blocks": len(blocks),
            "sweeps": sum(b.sweeps for b in blocks),
            "kv_reserved_bytes": engine.plan.size("cache"),
            "look_ahead_units": asdict(engine.plan.depth),
            **facts,
            **joined,
            "prefill_fed_tokens": sum(b.fed_tokens for b in blocks),
            "common_prefix": {"tokens": common, "kv_bytes": copied},
            "busy_s": {lane: engine.timeline.seconds(lane) for lane in LANES},
        },
    )
    if engine.wire is None:
        return report
    return joint_report(engine.wire.gather((report, part.blocks, engine.wire.bytes_sent)))


def joint_report(ranks: Sequence[tuple[RunReport, Sequence[int], int]]) -> RunReport:
    """Return the report of a pipeline.

    Seconds are those of the last rank, where a sweep ends when its tokens are chosen. Bytes are
    sums. `extra.ranks` has the values of each rank.

    ranks: the report of each rank, its transformer blocks, and the bytes that it sent.
    """
    reports = [report for report, _, _ in ranks]
    first = reports[0]
    last = reports[-1]

    kv = {key: sum(one.kv[key] for one in reports) for key in first.kv}

    def summed_by_kind(name: str) -> dict[str, dict[str, int]]:
        kinds = [getattr(one, name) for one in reports]
        keys = next(iter(kinds[0].values()))
        every = dict.fromkeys(kind for one in kinds for kind in one)
        return {
            kind: {key: sum(one[kind][key] for one in kinds if kind in one) for key in keys}
            for kind in every
        }

    facts = [
        {
            "rank": rank,
            "blocks": blocks,
            "peak_bytes": dict(one.peak_bytes),
            "io_bytes": dict(one.io_bytes),
            "sent_bytes": sent_bytes,
            "busy_s": one.extra["busy_s"],
        }
        for rank, (one, blocks, sent_bytes) in enumerate(ranks)
    ]
    return replace(
        first,
        prefill=PhaseReport(last.prefill.seconds, first.prefill.tokens),
        decode=PhaseReport(last.decode.seconds, first.decode.tokens),
        kv={**kv, "slots": max(one.kv["slots"] for one in reports)},
        extra={**first.extra, "ranks": facts},
        peak_bytes_by_kind=summed_by_kind("peak_bytes_by_kind"),
        io_bytes_by_kind=summed_by_kind("io_bytes_by_kind"),
        model_bytes=sum(one.model_bytes for one in reports),
        cache_bytes=sum(one.cache_bytes for one in reports),
    )


def _over_kinds(by_kind: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """Return the sums over kinds, by tier or link."""
    found = Counter[str]()
    for one in by_kind.values():
        found.update(one)
    return dict(found)


def sizes_of(
    spec: ModelSpec, sizes: Mapping[tuple[int, int], int], itemsize: int
) -> tuple[int, int, int]:
    """Return the bytes of all weights, of the full KV cache, and of the hidden states.

    Weights count as in the checkpoint, unquantised numbers in the compute dtype. KV cache and
    hidden states are those of all sequences at their longest.

    sizes: how many sequences there are of each (prompt tokens, most new tokens).
    """
    tokens = sum((prompt + new) * number for (prompt, new), number in sizes.items())
    column = spec.kv_bytes_per_token(itemsize) // spec.num_blocks
    columns = sum(spec.kv_columns(prompt + new) * number for (prompt, new), number in sizes.items())
    return checkpoint_bytes(spec, itemsize), columns * column, tokens * spec.hidden_size * itemsize


def column_bytes(spec: ModelSpec, policy: Policy, itemsize: int) -> tuple[int, int]:
    """Return the bytes of one KV entry of all KV heads in one layer.

    The two numbers are the bytes in its slots and uncompressed.
    """
    sizes = kv_sizes_of(spec, policy, itemsize)
    return spec.num_kv_heads * sizes.column_bytes, spec.kv_bytes_per_token(
        itemsize
    ) // spec.num_blocks


def row_bytes(spec: ModelSpec, policy: Policy, need: Workload, itemsize: int) -> int:
    """Return the mean bytes of a sequence in one layer besides its KV entries.

    An example is what is stored beside packed slots. The record of slots does not count.
    """
    memory = MemoryPlanner(spec, policy, itemsize, device_is_host=True)
    beside = [
        memory.kv_layout(1, slots, memory.record_in(block, need.record)).beside_bytes
        for block, slots in enumerate(need.slots)
    ]
    return spec.num_kv_heads * (sum(beside) // len(beside))


def _kv_facts(
    column: tuple[int, int], beside: int, slots: int, blocks: Sequence[BlockStats], copied: int
) -> dict[str, int]:
    """Return the `kv` field of a run report.

    slots: those of the sequence that has the most. bytes: mean bytes of KV held in a decode sweep.
        full_bytes: the same of the full cache.

    column: see `column_bytes`.
    beside: see `row_bytes`.
    copied: bytes of KV outside of slots, held the whole time.
    """
    counted = [b for b in blocks if b.later] or [b for b in blocks if b.sweeps]
    sweeps = max(1, sum(max(1, b.later) for b in counted))
    return {
        "slots": slots,
        "bytes": copied + sum(column[0] * b.held + beside * b.units for b in counted) // sweeps,
        "full_bytes": column[1] * sum(b.full for b in counted) // sweeps,
    }


def sizes_line(model_bytes: int, cache_bytes: int, hidden_bytes: int) -> str:
    """Return FlexGen's line before the run (its GB is 2**30 bytes)."""
    return (
        f"model size: {model_bytes / GIB:.3f} GB, cache size: {cache_bytes / GIB:.3f} GB, "
        f"hidden size (prefill): {hidden_bytes / GIB:.3f} GB"
    )


def eviction_line(report: RunReport) -> str:
    """Return the line about which KV entries were kept, and how much of the full cache that was."""
    share = report.kv["bytes"] / max(1, report.kv["full_bytes"])
    common = report.extra.get("common_prefix", {}).get("tokens", 0)
    behind = f" behind one copy of {common} tokens for all" if common else ""
    return (
        f"eviction: {report.eviction['name']}, {report.kv['slots']} KV entries per prompt{behind}, "
        f"{share:.1%} of the full KV cache"
    )


def prediction_line(report: RunReport) -> str:
    """Return the line with the planner's prediction and the measured times."""
    said = report.predicted
    profile = report.extra.get("profile")
    if said["prefill_s"] is None or said["decode_s"] is None:
        return f"predicted: nothing, the profile {profile} does not know this dtype"
    if profile == "nominal":  # these are round figures of some machine, and several times off
        return f"predicted: nothing, {NOT_MEASURED}"
    phases = (
        ("prefill", said["prefill_s"], report.prefill),
        ("decode", said["decode_s"], report.decode),
    )
    figures = ", ".join(
        f"{name} {s:.3f} s (measured {phase.seconds:.3f} s)" for name, s, phase in phases
    )
    busy = f" ({MEASURED_BUSY})" if report.extra.get("profile_disturbed") else ""
    return f"predicted with {profile}{busy}: {figures}"


def ranks_line(report: RunReport) -> str:
    """Return the line with each rank's layers and the most bytes that it held."""
    ranks = [
        f"{one['rank']}: blocks {one['blocks'][0]} to {one['blocks'][1] - 1}, "
        f"at most {sum(one['peak_bytes'].values()) / GIB:.3f} GB held"
        for one in report.extra["ranks"]
    ]
    return "ranks: " + "; ".join(ranks)


def log_block(report: RunReport) -> str:
    """Return FlexGen's five tab-separated log lines, without a newline at the end.

    Its own scripts parse lines 3 to 5.
    """
    sizes = (
        f"model size: {report.model_bytes / GIB:.3f} GB\tcache size: "
        f"{report.cache_bytes / GIB:.3f} GB\t"
        f"hidden size (p): {report.hidden_bytes / GIB:.3f} GB"
    )
    peak = (
        f"peak gpu mem: {report.peak_bytes['device'] / GIB:.3f} GB\tprojected: {report.projected}"
    )
    phases = (("prefill", report.prefill), ("decode", report.decode), ("total", report.total))
    rates = [
        f"{name} latency: {phase.seconds:.3f} s\t{name} throughput: {phase.tokens_per_s:.3f} "
        "token/s"
        for name, phase in phases
    ]
    return "\n".join([sizes, peak, *rates])


def log_file_name(model: str, policy: Policy, prompt_len: int, gen_len: int) -> str:
    """Return FlexGen's automatic name of the log file.

    An example is fo-30b-gbs4-ngbs2-prompt512-gen32-percent-0-100-0-100-0-100-cpu-cache.log.

    model: a hub id or a folder. The size is what follows the last hyphen of its last part.
    """
    last = model.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]
    size = re.sub(r"[^A-Za-z0-9._]", "_", last.rsplit("-", 1)[-1]) or "model"
    name = (
        f"fo-{size}-gbs{policy.gpu_batch_size}-ngbs{policy.num_gpu_batches}-prompt{prompt_len}-gen{gen_len}-percent-"
        + "".join(f"{share}-" for share in policy.percent)
        + ("cpu-cache" if policy.cpu_cache_compute else "gpu-cache")
    )
    return name + "-compw" * policy.compress_weight + "-compc" * policy.compress_cache + ".log"


def append_log(path: Path, report: RunReport) -> None:
    """Append the log block to a file.

    Raise FlexgenError that names the file if it cannot be written.
    """
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(log_block(report) + "\n")
    except OSError as error:
        raise FlexgenError(f"--log-file {path}: {error.strerror or error}") from error


def project_decode_seconds(sweep_seconds: Sequence[float], gen_len: int) -> float:
    """Return the seconds that all gen_len - 1 decode sweeps would take.

    They are projected from those of the first few (--cut-gen-len). The rule is FlexGen's: the first
    two sweeps count as they are, and the mean of the others counts for each of the rest. With one
    or two sweeps the last one stands for the rest.

    Raise UsageError if decode sweeps are needed and none was measured.

    sweep_seconds: seconds of the measured decode sweeps in order, without the prefill sweep.
    """
    needed = gen_len - 1
    if needed <= len(sweep_seconds):
        return math.fsum(sweep_seconds[: max(needed, 0)])
    if not sweep_seconds:
        raise UsageError(
            "--cut-gen-len: 1 measures no decode pass to project from; give at least 2"
        )
    first = sweep_seconds[:_WARM_SWEEPS]
    rest = sweep_seconds[_WARM_SWEEPS:] or sweep_seconds[-1:]
    return math.fsum(first) + math.fsum(rest) / len(rest) * (needed - len(first))


def _json_safe(value: Any) -> Any:
    """Return `value` with None in place of numbers that JSON cannot hold."""
    if isinstance(value, Mapping):
        return {str(key): _json_safe(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
