"""The kept profile: one file for each kind of machine and disk, written whole, ignored when it is of no use."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest

from flexgen_h2o import LLM, MemoryBudget, SamplingParams, hardware
from flexgen_h2o.core.errors import FlexgenError
from flexgen_h2o.kernels import products
from flexgen_h2o.planner.measure import run
from flexgen_h2o.planner.measure.bench import CARD, CARD_HOST, quick
from flexgen_h2o.planner.measure.run import (
    BackgroundLoad,
    ThisMachine,
    cache_path,
    cached_profile,
    fingerprint_text,
    measure,
    measure_again,
    profile_of_this_machine,
    store,
    this_machine,
)
from flexgen_h2o.planner.plans import MEASURING_BYTES
from flexgen_h2o.planner.profile import BUSY_NOTE, NOMINAL, HardwareProfile
from flexgen_h2o.tiers.device import HostDevice, StandInDevice
from tests.unit.test_profile import PROFILE, RATES

MACHINE = ThisMachine("Intel(R) Xeon(R) CPU @ 2.20GHz", 2, 2**34, "", 0, "/dev/sda ext4 at /", 2**36)


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
def test_a_cache_folder_that_cannot_be_is_none(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    said: list[str] = []
    assert profile_of_this_machine("cpu", tmp_path, said.append, measure_missing=False).machine == NOMINAL
    assert not said
    with pytest.raises(FlexgenError, match="profile-"):
        store(PROFILE, "cpu", tmp_path)


def test_another_machine_or_disk_has_another_file() -> None:
    kinds = [
        MACHINE, replace(MACHINE, cpu="AMD EPYC"), replace(MACHINE, cores=4), replace(MACHINE, card="Tesla T4"),
        replace(MACHINE, mount="/dev/sdb ext4 at /big"),
    ]  # fmt: skip
    assert len({fingerprint_text(machine) for machine in kinds}) == len(kinds)
    assert fingerprint_text(replace(MACHINE, disk_bytes=1)) == fingerprint_text(MACHINE)  # the disk fills up


def test_a_processor_has_its_generation_in_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual machines have one name for several."""
    facts = ["model name\t: AMD EPYC", "cpu family\t: 25", "model\t\t: 1", "stepping\t: 1"]
    for seen, begins in ((facts, "AMD EPYC (25/1)"), (facts[:1], "AMD EPYC"), ([], "")):
        monkeypatch.setattr(run, "_lines", lambda _, seen=seen: [*seen, "", *seen])
        assert run.cpu_name().startswith(begins) and ("(25/" in run.cpu_name()) == (len(seen) == len(facts))


def test_names_of_machines() -> None:
    assert MACHINE.short_name == replace(MACHINE, cpu=f"{MACHINE.cpu} (6/143) with AMX").short_name
    assert MACHINE.short_name == "intel-xeon-2core"
    assert replace(MACHINE, card="Tesla T4", card_bytes=15 * 2**30).short_name == "tesla-t4"
    assert "Tesla T4 with 15 GiB" in replace(MACHINE, card="Tesla T4", card_bytes=15 * 2**30).description


def test_this_machine(tmp_path: Path) -> None:
    machine = this_machine(HostDevice(), tmp_path / "to" / "come")
    assert machine.cores > 0 and machine.host_bytes > 0 and machine.disk_bytes > 0 and machine.card == ""
    assert machine.cpu and machine.cpu.endswith(products.instructions()) and " at /" in machine.mount
    assert this_machine(HostDevice(), Path("/")).mount.endswith(" at /")
    assert 0 <= BackgroundLoad().share() <= 1


def test_a_quick_measurement_beside_a_card_takes_the_sizes_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget that a run must have for it is of the host's."""
    monkeypatch.setattr(run, "warm_cores", lambda *_: None)
    setup = run._Setup.warm(StandInDevice(), SimpleNamespace(), None, "float32", is_quick=True)  # type: ignore[arg-type]
    assert (setup.device.sizes, setup.host.sizes) == (quick(CARD), quick(CARD_HOST))
    assert 2 * setup.host.sizes.memory_bytes < MEASURING_BYTES < 2 * setup.device.sizes.memory_bytes


# ---- A busy machine

PARTS = ["memory", "compute.bfloat16", "compute.float32", "disk", "steps"]


class Others:
    """What other processes do, as the system tells it: cores that they take, bytes a second that their disks move."""

    def __init__(self) -> None:
        self.cores, self.disk, self.now = 0.0, 0.0, 1000.0
        self._figures = count(1e9)

    def cpu_seconds(self) -> tuple[float, float]:
        return self.cores * self.now, 0.0

    def disk_bytes(self) -> float:
        return self.disk * self.now

    def sleep(self, seconds: float) -> None:
        self.now += 1

    def with_elementwise_alone(self, profile: HardwareProfile) -> HardwareProfile:
        return profile

    def measured(self, profile: HardwareProfile, part: str) -> HardwareProfile:
        """A second has passed, and the part has other figures than ever before."""
        self.now += 1
        kind, _, dtype = part.partition(".")
        if kind == "compute":
            rates = replace(RATES, logits_per_s=next(self._figures))
            return replace(profile, compute={**profile.compute, dtype: rates})
        missing = {name: value for name, value in vars(PROFILE).items() if getattr(profile, name) == 0.0}
        field = {"memory": "host_memory_bytes_per_s", "disk": "disk_read_bytes_per_s", "steps": "overlay_bytes_per_s"}
        return replace(profile, **missing | {field[kind]: next(self._figures)})


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Others:
    """A quiet machine, at first, whose figures take no time."""
    found = Others()
    monkeypatch.setattr(run, "_cpu_seconds", found.cpu_seconds)
    monkeypatch.setattr(run, "_disk_bytes", found.disk_bytes)
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=lambda: found.now, sleep=found.sleep))
    monkeypatch.setattr(run._Setup, "warm", lambda *_, **__: found)
    monkeypatch.setattr(run, "AGAIN_S", 0.0)  # a part at a time
    return found


