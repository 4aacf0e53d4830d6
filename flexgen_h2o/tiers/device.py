"""The device tier: where layers are computed. Host memory itself, ordinary memory with its own budget, or CUDA.

The rest of the engine asks only what is here; it never asks which kind it has.
"""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext

import torch

from flexgen_h2o.errors import UsageError
from flexgen_h2o.tiers.buffers import host_buffer
from flexgen_h2o.tiers.events import NOTHING, Waitable


class Device(ABC):
    """Memory that layers are computed in.

    is_host: host memory is computed on in place, nothing is copied to or from this device.
    tier: the budget that its buffers are charged to.
    is_asynchronous: compute is queued, and the thread that issues it goes on.
    dtypes: what it computes fast in, the usual one first.
    """

    torch_device: torch.device
    is_host: bool
    tier: str
    is_asynchronous = False
    dtypes: tuple[str, ...]

    def card(self) -> tuple[str, int] | None:
        """Name and bytes of memory of the card; None without one."""
        return None

    def compute_dtype(self, asked: str | None, stored: str) -> str:
        """The dtype to compute in: as asked, else as stored where this device is fast with it."""
        return asked or stored

    @abstractmethod
    def buffer(self, nbytes: int) -> torch.Tensor:
        """A uint8 buffer in device memory."""

    @abstractmethod
    def host_staging(self, nbytes: int) -> torch.Tensor:
        """A uint8 host buffer that copies to and from this device at full speed (pinned for CUDA)."""

    @abstractmethod
    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy between host and device, any dtypes, on a worker thread; returns when the bytes are there."""

    def beside_compute(self) -> AbstractContextManager[object]:
        """What a worker thread starts within it does not queue up behind compute; it waits for its results itself."""
        return nullcontext()

    @abstractmethod
    def fence(self) -> Waitable:
        """Done when all compute issued so far is."""


class _OrdinaryMemory(Device):
    torch_device = torch.device("cpu")
    dtypes = ("bfloat16", "float32")

    def compute_dtype(self, asked: str | None, stored: str) -> str:
        """CPUs compute float16 many times slower than bfloat16: refused when asked for, replaced when stored."""
        if asked == "float16":
            raise UsageError("--dtype float16: far too slow on a CPU; use bfloat16, or float32 to lose nothing")
        return asked or ("bfloat16" if stored == "float16" else stored)

    def buffer(self, nbytes: int) -> torch.Tensor:
        return host_buffer(nbytes)

    def host_staging(self, nbytes: int) -> torch.Tensor:
        return host_buffer(nbytes)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        dst.copy_(src)

    def fence(self) -> Waitable:
        return NOTHING  # CPU operators return when they are done


class HostDevice(_OrdinaryMemory):
    """The CPU computes where the host tier lives: two tiers."""

    is_host = True
    tier = "host"


class StandInDevice(_OrdinaryMemory):
    """A device tier made of ordinary memory with its own budget: three tiers without a card."""

    is_host = False
    tier = "device"


class CudaDevice(Device):
    """One CUDA card. Copies run on a side stream of the worker thread that issues them."""

    is_host = False
    tier = "device"
    is_asynchronous = True
    dtypes = ("float16", "bfloat16", "float32")

    def __init__(self) -> None:
        self.torch_device = torch.device("cuda", torch.cuda.current_device())

    def card(self) -> tuple[str, int]:
        about = torch.cuda.get_device_properties(self.torch_device)
        return str(about.name), int(about.total_memory)

    def buffer(self, nbytes: int) -> torch.Tensor:
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=self.torch_device)
        torch.cuda.synchronize()  # the fill must not overtake the first copy, which runs on another stream
        return memory

    def host_staging(self, nbytes: int) -> torch.Tensor:
        # Registered rather than allocated by torch, which rounds pinned memory up to a power of two and keeps it.
        memory, runtime = host_buffer(nbytes), torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(memory.data_ptr(), nbytes, 0))
        if code:
            raise UsageError(f"--pin-weight: {nbytes} bytes cannot be pinned (CUDA error {code}); use --pin-weight 0")
        weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr())
        return memory

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        stream = _thread_stream(self.torch_device)
        with torch.cuda.stream(stream):
            dst.copy_(src, non_blocking=True)
        stream.synchronize()

    def beside_compute(self) -> AbstractContextManager[object]:
        stream: AbstractContextManager[object] = torch.cuda.stream(_thread_stream(self.torch_device))
        return stream

    def fence(self) -> Waitable:
        event = torch.cuda.Event()
        event.record()
        return _CudaFence(event)


class _CudaFence:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()

    @property
    def is_done(self) -> bool:
        return bool(self._event.query())


_LOCAL = threading.local()


def _thread_stream(device: torch.device) -> torch.cuda.Stream:
    if not hasattr(_LOCAL, "stream"):
        _LOCAL.stream = torch.cuda.Stream(device)
    stream: torch.cuda.Stream = _LOCAL.stream
    return stream


def may_use_card(name: str) -> bool:
    """Does `open_device` take a card of that name, where there is one?"""
    return name != "cpu"


def take_card(local_rank: int) -> str:
    """Give each process of a machine a card of its own, where there are cards; what torch.distributed speaks through:
    gloo between hosts, NCCL between cards."""
    if not torch.cuda.is_available():
        return "gloo"
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    return "cpu:gloo,cuda:nccl"


def open_device(name: str, separate_budget: bool) -> Device:
    """`auto`, `cpu` or `cuda`. On a CPU, `separate_budget` (a --device-mem was given) makes the stand-in device."""
    if name not in ("auto", "cpu", "cuda"):
        raise UsageError(f"--device: {name!r} is not one of auto, cpu, cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: no CUDA device is usable here; use --device cpu or auto")
    if name != "cpu" and torch.cuda.is_available():
        return CudaDevice()
    return StandInDevice() if separate_budget else HostDevice()
