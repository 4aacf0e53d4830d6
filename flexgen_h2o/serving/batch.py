"""Run an open batch: a durable job (jobs/) that owns sequences of the running block (block.py).

It holds descriptors only while it reads or writes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexgen_h2o.core import interrupts
from flexgen_h2o.engine.sampling import TokenLogprobs
from flexgen_h2o.jobs.input import Check, InputPart, read_part
from flexgen_h2o.jobs.job import settle
from flexgen_h2o.jobs.output import OutputFile
from flexgen_h2o.jobs.requests import Request, RequestReader
from flexgen_h2o.jobs.runner import JobWriter, read_requests
from flexgen_h2o.serving.answers import say_line

if TYPE_CHECKING:
    from flexgen_h2o.serving.batches import Batches


class OpenBatch:
    """An open batch: the owner of sequences in the running block, with the methods of `Ticket`."""

    def __init__(self, record: dict[str, Any], batches: Batches) -> None:
        self.record = record
        self._batches = batches
        self.is_gone = False  # it was cancelled, or it failed
        self.running = 0  # as in `Ticket`
        self.is_read = False  # all its lines were read
        self.has_ended = False
        self._error: BaseException | None = None
        self._outputs: list[OutputFile] = []  # of answers, and of error rows
        # Rows that it gives before it makes room for waiting ones; `Batches` sets it.
        self.turn_rows = 0
        self.writer: JobWriter
        self.requests: Iterator[Request | None]  # as of `read_requests`

    def open(self, source: Path, reader: RequestReader, check: Check) -> None:
        """Find what is left to do. Raise FlexgenError as the command `batch` does."""
        batches = self._batches
        store = batches.store
        charge = partial(store.charge_errors, self.record)
        self._outputs.append(OutputFile(store.output(self.record), rests=True))
        self._outputs.append(OutputFile(store.errors(self.record), rests=True, charge=charge))
        before = settle(source, self._outputs, batches.settings, check=check)
        llm = batches.service.llm
        self.writer = JobWriter(
            self._outputs,
            reader.model,
            before,
            lambda: llm.peak_bytes,
            tell=lambda line: say_line(f"{self.name}: {line}"),
            shown=False,
        )
        lines = read_part(source, InputPart(~before.done))
        self.requests = read_requests(reader, lines, self.writer)

    def close(self, state: str) -> None:
        """Write its final status, and sync its rows. Raise FlexgenError if that fails."""
        with contextlib.ExitStack() as files:
            for output in self._outputs:
                files.callback(output.close)
            is_open = bool(self._outputs) and hasattr(self, "writer")
            self._outputs = []
            if is_open:
                self.writer.end(state)

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
        return self.writer.status.rows - self.writer.status.done - self.running

    @property
    def has_new_rows(self) -> bool:
        return self.writer.status.done > self.writer.done_before

    # Methods on the engine's thread

    def next(self) -> Request | None:
        if self.turn_rows <= 0 and self._batches.others_wait:
            self._batches.left(self)
            return None
        with self._failing():
            for request in self.requests:
                self.turn_rows -= 1
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
        with self._failing():
            if request.error is None:
                self.writer.status.tokens += len(request.token_ids)
            self.writer.write([request])

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
