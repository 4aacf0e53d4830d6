"""`doctor`: what it says of this machine, and of machines where something would hurt."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from flexgen_h2o import doctor
from flexgen_h2o.core.cgroups import MemoryLimit
from flexgen_h2o.core.units import GIB
from flexgen_h2o.kernels import jit
from flexgen_h2o.planner.measure import engine, run
from flexgen_h2o.tiers import device
from tests.doors.conftest import Door

LINES = [
    "versions",
    "libraries",
    "numba cache",
    "waiting threads",
    "threads",
    "open files",
    "memory",
    "cgroup",
    "swap",
    "huge pages",
    "card",
    "disk",
]


def rates(read: float) -> dict[str, float]:
    return {"disk_read_bytes_per_s": read, "disk_write_bytes_per_s": 1e9}


@pytest.fixture
def healthy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A small file is measured; its figures are those of a fast disk."""
    monkeypatch.setattr(doctor, "PROBED_BYTES", 2**20)
    monkeypatch.setattr(engine.DiskProbe, "rates", lambda probe: rates(3e9))
    monkeypatch.setattr(engine.DiskProbe, "is_direct", True)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    pages = tmp_path / "pages"
    pages.write_text("always [madvise] never\n")
    monkeypatch.setattr(doctor, "HUGE_PAGES", pages)
    monkeypatch.setattr(doctor, "memory_limits", list)
    monkeypatch.setattr(doctor, "usable_cores", lambda: 4.0)
    monkeypatch.setattr(device, "free_host_bytes", lambda: 8 * GIB)
    monkeypatch.setattr(jit, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(run, "mount_of", lambda folder: "/dev/vda ext4 at /")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(doctor, "CARD_FILES", ())
    monkeypatch.setattr(doctor, "descriptor_limits", lambda: (1024, 4096))


def test_a_line_each_of_a_machine_on_which_nothing_hurts(
    command: Door, healthy: None, tmp_path: Path
) -> None:
    said = command("doctor --offload-dir o")
    assert (said.code, said.err) == (0, "")
    found = {re.split(" {2,}", line)[1]: line for line in said.out.splitlines()}
    assert [name for name in found if name not in ("extras", "profile")] == LINES
    assert "reads 3 GB/s, writes 1 GB/s O_DIRECT" in found["disk"]
    assert not list((tmp_path / "o").iterdir())


# Where something is changed (None: the environment), its name, what it becomes (a text: of the file
# that it names), and what is said.
HURTS: dict[str, tuple[object, str, object, str]] = {
    "numba cache": (jit, "cache_folder", lambda: None, "NUMBA_CACHE_DIR"),
    "waiting threads": (None, "OMP_WAIT_POLICY", "ACTIVE", "OMP_WAIT_POLICY is ACTIVE; unset it"),
    "threads": (torch, "get_num_threads", lambda: 9, "9 for 4 cores; export OMP_NUM_THREADS=4"),
    "threads, quota": (doctor, "usable_cores", lambda: 1.5, "4 for 1.5 cores"),
    "threads, idle": (torch, "get_num_threads", lambda: 1, "1 for 4 cores; raise"),
    "open files": (doctor, "descriptor_limits", lambda: (64, 64), "ask the administrator"),
    "open files, soft": (doctor, "descriptor_limits", lambda: (255, 10**6), "255 at a time"),
    "memory": (device, "free_host_bytes", lambda: GIB, "1.00 GiB of"),
    "huge pages": (doctor, "HUGE_PAGES", "always madvise [never]\n", "is never; echo madvise"),
    "card": (doctor, "CARD_FILES", ("/dev/null",), "torch cannot use it"),
    "disk": (engine.DiskProbe, "is_direct", False, "without O_DIRECT"),
    "disk, in RAM": (run, "mount_of", lambda folder: "tmpfs tmpfs at /tmp", "stays in RAM"),
    "disk, slow": (engine.DiskProbe, "rates", lambda probe: rates(1e8), "reads 0.1 GB/s"),
}


@pytest.mark.parametrize("name", HURTS)
def test_what_hurts_is_named_with_what_to_do_and_ends_with_1(
    name: str, command: Door, healthy: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place, changed, value, says = HURTS[name]
    if place is None:
        monkeypatch.setenv(changed, str(value))
    else:
        file = tmp_path / "said"
        file.write_text(str(value))
        monkeypatch.setattr(place, changed, file if isinstance(value, str) else value)
    said = command("doctor --offload-dir o")
    assert said.code == 1
    begins = f"look  {name.partition(',')[0]} "
    [line] = [line for line in said.out.splitlines() if line.startswith(begins)]
    assert says in line, line


def test_the_tightest_limit_of_a_cgroup_is_shown(
    command: Door, healthy: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [MemoryLimit(3 * GIB, GIB), MemoryLimit(4 * GIB, 3 * GIB)]
    monkeypatch.setattr(doctor, "memory_limits", lambda: limits)
    said = command("doctor --offload-dir o")
    assert "holds 3.00 GiB of at most 4.00 GiB" in said.out
