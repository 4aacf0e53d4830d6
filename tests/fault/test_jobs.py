"""Batch jobs that are killed, interrupted, started twice, or run out of disk."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fault.jobs import Job, Jobs, kill_until_done, rows_of, tokens_of, write_input
from tests.parity.cases import thinned

ROWS = 44
MAX_KILLS = 6
Tokens = dict[str, list[int]]  # by custom id


def finish(jobs: Jobs, folder: Path) -> Tokens:
    """Do the rest; the tokens of all rows."""
    job = jobs.start(folder)
    assert job.wait() == 0, job.err
    return tokens_of(rows_of(job.output))


@pytest.fixture(scope="module")
def whole(jobs: Jobs, tmp_path_factory: pytest.TempPathFactory) -> Tokens:
    """Return the answers of an undisturbed job."""
    folder = tmp_path_factory.mktemp("whole")
    ids = write_input(folder, ROWS)
    tokens = finish(jobs, folder)
    assert {name: len(t) for name, t in tokens.items()} == ids
    assert len({tuple(t) for t in tokens.values()}) > ROWS / 3, "rows that are alike tell nothing"
    return tokens


def test_kill_9_loses_nothing(jobs: Jobs, whole: Tokens, tmp_path: Path) -> None:
    """A few times; soak.py does it a hundred times, to jobs of many kinds. Rows enter a running
    block or they do not, from run to run."""
    generator = random.Random(1)
    kills = 0
    while kills < 3:
        folder = tmp_path / f"after-{generator.random()}"
        (folder / "offload").mkdir(parents=True)
        write_input(folder, ROWS)

        def start(folder: Path = folder) -> Job:
            return jobs.start(folder, generator.choice(["--refill", "--no-refill"]))

        def wait(job: Job, left: int) -> None:
            job.wait_for_any_moment(ROWS, 0.3, left, generator)

        kills += kill_until_done(start, whole, MAX_KILLS, wait, generator)


def status_of(jobs: Jobs, folder: Path) -> str:
    assert jobs.start(folder, "--status").wait() == 0
    return (folder / "stdout").read_text()


# ---- somebody else


def put_new_in_its_place(path: Path) -> None:
    path.rename(path.with_name("moved.jsonl"))
    path.touch()


def write_other_bytes(path: Path) -> None:
    """Replace the bytes by as many others."""
    path.write_bytes(b"x" * path.stat().st_size)


def write_more(path: Path) -> None:
    with path.open("a") as file:
        file.write("not a row\n")


def cut_the_end(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 50)


CHANGES = [
    (cut_the_end, "somebody else cut it"),
    (write_other_bytes, "somebody else cut it or wrote to it"),
    (write_more, "somebody else cut it or wrote to it"),
    (Path.unlink, "was removed or replaced"),
    (put_new_in_its_place, "was removed or replaced"),
]


@pytest.mark.parametrize(("change", "says"), thinned(CHANGES, 2))
def test_an_output_that_somebody_changes_ends_the_job_and_the_next_run_mends_it(
    change: Callable[[Path], object], says: str, jobs: Jobs, whole: Tokens, tmp_path: Path
) -> None:
    write_input(tmp_path, ROWS)
    job = jobs.start(tmp_path)
    job.wait_for_rows(10)
    job.send(signal.SIGSTOP)
    assert job.lines() < ROWS
    change(job.output)
    left = job.output.read_bytes() if job.output.exists() else None
    job.send(signal.SIGCONT)
    assert job.wait() == 1
    [line] = job.err.splitlines()
    assert line.startswith(f"batch: --output out.jsonl: {says}") and "the same command does" in line
    assert (job.output.read_bytes() if job.output.exists() else None) == left, (
        "nothing more was written"
    )
    assert "state: failed: --output out.jsonl" in status_of(jobs, tmp_path)
    if change is write_more:  # a whole line of somebody else's is not thrown away
        again = jobs.start(tmp_path)
        [data, notes] = (left or b"").rsplit(b"not a row", 1)
        assert again.wait() == 2 and f"out.jsonl:{data.count(10) + 1}: is not a row" in again.err
        assert job.output.read_bytes() == left and notes == b"\n"
        job.output.write_bytes(data)
    assert finish(jobs, tmp_path) == whole


def test_a_full_standard_output_and_standard_error_cost_no_row(
    jobs: Jobs, whole: Tokens, tmp_path: Path
) -> None:
    write_input(tmp_path, ROWS)
    (tmp_path / "stdout").symlink_to("/dev/full")
    job = jobs.start(tmp_path)
    assert job.wait() == 0, job.err
    assert tokens_of(rows_of(job.output)) == whole
    [line] = job.err.splitlines()
    assert line.startswith(
        "batch: cannot write to standard output (No space left on device); only the summary is lost"
    )
    os.truncate(
        job.output, job.output.stat().st_size - 9
    )  # which is said on standard error, before the rest is done
    (tmp_path / "stderr").unlink()
    (tmp_path / "stderr").symlink_to("/dev/full")
    assert finish(jobs, tmp_path) == whole


# ---- signals and disks


def test_sigterm_ends_a_job_soon_and_the_rest_can_be_done(
    jobs: Jobs, whole: Tokens, tmp_path: Path
) -> None:
    """In between a second job is refused, and is told how the first stands."""
    write_input(tmp_path, ROWS)
    job = jobs.start(tmp_path)
    job.wait_for_rows(6)
    job.send(signal.SIGSTOP)  # it holds its lock, and stays where it is
    second = jobs.start(tmp_path)
    assert second.wait() == 2
    assert "out.jsonl: another job writes to it" in second.err
    said = status_of(jobs, tmp_path)
    assert f"state: running (process {job.pid})" in said and f"of {ROWS + 2} done" in said
    job.send(signal.SIGTERM)
    job.send(signal.SIGCONT)
    assert job.wait() == 143, job.err
    assert 6 <= len(tokens_of(rows_of(job.output))) < ROWS
    assert "state: ended by SIGTERM" in status_of(jobs, tmp_path)
    assert finish(jobs, tmp_path) == whole


def test_a_full_disk_ends_a_job_clearly(jobs: Jobs, whole: Tokens, tmp_path: Path) -> None:
    """The kernel's own refusal in the middle of a line, by a limit on the size of files."""
    write_input(tmp_path, ROWS)
    job = jobs.start(tmp_path, file_limit=6_000)
    assert job.wait() == 1, job.err
    [line] = job.err.splitlines()
    assert line.startswith("batch: --output out.jsonl: File too large; the rows in it are whole")
    found = tokens_of(rows_of(job.output))
    assert 5 < len(found) < ROWS and found.items() <= whole.items()


