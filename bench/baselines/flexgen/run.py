"""The original FlexGen on a CUDA card, under the published policy nearest to what is asked. Variant: published.

Without CUDA its copy threads die and the run hangs for ever: refused. It runs in a process of its own, which nothing
but its policy holds to --device-mem: the policies are those published for a 16 GB card. It computes in fp16, with
weights that are all ones (`--path _DUMMY_`): it converts no random checkpoint, and its speed does not depend on their
values.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

from contract import Meter, Request, main, phases

LATENCY = re.compile(r"(prefill|decode) latency: ([\d.]+) s")
# Published for a 16 GB card: model size in billions of weights up to which it is meant, percent, further flags.
PUBLISHED: tuple[tuple[float, str, tuple[str, ...]], ...] = (
    (7, "100 0 100 0 100 0", ("--overlap", "False")),
    (31, "20 80 0 100 0 100", ("--cpu-cache-compute",)),
    (float("inf"), "0 50 0 0 0 100", ("--cpu-cache-compute", "--pin-weight", "0")),
)
MICRO_BATCHES = 3  # of the published policy for opt-30b, 48 x 3


def published_flags(request: Request, weights: float) -> list[str]:
    """Flags for `rows` prompts. weights: number of the model's parameters."""
    percent, more = next((p, m) for limit, p, m in PUBLISHED if weights <= limit * 1e9)
    batches = MICRO_BATCHES if percent != PUBLISHED[0][1] and request.rows % MICRO_BATCHES == 0 else 1
    return [
        "--gpu-batch-size", str(request.rows // batches), "--num-gpu-batches", str(batches),
        "--percent", *percent.split(), *more,
    ]  # fmt: skip


def read_log(text: str, rows: int, gen_len: int) -> dict[str, Any]:
    """Rates from FlexGen's log lines."""
    found = {name: float(seconds) for name, seconds in LATENCY.findall(text)}
    return phases(rows, gen_len, found["prefill"], found["decode"])


def measure(request: Request, meter: Meter) -> dict[str, Any]:
    weights = sum(path.stat().st_size for path in request.weight_files) / 2
    flags, name = (
        published_flags(request, weights),
        str(request.config.get("_name_or_path") or request.settings["name"]),
    )
    with tempfile.TemporaryDirectory() as folder:
        log, scratch = Path(folder) / "log", request.offload_dir / "flexgen"
        command = [
            sys.executable, "-m", "flexgen.flex_opt", "--model", name, "--path", "_DUMMY_",
            "--offload-dir", str(scratch), "--log-file", str(log), *flags,
            "--prompt-len", str(request.prompt_len), "--gen-len", str(request.gen_len),
        ]  # fmt: skip
        meter.begin()
        subprocess.run(command, check=True, stdout=sys.stderr)
        shutil.rmtree(scratch, ignore_errors=True)
        return read_log(log.read_text(), request.rows, request.gen_len) | {"setting": {"flags": " ".join(flags)}}


if __name__ == "__main__":
    sys.exit(main(measure, ("published",), ("torch", "flexgen"), devices=("cuda",)))
