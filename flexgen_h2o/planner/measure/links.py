"""Rates of the links between tiers, through the engine's own lanes: host and device, disk, and KV columns in RAM.

Each function returns fields of a HardwareProfile.
"""

from __future__ import annotations

import random
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, islice
from pathlib import Path

import torch

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import DoesNotFitError
from flexgen_h2o.core.units import MIB, PAGE, SEGMENT_SLOTS, TRANSFER_CHUNK, WRITE_BACK_STEPS, format_bytes
from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.kvcache.slots import PartView, part_view
from flexgen_h2o.kvcache.store import Overlay
from flexgen_h2o.planner.measure.bench import Bench, Call, Figures
from flexgen_h2o.planner.measure.compute import Products
from flexgen_h2o.tiers.device import host_buffer
from flexgen_h2o.tiers.disk import FileRange, Scratch
from flexgen_h2o.tiers.stream import Done, wait_all
from flexgen_h2o.tiers.transfers import Mover

HOST_PIECE = 4 * TRANSFER_CHUNK  # one copy of weights that live on the host


def link_rates(bench: Bench, mover: Mover) -> Figures:
    """Of copies between the host and the bench's device, which is not host memory itself."""
    device, nbytes = bench.device, bench.sizes.link_bytes
    pinned, plain, there = device.host_staging(nbytes), host_buffer(nbytes), device.buffer(nbytes)
    copies = {
        "h2d_bytes_per_s": _copies(mover, "h2d", there, pinned),
        "d2h_bytes_per_s": _copies(mover, "d2h", pinned, there),
        "h2d_unpinned_bytes_per_s": _copies(mover, "h2d", there, plain),
        "d2h_unpinned_bytes_per_s": _copies(mover, "d2h", plain, there),
    }

    def small() -> None:
        mover.copy("h2d", "probe", there[:PAGE], pinned[:PAGE]).wait()

    *seconds, transfer_s = bench.seconds_of(*copies.values(), small)
    return {**{name: nbytes / s for name, s in zip(copies, seconds, strict=True)}, "transfer_s": transfer_s}


def _copies(mover: Mover, lane: str, target: torch.Tensor, source: torch.Tensor) -> Call:
    """Copy piece by piece, all of them queued."""

    def copy_all() -> None:
        pieces = zip(target.split(HOST_PIECE), source.split(HOST_PIECE), strict=True)
        wait_all([mover.copy(lane, "probe", t, s) for t, s in pieces])

    return copy_all


HEAD_WIDTH = 64
HEADS = 12  # of each sequence


