"""Measures the hardware profile of this machine in about a minute, and keeps it with notes of what
other processes disturbed."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import datetime, timezone
from pathlib import Path

import psutil
import torch

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import FlexgenError, UsageError
from flexgen_h2o.core.files import user_cache_dir
from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.core.units import GIB, MIB, format_bytes
from flexgen_h2o.engine.resources import LANE_THREADS
from flexgen_h2o.kernels import products
from flexgen_h2o.planner.measure.bench import (
    CARD,
    CARD_HOST,
    HOST,
    Bench,
    Figures,
    Sizes,
    kernel_seconds,
    memory_rate,
    warm_cores,
)
from flexgen_h2o.planner.measure.compute import compute_rates
from flexgen_h2o.planner.measure.engine import (
    DiskProbe,
    check_space,
    contention,
    link_rates,
    overlay_rate,
    with_step_costs,
)
from flexgen_h2o.planner.profile import (
    BUSY_NOTE,
    HardwareProfile,
    nominal_profile,
    read_profile,
    write_profile,
)
from flexgen_h2o.tiers.device import Device, HostDevice, StandInDevice, host_memory, open_device
from flexgen_h2o.tiers.disk import Scratch
from flexgen_h2o.tiers.transfers import Lanes, Mover

SOURCE = f"measured by flexgen-h2o hardware, torch {torch.__version__}"
WATCH_S = 0.5  # in which this process does nothing, to see what others do
# share of all cores, bytes a second
DISTURBED = 0.05
DISTURBED_DISK = 50 * MIB
Progress = Callable[[str], None]
DISK = "disk"  # the part of a profile that a note about the disk tier names


def measure(
    device: str,
    offload_dir: Path,
    progress: Progress,
    sizes: Sizes | None = None,
    dtypes: tuple[str, ...] = (),
) -> HardwareProfile:
    """The profile of this machine with `device` (`auto`, `cpu` or `cuda`) and the disk that holds
    `offload_dir`.

    Takes about a minute, up to 2 GiB of disk for a while, and up to 1 GiB of memory on host and
    device. sizes: of everything, to be quicker and worse; dtypes: some of the device's only.

    Raises UsageError for a device that is not there, DoesNotFitError where the disk is too full.
    """
    interrupts.check()
    opened = open_device(device, separate_budget=False)
    check_space(offload_dir)
    dtypes = dtypes or opened.dtypes
    notes = dict[str, str]()
    with open_scratch(offload_dir) as scratch, torch.inference_mode():
        profile = _blank(opened, offload_dir)
        progress(profile.description)
        bench = Bench(opened, sizes or (HOST if opened.is_host else CARD))
        # Idle cores are slower at first.
        warm_cores(bench, getattr(torch, dtypes[0]))
        host = bench if opened.is_host else Bench(HostDevice(), sizes or CARD_HOST)
        progress("memory and the link between host and device")
        with _noting("memory", notes):
            profile = replace(profile, **_memory_rates(bench, host, dtypes[0]))
        for dtype in dtypes:
            progress(f"compute in {dtype}")
            with _noting(f"compute.{dtype}", notes):
                compute = {**profile.compute, dtype: compute_rates(bench, host, dtype)}
                profile = replace(profile, compute=compute)
        progress(f"disk tier in {offload_dir}")
        with _noting(DISK, notes):
            profile = replace(profile, **_disk_rates(bench, host, scratch))
        progress("fixed costs of the engine's loop")
        with _noting("steps", notes):  # what all other figures do not explain
            profile = with_step_costs(bench, profile, dtypes[0], scratch.folder)
    if notes:
        progress(
            f"{next(iter(notes.values()))}: run flexgen-h2o hardware again when the machine is "
            "quiet"
        )
    return replace(profile, notes=notes)


def _blank(device: Device, offload_dir: Path) -> HardwareProfile:
    """Return a profile with what is known of this machine before anything is measured."""
    machine = this_machine(device, offload_dir)
    nothing: Figures = {f.name: 0.0 for f in fields(HardwareProfile) if f.type == "float"}
    return HardwareProfile(
        machine.short_name,
        machine.description,
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
        SOURCE,
        device.is_host,
        device.is_asynchronous,
        machine.card_bytes,
        machine.host_bytes,
        machine.disk_bytes,
        compute={},
        **nothing,
    )


def _memory_rates(bench: Bench, host: Bench, dtype: str) -> Figures:
    """Return the rates of memory and of the link between host and device.

    If the host computes, the link is that of the stand-in device, which gives three tiers without a
    GPU. host: `bench` itself if the host computes.
    """
    host_rate = memory_rate(host)
    with open_mover(StandInDevice() if bench.device.is_host else bench.device) as mover:
        link = link_rates(Bench(mover.device, host.sizes), mover)
    return {
        "host_memory_bytes_per_s": host_rate,
        "device_memory_bytes_per_s": host_rate if host is bench else memory_rate(bench),
        **link,
        "kernel_s": kernel_seconds(bench),
        "overlay_bytes_per_s": overlay_rate(bench, getattr(torch, dtype)),
    }


def _disk_rates(bench: Bench, host: Bench, scratch: Scratch) -> Figures:
    """Return the rates of the disk tier. host: `bench` itself if the host computes."""
    with open_mover(host.device) as mover:
        probe = DiskProbe(host, mover, scratch)
        try:
            dtype = getattr(torch, bench.device.dtypes[0])
            return {**probe.rates(), **contention(bench, mover, probe, dtype)}
        finally:
            # The lanes end first, as the engine does it: nothing reads a file that is closed.
            with interrupts.held():
                mover.lanes.close()
                probe.close()


@contextmanager
def _noting(part: str, notes: dict[str, str]) -> Iterator[None]:
    """Note where other processes took so much of the cores meanwhile, or of the disks before, that
    figures show it.

    While this process uses a disk nobody can tell what others do: devices on devices count its
    bytes twice.
    """
    disk = _watched().of_disks() if part == DISK else ""
    load = BackgroundLoad()
    yield
    if disturbed := " and ".join(filter(None, (load.of_cores(), disk))):
        notes[part] = f"{BUSY_NOTE} {disturbed}"


def _watched() -> BackgroundLoad:
    """Return what others did in half a second in which this process did nothing."""
    load = BackgroundLoad()
    time.sleep(WATCH_S)
    return load


@contextmanager
def open_mover(device: Device) -> Iterator[Mover]:
    """A mover with the lanes of a run."""
    lanes = Lanes(LANE_THREADS, Timeline())
    try:
        yield Mover(device, lanes)
    finally:
        with interrupts.held():
            lanes.close()


@contextmanager
def open_scratch(offload_dir: Path) -> Iterator[Scratch]:
    """A folder that is gone afterwards, however this ends; what kill -9 leaves, the next run
    removes."""
    with interrupts.held():
        scratch = Scratch(offload_dir)
    try:
        interrupts.check()
        yield scratch
    finally:
        with interrupts.held():
            scratch.close()


# ---- the profile that is kept


def profile_of_this_machine(
    device: str, offload_dir: Path, progress: Progress, measure_missing: bool
) -> HardwareProfile:
    """Return the cached profile; if there is none, one that is measured and cached now, or nominal
    speeds.

    device: `auto`, `cpu` or `cuda`. measure_missing: measure this machine if it has no profile yet.
    """
    if (found := cached_profile(device, offload_dir)) is not None:
        return found
    if os.path.exists(
        kept := cache_path(device, offload_dir)
    ):  # False where it cannot even be looked for
        progress(
            f"the profile that is kept in {kept} cannot be used: broken, or of another version"
        )
    if not measure_missing:
        return nominal_profile(open_device(device, separate_budget=False).is_host)
    if others := _watched().of_cores():
        progress(
            f"other work takes {others}: measuring takes longer, and rates come out too low, until "
            "that has ended"
        )
    progress("this machine has no profile yet: measuring it once, which takes one to two minutes")
    profile = measure(device, offload_dir, progress)
    try:
        store(profile, device, offload_dir)
    except FlexgenError as error:  # a home that cannot be written to: this run has what it needs
        progress(f"not kept for later: {error}")
    return profile


def cache_path(device: str, offload_dir: Path) -> Path:
    """Return the path of the profile of this machine with `device` and the disk of `offload_dir`.

    Raise UsageError for a device that is not there.
    """
    machine = this_machine(open_device(device, separate_budget=False), offload_dir)
    digest = hashlib.sha256(fingerprint_text(machine).encode()).hexdigest()[:16]
    return user_cache_dir() / f"profile-{digest}.json"


def cached_profile(device: str, offload_dir: Path) -> HardwareProfile | None:
    """None where none was measured, and where the file is broken or of another version; else as
    `cache_path`."""
    path = cache_path(device, offload_dir)
    try:
        return read_profile(path)
    except UsageError:
        return None


def store(profile: HardwareProfile, device: str, offload_dir: Path) -> Path:
    """Keep the profile; who reads meanwhile sees the old file or the new one. Raises
    FlexgenError."""
    path = cache_path(device, offload_dir)
    write_profile(path, profile)
    return path


# ---- this machine


@dataclass(frozen=True)
class ThisMachine:
    """mount: device, kind and place of the file system that holds the offload dir. card: its name,
    or empty."""

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
        cpu = re.sub(r"\((r|tm)\)|\b(cpu|processor)\b|@.*|\(\d.*|\bwith .*", " ", self.cpu.lower())
        return re.sub(r"[^a-z0-9]+", "-", self.card.lower() or f"{cpu} {self.cores}core").strip("-")

    @property
    def description(self) -> str:
        card = f"{self.card} with {self.card_bytes / GIB:.0f} GiB, " if self.card else ""
        return (
            f"{card}{self.cpu}, {self.cores} cores, {self.host_bytes / GIB:.0f} GiB of RAM, "
            f"disk {self.mount}"
        )


def this_machine(device: Device, offload_dir: Path) -> ThisMachine:
    """offload_dir need not exist."""
    card, card_bytes = device.card() or ("", 0)
    folder = next(p for p in (offload_dir, *offload_dir.absolute().parents) if p.exists())
    return ThisMachine(
        cpu_name(),
        os.cpu_count() or 1,
        host_memory()[0],
        card,
        card_bytes,
        _mount(folder),
        shutil.disk_usage(folder).free,
    )


def fingerprint_text(machine: ThisMachine) -> str:
    """Return the facts that a measured profile depends on and that stay the same between runs."""
    facts = (
        machine.cpu,
        machine.cores,
        machine.card,
        machine.mount,
        torch.__version__,
        torch.get_num_threads(),
    )
    return "\n".join(map(str, facts))


class BackgroundLoad:
    """The share of the machine that other processes take while this one measures."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._cpu = _cpu_seconds()
        self._disk = _disk_bytes()

    @property
    def _seconds(self) -> float:
        return max(1e-3, time.monotonic() - self._start)

    def of_cores(self) -> str:
        """`40% of the cores (load 3.1)`, where figures would show it; else ""."""
        share = self.share()
        return (
            f"{share:.0%} of the cores (load {os.getloadavg()[0]:.1f})"
            if share >= DISTURBED
            else ""
        )

    def of_disks(self) -> str:
        """Return the same about bytes that disks moved, while this process moves none."""
        rate = (_disk_bytes() - self._disk) / self._seconds
        return f"{format_bytes(rate)} a second of the disks" if rate >= DISTURBED_DISK else ""

    def share(self) -> float:
        """Return the share of all cores since this was made, between 0 and 1.

        Time that the hypervisor takes is not seen.
        """
        busy, own = self._cpu
        busy_now, own_now = _cpu_seconds()
        cores = self._seconds * (os.cpu_count() or 1)
        return min(1.0, max(0.0, busy_now - busy - (own_now - own)) / cores)


