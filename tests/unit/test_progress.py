"""The progress bar: on a terminal only, and its total follows rows that stop early."""

from __future__ import annotations

import io
import sys

import pytest

from flexgen_h2o.engine.generation import Row
from flexgen_h2o.engine.metrics import Progress
from flexgen_h2o.engine.prompts import Prompt


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def row(max_new: int, got: int) -> Row:
    return Row(Prompt(0, (1,), None), max_new, [5] * got)


def test_nothing_is_printed_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with Progress(10) as progress:
        progress.sweep(5)
        progress.finish([row(5, 2)])
    assert sys.stderr.getvalue() == "" and not Progress.on_terminal()


def test_without_a_stderr_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    assert not Progress.on_terminal()


def test_tokens_that_nobody_needs_any_more_leave_the_total(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with Progress(20) as progress:
        progress.sweep(2)
        progress.finish([row(10, 1), row(10, 10)])  # the first stops nine tokens early
        progress.sweep(9)
    shown = sys.stderr.getvalue()
    assert "11/11" in shown and "generate" in shown
