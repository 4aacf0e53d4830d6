"""Files and batches on disk, as OpenAI names them: a batch is a durable job (jobs/) whose rows the running block takes.

    STATE/files/ID         a file's content        STATE/files/ID.json    what is said of it
    STATE/batches/ID.json  a batch as its object   STATE/batches/ID.jsonl  the job's output, with its files beside it

A batch is in its file before its rows run, and its output is a job's: after a kill the next start goes on with it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from flexgen_h2o.cli_common import say
from flexgen_h2o.core import files
from flexgen_h2o.core.errors import FlexgenError, UsageError
from flexgen_h2o.core.interrupts import Interrupted
from flexgen_h2o.engine.prompts import Completion
from flexgen_h2o.engine.sampling import TokenLogprobs
from flexgen_h2o.jobs.input import Cut, read_cut, read_lines
from flexgen_h2o.jobs.job import settle, writing
from flexgen_h2o.jobs.output import OutputFile, count_rows, rows_of
from flexgen_h2o.jobs.requests import URLS, Request, RequestReader, RowError
from flexgen_h2o.jobs.runner import JobRows, JobWriter
from flexgen_h2o.serving.answers import Refused
from flexgen_h2o.serving.block import Service

FILE_ID = re.compile(r"file-[0-9a-f]{24}(-output|-errors)?")
BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")
ACTIVE = ("validating", "in_progress", "finalizing", "cancelling")
WINDOW = "24h"
MOST_METADATA, MOST_METADATA_CHARACTERS = 16, 512
MOST_NAME_CHARACTERS = 255
MOST_RECORDS = 100_000  # files, and batches
PIECE = 2**20
MOMENTS = (
    "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at", "cancelling_at",
    "cancelled_at",
)  # fmt: skip


class Store:
    """Files and batches of a folder, which one server at a time has. UsageError naming --state-dir otherwise.

    most_bytes: of all files that clients have sent.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._files, self._batches, self._most_bytes = folder / "files", folder / "batches", most_bytes
        self._lock = threading.Lock()
        try:
            for path in (folder, self._files, self._batches):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            is_ours = files.try_lock(self._fd)
        except OSError as error:
            raise UsageError(f"--state-dir {folder}: {error.strerror or error}") from error
        if not is_ours:
            os.close(self._fd)
            raise UsageError(f"--state-dir {folder}: another server uses it; give another folder")
        self.files = self._read(self._files, FILE_ID)
        self.batches = self._read(self._batches, BATCH_ID)

    def close(self) -> None:
        os.close(self._fd)

    @staticmethod
    def _read(folder: Path, name: re.Pattern[str]) -> dict[str, dict[str, Any]]:
        """The records of a folder, the oldest first; what a kill has left of a file without a record goes away."""
        found = {}
        for path in folder.glob("*.json"):
            if name.fullmatch(path.stem):
                with contextlib.suppress(OSError, ValueError):
                    record = files.read_object(path, "--state-dir")
                    if record.get("id") == path.stem and isinstance(record.get("created_at"), int):
                        found[path.stem] = record
        for path in list(folder.iterdir()):
            if path.suffix == ".part" or (name.fullmatch(path.name) and not Path(f"{path}.json").exists()):
                with contextlib.suppress(OSError):  # a folder of that name is none of ours
                    path.unlink()
        return dict(sorted(found.items(), key=lambda one: (one[1]["created_at"], one[0])))

    # Files

    def path(self, file_id: str) -> Path:
        """Of a file's content. Refused where there is no such file."""
        self.file(file_id)
        return self._files / file_id

    def file(self, file_id: str) -> dict[str, Any]:
        found = self.files.get(file_id)
        if found is None:
            raise Refused(404, f"no file {file_id[:60]!r}", "not_found")
        return found

    def add_file(self, source: BinaryIO, name: str) -> dict[str, Any]:
        """Keep a file that a client has sent."""
        file_id = f"file-{secrets.token_hex(12)}"
        sent = sum(one["bytes"] for one in list(self.files.values()) if one["purpose"] == "batch")
        part = self._files / f"{file_id}.part"
        try:
            with part.open("xb") as file:
                while piece := source.read(PIECE):
                    sent += len(piece)
                    if sent > self._most_bytes or len(self.files) >= MOST_RECORDS:
                        raise Refused(400, "file: there is no room for it; delete others first", "storage_full")
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            return self._keep(part, file_id, name[:MOST_NAME_CHARACTERS], "batch")
        except OSError as error:
            raise Refused(500, f"file: {error.strerror or error}", "storage_failed") from error
        finally:
            part.unlink(missing_ok=True)

    def _keep(self, part: Path, file_id: str, name: str, purpose: str) -> dict[str, Any]:
        record = {
            "id": file_id, "object": "file", "bytes": part.stat().st_size, "created_at": int(time.time()),
            "filename": name, "purpose": purpose, "status": "processed", "expires_at": None, "status_details": None,
        }  # fmt: skip
        os.replace(part, self._files / file_id)
        try:
            files.write_whole(self._files / f"{file_id}.json", json.dumps(record) + "\n", follow=False)
        except OSError:
            (self._files / file_id).unlink()  # nobody could ask for it, or delete it
            raise
        self.files[file_id] = record
        return record

    def delete_file(self, file_id: str) -> None:
        self.file(file_id)
        with self._lock:
            users = [b["id"] for b in self.batches.values() if b["input_file_id"] == file_id and b["status"] in ACTIVE]
            if users:
                raise Refused(400, f"{file_id}: {users[0]} reads it; cancel the batch first", "in_use")
            self.files.pop(file_id, None)
        for name in (f"{file_id}.json", file_id):
            (self._files / name).unlink(missing_ok=True)

    # Batches

    def batch(self, batch_id: str) -> dict[str, Any]:
        found = self.batches.get(batch_id)
        if found is None:
            raise Refused(404, f"no batch {batch_id[:60]!r}", "not_found")
        return found

    def output(self, batch: dict[str, Any]) -> Path:
        """The job's output."""
        return self._batches / f"{batch['id']}.jsonl"

    def add_batch(self, body: dict[str, Any]) -> dict[str, Any]:
        """Refused where a field is wrong."""
        for name in body:
            if name not in ("input_file_id", "endpoint", "completion_window", "metadata"):
                raise Refused(400, f"{name[:60]}: is not supported", "unsupported")
        file_id, endpoint, metadata = body.get("input_file_id"), body.get("endpoint"), body.get("metadata")
        if not isinstance(file_id, str) or file_id not in self.files:
            raise Refused(400, f"input_file_id: no file {str(file_id)[:60]!r}", "not_found")
        if self.files[file_id]["purpose"] != "batch":
            raise Refused(400, f"input_file_id: {file_id} is a result; send a file", "invalid_request")
        if not isinstance(endpoint, str) or endpoint not in URLS:
            raise Refused(400, f"endpoint: {endpoint!r:.60} is none of {', '.join(URLS)}", "unknown_url")
        if body.get("completion_window") != WINDOW:
            raise Refused(400, f"completion_window: only {WINDOW} is known, and no batch expires", "invalid_request")
        _check_metadata(metadata)
        batch = {
            "id": f"batch_{secrets.token_hex(12)}", "object": "batch", "endpoint": endpoint, "errors": None,
            "input_file_id": file_id, "completion_window": WINDOW, "status": "validating", "output_file_id": None,
            "error_file_id": None, "created_at": int(time.time()), **dict.fromkeys(MOMENTS),
            "request_counts": {"total": 0, "completed": 0, "failed": 0}, "metadata": metadata,
        }  # fmt: skip
        with self._lock:
            if file_id not in self.files:
                raise Refused(400, f"input_file_id: no file {file_id!r}", "not_found")
            if len(self.batches) >= MOST_RECORDS:
                raise Refused(400, "too many batches are kept", "storage_full")
            self.save(batch)
        return batch

    def save(self, batch: dict[str, Any], **changes: Any) -> None:
        """FlexgenError where it cannot be written: then nothing has changed."""
        try:
            text = json.dumps(batch | changes) + "\n"
            files.write_whole(self._batches / f"{batch['id']}.json", text, follow=False)
        except OSError as error:
            raise FlexgenError(f"{batch['id']}: {error.strerror or error}") from error
        batch |= changes
        self.batches[batch["id"]] = batch

    def split(self, batch: dict[str, Any]) -> dict[str, str | None]:
        """Answers and error rows of a job's output as files of their own; their ids by field, None for an empty one.

        The same again after a kill.
        """
        found: dict[str, str | None] = {}
        output, plain = self.output(batch), f"file-{batch['id'].removeprefix('batch_')}"
        for is_error, field in ((False, "output_file_id"), (True, "error_file_id")):
            file_id = f"{plain}-{'errors' if is_error else 'output'}"
            part, count = self._files / f"{file_id}.part", 0
            try:
                with part.open("wb") as target:
                    for line, row in rows_of(output):
                        if (row["error"] is not None) == is_error:
                            target.write(line)
                            count += 1
                    target.flush()
                    os.fsync(target.fileno())
                if count:
                    name = f"{batch['id']}_{'error' if is_error else 'output'}.jsonl"
                    self._keep(part, file_id, name, "batch_output")
            finally:
                part.unlink(missing_ok=True)
            found[field] = file_id if count else None
        return found

    def remove_job(self, batch: dict[str, Any]) -> None:
        """The job's own files, when the batch has its results."""
        output = self.output(batch)
        for path in output.parent.glob(f"{output.name}*"):
            path.unlink(missing_ok=True)

    def for_clients(self, message: str) -> str:
        """With ids in the place of paths and their flags, which clients do not know."""
        path = rf"(?:--\w+ )?{re.escape(str(self._files.parent))}/(?:files|batches)/([\w-]+)(?:\.jsonl)?"
        return re.sub(path, r"\1", message).replace("another --output", "another batch")


