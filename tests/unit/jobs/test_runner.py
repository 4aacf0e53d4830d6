"""Jobs through the real runner with an engine that answers at once: what is done, skipped, refused,
written."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import DoesNotFitError, UsageError
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.jobs.input import InputPart, read_cut, scan_input
from flexgen_h2o.jobs.on_ray import AnswerSink
from flexgen_h2o.jobs.output import OutputFile
from flexgen_h2o.jobs.requests import Request, RequestReader
from flexgen_h2o.jobs.runner import FinishedRow, JobRows, JobRun, JobWriter, window_rows
from flexgen_h2o.jobs.sidecar import Sidecar, read_sidecar, read_status, sidecar_path
from flexgen_h2o.models.load import Model
from tests.unit.jobs.stub import StubLLM, read_rows, rows_before, run_job, write_lines


def prompts(count: int) -> list[dict[str, Any]]:
    return [
        {"custom_id": f"r{i}", "prompt": [5 + i % 7, 9, 4], "max_tokens": 1 + i % 3}
        for i in range(count)
    ]


def sized(*lengths: int) -> list[dict[str, Any]]:
    return [{"custom_id": f"n{n}-{i}", "prompt": [5] * n} for i, n in enumerate(lengths)]


@pytest.fixture(autouse=True)
def _no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows say when they were made; here they are compared."""
    monkeypatch.setattr("flexgen_h2o.jobs.responses.time", SimpleNamespace(time=lambda: 0.0))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "in.jsonl"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def failed(output: Path) -> list[str]:
    return [row["custom_id"] for row in read_rows(output) if row["error"]]


def test_every_line_gets_one_row(source: Path, output: Path, words: Model) -> None:
    lines = [
        *prompts(5),
        "{bad",
        "",
        {"prompt": "import os"},
        {"custom_id": "x", "url": "/v2", "body": {}},
    ]
    job = run_job(StubLLM(words), write_lines(source, *lines), output)
    rows = {row["custom_id"]: row for row in read_rows(output)}
    assert (
        sorted(rows) == ["line-6", "line-8", "r0", "r1", "r2", "r3", "r4", "x"]
        and len(read_rows(output)) == 8
    )
    assert rows["line-6"]["error"]["code"] == "invalid_json"
    assert rows["line-6"]["error"]["message"].startswith("line 6: ")
    assert rows["x"]["response"] is None and rows["x"]["error"]["code"] == "unknown_url"
    body = rows["r1"]["response"]["body"]
    assert body["choices"] == [
        {"index": 0, "text": None, "logprobs": None, "finish_reason": "length", "token_ids": [4, 9]}
    ]
    assert (body["object"], body["model"]) == ("text_completion", "opt-tiny")
    new_tokens = 1 + 2 + 3 + 1 + 2 + len(words.encode("import os"))
    assert (job.status.rows, job.status.done, job.status.errors, job.status.tokens) == (
        8,
        8,
        2,
        new_tokens,
    )
    assert job.writer.errors == {"invalid_json": 1, "unknown_url": 1}


def test_a_restart_does_the_rest(source: Path, output: Path, words: Model) -> None:
    write_lines(source, *prompts(10), "{bad")
    run_job(StubLLM(words), source, output)
    whole = output.read_bytes().splitlines(keepends=True)
    for kept in ([3, 0, 7], [], list(range(11))):
        output.write_bytes(
            b"".join(whole[i] for i in kept) + whole[-1][: 30 if len(kept) < 11 else 0]
        )
        llm = StubLLM(words)
        job = run_job(llm, source, output)
        assert sorted(read_rows(output), key=str) == sorted(map(json.loads, whole), key=str)
        assert (job.status.done, job.writer.errors) == (11, {"invalid_json": 1})
        before = {json.loads(whole[i])["custom_id"] for i in kept}
        assert not before & {f"r{line - 1}" for run in llm.runs for line in run}


# ---- windows


def test_windows_are_whole_blocks_and_bounded(source: Path, output: Path, words: Model) -> None:
    llm = StubLLM(words)
    run_job(llm, write_lines(source, *prompts(20), "{bad"), output, window=6)
    assert [len(run) for run in llm.runs] == [6, 8, 6], (
        "after the first window its blocks have four rows"
    )
    assert llm.expected == 21
    assert [window_rows(n, None) for n in (1, 4, 300, 1000)] == [1024, 1024, 1200, 4000]
    assert [window_rows(n, 10) for n in (1, 4, 300)] == [10, 12, 300]


