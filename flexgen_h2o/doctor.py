"""List what would make a run slow or fail on this machine, in a few seconds.

Each line is `ok`, or `look` with what to do. The exit code is 1 if something makes runs slow or
fail.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from flexgen_h2o.cli_common import not_empty, run_cli
from flexgen_h2o.core.cgroups import memory_limits, usable_cores
from flexgen_h2o.core.descriptors import descriptor_limits
from flexgen_h2o.core.errors import EXIT_DONE, EXIT_FAILED, FlexgenError
from flexgen_h2o.core.files import (
    DEFAULT_OFFLOAD_DIR,
    existing_folder,
    usable_path,
    user_cache_dir,
)
from flexgen_h2o.core.libraries import LIBRARIES, is_tried
from flexgen_h2o.core.units import GIB, MIB, aligned, format_bytes
from flexgen_h2o.parser import OneLineParser

if TYPE_CHECKING:
    from packaging.requirements import Requirement

SLOW_DISK = 5e8  # bytes per second of reads
LITTLE_MEMORY = 2 * GIB  # free memory: torch, numba and small buffers take about 1 GiB
FULL_DISK = 10 * GIB
TOO_FEW_OPEN_FILES = 256
FEW_OPEN_FILES = 1024
ENOUGH_OPEN_FILES = 2048
PROBED_BYTES = 256 * MIB
PROBED_S = 0.4
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
IN_MEMORY = {"tmpfs", "ramfs"}
CARD_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
MEASURE = "measure it: flexgen-h2o hardware, one to two minutes"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str  # what was looked at
    text: str  # what was found
    advice: str = ""  # what to do; empty if nothing needs to be done
    hurts: bool = False  # whether runs are slow or fail as it is


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Return the exit code: 1 if a finding hurts (docs/reference/exit-codes.md).
    """
    return run_cli("doctor", _run, argv)


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="flexgen-h2o doctor", description=__doc__)
    where = f"whose disk is measured (default {DEFAULT_OFFLOAD_DIR})"
    parser.add_argument("--offload-dir", type=not_empty, default=DEFAULT_OFFLOAD_DIR, help=where)
    return parser


def _run(argv: list[str] | None) -> int:
    folder = usable_path(_parser().parse_args(argv).offload_dir, "--offload-dir")
    found = [*findings(folder)]
    lines = [
        ("look", one.name, f"{one.text}; {one.advice}")
        if one.advice
        else ("ok", one.name, one.text)
        for one in found
    ]
    print("\n".join(aligned(lines)))
    return EXIT_FAILED if any(one.hurts for one in found) else EXIT_DONE


def findings(offload_dir: Path) -> Iterator[Finding]:
    """Yield all findings, in the order in which they are shown."""
    yield from installed()
    yield insides()
    yield numba_cache()
    yield wait_policy(os.environ.get("OMP_WAIT_POLICY", ""))
    yield threads()
    yield open_files(*descriptor_limits())
    yield from memory()
    yield huge_pages()
    yield card()
    yield disk(offload_dir)
    yield profile(offload_dir)


# ---- The installation


def installed() -> Iterator[Finding]:
    """Yield versions compared with the tested ones, and extras, as the package's own metadata has
    them.
    """
    from packaging.requirements import Requirement

    names = ("torch", "transformers", "numba")
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in names)
    try:
        told = [Requirement(line) for line in metadata.requires("flexgen-h2o") or ()]
    except metadata.PackageNotFoundError:
        yield Finding(
            "versions", f"{versions}; flexgen_h2o is run from source, and is not installed"
        )
        return

    def needs(extra: str) -> list[Requirement]:
        where = {"extra": extra}
        return [
            one
            for one in told
            if one.marker and one.marker.evaluate(where) and not one.marker.evaluate()
        ]

    others = [str(one).partition(";")[0].strip() for one in needs("tested") if not _is_there(one)]
    advice = (
        f"tested are {', '.join(others)}: pip install -e '.[tested]' in a clone" if others else ""
    )
    yield Finding("versions", versions, advice)
    extras = [
        name
        for name in metadata.metadata("flexgen-h2o").get_all("Provides-Extra") or ()
        if name != "tested"
    ]
    here = [name for name in extras if all(map(_is_there, needs(name)))]
    missing = [name for name in extras if name not in here]
    text = f"{', '.join(here) or 'none'} installed; not there: {', '.join(missing) or 'none'}"
    yield Finding("extras", text)