LONG_LINES = {
    "20 MB of text": {"prompt": "def f(x): return x\n" * 1_000_000},
    "10 million ids": {"prompt_token_ids": [5] * 10_000_000},
}
MAX_GROWTH = 50_000_000  # bytes; 5 MB of text took 1.5 GB


@pytest.mark.slow
def test_a_long_line_takes_no_memory_and_no_other_row(jobs: Jobs, tmp_path: Path) -> None:
    """It is an error row; the others are those of a job without it."""
    tokens = {}
    peaks = {}
    for name, long_line in {"none": {}, **LONG_LINES}.items():
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        write_input(folder, ROWS)
        lines = (folder / "in.jsonl").read_text().splitlines(keepends=True)
        lines[10:10] = [json.dumps({"custom_id": "long", **long_line}) + "\n"] if long_line else []
        (folder / "in.jsonl").write_text("".join(lines))
        job = jobs.start(folder, "--host-mem", "256MiB")
        assert job.wait() == 0, job.err
        tokens[name] = tokens_of(rows_of(job.output))
        peaks[name] = job.peak_rss
    plain = {name: t for name, t in tokens["none"].items() if name.startswith("row-")}
    assert len(plain) == ROWS
    for name in LONG_LINES:
        assert tokens[name]["long"] == [] and plain.items() <= tokens[name].items(), name
    assert max(peaks.values()) - peaks["none"] < MAX_GROWTH, peaks
