"""Measures a whole hardware profile in about a minute, and again what other processes disturbed.

The profile that plans for this machine are made with.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import DoesNotFitError, FlexgenError
from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.core.units import MIB
from flexgen_h2o.engine.resources import LANE_THREADS
from flexgen_h2o.planner.measure.bench import CARD, CARD_HOST, HOST, Bench, Sizes
from flexgen_h2o.planner.measure.compute import compute_rates, kernel_seconds, memory_rate, other_rates, warm_cores
from flexgen_h2o.planner.measure.links import (
    DiskProbe,
    DiskRates,
    LinkRates,
    beside_shares,
    check_space,
    link_rates,
    overlay_rate,
)
from flexgen_h2o.planner.measure.machine import (
    BackgroundLoad,
    cache_path,
    cached_profile,
    nominal_profile,
    store,
    this_machine,
)
from flexgen_h2o.planner.measure.steps import FIXED, StepCosts, step_costs
from flexgen_h2o.planner.profile import BUSY_NOTE, ComputeRates, HardwareProfile
from flexgen_h2o.tiers.device import Device, HostDevice, StandInDevice, open_device
from flexgen_h2o.tiers.disk import Scratch
from flexgen_h2o.tiers.transfers import Lanes, Mover

SOURCE = f"measured by python -m flexgen_h2o.hardware, torch {torch.__version__}"
QUIET_S = 0.5  # that the machine must be quiet before anything is measured again
Progress = Callable[[str], None]


@dataclass(frozen=True)
class _Storage:
    """disk, and shares that are left of disk reads and compute beside each other."""

    disk: DiskRates
    read_beside_compute: float
    compute_beside_read: float


def measure(
    device: str, offload_dir: Path, progress: Progress, sizes: Sizes | None = None, dtypes: tuple[str, ...] = ()
) -> HardwareProfile:
    """The profile of this machine with `device` (`auto`, `cpu` or `cuda`) and the disk that holds `offload_dir`.

    Takes about a minute, up to 2 GiB of disk for a while, and up to 1 GiB of memory on host and device. sizes: of
    everything, where it should be quicker and worse; dtypes: some of the device's only.

    Raises UsageError for a device that is not there, DoesNotFitError where the disk is too full.
    """
    interrupts.check()
    opened = open_device(device, separate_budget=False)
    check_space(offload_dir)
    with _scratch(offload_dir) as scratch, torch.inference_mode():
        return _measure(opened, offload_dir, scratch, progress, sizes, dtypes or opened.dtypes)


# What is measured apart, in this order; a note of each says what disturbed it. The last leans on all others.
MEMORY, COMPUTE, DISK, STEPS = "memory", "compute", "disk", "steps"


@dataclass(frozen=True)
class _Bench:
    """Where figures are taken. host: of the host, which is `device` itself where that computes."""

    device: Bench
    host: Bench
    scratch: Scratch
    dtype: str

    @classmethod
    def of(cls, device: Device, scratch: Scratch, sizes: Sizes | None, dtype: str) -> _Bench:
        """Ready to measure: what runs first on idle cores would be slower. dtype: of what is measured in one only."""
        bench = Bench(device, sizes or (HOST if device.is_host else CARD))
        warm_cores(bench, getattr(torch, dtype))
        return cls(bench, bench if device.is_host else Bench(HostDevice(), sizes or CARD_HOST), scratch, dtype)


def parts_of(dtypes: Iterable[str]) -> list[str]:
    """The parts of a profile with these dtypes, in the order in which they are measured."""
    return [MEMORY, *(f"{COMPUTE}.{dtype}" for dtype in dtypes), DISK, STEPS]


def _measure(
    device: Device, offload_dir: Path, scratch: Scratch, progress: Progress, sizes: Sizes | None,
    dtypes: tuple[str, ...],
) -> HardwareProfile:  # fmt: skip
    machine = this_machine(device, offload_dir)
    progress(machine.description)
    at = _Bench.of(device, scratch, sizes, dtypes[0])
    found: dict[str, Any] = dict.fromkeys(FIXED, 0.0)
    compute: dict[str, ComputeRates] = {}
    notes: dict[str, str] = {}
    for part in parts_of(dtypes)[:-1]:
        progress(_words(part, offload_dir))
        with _noting(part, notes):
            figures = _figures(at, part)
            compute |= figures.pop("compute", {})
            found |= figures
    profile = HardwareProfile(
        machine=machine.short_name,
        description=machine.description,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        source=SOURCE,
        device_is_host=device.is_host,
        device_is_asynchronous=device.is_asynchronous,
        device_mem_bytes=machine.card_bytes,
        host_mem_bytes=machine.host_bytes,
        disk_mem_bytes=machine.disk_bytes,
        compute=compute,
        **found,
    )
    progress(_words(STEPS, offload_dir))
    with _noting(STEPS, notes):
        profile = _with_steps(at, profile)
    if notes:
        progress(f"{next(iter(notes.values()))}: what it disturbed is measured again when the machine is quiet")
    return replace(profile, notes=notes)


def measure_again(
    profile: HardwareProfile, device: str, offload_dir: Path, progress: Progress, seconds: float,
    sizes: Sizes | None = None,
) -> HardwareProfile:  # fmt: skip
    """The profile with some of the parts that other processes disturbed measured anew, as long as the machine is quiet.

    seconds: after which no further part is begun; each takes a few. What is disturbed again stays as it was. Raises
    what `measure` raises.
    """
    opened = open_device(device, separate_budget=False)
    smaller = sizes or _quick(HOST if opened.is_host else CARD)
    busy, began = profile.busy_parts(parts_of(profile.compute)), time.monotonic()
    if not busy or not is_quiet():
        return profile
    check_space(offload_dir)
    progress(f"the machine is quiet: measuring what was disturbed before ({', '.join(busy)}), for some seconds")
    with _scratch(offload_dir) as scratch, torch.inference_mode():
        at = _Bench.of(opened, scratch, smaller, next(iter(profile.compute)))
        for part in busy:
            notes: dict[str, str] = {}
            with _noting(part, notes):
                tried = _again(at, profile, part)
            if notes:
                progress(f"{part}: {notes[part]} again")
                break
            profile = tried
            if time.monotonic() - began > seconds:
                break
    return profile


def _again(at: _Bench, profile: HardwareProfile, part: str) -> HardwareProfile:
    """The profile with one part measured anew; its steps are then to be measured too, since they lean on all others."""
    busy = profile.busy_parts(parts_of(profile.compute))
    notes = {name: note for name, note in profile.notes.items() if not note.startswith(BUSY_NOTE)}
    notes |= {name: note for name, note in {STEPS: busy[part], **busy}.items() if name != part}
    compute = dict(profile.compute)
    if part == STEPS:
        for dtype, rates in compute.items():  # the sweep told more of them: they begin from what loops alone reach
            alone = other_rates(at.device, getattr(torch, dtype)).elementwise
            compute[dtype] = replace(rates, elementwise_bytes_per_s=alone)
        return replace(_with_steps(at, replace(profile, compute=compute)), notes=notes)
    figures = _figures(at, part)
    return replace(profile, **{**figures, "compute": compute | figures.get("compute", {}), "notes": notes})


def _figures(at: _Bench, part: str) -> dict[str, Any]:
    """Fields of the profile that one part measures; of compute those of one dtype."""
    if part == MEMORY:
        host = memory_rate(at.host)
        link = _link(at.device.device, at.host.sizes)
        return {
            "host_memory_bytes_per_s": host,
            "device_memory_bytes_per_s": host if at.host is at.device else memory_rate(at.device),
            "h2d_bytes_per_s": link.h2d,
            "d2h_bytes_per_s": link.d2h,
            "h2d_unpinned_bytes_per_s": link.h2d_unpinned,
            "d2h_unpinned_bytes_per_s": link.d2h_unpinned,
            "transfer_s": link.transfer_s,
            "kernel_s": kernel_seconds(at.device),
            "overlay_bytes_per_s": overlay_rate(at.device, getattr(torch, at.dtype)),
        }
    if part == DISK:
        storage = _storage(at.device, at.host, at.scratch)
        return {
            "disk_read_bytes_per_s": storage.disk.read,
            "disk_write_bytes_per_s": storage.disk.write,
            "disk_request_s": storage.disk.request_s,
            "disk_read_beside_compute": storage.read_beside_compute,
            "compute_beside_disk_read": storage.compute_beside_read,
        }
    dtype = part.partition(".")[2]
    return {"compute": {dtype: compute_rates(at.device, at.host, dtype)}}


def _with_steps(at: _Bench, profile: HardwareProfile) -> HardwareProfile:
    """Fixed costs of the engine's loop, on top of what the profile says of everything else."""
    nothing: dict[str, Any] = dict.fromkeys(FIXED, 0.0)
    costs = step_costs(at.device, replace(profile, **nothing), at.dtype, at.scratch.folder)
    return replace(_with_elementwise(profile, at.dtype, costs), **{k: getattr(costs, k) for k in FIXED})


