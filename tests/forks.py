"""Processes that are forked off one which has loaded everything: a tenth of a second each instead
of six.

A forked process has its own signals, descriptors, standard output, memory and end, as one that a
shell starts.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).parents[1]
SIGNALS = [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]  # and the exit codes
WARM = (
    "--model opt-tiny --device cpu --dtype float32 --prompt-len 4 --gen-len 2 --no-log "
    "--verbose 0 --offload-dir"
)


@dataclass
class Process:
    """A process that was started. `folder` is its working folder, with stdout and stderr.

    reap: waits, and gives the code and the peak RSS in bytes. Nothing here has a deadline, so a
    busy machine fails no test; pytest's own limit ends a hang.
    """

    folder: Path
    pid: int
    reap: Callable[[], tuple[int, int]]
    code: int | None = None
    peak_rss: int = 0  # bytes, once it has ended; with those that it shares with the server

    @property
    def out(self) -> str:
        return (self.folder / "stdout").read_bytes().decode(errors="replace")

    @property
    def err(self) -> str:
        return (self.folder / "stderr").read_bytes().decode(errors="replace")

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """The exit code; of a process that a signal ended, the signal's number below 0."""
        if self.code is None:
            self.code, self.peak_rss = self.reap()
        return self.code

    def has_ended(self) -> bool:
        """It is a zombie then, until `wait`."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


AnyProcess = TypeVar("AnyProcess", bound=Process)


def environment() -> dict[str, str]:
    """Of a process that runs this package from anywhere. One thread: models this small lose more by
    waking a second one than they gain, and threads do not survive a fork."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": path,
        "PYTHONIOENCODING": "utf-8:strict",
    }


class Forks:
    """Starts processes that are forked off a server."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server

    def _ask(self, **question: Any) -> Any:
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps(question), file=self._server.stdin, flush=True)
        answer = self._server.stdout.readline()
        assert answer, "the server has ended"
        return json.loads(answer)

    def load(self, script: str, *argv: object) -> None:
        """Run `script` in the server itself: what it loads is in every process from then on."""
        self._ask(load=script, argv=[*map(str, argv)])

    def start(
        self,
        folder: Path,
        script: str,
        *argv: object,
        file_limit: int = 0,
        kind: type[AnyProcess] = Process,
    ) -> AnyProcess:
        """A process that runs `script` as `python -c` does. file_limit: bytes that a file may have,
        where not 0."""
        pid = self._ask(
            folder=str(folder), script=script, argv=[*map(str, argv)], file_limit=file_limit
        )
        return kind(folder, pid, lambda: self._ask(wait=pid))

    def run(self, folder: Path, script: str, *argv: object) -> Process:
        """As `start`, to its end."""
        process = self.start(folder, script, *argv)
        process.wait()
        return process


@contextmanager
def fork_server() -> Iterator[Forks]:
    """Its processes end with it."""
    argv = [sys.executable, "-m", "tests.forks"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, env=environment()) as server:
        try:
            yield Forks(server)
        finally:
            server.kill()


# ---- In the server


def load_all() -> None:
    """What a process would load by itself: libraries, and the kernels of a run."""
    import numba  # noqa: F401
    import psutil  # noqa: F401
    from transformers import AutoConfig, AutoTokenizer  # noqa: F401

    from flexgen_h2o import batch, cli, flex_opt, llm  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        assert flex_opt.main([*WARM.split(), folder]) == 0


def serve() -> None:
    """Reads questions and answers each, until a fork of this process returns from here with a
    script to run."""
    to_tests = os.fdopen(os.dup(1), "w")
    from_tests = os.fdopen(os.dup(0))
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what is loaded here may read standard input
    load_all()
    for line in from_tests:
        asked = json.loads(line)
        answer: Any = None
        if "wait" in asked:
            _, status, usage = os.wait4(asked["wait"], 0)
            answer = os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024
        elif "load" in asked:
            _execute(asked["load"], asked["argv"])
        else:
            # a collection in the process, as at its end, looks at nothing that was here before
            gc.freeze()
            sys.stdout.flush()
            answer = os.fork()
            if not answer:
                return _begin(**asked)
        print(json.dumps(answer), file=to_tests, flush=True)
    os._exit(0)


def _begin(folder: str, script: str, argv: list[str], file_limit: int) -> None:
    """In a forked process: as if a shell had started it in `folder`."""
    from tqdm import tqdm

    from flexgen_h2o.engine.resources import Engine

    tqdm.set_lock(
        threading.RLock()
    )  # the server's is a semaphore, which a process that is killed may hold for ever
    Engine._first_process = (
        None  # the server has closed its engines, and computes in one thread: none is missing
    )
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it ends with the server
    default_signals()
    os.chdir(folder)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    if file_limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
    _execute(script, argv)


def _execute(script: str, argv: list[str]) -> None:
    """As `python -c` does: its names are __main__'s."""
    sys.argv = ["-c", *argv]
    exec(compile(script, "<script>", "exec"), vars(sys.modules["__main__"]))


def default_signals() -> None:
    """A shell that runs the tests in the background has SIGINT ignored, nohup SIGHUP, and children
    inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


if __name__ == "__main__":
    serve()
