"""Does the planner say what will happen? Predicted / measured seconds of runs that differ in what
limits them.

Each case is a whole run of the engine: a model at its true shape, a policy, a workload, full or
H2O. Before it, this machine's profile is measured (`--profile quick`, some seconds a case; or
`full`, once for all of them), so that the prediction and the run see the same neighbours. Reported:
predicted / measured of prefill, decode and both; the median and worst error |ratio - 1|; predicted
and measured peak bytes; the profiles.

    python -m bench.planner.planner_accuracy                       all cases, about 24 minutes with --every 2
    python -m bench.planner.planner_accuracy --cases 125m 350m     those whose name has one of these in it
    python -m bench.planner.planner_accuracy --cases llama neox    the shapes that are not OPT's
"""  # noqa: E501

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bench import common
from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.config import MemoryBudget, Policy
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.kvcache.eviction import H2O, Eviction, Full
from flexgen_h2o.llm import LLM
from flexgen_h2o.planner.measure.bench import HOST
from flexgen_h2o.planner.measure.run import measure
from flexgen_h2o.planner.profile import HardwareProfile

PHASES = ("prefill", "decode", "total")
# A profile in some seconds: the dtype, widths and lengths of the cases.
QUICK = replace(
    HOST,
    figure_s=0.04,
    longest_s=0.3,
    disk_bytes=2**30,
    disk_s=1.5,
    widths=(256, 768, 2048, 4096),
    hidden=(256, 768, 2048, 4096),
    heads=(768, 2048),
    rows=(1, 4, 8, 16, 32, 64, 1024),
    prompt_lengths=(64, 256),
    head_widths=(64, 128),
    steps=32,
    beside_s=1.0,
)
IN_RAM = (100, 0) * 3
KV_DISK = (100, 0, 0, 0, 100, 0)
W_DISK = (0, 0, 100, 0, 100, 0)
ALL_DISK = (0,) * 6
SPLIT = (50, 0, 50, 0, 100, 0)
INT4 = {"compress_weight": True, "int8_compute": True}


@dataclass(frozen=True)
class Case:
    """One run. rows, prompt_len, gen_len: of equal prompts; heavy: H2O's ratio; device_mem: with a
    stand-in device."""

    name: str
    model: str
    policy: Policy
    rows: int
    prompt_len: int
    gen_len: int
    heavy: float | None = None
    device_mem: str | None = None

    @property
    def eviction(self) -> Eviction:
        return Full() if self.heavy is None else H2O(heavy_ratio=self.heavy)


OTHERS = {
    "llama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "neox-410m": "EleutherAI/pythia-410m",
    "neox-1.4b": "EleutherAI/pythia-1.4b",
}


def case(
    size: str, what: str, policy: Policy, rows: int, work: tuple[int, int], **more: Any
) -> Case:
    """size: of OPT, or one of OTHERS."""
    return Case(
        f"{size} {what}", OTHERS.get(size, f"facebook/opt-{size}"), policy, rows, *work, **more
    )


def policy(gbs: int, batches: int, percent: tuple[int, ...], **more: Any) -> Policy:
    return Policy(gbs, batches, percent, **more)  # type: ignore[arg-type]


