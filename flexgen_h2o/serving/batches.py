"""Batches run as durable jobs (jobs/) whose rows the running block takes, some batches at a time.

validating: the file is read once, with bounded memory. Then the batch waits for its turn, as a record and nothing
more. In hand it gives rows to the block; it holds descriptors only while it reads or writes. When it has had a turn and
others wait, it rests until it is its turn again. A batch is in its file before its rows run, and its output is a job's:
after a kill the next start goes on with it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import FlexgenError
from flexgen_h2o.core.files import is_scarce
from flexgen_h2o.jobs.input import STEP_LINES, Made, Steps, scan_steps
from flexgen_h2o.jobs.job import check_requests
from flexgen_h2o.jobs.output import rows_of
from flexgen_h2o.jobs.requests import RequestReader
from flexgen_h2o.jobs.sidecar import DONE, Sidecar
from flexgen_h2o.serving.answers import Refused, say_fault
from flexgen_h2o.serving.batch import Batch, EndpointReader
from flexgen_h2o.serving.block import Service
from flexgen_h2o.serving.clerk import Clerk
from flexgen_h2o.serving.store import ACTIVE, MOST_DEATHS, Store

MOST_ROWS = 50_000  # of a batch, as OpenAI has it
MOST_FEEDING = 8  # batches that give rows in turn, where these have enough rows for the block
TRIAL_S = 30.0  # in which a batch that was in hand as the server died is joined by no other


class BatchError(FlexgenError):
    """Why a batch failed. code: in its record."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Cancelled(Exception):
    """Somebody has cancelled the batch that is worked at."""


