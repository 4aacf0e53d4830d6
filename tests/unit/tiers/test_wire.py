"""Meeting the other ranks: nobody waits longer than it is asked to."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from flexgen_h2o.core import interrupts
from flexgen_h2o.engine.distributed import is_waiting, meet


def test_a_signal_ends_the_wait_for_others() -> None:
    """The thread beside is left behind, and said to be."""
    come = threading.Event()
    killer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM))
    killer.start()
    with interrupts.as_exceptions(), pytest.raises(interrupts.Interrupted, match="SIGTERM"):
        meet(lambda: come.wait(60))
    assert is_waiting()
    come.set()
    for thread in threading.enumerate():
        if thread.name.startswith("wire"):
            thread.join()
    assert not is_waiting()


def test_what_goes_wrong_while_meeting_is_raised() -> None:
    with pytest.raises(RuntimeError, match="no route"):
        meet(lambda: (_ for _ in ()).throw(RuntimeError("no route")))
    assert not is_waiting()