def _words(part: str, offload_dir: Path) -> str:
    named = {
        MEMORY: "memory and the link between host and device", DISK: f"disk tier in {offload_dir}",
        STEPS: "fixed costs of the engine's loop",
    }  # fmt: skip
    return named.get(part) or part.replace(".", " in ")


def _quick(sizes: Sizes) -> Sizes:
    """For a few seconds a part: fewer rounds and shapes, a smaller file, and no product that takes long by itself."""
    shapes = {name: getattr(sizes, name)[::2] for name in ("widths", "hidden", "heads")}
    rows = (*sizes.rows[:-1:2], sizes.rows[-1])
    most = {"figure_s": 0.03, "longest_s": 0.15, "disk_bytes": 256 * MIB, "disk_s": 1.0, "beside_s": 0.5}
    return replace(
        sizes, **{name: min(value, getattr(sizes, name)) for name, value in most.items()}, **shapes, rows=rows
    )


@contextmanager
def _noting(part: str, notes: dict[str, str]) -> Iterator[None]:
    """A note of the part where other processes took enough of the cores meanwhile, or of the disks before, to be seen.

    While this process uses a disk nobody can tell what others do: devices on devices count its bytes twice.
    """
    disk = _watched().of_disks() if part == DISK else ""
    neighbours = BackgroundLoad()
    yield
    disturbed = " and ".join(filter(None, (neighbours.of_cores(), disk)))
    if disturbed:
        notes[part] = f"{BUSY_NOTE} {disturbed}"


