"""Provide step buffers, checks for compiled loops, and threads for the rows of a loop.

The module does not import numba.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.units import ALIGN, UNPACK_CHUNK, round_up


class Workspace:
    """Provide named slices of one buffer, which every layer and micro-batch reuses.

    So the loop allocates nothing. sizes: bytes per slice; buffer: uint8, 64-aligned, of at least
    their sum.
    """

    def __init__(self, buffer: torch.Tensor, sizes: dict[str, int], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._slices: dict[str, torch.Tensor] = {}
        start = 0
        for name, nbytes in sizes.items():
            self._slices[name] = buffer[start : start + nbytes]
            start += nbytes

    def get(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return slice `name` as a tensor of `shape`, by default in the compute dtype.

        The slice still has its last content.
        """
        dtype = dtype or self.dtype
        nbytes = math.prod(shape) * dtype.itemsize
        return self._slices[name][:nbytes].view(dtype).view(shape)


def is_compiled(*tensors: torch.Tensor) -> bool:
    """Return whether compiled loops support these tensors: fp32 or bf16 in the CPU's memory."""
    return all(
        t.device.type == "cpu" and t.dtype in (torch.float32, torch.bfloat16) for t in tensors
    )


def is_compiled_beside_card(*tensors: torch.Tensor) -> bool:
    """Return whether loops that attend on the CPU for a card support these tensors.

    These loops support what `is_compiled` accepts, and fp16 if the CPU converts it.
    """
    return all(
        is_compiled(t) or (t.device.type == "cpu" and t.dtype == torch.float16 and cpu_has("f16c"))
        for t in tensors
    )


def mismatch(what: str, *tensors: torch.Tensor) -> ValueError:
    """Return an error for tensors with which loops would read or write out of bounds.

    Loops go by address, so their callers must check shapes.
    """
    shapes = (f"{tuple(t.shape)} {t.dtype} strides {t.stride()}" for t in tensors)
    return ValueError(f"{what} do not go together: {'; '.join(shapes)}")


_ELEMENTS: dict[torch.dtype, np.number[Any]] = {
    torch.float32: np.float32(0),
    torch.bfloat16: np.uint16(0),
    torch.uint8: np.uint8(0),
    torch.float16: np.int16(0),
}


def element_of(dtype: torch.dtype) -> np.number[Any]:
    """Return the number whose type tells compiled loops the dtype of elements.

    uint16 stands for bf16, int16 for fp16.
    """
    return _ELEMENTS[dtype]


@lru_cache
def cpu_has(feature: str) -> bool:
    """Return whether numba compiles for a CPU with these instructions, by LLVM's name for them.

    That is the CPU of this machine, unless the environment names other features.
    """
    from flexgen_h2o.kernels.numba_guard import numba

    core: Any = numba.core  # core has no type annotations
    given = core.config.CPU_FEATURES
    return f"+{feature}" in (
        core.codegen.get_host_cpu_features() if given is None else given
    ).split(",")


def multiplies_slowly(device: str, dtype: torch.dtype) -> bool:
    """Return whether torch multiplies this dtype one number at a time on the device.

    If so, fp32 is several times as fast.
    """
    return (
        device == "cpu" and dtype == torch.bfloat16 and cpu_has("avx2") and not cpu_has("avx512bw")
    )


def is_queued(tensor: torch.Tensor) -> bool:
    """Return whether operations on the tensor are queued on a card.

    If so, the host would wait for its values.
    """
    return tensor.device.type != "cpu"


def upload(host: torch.Tensor, where: torch.device) -> torch.Tensor:
    """Copy a host tensor to a device.

    A card copies it in the order of its stream, without anyone waiting.
    """
    pinned = host.pin_memory() if where.type == "cuda" else host
    return pinned.to(where, non_blocking=True)


def upload_together(hosts: Sequence[torch.Tensor], where: torch.device) -> list[torch.Tensor]:
    """Copy vectors of one dtype to a device, to a card in one copy.

    Each begins at a multiple of 64 bytes, as a tensor of its own would. Otherwise kernels would be
    compiled again for other alignments.
    """
    if where.type == "cpu":
        return list(hosts)
    starts = list(itertools.accumulate((round_up(host.nbytes, ALIGN) for host in hosts), initial=0))
    packed = torch.empty(starts[-1], dtype=torch.uint8, device="cpu")
    for start, host in zip(starts, hosts, strict=False):
        packed[start : start + host.nbytes] = host.view(torch.uint8)
    packed = upload(packed, where)
    views = zip(starts, hosts, strict=False)
    return [packed[start : start + host.nbytes].view(host.dtype) for start, host in views]


def row_slices(
    rows: int, columns: int, multiple: int = 1, most: int | None = None
) -> Iterator[slice]:
    """Yield slices of rows whose numbers are about `most` (default UNPACK_CHUNK).

    The number of rows in a slice is a multiple of `multiple`.
    """
    step = max(1, (most or UNPACK_CHUNK) // (columns * multiple)) * multiple
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))


