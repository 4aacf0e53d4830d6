"""What disk reads and compute leave of each other when they run together."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator

import torch

from flexgen_h2o import interrupts
from flexgen_h2o.profiling.bench import Bench
from flexgen_h2o.profiling.disk import DiskProbe
from flexgen_h2o.profiling.matmul import Products
from flexgen_h2o.tiers.events import Done, wait_all
from flexgen_h2o.tiers.mover import Mover

ROWS, WIDTH = 64, 4096
ISSUED = 8  # products before the device is waited for
AHEAD = 8  # loads that wait in the lane: more than are read while the products run
ROUNDS = 3  # alone and together in turn, so that a machine's drift counts for all
IDLE_S = 0.005
LEAST, MOST = 0.01, 1.0


def beside_shares(bench: Bench, mover: Mover, probe: DiskProbe, dtype: torch.dtype) -> tuple[float, float]:
    """Shares that are left of the disk's read rate while products are computed, and of those while it is read."""
    rows, width = min(ROWS, bench.sizes.rows[-1]), min(WIDTH, bench.sizes.widths[-1])
    call, seconds = Products(bench, dtype).call(rows, width, width), bench.sizes.beside_s / ROUNDS

    def compute() -> None:
        for _ in range(ISSUED):
            call()
        bench.finish()

    def idle() -> None:
        time.sleep(IDLE_S)

    compute()
    computed = read = computed_beside = read_beside = 0.0
    for _ in range(ROUNDS):
        computed += _rates(compute, seconds, mover, iter(()))[0]
        read += _rates(idle, seconds, mover, probe.endless())[1]
        calls, nbytes = _rates(compute, seconds, mover, probe.endless())
        computed_beside += calls
        read_beside += nbytes
    return _share(read_beside, read), _share(computed_beside, computed)


def _rates(work: Callable[[], None], seconds: float, mover: Mover, loads: Iterator[Done]) -> tuple[float, float]:
    """Calls of `work` and bytes read a second, with `AHEAD` of the loads always in the lane."""
    queued: deque[Done] = deque()
    moved, start, calls = mover.lanes.bytes_moved, time.perf_counter(), 0
    before = moved["disk_read"]
    while (now := time.perf_counter()) - start < seconds or not calls:
        interrupts.check()
        while queued and queued[0].is_done:
            queued.popleft().wait()
        while len(queued) < AHEAD and (load := next(loads, None)) is not None:
            queued.append(load)
        work()
        calls += 1
    nbytes, now = moved["disk_read"] - before, time.perf_counter()
    wait_all(queued)
    return calls / (now - start), nbytes / (now - start)


def _share(beside: float, alone: float) -> float:
    return min(MOST, max(LEAST, beside / alone if alone else MOST))
