"""What a run may hold of this machine; where no budget was given, what is free, less a margin."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from flexgen_h2o.config import MemoryBudget
from flexgen_h2o.tiers.device import Device
from flexgen_h2o.units import GIB, DiskBudget, less_margin

DISK_MARGIN_BYTES = 2 * GIB
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Site:
    """Where a run is held: the device that computes, the bytes that each tier may hold (None: any number), the folder
    of the disk tier."""

    device: Device
    budgets: dict[str, int | None]
    offload_dir: Path


def resolve_budgets(
    budget: MemoryBudget, device: Device, offload_dir: Path, processes: int = 1
) -> dict[str, int | None]:
    """Bytes by tier: the given budgets (of the disk no more than is free), and what is free less a margin for others.

    Where the device is host memory there is no device tier (0). processes: of this run on this machine, which share
    its RAM and its disk evenly.
    """
    host = budget.host if budget.host is not None else less_margin(free_host_bytes()) // processes
    folder = next(p for p in (offload_dir, *offload_dir.absolute().parents) if p.exists())
    free = shutil.disk_usage(folder).free
    most = max(0, free - DISK_MARGIN_BYTES) // processes if budget.disk is None else min(budget.disk, free // processes)
    disk = DiskBudget(most, free // processes)
    if device.is_host:
        return {"device": 0, "host": host, "disk": disk}
    on_device = budget.device if budget.device is not None else less_margin(_free_device_bytes(device))
    return {"device": on_device, "host": host, "disk": disk}


def free_host_bytes() -> int:
    """RAM that can be taken now: what the machine has available, or the cgroup's limit leaves."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit != "max":
            stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
            # Clean page cache counts as used there, but is given back when memory is asked for.
            used = int((_CGROUP / "memory.current").read_text()) - int(stat.get("inactive_file", 0))
            free = min(free, int(limit) - used)
    except (OSError, ValueError):
        pass  # no cgroup limit
    return free


def _free_device_bytes(device: Device) -> int:
    return int(torch.cuda.mem_get_info(device.torch_device)[0])
