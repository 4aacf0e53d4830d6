"""Which of FlexGen's settings are fastest on a processor: run.py with one changed at a time, the best of each kept.

    <venv python> bench/baselines/flexgen/tune.py --output FILE [flags of run.py: --variant, --model-dir, --budget, ...]

Prints a markdown table and writes the best settings to FILE, which the sweep hands to run.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tuning import Tuning, main

TUNING = Tuning(
    run=Path(__file__).with_name("run.py"),
    knobs={"micro_batches": (1, 2, 4), "sep_layer": (0, 1), "copy_threads": (4, 2, 1), "kv_on_disk": (0, 1)},
    rate="tokens_per_s",
    columns={
        "tok/s": lambda found: f"{found['tokens_per_s']:.2f}",
        "decode tok/s": lambda found: f"{found['decode_tokens_per_s']:.2f}",
        "weights in RAM": lambda found: f"{found['setting']['weights_in_ram']}%",
    },
    flags=("--variant", "disk"),
)

if __name__ == "__main__":
    sys.exit(main(TUNING, __doc__))
