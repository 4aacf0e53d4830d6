"""SIGINT, SIGTERM and SIGHUP as exceptions that cannot get lost.

A signal handler raises in whatever code the main thread runs, and Python swallows exceptions in
finalisers and callbacks of weak references. So the signal is also remembered, and the engine checks
for it at every step. Python's report of a swallowed exception is not printed.

Python's events, conditions and futures stay locked forever if an exception comes right after they
took their lock. So the main thread uses them only through `wait_for` and `start`, or while signals
are `held`.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE_S = 0.2  # interval at which a wait checks for a signal


class Interrupted(BaseException):
    """A signal asked the run to end. `number` is the signal's."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


_arrived: list[int] = []
_held = 0


def arrived() -> Interrupted | None:
    """Return the signal that has arrived, or None.

    The signal counts even if its exception was swallowed.
    """
    return Interrupted(_arrived[0]) if _arrived else None


def asks_to_end(error: BaseException) -> bool:
    """Return whether an exception is a request to end.

    No handler of a prompt's errors may keep such a request. Other exceptions that are no
    `Exception` are failures. An example is pyo3's PanicException, of a tokenizer in Rust.
    """
    return isinstance(error, Interrupted | KeyboardInterrupt | SystemExit | GeneratorExit)


def check() -> None:
    """Raise Interrupted if a signal has arrived and its exception was swallowed."""
    found = arrived()
    if found is not None:
        raise found


@contextmanager
def held() -> Iterator[None]:
    """Remember signals that arrive inside the `with` block instead of raising them.

    It is for cleaning up.
    """
    global _held
    # Only the main thread gets signals.
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _held += 1
    try:
        yield
    finally:
        _held -= 1


def wait_for(event: threading.Event) -> None:
    """Block until `event` is set.

    In the main thread a signal ends the wait, unless signals are `held`.
    """
    while not event.is_set():
        with held():
            event.wait(_PATIENCE_S)
        if not _held and threading.current_thread() is threading.main_thread():
            check()


def start(thread: threading.Thread) -> None:
    """Start a thread, and wait until it runs."""
    with held():
        thread.start()


@contextmanager
def asking_first(is_taken: Callable[[], bool]) -> Iterator[None]:
    """Call `is_taken` in the main thread on SIGINT.

    If it returns False, the signal is handled as before.
    """
    before = signal.getsignal(signal.SIGINT)

    def ask(number: int, frame: FrameType | None) -> None:
        if not is_taken() and callable(before):
            before(number, frame)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def as_exceptions() -> Iterator[None]:
    """Raise Interrupted in the main thread on the first of these signals, and ignore later ones.

    SIGHUP stays ignored if it is ignored already, as under nohup.
    """

    def arrive(number: int, frame: FrameType | None) -> None:
        if not _arrived:
            _arrived.append(number)
            if not _held:
                raise Interrupted(number)

    try:
        handled = [
            n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN
        ]
        before = {number: signal.signal(number, arrive) for number in handled}
    except ValueError:  # this is not the main thread: the embedding program handles signals
        yield
        return
    unraisable = sys.unraisablehook

    def swallowed(found: sys.UnraisableHookArgs) -> None:
        if not isinstance(found.exc_value, Interrupted):
            unraisable(found)

    sys.unraisablehook = swallowed
    try:
        yield
    finally:
        sys.unraisablehook = unraisable
        _arrived.clear()
        for number, handler in before.items():
            signal.signal(number, handler)
