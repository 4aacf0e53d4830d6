"""Bytes a second over the link between host and device, and the fixed cost of one copy, through a transfer lane.

Bytes a second of the columns that wait in RAM for KV units on disk.

Bytes a second of the disk tier, through the engine's own lanes, and the fixed cost of one request.

What disk reads and compute leave of each other when they run together.
"""

from __future__ import annotations

import random
import shutil
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import torch

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import DoesNotFitError
from flexgen_h2o.core.units import MIB, PAGE, SEGMENT_SLOTS, TRANSFER_CHUNK, WRITE_BACK_STEPS, format_bytes
from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.kvcache.slots import PartView, part_view
from flexgen_h2o.kvcache.store import Overlay
from flexgen_h2o.planner.measure.bench import Bench, Call
from flexgen_h2o.planner.measure.compute import Products
from flexgen_h2o.tiers.device import host_buffer
from flexgen_h2o.tiers.disk import Scratch
from flexgen_h2o.tiers.stream import Done, wait_all
from flexgen_h2o.tiers.transfers import Mover

HOST_PIECE = 4 * TRANSFER_CHUNK  # of a weight's part that lives on the host: one copy


@dataclass(frozen=True)
class LinkRates:
    """Bytes a second; transfer_s: seconds from handing a small copy to the lane until its bytes are there."""

    h2d: float
    d2h: float
    h2d_unpinned: float
    d2h_unpinned: float
    transfer_s: float


def link_rates(bench: Bench, mover: Mover) -> LinkRates:
    """Of the bench's device, which is not host memory itself."""
    device, nbytes = bench.device, bench.sizes.link_bytes
    pinned, plain, there = device.host_staging(nbytes), host_buffer(nbytes), device.buffer(nbytes)
    *copies, small = bench.seconds_of(
        _copies(mover, "h2d", there, pinned),
        _copies(mover, "d2h", pinned, there),
        _copies(mover, "h2d", there, plain),
        _copies(mover, "d2h", plain, there),
        lambda: mover.copy("h2d", "probe", there[:PAGE], pinned[:PAGE]).wait(),
    )
    h2d, d2h, h2d_unpinned, d2h_unpinned = (nbytes / seconds for seconds in copies)
    return LinkRates(h2d, d2h, h2d_unpinned, d2h_unpinned, small)


def _copies(mover: Mover, lane: str, target: torch.Tensor, source: torch.Tensor) -> Call:
    """Piece by piece, all of them queued."""

    def copy_all() -> None:
        pieces = zip(target.split(HOST_PIECE), source.split(HOST_PIECE), strict=True)
        wait_all([mover.copy(lane, "probe", t, s) for t, s in pieces])

    return copy_all


HEAD_WIDTH = 64
HEADS = 12  # of each sequence


