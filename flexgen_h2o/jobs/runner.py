"""Run a job: windows of requests pass through the engine, and each finished row is written."""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter, abc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import ge
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from flexgen_h2o.cli_common import say
from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import DoesNotFitError, UsageError
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.engine.generation import Callbacks, Listener, Progress
from flexgen_h2o.engine.sequence import CODE_INTERNAL, Sequence
from flexgen_h2o.engine.workload import window_rows
from flexgen_h2o.jobs.causes import MAX_CAUSES, cause_of
from flexgen_h2o.jobs.input import STEP_LINES, Check, Digests, Line, id_digest, which_are_in
from flexgen_h2o.jobs.output import OutputFile
from flexgen_h2o.jobs.requests import Request, RequestReader, RowError
from flexgen_h2o.jobs.responses import error_message, output_line
from flexgen_h2o.jobs.sidecar import Status, left_text, tiers_text
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.kvcache.eviction.policy import most_new_tokens
from flexgen_h2o.llm import LLM
from flexgen_h2o.models.load import Model

# Internal errors of a job that are printed on stderr: a job may have a million rows.
MAX_SAID = 100
MAX_BAD_S = 0.05  # seconds in which the server handles bad lines and nothing else
WRITE_EVERY_S = 1.0
# Seconds until the first line of progress, and the most between two of them.
FIRST_LINE_S = 60.0
MAX_LINE_S = 900.0
# tqdm's own time left counts rows, and so error rows, which take no time; the postfix has ours.
BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}{postfix}]"
WRITE_BYTES = 2**20  # bytes of lines that are written together

Need = tuple[int, ...]  # what the memory of a row grows with (`_need`)


@dataclass(frozen=True)
class OutputState:
    """State of an output when the job began."""

    done: npt.NDArray[np.bool_]  # (rows of the input,): whether the output has this row
    status: Status  # the counts of rows; the job's `JobWriter` continues it
    errors: Counter[str] = field(default_factory=Counter)  # number of error rows by `cause_of`
    # Row that is to be done and whose line has no newline. `JobWriter` holds its answer back.
    open_row: int | None = None
    failing: int = 0  # rows to be done that are known to become error rows (`RowChecker`)


def rows_before(
    rows: Iterable[dict[str, Any]], ids: Digests, check: Check = lambda: None
) -> OutputState:
    """Return what the output's rows hold of the input.

    ids: digests of the input's ids.
    """
    digests = bytearray()
    failed = dict[str, bytearray]()
    for number, row in enumerate(rows):
        if number % STEP_LINES == 0:
            check()
        digest = id_digest(row["custom_id"])
        digests += digest
        if (error := row["error"]) is not None:
            code = str(error.get("code")) if isinstance(error, dict) else "unknown"
            cause = cause_of(code, str(error.get("message")) if isinstance(error, dict) else "")
            if cause not in failed and len(failed) >= MAX_CAUSES:
                cause = code
            failed.setdefault(cause, bytearray()).extend(digest)
    done = which_are_in(ids, np.frombuffer(digests, ids.dtype))
    in_input = {
        code: which_are_in(ids, np.frombuffer(found, ids.dtype)) for code, found in failed.items()
    }
    errors = Counter({code: int(mask.sum()) for code, mask in in_input.items()})
    size = ids.dtype.itemsize
    status = Status(rows=len(ids), done=int(done.sum()), errors=errors.total())
    status.other_rows = len(digests) // size - status.done
    status.other_errors = sum(map(len, failed.values())) // size - status.errors
    return OutputState(done, status, errors)


class Sink(Listener):
    """Receives the rows of a job as they finish, and the counts of its engine.

    send: gets the rows. A `JobWriter` writes them itself.
    """

    has_answers = False  # whether there were rows without errors before the job began

    def __init__(self, send: Callable[[abc.Sequence[Request]], None]) -> None:
        self.status = Status()
        self._send = send

    def asked(self, tokens: int | None) -> None:
        """Count a row that was read, and the most new tokens that it may have.

        tokens: None for a row that cannot be run.
        """

    def write(self, done: abc.Sequence[Request]) -> None:
        self._send(done)


