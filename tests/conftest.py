"""Settings every test runs under: offline, two torch threads, fixed seeds."""

from __future__ import annotations

import os
import tempfile

# Before torch, numba and transformers are imported; child processes of the tests inherit them.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
if os.environ.get("FLEXGEN_GPU_TEST_DEVICE") != "cuda":
    os.environ["TRITON_INTERPRET"] = "1"  # kernels for cards run on the CPU
# No test reads or writes what the user has at home: hardware profiles, the offload directory.
os.environ["HOME"] = tempfile.mkdtemp(prefix="flexgen_h2o-home-")
os.environ["XDG_CACHE_HOME"] = os.path.join(os.environ["HOME"], ".cache")

import atexit
import ctypes
import gc
import random
import shutil
import signal
from collections.abc import Iterator

import hypothesis
import numpy as np
import pytest
import torch

from flexgen_h2o.core.units import format_bytes
from flexgen_h2o.tiers.device import free_host_bytes
from tests.forks import Forks, default_signals, fork_server

torch.set_num_threads(2)
gc.disable()  # until all is loaded: `pytest_collection_finish`
atexit.register(shutil.rmtree, os.environ["HOME"], ignore_errors=True)

# The same examples in every run, and no time limit per example: the machines have noisy neighbours.
hypothesis.settings.register_profile("repeatable", derandomize=True, deadline=None)
hypothesis.settings.load_profile("repeatable")


def pytest_collection_finish() -> None:
    """What is loaded by now stays loaded, and no collection of garbage looks at it: a full one took
    0.1 s."""
    gc.freeze()
    gc.enable()


# Bytes of free memory that any test, with the processes that it starts, does with.
LEAST_FREE = 2**30


def pytest_runtest_setup() -> None:
    """A test that lacks memory is skipped: it would fail, or the kernel would end the process."""
    if free_host_bytes() >= LEAST_FREE:
        return
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests freed
    if (free := free_host_bytes()) < LEAST_FREE:
        pytest.skip(f"{format_bytes(free)} of memory are free, of {format_bytes(LEAST_FREE)}")


@pytest.fixture(autouse=True)
def _alike() -> Iterator[None]:
    """Each test starts from the same random state, whichever tests ran before it, and leaves
    gradients as they were."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


@pytest.fixture(scope="session", autouse=True)
def _loops_are_compiled_here() -> Iterator[None]:
    """Not by other processes, of which a fresh checkout would start some thirty, each with torch to
    import. Processes of tests start theirs, and so do tests/unit/kernels/test_warm_up.py."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "flexgen_h2o.kernels.warm_up._call_in_a_process", lambda function, arguments: None
        )
        yield


@pytest.fixture
def plain_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The reference is the CPU's; and models this small lose more by waking a second thread than
    they gain."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Signals end the tests' own process, also where a shell runs them in the background."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGHUP)
    default_signals()
    yield
    for number, handler in zip((signal.SIGINT, signal.SIGHUP), before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    with fork_server() as found:
        yield found
