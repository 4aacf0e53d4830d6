"""Batch jobs that are killed, interrupted, started twice, or run out of disk."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fault.jobs import Jobs, Running, job_server, rows_of, tokens_of, write_input

ROWS = 44


@dataclass(frozen=True)
class Whole:
    """What an undisturbed job answers: tokens by id."""

    tokens: dict[str, list[int]]


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with job_server() as found:
        yield found


@pytest.fixture(scope="module")
def whole(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    ids = write_input(folder, ROWS)
    job = jobs.start(folder)
    assert job.wait() == 0, job.err
    tokens = tokens_of(rows_of(job.output))
    assert {name: len(t) for name, t in tokens.items()} == ids
    assert len({tuple(t) for t in tokens.values()}) > ROWS / 3, "rows that are alike tell nothing"
    return Whole(tokens)


def kill_until_done(jobs: Jobs, folder: Path, whole: Whole, generator: random.Random) -> int:
    """Kill -9 at random moments, sometimes with a torn end as after a power cut, until a run ends. How many kills?"""
    kills = 0
    while True:
        job = jobs.start(folder)
        wait_for_a_moment(job, len(whole.tokens), generator)
        job.send(signal.SIGKILL)
        if job.wait() == 0:
            return kills
        assert job.code == -signal.SIGKILL, job.err
        kills += 1
        if job.output.exists() and generator.random() < 0.5:
            data = job.output.read_bytes()
            job.output.write_bytes(data[: len(data) - generator.randrange(1, 1000)])
        if job.output.exists():
            found = tokens_of([json.loads(line) for line in job.output.read_bytes().split(b"\n")[:-1]])
            assert found.items() <= whole.tokens.items()
        assert kills < 60, "it never gets to its end"


def wait_for_a_moment(job: Running, rows: int, generator: random.Random) -> None:
    """Anything from the first instruction of a run to its last row, however fast the machine is."""
    time.sleep(generator.uniform(0, 0.3))
    if generator.random() < 0.8:
        done = job.lines()
        target = generator.randint(min(done, rows - 1), rows - 1)
        end = time.monotonic() + 60
        while job.lines() <= min(target, done + 12) and not job.has_ended() and time.monotonic() < end:
            time.sleep(generator.uniform(0, 0.02))


def kill_often(jobs: Jobs, whole: Whole, tmp_path: Path, least: int) -> None:
    generator, kills, runs = random.Random(1), 0, 0
    while kills < least:
        folder = tmp_path / f"run{runs}"
        folder.mkdir()
        write_input(folder, ROWS)
        kills, runs = kills + kill_until_done(jobs, folder, whole, generator), runs + 1
        assert tokens_of(rows_of(folder / "out.jsonl")) == whole.tokens


def test_kill_9_loses_nothing(jobs: Jobs, whole: Whole, tmp_path: Path) -> None:
    kill_often(jobs, whole, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kill_9_at_many_moments_loses_nothing(jobs: Jobs, whole: Whole, tmp_path: Path) -> None:
    kill_often(jobs, whole, tmp_path, 40)


def test_a_job_that_was_killed_while_rows_entered_goes_on_with_or_without_refill(
    jobs: Jobs, whole: Whole, tmp_path: Path
) -> None:
    """One block serves windows until it is killed, past the first of them; the other way does the rest."""
    for first, then in (("--refill", "--no-refill"), ("--no-refill", "--refill")):
        folder = tmp_path / first
        folder.mkdir()
        write_input(folder, ROWS)
        job = jobs.start(folder, first)
        job.wait_for_rows(20)
        job.send(signal.SIGKILL)
        job.wait()
        before = job.lines()
        again = jobs.start(folder, then)
        assert again.wait() == 0, again.err
        assert tokens_of(rows_of(job.output)) == whole.tokens
        assert before < ROWS


def test_sigterm_ends_a_job_soon_and_the_rest_can_be_done(jobs: Jobs, whole: Whole, tmp_path: Path) -> None:
    """In between a second job is refused, and is told how the first stands."""
    write_input(tmp_path, ROWS)
    job = jobs.start(tmp_path)
    job.wait_for_rows(6)
    job.send(signal.SIGSTOP)  # it holds its lock, and stays where it is
    second = jobs.start(tmp_path)
    assert second.wait() == 2
    assert "out.jsonl: another job writes to it" in second.err
    assert jobs.start(tmp_path, "--status").wait() == 0
    said = (tmp_path / "stdout").read_text()
    assert f"state: running (process {job.pid})" in said and f"of {ROWS + 2} done" in said
    end_by(job, "SIGTERM", 143)
    again = jobs.start(tmp_path)
    assert again.wait() == 0, again.err
    assert tokens_of(rows_of(job.output)) == whole.tokens


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGHUP", 129)])
def test_other_signals_end_a_job_soon(jobs: Jobs, tmp_path: Path, name: str, code: int) -> None:
    write_input(tmp_path, ROWS)
    job = jobs.start(tmp_path)
    job.wait_for_rows(6)
    end_by(job, name, code)


def end_by(job: Running, name: str, code: int) -> None:
    """Within seconds, with its finished rows, and its status says so."""
    began = time.monotonic()
    job.send(getattr(signal, name))
    job.send(signal.SIGCONT)
    assert job.wait() == code, job.err
    assert time.monotonic() - began < 10
    assert 6 <= len(tokens_of(rows_of(job.output))) < ROWS
    assert json.loads((job.folder / "out.jsonl.status.json").read_text())["state"] == f"ended by {name}"


def test_a_full_disk_ends_a_job_clearly(jobs: Jobs, whole: Whole, tmp_path: Path) -> None:
    """The kernel's own refusal in the middle of a line, by a limit on the size of files."""
    write_input(tmp_path, ROWS)
    job = jobs.start(tmp_path, file_limit=6_000)
    assert job.wait() == 1, job.err
    [line] = job.err.splitlines()
    assert line.startswith("batch: --output out.jsonl: File too large; the rows in it are whole")
    found = tokens_of(rows_of(job.output))
    assert 5 < len(found) < ROWS and found.items() <= whole.tokens.items()


@pytest.mark.slow
def test_a_full_file_system_ends_a_job_clearly_and_the_rest_can_be_done(
    jobs: Jobs, whole: Whole, tmp_path: Path
) -> None:
    """A real one, of 16 KiB, where mounting is permitted; a link leads there."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(disk)], capture_output=True)
    if mounted.returncode:
        pytest.skip("no permission to mount")
    try:
        write_input(tmp_path, ROWS)
        (tmp_path / "out.jsonl").symlink_to(disk / "out.jsonl")
        job = jobs.start(tmp_path)
        assert job.wait() == 1, job.err
        assert "No space left on device" in job.err and len(job.err.splitlines()) == 1
        assert tokens_of(rows_of(job.output)).items() < whole.tokens.items()
        subprocess.run(["mount", "-o", "remount,size=400k", str(disk)], check=True)
        again = jobs.start(tmp_path)
        assert again.wait() == 0, again.err
        assert tokens_of(rows_of(job.output)) == whole.tokens
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
