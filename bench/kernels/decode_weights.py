"""Quantised matrices of checkpoints decoded: numbers a second into bf16 and into int8 rows, by format.

    python -m bench.kernels.decode_weights                a minute
    python -m bench.kernels.decode_weights --threads 1    of one core

Claim: a core decodes MXFP4, FP8 and pack-quantized matrices into several GB/s of bf16. Formats take turns, in one
process; matrices come from memory. No checkpoint, no disk.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import torch

from bench import common
from flexgen_h2o.cli_common import positive
from flexgen_h2o.planner.measure.bench import HOST, Bench
from flexgen_h2o.planner.measure.compute import CHECKPOINTS, decoding, quantised_format
from flexgen_h2o.tiers.device import HostDevice

ROWS, COLUMNS = 8192, 4096


def main() -> int:
    args = _parse()
    torch.set_num_threads(args.threads or torch.get_num_threads())
    host = Bench(HostDevice(), HOST)
    jobs = {
        (name, kind): decoding(
            host, quantised_format(config, torch.bfloat16, kind == "int8"), torch.bfloat16, ROWS, COLUMNS
        )
        for name, config in CHECKPOINTS.items() for kind in ("bf16", "int8")
    }  # fmt: skip
    times: dict[tuple[str, str], list[float]] = {key: [] for key in jobs}
    busy = common.wait_for_quiet(args.quiet_wait)
    with torch.inference_mode(), common.BackgroundLoad() as seen:
        for turn in range(args.rounds + 1):  # the first compiles
            for key, (run, _) in jobs.items():
                start = time.perf_counter()
                run()
                if turn:
                    times[key].append(time.perf_counter() - start)
    found = [
        {
            "format": name, "into": kind, "stored_bytes": jobs[name, kind][1],
            "numbers_per_s": ROWS * COLUMNS / statistics.median(spent),
            "stored_bytes_per_s": jobs[name, kind][1] / statistics.median(spent),
        }
        for (name, kind), spent in times.items()
    ]  # fmt: skip
    lines = [
        (f"{f['format']} into {f['into']}",
         f"{f['numbers_per_s'] / 1e9:.2f} G numbers/s, {f['stored_bytes_per_s'] / 1e9:.2f} GB/s as stored")
        for f in found
    ]  # fmt: skip
    common.table(f"A matrix of {ROWS} x {COLUMNS} decoded, medians", lines)
    result = {
        "benchmark": "decode_weights", "threads": torch.get_num_threads(), "formats": found,
        "round": {"busy_before": busy, "others": seen.others, "stolen": seen.stolen},
    }  # fmt: skip
    common.finish(result, args.output)
    return 0


def _parse() -> argparse.Namespace:
    parser = common.own_parser(__doc__)
    add = parser.add_argument
    add("--threads", type=positive, help="threads that decode (as many as there are cores)")
    add("--rounds", type=positive, default=15, help="times that each format is decoded (15)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(common.door(main))
