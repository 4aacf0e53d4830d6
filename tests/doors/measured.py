"""A line of `flexgen-h2o` within a process of tests/forks.py: hostile lines can take it down, never
the tests."""

from __future__ import annotations

import json
import os
import resource
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from tests.forks import Forks

ADDRESS_SPACE = (
    3 << 29
)  # bytes more than the server has: what reads without end fails soon, and the machine goes on
# no exit codes: ended by a signal (added to its number), an exception that came through
DIED = 1000
BUG = 2000


@dataclass(frozen=True)
class Ended:
    """How a line ended. nbytes: of RAM that it held at most, beyond what the server holds; files
    are not counted."""

    code: int
    out: str
    err: str
    nbytes: int


@dataclass(frozen=True)
class Measured:
    """Runs lines. home: the user's."""

    forks: Forks
    home: Path

    def load(self, folder: Path, argv: Sequence[str]) -> None:
        """Run a line in the server itself: what it loads is there then."""
        self.forks.load(
            "from tests.doors.measured import load; load(*sys.argv[1:])", self.home, folder, *argv
        )

    def __call__(self, folder: Path, argv: Sequence[str]) -> Ended:
        """In the working folder `folder`, where stdout, stderr and result.json are written too."""
        done = self.forks.run(
            folder, "from tests.doors.measured import run; run(*sys.argv[1:])", self.home, *argv
        )
        assert done.code is not None
        if done.code:
            return Ended(DIED - done.code, done.out, done.err, 0)
        code, nbytes = json.loads((folder / "result.json").read_text())
        return Ended(code, done.out, done.err, nbytes)


# ---- In the server and in processes forked off it


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
    from flexgen_h2o import cli

    with _prepared(home):
        os.chdir(folder)
        code = cli.main([*argv])
    assert code == 0, (argv, code)


def run(home: str, *argv: str) -> None:
    """Ends this process, with 0 where there is a result."""
    try:
        before = _memory()
        room = before["VmSize"] + ADDRESS_SPACE
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
        with _prepared(home):
            code = _exit_code(argv)
        now = _memory()
        # Pages of files are those of libraries and of mapped checkpoints, which the kernel takes
        # back.
        nbytes = now["VmHWM"] - now["RssFile"] - before["RssAnon"]
        Path("result.json").write_text(json.dumps([code, nbytes]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _exit_code(argv: Sequence[str]) -> int:
    from flexgen_h2o import cli

    try:
        code = cli.main([*argv])
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        code = BUG
    return code


def _memory() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1:] == ["kB"]}