def _cpu_seconds() -> tuple[float, float]:
    """Return the seconds that all cores were busy, and those of this process."""
    times = psutil.cpu_times()
    own = os.times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    # Guests' seconds are in `user` as well.
    return sum(times) - idle - getattr(times, "guest", 0.0) - getattr(
        times, "guest_nice", 0.0
    ), own.user + own.system


def _disk_bytes() -> float:
    """Return the bytes that all disks have moved, or 0 if the system does not tell."""
    try:
        disks = psutil.disk_io_counters()
    except (OSError, RuntimeError):
        disks = None
    return 0.0 if disks is None else float(disks.read_bytes + disks.write_bytes)


def cpu_name() -> str:
    """`AMD EPYC (25/1) with AVX2`: Linux's name, family and model, since one name has many, and
    what multiplies."""
    facts = {
        name.strip(): value.strip()
        for name, _, value in (x.partition(":") for x in _lines("/proc/cpuinfo"))
    }
    name = facts.get("model name") or platform.processor() or platform.machine() or "CPU"
    generation = (
        f" ({facts['cpu family']}/{facts.get('model', '')})" if "cpu family" in facts else ""
    )
    return " with ".join(filter(None, (name + generation, products.instructions())))


def _mount(folder: Path) -> str:
    """`/dev/vda ext4 at /`; the same after a restart, unlike the number of the device."""
    real = folder.resolve()
    found = ("unknown", Path("/"), "file system")
    for line in _lines("/proc/mounts"):
        source, place, kind = line.split(" ")[:3]
        here = Path(place.replace("\\040", " "))
        if real.is_relative_to(here) and len(here.parts) >= len(found[1].parts):
            found = (source, here, kind)
    return f"{found[0]} {found[2]} at {found[1]}"


def _lines(path: str) -> list[str]:
    """Return the lines of a file that not every system has."""
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []
