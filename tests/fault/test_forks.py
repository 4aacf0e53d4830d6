"""Processes that are forked after torch was used: they generate, or are refused at once, and never
wait without end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import environment

# `use` has torch start its threads; `answer` generates. Each script ends with "done" and what the
# children printed.
BEGIN = """
import multiprocessing, os, signal, sys
signal.alarm(240)

def use():
    import torch
    torch.set_num_threads(3)
    ones = torch.ones(2**20).add_(1)
    assert float((ones.view(1024, -1) @ ones.view(-1, 1024)).sum()) > 0

def answer():
    from flexgen_h2o import LLM, Policy, SamplingParams
    try:
        with LLM("opt-tiny", Policy(1, 1), device="cpu", dtype="float32", offload_dir=sys.argv[1]) as llm:
            print(llm.generate([[5, 6, 7]], SamplingParams(max_tokens=4))[0].token_ids, flush=True)
    except ValueError as error:
        print(error, flush=True)

def fork(*steps):
    pid = os.fork()
    if not pid:
        for step in steps:
            step()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""  # noqa: E501
SCRIPTS = {
    "the package is imported before": """
import flexgen_h2o
use()
fork(use, lambda: fork(answer))
answer()
""",
    "torch was used, and the package is imported by the child": """
use()
fork(answer, lambda: fork(answer))
""",
}


def lines_of(script: str, tmp_path: Path) -> list[str]:
    env = {name: value for name, value in environment().items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + script, str(tmp_path)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", SCRIPTS)
def test_forked_after_torch_was_used(name: str, tmp_path: Path) -> None:
    lines = lines_of(SCRIPTS[name], tmp_path)
    if "was used" in name:
        assert len(lines) == 2
        for line in lines:
            assert "forked from one that had used torch" in line
            assert "import flexgen_h2o before" in line
    else:
        assert len(lines) == 2 and len(set(lines)) == 1 and lines[0].startswith("["), lines
