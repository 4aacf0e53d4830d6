"""Bytes a second of the disk tier, through the engine's own lanes, and the fixed cost of one request."""

from __future__ import annotations

import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from flexgen_h2o import interrupts
from flexgen_h2o.errors import DoesNotFitError
from flexgen_h2o.limits import PAGE, TRANSFER_CHUNK
from flexgen_h2o.profiling.bench import Bench
from flexgen_h2o.tiers.disk import Scratch
from flexgen_h2o.tiers.events import Done, wait_all
from flexgen_h2o.tiers.mover import Mover
from flexgen_h2o.units import MIB, format_bytes

LEAST_FREE = 256 * MIB
PASSES = 3
BUFFERS = 2
PIECE = 16 * TRANSFER_CHUNK  # of one load


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
        piece = min(PIECE, bench.sizes.disk_bytes)
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
