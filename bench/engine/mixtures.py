"""How near a mixture of experts comes to the roofline with its weights on disk, by rows and by what is kept of the KV cache.

Random weights at the true shape, written once, and prompts of random tokens. A cell is `ROWS` or `GBSxK`, and flags of
flex_opt behind it. Each cell is a process of its own (flex_opt), and before each the disk (the engine's own requests,
without compute), one large product and reading memory are measured. The roofline of a decode sweep is the longer of reading the weights that are
on disk and of computing: FLOPs of what is active / peak + KV bytes / memory. Claim: decode reaches 0.75 of it, peak RSS
stays within the budget + 300 MB over an empty process, and the prediction within 15%.

    python -m bench.engine.mixtures --model Qwen/Qwen3-30B-A3B --host-mem 8GiB --cells 64 256 "1024 --kv-budget 0.2 --compress-cache"
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import resource
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from bench import common
from bench.common import GB, ON_DISK
from bench.engine.reader import Reader
from bench.engine.roofline import Peak, PeakProbe, token_flops
from flexgen_h2o.cli_common import positive
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.core.units import GIB
from flexgen_h2o.models.load import find_model


def main() -> None:
    args = _parse()
    model = find_model(args.model, args.path)
    on_disk = Policy(percent=ON_DISK, compress_weight=args.compress_weight)
    probe = PeakProbe(getattr(torch, args.dtype))
    cells = []
    for cell in args.cells:
        common.wait_for_quiet(args.quiet_wait)
        with Reader(model, on_disk, args.dtype, args.offload_dir, 2 * GIB) as reader:  # writes weights
            nbytes, seconds = reader.read(1, 4 * GB)
        cells.append(_measure(args, model.spec, cell, nbytes / seconds, probe.now()))
        _show(cells[-1])
    setting = common.some_of(args, "model", "host_mem", "dtype", "compress_weight")
    common.finish({"benchmark": "mixtures", **setting, "cells": cells}, args.output)


def _parse() -> argparse.Namespace:
    parser = common.model_parser(__doc__, "Qwen/Qwen3-30B-A3B", "8GiB")
    add = parser.add_argument
    add("--dtype", default="bfloat16")
    add("--cells", nargs="+", default=["64", "256"], help="ROWS or GBSxK, with flags of flex_opt behind it")
    add("--compress-weight", action="store_true", help="of all cells; the weights are written in 4 bits")
    add("--prompt-len", type=positive, default=16)
    add("--gen-len", type=common.decoded, default=8)
    return parser.parse_args()


def _measure(args: argparse.Namespace, spec: ModelSpec, cell: str, disk: float, peak: Peak) -> dict[str, Any]:
    size, *flags = shlex.split(cell)
    gbs, _, batches = size.partition("x")
    with tempfile.TemporaryDirectory() as folder:
        report_file, prompts = Path(folder) / "report.json", Path(folder) / "prompts.jsonl"
        # Equal prompts, FlexGen's, would all go to the same few experts.
        shape = int(gbs) * int(batches or 1), args.prompt_len
        ids = torch.randint(spec.vocab_size, shape, generator=torch.Generator().manual_seed(0)).tolist()
        prompts.write_text("".join(json.dumps({"prompt_token_ids": row}) + "\n" for row in ids))
        lengths = ["--prompts", str(prompts), "--gen-len", str(args.gen_len), "--ignore-eos"]
        command = [
            sys.executable, "-m", "flexgen_h2o.flex_opt", "--no-log", "--json", str(report_file), *lengths,
            *common.as_flags(args, "model", "path", "offload_dir", "host_mem", "dtype"),
            "--percent", *map(str, ON_DISK), "--gpu-batch-size", gbs, "--num-gpu-batches", batches or "1", *flags,
            *(["--compress-weight"] if args.compress_weight else []),
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, env=common.environment(), check=False)
        if done.returncode:
            return {"cell": cell, "error": done.stderr.strip().splitlines()[-1:]}
        report = json.loads(report_file.read_text())
    policy = Policy(**{**report["policy"], "percent": tuple(report["policy"]["percent"])})
    sweep_s = report["decode"]["seconds"] / (args.gen_len - 1)
    read = common.disk_weight_bytes(spec, policy, args.dtype, device_is_host=True)
    computing = (
        policy.block_size * sum(token_flops(spec)) / peak.flops_per_s + report["kv"]["bytes"] / peak.memory_bytes_per_s
    )
    return {
        "cell": cell, "prefill_s": report["prefill"]["seconds"], "sweep_s": sweep_s,
        "tokens_per_s": report["decode"]["tokens_per_s"], "disk_bytes_per_s": disk, "flops_per_s": peak.flops_per_s,
        "weights_read_s": read / disk, "computing_s": computing, "of_roofline": max(read / disk, computing) / sweep_s,
        "predicted": report["predicted"], "decode_s": report["decode"]["seconds"],
        # Of the largest child up to now: cells are given with the smallest first.
        "peak_rss_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024, "kv": report["kv"],
    }  # fmt: skip


def _show(found: dict[str, Any]) -> None:
    if "error" in found:
        print(f"\n{found['cell']}: {found['error']}", flush=True)
        return
    predicted = found["predicted"]["decode_s"]
    common.table(found["cell"], [
        ("a decode sweep", f"{found['sweep_s']:.2f} s: {found['tokens_per_s']:.1f} tokens/s"),
        ("reading alone, computing alone", f"{found['weights_read_s']:.2f} s, {found['computing_s']:.2f} s"),
        ("of the roofline", f"{found['of_roofline']:.2f}"),
        ("disk, products", f"{found['disk_bytes_per_s'] / GB:.2f} GB/s, {found['flops_per_s'] / 1e9:.0f} GFLOP/s"),
        ("predicted", f"{predicted:.1f} s for {found['decode_s']:.1f} s, {predicted / found['decode_s'] - 1:+.0%}"),
        ("peak RSS", f"{found['peak_rss_bytes'] / GB:.2f} GB"),
        ("KV", f"{found['kv']['bytes'] / GB:.2f} of {found['kv']['full_bytes'] / GB:.2f} GB"),
    ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(common.door(main))
