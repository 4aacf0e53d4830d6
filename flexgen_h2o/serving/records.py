"""Read the records of a state folder: one JSON file per file and per batch.

A record may come from another version, a full disk or a person. One that is not as this version
writes it is named on stderr. It stays on disk as it is, and no list has it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flexgen_h2o.core import files
from flexgen_h2o.core.units import shortened
from flexgen_h2o.jobs.requests import URLS
from flexgen_h2o.serving.answers import say_line

FILE_ID = re.compile(r"file-[0-9a-f]{24}(-output|-errors)?")
BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")
ACTIVE = ("validating", "in_progress", "finalizing", "cancelling")
OVER = ("completed", "failed", "cancelled", "expired")
PURPOSES = ("batch", "batch_output")
MOMENTS = (
    "in_progress_at",
    "expires_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)
MAX_METADATA = 16
MAX_METADATA_CHARACTERS = 512
MAX_RECORD_BYTES = 2**20
MAX_NUMBER = 2**53  # that a reader of JSON may take for a double
MAX_SAID = 20  # records that are named one by one
COUNTS = ("total", "completed", "failed")

Fields = Mapping[str, Callable[[Any], bool]]  # the test of each field's value


def is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_NUMBER


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _or_null(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or test(value)


def _is_id(pattern: re.Pattern[str]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


def _are_counts(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == set(COUNTS)
        and all(is_count(one) for one in value.values())
    )


def is_metadata(value: Any) -> bool:
    """Return whether a value is an object of as many and as long texts as a batch may have."""
    return (
        isinstance(value, dict)
        and len(value) <= MAX_METADATA
        and all(
            isinstance(v, str) and len(k + v) <= MAX_METADATA_CHARACTERS for k, v in value.items()
        )
    )


def _are_errors(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"object", "data"}:
        return False
    return isinstance(value["data"], list) and all(
        isinstance(one, dict)
        and one.keys() == {"code", "message", "line", "param"}
        and all(member is None or isinstance(member, str | int) for member in one.values())
        for one in value["data"]
    )


FILE_FIELDS: Fields = {
    "id": _is_id(FILE_ID),
    "object": lambda value: value == "file",
    "bytes": is_count,
    "created_at": is_count,
    "filename": _is_text,
    "purpose": lambda value: value in PURPOSES,
    "status": _is_text,
    "expires_at": _or_null(is_count),
    "status_details": _or_null(_is_text),
}
BATCH_FIELDS: Fields = {
    "id": _is_id(BATCH_ID),
    "object": lambda value: value == "batch",
    "endpoint": lambda value: value in tuple(URLS),  # it may be a list, which has no hash
    "errors": _or_null(_are_errors),
    "input_file_id": _is_id(FILE_ID),
    "completion_window": _is_text,
    "status": lambda value: value in (*ACTIVE, *OVER),
    "output_file_id": _or_null(_is_id(FILE_ID)),
    "error_file_id": _or_null(_is_id(FILE_ID)),
    "created_at": is_count,
    **dict.fromkeys(MOMENTS, _or_null(is_count)),
    "request_counts": _are_counts,
    "metadata": _or_null(is_metadata),
}


class OddRecord(Exception):
    """A record that is not as this version writes it. Its text says why."""


def read_records(
    folder: Path, fields: Fields, check: Callable[[Path], None] = lambda path: None
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Return the records of a folder by id, oldest first, and by id why others are odd.

    check: gets the path of a record, and raises OddRecord if what belongs to it is not there.

    Name odd records on stderr. Raise OSError if the folder cannot be listed.
    """
    found = {}
    odd = {}
    for path in sorted(folder.glob("*.json")):
        if not fields["id"](path.stem):
            continue  # a job's file, or another program's
        try:
            found[path.stem] = _record(path, fields)
            check(path)
        except OddRecord as reason:
            found.pop(path.stem, None)
            odd[path.stem] = str(reason)
            if len(odd) <= MAX_SAID:
                say_line(f"{path}: {reason}; it is left as it is, and not listed")
    if len(odd) > MAX_SAID:
        say_line(f"{folder}: {len(odd) - MAX_SAID} more records are odd, and not listed")
    return dict(sorted(found.items(), key=lambda one: (one[1]["created_at"], one[0]))), odd


def _record(path: Path, fields: Fields) -> dict[str, Any]:
    """Return the known fields of a record. Raise OddRecord."""
    try:
        record = files.read_json(path, MAX_RECORD_BYTES)
    except OSError as error:
        raise OddRecord(error.strerror or str(error)) from error
    except (ValueError, RecursionError) as error:
        raise OddRecord(f"not JSON ({error})") from error
    if not isinstance(record, dict):
        raise OddRecord("not a JSON object")
    for name, is_sound in fields.items():
        if name not in record:
            raise OddRecord(f"{name} is missing")
        if not is_sound(record[name]):
            value = record[name]
            is_nested = isinstance(value, dict | list)
            shown = f"an odd {type(value).__name__}" if is_nested else shortened(repr(value), 60)
            raise OddRecord(f"{name} is {shown}")
    if record["id"] != path.stem:
        raise OddRecord(f"id is {record['id']}")
    return {name: record[name] for name in fields}


def check_content(path: Path) -> None:
    """Raise OddRecord if the content of a file's record is not a file."""
    try:
        is_file = stat.S_ISREG(os.stat(path.with_suffix("")).st_mode)
    except OSError as error:
        raise OddRecord(f"its content: {error.strerror}") from error
    if not is_file:
        raise OddRecord("its content is no regular file")
