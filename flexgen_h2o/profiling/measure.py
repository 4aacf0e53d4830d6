"""Measures a whole hardware profile in about a minute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path

import torch

from flexgen_h2o import interrupts
from flexgen_h2o.engine import LANE_THREADS
from flexgen_h2o.profile import BUSY_NOTE, HardwareProfile
from flexgen_h2o.profiling.bench import Bench
from flexgen_h2o.profiling.beside import beside_shares
from flexgen_h2o.profiling.compute import compute_rates
from flexgen_h2o.profiling.disk import DiskProbe, DiskRates, check_space
from flexgen_h2o.profiling.links import LinkRates, link_rates
from flexgen_h2o.profiling.machine import Neighbours, this_machine
from flexgen_h2o.profiling.matmul import warm_cores
from flexgen_h2o.profiling.memory import kernel_seconds, memory_rate
from flexgen_h2o.profiling.overlay import overlay_rate
from flexgen_h2o.profiling.sizes import CARD, CARD_HOST, HOST, Sizes
from flexgen_h2o.profiling.steps import FIXED, StepCosts, step_costs
from flexgen_h2o.tiers.device import Device, HostDevice, StandInDevice, open_device
from flexgen_h2o.tiers.disk import Scratch
from flexgen_h2o.tiers.mover import Mover
from flexgen_h2o.tiers.transfer import Lanes
from flexgen_h2o.timeline import Timeline

SOURCE = f"measured by python -m flexgen_h2o.hardware, torch {torch.__version__}"
DISTURBED = 0.05  # share of all cores
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
    opened = open_device(device, separate_budget=False)
    check_space(offload_dir)
    with _scratch(offload_dir) as scratch, torch.inference_mode():
        return _measure(opened, offload_dir, scratch, progress, sizes, dtypes or opened.dtypes)


def _measure(
    device: Device, offload_dir: Path, scratch: Scratch, progress: Progress, sizes: Sizes | None,
    dtypes: tuple[str, ...],
) -> HardwareProfile:  # fmt: skip
    machine, neighbours = this_machine(device, offload_dir), Neighbours()
    bench = Bench(device, sizes or (HOST if device.is_host else CARD))
    host = bench if device.is_host else Bench(HostDevice(), sizes or CARD_HOST)
    progress(machine.description)
    warm_cores(bench, getattr(torch, dtypes[0]))
    progress("memory and the link between host and device")
    host_memory = memory_rate(host)
    device_memory = host_memory if host is bench else memory_rate(bench)
    link = _link(device, host.sizes)
    compute = {}
    for dtype in dtypes:
        progress(f"compute in {dtype}")
        compute[dtype] = compute_rates(bench, host, dtype)
    progress(f"disk tier in {offload_dir}")
    storage = _storage(bench, host, scratch)
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
        disk_read_bytes_per_s=storage.disk.read,
        disk_write_bytes_per_s=storage.disk.write,
        h2d_bytes_per_s=link.h2d,
        d2h_bytes_per_s=link.d2h,
        h2d_unpinned_bytes_per_s=link.h2d_unpinned,
        d2h_unpinned_bytes_per_s=link.d2h_unpinned,
        host_memory_bytes_per_s=host_memory,
        device_memory_bytes_per_s=device_memory,
        disk_read_beside_compute=storage.read_beside_compute,
        compute_beside_disk_read=storage.compute_beside_read,
        kernel_s=kernel_seconds(bench),
        transfer_s=link.transfer_s,
        disk_request_s=storage.disk.request_s,
        overlay_bytes_per_s=overlay_rate(bench, getattr(torch, dtypes[0])),
        step_s=0.0,
        attention_step_s=0.0,
        eviction_step_s=0.0,
        row_s=0.0,
        short_read_compute_s=0.0,
        cache_load_step_s=0.0,
        compute=compute,
    )
    progress("fixed costs of the engine's loop")
    costs = step_costs(bench, profile, dtypes[0], scratch.folder)
    notes = _notes(neighbours.share(), progress)
    return replace(_with_elementwise(profile, dtypes[0], costs), notes=notes, **{k: getattr(costs, k) for k in FIXED})


def _with_elementwise(profile: HardwareProfile, dtype: str, costs: StepCosts) -> HardwareProfile:
    """The rate that the sweep of one dtype tells; those of the others change as much."""
    change = costs.elementwise_bytes_per_s / profile.rates(dtype).elementwise_bytes_per_s
    compute = {
        name: replace(rates, elementwise_bytes_per_s=rates.elementwise_bytes_per_s * change)
        for name, rates in profile.compute.items()
    }
    return replace(profile, compute=compute)


def _notes(others: float, progress: Progress) -> dict[str, str]:
    """A note where other processes took enough of the cores to be seen in the figures."""
    if others < DISTURBED:
        return {}
    progress(f"other processes took {others:.0%} of the cores: measure again when the machine is quiet")
    return {"compute": f"{BUSY_NOTE} {others:.0%} of the cores"}


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