def _watched() -> BackgroundLoad:
    """What others did in half a second in which this process did nothing."""
    neighbours = BackgroundLoad()
    time.sleep(QUIET_S)
    return neighbours


def is_quiet() -> bool:
    """Does no other process take enough of cores or disks now to be seen in figures?"""
    neighbours = _watched()
    return not neighbours.of_cores() and not neighbours.of_disks()


def _with_elementwise(profile: HardwareProfile, dtype: str, costs: StepCosts) -> HardwareProfile:
    """The rate that the sweep of one dtype tells; those of the others change as much."""
    change = costs.elementwise_bytes_per_s / profile.rates(dtype).elementwise_bytes_per_s
    compute = {
        name: replace(rates, elementwise_bytes_per_s=rates.elementwise_bytes_per_s * change)
        for name, rates in profile.compute.items()
    }
    return replace(profile, compute=compute)


def _link(device: Device, sizes: Sizes) -> LinkRates:
    """Where the host computes, that of the stand-in device: it predicts three tiers without a card."""
    with _mover(StandInDevice() if device.is_host else device) as mover:
        return link_rates(Bench(mover.device, sizes), mover)


def _storage(bench: Bench, host: Bench, scratch: Scratch) -> _Storage:
    with _mover(host.device) as mover:
        probe = DiskProbe(host, mover, scratch)
        try:
            disk = probe.rates()
            return _Storage(disk, *beside_shares(bench, mover, probe, getattr(torch, bench.device.dtypes[0])))
        finally:
            # The lanes end first, as the engine does it: nothing reads a file that is closed.
            with interrupts.held():
                mover.lanes.close()
                probe.close()


@contextmanager
def _mover(device: Device) -> Iterator[Mover]:
    """A mover with the lanes of a run."""
    lanes = Lanes(LANE_THREADS, Timeline())
    try:
        yield Mover(device, lanes)
    finally:
        with interrupts.held():
            lanes.close()


@contextmanager
def _scratch(offload_dir: Path) -> Iterator[Scratch]:
    """A folder that is gone afterwards, however this ends; what kill -9 leaves, the next run removes."""
    with interrupts.held():
        scratch = Scratch(offload_dir)
    try:
        interrupts.check()
        yield scratch
    finally:
        with interrupts.held():
            scratch.close()


AGAIN_S = 5.0  # of a run's start, for what a busy machine disturbed


def profile_of_this_machine(
    device: str, offload_dir: Path, progress: Callable[[str], None], measure_missing: bool
) -> HardwareProfile:
    """The cached profile; where there is none, one that is measured and cached now, or nominal speeds.

    device: `auto`, `cpu` or `cuda`. measure_missing: also what a busy machine disturbed, some seconds of it.
    """
    found = cached_profile(device, offload_dir)
    if found is not None:
        return calmer(found, device, offload_dir, progress) if measure_missing and found.was_disturbed else found
    kept = cache_path(device, offload_dir)
    if os.path.exists(kept):  # False where it cannot even be looked for
        progress(f"the profile that is kept in {kept} cannot be used: broken, or of another version")
    if not measure_missing:
        return nominal_profile(open_device(device, separate_budget=False).is_host)
    progress("this machine has no profile yet: measuring it once, which takes one to two minutes")
    return _kept(measure(device, offload_dir, progress), device, offload_dir, progress)


def calmer(
    profile: HardwareProfile, device: str, offload_dir: Path, progress: Callable[[str], None]
) -> HardwareProfile:
    """This machine's profile, of which some seconds are spent on what other processes disturbed, if it is quiet now.

    What is still of a busy machine is said, and measured again another time. Takes up to 1 GiB of memory.
    """
    try:
        found = measure_again(profile, device, offload_dir, progress, AGAIN_S)
    except DoesNotFitError:  # a disk without room for it
        found = profile
    if found.was_disturbed:
        parts = ", ".join(found.busy_parts(parts_of(found.compute)))
        progress(f"predictions come from a profile measured on a busy machine; when it is quiet, again: {parts}")
    return found if found is profile else _kept(found, device, offload_dir, progress)


def _kept(profile: HardwareProfile, device: str, offload_dir: Path, progress: Callable[[str], None]) -> HardwareProfile:
    try:
        store(profile, device, offload_dir)
    except FlexgenError as error:  # a home that cannot be written to: this run has what it needs
        progress(f"not kept for later: {error}")
    return profile
