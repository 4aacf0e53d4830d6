"""The kept profile: one file per kind of machine and disk, ignored if it is of no use."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from flexgen_h2o.planner.measure import run
from flexgen_h2o.planner.measure.run import (
    cache_path,
    cached_profile,
    fingerprint_text,
    profile_of_this_machine,
    store,
)
from flexgen_h2o.planner.profile import BUSY_NOTE
from tests.unit.test_profile import PROFILE


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain_cpu: None) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "flexgen_h2o"


def test_what_is_kept_is_found_again_unless_it_is_broken_or_old(
    cache: Path, tmp_path: Path
) -> None:
    assert cached_profile("cpu", tmp_path) is None and not cache.exists()
    for text in ("", json.dumps({**PROFILE.to_json(), "schema": 0})):
        path = store(PROFILE, "cpu", tmp_path)
        assert path == cache_path("cpu", tmp_path) and list(cache.iterdir()) == [path]
        assert cached_profile("cpu", tmp_path) == PROFILE == cached_profile("auto", tmp_path)
        path.write_text(text)
        assert cached_profile("cpu", tmp_path) is None
    store(newer := replace(PROFILE, row_s=1.0), "cpu", tmp_path)
    assert cached_profile("cpu", tmp_path / "folder" / "to come") == newer  # on the same disk


def test_another_machine_or_disk_has_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ("Intel(R) Xeon(R) CPU @ 2.20GHz", "", "/dev/sda ext4 at /")
    others = [("AMD EPYC", *known[1:]), (known[0], "Tesla T4", known[2]), (*known[:2], "/dev/sdb")]
    texts = {fingerprint_text(*facts) for facts in (known, *others)}
    monkeypatch.setattr(os, "cpu_count", lambda: 77)
    assert len({*texts, fingerprint_text(*known)}) == 5


# ---- A busy machine


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What other processes take: cores, and bytes per second of the disks.

    Every look at them is a second later. The profile that is measured takes no time.
    """
    found = SimpleNamespace(cores=0, disk=0)
    clock, cpu, disk = count(), count(), count()
    monkeypatch.setattr(
        run, "time", SimpleNamespace(monotonic=clock.__next__, sleep=lambda seconds: None)
    )
    monkeypatch.setattr(run, "_cpu_seconds", lambda: (found.cores * next(cpu), 0.0))
    monkeypatch.setattr(run, "_disk_bytes", lambda: found.disk * next(disk))
    measured = {"_memory_rates": {}, "compute_rates": None, "contention": {}}
    for name, value in {**measured, "warm_cores": None, "with_step_costs": PROFILE}.items():
        monkeypatch.setattr(run, name, lambda *given, value=value: value)
    monkeypatch.setattr("flexgen_h2o.planner.measure.engine.DiskProbe.rates", lambda probe: {})
    monkeypatch.setattr(run, "HOST", replace(run.HOST, disk_bytes=2**20))
    return found


@pytest.mark.parametrize(
    ("cores", "disk", "said"),
    [(1.0, 0, r"100% of the cores"), (0.0, 2**30, "1.00 GiB per second of the disks"), (0, 0, "")],
)
def test_a_busy_machine_is_measured_once_and_its_profile_says_so(
    cores: float, disk: int, said: str, others: SimpleNamespace, tmp_path: Path
) -> None:
    others.cores = cores * (os.cpu_count() or 1)
    others.disk = disk
    lines: list[str] = []
    first = profile_of_this_machine("cpu", tmp_path, lines.append, measure_missing=True)
    assert first.was_disturbed is bool(said)
    assert all(note.startswith(f"{BUSY_NOTE} {said}") for note in first.notes.values()) or not said
    assert any(f"other work takes {said}" in line for line in lines) is bool(said)
    said_once = "who asked for the profile says what is wrong with it"
    assert not any("run flexgen-h2o hardware again" in line for line in lines), said_once
    assert cached_profile("cpu", tmp_path) == first
    news = [run.is_news("cpu", tmp_path) for _ in range(3)]
    assert news == [True, False, False], "each profile is doubted once"
    lines.clear()
    kept = profile_of_this_machine("cpu", tmp_path, lines.append, measure_missing=True)
    assert kept == first and not lines
