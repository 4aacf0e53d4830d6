"""The files beside a job's output: damaged ones, links in their place, names of drafts that
somebody guesses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doors.conftest import Door


@pytest.fixture
def ended(job: Door, tmp_path: Path) -> Path:
    """A job that has ended, with two rows; its output."""
    (tmp_path / "in.jsonl").write_text('{"prompt": [5, 6], "max_tokens": 2}\n{\n')
    assert job().code == 0
    return tmp_path / "out.jsonl"


def test_damaged_files_are_one_line(job: Door, ended: Path) -> None:
    """A sidecar is left alone; a status is written anew by the next run.
    tests/unit/jobs/test_sidecar.py has more."""
    sidecar, status = (ended.with_name(f"out.jsonl.{name}.json") for name in ("job", "status"))
    good = sidecar.read_bytes()
    before = ended.read_bytes()
    for path, flags, says in (
        (sidecar, (), "batch: out.jsonl.job.json: is not the sidecar of a job"),
        (
            status,
            ("--status",),
            "batch: --status: out.jsonl.status.json: is not the status of a job",
        ),
    ):
        path.write_text("[" * 100_000)
        answer = job(*flags)
        assert answer.code == 2, answer.err
        [line] = answer.err.splitlines()
        assert line.startswith(says)
        assert (ended.read_bytes(), path.read_text()) == (before, "[" * 100_000)
        sidecar.write_bytes(good)
    assert job().code == 0 and "2 of 2 done, 1 of them errors" in job("--status").out


def test_links_beside_an_output_lead_a_job_nowhere(job: Door, tmp_path: Path) -> None:
    """A draft whose name is known would be written through a link that somebody has put there."""
    victim = tmp_path / "victim"
    victim.write_text("mine")
    for name in ("job.json", "status.json"):
        for draft in (f"out.jsonl.{name}.tmp", f".out.jsonl.{name}.tmp", f"out.jsonl.{name}~"):
            (tmp_path / draft).symlink_to(victim)
    (tmp_path / "out.jsonl.status.json").symlink_to(victim)
    (tmp_path / "in.jsonl").write_text('{"prompt": [5, 6], "max_tokens": 2}\n')
    before = {path.name for path in tmp_path.iterdir()}
    assert job().code == 0
    assert victim.read_text() == "mine"
    assert (
        not (tmp_path / "out.jsonl.status.json").is_symlink()
        and "1 of 1 done" in job("--status").out
    )
    left = {path.name for path in tmp_path.iterdir()} - before
    assert left - {"offload"} == {"out.jsonl", "out.jsonl.job.json"}, "no draft stays"
