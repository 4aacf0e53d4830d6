"""Run an open batch: a durable job (jobs/) that owns sequences of the running block (block.py).

It holds descriptors only while it reads or writes.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flexgen_h2o.core import interrupts
from flexgen_h2o.engine.sampling import TokenLogprobs
from flexgen_h2o.jobs.input import InputPart, Line, Steps, read_in_turns
from flexgen_h2o.jobs.job import settle_steps
from flexgen_h2o.jobs.output import OutputFile
from flexgen_h2o.jobs.requests import URLS, Request, RequestReader, RowError
from flexgen_h2o.jobs.runner import FinishedRow, JobRows, JobWriter, OutputState
from flexgen_h2o.serving.answers import say_line
from flexgen_h2o.serving.block import Service
from flexgen_h2o.serving.store import Store

if TYPE_CHECKING:
    from flexgen_h2o.serving.batches import Batches

# Seconds after which a batch makes room for waiting ones, if it has also given a block's rows.
TURN_S = 5.0


@dataclass(frozen=True)
class EndpointReader(RequestReader):
    """Reads the lines of a batch."""

    endpoint: str = next(iter(URLS))  # endpoint of the batch

    @classmethod
    def of(cls, reader: RequestReader, endpoint: str) -> EndpointReader:
        return cls(
            **{one.name: getattr(reader, one.name) for one in fields(reader)}, endpoint=endpoint
        )

    def read(self, line: Line) -> Request:
        """Return the request of a line. Raise RowError also for a line of another endpoint."""
        request = super().read(line)
        kind = "completion" if request.kind == "helm" else request.kind
        if kind != URLS[self.endpoint]:
            raise RowError(
                "unknown_url",
                f"url: is of another endpoint than the batch, which is for {self.endpoint}",
            )
        return request


class BatchOutput:
    """The answers and the error rows of a batch's job, in two files.

    No descriptor is held between two calls.
    """

    def __init__(self, store: Store, record: dict[str, Any]) -> None:
        self._store = store
        self._record = record
        self.path = store.output(record)
        self.answers = OutputFile(self.path)
        try:
            self._errors = OutputFile(store.errors(record))
        except BaseException:
            self.answers.close()
            raise
        self._rest()

    @property
    def is_empty(self) -> bool:
        return self.answers.is_empty and self._errors.is_empty

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows of both files, as `OutputFile.rows` does."""
        try:
            yield from self.answers.rows()
            yield from self._errors.rows()
        finally:
            self._rest()

    def write(self, answers: Sequence[FinishedRow]) -> None:
        """Write answers and error rows.

        Raise FlexgenError as `OutputFile.append` does, and if there is no room for error rows.
        """
        errors = [one.line for one in answers if one.error is not None]
        try:
            if errors:
                self._store.charge_errors(self._record, sum(len(line) + 1 for line in errors))
            self.answers.append([one.line for one in answers if one.error is None])
            self._errors.append(errors)
        finally:
            self._rest()

    def sync_if_due(self) -> None:
        try:
            self.answers.sync_if_due()
            self._errors.sync_if_due()
        finally:
            self._rest()

    def close(self) -> None:
        try:
            self.answers.close()
        finally:
            self._errors.close()

    def _rest(self) -> None:
        self.answers.rest()
        self._errors.rest()


class BatchWriter(JobWriter):
    """Writes a batch's rows, and counts them."""

    def __init__(self, output: BatchOutput, before: OutputState, service: Service) -> None:
        super().__init__(output.answers, before, lambda: service.llm.peak_bytes, shown=False)
        self._both = output

    def _append(self, answers: Sequence[FinishedRow]) -> None:
        self._both.write(answers)

    def sweep(self, tokens: int) -> None:
        self.status.tokens += tokens
        self._both.sync_if_due()
        self._write_status_if_due()


