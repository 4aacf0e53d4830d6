"""OpenMP's threads and os.fork(): a child has no threads of its parent, but waits for them.

In a process that has imported the package, idle threads of OpenMP are ended before a fork, on the
thread that forks. Both sides start new ones when they need some. A process that imports the package
after it was forked may lack the threads that torch had in its parent. A probe then finds out, and
`check_threads` raises an error.

No torch is imported here.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

from flexgen_h2o.core.errors import UsageError

# GNU's, LLVM's and Intel's library, as torch brings them.
_LIBRARY = re.compile(r"(/\S*/lib(?:g|i)?omp[^/\s]*\.so[^/\s]*)$")
_PAUSE_HARD = 2  # omp_pause_hard
# PF_FORKNOEXEC in the flags of /proc/PID/stat: the process was forked and has started no program
# since.
_FORKED = 0x40
_ELEMENTS = 2**20  # of a tensor that torch fills in several threads
# A probe that sleeps for _ASLEEP_S, or spins for _MAX_S, waits for a thread that does not exist.
_ASLEEP_S = 0.5
_MAX_S = 30
_POLL_S = 0.01

_TORCH_WAS_THERE = "torch" in sys.modules  # torch was imported before the package
_IMPORTED_IN = os.getpid()
_clean_process = _IMPORTED_IN  # newest process that was forked after idle threads had been ended
_is_clean = True  # idle threads have been ended before the fork that is under way
_are_missing: bool | None = None  # result of the probe; None before it


def check_threads() -> None:
    """Raise UsageError in a process that lacks torch's threads.

    It was forked after torch was used.
    """
    global _are_missing
    if _may_be_missing() and _are_missing is None:
        _are_missing = not _do_threads_work()
    if _are_missing:
        raise UsageError(
            "this process was forked from one that had used torch, and lacks torch's threads: "
            "start it with "
            "multiprocessing's 'spawn', or import flexgen_h2o before the fork"
        )
    _prepare_torch(os.getpid())


@cache
def _prepare_torch(process: int) -> None:
    """Have one thread make torch's second pool anew in a forked process.

    Several threads would find it half made.
    """
    if _was_forked():
        import torch

        torch.set_num_threads(torch.get_num_threads())


def _may_be_missing() -> bool:
    if _are_missing is not None:
        return _are_missing
    # The process was forked by other means than os.fork(), or from one that lacks threads.
    if os.getpid() != _clean_process:
        return True
    return _TORCH_WAS_THERE and os.getpid() == _IMPORTED_IN and _was_forked()


def _was_forked() -> bool:
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return bool(int(fields[6]) & _FORKED)
    except (OSError, ValueError, IndexError):
        return False


def _do_threads_work() -> bool:
    """Return whether torch's threads work on this thread.

    A child of this process, which has what this thread has, tries it. If the process has threads
    that are not Python's, they were started in this process itself, most likely by torch: then
    nothing is tried.
    """
    import torch

    if (
        torch.get_num_threads() == 1
        or len(os.listdir("/proc/self/task")) > threading.active_count()
    ):
        return True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of forks with threads
        child = os.fork()
    if not child:
        try:
            torch.zeros(_ELEMENTS, dtype=torch.float32, device="cpu").add_(1)
        finally:
            os._exit(0)
    began = awake = time.monotonic()
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        time.sleep(_POLL_S)
        now = time.monotonic()
        if Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            awake = now
        if now - awake > _ASLEEP_S or now - began > _MAX_S:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return False
    return True


def _end_idle_threads() -> None:
    """End idle threads before a fork.

    It runs on the thread that forks, which is the one that the child has.
    """
    global _is_clean
    _is_clean = "torch" not in sys.modules or not _may_be_missing()
    if not _is_clean or "torch" not in sys.modules:
        return  # ending threads that are missing would wait for them, too
    import ctypes

    with suppress(OSError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        for path in {found[1] for line in lines if (found := _LIBRARY.search(line)) is not None}:
            library = ctypes.CDLL(path, os.RTLD_NOLOAD | os.RTLD_NOW)
            if hasattr(library, "omp_pause_resource_all"):
                library.omp_pause_resource_all(_PAUSE_HARD)


def _begin_child() -> None:
    global _clean_process
    if _is_clean:
        _clean_process = os.getpid()


os.register_at_fork(before=_end_idle_threads, after_in_child=_begin_child)
