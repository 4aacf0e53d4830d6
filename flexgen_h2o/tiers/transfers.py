"""Transfers between files, host and device memory, on lanes of worker threads.

An operation waits on its worker for the events that must come before it, and signals its own
`Done`. A copy between a card and pinned memory waits on the card instead. Its worker continues with
the next job, and its `Done` says that the copy has begun. The first failure ends every lane, and
whoever waits gets that error.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal, NamedTuple, cast

import torch

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import FlexgenError
from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.core.units import PAGE, STAGING_BYTES, STAGING_SLOTS, TRANSFER_CHUNK, round_up
from flexgen_h2o.tiers.device import Device, host_buffer
from flexgen_h2o.tiers.disk import DirectFile, FileRange, aligned_range
from flexgen_h2o.tiers.stream import NOTHING, Done, Waitable, wait_all, wait_all_on_card

_Wait = Callable[[Iterable[Waitable]], None]


class _Job(NamedTuple):
    """A part of an operation, in the queue of a worker. `Lanes.submit` makes it."""

    name: str  # of the operation
    run: Callable[[], int]  # does the work and returns the bytes moved
    after: Sequence[Waitable]  # events that must come before `run`
    wait: _Wait  # called with `after` before `run`
    done: Done  # of the operation


# Queues besides a lane's own, by the lane and the end of an operation's name. On a card, weights
# wait for ring space and must not hold up KV. Rows of a table must not wait behind bulk reads.
_OWN_QUEUES = {("h2d", "weight"): "h2d weights", ("disk_read", "look_up_weight"): "disk_read rows"}
# Copies that a worker may have begun: two units of weights, so that a signal is soon seen.
MAX_UNDER_WAY = 32
RUNS_A_JOB = 16
# Largest gap between rows of a table that is read through. Beyond it another request is cheaper.
NEAR_BYTES = 128 * 2**10
_Wanted = Sequence[tuple[torch.Tensor, int]]  # (tensor to fill, row of a table) pairs


class Lanes:
    """Named worker queues (`disk_read`, `disk_write`, `h2d`, `d2h`), each with its own threads.

    Weights go to the card in a queue of their own. So do rows that are looked up. bytes_moved:
    bytes over each lane's link. bytes_by_name: the same by (lane, name of the operation).
    """

    def __init__(self, threads: dict[str, int], timeline: Timeline) -> None:
        self.timeline = timeline
        self.bytes_moved = dict.fromkeys(threads, 0)
        self.bytes_by_name: Counter[tuple[str, str]] = Counter()
        # State of a worker. `name`: name of its current operation. `begun`: copies that the
        # operation has begun. `all`: the last of them is all that the operation does. `last`: the
        # last copy begun.
        self._current = threading.local()
        self._failure: BaseException | None = None
        self._closed = False
        self._owner = os.getpid()
        self._lock = threading.Lock()
        rows = [
            (lane, lane, f"{lane} {i + 1}" if i else lane)
            for lane, count in threads.items()
            for i in range(count)
        ]
        rows += [(lane, own, own) for (lane, _), own in _OWN_QUEUES.items() if lane in threads]
        self._queue_of_thread = [name for _, name, _ in rows]
        self._queues: dict[str, queue.SimpleQueue[_Job | None]]
        self._queues = {name: queue.SimpleQueue() for name in self._queue_of_thread}
        self._threads = [
            threading.Thread(target=self._work, args=row, name=row[2], daemon=True) for row in rows
        ]
        for thread in self._threads:
            interrupts.start(thread)

    def submit(
        self,
        lane: str,
        name: str,
        jobs: Sequence[Callable[[], int]],
        after: Sequence[Waitable] = (),
        wait: _Wait = wait_all,
    ) -> Done:
        """Queue `jobs` on a lane. Each job returns the bytes that it moved.

        Jobs start once `after` is done. The worker waits for it by `wait`.
        """
        done = Done(len(jobs))
        chosen = self._queues[self._queue_of(lane, name)]
        with self._lock:
            if self._closed:  # no worker is left to serve it
                done.finish_one(self._failure)
                return done
            for job in jobs:
                chosen.put(_Job(name, job, after, wait, done))
        return done

    def _queue_of(self, lane: str, name: str) -> str:
        return next(
            (
                own
                for (owner, end), own in _OWN_QUEUES.items()
                if owner == lane and name.endswith(end)
            ),
            lane,
        )

    def count(self, lane: str, nbytes: int) -> None:
        """Count bytes that crossed a lane's link. Jobs of that or of another lane call it."""
        with self._lock:
            self.bytes_moved[lane] += nbytes
            self.bytes_by_name[lane, self._current.name] += nbytes

    def begin(self, copy: Waitable, is_all: bool = False) -> None:
        """Make the current operation last until `copy` is done, while the worker continues.

        Jobs call it. is_all: the operation does nothing else, so its span in the timeline is the
        copy's.
        """
        if not copy.is_done:
            self._current.begun.append(copy)
            self._current.last = copy
            self._current.all = is_all

    def close(self) -> None:
        """Drop what is queued, end the threads and wait for them.

        This does nothing in a child of os.fork(), which has no threads and may have inherited a
        lock that one of them held.
        """
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._failure = self._failure or FlexgenError(
                "the LLM was closed while it generated; close it after generate has returned"
            )
            self._closed = True
        for name in self._queue_of_thread:
            self._queues[name].put(None)
        for thread in self._threads:
            thread.join()

    @torch.inference_mode()  # like the compute thread, whose views it fills
    def _work(self, lane: str, queue_name: str, row: str) -> None:
        current = self._current
        jobs = self._queues[queue_name]
        under_way = deque[tuple[_Job, Waitable]]()
        current.last = NOTHING
        while True:
            while under_way and jobs.empty():
                self._see_end(lane, row, *under_way.popleft())
            if (job := jobs.get()) is None:
                break
            while under_way and (
                len(under_way) == MAX_UNDER_WAY or not all(one.is_started for one in job.after)
            ):
                self._see_end(lane, row, *under_way.popleft())
            failure = self._failure  # a failure that comes while this job runs is not this job's
            current.begun = list[Waitable]()
            current.all = False
            try:
                if failure is None:
                    job.wait(job.after)
                    start = time.perf_counter()
                    current.name = job.name
                    moved = job.run()
                    if current.all:
                        under_way.append((job, current.last))
                    else:
                        self.timeline.record(lane, job.name, start, time.perf_counter(), row)
                    self.count(lane, moved)
            except BaseException as error:
                failure = self._fail(error)
            job.done.finish_one(failure, current.begun)
        with suppress(Exception):  # whoever waits for the operation gets its error
            current.last.wait()  # the copy reads this worker's staging memory

    def _see_end(self, lane: str, row: str, job: _Job, copy: Waitable) -> None:
        """Wait until a copy that was begun has ended, and record when the link was busy with it.

        The link was busy from the moment all events before the copy were done, which include the
        worker's previous copy.
        """
        try:
            wait_all(job.after)
            start = time.perf_counter()
            copy.wait()
            self.timeline.record(lane, job.name, start, time.perf_counter(), row)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> BaseException:
        """Record a failure, and return the first one."""
        with self._lock:
            self._failure = self._failure or error
            return self._failure


