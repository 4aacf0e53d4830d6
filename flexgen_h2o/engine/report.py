"""The roofline of a run: the seconds that its matrix products and its reading of KV take at the machine's peak.

What else a run does (norms, transfers, choosing tokens, waiting) is what it loses to its roofline.

The facts of a finished run: the run report as JSON, FlexGen's summary and log lines, projections of cut runs.

Knows nothing of how a run is executed: it is handed numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from flexgen_h2o.core.config import TIERS, ModelSpec, Policy, TensorSpec
from flexgen_h2o.core.errors import FlexgenError, UsageError
from flexgen_h2o.core.units import GIB, format_bytes
from flexgen_h2o.kvcache.prefixes import FedPrompts
from flexgen_h2o.planner.profile import MEASURED_BUSY


@dataclass(frozen=True)
class RunWork:
    """FLOPs of all matrix products of a phase, those of causal attention with them; bytes of KV read by decode."""

    prefill_flops: float
    decode_flops: float
    decode_kv_bytes: float


@dataclass(frozen=True)
class Peak:
    """Measured: FLOPs a second of large matrix products with the faster layout, bytes a second of reading memory."""

    flops_per_s: float
    memory_bytes_per_s: float


@dataclass(frozen=True)
class Roofline:
    """Seconds at the peak."""

    prefill_s: float
    decode_s: float


def run_work(spec: ModelSpec, fed: FedPrompts, decode_tokens: int, kv_bytes: float) -> RunWork:
    """fed: the prompts; decode_tokens: that all rows got after their first one; kv_bytes: columns that decode
    attention read. The head sees one token of each prompt."""
    block = 2.0 * _elements(t for tensors in (*spec.attention, *spec.mlp) for t in tensors)
    head = 2.0 * _elements(spec.head)
    # n^2 / 2 pairs of a query and a key, two products of 2 FLOPs each
    causal = 2.0 * fed.pairs * spec.num_heads * spec.head_dim * spec.num_blocks
    prefill = fed.tokens * block + fed.rows * head + causal
    return RunWork(prefill, decode_tokens * (block + head), kv_bytes)


def roofline(work: RunWork, peak: Peak) -> Roofline:
    return Roofline(
        work.prefill_flops / peak.flops_per_s,
        work.decode_flops / peak.flops_per_s + work.decode_kv_bytes / peak.memory_bytes_per_s,
    )


def _elements(tensors: Iterable[TensorSpec]) -> int:
    """Of matrices."""
    return sum(t.numel for t in tensors if len(t.shape) == 2)


IO_LINKS = ("disk_read", "disk_write", "h2d", "d2h")
KV_FACTS = ("slots", "bytes", "full_bytes")
PREDICTIONS = ("prefill_s", "decode_s")
# FlexGen's first two decode sweeps are counted as measured; the mean of the later ones stands for the rest.
_WARM_SWEEPS = 2


@dataclass(frozen=True)
class PhaseReport:
    """One phase of a run. tokens: prompt tokens processed (prefill) or tokens generated (decode, total)."""

    seconds: float
    tokens: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second; 0.0 for a phase that took no time, so that it stays a JSON number."""
        return self.tokens / self.seconds if self.seconds > 0 and math.isfinite(self.seconds) else 0.0

    def to_json(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "tokens_per_s": self.tokens_per_s, "tokens": self.tokens}


