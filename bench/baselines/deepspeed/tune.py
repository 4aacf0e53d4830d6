"""Which aio settings read fastest here: run.py with one knob changed at a time, the best of each kept for the next.

    <venv python> bench/baselines/deepspeed/tune.py --output FILE [flags of run.py: --model-dir, --rows, --budget, ...]

Prints a markdown table and writes the best settings to FILE, which the sweep hands to run.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tuning import Tuning, main

TUNING = Tuning(
    run=Path(__file__).with_name("run.py"),
    knobs={
        "buffers": (5, 3, 8),
        "prefetch_matrices": (2, 1, 4),
        "aio_threads": (2, 1, 4),
        "block_mib": (8, 1, 4),
        "queue_depth": (8, 32),
    },
    rate="decode_tokens_per_s",
    columns={
        "decode tok/s": lambda found: f"{found['decode_tokens_per_s']:.2f}",
        "GB read/s": lambda found: f"{found['read_bytes'] / found['total_s'] / 1e9:.2f}",
    },
    flags=("--variant", "nvme"),
)

if __name__ == "__main__":
    sys.exit(main(TUNING, __doc__))
