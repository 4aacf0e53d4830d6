"""Tuning of a peer: one knob at a time, the best kept; runs that fail; what the table says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.baselines import contract
from tests.unit.bench.test_throughput_sweep import OPT_TINY, load

BASELINES = Path(__file__).resolve().parents[3] / "bench" / "baselines"
# A peer whose rate is small * 10 + large, and which does not run with small = 3.
RUN = """
import json, sys
settings = json.loads(sys.argv[sys.argv.index("--settings") + 1])
if settings["small"] == 3 or "--broken" in sys.argv:
    sys.exit("first line\\nno such thing")
print("a line of a library")
print(json.dumps({"speed": settings["small"] * 10 + settings["large"]}))
"""
TUNE = """
import sys
from pathlib import Path
sys.path.append(sys.argv.pop(1))
from tuning import Tuning, main
run, knobs = Path(__file__).with_name("run.py"), {"small": (1, 2, 3), "large": (7, 5, 8)}
sys.exit(main(Tuning(run, knobs, "speed", {"rate": lambda f: f"{f['speed']}!", "b": str}), ""))
"""


def tune(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    (folder / "run.py").write_text(RUN)
    (folder / "tune.py").write_text(TUNE)
    command = [sys.executable, str(folder / "tune.py"), str(BASELINES), "--output", str(folder / "best.json"), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_best_of_each_knob_is_kept_for_the_next(tmp_path: Path) -> None:
    done = tune(tmp_path)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()]
    assert done.returncode == 0 and rows[0] == ["small", "large", "rate", "b"]
    assert [row[:3] for row in rows[2:]] == [
        ["1", "7", "17!"], ["2", "7", "27!"], ["3", "7", "exit code 1: no such thing"], ["2", "5", "25!"],
        ["2", "8", "28!"],
    ]  # fmt: skip
    assert {len(row) for row in rows} == {4}
    assert json.loads((tmp_path / "best.json").read_text()) == {"small": 2, "large": 8}


def test_nothing_is_written_where_every_run_fails(tmp_path: Path) -> None:
    assert tune(tmp_path, "--broken").returncode == 1
    assert not (tmp_path / "best.json").exists()


def test_settings_that_could_not_be_written_are_refused_before_anything_runs(tmp_path: Path) -> None:
    done = tune(tmp_path, "--output", str(tmp_path / "none" / "best.json"))
    assert (done.returncode, done.stdout) == (2, "") and "none/best.json: name a file" in done.stderr


@pytest.mark.parametrize("peer", ["deepspeed", "hf", "llamacpp", "openvino"])
def test_each_peer_has_the_command(peer: str) -> None:
    tuning, run = load(f"{peer}/tune.py").TUNING, load(f"{peer}/run.py")
    assert tuning.run == BASELINES / peer / "run.py"
    assert {name: values[0] for name, values in tuning.knobs.items()} == run.SETTINGS  # tuning starts from them


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        ('{"small": 2}', 0, ""), ('{"small": 0}', 2, "small is from 1 to 1048576, not 0"),
        ('{"is_on": 2}', 2, "is_on is from 0 to 1, not 2"), ('{"large": 10000000}', 2, "large is from 1"),
        ('{"smal": 2}', 2, "--settings: no smal; the names are small, large, is_on"),
        ("[1]", 2, "--settings: [1]: not a JSON object"), ('{"small": -1}', 2, "whole numbers from 0"),
        ('{"small": "2"}', 2, "whole numbers from 0"), ("{small: 2}", 2, "not a JSON object"),
    ],
)  # fmt: skip
def test_a_setting_that_a_peer_has_not_is_refused(
    settings: str, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model-dir", str(OPT_TINY), "--prompt-len", "4", "--gen-len", "2", "--rows", "1", "--offload-dir", "x"]
    monkeypatch.setattr(sys, "argv", ["run.py", *flags, "--settings", settings])
    try:
        defaults = {"small": 1, "large": 5, "is_on": 0}
        got = contract.main(lambda request, _: request.chosen(defaults, ("is_on",)), ["only"], [], "json")
    except SystemExit as stop:
        got = int(str(stop.code))
    out, err = capsys.readouterr()
    assert got == code and said in err
    assert got or json.loads(out) == {"small": 2, "large": 5, "is_on": 0, "versions": {}}
