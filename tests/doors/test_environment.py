"""What the environment of a process must not do to it: a line of ours says what is wrong, not a
library's."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import Forks, environment

GONE = "the working folder has been removed; change to another one (cd), and run again"
VERBS = ("complete --prompt hi", "doctor")


def run(tmp_path: Path, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = environment() | variables
    return subprocess.run(
        [sys.executable, *argv], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )


def test_a_setting_of_numba(tmp_path: Path) -> None:
    line = "generate opt-tiny -p hi --max-tokens 2 --device cpu --offload-dir off"
    done = run(tmp_path, "-m", "flexgen_h2o.cli", *line.split(), NUMBA_DISABLE_JIT="1")
    [said] = done.stderr.splitlines()
    assert done.returncode == 2 and said.startswith("generate: NUMBA_DISABLE_JIT: ")


@pytest.mark.parametrize("verb", VERBS)
def test_a_working_folder_that_is_gone(verb: str, forks: Forks, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    script = (
        f"import os, sys; from flexgen_h2o import cli; os.chdir({str(folder)!r}); "
        f"os.rmdir({str(folder)!r})"
    )
    done = forks.run(tmp_path, f"{script}; sys.exit(cli.main(sys.argv[1:]))", *verb.split())
    assert (done.code, done.out) == (2, "")
    assert done.err == f"{verb.split()[0]}: {GONE}\n"


def test_a_working_folder_that_is_gone_in_python(tmp_path: Path) -> None:
    """A library that torch brings would end the process, with a line of its own."""
    remove = "import os; os.mkdir('gone'); os.chdir('gone'); os.rmdir(os.getcwd())"
    done = run(tmp_path, "-c", f"{remove}; from flexgen_h2o import LLM")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(f"UsageError: {GONE}")