def overlay_rate(bench: Bench, dtype: torch.dtype) -> float:
    """Bytes read and written a second where the columns that wait are laid over a unit and another one is taken up.

    Of units that are not in a cache, each a step further than the one before, as far as a unit is written back.
    """
    on_disk = (0.0, 0.0, 1.0)
    layout = UnitLayout(bench.sizes.step_rows[0], HEADS, SEGMENT_SLOTS, HEAD_WIDTH, dtype.itemsize, on_disk)
    count = max(1, bench.sizes.cache_bytes // layout.part_bytes(layout.parts[0]) // WRITE_BACK_STEPS)
    every = [_unit(bench, layout, dtype, i % WRITE_BACK_STEPS) for i in range(count * WRITE_BACK_STEPS)]
    units = cycle(every)
    rows = layout.parts[0].rows
    slots = torch.full((rows,), SEGMENT_SLOTS - 1, device=every[0][1].keys.device)

    def steps() -> None:
        for _ in range(WRITE_BACK_STEPS):
            overlay, view = next(units)
            overlay.apply(view)
            overlay.add(view, slots)
            if overlay.is_full:
                overlay.clear()

    columns = WRITE_BACK_STEPS * (WRITE_BACK_STEPS + 1) / 2  # waiting and new, of as many steps
    return 2 * columns * rows * 2 * layout.slot_bytes / bench.seconds_of(steps)[0]


def _unit(bench: Bench, layout: UnitLayout, dtype: torch.dtype, waiting: int) -> tuple[Overlay, PartView]:
    """A unit, and an overlay with so many columns."""
    part = layout.parts[0]
    view = part_view(layout, part, bench.empty(torch.uint8, layout.part_bytes(part)), dtype, None)
    overlay = Overlay(layout, part, bench.empty(torch.uint8, layout.overlay_bytes(part)), dtype)
    for slot in range(waiting):
        overlay.add(view, torch.full((part.rows,), slot, device=view.keys.device))
    return overlay, view


LEAST_FREE = 256 * MIB
PASSES = 3
BUFFERS = 2
LOAD_PIECE = 16 * TRANSFER_CHUNK  # of one load


@dataclass(frozen=True)
class DiskRates:
    """Bytes a second; request_s: seconds from handing one read of 4 KiB to the lane until its bytes are there."""

    read: float
    write: float
    request_s: float


def check_space(offload_dir: Path) -> None:
    """DoesNotFitError where the disk has no room for a file that says something; the folder need not exist."""
    folder = next(p for p in (offload_dir, *offload_dir.absolute().parents) if p.exists())
    free = shutil.disk_usage(folder).free
    if free < LEAST_FREE:
        raise DoesNotFitError(
            f"--offload-dir {offload_dir}: {format_bytes(free)} are free there, and measuring the disk takes at least "
            f"{format_bytes(LEAST_FREE)}; free space or give another --offload-dir"
        )


class DiskProbe:
    """A file on the disk tier that is read and written in pieces, through `BUFFERS` host buffers in turn."""

    def __init__(self, bench: Bench, mover: Mover, scratch: Scratch) -> None:
        self._bench, self._mover = bench, mover
        piece = min(LOAD_PIECE, bench.sizes.disk_bytes)
        buffers = bench.normal(torch.float32, BUFFERS * piece // 4).view(torch.uint8)
        self._buffers = buffers.split(piece)
        most = min(bench.sizes.disk_bytes, shutil.disk_usage(scratch.folder).free // 2)
        self._file = scratch.create("profile.bin", max(1, most // piece) * piece)
        self._offsets = self._fill(range(0, max(1, most // piece) * piece, piece))

    @property
    def nbytes(self) -> int:
        return len(self._offsets) * len(self._buffers[0])

    def rates(self) -> DiskRates:
        """Of a file whose space was written before, as that of a run's scratch files soon is."""
        generator = random.Random(0)
        page = self._buffers[0][:PAGE]

        def small() -> None:
            offset = generator.randrange(self.nbytes // PAGE) * PAGE
            self._mover.read("request", page, "host", self._file, offset, PAGE).wait()

        request = self._bench.seconds_of(small)[0]
        read, write = self._rates(self.reads, self._writes)
        return DiskRates(read, write, request)

    def close(self) -> None:
        """To be called when no lane uses the file any more."""
        self._file.close()

    def reads(self) -> Iterator[Done]:
        """Queue the reading of the whole file, piece by piece."""
        for i, offset in enumerate(self._offsets):
            piece = self._buffers[i % BUFFERS]
            yield self._mover.read("probe", piece, "host", self._file, offset, len(piece))

    def endless(self) -> Iterator[Done]:
        """`reads`, again and again."""
        while True:
            yield from self.reads()

    def _writes(self) -> Iterator[Done]:
        for i, offset in enumerate(self._offsets):
            yield self._write(i, offset)

    def _write(self, i: int, offset: int) -> Done:
        return self._mover.write("probe", self._file, offset, self._buffers[i % BUFFERS], "host")

    def _fill(self, offsets: range) -> list[int]:
        """Write pieces until the time for it is up; returns the offsets of those that are there."""
        until, filled = time.perf_counter() + self._bench.sizes.disk_s, []
        for i, offset in enumerate(offsets):
            self._write(i, offset).wait()
            filled.append(offset)
            if time.perf_counter() > until:
                break
        return filled

    def _rates(self, *passes: Callable[[], Iterator[Done]]) -> list[float]:
        """Medians of some passes over the file, which take turns; fewer where the disk is slow."""
        timings: list[list[float]] = [[] for _ in passes]
        for _ in range(PASSES):
            for whole, found in zip(passes, timings, strict=True):
                if sum(found) < self._bench.sizes.disk_s:
                    found.append(self._seconds(whole))
        return [self.nbytes / statistics.median(found) for found in timings]

    def _seconds(self, whole: Callable[[], Iterator[Done]]) -> float:
        interrupts.check()
        start = time.perf_counter()
        wait_all(list(whole()))
        return time.perf_counter() - start


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
