"""`evaluate summarize` killed at any moment: the same command ends with the same summaries and
scores."""

from __future__ import annotations

import json
import random
import shlex
import signal
from pathlib import Path
from typing import Any

from flexgen_h2o.evaluation.articles import METRICS
from tests.fault.jobs import Job, tokens_of
from tests.forks import Forks

# ROUGE is an extra.
RUN = f"""
import os, sys
from flexgen_h2o import evaluate
from flexgen_h2o.evaluation import summarize
summarize.NEEDED = {{}}
summarize.Rouge = lambda: lambda text, reference: [float(len(text))] * {len(METRICS)}
code = evaluate.main(sys.argv[1:])
sys.stdout.flush()
os._exit(code)
"""
LOAD = (
    "from flexgen_h2o import evaluate; from flexgen_h2o.evaluation import summary; from "
    "flexgen_h2o.jobs import job"
)
FLAGS = shlex.split(
    "summarize -m opt-tiny --input in.jsonl --output-dir d --policies full h2o --hh-size 4 "
    "--gen-len 12 "
    "--dtype float32 --device cpu --offload-dir offload --gpu-batch-size 2 --num-gpu-batches 1 "
    "--resamples 10 "
    "--json r.json"
)
CELLS = ("full", "h2o-4+4")


def results(folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """Tokens of each cell by article, and the scores."""
    rows = {name: (folder / "d" / f"{name}.jsonl").read_text().split("\n") for name in CELLS}
    tokens = {
        name: tokens_of([json.loads(line) for line in lines if line])
        for name, lines in rows.items()
    }
    return tokens, [cell["scores"] for cell in json.loads((folder / "r.json").read_text())["cells"]]


def test_kill_and_go_on(forks: Forks, tmp_path: Path) -> None:
    folders = [tmp_path / "killed", tmp_path / "left"]
    generator = random.Random(0)
    forks.load(LOAD)
    for folder in folders:
        folder.mkdir()
        lines = [
            {
                "article": "def f(x):\n" * (1 + i % 4) + "\n\nSum up:\n",
                "summary_gt": "a",
                "temperature": 0.9,
            }
            for i in range(8)
        ]
        (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    killed, left = folders
    assert forks.run(left, RUN, *FLAGS).code == 0
    first = forks.start(killed, RUN, *FLAGS, kind=Job)
    output = killed / "d" / f"{CELLS[1]}.jsonl"
    first.wait_for_moment(
        lambda: output.exists() and output.read_bytes().count(b"\n") >= 2, generator
    )
    first.send(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL, first.err
    second = forks.run(killed, RUN, *FLAGS)
    assert second.code == 0, second.err
    assert second.out.count("nothing was left to do") == 1
    assert results(killed) == results(left)
    tokens, _ = results(left)
    assert all(len(rows) == 8 for rows in tokens.values())
