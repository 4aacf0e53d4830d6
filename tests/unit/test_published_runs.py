"""The shipped profiles of known machines against the runs that were recorded there: arithmetic
only."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flexgen_h2o.models import built_in_spec
from flexgen_h2o.planner.profile import HardwareProfile, read_profile

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
SHIPPED = ROOT / "policies" / "profiles"
DATA = SCRIPTS / "data"
MACHINES = ("t4", "a100-80")
RUN: dict[str, Any] = {
    "machine": "t4",
    "model": "facebook/opt-6.7b",
    "prompt_len": 512,
    "gen_len": 32,
    "percent": [100, 0, 100, 0, 100, 0],
    "gbs": 2,
    "num_gpu_batches": 1,
    "tokens_per_s": 25.26,
}


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    """The fit script and its two modules, by name."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        yield {name: import_module(name) for name in ("fit_profile", "recorded_runs", "card_model")}
    finally:
        sys.path.remove(str(SCRIPTS))


def shipped(machine: str) -> HardwareProfile:
    return read_profile(SHIPPED / f"{machine}.json")


@pytest.mark.parametrize(
    ("name", "runs", "median", "worst"),
    [("published_runs", 9, 0.10, 0.25), ("development_runs", 16, 0.15, 0.25)],
)
def test_recorded_runs_are_predicted(
    scripts: dict[str, ModuleType], name: str, runs: int, median: float, worst: float
) -> None:
    profiles = {machine: shipped(machine) for machine in MACHINES}
    recorded = scripts["recorded_runs"].read_runs(DATA / f"{name}.json")
    assert len(recorded) == runs
    results = scripts["fit_profile"].evaluated(recorded, profiles)
    sizes = [abs(error) for result in results for error in result.errors.values()]
    assert statistics.median(sizes) <= median
    assert max(sizes) <= worst


@pytest.mark.parametrize("machine", MACHINES)
def test_nothing_is_faster_than_its_data_sheet(
    scripts: dict[str, ModuleType], machine: str
) -> None:
    profile = shipped(machine)
    card = scripts["card_model"].CARDS[machine]
    rates = profile.rates("float16")
    peak = max(
        rate
        for _, by_inner in rates.matmul_flops_per_s
        for _, curve in by_inner
        for _, rate in curve.points
    )
    assert 0.2 * card.peak_flops < peak < 0.9 * card.peak_flops
    assert rates.matmul_rate(1, 4096, 4096) <= card.memory
    for rate in (
        rates.device_attention_bytes_per_s.at(128),
        rates.device_scored_attention_bytes_per_s.at(128),
        rates.elementwise_bytes_per_s,
        rates.device_dequantise_bytes_per_s,
        profile.device_memory_bytes_per_s,
    ):
        assert 0.02 * card.memory < rate < card.memory
    assert rates.prefill_attention_flops_per_s.at(512) < peak
    for rate in (
        rates.host_attention_bytes_per_s.at(128),
        rates.host_scored_attention_bytes_per_s.at(128),
        rates.host_dequantise_bytes_per_s,
        profile.host_memory_bytes_per_s,
    ):
        assert 0.02 * card.host_memory < rate < card.host_memory
    for rate in (profile.h2d_bytes_per_s, profile.d2h_bytes_per_s):
        assert 0.5 * card.link < rate < card.link
    assert profile.h2d_unpinned_bytes_per_s < profile.h2d_bytes_per_s
    assert 0.5 * card.disk_read < profile.disk_read_bytes_per_s <= card.disk_read
    assert 0.5 * card.disk_write < profile.disk_write_bytes_per_s <= card.disk_write


@pytest.mark.parametrize("machine", MACHINES)
def test_every_number_says_where_it_is_from(machine: str) -> None:
    profile = shipped(machine)
    numbers = {name for name, value in profile.to_json().items() if type(value) in (int, float)} - {
        "schema"
    }
    rates = {
        f"compute.float16.{name}"
        for name, value in profile.to_json()["compute"]["float16"].items()
        if value != {}
    }
    assert set(profile.notes) - {"limits"} == numbers | rates
    assert "fit_profile.py" in profile.source


def test_whole_tensors_are_placed_as_flexgen_places_them(scripts: dict[str, ModuleType]) -> None:
    known = built_in_spec("facebook/opt-30b")
    assert known is not None
    shares = {
        g: scripts["recorded_runs"].whole_tensor_percent(known[0], g, 100 - g)
        for g in (0, 12, 20, 30, 50, 70)
    }
    assert shares == {
        0: (0, 100),
        12: (0, 100),
        20: (8, 92),
        30: (42, 58),
        50: (50, 50),
        70: (58, 42),
    }
    assert scripts["recorded_runs"].whole_tensor_percent(known[0], 0, 50) == (0, 50)
    assert scripts["recorded_runs"].whole_tensor_percent(known[0], 100, 0) == (100, 0)


def test_a_row_costs_only_where_the_host_drops_its_column(scripts: dict[str, ModuleType]) -> None:
    module = scripts["recorded_runs"]
    profile = shipped("t4")
    slower = replace(profile, row_s=2 * profile.row_s)

    def decode_s(on: HardwareProfile, **change: Any) -> float:
        run = replace(module._run(RUN), **change)
        return float(module.predicted(run, on)["decode_s"])

    away = {"percent": (100, 0, 0, 100, 100, 0), "cpu_cache_compute": True}
    for change in ({}, {"hh_ratio": 0.1}, away):
        assert decode_s(slower, **change) == decode_s(profile, **change)
    blocks = 32
    sweeps = 31
    rows = 2
    more = decode_s(slower, hh_ratio=0.1, **away) - decode_s(profile, hh_ratio=0.1, **away)
    assert more == pytest.approx(blocks * sweeps * rows * profile.row_s, rel=0.02)


def run_file(tmp_path: Path, change: dict[str, Any], drop: str = "") -> Path:
    path = tmp_path / "runs.json"
    path.write_text(
        json.dumps({"runs": [{k: v for k, v in {**RUN, **change}.items() if k != drop}]})
    )
    return path


@pytest.mark.parametrize(
    ("change", "drop", "says"),
    [
        ({}, "gbs", "run 1: field 'gbs' is missing"),
        ({"machine": "h100"}, "", "there is no profile of 'h100'"),
        ({"hh_ratio": 0.001}, "", "hh_ratio: 0.001 of 512 tokens keeps none"),
    ],
)
def test_an_unusable_runs_file_is_one_line(
    scripts: dict[str, ModuleType],
    tmp_path: Path,
    capsys: Any,
    change: dict[str, Any],
    drop: str,
    says: str,
) -> None:
    path = run_file(tmp_path, change, drop)
    assert scripts["fit_profile"].main(["--check", "--runs", str(path)]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_other_runs_are_checked_and_summed_up(
    scripts: dict[str, ModuleType], tmp_path: Path, capsys: Any
) -> None:
    path = run_file(tmp_path, {"prefill_s": 0.7, "decode_s": 1.8})
    assert scripts["fit_profile"].main(["--check", "--runs", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    summary = json.loads(lines[-1])
    assert summary["runs"]["quantities"] == 3
    assert summary["runs"]["worst"] < 0.25
    assert any("t4 opt-6.7b 512+32 2x1" in line for line in lines)
