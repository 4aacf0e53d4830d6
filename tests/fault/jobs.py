"""Batch jobs in processes of their own, and how they are killed. Most are forked off one that has imported torch."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flexgen_h2o

# Reads a job a line ({"folder", "flags", "file_limit"}), forks it and says its process id; then how it ended, as asked.
SERVER = """
import json, os, resource, signal, sys
from transformers import AutoConfig, AutoTokenizer
from flexgen_h2o import batch, llm
from flexgen_h2o.jobs import runner
import numba
numba.njit(lambda x: x + 1)(1)  # what every job would load by itself, a second each
for line in sys.stdin:
    asked = json.loads(line)
    if "wait" in asked:
        _, status, usage = os.wait4(asked["wait"], 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), usage.ru_maxrss * 1024]), flush=True)
        continue
    pid = os.fork()
    if not pid:
        # A shell that runs the tests in the background has SIGINT ignored, nohup SIGHUP, and children inherit that.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.chdir(asked["folder"])
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        if asked["file_limit"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (asked["file_limit"],) * 2)
        code = batch.main(asked["flags"])
        sys.stdout.flush()
        os._exit(code)
    print(pid, flush=True)
"""
FILES = ("--input", "in.jsonl", "--output", "out.jsonl")
FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--offload-dir", "offload"),
    *("--gpu-batch-size", "4", "--num-gpu-batches", "2", "--window", "16"),
)


@dataclass
class Running:
    """A job that was started. `folder` has in.jsonl, out.jsonl, stdout and stderr.

    reap: waits, and gives the code and the peak RSS in bytes. Nothing here has a deadline, so a busy machine fails no
    test; pytest's own limit ends a hang.
    """

    folder: Path
    pid: int
    reap: Callable[[], tuple[int, int]]
    code: int | None = None
    peak_rss: int = 0  # bytes, once it has ended; with those that it shares with the server

    @property
    def output(self) -> Path:
        return self.folder / "out.jsonl"

    @property
    def err(self) -> str:
        return (self.folder / "stderr").read_text()

    def send(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        if self.code is None:
            self.code, self.peak_rss = self.reap()
        return self.code

    def has_ended(self) -> bool:
        """It is a zombie then, until `wait`."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

    def lines(self) -> int:
        """Whole lines of the output."""
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    def wait_for_moment(self, has_come: Callable[[], bool], generator: random.Random) -> None:
        """And a little longer, or until the job has ended: a kill at any moment is as good as another."""
        while not has_come() and not self.has_ended():
            time.sleep(generator.uniform(0, 0.02))

    def wait_for_rows(self, count: int) -> None:
        """Until so many rows are in the output; a job that ends before fails the test."""
        while self.lines() < count:
            assert not self.has_ended() or self.lines() >= count, self.err
            time.sleep(0.005)


def ask(server: subprocess.Popen[str], question: dict[str, Any]) -> Any:
    assert server.stdin is not None and server.stdout is not None
    server.stdin.write(json.dumps(question) + "\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


@dataclass
class Jobs:
    """Starts jobs; at the end none is left."""

    server: subprocess.Popen[str]
    started: list[Running] = field(default_factory=list)

    def start(self, folder: Path, *flags: str, file_limit: int = 0) -> Running:
        asked = {"folder": str(folder), "flags": [*FILES, *FLAGS, *flags], "file_limit": file_limit}
        pid = ask(self.server, asked)
        self.started.append(Running(folder, pid, lambda: ask(self.server, {"wait": pid})))
        return self.started[-1]


def environment() -> dict[str, str]:
    """Of a process that runs this package. One thread: jobs this small lose more by waking a second one than they
    gain."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(flexgen_h2o.__file__).parents[1])}


def launch(folder: Path, *flags: str) -> Running:
    """The job as a shell starts it: a process that imports everything itself."""
    argv = [sys.executable, "-m", "flexgen_h2o.batch", *FILES, *FLAGS, *flags]
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
        process = subprocess.Popen(
            argv, cwd=folder, env=environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )  # fmt: skip
    return Running(folder, process.pid, lambda: (process.wait(), 0))


@contextmanager
def job_server() -> Iterator[Jobs]:
    argv = [sys.executable, "-c", SERVER]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()) as server:
        jobs = Jobs(server)
        try:
            yield jobs
        finally:
            for one in jobs.started:
                if one.code is None:
                    one.send(signal.SIGKILL)
                    one.wait()
            assert server.stdin is not None
            server.stdin.close()


def write_input(folder: Path, rows: int) -> dict[str, int]:
    """Requests of many lengths, two lines that cannot be run among them; their ids, each with its most new tokens."""
    lines, ids = [], {}
    for i in range(rows):
        most = 1 + i * 7 % 17
        ids[f"row-{i}"] = most
        body = {"prompt": f"def f{i}(x):\n" + "    x += 1\n" * (i % 5), "max_tokens": most}
        lines.append(json.dumps({"custom_id": f"row-{i}", "url": "/v1/completions", "body": body}))
    lines[rows // 2 : rows // 2] = ["{bad", json.dumps({"custom_id": "unknown", "url": "/v1/embeddings", "body": {}})]
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    return {**ids, f"line-{rows // 2 + 1}": 0, "unknown": 0}


def rows_of(output: Path) -> list[dict[str, Any]]:
    """Every line of an output; the test fails where one is not whole."""
    data = output.read_bytes()
    assert not data or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def tokens_of(rows: list[dict[str, Any]]) -> dict[str, list[int]]:
    """Token ids by custom id, [] for error rows; fails where an id is there twice."""
    found = {
        row["custom_id"]: [] if row["error"] else row["response"]["body"]["choices"][0]["token_ids"] for row in rows
    }
    assert len(found) == len(rows)
    return found


def tear_the_end(output: Path, generator: random.Random) -> None:
    """Sometimes, as after a power cut: the newest bytes are gone."""
    if output.exists() and generator.random() < 0.5:
        data = output.read_bytes()
        output.write_bytes(data[: len(data) - generator.randrange(1, 1000)])


def whole_rows_of(output: Path) -> dict[str, list[int]]:
    """Token ids by custom id of those rows that are whole, however the output ends."""
    if not output.exists():
        return {}
    return tokens_of([json.loads(line) for line in output.read_bytes().split(b"\n")[:-1]])
