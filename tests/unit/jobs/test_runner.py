"""Jobs through the real runner with an engine that answers at once: what is done, skipped, refused, written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o.core.errors import DoesNotFitError, UsageError
from flexgen_h2o.jobs.runner import Window, window_rows
from flexgen_h2o.jobs.sidecar import read_status, status_lines
from flexgen_h2o.models.load import Model
from tests.unit.jobs.stub import StubLLM, read_rows, run_job, write_lines


def prompts(count: int, **fields: Any) -> list[dict[str, Any]]:
    return [
        {"custom_id": f"r{i}", "prompt": [5 + i % 7, 9, 4], "max_tokens": 1 + i % 3, **fields} for i in range(count)
    ]


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def test_every_line_gets_one_row(paths: tuple[Path, Path], words: Model) -> None:
    source, output = paths
    lines = [*prompts(5), "{bad", "", {"prompt": "import os"}, {"custom_id": "x", "url": "/v2", "body": {}}]
    llm = StubLLM(words)
    job = run_job(llm, write_lines(source, *lines), output)
    rows = {row["custom_id"]: row for row in read_rows(output)}
    assert sorted(rows) == ["line-6", "line-8", "r0", "r1", "r2", "r3", "r4", "x"] and len(read_rows(output)) == 8
    assert rows["line-6"]["error"]["code"] == "invalid_json" and rows["line-6"]["error"]["message"].startswith(
        "line 6: "
    )
    assert rows["x"]["response"] is None and rows["x"]["error"]["code"] == "unknown_url"
    body = rows["r1"]["response"]["body"]
    assert body["choices"] == [
        {"index": 0, "text": None, "logprobs": None, "finish_reason": "length", "token_ids": [4, 9]}
    ]
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    assert (body["object"], body["model"]) == ("text_completion", "opt-tiny")
    assert rows["r1"]["response"]["status_code"] == 200 and rows["r1"]["error"] is None
    assert len({row["id"] for row in rows.values()}) == 8
    status = job.progress.status
    new_tokens = 1 + 2 + 3 + 1 + 2 + len(words.encode("import os"))
    assert (status.rows, status.done, status.errors, status.tokens) == (8, 8, 2, new_tokens)


def test_a_record_with_a_number_that_json_cannot_hold_is_an_error_row(paths: tuple[Path, Path], words: Model) -> None:
    """It is sent back with the answer, and would end the job there."""
    source, output = paths
    run_job(StubLLM(words), write_lines(source, '{"article": "a", "x": 1e400}', '{"prompt": "a"}'), output)
    assert [row["error"] and row["error"]["code"] for row in read_rows(output)] == ["invalid_json", None]


def test_a_restart_does_the_rest(paths: tuple[Path, Path], words: Model) -> None:
    source, output = paths
    write_lines(source, *prompts(10), "{bad")
    once = run_job(StubLLM(words), source, output)
    whole = output.read_bytes().splitlines(keepends=True)
    for kept in ([3, 0, 7], [], list(range(11)), [0]):
        output.write_bytes(b"".join(whole[i] for i in kept) + whole[-1][: 30 if len(kept) < 11 else 0])
        llm = StubLLM(words)
        job = run_job(llm, source, output)
        assert sorted(read_rows(output), key=str) == sorted(map(json.loads, whole), key=str)
        assert job.progress.status.done == once.progress.status.done == 11
        assert job.progress.status.errors == 1
        before = {json.loads(whole[i])["custom_id"] for i in kept}
        assert not before & {f"r{line - 1}" for run in llm.runs for line in run}


def test_rows_of_another_input_are_not_counted(paths: tuple[Path, Path], words: Model) -> None:
    source, output = paths
    write_lines(output, {"custom_id": "other", "response": None, "error": {"code": "x"}})
    job = run_job(StubLLM(words), write_lines(source, *prompts(2)), output)
    assert (job.before.rows, job.before.errors, job.progress.status.done) == (0, 0, 2)
    assert len(read_rows(output)) == 3


def test_lines_that_come_while_it_runs_are_for_the_next_run(paths: tuple[Path, Path], words: Model) -> None:
    source, output = paths
    write_lines(source, *prompts(5))

    def grow(line: int) -> None:
        with source.open("a") as file:
            file.write(json.dumps({"custom_id": f"new{line}", "prompt": [4]}) + "\n")

    run_job(StubLLM(words, before_row=grow), source, output, window=2)
    assert [row["custom_id"] for row in read_rows(output)] == [f"r{i}" for i in range(5)]
    run_job(StubLLM(words), source, output)
    assert [row["custom_id"] for row in read_rows(output)][5:] == [f"new{i}" for i in range(1, 6)]


# ---- windows


def test_windows_are_whole_blocks_and_bounded(paths: tuple[Path, Path], words: Model) -> None:
    source, output = paths
    llm = StubLLM(words)
    run_job(llm, write_lines(source, *prompts(20), "{bad", *prompts(0)), output, window=6)
    assert [len(run) for run in llm.runs] == [6, 8, 6], "after the first window its blocks have four rows"
    assert llm.expected == 21
    assert [window_rows(n, None) for n in (1, 4, 300, 1000)] == [1024, 1024, 1200, 4000]
    assert [window_rows(n, 10) for n in (1, 4, 300)] == [10, 12, 300]


def test_a_run_goes_on_with_the_next_windows_where_rows_enter(paths: tuple[Path, Path], words: Model) -> None:
    source, output = paths
    llm = StubLLM(words)
    job = run_job(llm, write_lines(source, *prompts(9), "{bad", *prompts(0)), output, window=4, refill=True)
    assert llm.runs == [list(range(1, 10))]
    assert (job.progress.status.done, job.progress.status.errors) == (10, 1)
    assert not job._running, "requests that are done are not kept"
    other = output.with_name("other.jsonl")
    run_job(StubLLM(words), source, other, window=4)
    assert sorted(read_rows(other), key=str) == sorted(read_rows(output), key=str)


def test_a_window_that_has_no_room_is_run_after_the_others(paths: tuple[Path, Path], words: Model) -> None:
    """It is planned for then, or its rows are told apart; what comes behind it enters its block."""
    source, output = paths
    llm = StubLLM(words, room=50)
    lines = sized(3, 4, 5, 6, 30, 30, 60, 30, 1, 1, 1, 1, 2, 2, 2, 2)
    run_job(llm, write_lines(source, *lines), output, window=4, refill=True)
    assert llm.runs == [[1, 2, 3, 4], [5], [6], [8], list(range(9, 17))]
    assert [row["custom_id"] for row in read_rows(output) if row["error"]] == ["n60-6"]


def test_a_window_reads_no_further_than_it_must() -> None:
    stream = iter(range(10))
    window: Any = Window(stream)  # type: ignore[arg-type]
    assert window.take(3) == [0, 1, 2] and next(stream) == 3
    assert window.fill(2) == [4, 5] and window.take(1) == [4] and window.take(9) == [5, 6, 7, 8, 9]
    assert window.take(1) == [] == window.take(0)


# ---- rows that do not fit


def sized(*lengths: int) -> list[dict[str, Any]]:
    return [{"custom_id": f"n{n}-{i}", "prompt": [5] * n} for i, n in enumerate(lengths)]


def test_a_row_that_fits_nowhere_is_an_error_row(paths: tuple[Path, Path], words: Model) -> None:
    source, output = paths
    llm = StubLLM(words, room=50)
    run_job(llm, write_lines(source, *sized(3, 60, 4, 51, 5)), output)
    rows = {row["custom_id"]: row["error"] for row in read_rows(output)}
    assert {name for name, error in rows.items() if error} == {"n60-1", "n51-3"} and len(rows) == 5
    assert rows["n60-1"] == {"code": "does_not_fit", "message": "line 2: too large"}
    assert [sorted(run) for run in llm.runs] == [[1, 3, 5]]


def test_budgets_that_suit_no_block_or_no_row_end_the_job(paths: tuple[Path, Path], words: Model) -> None:
    """Then the flags are wrong, and no row is."""
    source, output = paths
    for lengths in ((30, 30), (60, 70)):
        with pytest.raises(DoesNotFitError):
            run_job(StubLLM(words, room=50), write_lines(source, *sized(*lengths)), output)
        assert not output.exists()


def test_a_job_that_was_killed_before_rows_that_do_not_fit_together_goes_on(
    paths: tuple[Path, Path], words: Model
) -> None:
    """As it would have gone on by itself; budgets in which no row fits are still refused."""
    source, output = paths
    lines = sized(3, 4, 30, 31)
    run_job(StubLLM(words), write_lines(source, *lines[:2]), output)
    with pytest.raises(DoesNotFitError):
        run_job(StubLLM(words, room=20), write_lines(source, *lines), output)
    llm = StubLLM(words, room=50)
    run_job(llm, source, output)
    assert llm.runs == [[3], [4]] and not [row for row in read_rows(output) if row["error"]]


def test_later_rows_that_do_not_fit_together_run_apart(paths: tuple[Path, Path], words: Model) -> None:
    source, output = paths
    llm = StubLLM(words, room=50)
    run_job(llm, write_lines(source, *sized(3, 4, 5, 6, 30, 30, 60, 30, 1, 1, 1, 1)), output, window=4)
    assert llm.runs == [[1, 2, 3, 4], [5], [6], [8], [9, 10, 11, 12]]
    assert [row["custom_id"] for row in read_rows(output) if row["error"]] == ["n60-6"]


# ---- errors


def test_max_errors(paths: tuple[Path, Path], words: Model) -> None:
    source, output = paths
    write_lines(source, *prompts(2), "{", "{", "{", *prompts(0))
    with pytest.raises(UsageError, match="--max-errors 1: 2 rows"):
        run_job(StubLLM(words), source, output, max_errors=1, window=1)
    done = read_rows(output)
    assert [row["custom_id"] for row in done] == ["r0", "line-3", "line-4"], "r1 was read and had not run"
    with pytest.raises(UsageError, match="--max-errors 1: 2 rows"):
        run_job(StubLLM(words), source, output, max_errors=1)
    assert read_rows(output) == done
    run_job(StubLLM(words), source, output, max_errors=3)
    assert len(read_rows(output)) == 5


def test_requests_for_another_model_are_counted(paths: tuple[Path, Path], words: Model) -> None:
    source, output = paths
    lines = [*prompts(2, model="opt-tiny"), {"prompt": [4], "model": "gpt-4"}, {"prompt": [4], "model": "o3"}]
    job = run_job(StubLLM(words), write_lines(source, *lines), output)
    assert (job.other_models, job.first_other) == (2, "gpt-4 in line 3")


# ---- status


def test_the_status_follows_the_job(paths: tuple[Path, Path], words: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    source, output = paths
    monkeypatch.setattr("flexgen_h2o.jobs.runner.WRITE_EVERY_S", 0.0)
    seen = []

    def look(line: int) -> None:
        status = read_status(output)
        seen.append((status.state, status.done, status.rows, status.eta_s is None))

    run_job(StubLLM(words, before_row=look), write_lines(source, *prompts(3)), output)
    assert seen == [("running", 0, 3, True), ("running", 1, 3, False), ("running", 2, 3, False)]
    status = read_status(output)
    assert (status.state, status.done, status.peak_bytes) == ("done", 3, {"host": 5})


@pytest.mark.parametrize(("spared", "says"), [(5, ["shared prefixes spared 10 of 24 prompt tokens"]), (0, [])])
def test_the_status_says_what_shared_prefixes_spared(
    spared: int, says: list[str], paths: tuple[Path, Path], words: Model
) -> None:
    source, output = paths
    llm = StubLLM(words, spared=spared)
    run_job(llm, write_lines(source, *prompts(8)), output, window=4)
    assert len(llm.runs) == 2
    status = read_status(output)
    assert (status.prompt_tokens, status.spared_tokens) == (24, 2 * spared)
    assert [line for line in status_lines(status) if "spared" in line] == says


def test_a_job_that_was_killed_does_not_run(paths: tuple[Path, Path], words: Model) -> None:
    source, output = paths
    run_job(StubLLM(words), write_lines(source, *prompts(1)), output)
    path = output.with_name("out.jsonl.status.json")
    path.write_text(path.read_text().replace('"done",', '"running",', 1))
    assert read_status(output).state == "killed"
    path.write_text("{}}")
    with pytest.raises(UsageError, match="is not the status of a job"):
        read_status(output)
    path.unlink()
    with pytest.raises(UsageError, match="no job has written"):
        read_status(output)


# ---- memory

GROWTH = """
import json, os, resource, sys
from pathlib import Path
from flexgen_h2o.jobs.sidecar import read_status
from flexgen_h2o.models.load import find_model
from tests.unit.jobs.stub import StubLLM, run_job
folder, model, peaks = Path(sys.argv[1]), find_model("opt-tiny", None), []

