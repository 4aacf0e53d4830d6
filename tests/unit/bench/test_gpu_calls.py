"""The GPU suite on a machine that is lent: what it lacks, what is first in its minutes, and what
comes back of it."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from bench import common
from bench.gpu import __main__ as door
from bench.gpu.report import write_report
from bench.gpu.runner import ARCHIVE, DONE, Suite
from bench.gpu.steps import CALLS, Setting, Step, all_steps, tiny_setting

MAX_FILES = 8  # that a device machine gives back


def test_essential_steps_come_first_and_fit_the_time_of_a_call(tmp_path: Path) -> None:
    steps = all_steps(Setting(False, tmp_path, tmp_path))
    for call in CALLS:
        mine = [step for step in steps if step.call == call]
        essential = [step for step in mine if step.essential]
        assert essential and mine[: len(essential)] == essential
        assert sum(step.limit for step in essential) <= door._parse([]).limit == 540


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
