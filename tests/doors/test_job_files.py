"""The files beside a job's output: damaged ones, links in their place, names of drafts that somebody guesses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.doors.conftest import Answer

ROW = {"custom_id": "line-1", "response": {}, "error": None}
ERROR = {"custom_id": "line-2", "response": None, "error": {"code": "x", "message": "y"}}


@pytest.fixture
def ended(job: Callable[..., Answer], tmp_path: Path) -> Path:
    """A job that has ended, with two rows; its output."""
    (tmp_path / "in.jsonl").write_text('{"prompt": [5, 6], "max_tokens": 2}\n{\n')
    assert job().code == 0
    return tmp_path / "out.jsonl"


def damage(path: Path, change: dict[str, Any] | str) -> None:
    """Fields of a JSON file; or the whole of it, as text. 1e999 is a number that is not finite."""
    text = change if isinstance(change, str) else json.dumps({**json.loads(path.read_text()), **change})
    path.write_text(text.replace("Infinity", "1e999"))


INFINITE = float("inf")
SIDECARS: list[dict[str, Any] | str] = [
    {"input": {"path": "in.jsonl", "bytes": "x", "digest": ""}},
    {"input": {"path": "in.jsonl", "bytes": INFINITE, "digest": ""}},
    {"input": {"path": "in.jsonl", "bytes": -1, "digest": ""}},
    {"input": {"path": "in.jsonl", "bytes": True, "digest": ""}},
    {"input": {"path": ["in.jsonl"], "bytes": 5, "digest": ""}},
    {"input": {"path": "in.jsonl", "bytes": 5, "digest": 5}},
    {"input": 3},
    {"settings": [["dtype", "float32"]]},
    {"earlier": {}},
    {"earlier": [3]},
    {"schema": None},
    "",
    "[" * 100_000,
    "\0" * 100,
]


@pytest.mark.parametrize("change", SIDECARS, ids=lambda value: json.dumps(value)[:50])
def test_a_damaged_sidecar_is_one_line(change: dict[str, Any] | str, job: Callable[..., Answer], ended: Path) -> None:
    sidecar, before = ended.with_name("out.jsonl.job.json"), ended.read_bytes()
    damage(sidecar, change)
    found = sidecar.read_bytes()
    answer = job()
    assert answer.code == 2, answer.err
    [line] = answer.err.splitlines()
    assert line.startswith("batch: out.jsonl.job.json: ")
    assert (ended.read_bytes(), sidecar.read_bytes()) == (before, found)


STATUSES: list[dict[str, Any] | str] = [
    *({name: "x"} for name in ("rows", "done", "errors", "tokens", "seconds", "updated")),
    *({name: INFINITE} for name in ("rows", "done", "errors", "tokens", "seconds", "updated")),
    {"seconds": float("nan")},
    {"rows": -1},
    {"rows": 1.5},
    {"done": True},
    {"tokens": 10**300},
    {"eta_s": "x"},
    {"eta_s": INFINITE},
    {"state": 3},
    {"state": None},
    {"peak_bytes": [1]},
    {"peak_bytes": {"host": "x"}},
    {"peak_bytes": {"host": INFINITE}},
    {"pid": "x"},
    {"unknown": 1},
    "[]",
    "[" * 100_000,
    "1" * 10_000,
]


@pytest.mark.parametrize("change", STATUSES, ids=lambda value: json.dumps(value)[:50])
def test_a_damaged_status_is_one_line(change: dict[str, Any] | str, job: Callable[..., Answer], ended: Path) -> None:
    """And the next run of the job writes a good one."""
    damage(ended.with_name("out.jsonl.status.json"), change)
    answer = job("--status")
    assert answer.code == 2, answer.err
    [line] = answer.err.splitlines()
    assert line.startswith("batch: --status: out.jsonl.status.json: is not the status of a job")
    assert job().code == 0 and "2 of 2 done, 1 of them errors" in job("--status").out


def test_the_status_counts_rows_of_this_input_in_the_output(
    job: Callable[..., Answer], ended: Path, tmp_path: Path
) -> None:
    """Those of another input, which --force went on with, are not among them."""
    (tmp_path / "in.jsonl").write_text('{"custom_id": "a", "prompt": [5]}\n{"custom_id": "b"}\n{"custom_id": "c"}\n')
    assert job("--force").code == 0
    assert "rows: 3 of 3 done, 2 of them errors, 0 to do" in job("--status").out
    whole = ended.read_bytes().splitlines(keepends=True)
    ended.write_bytes(b"".join(whole[:-1]) + whole[-1][:20])
    said = job("--status").out
    assert "state: done, and rows were taken away since" in said and "2 of 3 done, 2 of them errors, 1 to do" in said
    ended.unlink()
    assert "rows: 0 of 3 done, 0 of them errors, 3 to do" in job("--status").out


def test_links_beside_an_output_lead_a_job_nowhere(job: Callable[..., Answer], tmp_path: Path) -> None:
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
    assert not (tmp_path / "out.jsonl.status.json").is_symlink() and "1 of 1 done" in job("--status").out
    left = {path.name for path in tmp_path.iterdir()} - before
    assert left - {"offload"} == {"out.jsonl", "out.jsonl.job.json"}, "no draft stays"
