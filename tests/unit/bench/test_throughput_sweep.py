"""The throughput sweep: going on where it was stopped, tables, and a whole quick run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o.core.errors import UsageError

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench" / "baselines"))

from contract import (
    Request,
    phases,
)

from bench.sweep.store import FAILED, OK, REFUSED, Key, Store, claimed

ROOT = Path(__file__).resolve().parents[3]
OPT_TINY = ROOT / "flexgen_h2o" / "assets" / "opt-tiny"


def key(system: str = "ours-full", rows: int = 8, repeat: int = 0) -> Key:
    return Key(system, "facebook/opt-125m", 16, 4, "none", rows, repeat)


def figures(rate: float) -> dict[str, Any]:
    memory = {"peak_rss_bytes": 10**9, "read_bytes": 0, "others": 0.1, "budget_bytes": None}
    return {"status": OK, "reason": "", **memory, **phases(8, 4, 4 / rate, 28 / rate)}


def test_a_sweep_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    first = Store(path)
    first.add(key(), figures(5.0))
    first.add(key(rows=16), {"status": REFUSED, "reason": "not built"})
    with path.open("a") as file:
        file.write('{"system": "half a li')
    then = Store(path)
    assert then.find(key()) == first.lines[0] and path.read_text().endswith(
        "half a li"
    )  # who reads leaves it
    assert then.find(key(repeat=1)) is None
    assert then.find(key(rows=16)) is None  # another version may run it
    with claimed(path):
        then.add(key(rows=32), figures(6.0))
        with (
            pytest.raises(UsageError, match="another sweep"),
            claimed(path),
        ):  # of the file that was cut
            pass
    assert len([json.loads(line) for line in path.read_text().splitlines()]) == 3


def request(tmp_path: Path, **other: Any) -> Request:
    values = {
        "variant": "full",
        "model_dir": OPT_TINY,
        "prompt_len": 6,
        "gen_len": 3,
        "rows": 4,
        "budget": None,
        "dtype": "fp32",
        "offload_dir": tmp_path,
        "threads": 1,
    }
    return Request(**(values | other))


def test_prompts_are_the_same_for_all_and_within_the_vocabulary(tmp_path: Path) -> None:
    asked = request(tmp_path)
    assert asked.prompts() == asked.prompts()
    assert [len(p) for p in asked.prompts()] == [6] * 4
    assert max(max(p) for p in asked.prompts()) < asked.config["vocab_size"]


@pytest.mark.slow
def test_the_quick_sweep_runs(tmp_path: Path) -> None:
    """With the peers that are installed here; of the others it says how to install them."""
    environment = os.environ | {"PYTHON": sys.executable}
    flags = f"--quick --results {tmp_path}/results --offload-dir {tmp_path}/offload"
    command = ["bash", str(ROOT / "bench/throughput_sweep.sh"), *flags.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [
        json.loads(line)
        for line in (tmp_path / "results" / "throughput.jsonl").read_text().splitlines()
    ]
    assert {
        line["status"] for line in lines if line["system"] in ("ours-full", "ours-h2o:0.1")
    } == {OK}
    assert not [line for line in lines if line["status"] == FAILED]
    missing = {
        line.split("bash ")[1].split()[0]
        for line in done.stdout.splitlines()
        if ": skipped, not installed" in line
    }
    assert all((ROOT / path).exists() for path in missing)
    assert "| `ours-full` |" in (tmp_path / "results" / "throughput.md").read_text()
