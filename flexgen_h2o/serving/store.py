"""Keep files and batches on disk, with OpenAI's names.

    STATE/files/ID            a file's content
    STATE/files/ID.json       its record
    STATE/batches/ID.json     a batch's record
    STATE/batches/ID.jsonl    answers of its job, with the job's files beside them
    STATE/batches/ID.errors.jsonl   error rows of its job
    STATE/held.json           open batches, and those with which the server died (`Held`)

When a batch ends, its answers and its error rows become files without a copy: they get a second
name.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
import shutil
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

from flexgen_h2o.core import files
from flexgen_h2o.core.errors import FlexgenError, UsageError
from flexgen_h2o.jobs.requests import URLS
from flexgen_h2o.jobs.sidecar import sidecar_path, status_path
from flexgen_h2o.serving.answers import RequestRefused
from flexgen_h2o.serving.held import Held
from flexgen_h2o.serving.records import (
    ACTIVE,
    BATCH_FIELDS,
    BATCH_ID,
    FILE_FIELDS,
    FILE_ID,
    MAX_METADATA,
    MAX_METADATA_CHARACTERS,
    MOMENTS,
    check_content,
    is_metadata,
    read_records,
)

DIED = "server_died"  # error code of a batch that was given up
WINDOW = "24h"
MAX_NAME_CHARACTERS = 255
MAX_RECORDS = 100_000  # most files, and most batches
PIECE = 2**20
EXPIRY_WAIT_S = 60  # seconds until an expired file that is in use is checked again
# Errors of os.link if the file system, or its rules, have no second names.
NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


class Store:
    """Files and batches of a folder, which one server at a time may use.

    most_bytes: limit for all files that clients have sent, and for error rows, which cost a client
    next to nothing.

    Raise UsageError naming --state-dir if another server uses the folder or it cannot be used.
    """

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self._files = folder / "files"
        self._batches = folder / "batches"
        self._most_bytes = most_bytes
        self._lock = threading.Lock()  # held while a record is written
        self._counting = threading.Lock()  # protects the counts, held for moments
        self._last_id = 0
        try:
            for path in (folder, self._files, self._batches):
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(
                folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
            )
            is_internal = files.try_lock(self._fd)
        except OSError as error:
            raise UsageError(f"--state-dir {folder}: {error.strerror or error}") from error
        if not is_internal:
            os.close(self._fd)
            raise UsageError(f"--state-dir {folder}: another server uses it; give another folder")
        try:
            self.files, odd_files = read_records(self._files, FILE_FIELDS, check_content)
            self.batches, odd_batches = read_records(self._batches, BATCH_FIELDS)
            self._remove_left()
            self._job_errors = {
                name: _size(self.errors(self.batches[name]))
                for name in self.with_jobs()
                if self.batches[name]["error_file_id"] is None  # else it is counted as a file
            }
        except OSError as error:
            os.close(self._fd)
            raise UsageError(f"--state-dir {folder}: {error.strerror or error}") from error
        self._odd = odd_files | odd_batches  # why records are not listed, by id
        self._stored = sum(one["bytes"] for one in self.files.values() if _is_counted(one))
        self._stored += sum(self._job_errors.values())
        self._next_expiry = min(
            (one.get("expires_at") or math.inf for one in self.files.values()), default=math.inf
        )
        self.held = Held(folder / "held.json")

    def close(self) -> None:
        files.close_locked(self._fd)

    def _remove_left(self) -> None:
        """Remove files without a record that a kill has left."""
        for folder, name in ((self._files, FILE_ID), (self._batches, BATCH_ID)):
            for path in list(folder.iterdir()):
                if path.suffix == ".part" or (
                    name.fullmatch(path.name) and not os.path.lexists(f"{path}.json")
                ):
                    # A folder of that name does not belong to the store.
                    with contextlib.suppress(OSError):
                        path.unlink()

    def _new_id(self) -> str:
        """Return 24 hex digits that sort in the order of creation.

        The time in a record has only seconds.
        """
        with self._counting:
            self._last_id = max(self._last_id + 1, time.time_ns() // 1000)
            return f"{self._last_id:014x}{secrets.token_hex(5)}"

    def _charge(self, nbytes: int) -> bool:
        """Count bytes as stored if there is room for them. Return whether there is."""
        with self._counting:
            if self._stored + nbytes > self._most_bytes:
                return False
            self._stored += nbytes
            return True

    def _give_back(self, nbytes: int) -> None:
        with self._counting:
            self._stored -= nbytes

    # Files

    def path(self, file_id: str) -> Path:
        """Return the path of a file's content. Raise RequestRefused if there is no such file."""
        self.file(file_id)
        path = self._files / file_id
        if not path.is_file():
            raise RequestRefused(f"{file_id}: its content is gone", "not_found", 404)
        return path

    def file(self, file_id: str) -> dict[str, Any]:
        found = self.files.get(file_id)
        if found is None:
            raise self._missing("file", file_id)
        return found

    def _missing(self, kind: str, name: str) -> RequestRefused:
        if name in self._odd:
            told = f"the record of {name} cannot be used: {self._odd[name]}"
        else:
            told = f"no {kind} {name[:60]!r}"
        return RequestRefused(told, "not_found", 404)

    def add_file(
        self, source: BinaryIO, name: str, expires_in: int | None = None
    ) -> dict[str, Any]:
        """Keep a file that a client has sent.

        expires_in: seconds. None: the file is kept until it is deleted.
        """
        file_id = f"file-{self._new_id()}"
        part = self._files / f"{file_id}.part"
        charged = 0
        is_kept = False
        try:
            with part.open("xb") as file:
                while piece := source.read(PIECE):
                    if len(self.files) >= MAX_RECORDS or not self._charge(len(piece)):
                        raise RequestRefused(
                            "file: there is no room for it; delete others first", "storage_full"
                        )
                    charged += len(piece)
                    file.write(piece)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, self._files / file_id)
            record = self._keep(file_id, name[:MAX_NAME_CHARACTERS], "batch", expires_in)
            is_kept = True
            return record
        except OSError as error:
            raise RequestRefused(
                f"file: {error.strerror or error}", "storage_failed", 500
            ) from error
        finally:
            part.unlink(missing_ok=True)
            if not is_kept:
                self._give_back(charged)

    def _keep(
        self, file_id: str, name: str, purpose: str, expires_in: int | None = None
    ) -> dict[str, Any]:
        """Write and return the record of a file whose content is in place."""
        path = self._files / file_id
        now = int(time.time())
        record = {
            "id": file_id,
            "object": "file",
            "bytes": path.stat().st_size,
            "created_at": now,
            "filename": name,
            "purpose": purpose,
            "status": "processed",
            "expires_at": None if expires_in is None else now + expires_in,
            "status_details": None,
        }
        if expires_in is not None:
            self._next_expiry = min(self._next_expiry, now + expires_in)
        try:
            files.write_whole(
                self._files / f"{file_id}.json", json.dumps(record) + "\n", follow=False
            )
        except OSError:
            path.unlink()  # nobody could read or delete it
            raise
        self.files[file_id] = record
        return record

    def delete_file(self, file_id: str) -> None:
        record = self.file(file_id)
        with self._lock:
            users = [
                b["id"]
                for b in self.batches.values()
                if b["input_file_id"] == file_id and b["status"] in ACTIVE
            ]
            if users:
                raise RequestRefused(
                    f"{file_id}: {users[0]} reads it; cancel the batch first", "in_use"
                )
            is_here = self.files.pop(file_id, None) is not None
        if is_here and _is_counted(record):
            self._give_back(record["bytes"])
        for name in (f"{file_id}.json", file_id):
            (self._files / name).unlink(missing_ok=True)
        # The job of a batch that was given up still has a name of the file. These rows are done
        # again if the batch is resumed.
        for batch in list(self.batches.values()):
            if is_given_up(batch):
                if batch["output_file_id"] == file_id:
                    self.output(batch).unlink(missing_ok=True)
                if batch["error_file_id"] == file_id:
                    self.errors(batch).unlink(missing_ok=True)

    def expire(self, now: float) -> None:
        """Delete the files that have expired. Files that a batch reads are checked again later."""
        if now < self._next_expiry:
            return
        self._next_expiry = math.inf
        for record in list(self.files.values()):
            ends = record.get("expires_at") or math.inf
            if ends <= now:
                try:
                    self.delete_file(record["id"])
                    continue
                except RequestRefused:
                    ends = now + EXPIRY_WAIT_S
            self._next_expiry = min(self._next_expiry, ends)

    # Batches

    def batch(self, batch_id: str) -> dict[str, Any]:
        found = self.batches.get(batch_id)
        if found is None:
            raise self._missing("batch", batch_id)
        return found

    def output(self, batch: dict[str, Any]) -> Path:
        """Return the path of the job's output, which has its answers."""
        return self._batches / f"{batch['id']}.jsonl"

    def errors(self, batch: dict[str, Any]) -> Path:
        """Return the path of the job's error rows."""
        return self._batches / f"{batch['id']}.errors.jsonl"

    def add_batch(self, body: dict[str, Any]) -> dict[str, Any]:
        """Add a batch. Raise RequestRefused if a field is wrong."""
        for name in body:
            if name not in ("input_file_id", "endpoint", "completion_window", "metadata"):
                raise RequestRefused(f"{name[:60]}: is not supported", "unsupported")
        file_id = body.get("input_file_id")
        endpoint = body.get("endpoint")
        metadata = body.get("metadata")
        if not isinstance(file_id, str) or file_id not in self.files:
            raise RequestRefused(f"input_file_id: no file {str(file_id)[:60]!r}", "not_found")
        if self.files[file_id]["purpose"] != "batch":
            raise RequestRefused(f"input_file_id: {file_id} is a result; send a file")
        if not isinstance(endpoint, str) or endpoint not in URLS:
            raise RequestRefused(
                f"endpoint: {endpoint!r:.60} is none of {', '.join(URLS)}", "unknown_url"
            )
        if body.get("completion_window") != WINDOW:
            raise RequestRefused(f"completion_window: only {WINDOW} is known, and no batch expires")
        _check_metadata(metadata)
        batch = {
            "id": f"batch_{self._new_id()}",
            "object": "batch",
            "endpoint": endpoint,
            "errors": None,
            "input_file_id": file_id,
            "completion_window": WINDOW,
            "status": "validating",
            "output_file_id": None,
            "error_file_id": None,
            "created_at": int(time.time()),
            **dict.fromkeys(MOMENTS),
            "request_counts": {"total": 0, "completed": 0, "failed": 0},
            "metadata": metadata,
        }
        with self._lock:
            if file_id not in self.files:
                raise RequestRefused(f"input_file_id: no file {file_id!r}", "not_found")
            if len(self.batches) >= MAX_RECORDS:
                raise RequestRefused("too many batches are kept", "storage_full")
            if self._stored >= self._most_bytes:
                raise RequestRefused(
                    "there is no room for results; delete files first", "storage_full"
                )
            self.save(batch)
        return batch

    def save(self, batch: dict[str, Any], **changes: Any) -> None:
        """Write a batch's record with changes.

        If that fails, change nothing and raise FlexgenError.
        """
        try:
            text = json.dumps(batch | changes) + "\n"
            files.write_whole(self._batches / f"{batch['id']}.json", text, follow=False)
        except OSError as error:
            raise FlexgenError(f"{batch['id']}: {error.strerror or error}") from error
        batch |= changes
        self.batches[batch["id"]] = batch

    def for_clients(self, message: str) -> str:
        """Return a message with ids instead of paths and their flags, which clients do not know."""
        path = (
            r"(?:--\w+ "
            rf")?{re.escape(str(self._files.parent))}/(?:files|batches)/([\w-]+)(?:\.errors)?(?:\.jsonl)?"
        )
        return re.sub(path, r"\1", message).replace("another --output", "another batch")

    # Jobs of batches

    def with_jobs(self) -> list[str]:
        """Return the ids of the batches that have files of a job."""
        names = {
            path.name.partition(".")[0] for path in self._batches.iterdir() if not _is_record(path)
        }
        return [name for name in self.batches if name in names]

    def kept_counts(self, batch: dict[str, Any]) -> dict[str, int]:
        """Return the counts of a batch that is not open: the lines of its job's files.

        The job's status is up to a second older than these, and clients have seen the newer ones.
        """
        completed = _count_lines(self.output(batch))
        failed = _count_lines(self.errors(batch))
        total = max(batch["request_counts"]["total"], completed + failed)
        return {"total": total, "completed": completed, "failed": failed}

    def charge_errors(self, batch: dict[str, Any], nbytes: int) -> None:
        """Count error rows that are to be written. Raise FlexgenError if they have no room."""
        if not self._charge(nbytes):
            raise FlexgenError(
                f"{batch['id']}: there is no room for more error rows; delete files, and send it "
                "again"
            )
        self._job_errors[batch["id"]] = self._job_errors.get(batch["id"], 0) + nbytes

    def keep_results(self, batch: dict[str, Any]) -> dict[str, str | None]:
        """Keep a job's answers and error rows as files.

        Return their ids by field, or None for an empty file. After a kill the result is the same.
        """
        found: dict[str, str | None] = {}
        plain = f"file-{batch['id'].removeprefix('batch_')}"
        for kind, source, field in (
            ("output", self.output(batch), "output_file_id"),
            ("errors", self.errors(batch), "error_file_id"),
        ):
            file_id = f"{plain}-{kind}"
            found[field] = None
            if not _size(source):
                continue
            _give_name(source, self._files / file_id)
            # A record of a server that was killed after this point.
            before = self.files.get(file_id)
            self._keep(file_id, f"{batch['id']}_{kind.removesuffix('s')}.jsonl", "batch_output")
            if kind == "errors":
                self._job_errors.pop(batch["id"], None)  # its bytes are counted as the file's
                if before is not None:
                    self._give_back(before["bytes"])
            found[field] = file_id
        return found

    def remove_job(self, batch: dict[str, Any]) -> None:
        """Remove the job's own files, once the batch has its results."""
        output = self.output(batch)
        for path in (
            output,
            self.errors(batch),
            sidecar_path(output),
            status_path(output),
            output.with_suffix(".taken"),  # of an earlier version
        ):
            path.unlink(missing_ok=True)
        self.held.forget(batch["id"])
        self._give_back(self._job_errors.pop(batch["id"], 0))

    def take_back_results(self, batch: dict[str, Any]) -> None:
        """Turn the result files of a batch that was given up into files of its job alone again.

        Its record does not name them any more.
        """
        plain = f"file-{batch['id'].removeprefix('batch_')}"
        for file_id in (f"{plain}-output", f"{plain}-errors"):
            record = self.files.pop(file_id, None)
            if record is not None and _is_counted(record):
                self._job_errors[batch["id"]] = record["bytes"]
            for name in (f"{file_id}.json", file_id):
                (self._files / name).unlink(missing_ok=True)

    def sizes(self, *batches: dict[str, Any]) -> dict[str, int]:
        """Return the bytes of results that jobs of batches have, by id."""
        return {one["id"]: _size(self.output(one)) + _size(self.errors(one)) for one in batches}


