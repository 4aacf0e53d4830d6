"""Claim: in decode sweeps of a disk-bound run, bytes read / time >= 0.85 of what the same reader
does alone.

Method: all weights on disk, KV and hidden states in RAM, few rows, so that reading takes longer
than computing. A run is cut after some sweeps; its steady decode sweeps (all but the first) give
bytes (/proc/self/io, so only what came from storage) over seconds. In the same process and
alternating with it, the engine's own reader does the same requests with nothing computing
(reader.py). Also shown: how long no disk request was under way in the steady sweeps.

Good: a ratio >= 0.85, idle time of the disk near 0, bytes read equal to the bytes of the weights
(of one sweep: give or take the ring, since a sweep ends with some of the next one's weights read
ahead).

    python -m bench.engine.io_bandwidth [--model facebook/opt-6.7b] [--repeats 5] [--output FILE]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from bench import common
from bench.common import GB, ON_DISK, Spread
from bench.engine.reader import Reader
from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.config import DTYPE_BYTES, Policy
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.timeline import Span
from flexgen_h2o.engine.memory import MemoryPlanner
from flexgen_h2o.engine.memory_plan import BlockShape, Depth
from flexgen_h2o.llm import LLM

# Of a sweep or of a repeat: unit, digits, scale and name in the table.
FIGURES = {
    "engine_bytes_per_s": ("GB/s", 2, GB, "engine, steady decode sweeps"),
    "reader_bytes_per_s": ("GB/s", 2, GB, "its reader alone"),
    "read_bytes_per_sweep": ("GB", 3, GB, "read a sweep"),
    "seconds_per_sweep": ("s", 3, 1, "seconds a sweep"),
    "disk_idle_share": ("%", 1, 0.01, "disk idle in these sweeps"),
    "longest_disk_gap_s": ("ms", 1, 0.001, "longest time without a request"),
    "compute_share": ("%", 1, 0.01, "compute busy in these sweeps"),
}
Figures = dict[str, list[float]]


def main() -> None:
    args = _parse()
    policy = Policy(args.gpu_batch_size, args.num_gpu_batches, percent=ON_DISK)
    found: Figures = {name: [] for name in FIGURES}
    with common.open_llm(args, policy) as llm:
        llm.timeline.keep_spans = True
        _engine_sweeps(llm, args)  # opens the engine, warms up
        ring_bytes = _ring_bytes(llm)
        with Reader(llm.model, policy, llm.dtype, args.offload_dir, ring_bytes) as reader:
            reader.read(1)

            def engine() -> None:
                for name, values in _engine_sweeps(llm, args).items():
                    found[name] += values

            def alone() -> None:
                nbytes, seconds = reader.read(args.sweeps - 2)
                if not nbytes:
                    raise UsageError(
                        f"--offload-dir {args.offload_dir}: is on no disk; give one that is"
                    )
                found["reader_bytes_per_s"].append(nbytes / seconds)

            rounds = common.alternate(args.repeats, [engine, alone], args.quiet_wait)
        weight_bytes = common.disk_weight_bytes(
            llm.model.spec, policy, llm.dtype, device_is_host=True
        )
    spreads = {name: Spread(values) for name, values in found.items()}
    ratio = common.ratio_of(found["engine_bytes_per_s"], found["reader_bytes_per_s"])
    rows = args.gpu_batch_size * args.num_gpu_batches
    lines = [
        (FIGURES[name][3], spread.show(*FIGURES[name][:3])) for name, spread in spreads.items()
    ]
    lines += [
        ("ratio (target >= 0.85)", ratio.show("")),
        ("weights on disk", f"{weight_bytes / GB:.3f} GB"),
    ]
    lines.append(("other processes took", common.show_rounds(rounds)))
    title = (
        f"{args.model}: disk-bound decode, {rows} rows, median (min - max) of {args.repeats} "
        "repeats"
    )
    common.table(title, lines)
    assert llm.report is not None
    result = {
        "benchmark": "io_bandwidth",
        "model": args.model,
        "rows": rows,
        "policy": llm.report.policy.to_json(),
        "look_ahead_units": llm.report.extra["look_ahead_units"],
        "ring_bytes": ring_bytes,
        "weight_bytes_on_disk": weight_bytes,
        **spreads,
        "ratio": ratio,
        "rounds": rounds,
    }
    common.finish(result, args.output)
    if args.trace is not None:
        llm.timeline.write_chrome_trace(args.trace)


def _parse() -> argparse.Namespace:
    parser = common.model_parser(__doc__, "facebook/opt-1.3b")
    add = parser.add_argument
    add("--dtype", default="bfloat16")
    add("--gpu-batch-size", type=positive, default=4)
    add("--num-gpu-batches", type=positive, default=1)
    add("--prompt-len", type=positive, default=32)
    add(
        "--sweeps",
        type=positive,
        default=8,
        help="sweeps of a run; prefill and the first decode do not count (8)",
    )
    add("--repeats", type=positive, default=5)
    add("--trace", action=common.ResultFile, help="write the last run's Chrome trace")
    return parser.parse_args()


def _engine_sweeps(llm: LLM, args: argparse.Namespace) -> Figures:
    rows = args.gpu_batch_size * args.num_gpu_batches
    found = common.steady(common.run_sweeps(llm, rows, args.prompt_len, args.sweeps))
    window = found.end - found.start
    gaps = _gaps(
        [s for s in llm.timeline.spans if s.row.startswith("disk_read")], found.start, found.end
    )
    computing = sum(
        s.end - s.start for s in llm.timeline.spans if s.row == "compute" and s.start >= found.start
    )
    return {
        "engine_bytes_per_s": [found.bytes_per_s],
        "disk_idle_share": [sum(gaps) / window],
        "longest_disk_gap_s": [max(gaps, default=0.0)],
        "compute_share": [computing / window],
        "seconds_per_sweep": found.seconds,
        "read_bytes_per_sweep": [float(n) for n in found.read_bytes],
    }


def _gaps(spans: Sequence[Span], start: float, end: float) -> list[float]:
    """Seconds of each time in [start, end] when no span was open."""
    gaps = []
    covered = start
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
    policy = llm.report.policy
    depth = Depth(**llm.report.extra["look_ahead_units"])
    rows = policy.gpu_batch_size
    spec = llm.model.spec
    slots = (
        llm.report.kv["slots"],
    ) * spec.num_blocks  # of the full cache: every block has as many
    shape = BlockShape(rows, policy.num_gpu_batches, rows * llm.report.prompt_len, slots)
    memory = MemoryPlanner(spec, policy, DTYPE_BYTES[llm.dtype], device_is_host=True)
    return memory.plan(shape, depth).size("weight ring")


if __name__ == "__main__":
    sys.exit(common.door(main))
