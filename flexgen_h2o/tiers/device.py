"""The device tier: host memory itself, ordinary memory with its own budget, or a CUDA card.

The module also has buffers and budgets. The rest of the engine never asks which kind of device it
has.
"""

from __future__ import annotations

import mmap
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import psutil
import torch

from flexgen_h2o.core.cgroups import memory_limits
from flexgen_h2o.core.config import MemoryBudget
from flexgen_h2o.core.errors import DoesNotFitError, FlexgenError, UsageError
from flexgen_h2o.core.files import existing_folder
from flexgen_h2o.core.units import (
    GIB,
    PAGE,
    DiskBudget,
    format_bytes,
    format_free,
    less_margin,
    round_up,
)
from flexgen_h2o.tiers.stream import NOTHING, Waitable

HUGE_PAGE = 2 * 2**20
# Memory that libraries allocate through torch's allocator: a workspace of cuBLAS, up to 32 MiB for
# each of two streams, and what graphs allocate.
CARD_LIBRARY_BYTES = 96 * 2**20


def host_buffer(nbytes: int) -> torch.Tensor:
    """Return a uint8 tensor of `nbytes` in host memory, with every page touched.

    Raises MemoryError if the machine does not have that much. Large buffers ask for huge pages.
    O_DIRECT reads into them about twice as fast as into 4 KiB pages, because the disk sees whole
    requests (bench/results/notes/offloading.md, "Huge pages").
    """
    size = max(1, nbytes)
    align = HUGE_PAGE if size >= HUGE_PAGE else PAGE
    try:
        memory = mmap.mmap(
            -1, round_up(size, PAGE) + align, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
    except OSError as error:
        raise MemoryError(f"{format_bytes(nbytes)}: {error.strerror}") from error
    if align == HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # transparent huge pages are off: slower reads, same bytes
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % align
    buffer = whole[start : start + nbytes]
    buffer.zero_()
    return buffer


class Device:
    """The memory in which layers are computed: ordinary RAM of a CPU, unless a subclass differs."""

    torch_device = torch.device("cpu")
    is_host: bool  # it is host memory, and nothing is copied to or from it
    tier: str  # the tier to whose budget its buffers are charged
    is_asynchronous = False  # compute is queued, and the thread that issues it continues
    has_graphs = False  # see `graph`

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes in which the device computes fast, the usual one first."""
        return ("bfloat16", "float32")

    def card(self) -> tuple[str, int] | None:
        """Return the card's name and bytes of memory; None without a card."""
        return None

    def compute_dtype(self, asked: str | None, stored: str) -> str:
        """Return the dtype to compute in.

        It is the one that was asked for, or else the stored one if this device is fast with it.
        CPUs compute float16 many times slower than bfloat16: it is refused if asked for, replaced
        if stored.
        """
        if asked == "float16":
            raise UsageError(
                "--dtype float16: far too slow on a CPU; use bfloat16, or float32 to lose nothing"
            )
        return asked or ("bfloat16" if stored == "float16" else stored)

    def free_bytes(self) -> int | None:
        """Return the free bytes of the card's memory; None without a card."""
        return None

    def limit_memory(self, nbytes: int) -> None:
        """Limit this process on the card to a budget of `nbytes`, plus CARD_LIBRARY_BYTES."""
        assert nbytes >= 0

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Return a uint8 buffer in device memory."""
        return host_buffer(nbytes)

    def host_staging(self, nbytes: int) -> torch.Tensor:
        """Return a uint8 host buffer that is copied to and from this device at full speed.

        For CUDA it is pinned.
        """
        return host_buffer(nbytes)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy between host and device, on a worker thread. Returns when the bytes are there.

        The dtypes may differ.
        """
        self.start_copy(dst, src).wait()

    def start_copy(self, dst: torch.Tensor, src: torch.Tensor) -> Waitable:
        """Begin such a copy and return an event that is done when the bytes are there.

        `src` is read until then.
        """
        dst.copy_(src)
        return NOTHING

    def copy_stream(self) -> AbstractContextManager[object]:
        """Return a context in which a worker thread's work does not queue behind compute.

        The thread itself waits for the results.
        """
        return nullcontext()

    def fence(self) -> Waitable:
        """Return an event that is done when all compute issued so far is."""
        return NOTHING  # CPU operators return when they are done

    def read_back(self, found: torch.Tensor) -> tuple[torch.Tensor, Waitable]:
        """Return what compute will have put into `found`, in host memory, and an event to wait for.

        The result may be read only after that event.
        """
        return found, self.fence()

    def graph_pool(self) -> object:
        """Return a memory pool that graphs share.

        The graphs must run one after the other.
        """
        return None

    def graph(self, issue: Callable[[], None], pool: object) -> Callable[[], None]:
        """Return a function that runs at once all that `issue` gives to the card.

        It may be called again and again. It uses the tensors that `issue` used, which must stay.
        `issue` may neither wait for the card nor copy anything to it from the host, and what it
        launches must have been launched before. Raises FlexgenError if the card cannot make a
        graph.
        """
        return issue


class HostDevice(Device):
    """A CPU that computes in the host tier's memory: two tiers."""

    is_host = True
    tier = "host"


class StandInDevice(Device):
    """A device tier made of ordinary memory with its own budget: three tiers without a card."""

    is_host = False
    tier = "device"


class CudaDevice(Device):
    """One CUDA card.

    Each worker thread runs the copies that it issues on a side stream of its own.
    """

    is_host = False
    tier = "device"
    is_asynchronous = True
    has_graphs = True

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())

    @property
    def dtypes(self) -> tuple[str, ...]:
        return ("float16", "bfloat16", "float32") if self._has_bf16 else ("float16", "float32")

    @property
    def _has_bf16(self) -> bool:
        """Whether the card has tensor cores for bfloat16. Cards before Ampere do not."""
        return torch.cuda.get_device_capability(self.torch_device) >= (8, 0)

    def card(self) -> tuple[str, int]:
        about = torch.cuda.get_device_properties(self.torch_device)
        return str(about.name), int(about.total_memory)

    def compute_dtype(self, asked: str | None, stored: str) -> str:
        """Return the dtype to compute in.

        On a card without bfloat16, that dtype is refused if asked for and replaced if stored.
        """
        if asked == "bfloat16" and not self._has_bf16:
            raise UsageError(
                "--dtype bfloat16: this GPU has no tensor cores for it; use --dtype float16, or "
                "float32"
            )
        return asked or ("float16" if stored == "bfloat16" and not self._has_bf16 else stored)

    def free_bytes(self) -> int:
        """Return the free bytes of the card's memory.

        They include what torch's allocator keeps of an engine that was closed.
        """
        kept = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(
            self.torch_device
        )
        return int(torch.cuda.mem_get_info(self.torch_device)[0]) + kept

    def limit_memory(self, nbytes: int) -> None:
        share = (nbytes + CARD_LIBRARY_BYTES) / self.card()[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), self.torch_device)

    def buffer(self, nbytes: int) -> torch.Tensor:
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=self.torch_device)
        # The first copy runs on another stream, and must come after the fill.
        torch.cuda.synchronize()
        return memory

    def host_staging(self, nbytes: int) -> torch.Tensor:
        # torch's own allocator would round pinned memory up to a power of two and keep it, so this
        # memory is registered instead.
        memory = host_buffer(nbytes)
        runtime = torch.cuda.cudart()
        with torch.cuda.device(self.torch_device):  # a worker thread has another current device
            code = int(runtime.cudaHostRegister(memory.data_ptr(), nbytes, 0))
        if code:
            raise UsageError(
                f"--pin-weight: {format_bytes(nbytes)} cannot be pinned (CUDA error {code}); raise "
                "`ulimit -l`, or use "
                "--pin-weight 0"
            )
        weakref.finalize(memory, _unregister, runtime, memory.data_ptr(), self.torch_device)
        return memory

    def start_copy(self, dst: torch.Tensor, src: torch.Tensor) -> Waitable:
        with self.copy_stream():
            dst.copy_(src, non_blocking=True)
            return self.fence()  # of this stream only; stream.synchronize() would occupy a core

    def copy_stream(self) -> AbstractContextManager[object]:
        return cast(
            AbstractContextManager[object], torch.cuda.stream(_thread_stream(self.torch_device))
        )

    def fence(self) -> Waitable:
        # A thread that waits for it sleeps: cores are needed for reading and computing.
        event = torch.cuda.Event(blocking=True)
        event.record()
        return _CudaFence(event)

    def read_back(self, found: torch.Tensor) -> tuple[torch.Tensor, Waitable]:
        # torch keeps pinned memory for later calls.
        host = torch.empty(found.shape, dtype=found.dtype, device="cpu", pin_memory=True)
        host.copy_(found, non_blocking=True)
        return host, self.fence()

    def graph_pool(self) -> object:
        # Free what prompts have left: while a graph is made, torch gives nothing back to make room.
        torch.cuda.empty_cache()
        return torch.cuda.graph_pool_handle()

    def graph(self, issue: Callable[[], None], pool: Any) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        try:
            # The usual stream cannot be captured.
            with torch.cuda.stream(_graph_stream(self.torch_device)):
                graph.capture_begin(pool, capture_error_mode="thread_local")
                try:
                    issue()
                except BaseException:
                    with suppress(RuntimeError):  # the error of the capture that has failed
                        graph.capture_end()
                    raise
                graph.capture_end()
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            said = str(error).partition("\n")[0]
            raise FlexgenError(
                f"no CUDA graph can be made ({said}); use --overlap false"
            ) from error
        return graph.replay