@dataclass(frozen=True)
class RunReport:
    """The run report of DESIGN 3.3. Bytes are ints, times seconds; mappings must have exactly the keys named here.

    prompt_len, gen_len: the longest prompt and the most new tokens asked for. decode.tokens: tokens generated after
    each row's first one. peak_bytes: `TIERS`; io_bytes: `IO_LINKS`; both also by kind (`weights`, `kv`, `hidden`, and
    for peak_bytes the other buffers of the memory plan), with the same sums. kv: `KV_FACTS`; predicted: `PREDICTIONS`,
    None where nothing was predicted. projected: decode was cut short and scaled up. model_bytes, cache_bytes,
    hidden_bytes: the sizes of FlexGen's summary. extra: more facts, JSON values. Raises ValueError for a mapping with
    other keys or sums.
    """

    model: str
    policy: Policy
    eviction: Mapping[str, Any]
    prompt_len: int
    gen_len: int
    num_prompts: int
    prefill: PhaseReport
    decode: PhaseReport
    peak_bytes: Mapping[str, int]
    io_bytes: Mapping[str, int]
    peak_bytes_by_kind: Mapping[str, Mapping[str, int]]
    io_bytes_by_kind: Mapping[str, Mapping[str, int]]
    kv: Mapping[str, int]
    predicted: Mapping[str, float | None]
    model_bytes: int
    cache_bytes: int
    hidden_bytes: int
    projected: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, keys in (("peak_bytes", TIERS), ("io_bytes", IO_LINKS), ("kv", KV_FACTS), ("predicted", PREDICTIONS)):
            if set(getattr(self, name)) != set(keys):
                raise ValueError(f"{name} has the keys {sorted(getattr(self, name))}, not {sorted(keys)}")
        for name, keys in (("peak_bytes", TIERS), ("io_bytes", IO_LINKS)):
            kinds = getattr(self, f"{name}_by_kind")
            if {key: sum(of[key] for of in kinds.values()) for key in keys} != dict(getattr(self, name)):
                raise ValueError(f"{name}_by_kind does not sum up to {name}")

    @property
    def total(self) -> PhaseReport:
        """Generated tokens over prefill + decode time, as FlexGen counts: prefill gives each row its first token."""
        return PhaseReport(self.prefill.seconds + self.decode.seconds, self.num_prompts + self.decode.tokens)

    @property
    def spared_tokens(self) -> int:
        """Prompt tokens that prefill was not fed, because rows that begin alike share them."""
        return self.prefill.tokens - int(self.extra.get("prefill_fed_tokens", self.prefill.tokens))

    def to_json(self) -> dict[str, Any]:
        """The report as JSON values; a number that JSON cannot hold (NaN, infinity) becomes None."""
        body = {
            "model": self.model,
            "policy": self.policy.to_json(),
            "eviction": self.eviction,
            "prompt_len": self.prompt_len,
            "gen_len": self.gen_len,
            "num_prompts": self.num_prompts,
            "prefill": self.prefill.to_json(),
            "decode": self.decode.to_json(),
            "total": self.total.to_json(),
            "peak_bytes": self.peak_bytes,
            "io_bytes": self.io_bytes,
            "peak_bytes_by_kind": self.peak_bytes_by_kind,
            "io_bytes_by_kind": self.io_bytes_by_kind,
            "kv": self.kv,
            "predicted": self.predicted,
            "projected": self.projected,
            "model_bytes": self.model_bytes,
            "cache_bytes": self.cache_bytes,
            "hidden_bytes": self.hidden_bytes,
            "extra": self.extra,
        }
        return {key: _json_safe(value) for key, value in body.items()}


def sizes_line(model_bytes: int, cache_bytes: int, hidden_bytes: int) -> str:
    """FlexGen's line before the run (GB is 2**30 bytes there)."""
    return (
        f"model size: {model_bytes / GIB:.3f} GB, cache size: {cache_bytes / GIB:.3f} GB, "
        f"hidden size (prefill): {hidden_bytes / GIB:.3f} GB"
    )


def eviction_line(report: RunReport) -> str:
    """Which KV columns were kept, and how much of the full cache that was."""
    share = report.kv["bytes"] / max(1, report.kv["full_bytes"])
    common = report.extra.get("common_prefix", {}).get("tokens", 0)
    behind = f" behind one copy of {common} tokens for all" if common else ""
    return (
        f"eviction: {report.eviction['name']}, {report.kv['slots']} slots a row{behind}, "
        f"{share:.1%} of the full KV cache"
    )


def sparsity_line(report: RunReport) -> str:
    """What --attn-sparsity did not save, since its name promises it."""
    moved = ", ".join(f"{link} {format_bytes(n)}" for link, n in report.io_bytes_by_kind["kv"].items() if n)
    return (
        f"attention sparsity: {report.policy.attn_sparsity} of the values are added up; that saves arithmetic, no "
        f"traffic (KV moved: {moved or 'nothing'})"
    )


def prediction_line(report: RunReport) -> str:
    """What the planner said, beside what was measured."""
    said, profile = report.predicted, report.extra.get("profile")
    if said["prefill_s"] is None or said["decode_s"] is None:
        return f"predicted: nothing, the profile {profile} does not know this dtype"
    if profile == "nominal":  # round figures of some machine: several times off
        return "predicted: nothing, this machine was not measured (python -m flexgen_h2o.hardware: 1 to 2 minutes)"
    phases = (("prefill", said["prefill_s"], report.prefill), ("decode", said["decode_s"], report.decode))
    figures = ", ".join(f"{name} {s:.3f} s (measured {phase.seconds:.3f} s)" for name, s, phase in phases)
    busy = f" ({MEASURED_BUSY})" if report.extra.get("profile_disturbed") else ""
    return f"predicted with {profile}{busy}: {figures}"


