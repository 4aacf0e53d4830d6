"""The shipped profiles of known machines against the runs that were recorded there: arithmetic
only."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from flexgen_h2o.planner.profile import HardwareProfile, read_profile

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
SHIPPED = ROOT / "policies" / "profiles"
DATA = SCRIPTS / "data"
MACHINES = ("t4", "a100-80")


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
