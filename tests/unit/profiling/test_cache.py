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

from flexgen_h2o import LLM, SamplingParams, hardware
from flexgen_h2o.core.errors import FlexgenError
from flexgen_h2o.kernels import products
from flexgen_h2o.planner.measure import run
from flexgen_h2o.planner.measure.run import (
    BackgroundLoad,
    ThisMachine,
    cache_path,
    cached_profile,
    fingerprint_text,
    measure,
    profile_of_this_machine,
    store,
    this_machine,
)
from flexgen_h2o.planner.profile import BUSY_NOTE, NOMINAL
from flexgen_h2o.tiers.device import HostDevice
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


def test_relative_cache_folder_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for value in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_path("cpu", tmp_path).parent == tmp_path / ".cache" / "flexgen_h2o"


@pytest.mark.parametrize("base", ["~nosuchuser-at-all/x", "/" + 300 * "x", "/dev/null/x"])
def test_a_cache_folder_that_cannot_be_is_none(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    said: list[str] = []
    assert (
        profile_of_this_machine("cpu", tmp_path, said.append, measure_missing=False).machine
        == NOMINAL
    )
    assert not said
    with pytest.raises(FlexgenError, match="profile-"):
        store(PROFILE, "cpu", tmp_path)


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


def test_a_processor_has_its_generation_in_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual machines have one name for several."""
    facts = ["model name\t: AMD EPYC", "cpu family\t: 25", "model\t\t: 1", "stepping\t: 1"]
    for seen, begins in ((facts, "AMD EPYC (25/1)"), (facts[:1], "AMD EPYC"), ([], "")):
        monkeypatch.setattr(run, "_lines", lambda _, seen=seen: [*seen, "", *seen])
        assert run.cpu_name().startswith(begins) and ("(25/" in run.cpu_name()) == (
            len(seen) == len(facts)
        )


def test_names_of_machines() -> None:
    assert MACHINE.short_name == replace(MACHINE, cpu=f"{MACHINE.cpu} (6/143) with AMX").short_name
    assert MACHINE.short_name == "intel-xeon-2core"
    assert replace(MACHINE, card="Tesla T4", card_bytes=15 * 2**30).short_name == "tesla-t4"
    assert (
        "Tesla T4 with 15 GiB"
        in replace(MACHINE, card="Tesla T4", card_bytes=15 * 2**30).description
    )


def test_this_machine(tmp_path: Path) -> None:
    machine = this_machine(HostDevice(), tmp_path / "to" / "come")
    assert (
        machine.cores > 0
        and machine.host_bytes > 0
        and machine.disk_bytes > 0
        and machine.card == ""
    )
    assert (
        machine.cpu and machine.cpu.endswith(products.instructions()) and " at /" in machine.mount
    )
    assert this_machine(HostDevice(), Path("/")).mount.endswith(" at /")
    assert 0 <= BackgroundLoad().share() <= 1


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


def test_a_busy_disk_is_noted(others: SimpleNamespace, tmp_path: Path) -> None:
    others.disk = 10**9
    notes = measure("cpu", tmp_path, lambda line: None).notes
    assert list(notes) == ["disk"] and "a second of the disks" in notes["disk"]


def test_auto_says_once_that_the_machine_was_busy(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Profiles of before parts were told apart have one note for all."""
    store(
        replace(PROFILE, notes={"compute": f"{BUSY_NOTE} 40% of the cores", "kernel_s": "by hand"}),
        "cpu",
        tmp_path,
    )
    with LLM("opt-tiny", "auto", device="cpu", offload_dir=tmp_path) as llm:
        for _ in range(2):
            llm.generate([[5, 6]], SamplingParams(max_tokens=2))
        assert llm.report is not None and llm.report.extra["profile_disturbed"]
    assert (
        capfd.readouterr().err.count(
            "predictions come from a profile measured while other programs were busy"
        )
        == 1
    )


def test_hardware_says_when_it_took_longer_than_promised(
    others: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(hardware, "PROMISED_S", (1e9, 2e9))
    assert hardware.main(["--device", "cpu", "--offload-dir", str(tmp_path)]) == 0
    said = capfd.readouterr().err.splitlines()
    assert said[0].startswith("hardware: takes one to two minutes")
    assert any("not the one to two minutes" in line for line in said)
    found = cached_profile("cpu", tmp_path)
    assert found is not None and not found.was_disturbed
