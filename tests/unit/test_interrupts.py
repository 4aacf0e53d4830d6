"""Signals whose exception Python swallows are heard, and nothing is printed of them."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest

from flexgen_h2o.core import interrupts


class Dropped:
    """What it is told is called where Python swallows exceptions: as it goes."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def __del__(self) -> None:
        self._call()


def _end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(100):  # Python runs the handler between two steps
        pass


def _fail() -> None:
    raise ValueError("its own")


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_in_a_finaliser_is_heard_and_not_printed(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with interrupts.as_exceptions():
        Dropped(_end)
        assert str(interrupts.arrived()) == "SIGTERM"
        with pytest.raises(interrupts.Interrupted, match="SIGTERM"):
            interrupts.check()
    assert interrupts.arrived() is None and capfd.readouterr().err == ""


def test_other_exceptions_are_still_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    monkeypatch.setattr("sys.unraisablehook", lambda found: shown.append(found.exc_value))
    with interrupts.as_exceptions():
        Dropped(_fail)
    assert [str(error) for error in shown] == ["its own"]
