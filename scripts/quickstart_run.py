"""Runs the example prompts with half of the model on disk, and prints answers, memory, time and
what to type next.

`scripts/quickstart.sh` calls it: python scripts/quickstart_run.py MODEL
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flexgen_h2o.core.units import MIB, format_seconds

SCRIPTS = Path(__file__).resolve().parent
CHAT_PROMPTS = SCRIPTS / "example_prompts.txt"
TOY = "opt-tiny"  # writes on for code, and knows no chat
TOY_PROMPTS = SCRIPTS / "code_prompts.txt"
LIMIT = "256 MiB"


def main(model: str) -> int:
    prompts = TOY_PROMPTS if model == TOY else CHAT_PROMPTS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        done = subprocess.run(
            _command(model, prompts, folder), stdout=subprocess.DEVNULL, check=False
        )
        if done.returncode:
            return done.returncode if done.returncode > 0 else 128 - done.returncode
        answers = [
            json.loads(line)
            for line in (folder / "answers.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    process_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    print(f"\n{model} with half of its weights and KV cache on disk:")
    for prompt, answer in zip(
        prompts.read_text(encoding="utf-8").splitlines(), answers, strict=True
    ):
        shown = (
            f"{prompt}{answer['text']}" if model == TOY else f"> {prompt}\n{answer['text'].strip()}"
        )
        print(f"\n{shown}")
    print(
        "\n"
        + "\n".join(
            [*memory_lines(report, process_bytes), *time_lines(report), "", *next_lines(model)]
        )
    )
    return 0


def _command(model: str, prompts: Path, folder: Path) -> list[str]:
    """Return the run: it answers `prompts`, and writes answers.jsonl and report.json into
    `folder`."""
    chat = [] if model == TOY else ["--chat"]
    return [
        *(
            sys.executable,
            "-m",
            "flexgen_h2o.flex_opt",
            "--model",
            model,
            *chat,
            "--prompts",
            str(prompts),
        ),
        *(
            "--percent",
            "0",
            "50",
            "0",
            "50",
            "0",
            "100",
            "--gpu-batch-size",
            "3",
            "--host-mem",
            LIMIT,
        ),
        *(
            "--gen-len",
            "64",
            "--output",
            str(folder / "answers.jsonl"),
            "--json",
            str(folder / "report.json"),
        ),
        "--no-log",
    ]


def memory_lines(report: Mapping[str, Any], process_bytes: int) -> list[str]:
    """Return the peak beside the limit. The limit is for the model's data: Python and its libraries
    come on top."""
    held = _mib(report["peak_bytes"]["host"])
    whole = _mib(report["model_bytes"])
    return [
        f"RAM    {held} at most for weights, KV cache and buffers; limit {LIMIT}; the weights "
        f"alone have {whole}",
        f"       {_mib(process_bytes)} for the whole process: Python and PyTorch come on top of "
        "the limit",
    ]


def time_lines(report: Mapping[str, Any]) -> list[str]:
    """Return the measured time beside the predicted one, which is rough until this machine has been
    measured."""
    total = report["total"]
    predicted = report["predicted"]
    line = f"Time   {format_seconds(total['seconds'])} for {total['tokens']} tokens, after loading"
    if None in predicted.values():
        return [line]
    seconds = format_seconds(sum(predicted.values()))
    if report["extra"]["profile"] == "nominal":
        return [
            f"{line}; predicted roughly {seconds}, with typical figures",
            "       flexgen-h2o hardware measures this machine in 1 to 2 minutes; predictions are "
            "closer then",
        ]
    return [f"{line}; predicted {seconds}"]


def next_lines(model: str) -> list[str]:
    """Return what to type next, with the environment's activation if it is not active."""
    bin_folder = Path(sys.executable).parent
    is_active = os.environ.get("VIRTUAL_ENV") == str(bin_folder.parent)
    activate = [] if is_active else [f"  source {os.path.relpath(bin_folder)}/activate"]
    prompt = "def add(a, b):" if model == TOY else "Write one sentence about the sea."
    file = (TOY_PROMPTS if model == TOY else CHAT_PROMPTS).relative_to(SCRIPTS.parent)
    return [
        "Next:",
        *activate,
        f'  flexgen-h2o generate {model} -p "{prompt}"',
        f"  flexgen-h2o generate {model} -i {file} -o answers.jsonl",
        "  flexgen-h2o generate --help",
    ]


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.0f} MiB"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
