"""Step buffers are separate slices of one buffer; threads work on each row once, whatever
happens."""

from __future__ import annotations

import gc
import os
import pickle
import re
import subprocess
import sys
import threading
import time
import weakref
from functools import partial
from pathlib import Path

import pytest
import torch
from llvmlite.binding import parse_bitcode
from numba.core import config

from flexgen_h2o.kernels.jit import cache_folder
from flexgen_h2o.kernels.workspace import Workspace, cpu_has, parallel_rows

SIZES = {"a": 128, "b": 64, "c": 192}


def test_slices_do_not_overlap_and_have_any_shape_that_fits() -> None:
    buffer = torch.zeros(sum(SIZES.values()), dtype=torch.uint8)
    ws = Workspace(buffer, SIZES, torch.float32)
    for i, (name, nbytes) in enumerate(SIZES.items()):
        ws.get(name, nbytes // 4).fill_(i)
    for i, (name, nbytes) in enumerate(SIZES.items()):
        assert ws.get(name, nbytes // 4).tolist() == [i] * (nbytes // 4)
    found = ws.get("b", 4, 2, 3, dtype=torch.bfloat16)
    assert found.shape == (4, 2, 3) and found.data_ptr() == buffer.data_ptr() + 128
    with pytest.raises(RuntimeError):
        ws.get("b", 17)


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_threads_help_where_it_pays(three_threads) -> None:
    meet = threading.Barrier(3, timeout=10)  # passes only if three threads are at work at a time
    parallel_rows(lambda _first, _end: meet.wait(), 3, 2**30)
    names = set()
    parallel_rows(lambda _first, _end: names.add(threading.current_thread()), 1000, 1)
    assert names == {threading.current_thread()}


def test_an_error_comes_out_after_all_have_ended(three_threads) -> None:
    ended = list[int]()
    of_first = list[int]()

    def loop(first: int, end: int) -> None:
        if first == 0:
            of_first.extend(range(first, end))
            raise ValueError("row 0")
        ended.extend(range(first, end))

    with pytest.raises(ValueError, match="row 0"):
        parallel_rows(loop, 24, 2**30)
    assert sorted(of_first + ended) == list(range(24)) and ended


def test_threads_help_again_after_they_have_slept_and_keep_nothing(three_threads) -> None:
    meet = threading.Barrier(3, timeout=10)
    held = torch.ones(1)
    freed = weakref.ref(held)
    for pause_s in (0.0, 0.0, 0.2, 0.0):
        time.sleep(pause_s)
        parallel_rows(partial(lambda _held, _first, _end: meet.wait(), held), 3, 2**30)
    del held
    gc.collect()
    assert freed() is None


def test_a_loop_beside_another_threads_loop_is_done_alone(three_threads) -> None:
    seen = list[int]()
    others = list[int]()

    def beside() -> None:
        parallel_rows(lambda first, end: others.extend(range(first, end)), 47, 2**30)

    def loop(first: int, end: int) -> None:
        if first == 0:
            thread = threading.Thread(target=beside)
            thread.start()
            thread.join()
        seen.extend(range(first, end))

    parallel_rows(loop, 47, 2**30)
    assert sorted(seen) == others == list(range(47))


def test_threads_help_after_a_signal_that_ended_a_wait(
    three_threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_helper: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("flexgen_h2o.kernels.workspace._Helper.wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            parallel_rows(lambda _first, _end: None, 9, 2**30)
    meet = threading.Barrier(3, timeout=10)
    parallel_rows(lambda _first, _end: meet.wait(), 3, 2**30)


def test_many_small_loops_get_each_row_once(three_threads) -> None:
    rows = torch.zeros(5000, 5, dtype=torch.int64).numpy()
    for counts in rows:

        def loop(first: int, end: int, counts=counts) -> None:
            counts[first:end] += 1

        parallel_rows(loop, 5, 2**30)
    assert (rows == 1).all()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_starts_its_own_threads(three_threads) -> None:
    parallel_rows(lambda _first, _end: None, 9, 2**30)
    child = os.fork()
    if child == 0:
        seen: list[int] = []
        parallel_rows(lambda first, end: seen.extend(range(first, end)), 9, 2**30)
        os._exit(0 if sorted(seen) == list(range(9)) else 1)
    assert os.waitpid(child, 0)[1] == 0


# ---- other processes and CPUs


def run_tests(which: str, *names: str, **environment: str) -> None:
    """Tests of this folder in a process of their own, which must pass."""
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", which, *files]
    done = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout


def test_loops_that_come_from_the_cache_multiply_as_compiled_ones() -> None:
    """Numba caches a function with copies of those it calls, optimised once more. A process that
    compiles runs the originals, one that finds the code on disk runs the copies."""
    for _ in range(2):  # the first one compiles what nobody has yet
        run_tests("bfloat16 and 2112", "products")


def test_cached_code_counts_no_address_from_null() -> None:
    """See Emitter.pointer. Loops that index arrays go without its attribute, which would keep some
    from vectorising."""
    folder = cache_folder()
    assert folder is not None
    for file in folder.parent.rglob("*.nbc"):
        (_, _, (_, code)), *_ = pickle.loads(file.read_bytes())
        lines = str(parse_bitcode(code))
        valid = set(
            re.findall(r"^attributes (#\d+) = .*null_pointer_is_valid", lines, re.MULTILINE)
        )
        for function in re.findall(r"^define .*?^}", lines, re.MULTILINE | re.DOTALL):
            if not valid & set(function.partition("\n")[0].split()):
                assert not re.search(r"getelementptr .*ptr null|store .*poison, ptr", function), (
                    file
                )


@pytest.mark.parametrize(
    ("given", "has"),
    [
        ({"NUMBA_ENABLE_AVX": "0"}, False),
        ({"NUMBA_CPU_NAME": "sandybridge"}, False),
        ({"NUMBA_CPU_FEATURES": "+sse2,+avx2"}, True),
        ({"NUMBA_CPU_FEATURES": "+avx2x"}, False),
    ],
)
def test_loops_are_chosen_for_what_numba_compiles_for(
    given: dict[str, str], has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    config.reload_config()
    try:
        assert cpu_has.__wrapped__("avx2") is has
    finally:
        monkeypatch.undo()
        config.reload_config()


HASWELL = (
    "64bit,avx,avx2,bmi,bmi2,cmov,cx16,cx8,f16c,fma,lzcnt,movbe,popcnt,sse,sse2,sse3,"
    "sse4.1,sse4.2,ssse3"
)


@pytest.mark.skipif(not cpu_has("avx512bw"), reason="the whole suite runs so here, or cannot")
@pytest.mark.parametrize(
    "which",
    [
        "requantised_in_order or (against_the_definition and loop and float32)",
        pytest.param("test", marks=pytest.mark.slow),
    ],
)
def test_kernels_for_a_cpu_that_has_avx2_alone(which: str, tmp_path: Path) -> None:
    """numba compiles for the CPU that its environment names, and we choose loops for the same
    one."""
    features = ",".join(f"+{name}" for name in HASWELL.split(","))
    named = {
        "NUMBA_CPU_NAME": "haswell",
        "NUMBA_CPU_FEATURES": features,
        "NUMBA_CACHE_DIR": str(tmp_path),
    }
    run_tests(which, "prefill_attention", "int8", "products", **named)
