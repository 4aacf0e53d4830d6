"""A job without a model: the real runner, files and formats around an engine that answers at
once."""

from __future__ import annotations

import json
from collections import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import DoesNotFitError
from flexgen_h2o.engine.generation import Callbacks
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.jobs.input import InputPart, read_part, scan_input
from flexgen_h2o.jobs.output import OutputFile
from flexgen_h2o.jobs.requests import Request, RequestReader
from flexgen_h2o.jobs.runner import JobRun, JobWriter, rows_before
from flexgen_h2o.kvcache.eviction import Eviction, Full
from flexgen_h2o.models.load import Model


@dataclass
class StubLLM:
    """Answers with the prompt's tokens backwards, cut to what is asked for. runs: the lines of each
    run, and began: how many it began with.

    room: prompt tokens that one run's rows may have in all, and one row alone. spared: prompt
    tokens, by each run. asks, opened: how often it was asked whether rows fit, and for an engine.
    """

    model: Model
    policy: Policy = field(default_factory=lambda: Policy(2, 2))
    room: int = 10**9
    spared: int = 0
    eviction: Eviction = field(default_factory=Full)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    rows_budget: int = 10**9
    runs: list[list[int]] = field(default_factory=list)
    began: list[int] = field(default_factory=list)
    asks: int = 0
    opened: int = 0
    # In the place of the planner: only the number of lines that the job expects.
    planner: SimpleNamespace = field(default_factory=SimpleNamespace)
    before_row: Callable[[int], None] = lambda line: None

    def prepare(self, requests: abc.Sequence[Request]) -> Policy:
        self.opened += 1
        return self.check_fit(requests)

    def check_fit(self, requests: abc.Sequence[Request]) -> Policy:
        self.asks += 1
        tokens = sum(len(one.prompt_ids) for one in requests)
        if tokens > self.room:
            raise DoesNotFitError(f"{tokens} tokens are too many")
        return self.policy

    def run(
        self,
        requests: abc.Sequence[Request],
        on_finished: Any,
        callbacks: Callbacks,
        *,
        refill: bool,
        more: Any,
    ) -> SimpleNamespace:
        """With `more` a run goes on. Returns what a job asks of a report."""
        lines: list[int] = []
        tokens = 0
        self.runs.append(lines)
        self.began.append(len(requests))
        found: abc.Sequence[Request] | None = requests
        while found is not None:
            lines += [one.index for one in found]
            tokens += sum(len(one.prompt_ids) for one in found)
            self._answer(found, on_finished, callbacks.listener)
            found = more() if refill and more is not None else None
        return SimpleNamespace(prefill=SimpleNamespace(tokens=tokens), spared_tokens=self.spared)

    def has_room(self, requests: abc.Sequence[Request]) -> bool:
        return sum(len(one.prompt_ids) for one in requests) <= self.room

    def _answer(self, requests: abc.Sequence[Request], on_finished: Any, listener: Any) -> None:
        for one in requests:
            self.before_row(one.index)
            one.token_ids = list(one.prompt_ids[::-1][: one.params.max_tokens])
            one.finish_reason = "length"
            listener.sweep(len(one.token_ids))
            listener.finish([])
            on_finished([one])


def run_job(
    llm: Any, source: Path, output: Path, max_errors: int | None = None, **options: Any
) -> JobWriter:
    """Run a job as `batch` does, without its checks, and return its writer."""
    scan = scan_input(source)
    file = OutputFile(output)
    try:
        before = rows_before(file.rows(), scan.ids)
        writer = JobWriter([file], llm.model, before, lambda: {"host": 5}, max_errors)
        lines = read_part(source, InputPart(~before.done))
        job = JobRun(llm, RequestReader(llm.model, SamplingParams()), lines, writer, **options)
        writer.check_errors()
        job.run(len(scan.ids) - before.status.done)
        writer.end("done")
        return writer
    finally:
        file.close()


def write_lines(path: Path, *lines: Any) -> Path:
    path.write_text(
        "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    )
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True)]