def some_rows(t: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return some rows of a tensor, or the tensor itself if these are all rows."""
    return t if rows.stop - rows.start == t.shape[0] else t[rows]


_THREAD = threading.local()  # is_busy: the thread runs a task of `parallel_each`
# no part is less than a 64th of a thread's share: calls would cost more than waiting does
_MIN_PART = 64
_WORTH_WAKING = 2**19  # bytes of work below which waking a thread costs more than it saves


class _Helper:
    """Run loops of other threads in a thread of a pool, one after the other.

    After each loop the helper stays awake for a moment, because most loops are followed by another.
    Waking a thread, and being woken by it, takes as long as a small loop. Loops are counted. The
    numbers of the last loop that was given and of the last loop that is done are on separate cache
    lines.
    """

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        from flexgen_h2o.kernels.jit import signal_and_wait, wait_for_change

        self._tell_and_wait = signal_and_wait
        self._wait_past = wait_for_change
        self._pool = pool
        self._lock = threading.Lock()
        self._is_awake = False
        self._work: Callable[[], object] | None = None
        self._error: BaseException | None = None
        self._given, self._done = torch.zeros(
            2, ALIGN // 8, dtype=torch.int64, device="cpu"
        ).numpy()  # torch aligns the memory that it allocates
        self._given_at = self._given.ctypes.data
        self._done_at = self._done.ctypes.data

    def give(self, work: Callable[[], object]) -> None:
        """Let the helper call `work`.

        If a signal ended an earlier `wait`, the helper first finishes its current work.
        """
        with self._lock:
            given = int(self._given[0])
            if not self._is_awake:
                self._pool.submit(self._help, given)
                self._is_awake = True
            self._work = work
            self._given[0] = given + 1

    def wait(self) -> BaseException | None:
        """Wait until the work is done, and return the error that it raised, or None."""
        while (done := int(self._done[0])) != self._given[0]:
            if not self._wait_past(self._done_at, done, _LOOKS):
                time.sleep(_NAP_S)  # the machine is busy with something else
        error = self._error
        self._error = None
        return error

    def _help(self, done: int) -> None:
        while True:
            if not self._tell_and_wait(self._done_at, self._given_at, done, _LOOKS):
                with self._lock:
                    if self._given[0] == done:
                        self._is_awake = False
                        return
            work = self._work
            self._work = None
            try:
                self._error = None  # the error of a loop that nobody waited for
                if work is not None:  # None if an earlier call already ran the newer work
                    work()
            except BaseException as error:
                self._error = error
            del work  # also release what the work refers to
            done += 1


_LOOKS = 5_000  # looks for the next loop: 0.1 to 0.3 milliseconds
_NAP_S = 5e-5
# The thread whose loop uses the helpers holds this lock; the loop of another thread then has no
# helpers. If a signal kept a thread from releasing the lock, it still holds it.
_helping = threading.RLock()


@lru_cache(maxsize=1)
def _helpers(count: int) -> list[_Helper]:
    pool = ThreadPoolExecutor(count, thread_name_prefix="kernel")
    return [_Helper(pool) for _ in range(count)]


def _forget_helpers() -> None:
    """Forget the helpers in a forked child, which has none of the threads."""
    global _helping
    _helpers.cache_clear()
    _helping = threading.RLock()


os.register_at_fork(after_in_child=_forget_helpers)


def warm_up_helpers() -> None:
    """Compile the functions with which threads wait, or load them from the cache."""
    from flexgen_h2o.kernels.jit import signal_and_wait, wait_for_change

    words = np.zeros(2, dtype=np.int64)
    at = words.ctypes.data
    signal_and_wait(at, at + 8, 0, 1)
    wait_for_change(at, 0, 1)


def part_end(first: int, rows: int, threads: int) -> int:
    """Return where the part of `rows` ends that begins at `first`.

    A part is half of each thread's share of the remaining rows. So threads make few calls, and wait
    only for a small part at the end.
    """
    left = rows - first
    return first + min(left, max(1, rows // (threads * _MIN_PART), left // (2 * threads)))


@lru_cache(maxsize=256)
def _parts(rows: int, threads: int) -> tuple[tuple[int, int], ...]:
    ends = [0]
    while ends[-1] < rows:
        ends.append(part_end(ends[-1], rows, threads))
    return tuple(itertools.pairwise(ends))


def parallel_rows(loop: Callable[[int, int], object], rows: int, row_bytes: int) -> None:
    """Call loop(first, end) until all `rows` are done, on as many threads as torch uses.

    This thread is one of them. It works alone while another thread's loop uses the helpers.

    row_bytes: about how much memory a row reads and writes; little work stays on this thread. The
    result of a row must not depend on the split. If a loop raises an error, it is raised here after
    all have ended.

    numba's parallel loops bring a second OpenMP, or a scheduler that only one thread may enter.
    They also split evenly, so that the slowest core decides. Here each thread takes the next part
    (`part_end`) until there is none.
    """
    threads = min(torch.get_num_threads(), rows, 1 + rows * row_bytes // _WORTH_WAKING)
    if threads <= 1 or getattr(_THREAD, "is_busy", False):
        loop(0, rows)
        return
    # next() is one step of the interpreter, so it needs no lock
    parts = iter(_parts(rows, threads))

    def work() -> None:
        for first, end in parts:
            loop(first, end)

    helpers = list[_Helper]()
    are_ours = False
    try:
        with interrupts.held():
            are_ours = _helping.acquire(blocking=False)
            if are_ours:
                helpers = _helpers(torch.get_num_threads() - 1)[: threads - 1]
            for helper in helpers:
                helper.give(work)
        work()
    finally:
        with interrupts.held():
            errors = [helper.wait() for helper in helpers]
            if are_ours:
                _helping.release()
    for error in errors:
        if error is not None:
            raise error


def parallel_each(tasks: Sequence[Callable[[], object]], task_bytes: int) -> None:
    """Call each task on one thread, and do not split its rows over threads.

    Use it for many small tasks, each of which would otherwise wake threads. task_bytes: about how
    much memory a task reads and writes.
    """

    def some(first: int, end: int) -> None:
        _THREAD.is_busy = True
        try:
            for task in tasks[first:end]:
                task()
        finally:
            _THREAD.is_busy = False

    parallel_rows(some, len(tasks), task_bytes)