CASES = (
    case("125m", "in RAM, one small batch", policy(4, 1, IN_RAM), 4, (64, 64)),
    case("125m", "in RAM, large block", policy(64, 2, IN_RAM), 128, (128, 32)),
    case("125m", "KV on disk", policy(32, 2, KV_DISK), 64, (256, 24)),
    case("125m", "KV on disk, H2O", policy(32, 2, KV_DISK), 64, (256, 24), heavy=0.1),
    case("125m", "last block smaller", policy(16, 2, IN_RAM), 40, (96, 24)),
    case("350m", "all on disk, sequential", policy(16, 2, ALL_DISK, overlap=False), 32, (64, 12)),
    case(
        "350m",
        "three tiers",
        policy(16, 2, (30, 40, 50, 50, 0, 100)),
        32,
        (128, 16),
        device_mem="2GiB",
    ),
    case("1.3b", "in RAM", policy(16, 1, IN_RAM), 16, (128, 16)),
    case("1.3b", "weights on disk", policy(16, 2, W_DISK), 32, (64, 12)),
    case("1.3b", "weights and KV split", policy(16, 2, SPLIT), 32, (64, 12)),
    case("1.3b", "KV on disk", policy(16, 2, KV_DISK), 32, (192, 12)),
    case("1.3b", "KV on disk, H2O", policy(16, 2, KV_DISK), 32, (192, 12), heavy=0.1),
    case("1.3b", "KV in RAM, H2O", policy(32, 1, IN_RAM), 32, (192, 16), heavy=0.1),
    case("1.3b", "in int8, few rows", policy(8, 1, IN_RAM, int8_compute=True), 8, (64, 16)),
    case("1.3b", "in int8 from 4 bits, few rows", policy(8, 1, IN_RAM, **INT4), 8, (64, 16)),
    case("1.3b", "in int8 from 4 bits", policy(64, 1, IN_RAM, **INT4), 64, (64, 16)),
    case(
        "2.7b",
        "three tiers, KV on the host",
        policy(8, 2, (20, 50, 0, 100, 0, 100)),
        16,
        (64, 8),
        device_mem="3GiB",
    ),
    case("6.7b", "weights on disk", policy(8, 2, W_DISK), 16, (32, 8)),
    case(
        "6.7b", "weights split, H2O", policy(16, 1, (40, 0, 100, 0, 100, 0)), 16, (64, 8), heavy=0.1
    ),
    case("llama-1.1b", "in RAM, small batch", policy(16, 1, IN_RAM), 16, (128, 16)),
    case("llama-1.1b", "in RAM, large batch", policy(64, 1, IN_RAM), 64, (64, 16)),
    case("llama-1.1b", "in RAM, H2O", policy(32, 1, IN_RAM), 32, (192, 16), heavy=0.1),
    case("llama-1.1b", "weights on disk", policy(16, 2, W_DISK), 32, (64, 12)),
    case("llama-1.1b", "weights and KV split", policy(16, 2, SPLIT), 32, (64, 12)),
    case("neox-410m", "in RAM, large block", policy(32, 2, IN_RAM), 64, (128, 24)),
    case("neox-410m", "KV on disk", policy(16, 2, KV_DISK), 32, (192, 12)),
    case("neox-1.4b", "in RAM", policy(32, 1, IN_RAM), 32, (64, 16)),
    case("neox-1.4b", "weights on disk, H2O", policy(16, 2, W_DISK), 32, (64, 12), heavy=0.1),
)


def main() -> int:
    args = _parse()
    chosen = [c for c in CASES if not args.cases or any(part in c.name for part in args.cases)]
    if not chosen:
        raise UsageError(f"--cases: none matches; there are: {'; '.join(c.name for c in CASES)}")
    results = []
    profiles = []
    for i, one in enumerate(chosen):
        _write_weights(one, args)
        busy = common.wait_for_quiet(args.quiet_wait)
        if not profiles or (args.profile == "quick" and i % args.every == 0):
            profiles.append(_profile(args))
        results.append({**_measure(one, profiles[-1], args), "busy_before": busy})
        _show(results[-1])
    summary = _summary(results)
    _show_summary(summary)
    common.finish(
        {"cases": results, **summary, "profiles": [p.to_json() for p in profiles]}, args.output
    )
    return 0


def _parse() -> argparse.Namespace:
    parser = common.weights_parser(__doc__)
    parser.add_argument("--host-mem", default="14GiB", help="budget of RAM (14GiB)")
    parser.add_argument(
        "--cases", nargs="+", metavar="TEXT", help="only those with TEXT in their name"
    )
    parser.add_argument(
        "--profile", choices=("quick", "full"), default="quick", help="measured when (quick)"
    )
    parser.add_argument(
        "--every", type=positive, default=1, help="measure a quick profile every so many cases (1)"
    )
    parser.add_argument(
        "--repeats", type=positive, default=1, help="runs of each case; the medians count (1)"
    )
    return parser.parse_args()


