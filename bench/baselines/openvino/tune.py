"""Which settings generate fastest here: run.py with one knob changed at a time.

    <venv python> bench/baselines/openvino/tune.py --output FILE [flags of run.py: --model-dir, --rows, ...]

Prints a markdown table and writes the best settings to FILE, which the sweep hands to run.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tuning import RATES, Tuning, main

TUNING = Tuning(
    run=Path(__file__).with_name("run.py"),
    knobs={"kv_u8": (1, 0), "group": (32, 0, 128, 512)},
    rate="tokens_per_s",
    columns=RATES,
)

if __name__ == "__main__":
    sys.exit(main(TUNING, __doc__))
