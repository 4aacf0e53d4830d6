"""Read the limits of memory and CPU time that control groups set for this process.

A process is in one group of a tree, and every group above it limits it too. Version 2 has one tree
for all controllers, version 1 one tree per controller, and a hybrid system has both. A container
may see the whole tree, or only its own part of it. The module imports nothing heavy.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Files of this process with its groups (`cgroup`) and with what is mounted (`mountinfo`).
PROCESS = Path("/proc/self")
USUAL_MOUNT = Path("/sys/fs/cgroup")
UNLIMITED = 2**60  # version 1 writes a number of about 2**63 bytes if there is no limit
THREADS_VARIABLE = "OMP_NUM_THREADS"
_ESCAPED = re.compile(r"\\([0-7]{3})")  # a space in a line of mountinfo is \040


@dataclass(frozen=True)
class MemoryLimit:
    """The memory limit of one group. `memory_limits` makes it."""

    nbytes: int  # that all processes of the group may hold together
    used: int  # bytes that they hold, without page cache that is given back when needed

    @property
    def room(self) -> int:
        """Bytes that are left."""
        return self.nbytes - self.used


def memory_limits() -> list[MemoryLimit]:
    """Return the memory limits that hold for this process, in any order.

    The result is empty if there is no limit, or none that can be read.
    """
    found = []
    for folder in _groups("", "memory"):
        limits = (_number(folder / name) for name in ("memory.max", "memory.high"))
        cached = ("inactive_file", "active_file", "file_mapped")
        used = _used(folder, "memory.current", *cached)
        found += [MemoryLimit(limit, used) for limit in limits if limit is not None]
    for i, folder in enumerate(_groups("memory", "memory")):
        # Without hierarchy, a group of version 1 does not limit the groups below it.
        if i and _number(folder / "memory.use_hierarchy") == 0:
            continue
        # It includes groups above, also those that this process cannot see.
        above = _stat(folder).get("hierarchical_memory_limit")
        own = _number(folder / "memory.limit_in_bytes")
        cached = ("total_inactive_file", "total_active_file", "total_mapped_file")
        used = _used(folder, "memory.usage_in_bytes", *cached)
        found += [MemoryLimit(limit, used) for limit in (own, above) if limit is not None]
    return [limit for limit in found if limit.nbytes < UNLIMITED]


def usable_cores() -> float:
    """Return how many cores this process may use, by its affinity and by quotas of CPU time.

    A quota may be a part of a core.
    """
    try:
        cores = float(len(os.sched_getaffinity(0)))
    except (AttributeError, OSError):  # not every system has it
        cores = float(os.cpu_count() or 1)
    return min([cores, *_quotas()])


def limit_threads() -> None:
    """Let OpenMP use no more threads than a quota of CPU time has cores, unless the user chose.

    More threads than that are stopped for a part of each period, and wait for one another. This
    works until torch is imported.
    """
    quota = min(_quotas(), default=None)
    if quota is not None and quota < (os.cpu_count() or 1):
        os.environ.setdefault(THREADS_VARIABLE, str(max(1, int(usable_cores()))))


def _quotas() -> Iterator[float]:
    """Yield the cores that each group with a quota may use."""
    for folder in _groups("", "cpu"):
        quota, _, period = _text(folder / "cpu.max").partition(" ")
        yield from _share(quota, period)
    for folder in _groups("cpu", "cpu"):
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        yield from _share(*(_text(folder / name) for name in names))


def _share(quota: str, period: str) -> Iterator[float]:
    """Yield quota / period; nothing if there is no quota."""
    if quota.isdecimal() and period.isdecimal() and int(quota) and int(period):
        yield int(quota) / int(period)


def _groups(controller: str, name: str) -> Iterator[Path]:
    """Yield the folders of this process's group and of all groups above it that it can see.

    controller: of version 1; "" for the tree of version 2.
    name: of the folder in which version 1 usually mounts the controller's tree.
    """
    own = _own_group(controller)
    if own is None:
        return
    mounts = [(root, place) for root, place in _mounts(controller) if place.is_dir()]
    if not mounts:  # mountinfo cannot be read, or something else hides the mount
        mounts = [("/", USUAL_MOUNT / name if controller else USUAL_MOUNT)]
    for root, place in mounts:
        below = _below(own, root)
        for count in range(len(below), -1, -1):
            yield place.joinpath(*below[:count])


def _own_group(controller: str) -> str | None:
    """Return the path of this process's group in a controller's tree; None if it has none there."""
    for line in _text(PROCESS / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            return path.removesuffix(" (deleted)")
    return None


def _mounts(controller: str) -> Iterator[tuple[str, Path]]:
    """Yield the root and the place of each mount of a controller's tree.

    The root is the group that the place shows.
    """
    for line in _text(PROCESS / "mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields = [_ESCAPED.sub(lambda code: chr(int(code[1], 8)), x) for x in before.split()]
        kind, *_, options = after.split() or [""]
        is_tree = kind == "cgroup" and controller in options.split(",")
        if len(fields) > 4 and (is_tree if controller else kind == "cgroup2"):
            yield fields[3], Path(fields[4])


def _below(group: str, root: str) -> list[str]:
    """Return the names that lead from a mount's root to a group.

    Both may begin with `..`, if they are outside the process's namespace. If the group is not
    below the root, the path is one of another namespace: all its names are tried.
    """
    names = [name for name in group.split("/") if name]
    above = [name for name in root.split("/") if name]
    if names[: len(above)] == above:
        return names[len(above) :]
    return [] if ".." in names else names


def _used(folder: Path, name: str, inactive: str, active: str, mapped: str) -> int:
    """Return the bytes that a group holds, without page cache.

    Files that processes have mapped, such as their libraries, count: they are needed again at once.
    """
    stat = _stat(folder)
    cached = max(0, stat.get(inactive, 0) + stat.get(active, 0) - stat.get(mapped, 0))
    return max(0, (_number(folder / name) or 0) - cached)


def _stat(folder: Path) -> dict[str, int]:
    """Return the numbers of a group's memory.stat."""
    pairs = (line.split() for line in _text(folder / "memory.stat").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _number(path: Path) -> int | None:
    """Return the number in a file; None if there is none, as for `max`."""
    text = _text(path)
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    """Return a file's text; "" if it cannot be read."""
    with suppress(OSError, ValueError):
        return path.read_text(errors="replace").strip()
    return ""
