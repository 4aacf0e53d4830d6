"""Read the input file: its lines one by one, and one pass over it before the run.

The pass finds ids, duplicates and a digest. Only the digest of each line's id stays in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flexgen_h2o.core import files
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.foreign_files import HEAD_BYTES, kind_of
from flexgen_h2o.engine.prompts import STRICT_JSON, check_complete, without_bom

DIGEST_BYTES = 16
MAX_ID_CHARACTERS = 1024  # most characters of a custom_id
_HEAD_BYTES = 2**16  # bytes of a too long line in which its custom_id is searched
# The id of a too long line, searched in its first bytes.
_CUSTOM_ID = re.compile(rb'"custom_id"\s*:\s*("(?:[^"\\]|\\.)*")')
_CHUNK = 2**16  # rows that are looked up at a time
_PIECE_BYTES = 2**20  # bytes read at a time if only the digest is wanted
# Lines and bytes after which long work calls its `check` (some milliseconds), and what `read_part`
# reads ahead of a job.
STEP_LINES = 256
STEP_BYTES = 2**16
PART_BYTES = 2**26  # bytes of lines that an actor gets at a time
_LINES_A_ROW = 2  # lines per row in an input with limited rows: a blank line may follow each row

Digests = npt.NDArray[np.bytes_]
# Called every few milliseconds of long work; raises to end the work.
Check = Callable[[], None]


@dataclass(frozen=True)
class Line:
    """A line that is not blank, made by `_pieces`."""

    number: int  # counted from 1, with blank lines
    text: bytes | None  # bytes of the line; None if it is too long to be read
    head: bytes = b""  # first bytes of a line that is too long
    offset: int = 0  # offset of its first byte in the file
    row: int = 0  # counted from 0, without blank lines
    is_plain: bool = False  # line of a .txt file: it is a prompt as it is

    def parse(self) -> Any:
        """Return its JSON value, or `{"text": ...}` of a plain line.

        Raise ValueError that says what is wrong with it.
        """
        if self.text is None:
            raise ValueError(f"longer than {files.MAX_LINE_BYTES // 2**20} MiB")
        try:
            text = self.text.decode("utf-8")
            return {"text": text.rstrip("\r\n")} if self.is_plain else STRICT_JSON.decode(text)
        except UnicodeDecodeError as error:
            raise ValueError("not UTF-8 text") from error
        except RecursionError as error:
            raise ValueError("nested too deeply") from error

    def outcome(self) -> Any:
        """Return the line's JSON value, or what is wrong with it."""
        try:
            return self.parse()
        except ValueError as error:
            return error.args

    @cached_property
    def custom_id(self) -> str:
        """The id that the line gives, or else `line-NUMBER`."""
        value = None
        with contextlib.suppress(ValueError):
            if self.text is not None:
                value = self.parse()
            elif not self.is_plain and (found := _CUSTOM_ID.search(self.head)):
                value = {"custom_id": json.loads(found[1])}
        return self.id_in(value)

    def id_in(self, value: Any) -> str:
        """Return the `custom_id` of the line, whose parsed value is `value`."""
        given = value.get("custom_id") if isinstance(value, dict) else None
        if isinstance(given, str) and 0 < len(given) <= MAX_ID_CHARACTERS:
            return given
        return f"line-{self.number}"


@dataclass(frozen=True)
class InputScan:
    """Result of one pass over the input, made by `scan_input`."""

    ids: Digests  # (rows,) digests of custom ids, in order
    nbytes: int  # bytes of the input
    digest: str  # digest of all its bytes
    # Whether the last row's line has no newline: it may be half of a line that is being written.
    is_open: bool = False
    # Id of the row of a line that had no newline when an earlier run read it, and is another now.
    stale_id: str | None = None


@dataclass(frozen=True)
class InputPart:
    """A part of the input: where it begins, and which of its rows are still to be done."""

    left: npt.NDArray[np.bool_]  # (rows,) of the rows from `row` on: whether each is to be done
    offset: int = 0  # offset of its first byte
    number: int = 1  # number of its first line
    row: int = 0  # number of its first row