def _unregister(runtime: Any, address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        runtime.cudaHostUnregister(address)


class _CudaFence(Waitable):
    """An event of one CUDA stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    def wait_on_card(self) -> None:
        self._event.wait()  # the current stream waits, not the thread

    @property
    def is_done(self) -> bool:
        return bool(self._event.query())


_LOCAL = threading.local()


def _thread_stream(device: torch.device) -> torch.cuda.Stream:
    if not hasattr(_LOCAL, "stream"):
        _LOCAL.stream = torch.cuda.Stream(device)
    return cast(torch.cuda.Stream, _LOCAL.stream)


@lru_cache
def _graph_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for graphs, one for all engines of a process.

    cuBLAS keeps a workspace for each stream (CARD_LIBRARY_BYTES).
    """
    return torch.cuda.Stream(device)


def may_use_card(name: str) -> bool:
    """Return whether `open_device` uses a card for that name, if there is one."""
    return name != "cpu"


def take_card(local_rank: int) -> str:
    """Assign each process of a machine its card, if there are cards.

    Returns the backend of torch.distributed: gloo between hosts, NCCL between cards.
    """
    if not torch.cuda.is_available():
        return "gloo"
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    return "cpu:gloo,cuda:nccl"


def open_device(name: str, separate_budget: bool) -> Device:
    """Return the device for `auto`, `cpu` or `cuda`.

    separate_budget: --device-mem was given. On a CPU this makes the stand-in device.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device: {name!r} is not one of auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "--device cuda: no CUDA device is usable here; use --device cpu or auto, or plan for a "
            "machine that has one: flexgen-h2o plan --hardware t4"
        )
    if name != "cpu" and torch.cuda.is_available():
        return CudaDevice()
    return StandInDevice() if separate_budget else HostDevice()


DISK_MARGIN_BYTES = 2 * GIB


def resolve_budgets(
    budget: MemoryBudget, device: Device, offload_dir: Path, processes: int = 1
) -> dict[str, int | None]:
    """Return the budget of each tier in bytes: the given one, or what is free less a margin.

    The disk's budget is never more than is free, and the host's never more than the machine has. If
    the device is host memory, the device tier has 0. processes: number of this run's processes on
    this machine, which share its RAM and its disk evenly.
    """
    if budget.host is None:
        host = less_margin(free_host_bytes()) // processes
    else:
        host = min(budget.host, whole_host_bytes() // processes)
    free = shutil.disk_usage(existing_folder(offload_dir)).free
    disk_bytes = (
        max(0, free - DISK_MARGIN_BYTES) // processes
        if budget.disk is None
        else min(budget.disk, free // processes)
    )
    disk = DiskBudget(disk_bytes, free // processes)
    if device.is_host:
        return {"device": 0, "host": host, "disk": disk}
    free_on_card = device.free_bytes()
    on_device = budget.device
    if on_device is not None and free_on_card is not None and on_device > free_on_card:
        raise DoesNotFitError(
            f"--device-mem {format_bytes(on_device)}: the GPU has {format_bytes(free_on_card)} "
            "free; give less, or end"
            " what else is on it"
        )
    if on_device is None:
        on_device = less_margin(free_on_card or 0)
    return {"device": on_device, "host": host, "disk": disk}


@dataclass(frozen=True)
class NewFiles:
    """Files that are written before a run, and stay. Those who plan a run make it."""

    what: str  # such as `the download of opt-30b`
    folder: Path  # it need not exist yet
    nbytes: int
    remedy: str  # what to do if the disk is too full, such as `give another --offload-dir`


def less_new_files(
    disk: int | None, offload_dir: Path, files: Iterable[NewFiles], is_given: bool
) -> DiskBudget:
    """Return the disk's budget that files leave which are written to disks before a run.

    Only files on the disk of the offload folder lower it. A given budget is only lowered to what
    is free. Raise DoesNotFitError for files that do not fit their disk.
    """
    assert isinstance(disk, DiskBudget)  # resolve_budgets makes one
    left: dict[int, int] = {}
    used = 0
    for one in files:
        place = existing_folder(one.folder)
        number = os.stat(place).st_dev
        free = left.setdefault(number, shutil.disk_usage(place).free)
        if one.nbytes > free:
            raise DoesNotFitError(
                f"{one.what} needs {format_bytes(one.nbytes)} of the disk of {one.folder}, "
                f"{format_free(free, one.nbytes)}; free space, or {one.remedy}"
            )
        left[number] -= one.nbytes
        if number == os.stat(existing_folder(offload_dir)).st_dev:
            used += one.nbytes
    free = max(0, disk.free - used)
    return DiskBudget(min(disk, free) if is_given else max(0, disk - used), free)


def free_host_bytes() -> int:
    """Return the RAM that can be used now.

    It is what the machine has available, or what the limits of cgroups leave.
    """
    return max(0, min([host_memory()[1], *(limit.room for limit in memory_limits())]))


def whole_host_bytes() -> int:
    """Return the RAM that could be used if nobody else used any.

    It is the machine's, or the least limit of a cgroup.
    """
    return min([host_memory()[0], *(limit.nbytes for limit in memory_limits())])


def host_memory() -> tuple[int, int]:
    """Return the bytes of RAM that the machine has, and those available.

    Raises FlexgenError if there is no /proc to read them from.
    """
    try:
        found = psutil.virtual_memory()
    except OSError as error:
        raise FlexgenError(
            f"{error.filename}: {error.strerror}; mount /proc, which says what RAM is free"
        ) from error
    return int(found.total), int(found.available)
