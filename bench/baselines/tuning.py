"""A peer's best settings: its run.py with one knob changed at a time, the best of each kept for the next.

Imports the standard library only: a peer's environment runs it.
"""

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

Found = Mapping[str, Any]  # what run.py prints
GAIN = 1.03  # a value must be so much faster than the one before it, which noise is not


# The columns of a peer whose weights are in RAM.
RATES: dict[str, Callable[[Found], str]] = {
    "prefill s": lambda found: f"{found['prefill_s']:.1f}",
    "decode tok/s": lambda found: f"{found['decode_tokens_per_s']:.1f}",
    "tok/s": lambda found: f"{found['tokens_per_s']:.1f}",
}


@dataclass(frozen=True)
class Tuning:
    """What to tune of a peer.

    run: its run.py, called with `flags` in front of the user's. knobs: values of each setting in the order of tuning,
    the default in front. rate: the figure of run.py that is to be large. columns: what the table says of a run.
    """

    run: Path
    knobs: Mapping[str, tuple[int, ...]]
    rate: str
    columns: Mapping[str, Callable[[Found], str]]
    flags: tuple[str, ...] = ()


def main(tuning: Tuning, doc: str | None) -> int:
    """Print a markdown table, write the best settings to --output. Returns 1 where every run failed."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="gets the best settings, for the sweep")
    args, flags = parser.parse_known_args()
    if args.output.is_dir() or not args.output.absolute().parent.is_dir():  # before the measuring
        parser.error(f"--output {args.output}: name a file in a folder that exists")
    heads = [*tuning.knobs, *tuning.columns]
    print("| " + " | ".join(heads) + " |\n|" + "---|" * len(heads))
    best = {name: values[0] for name, values in tuning.knobs.items()}
    best_rate = _measure(tuning, flags, best)
    for knob, values in tuning.knobs.items():
        for value in values[1:]:
            tried = best | {knob: value}
            rate = _measure(tuning, flags, tried)
            if rate > GAIN * best_rate:
                best, best_rate = tried, rate
    if not best_rate:
        return 1
    args.output.write_text(json.dumps(best) + "\n")
    return 0


def _measure(tuning: Tuning, flags: Sequence[str], settings: dict[str, int]) -> float:
    """Run once and print a row of the table; returns the rate, 0 where it failed."""
    command = [sys.executable, str(tuning.run), *tuning.flags, *flags, "--settings", json.dumps(settings)]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}  # as the sweep runs it
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        shown = [f"exit code {done.returncode}: {said[-1][:120] if said else ''}", *[""] * (len(tuning.columns) - 1)]
        rate = 0.0
    else:
        found = json.loads(done.stdout.splitlines()[-1])
        shown = [show(found) for show in tuning.columns.values()]
        rate = float(found[tuning.rate])
    print("| " + " | ".join([*map(str, settings.values()), *shown]) + " |", flush=True)
    return rate