def _check_metadata(metadata: Any) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or len(metadata) > MOST_METADATA:
        raise Refused(400, f"metadata: an object with at most {MOST_METADATA} members is expected", "invalid_request")
    if not all(isinstance(v, str) and len(k + v) <= MOST_METADATA_CHARACTERS for k, v in metadata.items()):
        raise Refused(
            400, f"metadata: texts of at most {MOST_METADATA_CHARACTERS} characters are expected", "invalid_request"
        )


class Batch:
    """A batch whose rows run: an `Owner` of the running block (block.py). on_end: called when no row runs any more."""

    def __init__(self, record: dict[str, Any], on_end: Callable[[Batch, FlexgenError | None], None]) -> None:
        self.record, self._on_end = record, on_end
        self.is_gone = False  # cancelled, or failed
        self.asks_again = False
        self._error: FlexgenError | None = None
        self.stack = contextlib.ExitStack()
        self.writer: JobWriter

    def open(
        self, source: Path, target: Path, reader: RequestReader, settings: dict[str, Any], service: Service
    ) -> None:
        """Find what is left to do. FlexgenError as `batch` has it."""
        args = argparse.Namespace(input=source, output=target, force=None, max_errors=None)
        with contextlib.ExitStack() as stack:
            output = stack.enter_context(contextlib.closing(OutputFile(target)))
            before = settle(args, output, settings)
            self.writer = JobWriter(output, before, lambda: service.llm.peak_bytes, shown=False)
            stack.enter_context(writing(args, output, self.writer))
            self._rows = JobRows(reader, read_cut(source, Cut(0, 1, 0, ~before.done)), self.writer)
            self.stack = stack.pop_all()

    @property
    def counts(self) -> dict[str, int]:
        status = self.writer.status
        return {"total": status.rows, "completed": status.done - status.errors, "failed": status.errors}

    def next(self) -> Request | None:
        self.asks_again = False
        with self._failing():
            for request in self._rows.requests:
                self.asks_again = request is None
                return request
        return None

    def token(self, place: int, token: int, logprobs: TokenLogprobs | None) -> None:
        """Nobody looks at tokens before the row is done; what is written is put on disk in time."""
        with self._failing():
            self.writer.sweep(0)

    def finish(self, request: Request, done: Completion) -> None:
        with self._failing():
            self.writer.status.tokens += len(done.token_ids)
            self._rows.finish([(request, done)])

    def fail(self, request: Request, error: RowError) -> None:
        with self._failing():
            self._rows.fail(request, error)

    def end(self, error: FlexgenError | None = None) -> None:
        self._on_end(self, error or self._error)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """What ends this batch, a full disk for one, does not end the others."""
        try:
            yield
        except FlexgenError as error:
            self._error, self.is_gone = self._error or error, True