class JobWriter(Sink):
    """Writes the rows of a job, counts them, and updates the status file and the bar on a terminal.

    outputs: the file of all rows, or one for answers and one for error rows.
    model: has run the rows.
    peak_bytes: returns the bytes by tier that the open engine holds.
    max_errors: most error rows that the output may have; None is no limit.
    tell: shows a person an internal error.
    shown: whether the bar is shown on a terminal.
    """

    def __init__(
        self,
        outputs: abc.Sequence[OutputFile],
        model: Model,
        before: OutputState,
        peak_bytes: Callable[[], dict[str, int]],
        max_errors: int | None = None,
        tell: Callable[[str], None] | None = None,
        shown: bool = True,
    ) -> None:
        self.errors = before.errors
        self.status = before.status
        self.done_before = self.status.done
        self.has_answers = self.done_before > self.status.errors
        self._open_row = before.open_row
        self._held: Request | None = None  # the finished request of `_open_row`
        self._outputs = outputs
        self._model = model
        self._peak_bytes = peak_bytes
        self._max_errors = max_errors
        self._tell = tell or partial(say, "batch")
        self._said = 0  # internal errors that were shown
        self._began = time.monotonic()
        self._written = 0.0
        # Rows that were read and can be run, and their new tokens. A row that is not done counts
        # the most that it may have.
        self._asking = 0
        self._new = 0
        self._errors_before = self.status.errors
        self._failing = before.failing
        self._shown = shown
        self._next_line_s = FIRST_LINE_S  # when the next line of progress is due
        self._writing = threading.Lock()  # held while the status is counted and written
        with interrupts.held():  # tqdm starts a thread
            self._bar = tqdm(
                total=self.status.rows,
                initial=self.done_before,
                unit="row",
                desc="batch",
                file=sys.stderr,
                bar_format=BAR_FORMAT,
                disable=not (shown and Progress.on_terminal()),
            )
        self._write_status()

    def write(self, done: abc.Sequence[Request]) -> None:
        """Append rows, update the counts, and release the rows.

        Raise UsageError if there are more than max_errors error rows, and FlexgenError as
        `OutputFile.append` does.
        """
        if self._open_row is not None:
            held = [one for one in done if one.row == self._open_row]
            done = [one for one in done if one.row != self._open_row]
            self._held = held[0] if held else self._held
        lines: list[list[bytes]] = [[] for _ in self._outputs]
        nbytes = 0
        for one in done:
            line = output_line(one, self._model)
            lines[0 if one.error is None else -1].append(line)
            nbytes += len(line)
            if nbytes >= WRITE_BYTES:
                self._append(lines)
                nbytes = 0
        self._append(lines)
        for one in done:
            self._count(one)
            one.release()
        self.status.done += len(done)
        self.status.errors = self.errors.total()
        with interrupts.held():  # an exception would leave the lock of the bar held
            self._bar.update(len(done))
        self._write_status_if_due()
        self.check_errors()

    def _count_error(self, one: Request) -> None:
        cause = cause_of(one.error_code, error_message(one))
        is_new = cause not in self.errors and len(self.errors) >= MAX_CAUSES
        self.errors[one.error_code if is_new else cause] += 1

    def end_rows(self, is_complete: Callable[[], bool]) -> bool:
        """Write the answer that is held back, when all others are written.

        is_complete: whether its line is still what was answered. If not, the row no longer counts,
        and this returns False.
        """
        held = self._held
        self._open_row = None
        self._held = None
        if held is None:
            return True
        if not is_complete():
            self.status.rows -= 1
            return False
        self.write([held])
        return True

    def _append(self, lines: list[list[bytes]]) -> None:
        """Write and forget the lines of each output."""
        for output, of_output in zip(self._outputs, lines, strict=True):
            output.append(of_output)
            of_output.clear()

    def _count(self, one: Request) -> None:
        if one.error is not None:
            self._count_error(one)
        if one.error_code == CODE_INTERNAL:
            self._say_internal(error_message(one))

    def _say_internal(self, line: str) -> None:
        self._said += 1
        if self._said <= MAX_SAID:
            self._tell(line)
        elif self._said == MAX_SAID + 1:
            self._tell(f"{line}; further internal errors are in the output alone")

    def check_errors(self) -> None:
        errors = self.status.errors
        if self._max_errors is not None and errors > self._max_errors:
            raise UsageError(
                f"--max-errors {self._max_errors}: {errors} rows of {self._outputs[0].path} are "
                "errors; mend the input and "
                "give another --output, or raise it"
            )

    def sweep(self, tokens: int) -> None:
        self.status.tokens += tokens
        for output in self._outputs:
            output.sync_if_due()
        self._write_status_if_due()

    def asked(self, tokens: int | None) -> None:
        if tokens is not None:
            self._asking += 1
            self._new += tokens

    @contextmanager
    def ticking(self) -> Iterator[None]:
        """Write the status when it is due, and lines of progress, also while the engine is busy
        with a pass of several minutes.
        """
        is_over = threading.Event()

        def tick() -> None:
            while not is_over.wait(WRITE_EVERY_S):
                self._write_status_if_due()

        thread = threading.Thread(target=tick, daemon=True)
        interrupts.start(thread)
        try:
            yield
        finally:
            is_over.set()
            thread.join()

    def finish(self, rows: abc.Sequence[Sequence]) -> None:
        """Subtract tokens that are not new.

        These are tokens of a prompt that decode steps took, and tokens that nobody asked for.
        """
        self.status.tokens -= sum(len(row.token_ids) - row.answered for row in rows)
        self._new -= sum(row.asked - row.answered for row in rows)

    def end(self, state: str) -> None:
        """Write the final state to the status file."""
        self.status.state = state
        self._bar.close()
        self._write_status()

    def _write_status_if_due(self) -> None:
        if time.monotonic() - self._written >= WRITE_EVERY_S:
            self._write_status()

    def _write_status(self) -> None:
        with self._writing:
            status = self.status
            now = time.monotonic()
            status.seconds = now - self._began
            status.tokens_per_s = status.tokens / status.seconds if status.seconds > 0 else 0.0
            status.eta_s = self._left_s()
            status.add_engine(peak_bytes=self._peak_bytes())
            self._written = now
            speed = f"{status.tokens_per_s:.1f} token/s, {left_text(status)}"
            with interrupts.held():
                shown = filter(None, (speed, tiers_text(status.peak_bytes)))
                self._bar.set_postfix_str(", ".join(shown))
            self._say_progress(speed)
            status.write(self._outputs[0].path)

    def _say_progress(self, speed: str) -> None:
        """Print a line of progress if one is due, and stderr is no terminal with a bar."""
        status = self.status
        if not self._shown or not self._bar.disable or status.seconds < self._next_line_s:
            return
        self._next_line_s = status.seconds + min(status.seconds + FIRST_LINE_S, MAX_LINE_S)
        errors = f" ({status.errors} errors)" if status.errors else ""
        say(
            "batch",
            f"{time.strftime('%H:%M:%S')} {status.done} of {status.rows} prompts done{errors}, "
            f"{speed}",
        )

    def _left_s(self) -> float | None:
        """Return the seconds left, or None if nothing is done yet.

        Error rows take no time, so they do not count. The estimate is by tokens: it assumes that
        all rows are like those that were read, and that these are as long as they may be. If no
        tokens are counted, it is by rows.
        """
        status = self.status
        errors = status.errors - self._errors_before
        rows = status.rows - self.done_before - max(errors, self._failing)
        if status.tokens and self._new:
            to_come = max(rows, self._asking) * self._new / self._asking
            return status.seconds * max(0.0, to_come / status.tokens - 1)
        done = status.done - self.done_before - errors
        return status.seconds / done * max(0, rows - done) if done else None


