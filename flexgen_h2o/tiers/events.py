"""Events that order transfers and compute. No torch: the planner's simulator walks them too.

Events, not barriers: whoever takes bytes waits for their last readers and writers, and for nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol


class Waitable(Protocol):
    def wait(self) -> None: ...

    @property
    def is_done(self) -> bool: ...


class Done:
    """An event that may carry an error. `parts`: how many operations must finish first."""

    def __init__(self, parts: int = 1) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._left = parts
        self._error: BaseException | None = None
        if parts == 0:
            self._event.set()

    def finish_one(self, error: BaseException | None = None) -> None:
        with self._lock:
            self._left -= 1
            if error is not None and self._error is None:
                self._error = error
            if self._left <= 0 or error is not None:
                self._event.set()

    def wait(self) -> None:
        """Block until done; raises the operation's error."""
        # A timeout keeps the main thread open to signals on every platform.
        while not self._event.wait(1.0):
            pass
        if self._error is not None:
            raise self._error

    @property
    def is_done(self) -> bool:
        return self._event.is_set()


NOTHING = Done(0)


def wait_all(events: Iterable[Waitable]) -> None:
    for event in events:
        event.wait()
