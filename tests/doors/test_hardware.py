"""`hardware`: a tiny measurement is shown, written and kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexgen_h2o.planner.measure import run as measure
from flexgen_h2o.planner.profile import read_profile
from tests.doors.conftest import Door
from tests.unit.profiling.tiny import TINY


@pytest.fixture
def hardware(command: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Door:
    """The console command with a cache of its own and sizes that take a second."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "HOST", TINY)
    monkeypatch.setattr("flexgen_h2o.planner.measure.bench.WARM_S", 0.0)
    return lambda flags: command(f"hardware {flags}")


def test_measures_shows_writes_and_keeps(
    hardware: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says once if the machine was busy."""
    monkeypatch.setattr(measure, "watch_others", lambda: lambda with_disks: "half of the cores")
    flags = "--offload-dir o --device cpu"
    out = hardware(f"{flags} --output p.json --machine mine")
    assert out.code == 0, out.err
    assert out.out.startswith("mine: ") and "GFLOP/s" in out.out
    assert (
        all(line.startswith("hardware: ") for line in out.err.splitlines())
        and "compute in bfloat16" in out.err
    )
    assert out.err.count("half of the cores: run flexgen-h2o hardware again") == 1
    profile = read_profile(tmp_path / "p.json")
    assert profile.machine == "mine" and profile.device_is_host
    (kept,) = (tmp_path / "cache" / "flexgen_h2o").iterdir()
    assert read_profile(kept) == profile
    assert list((tmp_path / "o").iterdir()) == []
    for file in ("", "p.json"):
        again = hardware(f"{flags} --show {file}")
        assert (again.code, again.out) == (0, out.out), again.err
