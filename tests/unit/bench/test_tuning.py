"""Tuning of a peer: one knob at a time, the best kept; runs that fail; what the table says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.baselines import tune

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
