"""Measure the hardware profile of this machine in about a minute, and keep it.

If other processes were busy meanwhile, a note in the profile says so.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, replace
from datetime import datetime, timezone
from pathlib import Path

import psutil
import torch

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.cgroups import usable_cores
from flexgen_h2o.core.errors import FlexgenError, UsageError
from flexgen_h2o.core.files import existing_folder, user_cache_dir
from flexgen_h2o.core.units import GIB, MIB, format_bytes
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
    check_space,
    contention,
    link_rates,
    open_mover,
    open_probe,
    open_scratch,
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
from flexgen_h2o.tiers.device import (
    Device,
    HostDevice,
    StandInDevice,
    open_device,
    whole_host_bytes,
)

SOURCE = f"measured by flexgen-h2o hardware, torch {torch.__version__}"
WATCH_S = 0.5  # in which this process does nothing, to see what others do
DISTURBED = 0.05  # share of all cores
DISTURBED_DISK = 50 * MIB  # bytes per second
Progress = Callable[[str], None]


def measure(
    device: str,
    offload_dir: Path,
    progress: Progress,
    sizes: Sizes | None = None,
    dtypes: tuple[str, ...] = (),
) -> HardwareProfile:
    """Return the profile of this machine with `device` (`auto`, `cpu` or `cuda`) and a disk.

    It takes about a minute, up to 2 GiB of disk, and up to 1 GiB of memory on host and device. If
    other processes are busy, a note in the profile says so. Raise UsageError for a device that is
    not there, and DoesNotFitError if the disk is too full.

    offload_dir: a folder on the disk.
    sizes: smaller sizes are quicker and less exact.
    dtypes: some of the device's, to measure no others.
    """
    interrupts.check()
    opened = open_device(device, separate_budget=False)
    check_space(offload_dir)
    dtypes = dtypes or opened.dtypes
    with open_scratch(offload_dir) as scratch, torch.inference_mode():
        profile = _blank(opened, offload_dir)
        progress(profile.description)
        taken = watch_others()
        time.sleep(WATCH_S)
        # While this process uses a disk nobody can tell what others do with it.
        others = taken(True)
        if others:
            progress(f"other work takes {others}: measuring takes longer until that has ended")
        bench = Bench(opened, sizes or (HOST if opened.is_host else CARD))
        # Idle cores are slower at first.
        warm_cores(bench, getattr(torch, dtypes[0]))
        host = bench if opened.is_host else Bench(HostDevice(), sizes or CARD_HOST)
        progress("memory and the link between host and device")
        profile = replace(profile, **_memory_rates(bench, host, dtypes[0]))
        for dtype in dtypes:
            progress(f"compute in {dtype}")
            rates = compute_rates(bench, host, dtype)
            profile = replace(profile, compute={**profile.compute, dtype: rates})
        progress(f"disk tier in {offload_dir}")
        with open_probe(host, scratch) as probe:
            first = getattr(torch, opened.dtypes[0])
            profile = replace(profile, **probe.rates(), **contention(bench, probe, first))
        progress("fixed costs of the engine's loop")
        profile = with_step_costs(bench, profile, dtypes[0], scratch.folder)
    others = taken(False) or others
    if not others:
        return profile
    return replace(profile, notes={"machine": f"{BUSY_NOTE} {others}"})


def _blank(device: Device, offload_dir: Path) -> HardwareProfile:
    """Return a profile with what is known of this machine before anything is measured."""
    cpu = cpu_name()
    cores = max(1, int(usable_cores()))
    card, card_bytes = device.card() or ("", 0)
    host_bytes = whole_host_bytes()
    folder = existing_folder(offload_dir)
    with_card = f"{card} with {card_bytes / GIB:.0f} GiB, " if card else ""
    nothing: Figures = {f.name: 0.0 for f in fields(HardwareProfile) if f.type == "float"}
    return HardwareProfile(
        short_name(cpu, cores, card),
        f"{with_card}{cpu}, {cores} cores, {host_bytes / GIB:.0f} GiB of RAM, "
        f"disk {mount_of(folder)}",
        datetime.now(timezone.utc).isoformat(timespec="seconds"),
        SOURCE,
        device.is_host,
        device.is_asynchronous,
        card_bytes,
        host_bytes,
        shutil.disk_usage(folder).free,
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
    card = open_device(device, separate_budget=False).card() or ("", 0)
    text = fingerprint_text(cpu_name(), card[0], mount_of(existing_folder(offload_dir)))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return user_cache_dir() / f"profile-{digest}.json"


def cached_profile(device: str, offload_dir: Path) -> HardwareProfile | None:
    """Return the kept profile; None if there is none, or if it is broken or of another version.

    Raise UsageError for a device that is not there.
    """
    path = cache_path(device, offload_dir)
    try:
        return read_profile(path)
    except UsageError:
        return None


def is_news(device: str, offload_dir: Path) -> bool:
    """Return whether this is the first question about the profile that is kept, and note that.

    So only one run says what is wrong with a profile.
    """
    path = cache_path(device, offload_dir)
    noted = path.with_suffix(".noted")
    try:
        if noted.stat().st_mtime >= path.stat().st_mtime:
            return False
    except OSError:  # it was not noted yet
        pass
    with suppress(OSError):  # a home that cannot be written to: every run says it
        noted.touch()
    return True


def store(profile: HardwareProfile, device: str, offload_dir: Path) -> Path:
    """Keep the profile. Readers see the old file or the new one. Raise FlexgenError if it fails."""
    path = cache_path(device, offload_dir)
    write_profile(path, profile)
    return path


# ---- this machine


def short_name(cpu: str, cores: int, card: str) -> str:
    """Return a name such as `nvidia-h200` or `amd-epyc-2core`: letters, digits and hyphens."""
    cpu = re.sub(r"\((r|tm)\)|\b(cpu|processor)\b|@.*|\(\d.*|\bwith .*", " ", cpu.lower())
    return re.sub(r"[^a-z0-9]+", "-", card.lower() or f"{cpu} {cores}core").strip("-")


def fingerprint_text(cpu: str, card: str, mount: str) -> str:
    """Return the facts that a measured profile depends on and that stay the same between runs."""
    # Affinity and quotas of CPU time limit the threads.
    facts = (cpu, os.cpu_count() or 1, card, mount, torch.__version__, torch.get_num_threads())
    return "\n".join(map(str, facts))


def watch_others() -> Callable[[bool], str]:
    """Return a function that says what other processes have taken since this call.

    It returns text such as `40% of the cores (load 3.1)`, if figures would show it; else "". Its
    argument is whether to look at the disks too, while this process uses none. Time that the
    hypervisor takes is not seen.
    """
    start = time.monotonic()
    busy, own = _cpu_seconds()
    moved = _disk_bytes()

    def taken(with_disks: bool) -> str:
        seconds = max(1e-3, time.monotonic() - start)
        busy_now, own_now = _cpu_seconds()
        cores = seconds * (os.cpu_count() or 1)
        share = min(1.0, max(0.0, busy_now - busy - (own_now - own)) / cores)
        rate = (_disk_bytes() - moved) / seconds
        said = []
        if share >= DISTURBED:
            said.append(f"{share:.0%} of the cores (load {os.getloadavg()[0]:.1f})")
        if with_disks and rate >= DISTURBED_DISK:
            said.append(f"{format_bytes(rate)} per second of the disks")
        return " and ".join(said)

    return taken


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
    """Return a name such as `AMD EPYC (25/1) with AVX2`.

    It has Linux's name, family and model, since one name has many, and what multiplies.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:  # not every system has it
        lines = []
    facts = {name.strip(): value.strip() for name, _, value in (x.partition(":") for x in lines)}
    name = facts.get("model name") or platform.processor() or platform.machine() or "CPU"
    generation = (
        f" ({facts['cpu family']}/{facts.get('model', '')})" if "cpu family" in facts else ""
    )
    return " with ".join(filter(None, (name + generation, products.instructions())))


def mount_of(folder: Path) -> str:
    """Return a folder's file system, such as `/dev/vda ext4 at /`.

    It is the same after a restart, unlike the number of the device.
    """
    real = folder.resolve()
    # The later of two mounts at one place hides the other.
    found = [x for x in psutil.disk_partitions(all=True) if real.is_relative_to(x.mountpoint)]
    if not found:
        return "unknown file system at /"
    here = max(reversed(found), key=lambda x: len(Path(x.mountpoint).parts))
    return f"{here.device} {here.fstype} at {here.mountpoint}"
