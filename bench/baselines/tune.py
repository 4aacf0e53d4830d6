"""Which settings of a system are fastest here: run.py with one setting changed at a time, the
best kept.

    <python of the system> bench/baselines/tune.py SYSTEM --output FILE [flags of run.py: --model-dir, --rows, ...]

Prints a Markdown table and writes the best settings to FILE, which the sweep hands to run.py.
Imports the standard library only, because the environment of the other system runs it.
"""  # noqa: E501

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BASELINES = Path(__file__).resolve().parent
Found = Mapping[str, Any]  # what run.py prints
GAIN = 1.03  # a value must be so much faster than the one before it, which noise is not
COLUMNS: dict[str, Callable[[Found], str]] = {
    "prefill s": lambda found: f"{found['prefill_s']:.1f}",
    "decode tok/s": lambda found: f"{found['decode_tokens_per_s']:.2f}",
    "tok/s": lambda found: f"{found['tokens_per_s']:.2f}",
    "GB read": lambda found: f"{found['read_bytes'] / 1e9:.2f}",
}


@dataclass(frozen=True)
class Tuning:
    """Settings of a system that are tried."""

    knobs: Mapping[
        str, tuple[int, ...]
    ]  # values of each setting in the order of tuning, the default in front
    rate: str = "tokens_per_s"  # the figure of run.py that is to be large
    flags: tuple[str, ...] = ()  # of run.py, in front of the user's


TUNINGS = {
    "deepspeed": Tuning(
        knobs={
            "buffers": (5, 3, 8),
            "prefetch_matrices": (2, 1, 4),
            "aio_threads": (2, 1, 4),
            "block_mib": (8, 1, 4),
            "queue_depth": (8, 32),
        },
        rate="decode_tokens_per_s",
        flags=("--variant", "nvme"),
    ),
    "flexgen": Tuning(
        knobs={
            "micro_batches": (1, 2, 4),
            "sep_layer": (0, 1),
            "copy_threads": (4, 2, 1),
            "kv_on_disk": (0, 1),
        },
        flags=("--variant", "disk"),
    ),
    "hf": Tuning(
        knobs={"prefill": (0, 1), "freezing": (1, 0), "cpp_wrapper": (0, 1), "max_autotune": (0, 1)}
    ),
    "llamacpp": Tuning(
        knobs={"flash_attn": (1, 0), "kv_unified": (0, 1), "ubatch": (512, 128, 2048)}
    ),
    "openvino": Tuning(knobs={"kv_u8": (1, 0), "group": (32, 0, 128, 512)}),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table and write the best settings. Returns 1 where every run failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("system", choices=sorted(TUNINGS))
    parser.add_argument(
        "--output", type=Path, required=True, help="gets the best settings, for the sweep"
    )
    args, flags = parser.parse_known_args(argv)
    if args.output.is_dir() or not args.output.absolute().parent.is_dir():  # before the measuring
        parser.error(f"--output {args.output}: name a file in a folder that exists")
    tuning = TUNINGS[args.system]
    heads = [*tuning.knobs, *COLUMNS]
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    best = {name: values[0] for name, values in tuning.knobs.items()}
    best_rate = _measure(args.system, flags, best)
    for knob, values in tuning.knobs.items():
        for value in values[1:]:
            tried = best | {knob: value}
            rate = _measure(args.system, flags, tried)
            if rate > GAIN * best_rate:
                best = tried
                best_rate = rate
    if not best_rate:
        return 1
    args.output.write_text(json.dumps(best) + "\n")
    return 0


def _measure(system: str, flags: Sequence[str], settings: dict[str, int]) -> float:
    """Run once and print a line of the table. Returns the rate, 0 where the run failed."""
    tuning = TUNINGS[system]
    command = [sys.executable, str(BASELINES / "run.py"), system, *tuning.flags, *flags]
    command += ["--settings", json.dumps(settings)]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}  # as the sweep runs it
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        shown = [
            f"exit code {done.returncode}: {said[-1][:120] if said else ''}",
            *[""] * (len(COLUMNS) - 1),
        ]
        rate = 0.0
    else:
        found = json.loads(done.stdout.splitlines()[-1])
        shown = [show(found) for show in COLUMNS.values()]
        rate = float(found[tuning.rate])
    print("| " + " | ".join([*map(str, settings.values()), *shown]) + " |", flush=True)
    return rate


if __name__ == "__main__":
    sys.exit(main())
