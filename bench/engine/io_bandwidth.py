"""Claim: in decode sweeps of a disk-bound run, bytes read / time >= 0.85 of what the same reader
does alone.

Method: all weights on disk, KV and hidden states in RAM, few rows, so that reading takes longer
than computing. A run is cut after some sweeps; its steady decode sweeps (all but the first, which
starts with what was loaded ahead during prefill) give bytes (/proc/self/io, so only what came from
storage) over seconds. In the same process and alternating with it, the engine's own reader does the
same requests with nothing computing (reader.py).

Good: a ratio >= 0.85, and bytes read equal to the bytes of the weights (of one sweep: give or take
what was read ahead).

    python -m bench.engine.io_bandwidth [--model facebook/opt-6.7b] [--repeats 5] [--output FILE]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch

from bench import common
from bench.common import GB, ON_DISK, Spread
from bench.engine.reader import Reader
from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.engine.generation import Callbacks
from flexgen_h2o.engine.loop import Step, zigzag
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.engine.sequence import with_params
from flexgen_h2o.llm import LLM


def main() -> None:
    args = _parse()
    policy = Policy(args.gpu_batch_size, args.num_gpu_batches, percent=ON_DISK)
    swept: list[tuple[float, int]] = []
    engine: list[float] = []
    alone: list[float] = []

    def run() -> None:
        sweeps = _steady_sweeps(llm, args)
        swept.extend(sweeps)
        engine.append(sum(nbytes for _, nbytes in sweeps) / sum(seconds for seconds, _ in sweeps))

    def read() -> None:
        nbytes, seconds = reader.read(args.sweeps - 2)
        if not nbytes:
            raise UsageError(f"--offload-dir {args.offload_dir}: is on no disk; give one that is")
        alone.append(nbytes / seconds)

    with (
        common.open_llm(args, policy) as llm,
        Reader(llm.model, policy, llm.dtype, args.offload_dir) as reader,
    ):
        _steady_sweeps(llm, args)  # opens the engine, warms up
        reader.read(1)
        parts: list[Callable[[], None]] = [run, read]
        for _ in range(args.repeats):
            common.wait_for_quiet(args.quiet_wait)
            for part in parts:
                part()
            parts.reverse()
        weights = reader.nbytes
    ratio = common.ratio_of(engine, alone)
    result = {
        "engine_bytes_per_s": Spread(engine),
        "reader_bytes_per_s": Spread(alone),
        "read_bytes_per_sweep": Spread([float(nbytes) for _, nbytes in swept]),
    }
    rows = policy.block_size
    common.table(
        f"{args.model}: disk-bound decode, {rows} rows, median (min - max) of {args.repeats} "
        "repeats",
        [
            ("engine, steady decode sweeps", result["engine_bytes_per_s"].show("GB/s", 2, GB)),
            ("its reader alone", result["reader_bytes_per_s"].show("GB/s", 2, GB)),
            ("read a sweep", result["read_bytes_per_sweep"].show("GB", 3, GB)),
            ("weights on disk", f"{weights / GB:.3f} GB"),
            ("ratio (target >= 0.85)", ratio.show("")),
        ],
    )
    about = {"benchmark": "io_bandwidth", "model": args.model, "rows": rows}
    facts = {"policy": policy.to_json(), "weight_bytes_on_disk": weights, "ratio": ratio}
    common.finish(about | result | facts, args.output)


def _parse() -> argparse.Namespace:
    parser = common.model_parser(__doc__, "facebook/opt-1.3b")
    add = parser.add_argument
    add("--dtype", default="bfloat16")
    add("--gpu-batch-size", type=positive, default=4)
    add("--num-gpu-batches", type=positive, default=1)
    add("--prompt-len", type=positive, default=32)
    sweeps = "sweeps of a run; prefill and the first decode do not count (8)"
    add("--sweeps", type=positive, default=8, help=sweeps)
    add("--repeats", type=positive, default=5)
    args = parser.parse_args()
    if args.sweeps < 3:
        raise UsageError("--sweeps: prefill, a decode sweep, and one to measure: at least 3")
    return args


def _steady_sweeps(llm: LLM, args: argparse.Namespace) -> list[tuple[float, int]]:
    """Return seconds, and bytes read, of the steady decode sweeps of a run that is cut short. Its
    rows could go on, so that every sweep loads ahead for the next."""
    rows = args.gpu_batch_size * args.num_gpu_batches
    ends: list[tuple[float, int]] = []  # of each sweep: when, and all bytes read until then
    seen = 0

    def mark(indices: list[int], logits: torch.Tensor) -> None:
        nonlocal seen
        seen += len(indices)
        if seen % rows == 0:
            ends.append((time.perf_counter(), common.storage_read_bytes()))

    def some_sweeps(layers: int, batches: int) -> Iterator[Step]:
        return zigzag(args.sweeps, layers, batches)

    prompts = common.benchmark_rows(llm, rows, args.prompt_len)
    asked = with_params(prompts, SamplingParams(args.sweeps + 2, ignore_eos=True))
    llm.run(asked, lambda done: None, Callbacks(mark), order=some_sweeps)
    steady = ends[1 : args.sweeps]
    return [(end[0] - start[0], end[1] - start[1]) for start, end in pairwise(steady)]


if __name__ == "__main__":
    sys.exit(common.door(main))
