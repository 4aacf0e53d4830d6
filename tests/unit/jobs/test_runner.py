"""Jobs through the real runner with an engine that answers at once: what is done, skipped, refused,
written."""

from __future__ import annotations

import gc
import json
import os
import random
import time
import tracemalloc
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import DoesNotFitError, UsageError
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.jobs.input import InputPart, read_part
from flexgen_h2o.jobs.output import OutputFile
from flexgen_h2o.jobs.requests import Request, RequestReader
from flexgen_h2o.jobs.runner import (
    MAX_BAD_S,
    JobRun,
    JobWriter,
    OutputState,
    Sink,
    read_requests,
    sample_of,
    window_rows,
)
from flexgen_h2o.jobs.sidecar import Status, read_status
from flexgen_h2o.models.load import Model
from tests.unit.jobs.stub import StubLLM, read_rows, run_job, write_lines


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


def test_a_restart_does_the_rest(source: Path, output: Path, words: Model) -> None:
    write_lines(source, *prompts(10), "{bad")
    run_job(StubLLM(words), source, output)
    whole = output.read_bytes().splitlines(keepends=True)
    for kept in ([3, 0, 7], [], list(range(11))):
        torn = whole[-1][: 30 if len(kept) < 11 else 0]
        output.write_bytes(b"".join(whole[i] for i in kept) + torn)
        llm = StubLLM(words)
        writer = run_job(llm, source, output)
        assert sorted(read_rows(output), key=str) == sorted(map(json.loads, whole), key=str)
        assert (writer.status.done, writer.errors) == (11, {"invalid_json": 1})
        before = {json.loads(whole[i])["custom_id"] for i in kept}
        assert not before & {f"r{line - 1}" for run in llm.runs for line in run}


# ---- windows


def test_windows_are_whole_blocks_and_bounded(source: Path, output: Path, words: Model) -> None:
    """The first is no block's; then blocks have four rows. Rows may also enter a running block."""
    write_lines(source, *prompts(20), "{bad")
    llm = StubLLM(words)
    run_job(llm, source, output, window=6)
    assert [len(run) for run in llm.runs] == [6, 8, 6] and llm.planner.job_rows == 21
    assert [window_rows(n, None) for n in (1, 4, 300, 1000)] == [1024, 1024, 1200, 4000]
    assert [window_rows(n, 10) for n in (1, 4, 300)] == [10, 12, 300]
    llm = StubLLM(words)
    other = output.with_name("other.jsonl")
    run_job(llm, source, other, window=4, refill=True)
    assert llm.runs == [list(range(1, 21))]
    assert sorted(read_rows(other), key=str) == sorted(read_rows(output), key=str)


def test_a_job_reads_no_further_than_its_window(source: Path, words: Model) -> None:
    write_lines(source, *prompts(20))
    read = []
    at_runs = []

    def lines() -> Any:
        for line in read_part(source, InputPart(np.ones(20, bool))):
            read.append(line)
            yield line

    llm: Any = StubLLM(words, before_row=lambda line: at_runs.append(len(read) - line))
    reader = RequestReader(words, SamplingParams())
    JobRun(llm, reader, lines(), Sink(lambda done: None), window=4).run(20)
    assert at_runs == [3, 2, 1, 0] * 5


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
    llm = StubLLM(words, policy=Policy(256, 1))
    run_job(llm, write_lines(source, *prompts(400)), output, window=window, refill=True)
    assert llm.began == [256 if window else 400] and llm.opened == 1 and len(llm.runs[0]) == 400


def test_a_full_block_that_does_not_fit_begins_with_a_window(
    source: Path, output: Path, words: Model
) -> None:
    """Whose rows fit; others enter it as long as there is room for them."""
    llm = StubLLM(words, policy=Policy(8, 1), room=50)
    write_lines(source, *sized(3, 4, 5, 6, 60, 7))
    run_job(llm, source, output, window=4, refill=True)
    assert llm.began[0] == 4 and failed(output) == ["n60-4"]
    assert sorted(chain.from_iterable(llm.runs)) == [1, 2, 3, 4, 6]