def is_given_up(batch: dict[str, Any]) -> bool:
    """Return whether a batch failed because servers died with it. Its job is kept."""
    errors = batch["errors"] or {"data": []}
    return batch["status"] == "failed" and any(one["code"] == DIED for one in errors["data"])


def _is_counted(record: dict[str, Any]) -> bool:
    return bool(record["purpose"] == "batch") or str(record["id"]).endswith("-errors")


def _is_record(path: Path) -> bool:
    return path.suffix == ".json" and BATCH_ID.fullmatch(path.stem) is not None


def _size(path: Path) -> int:
    """Return the bytes of a file. A file that is not there or cannot be looked at has none."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _count_lines(path: Path) -> int:
    """Return the number of whole lines of a file. A file that cannot be read has none."""
    count = 0
    with contextlib.suppress(OSError), files.open_regular(path) as file:
        while piece := file.read(PIECE):
            count += piece.count(b"\n")
    return count


def _give_name(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it if second names do not exist."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        with files.replacing(target, follow=False) as copy, files.open_regular(source) as file:
            shutil.copyfileobj(file, copy.buffer, PIECE)


def _check_metadata(metadata: Any) -> None:
    if metadata is None:
        return
    if not is_metadata(metadata):
        raise RequestRefused(
            f"metadata: an object with at most {MAX_METADATA} members is expected, texts of at "
            f"most {MAX_METADATA_CHARACTERS} characters"
        )
