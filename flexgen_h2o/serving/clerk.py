"""Work on the files of batches in a thread of its own.

The work is done in slices, so that long work delays no short work.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

from flexgen_h2o.core import interrupts
from flexgen_h2o.serving.answers import say_fault

SLICE_S = 0.05  # seconds that a lane gets before the next one
TICK_S = 0.5
# The first lane has work on files of up to 1 MiB, the second of up to 16 MiB, and so on.
SHORT_BITS = 20
LANE_BITS = 4

Work = Callable[[], Iterator[None] | None]


class Clerk:
    """Does the work that is added, in the order of arrival, in lanes by the size of its files.

    tick: called about every TICK_S seconds.

    A lane has one piece of work under way. No further descriptors and memory are used, however much
    work waits. Lanes take turns, so that work waits only for work of about its size.
    """

    def __init__(self, tick: Callable[[], None] = lambda: None) -> None:
        self._tick = tick
        self._ticked = 0.0
        self._lanes: dict[int, deque[Work]] = {}
        self._under_way: dict[int, Iterator[None]] = {}
        self._changed = threading.Condition()
        self._is_open = True
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)

    def start(self) -> None:
        interrupts.start(self._thread)

    def add(self, work: Work, nbytes: int = 0) -> None:
        """Add work to its lane.

        work: called when its turn comes; it may return its steps.
        nbytes: size of the files that it reads.
        """
        lane = max(0, -(-(max(0, nbytes - 1).bit_length() - SHORT_BITS) // LANE_BITS))
        with interrupts.held(), self._changed:
            self._lanes.setdefault(lane, deque()).append(work)
            self._changed.notify()

    def close(self) -> None:
        """End between two steps. Drop what is under way and what waits."""
        with interrupts.held():
            with self._changed:
                self._is_open = False
                self._changed.notify()
            if self._thread.is_alive():
                self._thread.join()
            for steps in self._under_way.values():
                _close(steps)
            self._under_way.clear()

    def turn(self) -> bool:
        """Give each lane a slice. Return False if there is nothing to do."""
        with self._changed:
            lanes = [
                lane for lane, queue in self._lanes.items() if queue or lane in self._under_way
            ]
        for lane in lanes:
            self._slice(lane)
        return bool(lanes)

    def _slice(self, lane: int) -> None:
        ends = time.monotonic() + SLICE_S
        while self._is_open and time.monotonic() < ends:
            try:
                steps = self._under_way.get(lane)
                if steps is None:
                    if not self._lanes[lane]:
                        return
                    begun = self._lanes[lane].popleft()()
                    if begun is not None:
                        self._under_way[lane] = begun
                    continue
                next(steps)
            except StopIteration:
                del self._under_way[lane]
            except BaseException as error:
                if interrupts.asks_to_end(error):
                    raise
                self._under_way.pop(lane, None)
                say_fault("batches", error)  # the work itself has handled all expected errors

    def _run(self) -> None:
        while self._is_open:
            if time.monotonic() - self._ticked >= TICK_S:
                self._ticked = time.monotonic()
                self.add(partial(self._tick))
            if not self.turn():
                with self._changed:
                    if self._is_open and not any(self._lanes.values()):
                        self._changed.wait(TICK_S)


def _close(steps: Iterator[None]) -> None:
    close = getattr(steps, "close", None)
    if close is not None:
        close()
