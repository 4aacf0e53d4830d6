"""The look-ahead of a job: enough requests are read ahead to sort them into blocks, and no more.

A job's progress: the numbers of its status, shown on a terminal and kept in the status file.

A job from its input to its output: windows of requests through the engine, every row written when it is done.

A window of a job's rows, run somewhere else than the output is: rows are handed out as they finish.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import DoesNotFitError, UsageError
from flexgen_h2o.engine.generation import Callbacks, Progress, Row, Silent
from flexgen_h2o.engine.prompts import Completion, Prompt
from flexgen_h2o.engine.sampling import SamplingParams
from flexgen_h2o.jobs.answers import error_row, success_row
from flexgen_h2o.jobs.input import Digests, Line, id_digest, read_lines, which_are_in
from flexgen_h2o.jobs.output import OutputFile, to_line
from flexgen_h2o.jobs.requests import Request, RequestReader, RowError
from flexgen_h2o.jobs.sidecar import Status, tiers_text
from flexgen_h2o.models.load import Model

LEAST_ROWS = 1024
LEAST_BLOCKS = 4


def window_rows(block_size: int, asked: int | None) -> int:
    """Rows of a window, in whole blocks. asked: as --window; None: at least LEAST_BLOCKS blocks and LEAST_ROWS rows."""
    rows = max(LEAST_ROWS, LEAST_BLOCKS * block_size) if asked is None else asked
    return -(-rows // block_size) * block_size


class Window:
    """Requests that are read and not yet run, out of a stream of them."""

    def __init__(self, requests: Iterator[Request]) -> None:
        self._requests = requests
        self._ahead: list[Request] = []

    def fill(self, rows: int) -> list[Request]:
        """Read on until `rows` are ahead, or the stream ends; those that are. They stay in the window."""
        while len(self._ahead) < rows and (request := next(self._requests, None)) is not None:
            self._ahead.append(request)
        return self._ahead

    def take(self, rows: int) -> list[Request]:
        """The next `rows` requests, or those that there are, in the order of the input."""
        self.fill(rows)
        taken, self._ahead = self._ahead[:rows], self._ahead[rows:]
        return taken


WRITE_EVERY_S = 1.0


class JobProgress:
    """Listens to the runs of a job. on_tick is called with every micro-batch; peak_bytes says what the engine holds.

    rows: of the input; done, errors: those that the output had before. others: what else it had, rows and error rows.
    """

    def __init__(
        self, output: Path, rows: int, done: int, errors: int, peak_bytes: Callable[[], dict[str, int]],
        on_tick: Callable[[], None], others: tuple[int, int] = (0, 0),
    ) -> None:  # fmt: skip
        self.status = Status(rows=rows, done=done, errors=errors, other_rows=others[0], other_errors=others[1])
        self._output, self._peak_bytes, self._on_tick = output, peak_bytes, on_tick
        self._done_before, self._began, self._written = done, time.monotonic(), 0.0
        self._bar = tqdm(
            total=rows, initial=done, unit="row", desc="batch", file=sys.stderr, disable=not Progress.on_terminal()
        )
        self._write()

    def sweep(self, tokens: int) -> None:
        """A micro-batch has got `tokens` new ones."""
        self.status.tokens += tokens
        self._on_tick()
        self._tick()

    def finish(self, rows: Sequence[Row]) -> None:
        """They are counted when they are written."""

    def prefilled(self, tokens: int, spared: int) -> None:
        """A run of prompts with so many tokens has ended; `spared` of them were not computed."""
        self.status.prompt_tokens += tokens
        self.status.spared_tokens += spared

    def wrote(self, rows: int, errors: int = 0) -> None:
        """So many rows more are in the output, `errors` of them error rows."""
        self.status.done += rows
        self.status.errors += errors
        self._bar.update(rows)
        self._tick()

    def end(self, state: str) -> None:
        """state: of the status file, for good."""
        self.status.state = state
        self._bar.close()
        self._write()

    def _tick(self) -> None:
        if time.monotonic() - self._written >= WRITE_EVERY_S:
            self._write()

    def _write(self) -> None:
        status, now = self.status, time.monotonic()
        status.seconds = now - self._began
        status.tokens_per_s = status.tokens / status.seconds if status.seconds > 0 else 0.0
        here = status.done - self._done_before
        status.eta_s = status.seconds / here * (status.rows - status.done) if here else None
        status.peak_bytes = {t: max(n, status.peak_bytes.get(t, 0)) for t, n in self._peak_bytes().items()} or (
            status.peak_bytes
        )
        self._written = now
        self._bar.set_postfix_str(f"{status.tokens_per_s:.1f} token/s, {tiers_text(status.peak_bytes)}", refresh=False)
        status.write(self._output)


PromptsAndParams = tuple[list[Prompt], list[SamplingParams]]


class Generator(Protocol):
    """The part of `llm.LLM` that a job needs."""

    model: Model

    def expect(self, rows: int) -> None: ...

    def prepare(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Policy: ...

    def check_fit(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> None: ...

    def has_room(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> bool: ...

    def run(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], on_finished: Any, callbacks: Callbacks, *,
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
        listening = Callbacks(listener=self.progress)
        report = self.llm.run(
            *_prompts_and_params(requests), self._finish, listening, refill=self.refill, more=more
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


@dataclass(frozen=True)
class Answer:
    """A row that is done. row: of the input; line: for the output, without its newline; tokens: new ones."""

    row: int
    line: bytes
    is_error: bool
    tokens: int


@dataclass(frozen=True)
class Notes:
    """What a window says at its end. other_models, first_other: as of `Job`; peak_bytes: of the engine, by tier.

    prompt_tokens, spared_tokens: as of `status.Status`.
    """

    other_models: int
    first_other: str
    peak_bytes: dict[str, int]
    prompt_tokens: int = 0
    spared_tokens: int = 0


class WindowJob(Job):
    """A job whose rows are `lines`, by row of the whole input, and whose output is whoever takes its answers.

    has_run: the engine has run another window; rows that do not fit together are run apart then.
    """

    def __init__(
        self, llm: Generator, reader: RequestReader, lines: Sequence[tuple[int, Line]], window: int | None = None,
        refill: bool = False, *, has_run: bool = False,
    ) -> None:  # fmt: skip
        self._given, self._row_of = lines, {line.number: row for row, line in lines}
        self._answers: queue.SimpleQueue[list[Answer] | BaseException | None] = queue.SimpleQueue()
        nothing = Before(np.zeros(len(lines), bool), 0, 0)
        super().__init__(llm, Path(), reader, cast(Any, None), nothing, cast(Any, Silent()), None, window, refill)
        self._has_run = has_run
        self.prompt_tokens = self.spared_tokens = 0

    def answers(self) -> Iterator[list[Answer]]:
        """Those that finish together, as they do; raises what the engine raises."""
        thread = threading.Thread(target=self._work, name="window", daemon=True)
        thread.start()
        while (found := self._answers.get()) is not None:
            if isinstance(found, BaseException):
                raise found
            yield found
        thread.join()

    def _work(self) -> None:
        try:
            self.run()
            self._answers.put(None)
        except BaseException as error:
            self._answers.put(error)

    def _lines(self) -> Iterator[Line]:
        return (line for _, line in self._given)

    def _end(self) -> None:
        """There is no file to sync."""

    def _finish(self, done: Sequence[Completion]) -> None:
        found = []
        for one in done:
            line = to_line(success_row(self._running.pop(one.index), one, self.llm.model))
            found.append(Answer(self._row_of[one.index], line, False, len(one.token_ids)))
        self._answers.put(found)

    def _prefilled(self, tokens: int, spared: int) -> None:
        self.prompt_tokens += tokens
        self.spared_tokens += spared

    def _fail(self, custom_id: str, number: int, error: RowError) -> None:
        self._answers.put([Answer(self._row_of[number], to_line(error_row(custom_id, number, error)), True, 0)])

    def _check_errors(self) -> None:
        """Errors are counted where rows are written."""