def insides() -> Finding:
    """Compare the libraries whose insides are used with the versions that were tried."""
    here = [one for one in LIBRARIES if find_spec(one.module) is not None]
    text = ", ".join(f"{one.name} {metadata.version(one.name)} ({one.tried})" for one in here)
    untried = "; ".join(f"{one.name}: {one.used}: {one.check}" for one in here if not is_tried(one))
    advice = f"in brackets are the versions that were tried ({untried})" if untried else ""
    return Finding("libraries", text, advice)


def _is_there(requirement: Requirement) -> bool:
    try:
        return requirement.specifier.contains(metadata.version(requirement.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


def numba_cache() -> Finding:
    from flexgen_h2o.kernels.jit import cache_folder

    folder = cache_folder()
    if folder is None:
        advice = (
            "set NUMBA_CACHE_DIR to a folder that can be written to: each run compiles for 5 "
            "to 15 s"
        )
        return Finding("numba cache", "no folder can be written to", advice, hurts=True)
    is_filled = next(folder.parent.rglob("*.nbi"), None) is not None
    text = "has compiled loops" if is_filled else "is empty: the first run compiles for 5 to 15 s"
    return Finding("numba cache", f"{folder} {text}")


# ---- Cores and memory


def wait_policy(value: str) -> Finding:
    text = f"OMP_WAIT_POLICY is {value or 'not set'}"
    if value.upper() == "PASSIVE":
        return Finding("waiting threads", text)
    advice = "unset it: threads that spin take the cores from those that read"
    return Finding("waiting threads", text, advice, hurts=True)


def threads() -> Finding:
    """Compare OpenMP's threads with the cores that this process may use."""
    import torch

    count = torch.get_num_threads()
    cores = usable_cores()
    text = f"{count} for {cores:g} cores"
    if count > max(1.0, cores):
        advice = (
            f"export OMP_NUM_THREADS={max(1, int(cores))}: more threads than cores wait for "
            "one another"
        )
        return Finding("threads", text, advice, hurts=True)
    if count < int(cores) // 2:  # torch itself chooses one thread per two hardware threads
        return Finding(
            "threads", text, "raise OMP_NUM_THREADS, or unset it: cores are idle", hurts=True
        )
    return Finding("threads", text)


def open_files(soft: int, hard: int) -> Finding:
    """Report `ulimit -n`.

    Weights in many files, a server's connections and libraries need descriptors.
    """
    text = f"at most {soft} at a time (ulimit -n)"
    if soft >= FEW_OPEN_FILES:
        return Finding("open files", text)
    wanted = min(ENOUGH_OPEN_FILES, hard)
    advice = f"ulimit -n {wanted}" if wanted > soft else "ask the administrator for more"
    advice += f": a model in many files and a server's connections need up to {ENOUGH_OPEN_FILES}"
    return Finding("open files", text, advice, hurts=soft < TOO_FEW_OPEN_FILES)


def memory() -> Iterator[Finding]:
    import psutil

    from flexgen_h2o.tiers.device import free_host_bytes, host_memory

    whole = host_memory()[0]
    free = free_host_bytes()
    little = (
        "end what else holds memory: a run needs about 1 GiB beside its budgets"
        if free < LITTLE_MEMORY
        else ""
    )
    yield Finding(
        "memory", f"{format_bytes(free)} of {format_bytes(whole)} are free", little, bool(little)
    )
    tightest = min(memory_limits(), key=lambda limit: limit.room, default=None)
    if tightest is None or tightest.nbytes >= whole:
        yield Finding("cgroup", "no memory limit")
    else:
        held = f"{format_bytes(tightest.used)} of at most {format_bytes(tightest.nbytes)}"
        yield Finding("cgroup", f"holds {held}; budgets respect it")
    swap = psutil.swap_memory()
    advice = (
        "end what else holds memory: what is swapped out comes back slowly"
        if swap.used > whole // 10
        else ""
    )
    yield Finding(
        "swap",
        f"{format_bytes(swap.used)} of {format_bytes(swap.total)} in use" if swap.total else "none",
        advice,
    )


def huge_pages() -> Finding:
    line = _first_line(HUGE_PAGES)
    chosen = line.partition("[")[2].partition("]")[0]
    if chosen in ("always", "madvise"):
        return Finding("huge pages", f"transparent_hugepage is {chosen}")
    advice = f"echo madvise | sudo tee {HUGE_PAGES}: reads from disk are two to three times faster"
    return Finding(
        "huge pages",
        f"transparent_hugepage is {chosen or 'unknown to this kernel'}",
        advice,
        bool(chosen),
    )


# ---- Devices


def card() -> Finding:
    from flexgen_h2o.tiers.device import open_device

    device = open_device("auto", separate_budget=False)
    found = device.card()
    if found is None:
        if any(map(os.path.exists, CARD_FILES)):
            advice = (
                "install a torch with CUDA that this driver can run (README.md), or give "
                "--device cpu"
            )
            return Finding("card", "there is one, and torch cannot use it", advice, hurts=True)
        return Finding("card", "none: runs are on the CPU")
    text = (
        f"{found[0]}, {format_bytes(device.free_bytes() or 0)} of {format_bytes(found[1])} are free"
    )
    advice = (
        ""
        if find_spec("triton")
        else "pip install -e '.[gpu]' in a clone: without triton its kernels are slow ones"
    )
    return Finding("card", text, advice, bool(advice))


def disk(offload_dir: Path) -> Finding:
    """Read and write 256 MiB as runs do, and report the speed."""
    from flexgen_h2o.planner.measure.bench import HOST, Bench
    from flexgen_h2o.planner.measure.engine import open_probe, open_scratch
    from flexgen_h2o.planner.measure.run import mount_of
    from flexgen_h2o.tiers.device import HostDevice

    sizes = replace(HOST, disk_bytes=PROBED_BYTES, disk_s=PROBED_S)
    try:
        with (
            open_scratch(offload_dir) as scratch,
            open_probe(Bench(HostDevice(), sizes), scratch) as probe,
        ):
            rates = probe.rates()
            is_direct = probe.is_direct
    except FlexgenError as error:
        return Finding("disk", str(error), "give another --offload-dir", hurts=True)
    read = rates["disk_read_bytes_per_s"]
    written = rates["disk_write_bytes_per_s"]
    folder = existing_folder(offload_dir)
    mount = mount_of(folder)
    free = shutil.disk_usage(folder).free
    direct = "O_DIRECT" if is_direct else "without O_DIRECT"
    text = f"{mount}: reads {read / 1e9:.2g} GB/s, writes {written / 1e9:.2g} GB/s {direct}"
    text += f", {format_bytes(free)} free"
    advice = ""
    if IN_MEMORY.intersection(mount.split()):
        advice = "give an --offload-dir on a disk: what is offloaded to this one stays in RAM"
    elif not is_direct:
        advice = (
            "give an --offload-dir on a local ext4 or xfs disk: this file system takes reads "
            "through the page cache"
        )
    elif read < SLOW_DISK:
        advice = "give an --offload-dir on a faster disk: NVMe reads 2 to 7 GB/s"
    full = "free space for weights and KV" if free < FULL_DISK else ""
    return Finding("disk", text, advice or full, hurts=bool(advice))


def profile(offload_dir: Path) -> Finding:
    from flexgen_h2o.engine.report import MEASURED_BUSY
    from flexgen_h2o.planner.measure.run import cached_profile

    found = cached_profile("auto", offload_dir)
    if found is None:
        others = len([*user_cache_dir().glob("profile-*.json")])
        kept = "one of another is kept" if others == 1 else f"{others} of others are kept"
        text = f"none of this machine, disk and torch ({kept})" if others else "none is kept"
        return Finding("profile", text, MEASURE)
    text = f"{found.machine}, measured {found.date[:10]}"
    return Finding("profile", text, MEASURED_BUSY if found.was_disturbed else "")


def _first_line(path: Path) -> str:
    """Return the first line of a file that not every system has. Empty if it is missing."""
    try:
        return path.read_text().partition("\n")[0].strip()
    except OSError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
