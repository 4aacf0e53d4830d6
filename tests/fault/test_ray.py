"""Batch jobs on a Ray of their own, two actors on this machine: killed actors, a killed driver, signals, bad rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import flexgen_h2o
from tests.fault.jobs import FLAGS, rows_of, tokens_of, write_input

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

ROWS = 400
RAY = ("--ray", "--ray-actors", "2", "--host-mem", "512MiB")


class Job:
    """A job that runs. `folder` has in.jsonl, out.jsonl, stdout and stderr."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder, self.output = folder, folder / "out.jsonl"
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(flexgen_h2o.__file__).parents[1])}
        argv = [sys.executable, "-m", "flexgen_h2o.batch", "--input", "in.jsonl", "--output", "out.jsonl"]
        with (folder / "stdout").open("w") as out, (folder / "stderr").open("w") as err:
            self.process = subprocess.Popen([*argv, *FLAGS, *flags], stdout=out, stderr=err, cwd=folder, env=env)

    @property
    def err(self) -> str:
        return (self.folder / "stderr").read_text()

    def wait(self) -> int:
        return self.process.wait()

    def wait_for_rows(self, count: int) -> None:
        while not self.output.exists() or self.output.read_bytes().count(b"\n") < count:
            assert self.process.poll() is None, self.err
            time.sleep(0.01)

    def ray_processes(self) -> dict[int, str]:
        """All that descend from the job, with their titles."""
        found = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
        lines = (line.split(None, 2) for line in found.splitlines())
        table = {int(pid): (int(parent), title) for pid, parent, title in lines}
        inside = {self.process.pid}
        while more := {pid for pid, (parent, _) in table.items() if parent in inside} - inside:
            inside |= more
        return {pid: table[pid][1] for pid in inside - {self.process.pid}}

    def actors(self) -> list[int]:
        """Both engines, as soon as they live."""
        while len(found := [p for p, title in self.ray_processes().items() if title.startswith("ray::MapWorker")]) < 2:
            assert self.process.poll() is None, self.err
            time.sleep(0.1)
        return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """What the job answers without Ray: tokens by id."""
    folder = tmp_path_factory.mktemp("whole")
    write_input(folder, ROWS)
    job = Job(folder)
    assert job.wait() == 0, job.err
    return tokens_of(rows_of(job.output))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_input(tmp_path, ROWS)
    return tmp_path


def test_two_actors_answer_what_one_engine_does(folder: Path, whole: dict[str, list[int]]) -> None:
    """Bad rows among them; then nothing is left to be done, and a third row that is bad is one too many."""
    job = Job(folder, *RAY, "--share-prefix", "on", "--max-errors", "2")
    assert job.wait() == 0, job.err
    assert tokens_of(rows_of(job.output)) == whole
    assert "2 engines on Ray" in job.err
    assert f"{ROWS + 2} rows in out.jsonl, 2 of them errors" in (folder / "stdout").read_text()
    status = json.loads((folder / "out.jsonl.status.json").read_text())
    assert status["state"] == "done" and status["done"] == ROWS + 2 and status["peak_bytes"]["host"] > 0
    job.output.unlink()
    again = Job(folder, *RAY, "--max-errors", "1")
    assert again.wait() == 2 and "--max-errors 1: 2 rows of out.jsonl are errors" in again.err


def test_killed_actors_lose_nothing(folder: Path, whole: dict[str, list[int]]) -> None:
    """One of them, then both."""
    job = Job(folder, *RAY, "--no-refill")
    job.wait_for_rows(20)
    first = job.actors()
    os.kill(first[0], signal.SIGKILL)
    job.wait_for_rows(40)
    for actor in set(job.actors()) - {first[0]}:
        os.kill(actor, signal.SIGKILL)
    assert job.wait() == 0, job.err
    assert tokens_of(rows_of(job.output)) == whole


def test_a_killed_driver_takes_its_ray_with_it_and_the_rest_can_be_done(
    folder: Path, whole: dict[str, list[int]]
) -> None:
    """Twice: by kill -9, and by SIGTERM, which ends the job within seconds. The rest is done without Ray."""
    job = Job(folder, *RAY)
    job.wait_for_rows(20)
    left = {pid: title for pid, title in job.ray_processes().items() if "Agent" not in title}  # Ray's, which end later
    job.process.kill()
    job.process.wait()
    before = job.output.read_bytes().count(b"\n")
    assert 20 <= before < ROWS
    while any(_lives(pid) for pid in left):  # pytest's limit ends it where one stays
        time.sleep(0.2)
    again = Job(folder, *RAY)
    again.wait_for_rows(before + 20)
    assert f"{ROWS + 2} rows, {before} of them done before" in (folder / "stdout").read_text()
    says = subprocess.run(
        [sys.executable, "-m", "flexgen_h2o.batch", "--output", "out.jsonl", "--status"],
        capture_output=True, text=True, cwd=folder,
    )  # fmt: skip
    assert says.returncode == 0 and f"state: running (process {again.process.pid})" in says.stdout
    again.process.terminate()
    time.sleep(0.3)
    again.process.send_signal(signal.SIGINT)  # an impatient user's does not disturb the end
    assert again.wait() == 143, again.err
    assert before < len(tokens_of(rows_of(job.output))) < ROWS + 2
    assert json.loads((folder / "out.jsonl.status.json").read_text())["state"] == "ended by SIGTERM"
    assert again.err.splitlines()[-1] == "batch: ended by SIGTERM"
    rest = Job(folder)
    assert rest.wait() == 0, rest.err
    assert tokens_of(rows_of(job.output)) == whole


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_an_address_without_ray_is_one_line(folder: Path) -> None:
    job = Job(folder, "--ray", "127.0.0.1:1")
    assert job.wait() == 2
    assert job.err.splitlines()[-1].startswith("batch: --ray 127.0.0.1:1: no Ray there"), job.err
    assert "Traceback" not in job.err
