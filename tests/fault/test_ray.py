"""Batch jobs on a Ray of their own, two actors on this machine: killed actors, a killed driver,
signals, bad rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.extras import needs
from tests.fault.jobs import Job, launch, rows_of, tokens_of, write_input
from tests.forks import environment

pytestmark = [pytest.mark.slow, needs("ray")]

ROWS = 400
RAY = ("--ray", "--ray-actors", "2", "--host-mem", "512MiB")


def ray_processes(job: Job) -> dict[int, str]:
    """All that descend from the job, with their titles."""
    found = subprocess.run(
        ["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout
    lines = (line.split(None, 2) for line in found.splitlines())
    table = {int(pid): (int(parent), title) for pid, parent, title in lines}
    inside = {job.pid}
    while more := {pid for pid, (parent, _) in table.items() if parent in inside} - inside:
        inside |= more
    return {pid: table[pid][1] for pid in inside - {job.pid}}


def actors(job: Job) -> list[int]:
    """Both engines, as soon as they live."""
    while (
        len(
            found := [
                pid
                for pid, title in ray_processes(job).items()
                if title.startswith("ray::MapWorker")
            ]
        )
        < 2
    ):
        assert not job.has_ended(), job.err
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """What the job answers without Ray: tokens by id."""
    folder = tmp_path_factory.mktemp("whole")
    write_input(folder, ROWS)
    job = launch(folder)
    assert job.wait() == 0, job.err
    return tokens_of(rows_of(job.output))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_input(tmp_path, ROWS)
    return tmp_path


def test_two_actors_answer_what_one_engine_does(folder: Path, whole: dict[str, list[int]]) -> None:
    """Bad rows among them; then nothing is left to be done, and a third row that is bad is one too
    many."""
    job = launch(folder, *RAY, "--share-prefix", "on", "--max-errors", "2")
    assert job.wait() == 0, job.err
    assert tokens_of(rows_of(job.output)) == whole
    assert "2 engines on Ray" in job.err
    assert f"{ROWS + 2} answers in out.jsonl, 2 of them errors" in job.out
    status = json.loads((folder / "out.jsonl.status.json").read_text())
    assert (
        status["state"] == "done"
        and status["done"] == ROWS + 2
        and status["peak_bytes"]["host"] > 0
    )
    job.output.unlink()
    again = launch(folder, *RAY, "--max-errors", "1")
    assert again.wait() == 2 and "--max-errors 1: 2 rows of out.jsonl are errors" in again.err


def test_killed_actors_lose_nothing(folder: Path, whole: dict[str, list[int]]) -> None:
    """One of them, then both."""
    job = launch(folder, *RAY, "--no-refill")
    job.wait_for_rows(20)
    first = actors(job)
    os.kill(first[0], signal.SIGKILL)
    job.wait_for_rows(40)
    for actor in set(actors(job)) - {first[0]}:
        os.kill(actor, signal.SIGKILL)
    assert job.wait() == 0, job.err
    assert tokens_of(rows_of(job.output)) == whole


def test_a_killed_driver_takes_its_ray_with_it_and_the_rest_can_be_done(
    folder: Path, whole: dict[str, list[int]]
) -> None:
    """Twice: by kill -9, and by SIGTERM, which ends the job within seconds. The rest is done
    without Ray."""
    job = launch(folder, *RAY)
    job.wait_for_rows(20)
    left = {
        pid: title for pid, title in ray_processes(job).items() if "Agent" not in title
    }  # Ray's, which end later
    job.send(signal.SIGKILL)
    job.wait()
    before = job.output.read_bytes().count(b"\n")
    assert 20 <= before < ROWS
    while any(_lives(pid) for pid in left):  # pytest's limit ends it where one stays
        time.sleep(0.2)
    again = launch(folder, *RAY)
    again.wait_for_rows(before + 20)
    assert f"{ROWS + 2} prompts, {before} of them done before" in again.out
    says = subprocess.run(
        [sys.executable, "-m", "flexgen_h2o.batch", "--output", "out.jsonl", "--status"],
        capture_output=True,
        text=True,
        cwd=folder,
        env=environment(),
    )
    assert says.returncode == 0 and f"state: running (process {again.pid})" in says.stdout
    again.send(signal.SIGTERM)
    time.sleep(0.3)
    again.send(signal.SIGINT)  # an impatient user's does not disturb the end
    assert again.wait() == 143, again.err
    assert before < len(tokens_of(rows_of(job.output))) < ROWS + 2
    assert json.loads((folder / "out.jsonl.status.json").read_text())["state"] == "ended by SIGTERM"
    assert again.err.splitlines()[-1] == "batch: ended by SIGTERM"
    rest = launch(folder)
    assert rest.wait() == 0, rest.err
    assert tokens_of(rows_of(job.output)) == whole


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