def test_a_job_reads_no_further_than_its_window(source: Path, words: Model) -> None:
    write_lines(source, *prompts(20))
    read = []
    at_runs = []

    def lines() -> Any:
        for line in read_cut(source, InputPart(0, 1, 0, np.ones(20, bool))):
            read.append(line)
            yield line

    llm: Any = StubLLM(words, before_row=lambda line: at_runs.append(len(read) - line))
    JobRun(
        llm,
        RequestReader(words, SamplingParams()),
        lines(),
        AnswerSink(lambda answers: None),
        window=4,
    ).run(20)
    assert at_runs == [3, 2, 1, 0] * 5


def test_a_run_goes_on_with_the_next_windows_where_rows_enter(
    source: Path, output: Path, words: Model
) -> None:
    llm = StubLLM(words)
    ran = run_job(llm, write_lines(source, *prompts(9), "{bad"), output, window=4, refill=True)
    assert llm.runs == [list(range(1, 10))]
    assert (ran.status.done, ran.status.errors) == (10, 1)
    other = output.with_name("other.jsonl")
    run_job(StubLLM(words), source, other, window=4)
    assert sorted(read_rows(other), key=str) == sorted(read_rows(output), key=str)


@pytest.mark.parametrize("refill", [False, True])
def test_a_later_window_that_has_no_room_is_run_in_parts(
    refill: bool, source: Path, output: Path, words: Model
) -> None:
    """With refill it is run after the others, and what comes behind it enters its block."""
    llm = StubLLM(words, room=50)
    lines = sized(3, 4, 5, 6, 30, 30, 60, 30, 1, 1, 1, 1, 2, 2, 2, 2)
    run_job(llm, write_lines(source, *lines), output, window=4, refill=refill)
    rest = [list(range(9, 17))] if refill else [[9, 10, 11, 12], [13, 14, 15, 16]]
    assert llm.runs == [[1, 2, 3, 4], [5], [6], [8], *rest]
    assert failed(output) == ["n60-6"]


@pytest.mark.parametrize("window", [None, 6])
def test_a_block_that_rows_enter_is_full_from_its_start(
    window: int | None, source: Path, output: Path, words: Model
) -> None:
    """However few rows a window has: the engine is opened for no more places than it begins
    with."""
    llm = StubLLM(words, policy=Policy(2048, 1))
    ran = run_job(llm, write_lines(source, *prompts(3000)), output, window=window, refill=True)
    assert llm.began == [2048] and llm.opened == 1 and len(llm.runs[0]) == ran.status.done == 3000


def test_a_full_block_that_does_not_fit_begins_with_a_window(
    source: Path, output: Path, words: Model
) -> None:
    """Whose rows fit; others enter it as long as there is room for them."""
    llm = StubLLM(words, policy=Policy(8, 1), room=20)
    run_job(llm, write_lines(source, *prompts(20)), output, window=4, refill=True)
    assert (
        llm.began[0] == 4
        and sorted(chain.from_iterable(llm.runs)) == [*range(1, 21)]
        and not failed(output)
    )
    llm = StubLLM(words, policy=Policy(8, 1), room=50)
    other = output.with_name("other.jsonl")
    run_job(llm, write_lines(source, *sized(3, 4, 5, 6, 60, 7)), other, window=4, refill=True)
    assert (
        llm.began[0] == 4
        and sorted(chain.from_iterable(llm.runs)) == [1, 2, 3, 4, 6]
        and failed(other) == ["n60-4"]
    )


