"""A line of `flexgen-h2o` within a process of tests/forks.py: hostile lines can take it down, never
the tests."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

# Bytes more than the server has: what reads without end fails soon, and the machine goes on.
ADDRESS_SPACE = 3 << 29
# Scripts for tests/forks.py. The first is for the server itself: what it loads is there then.
LOAD = "from tests.doors.measured import load; load(*sys.argv[1:])"
RUN = "from tests.doors.measured import run; run(*sys.argv[1:])"


@contextmanager
def _prepared(home: str) -> Iterator[None]:
    """No card, no Ray, and a profile instead of minutes of measuring."""
    from flexgen_h2o.planner.measure import run as measure
    from tests.unit.test_profile import PROFILE

    sys.modules["ray"] = None  # type: ignore[assignment] - as if it were not installed
    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, HOME=home, XDG_CACHE_HOME=f"{home}/cache"))
        stack.enter_context(mock.patch("torch.cuda.is_available", return_value=False))
        stack.enter_context(mock.patch.object(measure, "measure", return_value=PROFILE))
        yield


def load(home: str, folder: str, *argv: str) -> None:
    """A line in the folder `folder`. home: the user's."""
    from flexgen_h2o import cli

    with _prepared(home):
        os.chdir(folder)
        code = cli.main([*argv])
    assert code == 0, (argv, code)


def run(home: str, *argv: str) -> None:
    from flexgen_h2o import cli

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + ADDRESS_SPACE
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    with _prepared(home):
        sys.exit(cli.main([*argv]))
