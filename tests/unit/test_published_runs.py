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