def test_bad_lines_come_in_parts(
    source: Path, output: Path, words: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("flexgen_h2o.jobs.runner.time", clock)
    write_lines(source, *["{"] * 5, *prompts(1))
    written: list[Request] = []

    def lines() -> Any:
        for line in read_part(source, InputPart(np.ones(6, bool))):
            clock.now += 0.6 * MAX_BAD_S
            yield line

    found = read_requests(RequestReader(words, SamplingParams()), lines(), Sink(written.extend))
    steps = [(request is None, len(written)) for request in found]
    assert steps == [(True, 2), (True, 4), (False, 5)]
    assert run_job(StubLLM(words), source, output, window=1).status.done == 6


# ---- rows that do not fit


def test_rows_of_any_prompt_and_answer_are_parted_exactly(
    source: Path, output: Path, words: Model
) -> None:
    """With the full cache a token of a prompt takes more than a new one: here as much as three."""

    def is_large(tokens: int, new: int) -> bool:
        return 3 * tokens + new > 200

    class PerToken(StubLLM):
        def check_fit(self, requests: Sequence[Request]) -> Policy:
            self.asks += 1
            if any(is_large(len(one.prompt_ids), one.params.max_tokens) for one in requests):
                raise DoesNotFitError("too large")
            return self.policy

    generator = random.Random(0)
    llm = PerToken(words)
    sizes = [(generator.randint(1, 40), generator.randint(1, 400)) for _ in range(200)]
    lines = [{"prompt": [5] * n, "max_tokens": m} for n, m in sizes]
    run_job(llm, write_lines(source, *lines), output)
    assert set(failed(output)) == {f"line-{i + 1}" for i, n in enumerate(sizes) if is_large(*n)}
    assert llm.asks < 100


def test_budgets_that_suit_no_block_or_no_row_end_the_job(
    source: Path, output: Path, words: Model
) -> None:
    """Then the flags are wrong, and no row is. A restart before such rows goes on, as the job would
    have gone on by itself."""
    for lengths in ((30, 30), (60, 70)):
        with pytest.raises(DoesNotFitError):
            run_job(StubLLM(words, room=50), write_lines(source, *sized(*lengths)), output)
        assert not output.exists()
    lines = sized(3, 4, 30, 31)
    run_job(StubLLM(words), write_lines(source, *lines[:2]), output)
    with pytest.raises(DoesNotFitError):
        run_job(StubLLM(words, room=20), write_lines(source, *lines), output)
    llm = StubLLM(words, room=50)
    run_job(llm, source, output)
    assert llm.runs == [[3], [4]] and not failed(output)


# ---- errors and status


def test_max_errors(source: Path, output: Path, words: Model) -> None:
    """A row that was read before the last error has not run."""
    write_lines(source, *prompts(2), "{", "{", "{")
    for _ in range(2):
        with pytest.raises(UsageError, match="--max-errors 1: 2 rows"):
            run_job(StubLLM(words), source, output, max_errors=1, window=1)
        assert [row["custom_id"] for row in read_rows(output)] == ["r0", "line-3", "line-4"]
    assert run_job(StubLLM(words), source, output, max_errors=3).status.done == 5


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


def test_what_a_writer_tells_as_time_goes_by(
    output: Path, words: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The seconds left follow the tokens: before a row is done, and as rows turn out shorter than
    they might have been. Rows that cannot be run, two of eight, do not count."""
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr("flexgen_h2o.jobs.runner.time", clock)
    before = OutputState(np.zeros(8, bool), Status(rows=8), failing=2)
    file = OutputFile(output)
    writer = JobWriter([file], words, before, dict, shown=False)
    for most in (8, 8, None, 8):
        writer.asked(most)
    left = []
    shorter: Any = SimpleNamespace(token_ids=[1] * 5, answered=4, asked=8)
    for clock.now, tokens, rows in ((110.0, 8, []), (120.0, 4, [shorter])):
        writer.sweep(tokens)
        writer.finish(rows)
        writer.end("running")
        left.append(writer.status.eta_s)
    file.close()
    assert left == [10 * (48 / 8 - 1), 20 * (40 / 11 - 1)]


def test_status_and_lines_of_progress_come_during_a_long_pass(
    source: Path,
    output: Path,
    words: Model,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("flexgen_h2o.jobs.runner.WRITE_EVERY_S", 0.001)
    monkeypatch.setattr("flexgen_h2o.jobs.runner.FIRST_LINE_S", 0.0)
    file = OutputFile(output)
    writer = JobWriter([file], words, OutputState(np.zeros(3, bool), Status(rows=3)), dict)
    began = read_status(output).updated
    with writer.ticking():
        deadline = time.monotonic() + 30
        while read_status(output).updated == began and time.monotonic() < deadline:
            time.sleep(0.001)
    assert read_status(output).updated > began
    writer.end("done")
    file.close()
    assert "0 of 3 prompts done" in capsys.readouterr().err


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
        source = write_lines(tmp_path / f"in{rows}.jsonl", *prompts(rows))
        output = tmp_path / f"out{rows}.jsonl"
        begun = peak_of_job(words, source, output)
        os.truncate(output, output.stat().st_size // 2)
        peaks.append((begun, peak_of_job(words, source, output)))
        assert len(read_rows(output)) == rows
    for few, many in zip(*peaks, strict=True):
        assert many - few < 1_500 * 60, peaks


def test_rows_in_memory_have_a_bound_in_bytes(
    source: Path, output: Path, words: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long prompts, stops and echoes are. A row that is larger than the bound runs too."""
    length = words.spec.max_positions - 4
    lines: list[dict[str, Any]] = [
        {"prompt": [5 + i % 7] * length, "max_tokens": 1} for i in range(300)
    ]
    lines += [
        {"prompt": [5], "max_tokens": 1, "stop_token_ids": [*range(300 + i, 4000 + i)]}
        for i in range(60)
    ]
    write_lines(source, *lines)
    bound = 100_000
    largest = 500_000  # a row of 3,700 stops
    read = RequestReader.read
    made: list[Request] = []
    monkeypatch.setattr(
        RequestReader, "read", lambda reader, line: made.append(read(reader, line)) or made[-1]
    )
    held: list[int] = []

    def look(line: int) -> None:
        held.append(sum(one.held_bytes for one in made if one.prompt_ids))

    for refill in (True, False):
        made.clear()
        held.clear()
        output.unlink(missing_ok=True)
        run_job(StubLLM(words, rows_budget=bound, before_row=look), source, output, refill=refill)
        assert len(read_rows(output)) == len(lines) and not failed(output)
        assert bound / 2 < max(held[:200]) <= bound + 4 * length + 3000
        assert max(held) <= bound + largest


def test_a_plan_is_made_for_a_sample_of_a_large_input(words: Model) -> None:
    reader = RequestReader(words, SamplingParams())

    def requests(count: int) -> Any:
        for i in range(count):
            size = 90 if i == 701 else 5
            yield reader.request({"prompt": [5] * size, "max_tokens": 1}, i, f"r{i}")

    all_of_them, count = sample_of(requests(40), StubLLM(words))
    assert len(all_of_them) == count == 40
    sample, count = sample_of(requests(1000), StubLLM(words, rows_budget=100_000))
    assert count == 1000 and 20 <= len(sample) <= 60
    assert 701 in [one.index for one in sample], "the largest"


def test_records_that_are_sent_back_are_kept_as_text(
    source: Path, output: Path, words: Model
) -> None:
    data = {"article": "a", "x": [{}] * 3200}  # 16 KB of text; parsed, 300 KB
    write_lines(source, *[json.dumps(data, separators=(",", ":"))] * 40)
    assert peak_of_job(words, source, output) < 6e6
    assert read_rows(output)[-1]["request"] == data
