"""The job benchmark end to end on a few articles of its own: systems agree in float32, and long articles are cut."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.mark.slow
def test_a_small_job(tmp_path: Path) -> None:
    texts = ["def add(a, b):\n    return", "import os\n\n", "class Stack:\n" * 400, "for i in range(10):\n    print"]
    articles = tmp_path / "articles.jsonl"
    articles.write_text("".join(json.dumps({"article": t, "max_tokens": 8, "stop": ["###"]}) + "\n" for t in texts))
    flags = ["--input", articles, "--dtype", "float32", "--rounds", "1", "--hf-batches", "2", "4", "--hf-share", "0.5"]
    command = [
        sys.executable,
        "-m",
        "bench.jobs.xsum_job",
        *flags,
        "--quiet-wait",
        "0",
        "--output",
        tmp_path / "result.json",
    ]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    systems = result["systems"]
    assert result["hf_batch_size"] in (2, 4)
    assert {name: system["rows"] for name, system in systems.items()} == {"h2o": 4, "full": 4, "hf": 4}
    assert systems["full"]["rows_with_hf_tokens"] == systems["hf"]["rows_with_hf_tokens"] == 4
    assert all(system["tokens"] > 0 and system["tokens_per_s"]["median"] > 0 for system in systems.values())
