"""`hardware`: a tiny measurement is shown, written and kept; wrong use ends with one line and exit
code 2."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flexgen_h2o import cli
from flexgen_h2o.planner.measure import run as measure
from flexgen_h2o.planner.profile import read_profile, write_profile
from tests.doors.conftest import Answer
from tests.unit.profiling.tiny import TINY
from tests.unit.test_profile import PROFILE

Door = Callable[..., Answer]


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


def test_shows_a_file_without_measuring(
    hardware: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexgen_h2o.planner.profile.SHIPPED", tmp_path / "shipped")
    write_profile(tmp_path / "shipped" / "t4.json", PROFILE)
    out = hardware("--show", "t4")
    assert out.code == 0 and out.out.startswith("test: none") and out.err == ""
    assert not (tmp_path / "cache").exists()


def test_result_is_shown_where_it_cannot_be_kept(
    hardware: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "measure", lambda *_: PROFILE)
    (tmp_path / "cache").write_text("a file where the folder should be")
    out = hardware("--offload-dir", "o")
    assert out.code == 0 and "GFLOP/s" in out.out and "not kept" in out.err


# (flags, what the line names)
REFUSED = [
    (["--show"], "no profile of this machine is kept"),
    (["--show", "no-such-machine"], "--show no-such-machine"),
    (["--show", "broken.json"], "broken.json"),
    (["--show", "broken.json", "--output", "x"], "--output and --show"),
    (["--device", "cuda"], "--device cuda"),
    (["--device", "tpu"], "--device"),
    (["--output", "none/p.json"], "--output none/p.json"),
    (["--offload-dir", "broken.json"], "--offload-dir"),
    (["--offload-dir", "x\0"], "--offload-dir"),
]


@pytest.mark.parametrize(("flags", "says"), REFUSED)
def test_wrong_use_is_one_line(hardware: Door, tmp_path: Path, flags: list[str], says: str) -> None:
    (tmp_path / "broken.json").write_text("{}")
    out = hardware(*flags)
    assert out.code == 2 and out.out == ""
    assert len(out.err.splitlines()) == 1 and says in out.err and out.err.startswith("hardware: ")


def test_full_disk_is_exit_code_3(hardware: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 2**20})())
    out = hardware("--offload-dir", "o")
    assert out.code == 3 and len(out.err.splitlines()) == 1 and "--offload-dir o" in out.err


def test_signal_leaves_nothing_behind(tmp_path: Path) -> None:
    number = signal.SIGHUP
    offload = tmp_path / "o"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    process = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "flexgen_h2o.hardware",
            "--device",
            "cpu",
            "--offload-dir",
            str(offload),
        ],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # shells may have it ignored
    )
    assert process.stderr is not None
    try:
        until = time.monotonic() + 60
        while not any(path.is_dir() for path in offload.glob("run-*")) and time.monotonic() < until:
            time.sleep(0.02)
        assert any(offload.glob("run-*"))
        process.send_signal(number)
        assert process.wait(30) == 128 + number
        assert f"ended by {number.name}" in process.stderr.read()
    finally:
        process.kill()
        process.stderr.close()
    assert list(offload.iterdir()) == [] and not (tmp_path / "cache").exists()
