"""Claim: peak RSS, less an empty torch process, stays under --host-mem + 300 MB; weights come from disk each sweep.

Method: a model larger than the budget (OPT-1.3B, 2.6 GB in bf16, in 1 GiB) runs in processes of its own
(measured_run.py), once with the automatic policy and once with all weights on disk. Peak RSS is the kernel's VmHWM at
the end. Two empty processes are measured beside it: one that imports torch, one that imports this package's LLM and
reads the model's config with transformers. Bytes read are those that came from storage (/proc/self/io).

Good: `over the empty process` below the budget + 300 MB; the report's peak_bytes at most the budget and close to what
the process took; no growth from sweep to sweep (`--sweeps 60` shows it well: a run of 500 tokens must fit too); every
decode sweep reads the bytes of the weights whose home is the disk.

    python -m bench.engine.memory_budget [--host-mem 1GiB] [--output FILE]
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from typing import Any

from bench import common
from bench.common import MB
from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.units import parse_bytes
from flexgen_h2o.llm import RANDOM_WEIGHTS_SEED
from flexgen_h2o.models.load import find_checkpoint, find_model

ALLOWED_OVER = 300 * MB
ON_DISK = "0 0 0 100 0 100"
_PEAK = "[print(int(x.split()[1]) * 1024) for x in open('/proc/self/status') if x.startswith('VmHWM')]"
_EMPTY = {
    "import torch": "import torch",
    "import flexgen_h2o.llm, read the config": "import flexgen_h2o.llm as m; m.find_model({model!r}, {path!r})",
}


def main() -> None:
    args = _parse()
    # Written here, so that the measured processes find it: writing takes memory of its own.
    find_checkpoint(find_model(args.model, args.path), args.dtype, args.offload_dir, RANDOM_WEIGHTS_SEED, False)
    empty = {name: _empty_process(code.format(model=args.model, path=args.path)) for name, code in _EMPTY.items()}
    budget = parse_bytes(args.host_mem, "--host-mem")
    flags = common.as_flags(args, "model", "path", "offload_dir", "host_mem", "dtype", "gpu_batch_size",
                            "num_gpu_batches", "prompt_len", "sweeps")  # fmt: skip
    placements: dict[str, list[str]] = {"auto": [], ON_DISK: ["--percent", *ON_DISK.split()]}
    runs = {name: common.measured_run([*flags, *placement]) for name, placement in placements.items()}
    torch_only = empty["import torch"]
    common.table(
        f"{args.model} in {args.host_mem}: peak RSS of empty processes",
        [(name, f"{nbytes / MB:.0f} MB") for name, nbytes in empty.items()],
    )
    for name, run in runs.items():
        if "error" not in run:
            run["over_empty_torch_bytes"] = run["memory"]["finished"]["hwm"] - torch_only
            held = [m["anon"] for m in run["memory_by_sweep"][1:]]  # from the first decode sweep to the last
            run["growth_per_sweep_bytes"] = (held[-1] - held[0]) / max(1, len(held) - 1)
            run["within"] = run["over_empty_torch_bytes"] < budget + ALLOWED_OVER
        _show(name, run, budget)
    result = {
        "benchmark": "memory_budget", "model": args.model, "budget_bytes": budget,
        "allowed_bytes": budget + ALLOWED_OVER, "empty_process_bytes": empty, "runs": runs,
    }  # fmt: skip
    common.finish(result, args.output)


def _parse() -> argparse.Namespace:
    parser = common.model_parser(__doc__, "facebook/opt-1.3b", "1GiB")
    add = parser.add_argument
    add("--dtype", default="bfloat16")
    add("--gpu-batch-size", type=positive, default=4)
    add("--num-gpu-batches", type=positive, default=2)
    add("--prompt-len", type=positive, default=128)
    add("--sweeps", type=positive, default=8, help="prefill and decode sweeps (8)")
    return parser.parse_args()


def _empty_process(code: str) -> int:
    """Peak RSS of a process that runs `code` and ends."""
    done = subprocess.run([sys.executable, "-c", f"{code}\n{_PEAK}"], stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout)


def _show(name: str, run: dict[str, Any], budget: int) -> None:
    if "error" in run:
        print(f"\n{name}: {run['error']}")
        return
    report, memory, reads = run["report"], run["memory"], run["steady"]["read_bytes"]
    percent = " ".join(map(str, report["policy"]["percent"]))
    prefill = run["memory_by_sweep"][0]
    common.table(
        f"policy {name}: percent {percent}, gbs {report['policy']['gpu_batch_size']}, "
        f"K {report['policy']['num_gpu_batches']}",
        [
            ("peak RSS", f"{memory['finished']['hwm'] / MB:.0f} MB"),
            ("over the empty process", f"{run['over_empty_torch_bytes'] / MB:.0f} MB"),
            ("allowed: budget + 300 MB", f"{(budget + ALLOWED_OVER) / MB:.0f} MB, kept: {run['within']}"),
            ("report's peak_bytes", f"host {report['peak_bytes']['host'] / MB:.0f} MB of {budget / MB:.0f} MB"),
            ("peak RSS after imports", f"{memory['imported']['hwm'] / MB:.0f} MB"),
            ("  model opened", f"{memory['opened']['hwm'] / MB:.0f} MB"),
            ("  prefill done", f"{prefill['hwm'] / MB:.0f} MB"),
            ("anonymous memory grows a decode sweep", f"{run['growth_per_sweep_bytes'] / MB:.2f} MB"),
            ("at the end: anonymous, files", f"{memory['finished']['anon'] / MB:.0f}, "
             f"{memory['finished']['file'] / MB:.0f} MB"),
            ("weights on disk", f"{run['weight_bytes_on_disk'] / MB:.0f} MB"),
            ("read a steady decode sweep", f"{min(reads) / MB:.0f} - {max(reads) / MB:.0f} MB, "
             f"mean {sum(reads) / len(reads) / MB:.0f} MB"),
        ],
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(common.door(main))
