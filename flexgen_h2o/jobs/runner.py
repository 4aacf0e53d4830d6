"""A job from its input to its output: windows of requests through the engine, every row written when it is done."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from flexgen_h2o.config import Policy
from flexgen_h2o.errors import DoesNotFitError, UsageError
from flexgen_h2o.jobs.answers import error_row, success_row
from flexgen_h2o.jobs.fields import RowError
from flexgen_h2o.jobs.lines import Digests, Line, id_digest, read_lines, which_are_in
from flexgen_h2o.jobs.output import OutputFile, to_line
from flexgen_h2o.jobs.progress import JobProgress
from flexgen_h2o.jobs.requests import Request, RequestReader
from flexgen_h2o.jobs.window import Window, window_rows
from flexgen_h2o.progress import Listener
from flexgen_h2o.prompts import Completion, Prompt
from flexgen_h2o.sampling import SamplingParams
from flexgen_h2o.source import Model

PromptsAndParams = tuple[list[Prompt], list[SamplingParams]]


class Generator(Protocol):
    """The part of `llm.LLM` that a job needs."""

    model: Model

    def expect(self, rows: int) -> None: ...

    def prepare(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Policy: ...

    def check_fit(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None: ...

    def has_room(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> bool: ...

    def run(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], on_finished: Any, *, listener: Listener,
        refill: bool, more: Callable[[], PromptsAndParams | None] | None,
    ) -> Any: ...  # fmt: skip


@dataclass(frozen=True)
class Before:
    """What an output had when the job began. done: for each row of the input, is it in there?

    others: rows of other inputs, and error rows among them; they do not count.
    """

    done: npt.NDArray[np.bool_]
    rows: int
    errors: int
    others: tuple[int, int] = (0, 0)


def rows_before(output: OutputFile, ids: Digests) -> Before:
    """Read the output back (its torn end is cut off)."""
    digests, failed = bytearray(), bytearray()
    for row in output.rows():
        digests += id_digest(row["custom_id"])
        if row["error"] is not None:
            failed += digests[-ids.dtype.itemsize :]
    done = which_are_in(ids, np.frombuffer(digests, ids.dtype))
    errors = int(which_are_in(ids, np.frombuffer(failed, ids.dtype)).sum())
    rows, size = int(done.sum()), ids.dtype.itemsize
    return Before(done, rows, errors, (len(digests) // size - rows, len(failed) // size - errors))


@dataclass
class Job:
    """Everything that a run of a job needs.

    max_errors: error rows that the output may have; None: any number. window, refill: as the flags.
    """

    llm: Generator
    source: Path
    reader: RequestReader
    output: OutputFile
    before: Before
    progress: JobProgress
    max_errors: int | None = None
    window: int | None = None
    refill: bool = False

    def __post_init__(self) -> None:
        self._ahead = Window(self._requests())
        self._window_rows = window_rows(1, self.window)
        self._running: dict[int, Request] = {}  # by line
        self._has_run = False
        self.other_models, self.first_other = 0, ""  # requests that name another model than this

    def run(self) -> None:
        """Do what is left. UsageError with more than max_errors; what the engine raises goes through."""
        self._check_errors()
        self.llm.expect(len(self.before.done) - self.before.rows)
        while requests := self._ahead.take(self._window_rows):
            self._run_window(requests, self._next_window if self.refill else None)
        self._end()

    def _lines(self) -> Iterator[Line]:
        return read_lines(self.source)

    def _end(self) -> None:
        self.output.sync()

    def _requests(self) -> Iterator[Request]:
        """What is left of the input; lines that cannot be run are written as error rows on the way."""
        for row, line in enumerate(self._lines()):
            if row >= len(self.before.done):
                return  # the input has grown since it was looked through
            if self.before.done[row]:
                continue
            try:
                request = self.reader.read(line)
            except RowError as error:
                self._fail(line.custom_id, line.number, error)
            else:
                self._note_model(request)
                yield request

    def _run_window(
        self, requests: Sequence[Request], more: Callable[[], PromptsAndParams | None] | None = None
    ) -> None:
        """Run them all, and what `more` gives. DoesNotFitError where it is no single row's fault.

        A row that does not fit the budgets alone is an error row. Rows that do not fit together once others have run,
        now or before the job was killed, are run apart.
        """
        try:
            block_size = self.llm.prepare(*_prompts_and_params(requests)).block_size
        except DoesNotFitError as error:
            fitting, others = self._fitting_alone(requests)
            is_at_odds = not others and len(requests) == 1  # memory that somebody else took in between
            some_ran = self._has_run or (fitting and self.before.rows > self.before.errors)
            if is_at_odds or (not some_ran and not (fitting and others)):
                raise
            for request in others:
                self._fail(request.custom_id, request.prompt.index, RowError("does_not_fit", str(error)))
            parts = [fitting] if others else [fitting[: len(fitting) // 2], fitting[len(fitting) // 2 :]]
            for part in filter(None, parts):
                self._run_window(part)
            return
        self._window_rows = window_rows(block_size, self.window)
        self._running = {request.prompt.index: request for request in requests}
        self._has_run = True
        report = self.llm.run(
            *_prompts_and_params(requests), self._finish, listener=self.progress, refill=self.refill, more=more
        )  # fmt: skip
        self._prefilled(report.prefill.tokens, report.spared_tokens)

    def _prefilled(self, tokens: int, spared: int) -> None:
        self.progress.prefilled(tokens, spared)

    def _next_window(self) -> PromptsAndParams | None:
        """The rows that enter the running block next; None at the end, and where the open engine has no room."""
        requests = self._ahead.fill(self._window_rows)[: self._window_rows]
        if not requests or not self.llm.has_room(*_prompts_and_params(requests)):
            return None
        self._ahead.take(len(requests))
        self._running |= {request.prompt.index: request for request in requests}
        return _prompts_and_params(requests)

    def _fitting_alone(self, requests: Sequence[Request]) -> tuple[list[Request], list[Request]]:
        """Those that fit the budgets in a block of their own, and those that do not; by what they take, least first."""
        ordered = sorted(requests, key=lambda r: len(r.prompt.token_ids) + r.params.max_tokens)
        count = bisect_left(ordered, True, key=self._is_too_large)
        return ordered[:count], ordered[count:]

    def _is_too_large(self, request: Request) -> bool:
        try:
            self.llm.check_fit(*_prompts_and_params([request]))
        except DoesNotFitError:
            return True
        return False

    def _finish(self, done: Sequence[Completion]) -> None:
        """Write rows as they finish; called by the engine."""
        rows = [success_row(self._running.pop(one.index), one, self.llm.model) for one in done]
        self.output.append([to_line(row) for row in rows])
        self.progress.wrote(len(rows))

    def _fail(self, custom_id: str, number: int, error: RowError) -> None:
        self.output.append([to_line(error_row(custom_id, number, error))])
        self.progress.wrote(1, errors=1)
        self._check_errors()

    def _check_errors(self) -> None:
        check_errors(self.progress, self.max_errors, self.output)

    def _note_model(self, request: Request) -> None:
        if request.asked_model not in (None, self.llm.model.name):
            self.other_models += 1
            self.first_other = self.first_other or f"{str(request.asked_model)[:100]} in line {request.prompt.index}"


def check_errors(progress: JobProgress, most: int | None, output: OutputFile) -> None:
    """UsageError where more rows than `most` are errors."""
    errors = progress.status.errors
    if most is not None and errors > most:
        raise UsageError(
            f"--max-errors {most}: {errors} rows of {output.path} are errors; mend the input and give another "
            "--output, or raise it"
        )


def _prompts_and_params(requests: Sequence[Request]) -> PromptsAndParams:
    return [request.prompt for request in requests], [request.params for request in requests]
