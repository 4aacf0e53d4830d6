"""Which settings generate fastest here: run.py with one knob changed at a time, the best of each kept for the next.

    <venv python> bench/baselines/llamacpp/tune.py --output FILE [flags of run.py: --model-dir, --rows, ...]

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
    "flash_attn": (1, 0), "kv_unified": (0, 1), "ubatch": (512, 128, 2048),
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    args, flags = parser.parse_known_args()
    best = {name: values[0] for name, values in KNOBS.items()}
    print("| " + " | ".join(KNOBS) + " | prefill s | decode tok/s | tok/s |\n|" + "---|" * (len(KNOBS) + 3))
    best_rate = _show(best, _run(flags, best))
    for knob, values in KNOBS.items():
        for value in values[1:]:
            tried = best | {knob: value}
            rate = _show(tried, _run(flags, tried))
            if rate > best_rate:
                best, best_rate = tried, rate
    if not best_rate:
        return 1
    args.output.write_text(json.dumps(best) + "\n")
    return 0


def _show(tried: dict[str, int], found: dict[str, Any]) -> float:
    """A row of the table; returns generated tokens a second, 0 where it failed."""
    rate = float(found.get("tokens_per_s", 0.0))
    shown = found.get("error") or f"{found['prefill_s']:.1f} | {found['decode_tokens_per_s']:.1f} | {rate:.1f}"
    print("| " + " | ".join(map(str, tried.values())) + f" | {shown} |", flush=True)
    return rate


def _run(flags: list[str], settings: dict[str, int]) -> dict[str, Any]:
    command = [sys.executable, str(RUN), *flags, "--settings", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        return {"error": f"exit code {done.returncode}: {said[-1][:120] if said else ''}"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


if __name__ == "__main__":
    sys.exit(main())
