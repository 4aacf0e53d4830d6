"""The GPU suite: parity tests, and placements on one card held to 16 GB.

    bash scripts/gpu_suite.sh              a CUDA card; 20 GB of disk and 50 GB of RAM, 80 GB of each for opt-30b
    bash scripts/gpu_suite.sh --tiny       the same steps with small shapes on the CPU (5 minutes)
    bash scripts/gpu_suite.sh --call 2     one of three parts, which needs nothing of another

Steps run in the order of their worth. What is finished is kept, so that the next call goes on; a
report is written after every step: gpu_suite.md and gpu_suite.json, each gate met or missed. --call
writes to a folder of its own. OUT=DIR: a folder that gets the report, and all else in one archive,
after every step; given as --results with the same --call, the next call goes on from it. Exit code
1 when a step failed.
"""  # noqa: E501

from __future__ import annotations

import argparse
import os
import platform
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from bench import common
from bench.gpu.report import write_report
from bench.gpu.runner import FAILED, TIMEOUT, Suite
from bench.gpu.steps import CALLS, Setting, Step, all_steps, tiny_setting
from flexgen_h2o.cli_common import run_cli
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.units import GIB, less_margin, parse_bytes
from flexgen_h2o.parser import OneLineParser
from flexgen_h2o.tiers.device import open_device


def main() -> int:
    return run_cli("gpu_suite", _run, None)


def _run(argv: list[str] | None) -> int:
    args = _parse(argv)
    folder = "gpu_tiny" if args.tiny else "gpu"
    part = "" if args.call is None else f"call-{args.call}"
    results = (args.results or common.ROOT / "bench" / "results" / args.machine / folder) / part
    setting = (tiny_setting if args.tiny else _card_setting)(results.resolve(), args.offload_dir)
    steps = [step for step in all_steps(setting) if _is_wanted(step, args)]
    if args.list:
        print("\n".join(f"{step.limit:5.0f} s  {step.name}" + _of_call(step) for step in steps))
        return 0
    if setting.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("no CUDA device is usable here; --tiny runs the same steps on the CPU")
    if not steps:
        call = "" if args.call is None else f" of --call {args.call}"
        raise UsageError(
            f"--only {' '.join(args.only)}: no step{call} has such a name; --list shows them"
        )
    out = os.environ.get("OUT")
    suite = Suite(setting.results, args.limit, Path(out) / part if out else None, args.again)
    suite.run(steps, partial(write_report, setting, steps))
    print(
        f"\n{(setting.results / 'gpu_suite.md').read_text()}\nwritten: {setting.results}",
        flush=True,
    )
    return int(
        any(suite.state.get(step.name, {}).get("status") in (FAILED, TIMEOUT) for step in steps)
    )


def _card_setting(results: Path, offload_dir: Path) -> Setting:
    """In a dtype that the card has tensor cores for, and in no more GiB than it has free."""
    setting = Setting(False, results, offload_dir)
    if not torch.cuda.is_available():
        return setting
    device = open_device(setting.device, separate_budget=True)
    most = min(parse_bytes(setting.device_mem), less_margin(device.free_bytes() or 0))
    return replace(
        setting, device_mem=f"{most // GIB}GiB", dtype=device.compute_dtype(None, setting.dtype)
    )


def _is_wanted(step: Step, args: argparse.Namespace) -> bool:
    return args.call in (None, step.call) and (
        not args.only or any(word in step.name for word in args.only)
    )


def _of_call(step: Step) -> str:
    if not step.call:
        return ""
    return f"  (call {step.call}: {CALLS[step.call]})" + (
        "" if step.essential else ", where time is left"
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="gpu_suite.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--tiny",
        action="store_true",
        help="small shapes on the CPU, with a device tier of ordinary memory",
    )
    add(
        "--limit",
        type=common.seconds,
        default=540.0,
        metavar="S",
        help="seconds of this call (540)",
    )
    add(
        "--call",
        type=int,
        choices=CALLS,
        help=f"only this part: {', '.join(f'{n} {of}' for n, of in CALLS.items())}",
    )
    add(
        "--only",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="steps whose name has one of these in it",
    )
    add(
        "--again",
        action="store_true",
        help="run finished steps once more",
    )
    add("--list", action="store_true", help="show the steps and their limits")
    add(
        "--machine",
        default=platform.node() or "here",
        help="name of the folder in bench/results (the host's name)",
    )
    add("--results", type=Path, help="another folder for the results")
    offload = os.environ.get("FLEXGEN_OFFLOAD") or "~/flexgen_h2o_offload_dir"
    add(
        "--offload-dir",
        type=Path,
        default=Path(offload).expanduser(),
        help="weights, disk tier (FLEXGEN_OFFLOAD)",
    )
    args = parser.parse_args(argv)
    if not args.limit > 0:
        raise UsageError(f"--limit {args.limit:g}: give seconds, more than 0")
    return args


if __name__ == "__main__":
    sys.exit(main())
