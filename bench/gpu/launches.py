"""Launches and waits of decode sweeps on a card, by torch's profiler, and how long the card has
nothing to do.

    python -m bench.gpu.launches --hh-ratio 0.1 --output launches.json
    python -m bench.gpu.launches --device cpu --device-mem 300MiB --model facebook/opt-125m      without figures

Claim: at most 12 launches and no wait of the computing thread for each transformer block and
micro-batch. Embedding, head and sampling are shared out among the blocks. A graph is one launch.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from bench import common
from bench.gpu.kernels import card_rates
from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.config import MemoryBudget, Policy
from flexgen_h2o.engine.generation import Callbacks
from flexgen_h2o.engine.graphs import PLAIN_SWEEPS
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.engine.sequence import with_params
from flexgen_h2o.kvcache.eviction import H2O
from flexgen_h2o.llm import LLM

SWEEPS = "decode sweeps"
# categories of a trace
RUNTIME = ("cuda_runtime", "cuda_driver")
ON_CARD = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("LaunchKernel", "GraphLaunch", "MemcpyAsync", "MemsetAsync")  # in the names of calls
SYNCS = ("Synchronize",)
WARM_UP = (
    2 + PLAIN_SWEEPS
)  # sweeps before those that are watched: prefill, plain ones, one that makes graphs


class Watch:
    """Called with the logits of each sweep: the profiler runs over some sweeps in the middle."""

    def __init__(self, rows: int, sweeps: int, with_card: bool) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if with_card else [])]
        self.profiler = profile(activities=activities)
        self._mark = record_function(SWEEPS)
        self.sweeps = sweeps
        self._rows = rows
        self._seen = 0

    def __call__(self, rows: list[int], logits: torch.Tensor) -> None:
        self._seen += len(rows)
        if self._seen == WARM_UP * self._rows:
            self.profiler.start()
            self._mark.__enter__()
        elif self._seen == (WARM_UP + self.sweeps) * self._rows:
            self._mark.__exit__(None, None, None)
            self.profiler.stop()


def main() -> None:
    args = _parse()
    policy = Policy(
        args.gpu_batch_size,
        args.num_gpu_batches,
        percent=tuple(args.percent),
        compress_weight=args.compress_weight,
        compress_cache=args.compress_cache,
    )
    eviction = (
        None
        if args.hh_ratio is None
        else H2O(heavy_ratio=args.hh_ratio, recent_ratio=args.hh_ratio)
    )
    rows = policy.block_size
    with_card = args.device == "cuda"
    watch = Watch(rows, args.sweeps, with_card)
    budget = MemoryBudget(args.device_mem, args.host_mem)
    with common.open_llm(args, policy, eviction, device=args.device, budget=budget) as llm:
        _run(llm, rows, args.prompt_len, watch)
        blocks = llm.model.spec.num_blocks
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        watch.profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    steps = args.sweeps * blocks * args.num_gpu_batches
    found: dict[str, Any] = counts(events, steps) if with_card else {}
    lines = [(name, f"{value:.2f}") for name, value in found.items()] or [
        ("nothing is counted", "no card")
    ]
    common.table(f"A transformer block and micro-batch, {args.model}", lines)
    rates = card_rates(torch.device(args.device))
    common.finish({"benchmark": "gpu_launches", "counts": found, "rates": rates}, args.output)


def counts(events: Iterable[dict[str, Any]], steps: int) -> dict[str, float]:
    """Count in a trace in Chrome's format: launches and waits of the computing thread for each of
    `steps` (a block and micro-batch), seconds of a step, and the share of time in which no kernel
    ran."""
    known = [event for event in events if event.get("ph") == "X"]
    mark = next(
        event
        for event in known
        if event["name"] == SWEEPS and event.get("cat") == "user_annotation"
    )
    start = mark["ts"]
    end = mark["ts"] + mark["dur"]
    inside = [event for event in known if start <= event["ts"] < end]
    calls = [
        event["name"]
        for event in inside
        if event.get("cat") in RUNTIME and event["tid"] == mark["tid"]
    ]
    spans = sorted(
        (e["ts"], min(end, e["ts"] + e["dur"])) for e in inside if e.get("cat") == ON_CARD[0]
    )
    busy = 0.0
    reached = start
    for first, last in spans:
        busy += max(0.0, last - max(first, reached))
        reached = max(reached, last)
    return {
        "launches": sum(any(part in name for part in LAUNCHES) for name in calls) / steps,
        "syncs": sum(any(part in name for part in SYNCS) for name in calls) / steps,
        "seconds": (end - start) / 1e6 / steps,
        "idle share": 1 - busy / (end - start),
    }


def _run(llm: LLM, rows: int, prompt_len: int, watch: Watch) -> None:
    prompts = common.benchmark_rows(llm, rows, prompt_len)
    new = WARM_UP + watch.sweeps + 1
    asked = with_params(prompts, SamplingParams(new, ignore_eos=True))
    llm.run(asked, lambda done: None, Callbacks(watch))


def _parse() -> argparse.Namespace:
    parser = common.model_parser(__doc__, "facebook/opt-6.7b")
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--dtype", default="bfloat16")
    add("--device-mem")
    add(
        "--percent",
        type=int,
        nargs=6,
        default=(100, 0, 100, 0, 100, 0),
        help="placement (all on the device)",
    )
    add("--gpu-batch-size", type=positive, default=4)
    add("--num-gpu-batches", type=positive, default=2)
    add("--prompt-len", type=positive, default=128)
    add("--sweeps", type=positive, default=3, help="decode sweeps that are watched (3)")
    add(
        "--hh-ratio",
        type=float,
        help="H2O keeps this share of the prompt as heavy, and as recent, columns",
    )
    add("--compress-weight", action="store_true")
    add("--compress-cache", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(common.door(main))
