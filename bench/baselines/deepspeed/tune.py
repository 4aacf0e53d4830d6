"""Which aio settings read fastest here: run.py with one knob changed at a time, the best of each kept for the next.

    <venv python> bench/baselines/deepspeed/tune.py --output FILE [flags of run.py: --model-dir, --rows, --budget, ...]

Prints a markdown table and writes the best settings to FILE, which the sweep hands to run.py.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

RUN = Path(__file__).with_name("run.py")
# In the order of tuning, the default in front of each.
KNOBS: dict[str, tuple[int, ...]] = {
    "buffers": (5, 3, 8),
    "prefetch_matrices": (2, 1, 4),
    "aio_threads": (1, 2, 4),
    "block_mib": (1, 4, 8),
    "queue_depth": (8, 32),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    args, flags = parser.parse_known_args()
    best: dict[str, int] = {}
    best_rate = 0.0
    print("| buffers | prefetch | aio threads | block MiB | queue depth | decode tok/s | GB read/s |\n|" + "---|" * 7)
    for knob, values in KNOBS.items():
        for value in values[1:] if best else values:
            tried = {name: choices[0] for name, choices in KNOBS.items()} | best | {knob: value}
            found = _run(flags, tried)
            rate = found.get("decode_tokens_per_s", 0.0)
            speed = found.get("read_bytes", 0) / found.get("total_s", 1.0) / 1e9
            shown = found.get("error") or f"{rate:.2f} | {speed:.2f}"
            print("| " + " | ".join(str(tried[name]) for name in KNOBS) + f" | {shown} |", flush=True)
            if rate > best_rate:
                best, best_rate = tried, rate
    if not best:
        return 1
    args.output.write_text(json.dumps(best) + "\n")
    return 0


def _run(flags: list[str], settings: dict[str, int]) -> dict[str, Any]:
    command = [sys.executable, str(RUN), "--variant", "nvme", *flags, "--settings", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        return {"error": f"exit code {done.returncode}: {said[-1][:120] if said else ''} |"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
