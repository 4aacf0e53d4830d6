"""Transfer lanes: worker threads that move bytes.

An operation names the events that must come before it, waits for them on its own worker, and signals its own `Done`.
The first failure ends every lane: whoever waits gets that error.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

import torch

from flexgen_h2o.tiers.events import Done, Waitable, wait_all
from flexgen_h2o.timeline import Timeline


class _Cancelled(Exception):
    """Set on operations dropped because another one failed or the lanes were closed."""


class Lanes:
    """Named worker queues (`disk_read`, `disk_write`, `h2d`, `d2h`), each with its own threads.

    bytes_moved: over each lane's link; bytes_by_name: the same by (lane, name of the operation).
    """

    def __init__(self, threads: dict[str, int], timeline: Timeline) -> None:
        self.timeline = timeline
        self.bytes_moved = dict.fromkeys(threads, 0)
        self.bytes_by_name: Counter[tuple[str, str]] = Counter()
        self._current = threading.local()  # `name`: of the operation that a worker is at
        self._queues: dict[str, queue.SimpleQueue[_Job | None]] = {lane: queue.SimpleQueue() for lane in threads}
        self._failure: BaseException | None = None
        self._closed = False
        self._owner = os.getpid()
        self._lock = threading.Lock()
        rows = [(lane, f"{lane} {i + 1}" if i else lane) for lane, count in threads.items() for i in range(count)]
        self._threads = [threading.Thread(target=self._work, args=row, name=row[1], daemon=True) for row in rows]
        self._lane_of_thread = [lane for lane, _ in rows]
        for thread in self._threads:
            thread.start()

    def submit(self, lane: str, name: str, jobs: Sequence[Callable[[], int]], after: Sequence[Waitable] = ()) -> Done:
        """Queue `jobs` (each returns the bytes it moved) on a lane; they start once `after` is done, in queue order."""
        done = Done(len(jobs))
        with self._lock:
            if self._closed:  # nobody is left to serve it
                done.finish_one(self._failure)
                return done
            for job in jobs:
                self._queues[lane].put(_Job(name, job, after, done))
        return done

    def count(self, lane: str, nbytes: int) -> None:
        """Count bytes that crossed a lane's link, inside a job of that or of another lane."""
        with self._lock:
            self.bytes_moved[lane] += nbytes
            self.bytes_by_name[lane, self._current.name] += nbytes

    def close(self) -> None:
        """Drop what is queued, end the threads and wait for them. In a child of os.fork() there are none."""
        if os.getpid() != self._owner:  # and one of them may have held the lock as the child was made
            return
        with self._lock:
            self._failure = self._failure or _Cancelled("the run has ended")
            self._closed = True
        for lane in self._lane_of_thread:
            self._queues[lane].put(None)
        for thread in self._threads:
            thread.join()

    @torch.inference_mode()  # as the compute thread, whose views it fills
    def _work(self, lane: str, row: str) -> None:
        while (job := self._queues[lane].get()) is not None:
            if self._failure is not None:
                job.done.finish_one(self._failure)
                continue
            try:
                wait_all(job.after)
                start, self._current.name = time.perf_counter(), job.name
                moved = job.run()
                self.timeline.record(lane, job.name, start, time.perf_counter(), row)
            except BaseException as error:
                with self._lock:
                    self._failure = self._failure or error
                job.done.finish_one(self._failure)
                continue
            self.count(lane, moved)
            job.done.finish_one()


class _Job:
    def __init__(self, name: str, run: Callable[[], int], after: Sequence[Waitable], done: Done) -> None:
        self.name, self.run, self.after, self.done = name, run, after, done
