"""Budgets that nobody gave: what is free, less a margin."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from flexgen_h2o.core.config import MemoryBudget
from flexgen_h2o.core.units import GIB
from flexgen_h2o.tiers import device as machine
from flexgen_h2o.tiers.device import HostDevice, StandInDevice, free_host_bytes, resolve_budgets

Disk = namedtuple("Disk", "free")
Memory = namedtuple("Memory", "available")


@pytest.fixture
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 GiB of RAM and 500 GiB of disk free."""
    monkeypatch.setattr(machine, "free_host_bytes", lambda: 100 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Disk(500 * GIB))


@pytest.mark.usefixtures("_machine")
def test_budgets_that_were_given_are_taken_as_they_are(tmp_path: Path) -> None:
    budget = MemoryBudget("1GiB", "2GiB", "3GiB")
    assert resolve_budgets(budget, StandInDevice(), tmp_path) == {"device": GIB, "host": 2 * GIB, "disk": 3 * GIB}
    assert resolve_budgets(budget, HostDevice(), tmp_path) == {"device": 0, "host": 2 * GIB, "disk": 3 * GIB}


@pytest.mark.usefixtures("_machine")
def test_others_get_what_is_free_less_a_margin(tmp_path: Path) -> None:
    found = resolve_budgets(MemoryBudget(), HostDevice(), tmp_path)
    assert found == {"device": 0, "host": 90 * GIB, "disk": 498 * GIB}


@pytest.mark.usefixtures("_machine")
def test_a_card_keeps_a_margin_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_free_device_bytes", lambda device: 4 * GIB)
    assert resolve_budgets(MemoryBudget(), StandInDevice(), tmp_path)["device"] == 4 * GIB - GIB // 2


def test_next_to_nothing_free_is_a_budget_of_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_host_bytes", lambda: GIB // 4)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Disk(GIB))
    assert resolve_budgets(MemoryBudget(), HostDevice(), tmp_path) == {"device": 0, "host": 0, "disk": 0}


def test_the_disk_is_the_one_of_the_folder_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Path] = []

    def disk_usage(folder: Path) -> Disk:
        asked.append(folder)
        return Disk(500 * GIB)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    resolve_budgets(MemoryBudget(host=1), HostDevice(), tmp_path / "not" / "yet")
    monkeypatch.chdir(tmp_path)
    resolve_budgets(MemoryBudget(host=1), HostDevice(), Path("not/yet"))
    assert asked == [tmp_path, tmp_path]


@pytest.mark.parametrize(
    ("limit", "current", "cached", "free"),
    [
        ("max", "5", 0, 90), (None, None, 0, 90), ("40", "10", 0, 30), ("500", "10", 0, 90), ("garbage", "10", 0, 90),
        ("40", None, 0, 90), ("40", "38", 30, 32),
    ],
)  # fmt: skip
def test_a_container_has_what_its_limit_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, current: str | None, cached: int, free: int
) -> None:
    """Clean page cache counts as used by the container and is there to be had all the same."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: Memory(90))
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    for name, text in (
        ("memory.max", limit), ("memory.current", current), ("memory.stat", f"anon 7\ninactive_file {cached}"),
    ):  # fmt: skip
        if text is not None:
            (tmp_path / name).write_text(f"{text}\n")
    assert free_host_bytes() == free
