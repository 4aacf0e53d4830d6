"""The throughput sweep's command line: wrong use, limits, and peers that break."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "bench" / "baselines"))

from bench.sweep import __main__ as door
from bench.sweep.store import DOES_NOT_FIT, FAILED, OK, REFUSED, TIMEOUT
from tests.unit.bench.test_throughput_sweep import ROOT
from tests.unit.tiers.test_under_way import until

CELL = "facebook/opt-125m,16,4,none,2,2"


@pytest.mark.parametrize(
    "flags",
    [
        "--cell facebook/opt-125m,0,4,none,2,2",
        "--cell facebook/opt-125m,16,4,none,4,2",
        "--cell facebook/opt-125m,16,4,much,2,2",
        "--cell facebook/opt-125m,2046,4,none,2,2",
        "--cell nobody/none,16,4,none,2,2",
        "--cell facebook/opt-125m,16,4,none,2,6",
        "--cell facebook/opt-125m:13,16,4,none,2,2",
        "--cell opt-tiny:1,16,4,none,2,2",
        "--systems ours-h2o:kv-budget=2",
        "--systems nobody-full",
        "--systems accelerate-disk",
        "--limit 0",
        "--name ../x",
    ],
)
def test_wrong_use_is_one_line_before_anything_runs(
    flags: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also where a cell before it is well."""
    monkeypatch.setattr(door, "measure", pytest.fail)
    flag, value = flags.split()
    cells = f"--cell {CELL} {value}" if flag == "--cell" else f"--cell {CELL} {flags}"
    monkeypatch.setattr(sys, "argv", ["sweep", *cells.split(), "--results", str(tmp_path / "r")])
    assert door.main() == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1 and flag in said.err
    assert said.out == "" and not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("statuses", "code"),
    [
        ([REFUSED, REFUSED], 0),
        ([FAILED, OK], 0),
        ([FAILED, REFUSED], 1),
        ([TIMEOUT, DOES_NOT_FIT], 1),
        ([DOES_NOT_FIT, REFUSED], 3),
    ],
)
def test_a_cell_without_a_figure_has_an_exit_code(
    statuses: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """That all refuse is an answer; a line says why there is none."""
    lines = [
        {"system": name, "rows": 2, "tokens_per_s": 5.0}
        if status == OK
        else {"system": name, "rows": 2, "reason": "why"}
        for name, status in zip(("ours-full", "hf-sdpa"), statuses, strict=True)
    ]
    tried = [{**line, "status": status} for line, status in zip(lines, statuses, strict=True)]
    assert door._without_figure(door._read_cell(CELL), tried) == code
    said = capsys.readouterr().err
    assert said.count("\n") == bool(code) and ("ours-full: " in said) == bool(code)


def test_what_a_sweep_has_started_ends_with_it(tmp_path: Path) -> None:
    """Also where SIGKILL ends it: nothing runs beside the same sweep, begun again."""
    file = tmp_path / "pid"
    code = (
        f"from bench.common import run_limited; run_limited(['sh', '-c', 'echo $$ > {file}; "
        "exec sleep 60'], {}, 60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}
    ) as sweep:
        while not (file.exists() and file.read_text().endswith("\n")):
            assert sweep.poll() is None
            time.sleep(0.01)
        sweep.kill()
    started = Path("/proc") / file.read_text().strip() / "cmdline"
    until(lambda: not started.exists() or not started.read_bytes())  # a zombie has no command line