def read_requests(
    reader: RequestReader, lines: Iterable[Line], sink: Sink
) -> Iterator[Request | None]:
    """Yield the requests of the lines. Lines that cannot be run go to the sink as error rows.

    Yield None after each MAX_BAD_S seconds of them. The caller can then do something else.
    """
    began = time.monotonic()
    for line in lines:
        try:
            request = reader.read(line)
        except RowError as error:
            sink.asked(None)
            failed = Request(line.number, (), custom_id=line.custom_id, row=line.row)
            failed.fail(error.code, str(error))
            sink.write([failed])
            if time.monotonic() - began > MAX_BAD_S:
                yield None
                began = time.monotonic()
            continue
        sink.asked(request.params.max_tokens)
        yield request
        began = time.monotonic()


class JobRun:
    """Runs lines through an engine, in windows.

    Rows that run and wait hold at most `LLM.rows_budget` bytes, and one row more. A row that needs
    more than that waits until no other runs.

    window: rows that are read ahead, as in `window_rows`.
    refill: rows of the next window enter the running block, which is full from its start.
    has_run: the engine has run rows of another job.
    on_open: called once, with the first window, when the engine is open for it.
    """

    def __init__(
        self,
        llm: LLM,
        reader: RequestReader,
        lines: Iterable[Line],
        sink: Sink,
        window: int | None = None,
        refill: bool = False,
        has_run: bool = False,
        on_open: Callable[[abc.Sequence[Request]], None] | None = None,
    ) -> None:
        self._llm = llm
        self._sink = sink
        self._asked_window = window
        self._refill = refill
        self._requests = filter(None, read_requests(reader, lines, sink))
        self._ahead: list[Request] = []  # requests that were read and have not run
        self._window_rows = window_rows(1, window)
        self._held = 0  # bytes of rows that were read and are not written
        self._most_held = 0
        self._eviction = llm.eviction
        self._has_run = has_run
        self._on_open = on_open

    def run(self, rows: int) -> None:
        """Run all lines, which are at most `rows`.

        Errors of the engine and of the sink are not caught.
        """
        self._llm.planner.job_rows = rows
        self._llm.planner.job_window = self._asked_window
        self._most_held = self._llm.rows_budget
        while requests := self._take(self._window_rows):
            self._run_window(requests, self._next_window if self._refill else None)

    def _fill(self, rows: int) -> list[Request]:
        """Read until `rows` requests are ahead, the RAM for rows is full, or the lines end. Return
        the first `rows` of those ahead.
        """
        while len(self._ahead) < rows and self._held < self._most_held:
            request = next(self._requests, None)
            if request is None:
                break
            self._held += held_bytes(request, self._eviction, self._llm.model.spec)
            self._ahead.append(request)
        return self._ahead[:rows]

    def _write(self, done: abc.Sequence[Request]) -> None:
        self._held -= sum(request.held_bytes for request in done)
        self._sink.write(done)

    def _take(self, rows: int) -> list[Request]:
        taken = self._fill(rows)
        del self._ahead[: len(taken)]
        return taken

    def _run_window(
        self,
        requests: abc.Sequence[Request],
        more: Callable[[], list[Request] | None] | None = None,
    ) -> None:
        """Run these requests, and those that `more` returns.

        A row that does not fit alone becomes an error row. If all rows fit alone and others have
        run, now or before a restart, the rows are run in two parts. Raise DoesNotFitError for a
        single row that fits by now. Raise it also if nothing has run yet, and either all rows fit
        alone or none does.
        """
        try:
            requests, block_size = self._prepare(requests, fills=more is not None)
        except DoesNotFitError:
            fitting, others = self._fitting_alone(requests)
            # Another program held memory in between.
            fits_by_now = not others and len(requests) == 1
            some_ran = self._has_run or (fitting and self._sink.has_answers)
            if fits_by_now or (not some_ran and not (fitting and others)):
                raise
            for request, why in others:
                request.fail("does_not_fit", why)
            self._write([request for request, _ in others])
            parts = (
                [fitting]
                if others
                else [fitting[: len(fitting) // 2], fitting[len(fitting) // 2 :]]
            )
            for part in filter(None, parts):
                self._run_window(part)
            return
        if self._on_open is not None:
            self._on_open(requests)
            self._on_open = None
        self._window_rows = window_rows(block_size, self._asked_window)
        self._most_held = self._llm.rows_budget
        self._has_run = True
        report = self._llm.run(
            requests,
            self._write,
            Callbacks(listener=self._sink, isolates_errors=True),
            refill=self._refill,
            more=more,
        )
        self._sink.status.add_engine(report.prefill.tokens, report.spared_tokens)

    def _prepare(
        self, requests: abc.Sequence[Request], fills: bool
    ) -> tuple[abc.Sequence[Request], int]:
        """Open the engine. Return the rows that it is open for, and the rows of a block.

        fills: rows of later windows will enter the block. It then begins with a row in each place,
        if these fit, because the block gets no further places later.
        """
        if fills and not self._has_run and self._fill(1):
            size = self._llm.check_fit(requests).block_size
            further = self._take(max(0, size - len(requests)))
            with suppress(DoesNotFitError):
                filled = [*requests, *further]
                return filled, self._llm.prepare(filled).block_size
            self._ahead[:0] = further
        return requests, self._llm.prepare(requests).block_size

    def _next_window(self) -> list[Request] | None:
        """Return the rows that enter the running block next.

        Return None at the end, and if the open engine has no room for them.
        """
        requests = self._fill(self._window_rows)
        if not requests or not self._llm.has_room(requests):
            return None
        return self._take(len(requests))

    def _fitting_alone(
        self, requests: abc.Sequence[Request]
    ) -> tuple[list[Request], list[tuple[Request, str]]]:
        """Return the rows that fit the budgets in a block of their own, and the others with the
        reason.

        Both lists begin with the smallest. Few rows are tested: each time the middle one of those
        left. A row that needs no more than one that fits also fits. A row that needs no less than
        one that does not fit does not fit either.
        """
        eviction = self._eviction
        spec = self._llm.model.spec
        ordered = sorted(requests, key=lambda r: len(r.prompt_ids) + r.params.max_tokens)
        needs = [_need(request, eviction, spec) for request in ordered]
        left = dict(zip(needs, ordered, strict=True))
        why = dict[Need, str]()
        while left:
            need, request = list(left.items())[len(left) // 2]
            error = self._why_not(request)
            if error is None:
                left = {other: one for other, one in left.items() if not _covers(need, other)}
                continue
            said = f"needs no less than line {request.index}: {error}"
            why |= {other: said for other in left if _covers(other, need)} | {need: str(error)}
            left = {other: one for other, one in left.items() if other not in why}
        pairs = list(zip(ordered, needs, strict=True))
        return [one for one, need in pairs if need not in why], [
            (one, why[need]) for one, need in pairs if need in why
        ]

    def _why_not(self, request: Request) -> DoesNotFitError | None:
        """Return why the row does not fit the budgets in a block of its own. None if it fits."""
        try:
            self._llm.check_fit([request])
        except DoesNotFitError as error:
            return error
        return None


def held_bytes(request: Request, eviction: Eviction, spec: ModelSpec) -> int:
    """Return and record the bytes of RAM of a request until its answer is written."""
    length = len(request.prompt_ids)
    request.max_new = most_new_tokens(eviction, spec, length, max(1, request.params.max_tokens))
    request.held_bytes = request.most_bytes
    return request.held_bytes


def sample_of(requests: Iterable[Request], llm: LLM) -> tuple[list[Request], int]:
    """Return the requests that a plan is made for, and the number of all.

    They are all, or every second, fourth, ... one, so that they hold at most `LLM.rows_budget`
    bytes. The largest is always among them.
    """
    eviction = llm.eviction
    spec = llm.model.spec
    most_held = llm.rows_budget
    sample: list[Request] = []
    largest: Request | None = None
    step = 1
    held = count = 0
    for request in requests:
        nbytes = held_bytes(request, eviction, spec)
        if largest is None or sum(request.size) > sum(largest.size):
            largest = request
        if count % step == 0:
            sample.append(request)
            held += nbytes
        count += 1
        while held > most_held and len(sample) > 1:
            sample = sample[::2]
            held = sum(one.held_bytes for one in sample)
            step *= 2
    if largest is not None and largest not in sample:
        sample.append(largest)
    return sample, count


def _need(request: Request, eviction: Eviction, spec: ModelSpec) -> Need:
    """Return the numbers that a row's memory grows with: prompt tokens, and slots per transformer
    block.

    Nothing else distinguishes the memory of rows of one kind. Rows with log-probabilities of their
    prompts are a kind of their own. Because of the first two numbers, no row covers a row of the
    other kind.
    """
    prompt = len(request.prompt_ids)
    echo = request.params.prompt_logprobs is not None
    new = most_new_tokens(eviction, spec, prompt, max(1, request.params.max_tokens))
    slots = (eviction.slots(prompt, new, block) for block in range(spec.num_blocks))
    return echo, not echo, prompt, *slots


def _covers(need: Need, other: Need) -> bool:
    """Return whether `need` is no less than `other` in everything."""
    return all(map(ge, need, other))
