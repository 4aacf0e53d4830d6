"""The GPU suite on a machine that is lent: what it lacks, what is first in its minutes, and what
comes back of it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bench import common
from bench.gpu import __main__ as door
from bench.gpu import needs
from bench.gpu.report import write_report
from bench.gpu.runner import ARCHIVE, DONE, TIMEOUT, Suite
from bench.gpu.steps import CALLS, Setting, Step, all_steps, tiny_setting
from bench.sweep import __main__ as sweep
from flexgen_h2o.core.errors import UsageError
from tests.unit.bench.test_gpu_suite import ROOT, run

MAX_FILES = 8  # that a device machine gives back
ONE_FAILS = """
import time

def test_first():
    assert False

def test_second():
    time.sleep(60)
"""


def test_what_python_lacks_is_said_in_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert needs.problem() is None
    monkeypatch.setattr(
        needs, "find_spec", lambda name: None if name in ("pulp", "pytest_timeout") else name
    )
    monkeypatch.setattr(needs, "import_module", pytest.fail)
    assert needs.main() == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "has no pulp, pytest-timeout; bring wheels" in said

    def too_old(name: str) -> None:
        raise ImportError(f"{name} needs\nanother numpy")

    monkeypatch.setattr(needs, "find_spec", lambda name: name)
    monkeypatch.setattr(needs, "import_module", too_old)
    assert needs.main() == 2
    said = capsys.readouterr().err
    assert (
        said.count("\n") == 1
        and "cannot import numba (ImportError: numba needs another numpy)" in said
    )


def test_the_suite_looks_for_it_before_all_else(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/bash\necho "$@"\n[[ $2 != bench.gpu.needs ]] || exit 2\n')
    python.chmod(0o755)
    command = ["bash", str(ROOT / "scripts" / "gpu_suite.sh"), "--list"]
    environment = os.environ | {"PYTHON": str(python)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "-m bench.gpu.needs\n")


def test_essential_steps_come_first_and_fit_the_time_of_a_call(tmp_path: Path) -> None:
    steps = all_steps(Setting(False, tmp_path, tmp_path))
    for call in CALLS:
        mine = [step for step in steps if step.call == call]
        essential = [step for step in mine if step.essential]
        assert essential and mine[: len(essential)] == essential
        assert sum(step.limit for step in essential) <= door._parse([]).limit == 540


def test_the_first_cell_is_rounds_of_given_rows_that_end_in_time(tmp_path: Path) -> None:
    """So that all systems are measured in the time of a call; other cells are searched."""
    for setting in (Setting(False, tmp_path, tmp_path), tiny_setting(tmp_path, tmp_path)):
        first, *others = [step for step in all_steps(setting) if step.name.startswith("table")]
        asked = sweep._parse(list(first.command[3:])) if setting.tiny else None
        assert first.call == 3 and {"--repeats", "3"} <= set(first.command)
        assert 0 < float(first.command[first.command.index("--time") + 1]) < first.limit
        rows = dict(word.split("@") for word in first.command if "@" in word)
        assert {"ours-full", "ours-h2o:kv-budget=0.2", "hf-sdpa", "flexgen-published"} < set(rows)
        assert not any("@" in word for step in others for word in step.command)
        assert asked is None or {
            system.rows for _, some in sweep._cells(asked) for system in some
        } == {4}


def test_weights_are_written_before_what_needs_them(tmp_path: Path) -> None:
    placed = [step for step in all_steps(Setting(False, tmp_path, tmp_path)) if step.call == 2]
    assert [step.name for step in placed][:7] == [
        "weights",
        "launches-opt",
        "launches-opt-h2o",
        "profile",
        "auto",
        "weights-on-host",
        "kv-on-host-h2o",
    ]
    assert all(step.essential for step in placed[:7])
    words = [pair for step in placed for pair in itertools.pairwise(step.command)]
    models = {word for flag, word in words if flag == "--model"}
    assert len(models) == 2 and models <= set(placed[0].command)
    assert {"--dtype", "bfloat16", "bench.gpu.weights"} <= set(placed[0].command)


@pytest.mark.parametrize(
    ("dtype", "short"), [("bfloat16", "bf16"), ("float16", "fp16"), ("float32", "fp32")]
)
def test_the_dtype_of_the_card_reaches_every_sweep(dtype: str, short: str, tmp_path: Path) -> None:
    steps = all_steps(replace(tiny_setting(tmp_path, tmp_path), dtype=dtype))
    given = [sweep._parse(list(step.command[3:])) for step in steps if step.kind == "sweep"]
    assert given and {args.dtype for args in given} == {short}


def test_a_card_is_tested_by_several_processes_where_these_can_be_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def with_processes(setting: Setting) -> set[bool]:
        return {"-n" in step.command for step in all_steps(setting) if step.kind == "tests"}

    full = Setting(False, tmp_path, tmp_path)
    monkeypatch.setattr("bench.gpu.steps.find_spec", lambda name: name)
    assert with_processes(full) == {True} and with_processes(tiny_setting(tmp_path, tmp_path)) == {
        False
    }
    monkeypatch.setattr("bench.gpu.steps.find_spec", lambda name: None)
    assert with_processes(full) == {False}


@pytest.mark.parametrize(
    ("flags", "limit"),
    [((), 4.0), pytest.param(("-n", "2"), 15.0, marks=pytest.mark.slow)],
    ids=["one", "several"],
)
@pytest.mark.usefixtures("interruptible")
def test_tests_that_are_cut_short_name_what_has_failed(
    flags: tuple[str, ...], limit: float, tmp_path: Path
) -> None:
    """limit: the first has failed by then, and the second would not end. One process starts without
    others' plugins."""
    setting = tiny_setting(tmp_path, tmp_path)
    tests = tmp_path / "test_some.py"
    found = tmp_path / "parity-tests.xml"
    tests.write_text(ONE_FAILS)
    command = (
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "--rootdir",
        str(tmp_path),
        str(tests),
        f"--junitxml={found}",
        *flags,
    )
    environment = {} if flags else {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    cut = Step("parity-tests", "tests", command, limit, found, environment)
    assert run([cut], tmp_path) == {"parity-tests": TIMEOUT}
    write_report(setting, all_steps(setting), {})
    text = (tmp_path / "gpu_suite.md").read_text()
    assert "parity-tests: 1 tests, 1 failures" in text and "- `test_some: test_first`" in text


def test_few_files_come_back_and_the_next_call_goes_on_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        common,
        "machine_facts",
        lambda: dict.fromkeys(("date", "commit", "cpu", "cores", "torch"), "x"),
    )
    first, out, second = (tmp_path / name for name in ("first", "out", "second"))
    setting = tiny_setting(first, tmp_path)
    steps = all_steps(setting)
    suite = Suite(first, 60.0, out)
    placements = [step for step in steps if step.kind == "placement"]
    for step in placements:
        step.output.write_text(json.dumps({"exit_code": 3, "report": None, "card": None}))
    done = replace(placements[0], command=(sys.executable, "-c", ""))
    suite.run([done], partial(write_report, setting, steps))
    assert len(placements) >= 20 and suite.state[done.name]["status"] == DONE
    assert len([path for path in out.rglob("*") if path.is_file()]) <= MAX_FILES
    shutil.copytree(out, second)
    setting = tiny_setting(second, tmp_path)
    never = replace(done, command=(sys.executable, "-c", "1 / 0"))
    Suite(second, 60.0).run([never], partial(write_report, setting, all_steps(setting)))
    text = (second / "gpu_suite.md").read_text()
    assert text == (first / "gpu_suite.md").read_text() and text.count("exit code 3") == len(
        placements
    )
    assert not (second / ARCHIVE).exists()  # a later suite's results are not overwritten by it


def test_an_archive_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / ARCHIVE).write_bytes(b"none")
    with pytest.raises(UsageError, match=rf"{ARCHIVE}: is damaged"):
        run([], tmp_path)


def test_a_call_comes_back_as_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """OUT as --results, with the same --call: nothing runs again."""
    only = Step("one", "figures", (sys.executable, "-c", ""), 30.0, tmp_path / "one.json", call=2)
    monkeypatch.setattr(door, "all_steps", lambda setting: [only])
    flags = ["--tiny", "--call", "2", "--offload-dir", str(tmp_path), "--results"]
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    assert door._run([*flags, str(tmp_path / "first")]) == 0
    assert (tmp_path / "out" / "call-2" / ARCHIVE).exists()
    monkeypatch.delenv("OUT")
    assert door._run([*flags, str(tmp_path / "out")]) == 0
    assert "== one: done (kept)" in capsys.readouterr().out