class Forgetful(list):
    def append(self, run): pass

for rows in (2_000, 100_000):
    source, output = folder / f"in{rows}.jsonl", folder / f"out{rows}.jsonl"
    with source.open("w") as file:
        for i in range(rows):
            file.write('{"custom_id": "row-%d", "prompt": [5, 6, 7, %d], "max_tokens": 4}\\n' % (i, 4 + i % 2000))
    run_job(StubLLM(model, runs=Forgetful()), source, output)
    os.truncate(output, output.stat().st_size * 9 // 10)
    job = run_job(StubLLM(model, runs=Forgetful()), source, output)
    assert job.progress.status.done == rows and job.before.rows > rows * 8 // 10
    job.progress.status.write(output)
    assert read_status(output).done == rows
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
print(json.dumps(peaks))
"""


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    """A row takes 45 bytes at most (4.5 MB here), however long it is, and the rest is a window of rows."""
    done = subprocess.run([sys.executable, "-c", GROWTH, str(tmp_path)], capture_output=True, text=True, check=True)
    few, many = json.loads(done.stdout)
    assert many - few < 8e6, (few, many)


RECORDS = """
import json, resource, sys
from pathlib import Path
from flexgen_h2o.models.load import find_model
from tests.unit.jobs.stub import StubLLM, run_job
folder, model, peaks = Path(sys.argv[1]), find_model("opt-tiny", None), []
data = {"article": "a", "x": [{}] * 3200}  # 16 KB of text; parsed, 300 KB
for rows in (1, 600):
    source, output = folder / f"in{rows}.jsonl", folder / f"out{rows}.jsonl"
    source.write_text((json.dumps(data, separators=(",", ":")) + "\\n") * rows)
    run_job(StubLLM(model), source, output)
    assert json.loads(output.read_bytes().splitlines()[-1])["request"] == data
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
print(json.dumps(peaks))
"""


def test_records_that_are_sent_back_are_kept_as_their_text(tmp_path: Path) -> None:
    """A window of them, at most 16 KiB each, and not what they are as Python objects."""
    done = subprocess.run([sys.executable, "-c", RECORDS, str(tmp_path)], capture_output=True, text=True, check=True)
    one, many = json.loads(done.stdout)
    assert many - one < 60e6, (one, many)
