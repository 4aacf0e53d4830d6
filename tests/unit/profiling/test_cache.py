"""The kept profile: one file for each kind of machine and disk, written whole, ignored when it is
of no use."""

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
    ThisMachine,
    cache_path,
    cached_profile,
    fingerprint_text,
    profile_of_this_machine,
    store,
)
from flexgen_h2o.planner.profile import BUSY_NOTE
from tests.unit.test_profile import PROFILE

MACHINE = ThisMachine(
    "Intel(R) Xeon(R) CPU @ 2.20GHz", 2, 2**34, "", 0, "/dev/sda ext4 at /", 2**36
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain_cpu: None) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "flexgen_h2o"


def test_what_is_kept_is_found_again(cache: Path, tmp_path: Path) -> None:
    assert cached_profile("cpu", tmp_path) is None and not cache.exists()
    path = store(PROFILE, "cpu", tmp_path)
    assert path == cache_path("cpu", tmp_path) and list(cache.iterdir()) == [path]
    assert cached_profile("cpu", tmp_path) == PROFILE == cached_profile("auto", tmp_path)
    newer = replace(PROFILE, row_s=1.0)
    store(newer, "cpu", tmp_path)
    assert cached_profile("cpu", tmp_path / "folder" / "to come") == newer  # on the same disk


def test_broken_or_old_file_is_ignored(tmp_path: Path) -> None:
    for text in ("", json.dumps({**PROFILE.to_json(), "schema": 0})):
        store(PROFILE, "cpu", tmp_path).write_text(text)
        assert cached_profile("cpu", tmp_path) is None
    store(PROFILE, "cpu", tmp_path)
    assert cached_profile("cpu", tmp_path) == PROFILE


def test_another_machine_or_disk_has_another_file() -> None:
    kinds = [
        MACHINE,
        replace(MACHINE, cpu="AMD EPYC"),
        replace(MACHINE, cores=4),
        replace(MACHINE, card="Tesla T4"),
        replace(MACHINE, mount="/dev/sdb ext4 at /big"),
    ]
    assert len({fingerprint_text(machine) for machine in kinds}) == len(kinds)
    assert fingerprint_text(replace(MACHINE, disk_bytes=1)) == fingerprint_text(
        MACHINE
    )  # the disk fills up


# ---- A busy machine

PARTS = ["memory", "compute.bfloat16", "compute.float32", "disk", "steps"]


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What other processes take: cores, and bytes a second of the disks. Every look at them is a
    second later.

    The profile that is measured takes no time.
    """
    found = SimpleNamespace(cores=0, disk=0)
    clock = count()
    monkeypatch.setattr(
        run, "time", SimpleNamespace(monotonic=clock.__next__, sleep=lambda seconds: None)
    )
    cpu = count()
    monkeypatch.setattr(run, "_cpu_seconds", lambda: (found.cores * next(cpu), 0.0))
    disk = count()
    monkeypatch.setattr(run, "_disk_bytes", lambda: found.disk * next(disk))
    measured = {"_memory_rates": {}, "compute_rates": None, "_disk_rates": {}}
    for name, value in {**measured, "warm_cores": None, "with_step_costs": PROFILE}.items():
        monkeypatch.setattr(run, name, lambda *given, value=value: value)
    return found


def test_a_busy_machine_is_measured_once_and_its_profile_says_so(
    others: SimpleNamespace, tmp_path: Path
) -> None:
    others.cores = os.cpu_count() or 1
    said: list[str] = []
    first = profile_of_this_machine("cpu", tmp_path, said.append, measure_missing=True)
    assert first.was_disturbed and list(first.notes) == PARTS
    assert all(
        note.startswith(f"{BUSY_NOTE} 100% of the cores (load ") for note in first.notes.values()
    )
    assert said[0].startswith("other work takes 100% of the cores (load "), (
        "before the minutes that it takes"
    )
    assert "run flexgen-h2o hardware again when the machine is quiet" in said[-1]
    others.cores = 0
    said.clear()
    assert (
        profile_of_this_machine("cpu", tmp_path, said.append, measure_missing=True) == first
        and not said
    )
