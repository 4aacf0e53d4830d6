"""Run batches as durable jobs (jobs/), whose rows join the running block, some batches at a time.

A batch is validated first: its file is read once, with bounded memory. Then it waits for its turn,
as a record and nothing more. An open batch gives rows to the block, and holds descriptors only
while it reads or writes. When it has had a turn and others wait, it rests until its next turn. A
batch is saved before its rows run, and its output is a job's. After a kill the next start resumes
it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import FlexgenError
from flexgen_h2o.core.files import is_scarce
from flexgen_h2o.engine.sampling import TokenLogprobs
from flexgen_h2o.jobs.input import Check, InputPart, read_part, scan_input
from flexgen_h2o.jobs.job import settle
from flexgen_h2o.jobs.output import OutputFile
from flexgen_h2o.jobs.requests import Request, RequestReader
from flexgen_h2o.jobs.runner import JobWriter, read_requests
from flexgen_h2o.jobs.sidecar import DONE
from flexgen_h2o.serving.answers import RequestRefused, say_fault, say_line
from flexgen_h2o.serving.block import Service
from flexgen_h2o.serving.clerk import Clerk
from flexgen_h2o.serving.held import MAX_DEATHS
from flexgen_h2o.serving.records import ACTIVE
from flexgen_h2o.serving.store import DIED, Store, is_given_up

MAX_ROWS = 50_000  # most rows of a batch, as in OpenAI's API
MAX_FEEDING = 8  # batches that give rows in turn, if these have enough rows for the block


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
        # For clients. It is replaced as a whole, because other threads read it.
        self.counts = dict(record.get("request_counts", {}))
        self.requests: Iterator[Request | None]  # as of `read_requests`
        self._reader: RequestReader

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
        self._reader = reader
        self.requests = read_requests(reader, lines, self.writer)
        self._count()

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

    def _count(self) -> None:
        status = self.writer.status
        self.counts = {
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
                self._count()
                self.turn_rows -= 1
                if request is None:  # many bad lines were read: others have their turn first
                    self._batches.service.add_batch(self)
                return request
            self._count()
            self.is_read = True
            columns = self._reader.columns_text()
            if columns is not None:
                say_line(f"{self.name}: {columns}")
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
            self._count()

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


class Batches:
    """Runs the batches of a store in a service.

    settings: as in jobs/job.settings_of.
    most_rows: most rows of a batch.
    """

    def __init__(
        self,
        store: Store,
        service: Service,
        reader: RequestReader,
        settings: dict[str, Any],
        most_rows: int = MAX_ROWS,
    ) -> None:
        self.store = store
        self.service = service
        self.settings = settings
        self._reader = reader
        self._most_rows = most_rows
        self.running: dict[str, OpenBatch] = {}  # open batches, by id
        self._clerk = Clerk(self._tick)
        # Protects the state of batches: held while a record is written.
        self._lock = threading.Lock()
        self._turns = threading.Lock()  # protects the fields below: held for moments
        # Validated batches that are not open yet (records), and open ones that have had a turn.
        self._waiting: deque[dict[str, Any] | OpenBatch] = deque()
        self._opening: dict[str, int] = {}  # batches that are being opened: rows by id
        self._feeding: set[OpenBatch] = set()  # batches that the block takes rows of
        # Suspected batches that run, each with the number of them that may run together. No other
        # batch gives rows meanwhile.
        self._trial: dict[str, int] = {}
        service.on_clients = store.held.note_clients

    def go_on(self) -> None:
        """Resume the batches that an earlier server has left."""
        store = self.store
        held = store.held
        with_jobs = set(store.with_jobs())
        records = list(store.batches.values())
        held.settle(store.sizes(*(one for one in records if one["status"] in ACTIVE)))
        if suspects := [name for name in store.batches if held.most_beside(name)]:
            say_line(
                f"a server has died; batches that ran then run apart until they have a new "
                f"result: {len(suspects)}"
            )
        # Suspects go first, and last those with which the server has died alone.
        records.sort(key=lambda one: (held.deaths(one["id"]), not held.most_beside(one["id"])))
        for batch in records:
            has_job = batch["id"] in with_jobs
            if batch["status"] not in ACTIVE:
                if has_job:
                    self._add(self._clear, batch)
                continue
            if has_job:
                batch["request_counts"] = store.kept_counts(batch)
            if batch["status"] == "cancelling":
                self._add(self._cancelled, batch)
            elif held.deaths(batch["id"]) >= MAX_DEATHS:
                self._add(self._fail, batch, _died())
            elif batch["status"] == "validating" and not held.most_beside(batch["id"]):
                self._add(self._validate, batch)
            else:
                self._waiting.append(batch)
        self._clerk.start()

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        batch = self.store.add_batch(body)
        self._add(self._validate, batch)
        return batch

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """Cancel a batch. Rows that run are dropped, and rows that are done are kept."""
        batch = self.store.batch(batch_id)
        with self._lock:
            if batch["status"] not in ("validating", "in_progress"):
                raise RequestRefused(f"{batch_id}: is {batch['status']}", "not_running")
            self.store.save(batch, status="cancelling", cancelling_at=int(time.time()))
            run = self.running.get(batch_id)
            if run is not None:
                run.is_gone = True
        if run is None:
            self._add(self._cancelled, batch)
            return batch
        with self._turns:
            self._feeding.discard(run)
            rests = run in self._waiting
            if rests:
                self._waiting.remove(run)
        if rests:
            self.service.add_batch(run)  # ends the batch
        self.service.wake()
        return batch

    def resume(self, batch_id: str) -> dict[str, Any]:
        """Try a batch again that was given up. Rows that are done are kept."""
        batch = self.store.batch(batch_id)
        with self._lock:
            if not is_given_up(batch):
                raise RequestRefused(
                    f"{batch_id}: is {batch['status']}; only a batch that failed with {DIED} can "
                    "be resumed",
                    "not_given_up",
                )
            self.store.path(batch["input_file_id"])  # it may be gone
            changes = dict.fromkeys(("errors", "failed_at", "output_file_id", "error_file_id"))
            is_read = batch["in_progress_at"] is not None
            status = "in_progress" if is_read else "validating"
            self.store.save(batch, status=status, **changes)
            self.store.take_back_results(batch)
        if is_read:
            with self._turns:
                self._waiting.append(batch)
            self._clerk.add(self._fill)
        else:
            self._add(self._validate, batch)
        return batch

    def shown(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the record of a batch with current counts."""
        running = self.running.get(batch["id"])
        return batch if running is None else batch | {"request_counts": running.counts}

    def close(self, signal: BaseException) -> None:
        """End what runs, as a signal ends a job. The next start resumes it."""
        held = self.store.held
        # After any other error an open batch may have ended the server.
        is_told = isinstance(signal, interrupts.Interrupted)
        if is_told:
            held.release(*held.names)  # before anything that takes time: SIGKILL may come next
        self._clerk.close()
        for run in self.running.values():
            with contextlib.suppress(FlexgenError):
                run.close(f"ended by {signal}")
        if is_told:
            held.release(*held.names)

    def _add(self, work: Callable[..., None], batch: dict[str, Any], *others: object) -> None:
        """Have the clerk do work on the files of a batch, after all earlier work on them."""
        file = self.store.files.get(batch["input_file_id"])
        self._clerk.add(partial(work, batch, *others), 0 if file is None else file["bytes"])

    def _check(self, batch: dict[str, Any]) -> None:
        """Raise CancelledError if the batch is cancelled or the server ends."""
        if batch["status"] == "cancelling" or not self._clerk.is_open:
            raise CancelledError

    # Turns

    @property
    def others_wait(self) -> bool:
        """Whether any batch waits for its turn."""
        return bool(self._waiting)

    def left(self, run: OpenBatch) -> None:
        """Record that the block takes no rows of a batch now. The engine's thread calls this."""
        with self._turns:
            self._feeding.discard(run)
            if not run.is_over:
                self._waiting.append(run)
        self._clerk.add(self._fill)

    def ended(self, run: OpenBatch, error: BaseException | None) -> None:
        """Record that a batch has ended. The engine's thread calls this.

        If the clerk is closed, the next start does the rest.
        """
        with self._turns:
            self._feeding.discard(run)
            if run in self._waiting:
                self._waiting.remove(run)
        self._add(self._end, run.record, run, error)

    def _tick(self) -> None:
        """Delete expired files and open batches. The clerk calls this every TICK_S seconds."""
        self.store.expire(time.time())
        self._fill()

    def _fill(self) -> None:
        """Open batches, or give resting ones a turn, as long as the block may want their rows."""
        while (found := self._next_in_turn()) is not None:
            if isinstance(found, OpenBatch):
                self._give_turn(found)
            elif found["status"] == "validating":
                self._add(self._validate, found)
            else:
                self._add(self._open, found)

    def _next_in_turn(self) -> OpenBatch | dict[str, Any] | None:
        """Return the next batch that waits, or None if none is wanted."""
        with self._turns:
            if not self._waiting or not self._may_join(self._waiting[0]) or not self._wants_more():
                return None
            found = self._waiting.popleft()
            if not isinstance(found, OpenBatch):
                if most := self.store.held.most_beside(found["id"]):
                    self._trial[found["id"]] = most
                self._opening[found["id"]] = max(1, found["request_counts"]["total"])
            return found

    def _may_join(self, found: OpenBatch | dict[str, Any]) -> bool:
        """Return whether a batch may give rows beside those that do.

        A suspected batch waits until all others rest, and others rest until it has a new row.
        """
        held = self.store.held
        most = 0 if isinstance(found, OpenBatch) else held.most_beside(found["id"])
        if self._trial:
            for batch_id in [*self._trial]:
                run = self.running.get(batch_id)
                if batch_id not in self._opening and (run is None or run.has_new_rows):
                    del self._trial[batch_id]
                    if run is not None:
                        held.acquit(batch_id)
            if self._trial:
                return len(self._trial) < min(most, *self._trial.values())
            held.take(self.store.sizes(*(run.record for run in [*self.running.values()])))
        if not most:
            return True
        runs = [*self.running.values()]
        if self._feeding or self._opening or any(run.running for run in runs):
            return False
        held.release(*(run.name for run in runs))
        return True

    def _wants_more(self) -> bool:
        if len(self._feeding) + len(self._opening) < MAX_FEEDING:
            return True
        rows = sum(run.left for run in self._feeding) + sum(self._opening.values())
        return rows < self.service.capacity

    def _give_turn(self, run: OpenBatch) -> None:
        run.turn_rows = self.service.capacity
        with self._turns:
            self._feeding.add(run)
            if run.has_ended:
                self._feeding.discard(run)
        self.service.add_batch(run)

    # Methods on the clerk's threads

    def _clear(self, batch: dict[str, Any]) -> None:
        """Remove the job of a batch that is over, unless it may be resumed.

        Rows of a failed batch may not be in a result file yet, because the disk was full.
        """
        # If the disk is still full, the next start tries again.
        with contextlib.suppress(OSError, FlexgenError):
            has_files = batch["output_file_id"] or batch["error_file_id"]
            if batch["status"] == "failed" and not has_files:
                self.store.save(batch, **self.store.keep_results(batch))
            if not is_given_up(batch):
                self.store.remove_job(batch)

    def _validate(self, batch: dict[str, Any]) -> None:
        """Read the file once. Then the batch waits for its turn."""
        try:
            if batch["status"] != "validating":
                return
            self.store.held.take(self.store.sizes(batch))
            source = self.store.path(batch["input_file_id"])
            check = partial(self._check, batch)
            scan = scan_input(source, most_rows=self._most_rows, check=check)
            with self._lock:
                check()
                self.store.save(
                    batch,
                    status="in_progress",
                    in_progress_at=int(time.time()),
                    request_counts={"total": len(scan.ids), "completed": 0, "failed": 0},
                )
            self.store.held.forget(batch["id"])  # it is read, and not suspected any more
        except BaseException as error:
            if is_scarce(error):
                self._add(self._validate, batch)
            elif isinstance(error, CancelledError):
                self._cancelled(batch)
            else:
                self._fail(batch, error)
            return
        finally:
            with self._turns:
                self._opening.pop(batch["id"], None)
        with self._turns:
            self._waiting.append(batch)
        self._fill()

    def _open(self, batch: dict[str, Any]) -> None:
        """Open a batch and give it a turn."""
        run = OpenBatch(batch, self)
        try:
            if batch["status"] not in ("in_progress", "finalizing"):
                return
            self.store.held.take(self.store.sizes(batch))
            source = self.store.path(batch["input_file_id"])
            check = partial(self._check, batch)
            run.open(
                source, replace(self._reader, endpoint=batch["endpoint"], columns=Counter()), check
            )
            with self._lock:
                check()
                self.running[batch["id"]] = run
        except BaseException as error:
            is_cancelled = isinstance(error, CancelledError)
            with contextlib.suppress(FlexgenError):
                run.close("cancelled" if is_cancelled else f"failed: {error}")
            if is_scarce(error):
                with self._turns:
                    self._waiting.appendleft(batch)
            elif is_cancelled:
                self._cancelled(batch)
            else:
                self._fail(batch, error)
            return
        finally:
            with self._turns:
                self._opening.pop(batch["id"], None)
        self._give_turn(run)
        self._fill()

    def _cancelled(self, batch: dict[str, Any]) -> None:
        """End a batch that is not open as cancelled, unless that has been done."""
        if batch["status"] != "cancelling":
            return
        try:
            self._results(batch, "cancelled", self.store.kept_counts(batch))
        except BaseException as error:
            self._fail(batch, error)

    def _end(self, batch: dict[str, Any], run: OpenBatch, error: BaseException | None) -> None:
        """Finish a batch of which no row runs any more."""
        try:
            with self._lock:  # from here on it cannot be cancelled
                is_cancelled = batch["status"] == "cancelling"
                if not is_cancelled and error is None:
                    batch |= {"status": "finalizing", "finalizing_at": int(time.time())}
            if error is not None and not is_cancelled:
                raise error
            run.close("cancelled" if is_cancelled else DONE)
            missing = run.writer.status.rows - run.writer.status.done
            if missing and not is_cancelled:
                told = (
                    f"{batch['input_file_id']}: was changed while it was read ({missing} rows "
                    "are missing)"
                )
                raise FlexgenError(told)
            self._results(batch, "cancelled" if is_cancelled else "completed", run.counts)
        except BaseException as found:
            if is_scarce(found) and found is not error:
                self._add(self._end, batch, run, error)
                return
            with contextlib.suppress(FlexgenError):
                run.close(f"failed: {found}")
            if is_scarce(found):  # no descriptor was left: the rest is done in another turn
                with self._turns:
                    self._waiting.appendleft(batch)
            else:
                self._fail(batch, found, run.counts)
        self.running.pop(batch["id"], None)
        self._fill()

    def _results(self, batch: dict[str, Any], status: str, counts: dict[str, int]) -> None:
        found = self.store.keep_results(batch)
        self.store.save(
            batch,
            status=status,
            request_counts=counts,
            **found,
            **{f"{status}_at": int(time.time())},
        )
        self.store.remove_job(batch)

    def _fail(
        self, batch: dict[str, Any], error: BaseException, counts: dict[str, int] | None = None
    ) -> None:
        """End a batch as failed, and keep the rows that are done as its files.

        If there is no room for them, the next start does it. The batch is not resumed. Raise the
        error again if it asks for the end.
        """
        if interrupts.asks_to_end(error):
            raise error
        message = getattr(error, "strerror", None) or self.store.for_clients(str(error))
        if not isinstance(error, FlexgenError | RequestRefused | OSError):  # an internal error
            say_fault(batch["id"], error)
            message = "internal error"
        code = getattr(error, "code", None) or "failed"
        one = {
            "code": code,
            "message": message.replace("\n", " ")[:2000],
            "line": None,
            "param": None,
        }
        if counts is None:
            counts = self.store.kept_counts(batch)
        found: dict[str, Any] = {}
        with contextlib.suppress(Exception):
            found = self.store.keep_results(batch)
        batch |= {**found, "request_counts": counts, "errors": {"object": "list", "data": [one]}}
        batch |= {"status": "failed", "failed_at": int(time.time())}
        with contextlib.suppress(FlexgenError, OSError):  # the next start does it again
            self.store.save(batch)
            if is_given_up(batch):
                say_line(f"{batch['id']}: given up: {message}")
                self.store.held.forget(batch["id"])
            elif found:
                self.store.remove_job(batch)


def _died() -> RequestRefused:
    told = (
        "the server died again and again while this batch was the only one that ran, and no "
        "request of it was done in between: a request may need more memory than there is; send the "
        "batch without it, or try this one again with POST /v1/batches/ID/resume"
    )
    return RequestRefused(told, DIED, 500)
