"""Claim: in decode sweeps of a disk-bound run, bytes read / time >= 0.85 of what the same reader does alone.

Method: all weights on disk, KV and hidden states in RAM, few rows, so that reading takes longer than computing. A
run is cut after some sweeps; its steady decode sweeps (all but the first) give bytes (/proc/self/io, so only what came
from storage) over seconds. In the same process and alternating with it, the engine's own reader does the same requests
with nothing computing (reader.py). Also shown: how long no disk request was under way in the steady sweeps.

Good: a ratio >= 0.85, idle time of the disk near 0, bytes read equal to the bytes of the weights (of one sweep: give or
take the ring, since a sweep ends with some of the next one's weights read ahead).

    python -m bench.engine.io_bandwidth [--model facebook/opt-6.7b] [--repeats 5] [--output FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.common import (
    GB,
    ResultFile,
    Spread,
    add_flags,
    alternate,
    disk_weight_bytes,
    door,
    finish,
    run_sweeps,
    show_rounds,
    steady,
    table,
)
from bench.engine.reader import Reader
from flexgen_h2o.cli_common import OneLineParser, positive
from flexgen_h2o.core.config import DTYPE_BYTES, MemoryBudget, Policy
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.timeline import Span
from flexgen_h2o.engine.memory_plan import BlockShape, Depth, memory_plan
from flexgen_h2o.llm import LLM

DISK_RUN = (0, 0, 0, 100, 0, 100)


@dataclass
class Measured:
    """One value a repeat; the reader's sweeps follow or precede the engine's."""

    engine: list[float] = field(default_factory=list)
    reader: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    longest_gap: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    sweep_seconds: list[float] = field(default_factory=list)
    sweep_bytes: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> Spread:
        return Spread([e / r for e, r in zip(self.engine, self.reader, strict=True)])


def main() -> None:
    args = _parse()
    policy = Policy(args.gpu_batch_size, args.num_gpu_batches, percent=DISK_RUN)
    with LLM(
        args.model, policy, device="cpu", dtype=args.dtype, budget=MemoryBudget(host=args.host_mem), path=args.path,
        offload_dir=args.offload_dir,
    ) as llm:  # fmt: skip
        llm.timeline.keep_spans = True
        _engine_sweeps(llm, args, Measured())  # opens the engine, warms up
        with Reader(llm.model, policy, llm.dtype, args.offload_dir, _ring_bytes(llm)) as reader:
            reader.read(1)
            measured = Measured()

            def engine() -> None:
                _engine_sweeps(llm, args, measured)

            def alone() -> None:
                nbytes, seconds = reader.read(args.sweeps - 2)
                if not nbytes:
                    raise UsageError(f"--offload-dir {args.offload_dir}: is on no disk; give one that is")
                measured.reader.append(nbytes / seconds)

            rounds = alternate(args.repeats, [engine, alone], args.quiet_wait)
        weight_bytes = disk_weight_bytes(llm.model.spec, policy, llm.dtype, device_is_host=True)
        result = _result(args, llm, measured, weight_bytes, rounds)
    _show(args, measured, result)
    finish(result, args.output)
    if args.trace is not None:
        llm.timeline.write_chrome_trace(args.trace)


def _parse() -> argparse.Namespace:
    parser = OneLineParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_flags(parser, "facebook/opt-1.3b", None)
    add = parser.add_argument
    add("--dtype", default="bfloat16")
    add("--gpu-batch-size", type=positive, default=4)
    add("--num-gpu-batches", type=positive, default=1)
    add("--prompt-len", type=positive, default=32)
    add("--sweeps", type=positive, default=8, help="sweeps of a run; prefill and the first decode do not count (8)")
    add("--repeats", type=positive, default=5)
    add("--trace", action=ResultFile, help="write the last run's Chrome trace")
    return parser.parse_args()


def _engine_sweeps(llm: LLM, args: argparse.Namespace, into: Measured) -> None:
    rows = args.gpu_batch_size * args.num_gpu_batches
    found = steady(run_sweeps(llm, rows, args.prompt_len, args.sweeps))
    window = found.end - found.start
    gaps = _gaps([s for s in llm.timeline.spans if s.row.startswith("disk_read")], found.start, found.end)
    computing = sum(s.end - s.start for s in llm.timeline.spans if s.row == "compute" and s.start >= found.start)
    into.engine.append(found.bytes_per_s)
    into.idle.append(sum(gaps) / window)
    into.longest_gap.append(max(gaps, default=0.0))
    into.compute.append(computing / window)
    into.sweep_seconds += found.seconds
    into.sweep_bytes += [float(n) for n in found.read_bytes]


def _gaps(spans: Sequence[Span], start: float, end: float) -> list[float]:
    """Seconds of each time in [start, end] when no span was open."""
    gaps, covered = [], start
    for span in sorted(spans, key=lambda s: s.start):
        if span.start > covered:
            gaps.append(min(span.start, end) - covered)
        covered = max(covered, span.end)
        if covered >= end:
            break
    return [gap for gap in gaps if gap > 0]


def _ring_bytes(llm: LLM) -> int:
    """Size of the ring that the engine streamed its weights through."""
    assert llm.report is not None
    policy, depth = llm.report.policy, Depth(**llm.report.extra["look_ahead_units"])
    rows, spec = policy.gpu_batch_size, llm.model.spec
    slots = (llm.report.kv["slots"],) * spec.num_blocks  # of the full cache: every block has as many
    shape = BlockShape(rows, policy.num_gpu_batches, rows * llm.report.prompt_len, slots)
    return memory_plan(spec, policy, shape, DTYPE_BYTES[llm.dtype], True, depth).size("weight ring")


def _result(
    args: argparse.Namespace, llm: LLM, measured: Measured, weight_bytes: int, rounds: list[dict[str, float]]
) -> dict[str, Any]:
    assert llm.report is not None
    return {
        "benchmark": "io_bandwidth",
        "model": args.model,
        "rows": args.gpu_batch_size * args.num_gpu_batches,
        "policy": llm.report.policy.to_json(),
        "look_ahead_units": llm.report.extra["look_ahead_units"],
        "ring_bytes": _ring_bytes(llm),
        "weight_bytes_on_disk": weight_bytes,
        "read_bytes_per_sweep": Spread(measured.sweep_bytes).to_json(),
        "seconds_per_sweep": Spread(measured.sweep_seconds).to_json(),
        "engine_bytes_per_s": Spread(measured.engine).to_json(),
        "reader_bytes_per_s": Spread(measured.reader).to_json(),
        "ratio": measured.ratio.to_json(),
        "disk_idle_share": Spread(measured.idle).to_json(),
        "longest_disk_gap_s": Spread(measured.longest_gap).to_json(),
        "compute_share": Spread(measured.compute).to_json(),
        "rounds": rounds,
    }


def _show(args: argparse.Namespace, measured: Measured, result: dict[str, Any]) -> None:
    read, weights = Spread(measured.sweep_bytes), result["weight_bytes_on_disk"]
    table(
        f"{args.model}: disk-bound decode, {result['rows']} rows, median (min - max) of {args.repeats} repeats",
        [
            ("engine, steady decode sweeps", Spread(measured.engine).show("GB/s", scale=GB)),
            ("its reader alone", Spread(measured.reader).show("GB/s", scale=GB)),
            ("ratio (target >= 0.85)", measured.ratio.show("")),
            ("read a sweep", f"{read.show('GB', 3, GB)}; weights on disk: {weights / GB:.3f} GB"),
            ("seconds a sweep", Spread(measured.sweep_seconds).show("s", 3)),
            ("disk idle in these sweeps", Spread(measured.idle).show("%", 1, 0.01)),
            ("longest time without a request", Spread(measured.longest_gap).show("ms", 1, 0.001)),
            ("compute busy in these sweeps", Spread(measured.compute).show("%", 1, 0.01)),
            ("other processes took", show_rounds(result["rounds"])),
        ],
    )


if __name__ == "__main__":
    sys.exit(door(main))