def kept(tmp_path: Path) -> HardwareProfile:
    found = cached_profile("cpu", tmp_path)
    assert found is not None
    return found


def busy(profile: HardwareProfile) -> list[str]:
    return list(profile.busy_parts)


def silent(line: str) -> None:
    """Progress that nobody reads."""


def test_parts_that_a_busy_machine_disturbed_are_measured_again_when_it_is_quiet(
    others: Others, tmp_path: Path
) -> None:
    others.cores = float(os.cpu_count() or 1)
    said: list[str] = []
    first = profile_of_this_machine("cpu", tmp_path, said.append, measure_missing=True)
    assert first.was_disturbed and busy(first) == PARTS and kept(tmp_path) == first
    assert said[0].startswith("other work takes 100% of the cores (load "), "before the minutes that it takes"
    assert all(note.startswith(f"{BUSY_NOTE} 100% of the cores (load ") for note in first.notes.values())
    assert profile_of_this_machine("cpu", tmp_path, said.append, measure_missing=True) == first, "busy still"
    assert "predictions come from a profile measured on a busy machine" in said[-1]
    others.cores, others.disk = 0.0, 1e9
    assert profile_of_this_machine("cpu", tmp_path, said.append, measure_missing=True) == first, "its disk is busy"
    others.disk = 0.0
    for left in range(len(PARTS) - 1, -1, -1):
        found = profile_of_this_machine("cpu", tmp_path, said.append, measure_missing=True)
        assert busy(found) == PARTS[len(PARTS) - left :] and kept(tmp_path) == found
    assert not found.was_disturbed and found.host_memory_bytes_per_s != first.host_memory_bytes_per_s
    before = len(said)
    assert profile_of_this_machine("cpu", tmp_path, said.append, measure_missing=True) == found
    assert len(said) == before and list(tmp_path.glob("run-*")) == []


def test_what_is_disturbed_again_stays_as_it_was(
    others: Others, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here somebody begins to work as soon as the machine was found quiet."""
    others.cores = float(os.cpu_count() or 1)
    first = measure("cpu", tmp_path, silent)
    monkeypatch.setattr(run, "is_quiet", lambda: True)
    assert measure_again(first, "cpu", tmp_path, silent, 1e9) == first


def test_a_disturbed_profile_is_used_where_nothing_can_be_measured(
    others: Others, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run may have no need of the disk."""
    first, said = measure("cpu", tmp_path, silent), list[str]()
    noted = replace(first, notes=dict.fromkeys(PARTS, f"{BUSY_NOTE} 40% of the cores"))
    monkeypatch.setattr(run, "is_quiet", lambda: True)
    (tmp_path / "file").touch()
    assert run.calmer(noted, "cpu", tmp_path / "file" / "x", said.append) == noted and "busy machine" in said[-1]


def test_profiles_of_before_parts_were_told_apart_are_read(others: Others, tmp_path: Path) -> None:
    others.disk = 1e9
    whole = measure("cpu", tmp_path, silent)
    assert busy(whole) == ["disk"] and "a second of the disks" in whole.notes["disk"]
    others.disk = 0.0
    old = replace(whole, notes={"compute": f"{BUSY_NOTE} 40% of the cores", "kernel_s": "by hand"})
    store(old, "cpu", tmp_path)
    assert kept(tmp_path).was_disturbed and busy(kept(tmp_path)) == PARTS
    profile_of_this_machine("cpu", tmp_path, silent, measure_missing=True)
    assert busy(kept(tmp_path)) == PARTS[1:] and kept(tmp_path).notes["kernel_s"] == "by hand"


@pytest.mark.parametrize("host", ["4GiB", "256MiB"])
def test_auto_measures_again_where_the_budget_has_room(
    host: str, others: Others, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(run, "AGAIN_S", 1e9)
    quiet = measure("cpu", tmp_path, silent)
    store(replace(quiet, notes=dict.fromkeys(PARTS, f"{BUSY_NOTE} 40% of the cores")), "cpu", tmp_path)
    again = host == "4GiB"
    with LLM("opt-tiny", "auto", device="cpu", offload_dir=tmp_path, budget=MemoryBudget(host=host)) as llm:
        for _ in range(2):
            llm.generate([[5, 6]], SamplingParams(max_tokens=2))
        assert llm.report is not None and llm.report.extra["profile_disturbed"] is not again
    assert kept(tmp_path).was_disturbed is not again
    assert capfd.readouterr().err.count("the machine is quiet: measuring") == again


def test_hardware_says_when_it_took_longer_than_promised(
    others: Others, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Parts that were disturbed are measured again at once, if it is quiet by then."""
    others.cores = float(os.cpu_count() or 1)
    monkeypatch.setattr(hardware, "PROMISED_S", (1e9, 2e9))
    monkeypatch.setattr(run, "is_quiet", lambda: setattr(others, "cores", 0.0) or True)
    assert hardware.main(["--device", "cpu", "--offload-dir", str(tmp_path)]) == 0
    said = capfd.readouterr().err.splitlines()
    assert said[0].startswith("hardware: takes one to two minutes")
    assert any("not the one to two minutes" in line for line in said)
    assert not kept(tmp_path).was_disturbed
