"""Limits of memory and CPU time of a process in fake trees of control groups."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from flexgen_h2o.core import cgroups
from flexgen_h2o.core.units import GIB
from flexgen_h2o.tiers.device import free_host_bytes, whole_host_bytes

V2 = "30 23 0:26 {root} {top}/{place} rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V1 = "35 31 0:32 {root} {top}/{place} rw,relatime - cgroup cgroup rw,{controller}"
OTHER = "23 1 8:1 / / rw,relatime - ext4 /dev/vda rw"
NO_LIMIT_V1 = str(2**63 - 4096)


class Tree:
    """A fake /proc/self and what its mountinfo leads to."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.lines = [OTHER]

    def mount(self, line: str, place: str, root: str = "/", controller: str = "") -> None:
        where = str(self.top).replace(" ", "\\040")
        self.lines.append(line.format(root=root, top=where, place=place, controller=controller))
        (self.top / place).mkdir(parents=True, exist_ok=True)

    def write(self, path: str, text: object) -> None:
        file = self.top / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def enter(self, monkeypatch: pytest.MonkeyPatch, own: str) -> None:
        self.write("self/cgroup", own)
        self.write("self/mountinfo", "\n".join(self.lines))
        monkeypatch.setattr(cgroups, "PROCESS", self.top / "self")
        monkeypatch.setattr(cgroups, "USUAL_MOUNT", self.top / "usual")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "with space")


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 GiB of RAM with 60 GiB available, and 8 cores."""
    found = psutil.virtual_memory()._replace(total=64 * GIB, available=60 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: found)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


SERVICE = "0::/system.slice/job.service"
OLD = "5:cpu,cpuacct:/a/b\n4:memory:/a/b\n0::/"
# (mounts, lines of /proc/self/cgroup, files, GiB in all, GiB free, cores). Files are numbers of
# GiB if their names begin with "memory."
CASES = {
    "nothing is mounted": ([], SERVICE, {}, 64, 60, 8),
    "no limit": (
        [(V2, "cg", "/", "")],
        SERVICE,
        {"cg/system.slice/job.service/memory.max": "max", "cg/system.slice/cpu.max": "max 100000"},
        64,
        60,
        8,
    ),
    "a limit at the root of a namespace": (
        [(V2, "cg", "/", "")],
        "0::/",
        {"cg/memory.max": 4, "cg/memory.current": 1, "cg/cpu.max": "150000 100000"},
        4,
        3,
        1.5,
    ),
    "limits on the own group and above": (
        [(V2, "cg", "/", "")],
        SERVICE,
        {
            "cg/system.slice/job.service/memory.max": 16,
            "cg/system.slice/job.service/memory.current": 1,
            "cg/system.slice/memory.max": "max",
            "cg/system.slice/memory.high": 20,
            "cg/system.slice/memory.current": 12,
            "cg/system.slice/cpu.max": "300000 100000",
            "cg/system.slice/job.service/cpu.max": "500000 100000",
        },
        16,
        8,
        3,
    ),
    "memory.high below memory.max": (
        [(V2, "cg", "/", "")],
        SERVICE,
        {
            "cg/system.slice/job.service/memory.max": 16,
            "cg/system.slice/job.service/memory.high": 2,
        },
        2,
        2,
        8,
    ),
    "a container's part of the tree, seen with the host's names": (
        [(V2, "cg", "/docker/x", "")],
        "0::/docker/x/job",
        {"cg/job/memory.max": 5, "cg/memory.max": 3, "cg/docker/x/memory.max": 1},
        3,
        3,
        8,
    ),
    "a mount above the namespace's root": (
        [(V2, "cg", "/..", "")],
        "0::/../other",
        {"cg/other/memory.max": 5, "cg/memory.max": 6},
        5,
        5,
        8,
    ),
    "a group outside the namespace": (
        [(V2, "cg", "/", "")],
        "0::/../../other",
        {"cg/memory.max": 6},
        6,
        6,
        8,
    ),
    "a group that was removed": (
        [(V2, "cg", "/", "")],
        "0::/gone/too (deleted)",
        {"cg/gone/memory.max": 7},
        7,
        7,
        8,
    ),
    "version 1": (
        [(V1, "mem", "/", "memory"), (V1, "cpu", "/", "cpu,cpuacct")],
        OLD,
        {
            "mem/a/b/memory.limit_in_bytes": NO_LIMIT_V1,
            "mem/a/b/memory.usage_in_bytes": 2,
            "mem/a/memory.limit_in_bytes": 8,
            "mem/a/memory.usage_in_bytes": 3,
            "mem/memory.limit_in_bytes": NO_LIMIT_V1,
            "cpu/a/b/cpu.cfs_quota_us": -1,
            "cpu/a/b/cpu.cfs_period_us": 100000,
            "cpu/a/cpu.cfs_quota_us": 50000,
            "cpu/a/cpu.cfs_period_us": 100000,
        },
        8,
        5,
        0.5,
    ),
    "version 1 without hierarchy": (
        [(V1, "mem", "/", "memory")],
        OLD,
        {"mem/a/memory.limit_in_bytes": 8, "mem/a/memory.use_hierarchy": 0},
        64,
        60,
        8,
    ),
    "version 1, a limit above the container's root": (
        [(V1, "mem", "/a/b", "memory")],
        OLD,
        {"mem/memory.limit_in_bytes": 9, "mem/memory.stat": f"hierarchical_memory_limit {GIB}"},
        1,
        1,
        8,
    ),
    "hybrid": (
        [(V2, "unified", "/", ""), (V1, "mem", "/", "memory")],
        OLD,
        {"mem/a/b/memory.limit_in_bytes": 10, "unified/cgroup.controllers": ""},
        10,
        10,
        8,
    ),
    "mountinfo leads nowhere": (
        [],
        SERVICE,
        {"usual/system.slice/memory.max": 11, "usual/cpu.max": "200000 100000"},
        11,
        11,
        2,
    ),
    "files that hold something else": (
        [(V2, "cg", "/", "")],
        SERVICE,
        {"cg/memory.max": "garbage", "cg/cpu.max": "", "cg/system.slice/cpu.max": "0 0"},
        64,
        60,
        8,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_limit_that_holds_for_the_process_counts(
    name: str, tree: Tree, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts, own, files, whole, free, cores = CASES[name]
    for line, place, root, controller in mounts:
        tree.mount(line, place, root, controller)
    for path, value in files.items():
        is_size = Path(path).name.startswith("memory.") and isinstance(value, int) and value
        tree.write(path, value * GIB if is_size else value)
    tree.enter(monkeypatch, own)
    assert whole_host_bytes() == whole * GIB
    assert free_host_bytes() == free * GIB
    assert cgroups.usable_cores() == cores


@pytest.mark.parametrize(("usage", "cached", "free"), [(30, 25, 35), (30, 0, 10), (50, 0, 0)])
@pytest.mark.parametrize("version", [1, 2])
def test_page_cache_of_a_group_is_there_to_be_had(
    version: int,
    usage: int,
    cached: int,
    free: int,
    tree: Tree,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree.mount(*((V2, "cg") if version == 2 else (V1, "cg", "/", "memory")))
    names = {1: ("limit_in_bytes", "usage_in_bytes"), 2: ("max", "current")}[version]
    fields = {
        1: ("total_inactive_file", "total_active_file", "total_mapped_file"),
        2: ("inactive_file", "active_file", "file_mapped"),
    }[version]
    # Of the cache that is read often, libraries that are mapped are needed again.
    sizes = (max(0, cached - 2) * GIB, (5 if cached else 3) * GIB, 3 * GIB)
    tree.write(f"cg/memory.{names[0]}", 40 * GIB)
    tree.write(f"cg/memory.{names[1]}", usage * GIB)
    lines = (f"{name} {size}" for name, size in zip(fields, sizes, strict=True))
    tree.write("cg/memory.stat", "anon 7\n" + "\n".join(lines))
    tree.enter(monkeypatch, "4:memory:/\n0::/")
    assert free_host_bytes() == free * GIB


@pytest.mark.parametrize(
    ("quota", "chosen", "threads"),
    [("max", None, None), ("250000", None, "2"), ("50000", None, "1"), ("250000", "6", "6")],
)
def test_a_quota_of_cpu_time_limits_threads_unless_the_user_chose(
    quota: str,
    chosen: str | None,
    threads: str | None,
    tree: Tree,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    variables = {} if chosen is None else {cgroups.THREADS_VARIABLE: chosen}
    monkeypatch.setattr(os, "environ", variables)
    tree.mount(V2, "cg")
    tree.write("cg/cpu.max", f"{quota} 100000")
    tree.enter(monkeypatch, "0::/")
    cgroups.limit_threads()
    assert variables.get(cgroups.THREADS_VARIABLE) == threads
