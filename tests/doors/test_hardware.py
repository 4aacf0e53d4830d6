"""`hardware`: a tiny measurement is shown, written and kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from flexgen_h2o import cli
from flexgen_h2o.planner.measure import run as measure
from flexgen_h2o.planner.profile import read_profile
from tests.doors.conftest import Answer, Door
from tests.unit.profiling.tiny import TINY


@pytest.fixture
def hardware(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    plain_cpu: None,
) -> Door:
    """The console command in the working folder `tmp_path`, with a cache of its own and sizes that
    take a second."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "HOST", TINY)
    monkeypatch.setattr("flexgen_h2o.planner.measure.bench.WARM_S", 0.0)

    def call(*flags: str) -> Answer:
        capfd.readouterr()
        code = cli.main(["hardware", *flags])
        return Answer(code, *capfd.readouterr())

    return call


def test_measures_shows_writes_and_keeps(hardware: Door, tmp_path: Path) -> None:
    flags = ("--offload-dir", "o", "--device", "cpu")
    out = hardware(*flags, "--output", "p.json", "--machine", "mine")
    assert out.code == 0, out.err
    assert out.out.startswith("mine: ") and "GFLOP/s" in out.out
    assert (
        all(line.startswith("hardware: ") for line in out.err.splitlines())
        and "compute in bfloat16" in out.err
    )
    profile = read_profile(tmp_path / "p.json")
    assert profile.machine == "mine" and profile.device_is_host
    (kept,) = (tmp_path / "cache" / "flexgen_h2o").iterdir()
    assert read_profile(kept) == profile
    assert list((tmp_path / "o").iterdir()) == []
    for flag in ([], ["p.json"]):
        again = hardware(*flags, "--show", *flag)
        assert (again.code, again.out) == (0, out.out), again.err
