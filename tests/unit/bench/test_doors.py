"""Benchmarks answer wrong use as the package's command lines do: one line, exit code 2."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[3] / "bench"
OTHERS = ("__init__", "reader")  # modules that are no commands
FOLDERS = ("kernels", "engine", "planner")
MODULES = {
    path.stem: f"bench.{folder}.{path.stem}"
    for folder in FOLDERS
    for path in sorted((BENCH / folder).glob("*.py"))
    if path.stem not in OTHERS
}
SCRIPTS = sorted(MODULES)


def run(name: str, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags])
    monkeypatch.delitem(
        sys.modules, MODULES[name], raising=False
    )  # or runpy warns that another has imported it
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(MODULES[name], run_name="__main__", alter_sys=True)
    return stop.value.code


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("io_bandwidth", ["--repeats", "0"]),
        ("io_bandwidth", ["--model", "nobody/none"]),
        ("roofline", ["--gen-len", "1"]),
        ("products", ["--hidden", "x"]),
        ("planner_accuracy", ["--quiet-wait", "nan"]),
        *((name, ["--nonsense"]) for name in SCRIPTS),
    ],
)
def test_a_value_that_cannot_be(
    name: str, flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name, flags, monkeypatch) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith(f"{name}: ") and flags[0] in said


FILES = [(name, "--output", "r.json") for name in SCRIPTS]


@pytest.mark.parametrize(("name", "flag", "file"), FILES)
def test_a_result_that_could_not_be_written_is_refused_before_anything_is_measured(
    name: str,
    flag: str,
    file: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("bench.common.wait_for_quiet", pytest.fail)
    for path in (tmp_path / "none" / file, tmp_path):
        assert run(name, [flag, str(path)], monkeypatch) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and f"{flag} {path}: " in said
    assert not list(tmp_path.iterdir())