class Batches:
    """Runs the batches of a store in a service. settings: as of jobs/job.settings_of. most_rows: of a batch."""

    def __init__(
        self, store: Store, service: Service, reader: RequestReader, settings: dict[str, Any],
        most_rows: int = MOST_ROWS,
    ) -> None:  # fmt: skip
        self.store = store
        self.service = service
        self.settings = settings
        self._reader = reader
        self._most_rows = most_rows
        self.running: dict[str, Batch] = {}  # in hand
        self._clerk = Clerk(self._tick)
        self._lock = threading.Lock()  # of what a batch is doing: held while its record is written
        self._turns = threading.Lock()  # of the rest, which is held for moments
        self._ready: deque[dict[str, Any]] = deque()  # validated, and not in hand
        self.validated: dict[str, Sidecar] = {}  # of these, by this server: what their jobs begin with, by id
        self._opening: dict[str, int] = {}  # on the way from there; rows by id
        self._feeding: set[Batch] = set()  # which the block takes rows of
        self._resting: deque[Batch] = deque()  # which have had a turn
        self._is_newcomers_turn = True  # rather than of those that rest
        self._at_work: set[str] = set()  # whose files the clerk reads
        self._trial: tuple[str, float] | None = None  # the batch that is joined by no other, and until when

    def go_on(self) -> None:
        """With batches that an earlier server has left."""
        with_jobs = set(self.store.with_jobs())
        for batch in list(self.store.batches.values()):
            has_job = batch["id"] in with_jobs
            if batch["status"] not in ACTIVE:
                if has_job:
                    self._clerk.add(partial(self._clear, batch))
                continue
            if has_job:
                self.store.count_death(batch)
                batch["request_counts"] = self.store.kept_counts(batch)
            if batch["status"] == "cancelling":
                self._clerk.add(partial(self._cancelled, batch))
            elif self.store.deaths(batch) >= MOST_DEATHS:
                self._clerk.add(partial(self._fail, batch, _died(self.store.deaths(batch))))
            elif batch["status"] == "validating":
                self._clerk.add(partial(self._validate, batch), self._input_bytes(batch))
            else:
                self._ready.append(batch)
        self._clerk.start()

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        batch = self.store.add_batch(body)
        self._clerk.add(partial(self._validate, batch), self._input_bytes(batch))
        return batch

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """Rows that run are given up, rows that are done are kept."""
        batch = self.store.batch(batch_id)
        with self._lock:
            if batch["status"] not in ("validating", "in_progress"):
                raise Refused(400, f"{batch_id}: is {batch['status']}", "not_running")
            self.store.save(batch, status="cancelling", cancelling_at=int(time.time()))
            run = self.running.get(batch_id)
            if run is not None:
                run.is_gone = True
        if run is None:
            self._clerk.add(partial(self._cancelled, batch))
            return batch
        with self._turns:
            self._feeding.discard(run)
            rests = run in self._resting
            if rests:
                self._resting.remove(run)
        if rests:
            self.service.add_batch(run)  # which ends it
        self.service.wake()
        return batch

    def shown(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch, with counts of this moment."""
        running = self.running.get(batch["id"])
        return batch if running is None else batch | {"request_counts": running.counts}

    def close(self, signal: BaseException) -> None:
        """End what runs, as a signal ends a job; the next start goes on."""
        self._clerk.close()
        for run in self.running.values():
            with contextlib.suppress(FlexgenError):
                run.close(f"ended by {signal}")
        if isinstance(signal, interrupts.Interrupted):  # else a batch in hand may have ended the server
            self.store.release_all()

    def _input_bytes(self, batch: dict[str, Any]) -> int:
        file = self.store.files.get(batch["input_file_id"])
        return 0 if file is None else int(file["bytes"])

    # Turns

    @property
    def others_wait(self) -> bool:
        """Does any batch wait for its turn?"""
        return bool(self._ready or self._resting)

    def left(self, run: Batch) -> None:
        """Called by the engine's thread: the block takes no more rows of it now."""
        with self._turns:
            self._feeding.discard(run)
            if not run.is_over:
                self._resting.append(run)
        self._clerk.add(self._fill)

    def ended(self, run: Batch, error: BaseException | None) -> None:
        """Called by the engine's thread; a clerk that is closed has left the rest to the next start."""
        with self._turns:
            self._feeding.discard(run)
            if run in self._resting:
                self._resting.remove(run)
        self._clerk.add(partial(self._end, run, error))

    def _tick(self) -> None:
        """Called now and then."""
        self.store.expire(time.time())
        self._fill()

    def _fill(self) -> None:
        """Take batches in hand as long as the block may want their rows."""
        while (found := self._next_in_turn()) is not None:
            if isinstance(found, Batch):
                self._give_turn(found)
            else:
                is_begun = self.store.output(found).exists() or self.store.errors(found).exists()
                self._clerk.add(partial(self._open, found), self._input_bytes(found) if is_begun else 0)

    def _next_in_turn(self) -> Batch | dict[str, Any] | None:
        """New batches in their order, and those that rest, one of each at a time."""
        with self._turns:
            if not self._wants_more():
                return None
            if self._ready and (self._is_newcomers_turn or not self._resting):
                self._is_newcomers_turn = False
                record = self._ready.popleft()
                if self.store.deaths(record):
                    self._trial = record["id"], time.monotonic() + TRIAL_S
                self._opening[record["id"]] = max(1, record["request_counts"]["total"])
                return record
            self._is_newcomers_turn = True
            return self._resting.popleft() if self._resting else None

    def _wants_more(self) -> bool:
        if self._trial is not None:
            batch_id, ends = self._trial
            run = self.running.get(batch_id)
            is_on = batch_id in self._opening or (run is not None and not run.has_new_rows)
            if is_on and time.monotonic() < ends:
                return False
            self._trial = None
        if len(self._feeding) + len(self._opening) < MOST_FEEDING:
            return True
        rows = sum(run.left for run in self._feeding) + sum(self._opening.values())
        return rows < self.service.capacity

    def _give_turn(self, run: Batch) -> None:
        run.begin_turn(self.service.capacity)
        with self._turns:
            self._feeding.add(run)
            if run.has_ended:
                self._feeding.discard(run)
        self.service.add_batch(run)

    # The clerk's thread

    def _clear(self, batch: dict[str, Any]) -> None:
        """Remove the job of a batch that is over. Rows of a failed one may be in no file yet: the disk was full."""
        with contextlib.suppress(OSError, FlexgenError):  # it still is, and the next start tries again
            has_files = batch["output_file_id"] or batch["error_file_id"]
            if batch["status"] == "failed" and not has_files:
                self.store.save(batch, **self.store.keep_results(batch))
            self.store.remove_job(batch)

    def _working(self, batch: dict[str, Any], steps: Steps[Made]) -> Steps[Made]:
        """The steps, unless the batch is cancelled meanwhile."""
        self._at_work.add(batch["id"])
        try:
            while batch["status"] != "cancelling":
                try:
                    next(steps)
                except StopIteration as end:
                    made: Made = end.value
                    return made
                yield
            raise _Cancelled
        finally:
            steps.close()
            self._at_work.discard(batch["id"])

    def _validate(self, batch: dict[str, Any]) -> Iterator[None]:
        """Read the file once; then the batch waits for its turn."""
        try:
            if batch["status"] != "validating":
                return
            self.store.take(batch)
            source = self.store.path(batch["input_file_id"])
            scan = yield from self._working(batch, scan_steps(source, 0, self._most_rows))
            check_requests(source, scan)
            self.validated[batch["id"]] = Sidecar(self.settings, str(source), scan.nbytes, scan.digest)
            counts = {"total": len(scan.ids), "completed": 0, "failed": 0}
            with self._lock:
                if batch["status"] == "cancelling":
                    raise _Cancelled
                self.store.save(batch, status="in_progress", in_progress_at=int(time.time()), request_counts=counts)
            self.store.release(batch)
        except _Cancelled:
            return
        except BaseException as error:
            if is_scarce(error):
                self._clerk.add(partial(self._validate, batch), self._input_bytes(batch))
                return
            yield from self._failed(batch, error)
            return
        with self._turns:
            self._ready.append(batch)
        self._fill()

    def _open(self, batch: dict[str, Any]) -> Iterator[None]:
        """Take a batch in hand."""
        run = Batch(batch, self)
        try:
            if batch["status"] not in ("in_progress", "finalizing"):
                raise _Cancelled
            self.store.take(batch)
            source = self.store.path(batch["input_file_id"])
            yield from self._working(batch, run.open(source, EndpointReader.of(self._reader, batch["endpoint"])))
            with self._lock:
                if batch["status"] == "cancelling":
                    raise _Cancelled
                self.running[batch["id"]] = run
        except BaseException as error:
            with contextlib.suppress(FlexgenError):
                run.close(f"failed: {error}")
            if isinstance(error, _Cancelled):
                return
            if is_scarce(error):
                with self._turns:
                    self._ready.appendleft(batch)
                return
            yield from self._failed(batch, error)
            return
        finally:
            with self._turns:
                self._opening.pop(batch["id"], None)
        self._give_turn(run)
        self._fill()

    def _cancelled(self, batch: dict[str, Any]) -> Iterator[None]:
        """A batch that is not in hand ends as cancelled."""
        self.validated.pop(batch["id"], None)
        while batch["id"] in self._at_work:
            yield
        try:
            counts = yield from self._count(batch)
            self._results(batch, "cancelled", counts)
        except BaseException as error:
            yield from self._failed(batch, error)

    def _count(self, batch: dict[str, Any]) -> Steps[dict[str, int]]:
        """Rows of a batch that is not in hand, as far as its job's output can be read."""
        counts = self.store.kept_counts(batch)
        try:
            answers = yield from _count_rows(self.store.output(batch))
            errors = yield from _count_rows(self.store.errors(batch))
        except FlexgenError:
            return counts
        return {"total": max(answers + errors, counts["total"]), "completed": answers, "failed": errors}

    def _end(self, run: Batch, error: BaseException | None) -> Iterator[None]:
        """No row of the batch runs any more."""
        batch = run.record
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
                told = f"{batch['input_file_id']}: was changed while it was read ({missing} rows are missing)"
                raise FlexgenError(told)
            self._results(batch, "cancelled" if is_cancelled else "completed", run.counts)
        except BaseException as found:
            if is_scarce(found) and found is not error:
                self._clerk.add(partial(self._end, run, error))
                return
            with contextlib.suppress(FlexgenError):
                run.close(f"failed: {found}")
            if is_scarce(found):  # no descriptor was left: what it lacks is done in another turn
                self._ready.appendleft(batch)
            else:
                yield from self._failed(batch, found, run.counts)
        self.running.pop(batch["id"], None)
        self._fill()

    def _results(self, batch: dict[str, Any], status: str, counts: dict[str, int]) -> None:
        found = self.store.keep_results(batch)
        self.store.save(batch, status=status, request_counts=counts, **found, **{f"{status}_at": int(time.time())})
        self.store.remove_job(batch)

    def _failed(
        self, batch: dict[str, Any], error: BaseException, counts: dict[str, int] | None = None
    ) -> Iterator[None]:
        """`_fail`, but for an end that somebody asked for."""
        if interrupts.asks_to_end(error):
            raise error
        yield from self._fail(batch, error, counts)

    def _fail(
        self, batch: dict[str, Any], error: BaseException, counts: dict[str, int] | None = None
    ) -> Iterator[None]:
        """What is done becomes the batch's files, now or at a start with room for them; nothing goes on with it."""
        message = getattr(error, "strerror", None) or self.store.for_clients(str(error))
        if not isinstance(error, FlexgenError | Refused | OSError):  # our own bug
            say_fault(batch["id"], error)
            message = "internal error"
        code = getattr(error, "code", None) or "failed"
        one = {"code": code, "message": message.replace("\n", " ")[:2000], "line": None, "param": None}
        if counts is None:
            counts = yield from self._count(batch)
        found: dict[str, Any] = {}
        with contextlib.suppress(Exception):
            found = self.store.keep_results(batch)
        batch |= {**found, "request_counts": counts, "errors": {"object": "list", "data": [one]}}
        batch |= {"status": "failed", "failed_at": int(time.time())}
        with contextlib.suppress(FlexgenError, OSError):  # the next start goes on with it
            self.store.save(batch)
            if found:
                self.store.remove_job(batch)


def _count_rows(path: Path) -> Steps[int]:
    count = 0
    for count, _ in enumerate(rows_of(path), start=1):
        if count % STEP_LINES == 0:
            yield
    return count


def _died(deaths: int) -> BatchError:
    told = f"the server died {deaths} times while it had this batch in hand, and no row of it was done in between"
    return BatchError("server_died", f"{told}; it is not tried again")
