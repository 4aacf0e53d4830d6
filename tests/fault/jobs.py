"""Batch jobs in processes of their own, and how they are killed."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forks import Forks, Process, environment

RUN = """
import os, sys
from flexgen_h2o import batch
code = batch.main(sys.argv[1:])
sys.stdout.flush()
os._exit(code)
"""
FILES = ("--input", "in.jsonl", "--output", "out.jsonl")
FLAGS = (
    *("--device", "cpu", "--dtype", "float32", "--offload-dir", "offload"),
    *("--gpu-batch-size", "4", "--num-gpu-batches", "2", "--window", "16"),
)


def _with_model(flags: tuple[str, ...]) -> tuple[str, ...]:
    return flags if "--model" in flags else ("--model", "opt-tiny", *flags)


@dataclass
class Job(Process):
    """A job that was started. `folder` has in.jsonl and out.jsonl too."""

    @property
    def output(self) -> Path:
        return self.folder / "out.jsonl"

    def lines(self) -> int:
        """Whole lines of the output."""
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    def wait_for_moment(self, has_come: Callable[[], bool], generator: random.Random) -> None:
        """And a little longer, or until the job has ended: a kill at any moment is as good as
        another."""
        while not has_come() and not self.has_ended():
            time.sleep(generator.uniform(0, 0.02))

    def wait_for_any_moment(
        self, rows: int, first_row_s: float, kills_left: int, generator: random.Random
    ) -> None:
        """While it starts, as its scratch folder appears, or some rows on: few, so that many kills
        fit a job."""
        offload = self.folder / "offload"
        kind = generator.random()
        if kind < 0.15:
            time.sleep(generator.uniform(0, first_row_s))
            return
        if kind < 0.35:
            before = set(offload.iterdir())
            self.wait_for_moment(lambda: bool(set(offload.iterdir()) - before), generator)
        else:
            done = self.lines()
            more = generator.randint(0, max(1, 2 * (rows - done) // (kills_left + 1)))
            self.wait_for_moment(lambda: self.lines() > done + more, generator)
        time.sleep(generator.uniform(0, 0.05))

    def wait_for_rows(self, count: int) -> None:
        """Until so many rows are in the output; a job that ends before fails the test."""
        while self.lines() < count:
            assert not self.has_ended() or self.lines() >= count, self.err
            time.sleep(0.005)


@dataclass
class Jobs:
    """Starts jobs, forked off a process that has loaded everything."""

    forks: Forks

    def start(self, folder: Path, *flags: str, file_limit: int = 0) -> Job:
        return self.forks.start(
            folder, RUN, *FILES, *FLAGS, *_with_model(flags), file_limit=file_limit, kind=Job
        )


def launch(folder: Path, *flags: str) -> Job:
    """The job as a shell starts it: a process that imports everything itself."""
    argv = [sys.executable, "-m", "flexgen_h2o.batch", *FILES, *FLAGS, *_with_model(flags)]
    with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
        process = subprocess.Popen(
            argv, cwd=folder, env=environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=err
        )
    return Job(folder, process.pid, lambda: (process.wait(), 0))


def write_input(folder: Path, rows: int) -> dict[str, int]:
    """Requests of many lengths, two lines that cannot be run among them; their ids, each with its
    most new tokens."""
    lines = []
    ids = {}
    for i in range(rows):
        most = 1 + i * 7 % 17
        ids[f"row-{i}"] = most
        body = {"prompt": f"def f{i}(x):\n" + "    x += 1\n" * (i % 5), "max_tokens": most}
        lines.append(json.dumps({"custom_id": f"row-{i}", "url": "/v1/completions", "body": body}))
    lines[rows // 2 : rows // 2] = [
        "{bad",
        json.dumps({"custom_id": "unknown", "url": "/v1/embeddings", "body": {}}),
    ]
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
        row["custom_id"]: [] if row["error"] else row["response"]["body"]["choices"][0]["token_ids"]
        for row in rows
    }
    assert len(found) == len(rows)
    return found


def whole_rows_of(output: Path) -> dict[str, list[int]]:
    """Token ids by custom id of those rows that are whole, however the output ends."""
    if not output.exists():
        return {}
    return tokens_of([json.loads(line) for line in output.read_bytes().split(b"\n")[:-1]])


def kill_until_done(
    start: Callable[[], Job],
    tokens: dict[str, list[int]],
    kills: int,
    wait: Callable[[Job, int], None],
    generator: random.Random,
) -> int:
    """Start a job again until a run of it ends by itself, and kill -9 at most `kills` runs. Return
    how many were hit.

    tokens: of an undisturbed job. wait: returns at the moment of a kill; its last argument is how
    many kills are left. Sometimes the newest bytes are gone then, as after a power cut.
    """
    hit = 0
    kept = dict[str, list[int]]()
    while True:
        job = start()
        if hit < kills:
            wait(job, kills - hit)
            job.send(signal.SIGKILL)
        if job.wait() == 0:
            assert tokens_of(rows_of(job.output)) == tokens
            return hit
        assert job.code == -signal.SIGKILL, job.err
        hit += 1
        found = whole_rows_of(job.output)
        assert kept.keys() <= found.keys(), "rows that were on disk are gone"
        assert found.items() <= tokens.items()
        if job.output.exists() and generator.random() < 0.5:
            data = job.output.read_bytes()
            job.output.write_bytes(data[: len(data) - generator.randrange(1, 1000)])
        kept = whole_rows_of(job.output)
