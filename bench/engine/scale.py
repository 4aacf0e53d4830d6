"""Claim: OPT-6.7B and OPT-30B at their true shapes run from disk in 8 GiB of RAM.

Method: a random checkpoint of the true shape is written once (13 GB and 60 GB; a model is skipped, and said so, where
the disk lacks room). A process of its own (measured_run.py) runs prefill and a few decode sweeps with all weights on
disk, KV cache and hidden states in RAM. Steady figures leave out prefill and the first decode sweep.

Good: tokens/s = rows x (what the disk gives) / (bytes of the weights); peak RSS within budget + 300 MB over an empty
torch process; every decode sweep reads all weights.

    python -m bench.engine.scale [--model facebook/opt-30b] [--remove-weights] [--output FILE]
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from bench import common
from bench.common import GB
from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.config import DTYPE_BYTES
from flexgen_h2o.llm import RANDOM_WEIGHTS_SEED
from flexgen_h2o.models.load import Model, find_checkpoint, find_model

ON_DISK = "0 0 0 100 0 100"
MODELS = ["facebook/opt-6.7b", "facebook/opt-30b"]
DISK_MARGIN = 2 * GB


def main() -> None:
    args = _parse()
    runs = {}
    for name in [args.model] if args.model else MODELS:
        model = find_model(name, args.path)
        missing = _missing_bytes(model, args)
        if missing > 0:
            print(f"\n{name}: skipped, {args.offload_dir} lacks {missing / GB:.1f} GB for its weights", flush=True)
            runs[name] = {"skipped": "no room on disk", "missing_bytes": missing}
            continue
        runs[name] = _measure(model, name, args)
        _show(name, runs[name])
    common.finish({"benchmark": "scale", "host_mem": args.host_mem, "runs": runs}, args.output)


def _parse() -> argparse.Namespace:
    parser = common.model_parser(__doc__, None, "8GiB")
    add = parser.add_argument
    add("--dtype", default="bfloat16")
    add("--gpu-batch-size", type=positive, default=16)
    add("--num-gpu-batches", type=positive, default=2)
    add("--prompt-len", type=positive, default=32)
    add("--sweeps", type=positive, default=5, help="prefill and decode sweeps (5)")
    add("--remove-weights", action="store_true", help="remove the checkpoints that this call has written")
    return parser.parse_args()


def _checkpoints(model: Model, args: argparse.Namespace) -> list[Path]:
    """Random checkpoints of the model that are on disk already."""
    folder = args.offload_dir / "weights" / "random"
    return list(folder.glob(f"{model.name.replace('/', '--')}-{args.dtype}-seed{RANDOM_WEIGHTS_SEED}-*"))


def _missing_bytes(model: Model, args: argparse.Namespace) -> int:
    """Bytes by which the disk is too small for a checkpoint that has to be written; 0 or less: there is room."""
    if not model.random or _checkpoints(model, args):
        return 0
    args.offload_dir.mkdir(parents=True, exist_ok=True)
    needed = model.spec.num_weights * DTYPE_BYTES[args.dtype] + DISK_MARGIN
    return needed - shutil.disk_usage(args.offload_dir).free


def _measure(model: Model, name: str, args: argparse.Namespace) -> dict[str, Any]:
    before = _checkpoints(model, args)
    start = time.perf_counter()
    find_checkpoint(model, args.dtype, args.offload_dir, RANDOM_WEIGHTS_SEED, True)
    written_s = time.perf_counter() - start
    busy = common.wait_for_quiet(args.quiet_wait)
    flags = common.as_flags(args, "path", "offload_dir", "host_mem", "dtype", "gpu_batch_size", "num_gpu_batches",
                            "prompt_len", "sweeps")  # fmt: skip
    with common.BackgroundLoad() as seen:
        run = common.measured_run(["--model", name, "--percent", *ON_DISK.split(), *flags])
    if args.remove_weights:
        for folder in set(_checkpoints(model, args)) - set(before):
            shutil.rmtree(folder)
    around = {"busy_before": busy, "others": seen.others, "stolen": seen.stolen}
    return {**run, "weights_written_s": None if before else written_s, "neighbours": around}


def _show(name: str, run: dict[str, Any]) -> None:
    if "error" in run:
        print(f"\n{name}: {run['error']}")
        return
    report, found = run["report"], run["steady"]
    memory = {stage: status["hwm"] / GB for stage, status in run["memory"].items()}
    seconds, reads = common.Spread(found["seconds"]), common.Spread([float(n) for n in found["read_bytes"]])
    policy = report["policy"]
    common.table(
        f"{name}: {run['rows_of_block']} rows (gbs {policy['gpu_batch_size']}, K {policy['num_gpu_batches']}), prompt "
        f"{report['prompt_len']}, percent {' '.join(map(str, policy['percent']))}",
        [
            ("weights", f"{report['model_bytes'] / GB:.1f} GB, {run['weight_bytes_on_disk'] / GB:.1f} GB on disk"),
            ("prefill", f"{report['prefill']['seconds']:.1f} s, {report['prefill']['tokens_per_s']:.0f} tokens/s"),
            ("a steady decode sweep", seconds.show("s", 2)),
            ("decode", f"{found['tokens_per_s']:.2f} tokens/s"),
            ("disk in these sweeps", f"{found['bytes_per_s'] / GB:.2f} GB/s, {reads.show('GB', 2, GB)} a sweep"),
            ("peak RSS", f"{memory['finished']:.2f} GB ({memory['imported']:.2f} after imports)"),
            ("report's peak_bytes", f"host {report['peak_bytes']['host'] / GB:.2f} GB"),
            ("units loaded ahead", str(report["extra"]["look_ahead_units"])),
            ("other processes took", f"{run['neighbours']['others']:.0%} of the cores"),
        ],
    )


if __name__ == "__main__":
    sys.exit(common.door(main))