def ranks_line(report: RunReport) -> str:
    """Which layers each rank of a pipeline had, and the most bytes it held."""
    ranks = [
        f"{one['rank']}: blocks {one['blocks'][0]} to {one['blocks'][1] - 1}, "
        f"{sum(one['peak_bytes'].values()) / GIB:.3f} GB"
        for one in report.extra["ranks"]
    ]
    return "ranks: " + "; ".join(ranks)


def with_roofline(report: RunReport, peak: Peak) -> RunReport:
    """The report with `extra.roofline`: the peak, and the seconds of prefill and decode at it (engine/report.py)."""
    ideal = roofline(RunWork(**report.extra["work"]), peak)
    return replace(report, extra={**report.extra, "roofline": {**asdict(peak), **asdict(ideal)}})


def roofline_line(report: RunReport) -> str:
    """How near the run came to what its products and its reading of KV take at the machine's peak."""
    peak = report.extra["roofline"]
    phases = (("prefill", report.prefill, peak["prefill_s"]), ("decode", report.decode, peak["decode_s"]))
    shares = ", ".join(f"{name} {s / phase.seconds:.0%} of peak" for name, phase, s in phases if phase.seconds > 0)
    return (
        f"roofline: {shares} ({peak['flops_per_s'] / 1e12:.3g} TFLOP/s, {peak['memory_bytes_per_s'] / 1e9:.3g} GB/s "
        "measured after the run)"
    )


def log_block(report: RunReport) -> str:
    """FlexGen's five tab-separated log lines, without a newline at the end; its own scripts parse lines 3 to 5."""
    sizes = (
        f"model size: {report.model_bytes / GIB:.3f} GB\tcache size: {report.cache_bytes / GIB:.3f} GB\t"
        f"hidden size (p): {report.hidden_bytes / GIB:.3f} GB"
    )
    peak = f"peak gpu mem: {report.peak_bytes['device'] / GIB:.3f} GB\tprojected: {report.projected}"
    phases = (("prefill", report.prefill), ("decode", report.decode), ("total", report.total))
    rates = [
        f"{name} latency: {phase.seconds:.3f} s\t{name} throughput: {phase.tokens_per_s:.3f} token/s"
        for name, phase in phases
    ]
    return "\n".join([sizes, peak, *rates])


def log_file_name(model: str, policy: Policy, prompt_len: int, gen_len: int) -> str:
    """FlexGen's automatic name, such as fo-30b-gbs4-ngbs2-prompt512-gen32-percent-0-100-0-100-0-100-cpu-cache.log.

    model: a hub id or a folder; what follows the last hyphen of its last part names the size.
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
    """Append the log block to a file. Raises FlexgenError naming it."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(log_block(report) + "\n")
    except OSError as error:
        raise FlexgenError(f"--log-file {path}: {error.strerror or error}") from error


def project_decode_seconds(sweep_seconds: Sequence[float], gen_len: int) -> float:
    """Seconds that all gen_len - 1 decode sweeps would take, from those of the first few (--cut-gen-len).

    sweep_seconds: measured decode sweeps in order, without the prefill sweep. As FlexGen: the first two as they
    are, the mean of the others for each of the rest; with one or two sweeps the last stands for the rest.
    Raises UsageError when decode sweeps are needed and none was measured.
    """
    needed = gen_len - 1
    if needed <= len(sweep_seconds):
        return math.fsum(sweep_seconds[: max(needed, 0)])
    if not sweep_seconds:
        raise UsageError("--cut-gen-len: 1 measures no decode sweep to project from; give at least 2")
    first = sweep_seconds[:_WARM_SWEEPS]
    rest = sweep_seconds[_WARM_SWEEPS:] or sweep_seconds[-1:]
    return math.fsum(first) + math.fsum(rest) / len(rest) * (needed - len(first))


def _json_safe(value: Any) -> Any:
    """`value` in JSON's own types; numbers of other libraries by their `item`, anything unknown as text."""
    if isinstance(value, Mapping):
        return {str(key): _json_safe(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(v) for v in value]
    if hasattr(value, "tolist"):
        return _json_safe(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, str | bool | int) else str(value)
