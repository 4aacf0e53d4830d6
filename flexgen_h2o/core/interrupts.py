"""SIGINT, SIGTERM and SIGHUP as exceptions that cannot get lost.

A signal handler raises in whatever code the main thread runs, and Python swallows exceptions in finalisers and weak
references' callbacks. So the signal is also remembered, the engine checks at every step, and what is swallowed is not
printed.

Python's events, conditions and futures stay locked for ever where an exception comes right after they took their lock.
So the main thread uses them only through `wait_for` and `start`, or where signals are `held`.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE_S = 0.2  # after which a wait looks for a signal


class Interrupted(BaseException):
    """A signal asked the run to end; `number` says which."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


_arrived: list[int] = []
_held = 0


def arrived() -> Interrupted | None:
    """The signal that has arrived, also where its exception was swallowed."""
    return Interrupted(_arrived[0]) if _arrived else None


def asks_to_end(error: BaseException) -> bool:
    """Return whether an exception is a request to end: no handler of a prompt's errors may keep it.

    Other exceptions that are no `Exception` are failures: pyo3's PanicException is one, of a tokenizer in Rust.
    """
    return isinstance(error, Interrupted | KeyboardInterrupt | SystemExit | GeneratorExit)


def check() -> None:
    """Raise Interrupted if a signal has arrived and its exception was swallowed."""
    found = arrived()
    if found is not None:
        raise found


@contextmanager
def held() -> Iterator[None]:
    """Signals that arrive in here are remembered and not raised: for cleaning up."""
    global _held
    if threading.current_thread() is not threading.main_thread():  # signals are raised in the main thread only
        yield
        return
    _held += 1
    try:
        yield
    finally:
        _held -= 1


def wait_for(event: threading.Event) -> None:
    """Block until `event` is set. In the main thread a signal ends the wait, unless signals are `held`."""
    while not event.is_set():
        with held():
            event.wait(_PATIENCE_S)
        if not _held and threading.current_thread() is threading.main_thread():
            check()


def start(thread: threading.Thread) -> None:
    """Start a thread, which waits until it runs."""
    with held():
        thread.start()


@contextmanager
def asking_first(is_taken: Callable[[], bool]) -> Iterator[None]:
    """In here SIGINT calls `is_taken` in the main thread; where that says no, the signal arrives as ever."""
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
    """The first of these signals raises Interrupted in the main thread; later ones are ignored.

    SIGHUP stays ignored where it is, as under nohup.
    """

    def arrive(number: int, frame: FrameType | None) -> None:
        if not _arrived:
            _arrived.append(number)
            if not _held:
                raise Interrupted(number)

    try:
        handled = [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) != signal.SIG_IGN]
        before = {number: signal.signal(number, arrive) for number in handled}
    except ValueError:  # not the main thread: the embedding program handles signals
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
