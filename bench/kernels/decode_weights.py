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
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from bench import common
from flexgen_h2o.checkpoint.formats import Held, weight_format
from flexgen_h2o.checkpoint.writing import any_bytes
from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.model import TensorSpec
from flexgen_h2o.kernels.workspace import Workspace
from flexgen_h2o.models import built_in_spec
from flexgen_h2o.tiers.stream import Part

ROWS, COLUMNS = 8192, 4096
_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "mxfp4": {"quant_method": "mxfp4"},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "pack-quantized, 4 bits": {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4}},
    },
    "gptq, 4 bits": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
}  # fmt: skip


def main() -> int:
    args = _parse()
    torch.set_num_threads(args.threads or torch.get_num_threads())
    jobs = {(name, kind): _job(config, kind) for name, config in CONFIGS.items() for kind in ("bf16", "int8")}
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


def _job(config: dict[str, Any], kind: str) -> tuple[Callable[[], None], int]:
    """A call that decodes a matrix of random bytes, and the bytes that it has as stored."""
    known = built_in_spec("facebook/opt-125m")
    assert known is not None
    form = weight_format(replace(known[0], quantization=config), Policy(int8_compute=kind == "int8"), 2)
    layout = form.layout(TensorSpec("", form.sample_name, (ROWS, COLUMNS)))
    part = Part("host", 0, layout.cut_shape[0])
    raw = [any_bytes(stored) for stored in layout.stored]
    held = Held(part, [stored.held(one, stored.dtypes[0]) for stored, one in zip(layout.stored, raw, strict=True)])
    memory = torch.zeros(ROWS * layout.decoded_row_bytes, dtype=torch.uint8)
    out = form.decoded_parts(layout, memory, Workspace(memory, {}, torch.bfloat16))
    return lambda: form.decode(layout, [held], out), sum(one.numel() for one in raw)


def _parse() -> argparse.Namespace:
    parser = common.own_parser(__doc__)
    add = parser.add_argument
    add("--threads", type=positive, help="threads that decode (as many as there are cores)")
    add("--rounds", type=positive, default=15, help="times that each format is decoded (15)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(common.door(main))