def test_bad_lines_come_in_parts(
    source: Path, output: Path, words: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexgen_h2o.jobs.runner.MAX_BAD_LINES", 2)
    write_lines(source, *["{"] * 5, *prompts(1))
    written: list[FinishedRow] = []
    lines = read_cut(source, InputPart(0, 1, 0, np.ones(6, bool)))
    rows = JobRows(RequestReader(words, SamplingParams()), lines, AnswerSink(written.extend))
    assert [(request is None, len(written)) for request in rows.requests] == [
        (True, 2),
        (True, 4),
        (False, 5),
    ]
    assert run_job(StubLLM(words), source, output, window=1).status.done == 6


# ---- rows that do not fit


def test_a_row_that_fits_nowhere_is_an_error_row(source: Path, output: Path, words: Model) -> None:
    llm = StubLLM(words, room=50)
    run_job(llm, write_lines(source, *sized(3, 60, 4, 51, 5)), output)
    rows = {row["custom_id"]: row["error"] for row in read_rows(output)}
    assert sorted(failed(output)) == ["n51-3", "n60-1"] and len(rows) == 5
    assert rows["n60-1"] == {"code": "does_not_fit", "message": "line 2: 60 tokens are too many"}
    assert [sorted(run) for run in llm.runs] == [[1, 3, 5]]


def test_long_answers_do_not_make_a_row_too_large(source: Path, output: Path, words: Model) -> None:
    lines = [
        {"custom_id": name, "prompt": [5] * n, "max_tokens": new}
        for name, n, new in (("a", 60, 1), ("b", 3, 500))
    ]
    run_job(StubLLM(words, room=50), write_lines(source, *lines), output)
    assert failed(output) == ["a"] and len(read_rows(output)) == 2


def test_many_rows_that_fit_nowhere_are_found_by_few_questions(
    source: Path, output: Path, words: Model
) -> None:
    """One that was not asked for names one that needs no more."""
    llm = StubLLM(words, room=10)
    run_job(llm, write_lines(source, *sized(4, 5, *range(11, 311))), output)
    errors = {
        row["custom_id"]: row["error"]["message"] for row in read_rows(output) if row["error"]
    }
    assert len(errors) == 300 and llm.runs == [[1, 2]] and llm.asks < 15
    assert errors["n11-2"] == "line 3: 11 tokens are too many"
    assert re.fullmatch(
        r"line 302: needs no less than line \d+: \d+ tokens are too many", errors["n310-301"]
    )


def test_rows_of_any_prompt_and_answer_are_parted_exactly(
    source: Path, output: Path, words: Model
) -> None:
    """With the full cache a token of a prompt takes more than a new one: here as much as three."""

    class PerToken(StubLLM):
        def check_fit(self, requests: Sequence[Request]) -> Policy:
            self.asks += 1
            if any(3 * len(one.prompt_ids) + one.params.max_tokens > 200 for one in requests):
                raise DoesNotFitError("too large")
            return self.policy

    generator = random.Random(0)
    llm = PerToken(words)
    sizes = [(generator.randint(1, 40), generator.randint(1, 400)) for _ in range(200)]
    write_lines(
        source,
        *(
            {"custom_id": f"{n}-{m}-{i}", "prompt": [5] * n, "max_tokens": m}
            for i, (n, m) in enumerate(sizes)
        ),
    )
    run_job(llm, source, output)
    assert sorted(failed(output)) == sorted(
        f"{n}-{m}-{i}" for i, (n, m) in enumerate(sizes) if 3 * n + m > 200
    )
    assert llm.asks < 100


def test_budgets_that_suit_no_block_or_no_row_end_the_job(
    source: Path, output: Path, words: Model
) -> None:
    """Then the flags are wrong, and no row is."""
    for lengths in ((30, 30), (60, 70)):
        with pytest.raises(DoesNotFitError):
            run_job(StubLLM(words, room=50), write_lines(source, *sized(*lengths)), output)
        assert not output.exists()


def test_a_restart_before_rows_that_do_not_fit_together_goes_on(
    source: Path, output: Path, words: Model
) -> None:
    """As it would have gone on by itself; budgets in which no row fits are still refused."""
    lines = sized(3, 4, 30, 31)
    run_job(StubLLM(words), write_lines(source, *lines[:2]), output)
    with pytest.raises(DoesNotFitError):
        run_job(StubLLM(words, room=20), write_lines(source, *lines), output)
    llm = StubLLM(words, room=50)
    run_job(llm, source, output)
    assert llm.runs == [[3], [4]] and not failed(output)


# ---- errors and status


def test_max_errors(source: Path, output: Path, words: Model) -> None:
    write_lines(source, *prompts(2), "{", "{", "{")
    with pytest.raises(UsageError, match="--max-errors 1: 2 rows"):
        run_job(StubLLM(words), source, output, max_errors=1, window=1)
    done = read_rows(output)
    assert [row["custom_id"] for row in done] == ["r0", "line-3", "line-4"], (
        "r1 was read and had not run"
    )
    with pytest.raises(UsageError, match="--max-errors 1: 2 rows"):
        run_job(StubLLM(words), source, output, max_errors=1)
    assert read_rows(output) == done
    run_job(StubLLM(words), source, output, max_errors=3)
    assert len(read_rows(output)) == 5


def test_the_status_follows_the_job(
    source: Path, output: Path, words: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexgen_h2o.jobs.runner.WRITE_EVERY_S", 0.0)
    seen = []

    def look(line: int) -> None:
        status = read_status(output)
        seen.append((status.state, status.done, status.rows, status.eta_s is None))

    run_job(StubLLM(words, before_row=look), write_lines(source, *prompts(3)), output)
    assert seen == [("running", 0, 3, True), ("running", 1, 3, False), ("running", 2, 3, False)]
    status = read_status(output)
    assert (status.state, status.done, status.peak_bytes) == ("done", 3, {"host": 5})


def test_a_sidecar_that_is_removed_is_written_again_while_the_job_runs(
    source: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr("flexgen_h2o.jobs.runner.time", clock)
    file = OutputFile(output)
    sidecar = Sidecar({"a": 1}, "in.jsonl", 3, "digest")
    before = rows_before(file, scan_input(write_lines(source, *prompts(3))).ids)
    writer = JobWriter(file, replace(before, sidecar=sidecar), dict, shown=False)
    sidecar.write(output)
    sidecar_path(output).unlink()
    writer.sweep(1)
    assert read_sidecar(output) is None
    clock.now += 10
    writer.sweep(1)
    assert read_sidecar(output) == sidecar


def test_what_is_left_is_told_by_tokens(
    source: Path, output: Path, words: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a row is done, and as rows turn out shorter than they might have been; one of four
    cannot be run."""
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr("flexgen_h2o.jobs.runner.time", clock)
    file = OutputFile(output)
    writer = JobWriter(
        file, rows_before(file, scan_input(write_lines(source, *prompts(8))).ids), dict, shown=False
    )
    for most in (8, 8, 0, 8):
        writer.asked(most)
    left = []
    for clock.now, tokens, row in (
        (110.0, 8, None),
        (120.0, 4, SimpleNamespace(token_ids=[1] * 5, answered=4, asked=8)),
    ):
        writer.sweep(tokens)
        writer.finish([] if row is None else [row])  # type: ignore[list-item]
        writer.end("running")
        left.append(writer.status.eta_s)
    file.close()
    assert left == [10 * (48 / 8 - 1), 20 * (40 / 11 - 1)]


# ---- memory


class Forgetful(list[Any]):
    def append(self, run: Any) -> None:
        pass


def peak_of_job(words: Model, source: Path, output: Path) -> int:
    """The most bytes that Python's objects and arrays take meanwhile; cycles are not waited for."""
    gc.freeze()
    llm = StubLLM(
        words, runs=Forgetful(), before_row=lambda line: None if line % 50 else gc.collect()
    )
    tracemalloc.start()
    try:
        run_job(llm, source, output, window=40)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gc.unfreeze()


def test_memory_does_not_grow_with_the_input(tmp_path: Path, words: Model) -> None:
    """A row takes 45 bytes at most, however long it is; the rest is a window of rows. In a restart
    as well."""
    peaks = []
    for rows in (500, 2_000):
        source = tmp_path / f"in{rows}.jsonl"
        output = tmp_path / f"out{rows}.jsonl"
        write_lines(
            source,
            *(
                {"custom_id": f"row-{i}", "prompt": [5, 6, 4 + i % 99], "max_tokens": 4}
                for i in range(rows)
            ),
        )
        begun = peak_of_job(words, source, output)
        os.truncate(output, output.stat().st_size * 9 // 10)
        peaks.append((begun, peak_of_job(words, source, output)))
        assert len(read_rows(output)) == rows
    for few, many in zip(*peaks, strict=True):
        assert many - few < 1_500 * 60, peaks


def test_records_that_are_sent_back_are_kept_as_text(
    source: Path, output: Path, words: Model
) -> None:
    data = {"article": "a", "x": [{}] * 3200}  # 16 KB of text; parsed, 300 KB
    write_lines(source, *[json.dumps(data, separators=(",", ":"))] * 40)
    assert peak_of_job(words, source, output) < 6e6
    assert read_rows(output)[-1]["request"] == data
