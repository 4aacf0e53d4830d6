"""Command lines in processes that are forked off one which has imported everything: a few milliseconds each.

A hostile line can take its own process down, never the tests'; what it says and what it held at most come back.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ADDRESS_SPACE = 3 << 29  # bytes more than the server has: what reads without end fails soon, and the machine goes on
DIED, BUG = 1000, 2000  # no exit codes: ended by a signal (added to its number), an exception that came through


@dataclass(frozen=True)
class Ended:
    """How a command line ended. nbytes: of RAM that it held at most, beyond what the server holds; files are not
    counted."""

    code: int
    out: str
    err: str
    nbytes: int


class Forked:
    """Runs command lines of `flexgen-h2o`, one at a time."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server

    def __call__(self, folder: Path, argv: Sequence[str]) -> Ended:
        """In the working folder `folder`, where stdout, stderr and result.json are written too."""
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps([str(folder), list(argv)]), file=self._server.stdin, flush=True)
        said = self._server.stdout.readline()
        assert said, "the server has ended"
        status = os.waitstatus_to_exitcode(int(said))
        out, err = ((folder / name).read_bytes().decode(errors="replace") for name in ("stdout", "stderr"))
        if status:
            return Ended(DIED - status, out, err, 0)
        code, nbytes = json.loads((folder / "result.json").read_text())
        return Ended(code, out, err, nbytes)


@contextmanager
def forked(home: Path, warm_up: Sequence[tuple[Path, Sequence[str]]]) -> Iterator[Forked]:
    """home: the user's. warm_up: folders and lines that are run in the server itself: what they load is there then."""
    env = {
        **os.environ, "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "OMP_NUM_THREADS": "1",
        "PYTHONIOENCODING": "utf-8:strict",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }  # fmt: skip
    argv = [sys.executable, "-m", "tests.doors.forked"]
    pipe, cwd = subprocess.PIPE, str(home)
    with (home / "server.log").open("w") as log:
        server = subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=log, text=True, env=env, cwd=cwd)
    with server:
        try:
            assert server.stdin is not None and server.stdout is not None
            print(json.dumps([[str(folder), list(line)] for folder, line in warm_up]), file=server.stdin, flush=True)
            assert server.stdout.readline() == "ready\n", (home / "server.log").read_text()
            yield Forked(server)
        finally:
            server.kill()


# ---- In the server


def serve() -> None:
    """Reads the lines to warm up with, then a folder and a line each; says the wait status of each."""
    to_parent = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _prepare()
    from flexgen_h2o import cli

    for folder, argv in json.loads(sys.stdin.readline()):
        os.chdir(folder)
        code = cli.main(argv)
        assert code == 0, (argv, code)
    print("ready", file=to_parent, flush=True)
    for line in sys.stdin:
        folder, argv = json.loads(line)
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            _child(folder, argv)
        print(os.waitpid(pid, 0)[1], file=to_parent, flush=True)


def _prepare() -> None:
    """No card, no Ray, and a profile instead of minutes of measuring."""
    import torch

    from flexgen_h2o.planner.measure import run as choose
    from flexgen_h2o.planner.measure import run as measure
    from tests.unit.test_profile import PROFILE

    torch.cuda.is_available = lambda: False
    sys.modules["ray"] = None  # type: ignore[assignment] - as if it were not installed
    choose.measure = measure.measure = lambda *args, **how: PROFILE


def _child(folder: str, argv: list[str]) -> None:
    """Ends this process, with 0 where there is a result."""
    from flexgen_h2o.engine.resources import Engine

    try:
        Engine._first_process = None  # the server has closed its engines, and computes in one thread: none is missing
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the server
        os.chdir(folder)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        before = _memory()
        room = before["VmSize"] + ADDRESS_SPACE
        resource.setrlimit(resource.RLIMIT_AS, (room, room))
        code = _run(argv)
        now = _memory()
        # Pages of files are those of libraries and of mapped checkpoints, which the kernel takes back.
        nbytes = now["VmHWM"] - now["RssFile"] - before["RssAnon"]
        Path(folder, "result.json").write_text(json.dumps([code, nbytes]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _run(argv: list[str]) -> int:
    from flexgen_h2o import cli

    try:
        code = cli.main(argv)
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        code = BUG
    return code


def _memory() -> dict[str, int]:
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    found: dict[str, Any] = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1:] == ["kB"]}
    return found


if __name__ == "__main__":
    serve()