class OpenBatch:
    """An open batch: an `Owner` of sequences in the running block (block.py)."""

    def __init__(self, record: dict[str, Any], batches: Batches) -> None:
        self.record = record
        self._batches = batches
        self.is_gone = False  # it was cancelled, or it failed
        self.is_read = False  # all its lines were read
        self.has_ended = False
        self._error: BaseException | None = None
        self._output: BatchOutput | None = None
        self._rows_before = 0  # rows that were done when it was opened
        self._running = 0  # rows that were given and have not ended
        self._turn_ends = float("inf")
        self._turn_rows = 0
        self.writer: BatchWriter

    def open(self, source: Path, reader: RequestReader) -> Steps[None]:
        """Find what is left to do. Raise FlexgenError as the command `batch` does."""
        batches = self._batches
        batches.store.part(self.record)
        output = self._output = BatchOutput(batches.store, self.record)
        before = yield from self._before(source, output, batches.settings)
        self.writer = BatchWriter(output, before, batches.service)
        lines = read_in_turns(source, InputPart(0, 1, 0, ~before.done))
        self._rows = JobRows(
            reader, lines, self.writer, lambda line: say_line(f"{self.name}: {line}")
        )
        self._rows_before = before.rows

    def _before(
        self, source: Path, output: BatchOutput, settings: dict[str, Any]
    ) -> Steps[OutputState]:
        """Return what is done. A batch that this server has validated need not be read again."""
        begun = self._batches.validated.pop(self.record["id"], None)
        if output.is_empty and begun is not None:
            begun.write(output.path)
            return OutputState(np.zeros(self.record["request_counts"]["total"], bool), 0, Counter())
        args = argparse.Namespace(input=source, output=output.path, force=None)
        return (yield from settle_steps(args, output, settings))

    def close(self, state: str) -> None:
        """Write its final status, and sync its rows. Raise FlexgenError if that fails."""
        output = self._output
        self._output = None
        if output is None:
            return
        if hasattr(self, "writer"):
            self.writer.end(state)
        output.close()

    # State of the batch

    @property
    def name(self) -> str:
        return str(self.record["id"])

    @property
    def counts(self) -> dict[str, int]:
        status = self.writer.status
        return {
            "total": status.rows,
            "completed": status.done - status.errors,
            "failed": status.errors,
        }

    @property
    def is_over(self) -> bool:
        """Whether it will give no further row."""
        return self.is_read or self.is_gone

    @property
    def left(self) -> int:
        """Rows that it has not given yet."""
        return self.writer.status.rows - self.writer.status.done - self._running

    @property
    def has_new_rows(self) -> bool:
        return self.writer.status.done > self._rows_before

    # Methods on the engine's thread

    def begin_turn(self, rows: int) -> None:
        """Begin a turn of at least TURN_S seconds.

        rows: number of rows that it may give in any case.
        """
        self._turn_ends = time.monotonic() + TURN_S
        self._turn_rows = rows

    def next(self) -> Request | None:
        if (
            self._turn_rows <= 0
            and time.monotonic() > self._turn_ends
            and self._batches.others_wait
        ):
            self._batches.left(self)
            return None
        with self._failing():
            for request in self._rows.requests:
                self._turn_rows -= 1
                self._running += request is not None
                if request is None:  # many bad lines were read: others have their turn first
                    self._batches.service.add_batch(self)
                return request
            self.is_read = True
        self._batches.left(self)
        return None

    def token(self, place: int, token: int, logprobs: TokenLogprobs | None) -> None:
        """Sync what is written if it is due. Nobody reads the tokens before the row is done."""
        with self._failing():
            self.writer.sweep(0)

    def finish(self, request: Request) -> None:
        self._running -= 1
        with self._failing():
            self.writer.status.tokens += len(request.token_ids)
            self._rows.finish([request])

    def fail(self, request: Request, error: RowError) -> None:
        self._running -= 1
        with self._failing():
            self._rows.fail(request, error)

    def end(self, error: BaseException | None = None) -> None:
        if not self.has_ended:
            self.has_ended = True
            self._batches.ended(self, error or self._error)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """End only this batch on an error, such as a full disk or a line that breaks its reader."""
        try:
            yield
        except BaseException as error:
            if interrupts.asks_to_end(error):
                raise
            self._error = self._error or error
            self.is_gone = True