class Batches:
    """Runs the batches of a store in a service. settings: as of jobs/job.settings_of."""

    def __init__(self, store: Store, service: Service, reader: RequestReader, settings: dict[str, Any]) -> None:
        self.store, self._service, self._reader, self._settings = store, service, reader, settings
        self.running: dict[str, Batch] = {}
        self._clerk = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._lock = threading.Lock()

    def go_on(self) -> None:
        """With batches that an earlier server has left."""
        for batch in self.store.batches.values():
            if batch["status"] in ACTIVE:
                self._submit(batch)
            else:
                self._clerk.submit(self._clear, batch)

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        batch = self.store.add_batch(body)
        self._submit(batch)
        return batch

    def _submit(self, batch: dict[str, Any]) -> None:
        self._clerk.submit(self._start, batch)

    def cancel(self, batch_id: str) -> dict[str, Any]:
        """Rows that run are given up, rows that are done are kept."""
        batch = self.store.batch(batch_id)
        with self._lock:
            if batch["status"] not in ("validating", "in_progress"):
                raise Refused(400, f"{batch_id}: is {batch['status']}", "not_running")
            self.store.save(batch, status="cancelling", cancelling_at=int(time.time()))
            running = self.running.get(batch_id)
            if running is not None:
                running.is_gone = True
        self._service.wake()
        return batch

    def shown(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The batch, with counts of this moment."""
        running = self.running.get(batch["id"])
        return batch if running is None else batch | {"request_counts": running.counts}

    def close(self, signal: BaseException) -> None:
        """End what runs, as a signal ends a job; the next start goes on."""
        self._clerk.shutdown(wait=True, cancel_futures=True)
        for batch in self.running.values():
            with contextlib.suppress(FlexgenError, Interrupted):
                batch.stack.__exit__(type(signal), signal, None)

    # The clerk's thread

    def _clear(self, batch: dict[str, Any]) -> None:
        """Remove the job of a batch that is over. Rows of a failed one may be in no file yet: the disk was full."""
        with contextlib.suppress(OSError, FlexgenError):  # it still is, and the next start tries again
            has_files = batch["output_file_id"] or batch["error_file_id"]
            if batch["status"] == "failed" and not has_files and self.store.output(batch).exists():
                self.store.save(batch, **self.store.split(batch))
            self.store.remove_job(batch)

    def _start(self, batch: dict[str, Any]) -> None:
        run = Batch(batch, self._clerk_end)
        try:
            if batch["status"] == "cancelling":
                self._results(batch, "cancelled", self._counts(batch))
                return
            source = self.store.path(batch["input_file_id"])
            run.open(source, self.store.output(batch), self._reader, self._settings, self._service)
            with self._lock:
                if batch["status"] == "validating":
                    self.store.save(batch, status="in_progress", in_progress_at=int(time.time()))
                run.is_gone = batch["status"] == "cancelling"
                self.running[batch["id"]] = run
        except Exception as error:
            with contextlib.suppress(Exception):
                run.stack.__exit__(type(error), error, None)
            self._fail(batch, error)
            return
        self._service.add_batch(run)

    def _counts(self, batch: dict[str, Any]) -> dict[str, int]:
        """Of a batch that does not run, as far as its job's output and its input can be read."""
        counts: dict[str, int] = batch["request_counts"]
        with contextlib.suppress(FlexgenError, Refused):
            rows, errors = count_rows(self.store.output(batch))
            counts = {"total": max(rows, counts["total"]), "completed": rows - errors, "failed": errors}
            counts["total"] = sum(1 for _ in read_lines(self.store.path(batch["input_file_id"])))
        return counts

    def _clerk_end(self, run: Batch, error: FlexgenError | None) -> None:
        """Called by the engine's thread; a clerk that is shut down has left the rest to the next start."""
        with contextlib.suppress(RuntimeError):
            self._clerk.submit(self._end, run, error)

    def _end(self, run: Batch, error: FlexgenError | None) -> None:
        batch = run.record
        try:
            with self._lock:
                is_cancelled = batch["status"] == "cancelling"
                if not is_cancelled and error is None:
                    try:
                        self.store.save(batch, status="finalizing", finalizing_at=int(time.time()))
                    except FlexgenError as found:
                        error = found
            reason = error or (FlexgenError("cancelled") if is_cancelled else None)
            if reason is None:
                run.stack.close()
            else:
                with contextlib.suppress(FlexgenError):
                    run.stack.__exit__(type(reason), reason, None)
            if error is not None and not is_cancelled:
                raise error
            self._results(batch, "cancelled" if is_cancelled else "completed", run.counts)
        except Exception as found:
            self._fail(batch, found, run.counts)
        finally:
            self.running.pop(batch["id"], None)

    def _results(self, batch: dict[str, Any], status: str, counts: dict[str, int]) -> None:
        found = self.store.split(batch)
        self.store.save(batch, status=status, request_counts=counts, **found, **{f"{status}_at": int(time.time())})
        self.store.remove_job(batch)

    def _fail(self, batch: dict[str, Any], error: Exception, counts: dict[str, int] | None = None) -> None:
        """What is done becomes the batch's files, now or at a start with room for them; nothing goes on with it."""
        message = getattr(error, "strerror", None) or self.store.for_clients(str(error))
        if not isinstance(error, FlexgenError | Refused | OSError):  # our own bug
            say("serve", f"{batch['id']}: internal error: {type(error).__name__}: {error}")
            message = "internal error"
        one = {"code": "failed", "message": message.replace("\n", " ")[:2000], "line": None, "param": None}
        errors = {"object": "list", "data": [one]}
        with contextlib.suppress(Exception):
            batch |= self.store.split(batch)
        batch |= {"request_counts": counts or self._counts(batch), "errors": errors}
        batch |= {"status": "failed", "failed_at": int(time.time())}
        with contextlib.suppress(FlexgenError):  # the next start goes on with it
            self.store.save(batch)