def _profile(args: argparse.Namespace) -> HardwareProfile:
    start = time.monotonic()
    sizes = QUICK if args.profile == "quick" else HOST
    found = measure("cpu", Path(args.offload_dir), lambda line: None, sizes, ("bfloat16",))
    print(f"# profile measured in {time.monotonic() - start:.0f} s", flush=True)
    return found


def _open(one: Case, args: argparse.Namespace, hardware: HardwareProfile | None) -> LLM:
    budget = MemoryBudget(one.device_mem, args.host_mem)
    return common.open_llm(
        args, one.policy, one.eviction, model=one.model, budget=budget, hardware=hardware
    )


def _write_weights(one: Case, args: argparse.Namespace) -> None:
    """Random weights are written at the first use: not between the profile and the run."""
    tiny = Case(one.name, one.model, policy(1, 1, ALL_DISK), 1, 1, 1)
    with _open(tiny, args, None) as llm:
        llm.generate([[5]], SamplingParams(1, ignore_eos=True))


def _measure(one: Case, hardware: HardwareProfile, args: argparse.Namespace) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
    with _open(one, args, hardware) as llm, common.BackgroundLoad() as neighbours:
        prompts = [p.prompt_ids for p in common.benchmark_rows(llm, one.rows, one.prompt_len)]
        for _ in range(args.repeats):
            llm.generate(prompts, SamplingParams(one.gen_len, ignore_eos=True))
            assert llm.report is not None
            for phase in PHASES:
                seconds[phase].append(getattr(llm.report, phase).seconds)
        report = llm.report
        predicted = llm.predicted
        assert report is not None and predicted is not None
    said = {
        "prefill": predicted.prefill_s,
        "decode": predicted.decode_s,
        "total": predicted.total_s,
    }
    measured = {phase: statistics.median(values) for phase, values in seconds.items()}
    return {
        "case": one.name,
        "policy": one.policy.to_json(),
        "rows": one.rows,
        "prompt_len": one.prompt_len,
        "gen_len": one.gen_len,
        "heavy_ratio": one.heavy,
        "device_mem": one.device_mem,
        "predicted_s": said,
        "measured_s": measured,
        "ratio": {phase: said[phase] / measured[phase] for phase in PHASES},
        "bound_by": predicted.bound_by,
        "neighbours": neighbours.others,
        "peak_bytes": {
            "predicted": dict(predicted.peak_bytes),
            "measured": dict(report.peak_bytes),
        },
    }


def _show(result: dict[str, Any]) -> None:
    said, measured, ratio = (result[key] for key in ("predicted_s", "measured_s", "ratio"))
    phases = ", ".join(f"{p} {said[p]:.2f} / {measured[p]:.2f} s = {ratio[p]:.2f}" for p in PHASES)
    print(f"{result['case']:<34} {phases}  ({result['bound_by']})", flush=True)


def _summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    errors = {phase: [abs(r["ratio"][phase] - 1) for r in results] for phase in PHASES}
    shares = [
        r["peak_bytes"]["predicted"][tier] / held
        for r in results
        for tier, held in r["peak_bytes"]["measured"].items()
        if held
    ]
    return {
        "median_error": {phase: statistics.median(values) for phase, values in errors.items()},
        "worst_error": {phase: max(values) for phase, values in errors.items()},
        "least_predicted_peak_share": min(shares),
    }


def _show_summary(summary: dict[str, Any]) -> None:
    median = summary["median_error"]
    worst = summary["worst_error"]
    rows = [(phase, f"median {median[phase]:.1%}, worst {worst[phase]:.1%}") for phase in PHASES]
    rows.append(
        ("predicted / measured peak bytes", f"at least {summary['least_predicted_peak_share']:.3f}")
    )
    common.table("error of the prediction", rows)


if __name__ == "__main__":
    sys.exit(common.door(torch.no_grad()(main)))
