"""Work on the files of batches in threads of its own, so that no short work waits for long work."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from queue import Empty, SimpleQueue

from flexgen_h2o.core import interrupts
from flexgen_h2o.serving.answers import say_fault

# Most bytes of the files that the work of a lane reads. The last lane has all larger ones.
LANES = (2**20, 2**24)
TICK_S = 0.5

Work = Callable[[], None]


class Clerk:
    """Does work in the order in which it is added, in one thread for each size of files.

    tick: called about every TICK_S seconds.

    A lane does one piece of work at a time, so that what waits uses no descriptors and memory.
    """

    def __init__(self, tick: Work) -> None:
        self._tick = tick
        self.lanes = [SimpleQueue[Work]() for _ in range(len(LANES) + 1)]
        self.is_open = True
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name="batches", daemon=True)
            for lane in self.lanes
        ]

    def start(self) -> None:
        for thread in self._threads:
            interrupts.start(thread)

    def add(self, work: Work, nbytes: int = 0) -> None:
        """Add work to its lane.

        nbytes: size of the files that it reads.
        """
        self.lanes[bisect_left(LANES, nbytes)].put(work)

    def close(self) -> None:
        """Drop what waits, and wait until the work under way ends. Long work looks at `is_open`."""
        self.is_open = False
        with interrupts.held():
            for lane, thread in zip(self.lanes, self._threads, strict=True):
                lane.put(lambda: None)
                if thread.is_alive():
                    thread.join()

    def do(self, work: Work) -> None:
        """Do a piece of work. It has handled all expected errors itself."""
        try:
            work()
        except BaseException as error:
            if interrupts.asks_to_end(error):
                raise
            say_fault("batches", error)

    def _run(self, lane: SimpleQueue[Work]) -> None:
        ticked = 0.0
        while self.is_open:
            if lane is self.lanes[0] and time.monotonic() - ticked >= TICK_S:
                ticked = time.monotonic()
                self.do(self._tick)
            try:
                work = lane.get(timeout=TICK_S)
            except Empty:
                continue
            if self.is_open:
                self.do(work)