class _Staging:
    """A worker's host memory between files and the device, as slots that are used in turn.

    A slot is taken again once the copy from it is done. Reads into other slots continue meanwhile.
    """

    def __init__(self, memory: torch.Tensor) -> None:
        # Memory stays pinned only as long as this very tensor exists, whatever views of it exist.
        self._memory = memory
        self._slots = memory.split(STAGING_BYTES)
        self._readers: list[tuple[Waitable, torch.Tensor]] = [(NOTHING, memory)] * len(self._slots)
        self._at = -1

    def take(self) -> torch.Tensor:
        """Return the next slot, (STAGING_BYTES,) uint8, once nobody reads it any more."""
        self._at = (self._at + 1) % len(self._slots)
        self._readers[self._at][0].wait()
        slot: torch.Tensor = self._slots[self._at]
        return slot

    def is_read_by(self, copy: Waitable, source: torch.Tensor) -> None:
        """Record the copy that was begun from the slot taken last.

        source: the memory that the copy reads. It is kept until the copy is done.
        """
        self._readers[self._at] = copy, source


Memory = Literal["device", "host"]


class Mover:
    """All traffic of a run. Every method queues the work and returns its `Done`.

    pins: host memory that is copied to and from a card is pinned. Without pinning, each copy, and
    each wait of the card for a copy, would occupy a CPU core.
    """

    def __init__(self, device: Device, lanes: Lanes, pins: bool = True) -> None:
        self.device = device
        self._take_staging = device.host_staging if pins else host_buffer
        self._pins = pins
        self.lanes = lanes
        self._staging = threading.local()

    def read(
        self,
        name: str,
        dst: torch.Tensor,
        memory: Memory,
        source: FileRange,
        after: Sequence[Waitable] = (),
    ) -> Done:
        """Fill `dst`, which lies in `memory`, from a range of a file.

        The file is read straight into `dst` if that is page-aligned host bytes with room for the
        aligned range. Otherwise it is read in chunks through the worker's staging memory. Each
        chunk is converted to dst's dtype and copied to dst's memory while further chunks are read.
        """
        file, offset, nbytes, dtype = source
        crosses = self._crosses(memory)
        if dtype == torch.uint8 and not crosses and _takes_direct(dst, offset, nbytes):
            jobs = [
                partial(file.read, dst[a:b], offset + a, min(b, nbytes) - a)
                for a, b in _even_chunks(dst.numel())
            ]
        else:
            flat = dst.view(-1) if dtype != torch.uint8 else dst.view(-1)[:nbytes]
            jobs = [
                partial(
                    self._staged_read, flat[a:b], file, offset + a * dtype.itemsize, dtype, crosses
                )
                for a, b in _chunks(flat.numel(), TRANSFER_CHUNK // dtype.itemsize)
            ]
        return self.lanes.submit("disk_read", name, jobs, after, self._wait_of(crosses))

    def read_rows(self, name: str, wanted: _Wanted, table: FileRange) -> Done:
        """Fill tensors in host memory with one row each of a table in a file.

        wanted: in the order of rows. table: the range of the first row. Rows that are near each
        other are read together, with what lies between them.
        """
        runs = _runs(wanted, table.nbytes)

        def job(some: Sequence[_Wanted]) -> int:
            return sum(self._read_run(run, table) for run in some)

        jobs = [partial(job, runs[a:b]) for a, b in _chunks(len(runs), RUNS_A_JOB)]
        return self.lanes.submit("disk_read", name, jobs)

    def write(
        self,
        name: str,
        file: DirectFile,
        offset: int,
        src: torch.Tensor,
        memory: Memory,
        after: Sequence[Waitable] = (),
    ) -> Done:
        """Write `src` to the file at `offset`.

        src: uint8, in `memory`. offset: a multiple of 4 KiB. Whole pages are written. If `src` ends
        within a page, the rest of that page in the file is undefined.
        """
        crosses = self._crosses(memory)
        if not crosses and src.data_ptr() % PAGE == 0 and src.numel() % PAGE == 0:
            jobs = [partial(file.write, src[a:b], offset + a) for a, b in _even_chunks(src.numel())]
        else:
            jobs = [
                partial(self._staged_write, src[a:b], file, offset + a, crosses)
                for a, b in _chunks(src.numel(), TRANSFER_CHUNK)
            ]
        return self.lanes.submit("disk_write", name, jobs, after, self._wait_of(crosses))

    def _crosses(self, memory: Memory) -> bool:
        """Return whether I/O between a file and `memory` crosses the link of host and device."""
        return memory == "device" and not self.device.is_host

    def _wait_of(self, crosses: bool) -> _Wait:
        """Return how to wait for what comes before an operation.

        The card waits if only it touches the bytes.
        """
        return self._wait_on_card if crosses and self._pins else wait_all

    def _wait_on_card(self, events: Iterable[Waitable]) -> None:
        with self.device.copy_stream():
            wait_all_on_card(events)

    def copy(
        self,
        lane: str,
        name: str,
        dst: torch.Tensor,
        src: torch.Tensor,
        after: Sequence[Waitable] = (),
    ) -> Done:
        """Copy between host and device memory on lane `h2d` or `d2h`."""

        def job() -> int:
            copy = self.device.start_copy(dst, src)
            if self._pins:
                self.lanes.begin(copy, is_all=True)
            else:
                copy.wait()
            return src.nbytes

        return self.lanes.submit(lane, name, [job], after, self._wait_of(crosses=True))

    def copy_kv_entries(
        self,
        name: str,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        slots: torch.Tensor,
        after: Sequence[Waitable],
    ) -> Done:
        """Copy the KV entry at slots[r] of each row r from device to host memory.

        pairs: (target, source) of keys and of values, each (segments, rows, S, d), with slot j at
        [j // S, :, j % S]. A target may have more rows. slots: (rows,) int64 on the device, read
        once `after` is done. On a card the copy runs beside compute and does not wait for work that
        is issued later.
        """
        length = pairs[0][1].shape[2]
        sources = [source for _, source in pairs]
        row_bytes = slots.itemsize + sum(source.shape[3] * source.itemsize for source in sources)

        def job() -> int:
            moved = 0
            for a, b in _chunks(len(slots), STAGING_BYTES // row_bytes):
                there, *columns = self._gathered(slots[a:b], [source[:, a:b] for source in sources])
                for (target, _), column in zip(pairs, columns, strict=True):
                    target[:, a:b][_places(there, length)] = column
                    moved += column.nbytes
            return moved

        return self.lanes.submit("d2h", name, [job], after, self._wait_of(crosses=True))

    def _gathered(self, slots: torch.Tensor, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the slots and the KV entries in them, in host memory.

        They are valid until the thread's next transfer. A card sends all of them in one copy."""
        with self.device.copy_stream():
            at = _places(slots, sources[0].shape[2])
            found = [slots, *(source[at] for source in sources)]
            if slots.device.type == "cpu":
                return found
            packed = torch.cat([t.flatten().view(torch.uint8) for t in found])
        staging = self._thread_staging().take()[: packed.numel()]
        self.device.copy(staging, packed)
        parts = staging.split([t.nbytes for t in found])
        return [part.view(t.dtype).view(t.shape) for part, t in zip(parts, found, strict=True)]

    def _staged_read(
        self, dst: torch.Tensor, file: DirectFile, offset: int, dtype: torch.dtype, crosses: bool
    ) -> int:
        staging = self._thread_staging(1 if self.device.is_host else STAGING_SLOTS)
        source, got = _read_into(staging.take(), file, offset, dst.numel() * dtype.itemsize)
        source = _aligned(source, dtype)
        copy = self.device.start_copy(dst, source)
        staging.is_read_by(copy, source)
        self.lanes.begin(copy)
        if crosses:
            self.lanes.count("h2d", dst.nbytes)
        return got

    def _read_run(self, run: _Wanted, table: FileRange) -> int:
        file, offset, nbytes, dtype = table
        first = run[0][1]
        last = run[-1][1]
        staging = self._thread_staging().take()
        source, got = _read_into(
            staging, file, offset + first * nbytes, (last + 1 - first) * nbytes
        )
        for dst, row in run:
            self.device.copy(
                dst, _aligned(source[(row - first) * nbytes : (row + 1 - first) * nbytes], dtype)
            )
        return got

    def _staged_write(self, src: torch.Tensor, file: DirectFile, offset: int, crosses: bool) -> int:
        staging = self._thread_staging().take()[: round_up(src.numel(), PAGE)]
        self.device.copy(staging[: src.numel()], src)
        if crosses:
            self.lanes.count("d2h", src.numel())
        return file.write(staging, offset)

    def _thread_staging(self, slots: int = 1) -> _Staging:
        """Return the staging memory of this thread.

        The thread must ask for the same number of slots each time.
        """
        if not hasattr(self._staging, "own"):
            self._staging.own = _Staging(self._take_staging(slots * STAGING_BYTES))
        return cast(_Staging, self._staging.own)


def _read_into(
    staging: torch.Tensor, file: DirectFile, offset: int, nbytes: int
) -> tuple[torch.Tensor, int]:
    """Read a range of a file into staging.

    Returns the range as a view of staging, and the bytes read.
    """
    start, length = aligned_range(offset, nbytes)
    got = file.read(staging[:length], start, offset - start + nbytes)
    return staging[offset - start : offset - start + nbytes], got


def _aligned(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes as numbers of `dtype`.

    Bytes that are not aligned are copied first: safetensors does not promise alignment.
    """
    return (source.clone() if source.data_ptr() % dtype.itemsize else source).view(dtype)


def _takes_direct(dst: torch.Tensor, offset: int, nbytes: int) -> bool:
    in_pages = not (dst.data_ptr() % PAGE or dst.numel() % PAGE or offset % PAGE)
    return in_pages and dst.dtype == torch.uint8 and dst.is_contiguous() and dst.numel() >= nbytes


def _places(slots: torch.Tensor, length: int) -> tuple[torch.Tensor, ...]:
    """Return the index by which torch selects one KV slot of each row."""
    return slots // length, torch.arange(len(slots), device=slots.device), slots % length


def _runs(wanted: _Wanted, row_bytes: int) -> list[list[tuple[torch.Tensor, int]]]:
    """Group rows, which come in order, into runs of neighbours. One request reads each run."""
    runs = list[list[tuple[torch.Tensor, int]]]()
    max_rows = max(1, TRANSFER_CHUNK // row_bytes)
    for one in wanted:
        row = one[1]
        is_near = bool(runs) and (row - runs[-1][-1][1] - 1) * row_bytes <= NEAR_BYTES
        if not is_near or row - runs[-1][0][1] >= max_rows:
            runs.append([])
        runs[-1].append(one)
    return runs


def _chunks(total: int, step: int) -> list[tuple[int, int]]:
    return [(a, min(a + step, total)) for a in range(0, total, step)]


def _even_chunks(total: int) -> list[tuple[int, int]]:
    """Return page-aligned chunks of about TRANSFER_CHUNK bytes.

    None is much shorter than the others, because short requests are slow.
    """
    return _chunks(total, round_up(-(-total // max(1, total // TRANSFER_CHUNK)), PAGE))
