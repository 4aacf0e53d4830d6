"""Tuning of a peer: one knob at a time, the best kept; runs that fail; what the table says."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.baselines import contract, tune
from tests.unit.bench.test_throughput_sweep import OPT_TINY, load

# A system whose rate is small * 10 + large, and which does not run with small = 3.
RUN = """
import json, sys
settings = json.loads(sys.argv[sys.argv.index("--settings") + 1])
if settings["small"] == 3 or "--broken" in sys.argv:
    sys.exit("first line\\nno such thing")
print("a line of a library")
print(json.dumps({"speed": settings["small"] * 10 + settings["large"], **dict.fromkeys(
    ("prefill_s", "decode_tokens_per_s", "tokens_per_s", "read_bytes"), 7)}))
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "run.py").write_text(RUN)
    tuning = tune.Tuning({"small": (1, 2, 3), "large": (7, 5, 8)}, "speed")
    monkeypatch.setattr(tune, "BASELINES", tmp_path)
    monkeypatch.setitem(tune.TUNINGS, "made", tuning)
    return lambda *flags: tune.main(["made", "--output", str(tmp_path / "best.json"), *flags])


def test_the_best_of_each_knob_is_kept_for_the_next(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run() == 0
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in capsys.readouterr().out.splitlines()
    ]
    assert rows[0] == ["small", "large", *tune.COLUMNS]
    assert [row[:3] for row in rows[2:]] == [
        ["1", "7", "7.0"],
        ["2", "7", "7.0"],
        ["3", "7", "exit code 1: no such thing"],
        ["2", "5", "7.0"],
        ["2", "8", "7.0"],
    ]
    assert {len(row) for row in rows} == {6}
    assert json.loads((tmp_path / "best.json").read_text()) == {"small": 2, "large": 8}


def test_nothing_is_written_where_every_run_fails(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("--broken") == 1
    assert not (tmp_path / "best.json").exists()


def test_settings_that_could_not_be_written_are_refused_before_anything_runs(
    run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run("--output", str(tmp_path / "none" / "best.json"))
    said = capsys.readouterr()
    assert said.out == "" and "none/best.json: name a file" in said.err


@pytest.mark.parametrize("peer", sorted(tune.TUNINGS.keys() - {"flexgen"}))
def test_tuning_starts_from_the_defaults(peer: str) -> None:
    run = load(f"{peer}/run.py")
    assert {name: values[0] for name, values in tune.TUNINGS[peer].knobs.items()} == run.SETTINGS


@pytest.mark.parametrize(
    ("settings", "code", "said"),
    [
        ('{"small": 2}', 0, ""),
        ('{"small": 0}', 2, "small is from 1 to 1048576, not 0"),
        ('{"is_on": 2}', 2, "is_on is from 0 to 1, not 2"),
        ('{"large": 10000000}', 2, "large is from 1"),
        ('{"smal": 2}', 2, "--settings: no smal; the names are small, large, is_on"),
        ("[1]", 2, "--settings: [1]: not a JSON object"),
        ('{"small": -1}', 2, "whole numbers from 0"),
        ('{"small": "2"}', 2, "whole numbers from 0"),
        ("{small: 2}", 2, "not a JSON object"),
    ],
)
def test_a_setting_that_a_peer_has_not_is_refused(
    settings: str,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [
        "--model-dir",
        str(OPT_TINY),
        "--prompt-len",
        "4",
        "--gen-len",
        "2",
        "--rows",
        "1",
        "--offload-dir",
        "x",
    ]
    monkeypatch.setattr(sys, "argv", ["run.py", *flags, "--settings", settings])
    try:
        defaults = {"small": 1, "large": 5, "is_on": 0}
        got = contract.main(
            lambda request, _: request.chosen(defaults, ("is_on",)), ["only"], [], "json"
        )
    except SystemExit as stop:
        got = int(str(stop.code))
    out, err = capsys.readouterr()
    assert got == code and said in err
    assert got or json.loads(out) == {"small": 2, "large": 5, "is_on": 0, "versions": {}}