def overlay_rate(bench: Bench, dtype: torch.dtype) -> float:
    """Bytes read and written a second where the columns that wait are laid over a KV unit and another one is added.

    The units together are larger than the caches. Each is a step further than the one before, up to the step at which
    units are written back.
    """
    on_disk = (0.0, 0.0, 1.0)
    layout = UnitLayout(bench.sizes.step_rows[0], HEADS, SEGMENT_SLOTS, HEAD_WIDTH, dtype.itemsize, on_disk)
    count = max(1, bench.sizes.cache_bytes // layout.part_bytes(layout.parts[0]) // WRITE_BACK_STEPS)
    every = [_unit(bench, layout, dtype, i % WRITE_BACK_STEPS) for i in range(count * WRITE_BACK_STEPS)]
    units, rows = cycle(every), layout.parts[0].rows
    slots = torch.full((rows,), SEGMENT_SLOTS - 1, device=every[0][1].keys.device)

    def steps() -> None:
        for overlay, view in islice(units, WRITE_BACK_STEPS):
            overlay.apply(view)
            overlay.add(view, slots)
            if overlay.is_full:
                overlay.clear()

    columns = WRITE_BACK_STEPS * (WRITE_BACK_STEPS + 1) / 2  # waiting and new, of as many steps
    return 2 * columns * rows * 2 * layout.slot_bytes / bench.seconds_of(steps)[0]


def _unit(bench: Bench, layout: UnitLayout, dtype: torch.dtype, waiting: int) -> tuple[Overlay, PartView]:
    """A unit, and an overlay of `waiting` columns."""
    part = layout.parts[0]
    view = part_view(layout, part, bench.empty(torch.uint8, layout.part_bytes(part)), dtype, None)
    overlay = Overlay(layout, part, bench.empty(torch.uint8, layout.overlay_bytes(part)), dtype)
    for slot in range(waiting):
        overlay.add(view, torch.full((part.rows,), slot, device=view.keys.device))
    return overlay, view


MIN_FREE = 256 * MIB
PASSES = 3
BUFFERS = 2
LOAD_PIECE = 16 * TRANSFER_CHUNK  # of one load


def check_space(offload_dir: Path) -> None:
    """DoesNotFitError where the disk has no room for a file to measure with; the folder need not exist."""
    folder = next(p for p in (offload_dir, *offload_dir.absolute().parents) if p.exists())
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE:
        raise DoesNotFitError(
            f"--offload-dir {offload_dir}: {format_bytes(free)} are free there, and measuring the disk takes at least "
            f"{format_bytes(MIN_FREE)}; free space or give another --offload-dir"
        )


class DiskProbe:
    """A file on the disk tier that is read and written in pieces, through `BUFFERS` host buffers in turn."""

    def __init__(self, bench: Bench, mover: Mover, scratch: Scratch) -> None:
        self._bench, self._mover = bench, mover
        piece = min(LOAD_PIECE, bench.sizes.disk_bytes)
        self._buffers = bench.normal(torch.float32, BUFFERS * piece // 4).view(torch.uint8).split(piece)
        most = max(1, min(bench.sizes.disk_bytes, shutil.disk_usage(scratch.folder).free // 2) // piece)
        self._file = scratch.create("profile.bin", most * piece)
        self._pieces = most
        until = time.perf_counter() + bench.sizes.disk_s
        for written, store in enumerate(self._writes(), 1):
            store.wait()
            if time.perf_counter() > until:
                self._pieces = written
                break

    @property
    def nbytes(self) -> int:
        return self._pieces * len(self._buffers[0])

    def rates(self) -> Figures:
        """Of a file whose space was written before, as that of a run's scratch files soon is."""
        generator = random.Random(0)
        page = self._buffers[0][:PAGE]

        def small() -> None:
            offset = generator.randrange(self.nbytes // PAGE) * PAGE
            self._mover.read("request", page, "host", FileRange(self._file, offset, PAGE)).wait()

        return {
            "disk_request_s": self._bench.seconds_of(small)[0],
            **self._rates({"disk_read_bytes_per_s": self.reads, "disk_write_bytes_per_s": self._writes}),
        }

    def close(self) -> None:
        """Call it when no lane uses the file any more."""
        self._file.close()

    def reads(self) -> Iterator[Done]:
        """Queue the reading of the whole file, piece by piece."""
        for offset, piece in self._in_turn():
            yield self._mover.read("probe", piece, "host", FileRange(self._file, offset, len(piece)))

    def _writes(self) -> Iterator[Done]:
        for offset, piece in self._in_turn():
            yield self._mover.write("probe", self._file, offset, piece, "host")

    def _in_turn(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Offsets in the file, each with a buffer."""
        for i in range(self._pieces):
            piece = self._buffers[i % BUFFERS]
            yield i * len(piece), piece

    def _rates(self, passes: dict[str, Callable[[], Iterable[Done]]]) -> dict[str, float]:
        """Medians of some passes over the file, which run in turn; fewer where the disk is slow."""
        timings: dict[str, list[float]] = {name: [] for name in passes}
        for _ in range(PASSES):
            for name, whole in passes.items():
                if sum(timings[name]) < self._bench.sizes.disk_s:
                    interrupts.check()
                    start = time.perf_counter()
                    wait_all(list(whole()))
                    timings[name].append(time.perf_counter() - start)
        return {name: self.nbytes / statistics.median(found) for name, found in timings.items()}


ROWS, WIDTH = 64, 4096
ISSUED = 8  # products before the device is waited for
AHEAD = 8  # loads that wait in the lane: more than are read while the products run
ROUNDS = 3  # alone and together in turn, so that a machine's drift counts for all
IDLE_S = 0.005
MIN_SHARE = 0.01


def contention(bench: Bench, mover: Mover, probe: DiskProbe, dtype: torch.dtype) -> Figures:
    """Shares that are left of the disk's read rate while products are computed, and of those while it is read."""
    rows, width = min(ROWS, bench.sizes.rows[-1]), min(WIDTH, bench.sizes.widths[-1])
    call, seconds = Products(bench, dtype).call(rows, width, width), bench.sizes.beside_s / ROUNDS

    def compute() -> None:
        for _ in range(ISSUED):
            call()
        bench.finish()

    def reads() -> Iterator[Done]:
        while True:
            yield from probe.reads()

    compute()
    computed = read = computed_beside = read_beside = 0.0
    for _ in range(ROUNDS):
        computed += _rates(compute, seconds, mover, iter(()))[0]
        read += _rates(lambda: time.sleep(IDLE_S), seconds, mover, reads())[1]
        calls, nbytes = _rates(compute, seconds, mover, reads())
        computed_beside += calls
        read_beside += nbytes
    return {
        "disk_read_beside_compute": _share(read_beside, read),
        "compute_beside_disk_read": _share(computed_beside, computed),
    }


def _rates(work: Callable[[], None], seconds: float, mover: Mover, loads: Iterator[Done]) -> tuple[float, float]:
    """Calls of `work` and bytes read a second, with `AHEAD` of the loads always in the lane."""
    queued: deque[Done] = deque()
    moved, start, calls = mover.lanes.bytes_moved, time.perf_counter(), 0
    before = moved["disk_read"]
    while time.perf_counter() - start < seconds or not calls:
        interrupts.check()
        while queued and queued[0].is_done:
            queued.popleft().wait()
        while len(queued) < AHEAD and (load := next(loads, None)) is not None:
            queued.append(load)
        work()
        calls += 1
    nbytes, took = moved["disk_read"] - before, time.perf_counter() - start
    wait_all(queued)
    return calls / took, nbytes / took


def _share(beside: float, alone: float) -> float:
    return min(1.0, max(MIN_SHARE, beside / alone if alone else 1.0))