def scan_input(
    path: Path,
    most_rows: int | None = None,
    check: Check = lambda: None,
    nbytes_before: int = 0,
    see: Callable[[Line], object] = lambda line: None,
) -> InputScan:
    """Read the whole input once, with 16 bytes of memory per row.

    most_rows: most rows that the file may have; None is no limit.
    nbytes_before: bytes that the file had when an earlier run read it; 0 if none has.
    see: gets each line that is not blank.

    Raise UsageError if it has no row or too many, if two lines have the same id, or if the file is
    packed or UTF-16.
    """
    ids = bytearray()
    whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
    nbytes = 0
    lines = step_bytes = 0
    is_open = False
    stale_id = None
    for raw, line, is_end in _pieces(path):
        if not nbytes:
            _refuse_foreign(path, "--input", raw)
        whole.update(raw)
        nbytes += len(raw)
        if line is not None:
            see(line)
            ids += id_digest(line.custom_id)
            is_open = not raw.endswith(b"\n")
            if line.offset < nbytes_before < nbytes:
                stale_id = _stale_id(line, raw[: nbytes_before - line.offset])
        lines += is_end
        step_bytes += len(raw)
        if most_rows is not None:
            _check_rows(path, len(ids) // DIGEST_BYTES, lines, most_rows)
        if lines % STEP_LINES == 0 or step_bytes >= STEP_BYTES:
            step_bytes = 0
            check()
    if not ids:
        raise UsageError(f"--input {path}: no request in it, only blank lines or nothing")
    digests = np.frombuffer(ids, f"S{DIGEST_BYTES}")
    found = InputScan(digests, nbytes, whole.hexdigest(), is_open, stale_id)
    _refuse_duplicates(path, found.ids)
    return found


def _refuse_foreign(path: Path, flag: str, first: bytes) -> None:
    """Raise UsageError if the first line of a file shows that its lines are no UTF-8 text."""
    what = kind_of(path, first[:HEAD_BYTES])
    if what is None and b"\0" in first[:4]:  # UTF-16 and UTF-32 without a byte order mark
        what = "has NUL bytes, as UTF-16 text has; save it as UTF-8"
    if what is not None:
        raise UsageError(f"{flag} {path}: {what}")


def _stale_id(line: Line, begun: bytes) -> str | None:
    """Return the id that a line had when only `begun` of it was there.

    None: there was no row, or its answer is also that of the whole line.
    """
    if line.text is None:  # a beginning of this length was no JSON, and had no id of its own
        return f"line-{line.number}"
    before = Line(line.number, without_bom(begun), is_plain=line.is_plain)
    if not (before.text or b"").strip() or before.outcome() == line.outcome():
        return None
    return before.custom_id


def _check_rows(path: Path, rows: int, lines: int, most_rows: int) -> None:
    if rows > most_rows:
        raise UsageError(
            f"--input {path}: has more than {most_rows} requests; cut it into several files"
        )
    if lines > _LINES_A_ROW * most_rows:
        most = _LINES_A_ROW * most_rows
        raise UsageError(
            f"--input {path}: has more than {most} lines, blank ones included; leave blank lines "
            "out"
        )


def read_lines(path: Path, flag: str = "--input") -> Iterator[Line]:
    """Yield the lines of a file that are not blank.

    Raise UsageError naming the flag if the file cannot be read. Raise it also if the last line has
    no newline and a process is still writing the file.
    """
    for raw, line, _ in _pieces(path):
        if line is not None:
            if not line.offset:
                _refuse_foreign(path, flag, raw)
            if not raw.endswith(b"\n"):
                check_complete(path, f"{flag} {path}:{line.number}")
            yield line


def cut_input(
    path: Path, done: npt.NDArray[np.bool_], size: int, most_bytes: int = PART_BYTES
) -> Iterator[InputPart]:
    """Yield parts of the input, in one pass.

    Each but the last has `size` rows to be done, or lines of about `most_bytes`.
    """
    start = None
    count = 0
    for line in islice(_lines(path), len(done)):
        if done[line.row]:
            continue
        if start is not None and (count == size or line.offset - start.offset >= most_bytes):
            yield InputPart(~done[start.row : line.row], start.offset, start.number, start.row)
            start = None
        if start is None:
            start = line
            count = 0
        count += 1
    if start is not None:
        yield InputPart(~done[start.row :], start.offset, start.number, start.row)


def read_part(path: Path, cut: InputPart) -> Iterator[Line]:
    """Yield the lines of a part that are to be done.

    Hold no descriptor and only few lines between two lines.
    """
    offset = cut.offset
    number = cut.number
    row = cut.row
    last = cut.row + len(cut.left)
    is_over = False
    while not is_over:
        ahead: list[Line] = []
        is_over = True
        start = offset
        first = number
        with contextlib.closing(_pieces(path, offset, number, row)) as pieces:
            for raw, line, is_end in pieces:
                offset += len(raw)
                number += is_end
                if line is not None and row < last:
                    if cut.left[row - cut.row]:
                        ahead.append(line)
                    row += 1
                if is_end and (number - first == STEP_LINES or offset - start >= STEP_BYTES):
                    is_over = row >= last
                    break
        yield from ahead


def is_growing(path: Path, nbytes: int) -> bool:
    """Return whether the input has changed its size from `nbytes`, or a process is writing to it.

    A last line without a newline is then no line yet.
    """
    try:
        return os.stat(path).st_size != nbytes or files.is_being_written(path)
    except OSError:
        return True


def begins_as(path: Path, nbytes: int, digest: str) -> bool:
    """Return whether the first `nbytes` bytes of a file have the digest, computed as in
    `InputScan`.

    Return True if the file cannot be read any more.
    """
    found = hashlib.blake2b(digest_size=DIGEST_BYTES)
    try:
        with files.open_regular(path) as file:
            while nbytes > 0 and (piece := file.read(min(nbytes, _PIECE_BYTES))):
                found.update(piece)
                nbytes -= len(piece)
    except OSError:
        return True
    return not nbytes and found.hexdigest() == digest


def id_digest(custom_id: str) -> bytes:
    """Return 16 bytes that identify an id.

    Among a billion ids two are alike with probability 1e-20.
    """
    return hashlib.blake2b(
        custom_id.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES
    ).digest()


def which_are_in(ids: Digests, done: Digests) -> npt.NDArray[np.bool_]:
    """Return for each of `ids` whether it is in `done`.

    Sort `done` in place, and use one byte per row.
    """
    mask = np.zeros(len(ids), bool)
    if len(done):
        done.sort()
        for start in range(0, len(ids), _CHUNK):
            part = ids[start : start + _CHUNK]
            at = np.minimum(np.searchsorted(done, part), len(done) - 1)
            mask[start : start + _CHUNK] = done[at] == part
    return mask


Pieces = Generator[tuple[bytes, Line | None, bool], None, None]


def _pieces(path: Path, offset: int = 0, number: int = 1, row: int = 0) -> Pieces:
    """Yield (bytes, line without byte order mark, whether the line ends here).

    It begins with the line `number` at `offset`, which is row `row`. A line that is too long comes
    in pieces, and its `Line` comes with the last one. The line is None if it continues or is blank.
    """
    head: bytes | None = None  # first bytes of a line that comes in pieces
    start = offset
    is_plain = path.suffix.lower() == ".txt"
    try:
        for raw, should_continue in files.read_lines(path, offset):
            line = None
            if should_continue or head is not None:
                head = raw[:_HEAD_BYTES] if head is None else head
                if not should_continue:
                    line = Line(number, None, without_bom(head), start, row, is_plain)
            elif (text := without_bom(raw)).strip():
                line = Line(number, text, b"", start, row, is_plain)
            yield raw, line, not should_continue
            offset += len(raw)
            row += line is not None
            if not should_continue:
                number = number + 1
                head = None
                start = offset
    except OSError as error:
        raise UsageError(f"--input {path}: {error.strerror or error}") from error


def _lines(path: Path) -> Iterator[Line]:
    """Yield the lines that are not blank."""
    return (line for _, line, _ in _pieces(path) if line is not None)


def _refuse_duplicates(path: Path, ids: Digests) -> None:
    """Raise UsageError naming the first id that two lines have.

    The first 8 bytes of all digests are compared before whole digests, to save memory.
    """
    words = ids.view(np.uint64)[::2].copy()
    words.sort()
    alike = words[1:][words[1:] == words[:-1]]
    if not len(alike):
        return
    rows = np.flatnonzero(np.isin(ids.view(np.uint64)[::2], alike))
    first: dict[bytes, int] = {}
    pairs = [
        (before, row)
        for row in rows.tolist()
        if (before := first.setdefault(bytes(ids[row]), row)) != row
    ]
    if not pairs:
        return
    one, other = pairs[0]
    found = {line.row: line for line in _lines(path) if line.row in (one, other)}
    more = f", and {len(pairs) - 1} more lines repeat an id" if len(pairs) > 1 else ""
    raise UsageError(
        f"--input {path}: lines {found[one].number} and {found[other].number} both have the "
        "custom_id "
        f"{found[one].custom_id!r}{more}; give each line its own"
    )
