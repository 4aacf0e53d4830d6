"""The command lines as a shell runs them, in processes of their own; and the verbs of
`flexgen-h2o`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from flexgen_h2o import cli, flex_opt
from tests.forks import environment

RUN = (
    "flexgen_h2o.flex_opt --device cpu --dtype float32 --gpu-batch-size 2 --percent 30 30 30 30 30 "
    "30 "
    "--device-mem 32MiB --prompts prompts.jsonl --output out.jsonl --gen-len 4 --offload-dir "
    "offload --model"
)


def run(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """A module's command in a process that a shell might start."""
    return subprocess.run(
        [sys.executable, "-m", *argv],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_run(ids_model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(
        '{"prompt_token_ids": [5, 6]}\n{"prompt_token_ids": [7]}\n'
    )
    process = run(tmp_path, *RUN.split(), str(ids_model))
    assert (process.returncode, process.stderr) == (0, "")
    assert [
        json.loads(line)["index"] for line in (tmp_path / "out.jsonl").read_text().splitlines()
    ] == [0, 1]
    assert "total throughput:" in process.stdout
    assert not list(tmp_path.glob("*.log"))
    assert not list((tmp_path / "offload").iterdir())


def test_one_line_and_no_traceback(tmp_path: Path) -> None:
    process = run(tmp_path, *["flexgen_h2o.cli", "flex-opt", "--percent", "100", "0", "100", "0"])
    assert process.returncode == 2
    [line] = process.stderr.splitlines()
    assert line.startswith("flex-opt: ") and "--percent" in line


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == cli.main(["-h"]) == 0
    assert "flex-opt" in capsys.readouterr().out
    assert cli.main(["flex-opt", "--help"]) == flex_opt.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert "--percent" in shown and "--hh-ratio" not in shown.partition("Examples:")[0]
    assert cli.main(["flex-opt", "--help-all"]) == 0
    shown = capsys.readouterr().out
    for flag in ("--percent", "--prompts", "--hh-ratio", "--trace"):
        assert flag in shown


def test_no_verb(capsys: pytest.CaptureFixture[str]) -> None:
    for words, says in (
        ([], "usage: flexgen-h2o VERB"),
        (["flux-opt"], "known: generate"),
        (["--version", "now"], "--version"),
    ):
        assert cli.main(words) == 2
        said = capsys.readouterr()
        assert said.out == "" and says in said.err


# ---- a standard output that takes nothing

PLAN = (
    "plan --model facebook/opt-125m --prompt-len 32 --gen-len 8 --hardware t4 --percent 100 0 "
    "100 0 100 0"
)
# Each with the file that gets the results, and whether that is all that was asked for.
LOSSES = [
    ("flex-opt --no-log --output out.jsonl", "out.jsonl", True),
    ("flex-opt --log-file run.log", "run.log", False),
    ("evaluate text --prompts prompts.jsonl --json texts.json", "texts.json", True),
    (f"{PLAN} --output policy.json", "policy.json", True),
    (f"{PLAN} --json --output policy.json", "policy.json", False),
]


@pytest.fixture(params=["full", "unread"])
def lossy(request: pytest.FixtureRequest) -> Iterator[TextIO]:
    """A file on a full disk, or a pipe that nobody reads any more."""
    read, write = os.pipe()
    os.close(read)
    with open("/dev/full" if request.param == "full" else f"/proc/self/fd/{write}", "w") as file:
        yield file
    os.close(write)


@pytest.mark.parametrize(("command", "name", "is_all"), LOSSES)
def test_files_are_written_where_standard_output_takes_nothing(
    command: str,
    name: str,
    is_all: bool,
    lossy: TextIO,
    words_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A loss is a failure if the lost output was all that had been asked for."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text('{"prompt_token_ids": [5, 6]}\n')
    is_full = lossy.name == "/dev/full"
    if command.startswith("flex-opt"):
        command += " --prompt-len 8"
    if not command.startswith("plan"):
        command += f" --model {words_model} --device cpu --dtype float32 --gen-len 2"
        command += " --offload-dir offload"
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", lossy)
        assert cli.main(command.split()) == (0 if is_all else 1)
    said = [line for line in capfd.readouterr().err.splitlines() if "standard output" in line]
    assert len(said) == is_full
    assert not said or not is_all or said[0].endswith(f"the results are in {name}")
    assert (tmp_path / name).exists() or not (is_all or is_full), (
        "where nobody reads, a run without results ends"
    )
