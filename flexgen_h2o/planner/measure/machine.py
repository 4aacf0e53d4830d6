"""This machine: its name, what other processes take of it, and its profile, kept in the cache folder."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import torch

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import user_cache_dir
from flexgen_h2o.core.units import GIB, MIB, format_bytes
from flexgen_h2o.planner.profile import (
    UNKNOWN_INT8_SPEEDUP,
    ComputeRates,
    Curve,
    HardwareProfile,
    read_profile,
    write_profile,
)
from flexgen_h2o.tiers.device import Device, open_device

_CPU_INFO, _MOUNTS = Path("/proc/cpuinfo"), Path("/proc/mounts")


@dataclass(frozen=True)
class Machine:
    """mount: device, kind and place of the file system that holds the offload dir. card: its name, or empty."""

    cpu: str
    cores: int
    host_bytes: int
    card: str
    card_bytes: int
    mount: str
    disk_bytes: int

    @property
    def short_name(self) -> str:
        """`nvidia-h200`, `amd-epyc-2core`: letters, digits and hyphens."""
        cpu = re.sub(r"\((r|tm)\)|\b(cpu|processor)\b|@.*", " ", self.cpu.lower())
        name = self.card.lower() or f"{cpu} {self.cores}core"
        return re.sub(r"[^a-z0-9]+", "-", name).strip("-")

    @property
    def description(self) -> str:
        card = f"{self.card} with {self.card_bytes / GIB:.0f} GiB, " if self.card else ""
        return f"{card}{self.cpu}, {self.cores} cores, {self.host_bytes / GIB:.0f} GiB of RAM, disk {self.mount}"


def this_machine(device: Device, offload_dir: Path) -> Machine:
    """offload_dir need not exist."""
    card, card_bytes = device.card() or ("", 0)
    folder = next(p for p in (offload_dir, *offload_dir.absolute().parents) if p.exists())
    return Machine(
        _cpu_name(), os.cpu_count() or 1, int(psutil.virtual_memory().total), card, card_bytes, _mount(folder),
        shutil.disk_usage(folder).free,
    )  # fmt: skip


def fingerprint_text(machine: Machine) -> str:
    """What a measured profile depends on that stays the same from run to run."""
    facts = (machine.cpu, machine.cores, machine.card, machine.mount, torch.__version__, torch.get_num_threads())
    return "\n".join(map(str, facts))


DISTURBED = 0.05  # share of all cores
DISTURBED_DISK = 50 * MIB  # bytes a second


class BackgroundLoad:
    """What other processes take of the machine while this one measures."""

    def __init__(self) -> None:
        self._start = time.monotonic(), *_cpu_seconds()
        self._disk = _disk_bytes()

    def of_cores(self) -> str:
        """`40% of the cores (load 3.1)`, where figures would show it; else ""."""
        share = self.share()
        return f"{share:.0%} of the cores (load {os.getloadavg()[0]:.1f})" if share >= DISTURBED else ""

    def of_disks(self) -> str:
        """The same of bytes that disks moved; only while this process moves none."""
        rate = (_disk_bytes() - self._disk) / max(1e-3, time.monotonic() - self._start[0])
        return f"{format_bytes(rate)} a second of the disks" if rate >= DISTURBED_DISK else ""

    def share(self) -> float:
        """Of all cores since this was made, between 0 and 1. What the hypervisor takes does not show."""
        start, busy, own = self._start
        busy_now, own_now = _cpu_seconds()
        cores = max(1e-3, time.monotonic() - start) * (os.cpu_count() or 1)
        return min(1.0, max(0.0, busy_now - busy - (own_now - own)) / cores)


def _cpu_seconds() -> tuple[float, float]:
    """Seconds that all cores were busy, and those of this process."""
    times, own = psutil.cpu_times(), os.times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # Guests' seconds are in `user` as well.
    return sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0), own.user + own.system


def _disk_bytes() -> float:
    """That all disks have moved; 0 where the system does not tell."""
    try:
        disks = psutil.disk_io_counters()
    except (OSError, RuntimeError):
        disks = None
    return 0.0 if disks is None else float(disks.read_bytes + disks.write_bytes)


def _cpu_name() -> str:
    try:
        lines = _CPU_INFO.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine() or "CPU"


def _mount(folder: Path) -> str:
    """`/dev/vda ext4 at /`; the same after a restart, unlike the number of the device."""
    real, found = folder.resolve(), ("unknown", Path("/"), "file system")
    try:
        lines = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        source, place, kind = line.split(" ")[:3]
        here = Path(place.replace("\\040", " "))
        if real.is_relative_to(here) and len(here.parts) >= len(found[1].parts):
            found = (source, here, kind)
    return f"{found[0]} {found[2]} at {found[1]}"


NOMINAL = "nominal"


def nominal_profile(device_is_host: bool) -> HardwareProfile:
    """Two CPU cores with an NVMe disk, or the same with a card of 16 GB: round figures, none of them measured."""
    in_bf16 = replace(_host_rates(3e11), int8_speedup=Curve.flat(UNKNOWN_INT8_SPEEDUP))
    compute = {"float32": _host_rates(1e11), "bfloat16": in_bf16}
    if not device_is_host:
        compute = {dtype: _card_rates(2e13) for dtype in ("float32", "bfloat16", "float16")}
    return HardwareProfile(
        machine=NOMINAL, description="round figures of a small machine", date="",
        source="nominal: nothing was measured", device_is_host=device_is_host,
        device_is_asynchronous=not device_is_host, device_mem_bytes=0 if device_is_host else 16 * GIB,
        host_mem_bytes=32 * GIB, disk_mem_bytes=500 * GIB, disk_read_bytes_per_s=2e9, disk_write_bytes_per_s=1e9,
        h2d_bytes_per_s=1e10, d2h_bytes_per_s=1e10, h2d_unpinned_bytes_per_s=4e9, d2h_unpinned_bytes_per_s=4e9,
        host_memory_bytes_per_s=2e10, device_memory_bytes_per_s=2e10 if device_is_host else 3e11,
        disk_read_beside_compute=0.9, compute_beside_disk_read=0.95, kernel_s=1e-5, transfer_s=5e-5,
        disk_request_s=1e-4, overlay_bytes_per_s=2e9, step_s=1e-4, attention_step_s=2e-4, eviction_step_s=2e-4,
        row_s=2e-6, short_read_compute_s=5e-5 if device_is_host else 0.0,
        cache_load_step_s=2e-4 if device_is_host else 0.0, compute=compute,
    )  # fmt: skip


def _host_rates(flops_per_s: float) -> ComputeRates:
    flat, attention = Curve.flat, Curve.flat(1.5e10)
    over_rows = Curve(((1, 1e10), (32, flops_per_s / 2), (128, flops_per_s)))
    return ComputeRates(
        ((1.0, ((4096.0, over_rows),)),), flat(flops_per_s / 3), flat(flops_per_s / 4), attention, attention, attention,
        attention, 2e10, 5e9, 5e9, 1e9,
    )  # fmt: skip


def _card_rates(flops_per_s: float) -> ComputeRates:
    flat, here, there = Curve.flat, Curve.flat(2e11), Curve.flat(1e10)
    over_rows = Curve(((1, 2.5e11), (128, flops_per_s)))
    return ComputeRates(
        ((1.0, ((4096.0, over_rows),)),), flat(flops_per_s / 3), flat(flops_per_s / 4), here, here, there, there,
        2e11, 5e10, 5e9, 1e11,
    )  # fmt: skip


def cache_path(device: str, offload_dir: Path) -> Path:
    """Where the profile of this machine with `device` and the disk of `offload_dir` is kept.

    Raises UsageError for a device that is not there.
    """
    machine = this_machine(open_device(device, separate_budget=False), offload_dir)
    digest = hashlib.sha256(fingerprint_text(machine).encode()).hexdigest()[:16]
    return user_cache_dir() / f"profile-{digest}.json"


def cached_profile(device: str, offload_dir: Path) -> HardwareProfile | None:
    """None where none was measured, and where the file is broken or of another version.

    Raises UsageError for a device that is not there.
    """
    path = cache_path(device, offload_dir)
    try:
        return read_profile(path)
    except UsageError:
        return None


def store(profile: HardwareProfile, device: str, offload_dir: Path) -> Path:
    """Keep the profile; who reads meanwhile sees the old file or the new one. Raises FlexgenError."""
    path = cache_path(device, offload_dir)
    write_profile(path, profile)
    return path
