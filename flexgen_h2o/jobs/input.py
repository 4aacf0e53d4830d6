"""The input file: its lines one by one, and one pass over them before the run for ids, duplicates and a digest.

Of each line only the digest of its id stays in memory.
"""

from __future__ import annotations

import codecs
import hashlib
import re
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from flexgen_h2o.core import files
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.engine.prompts import STRICT_JSON

DIGEST_BYTES = 16
MOST_ID_CHARACTERS = 1024  # of a custom_id
_HEAD_BYTES = 2**16  # of a line that is too long, in which its custom_id is looked for
_BOM = b"\xef\xbb\xbf"
# First bytes of files whose every line would be an error row.
_FOREIGN = {
    b"\x1f\x8b": "is packed by gzip; unpack it", b"\x28\xb5\x2f\xfd": "is packed by zstd; unpack it",
    b"\xff\xfe": "is UTF-16 text; save it as UTF-8", b"\xfe\xff": "is UTF-16 text; save it as UTF-8",
    b"\x89PNG": "is a picture; give JSON lines", b"PK\x03\x04": "is packed by zip; unpack it",
    b"%PDF": "is a PDF; give JSON lines", b"PAR1": "is a Parquet file; write its rows as JSON lines",
}  # fmt: skip
_SPACE = re.compile(r"[ \t\r\n]*")  # between the parts of JSON
_CHUNK = 2**16  # rows that are looked up at a time
_PIECE_BYTES = 2**20  # read at a time where only the digest is wanted
STEP_LINES, STEP_BYTES = 256, 2**16  # of a step, some milliseconds, and of what is read ahead of a job in turns
_LINES_A_ROW = 2  # of an input whose rows are bounded: a blank line may follow each

Digests = npt.NDArray[np.bytes_]
Made = TypeVar("Made")
Steps = Generator[None, None, Made]  # work in steps of some milliseconds, so that others can be done in between


@dataclass(frozen=True)
class Line:
    """A line that is not blank.

    number: counted from 1, blank lines included. text: None where the line is too long to be read; head is how it
    begins then. offset: of its first byte in the file. row: counted from 0, without blank lines. is_plain: it is a
    prompt as it stands, of a .txt file.
    """

    number: int
    text: bytes | None
    head: bytes = b""
    offset: int = 0
    row: int = 0
    is_plain: bool = False

    def parse(self) -> Any:
        """Its JSON value, `{"text": ...}` of a plain line; ValueError says what is wrong with it."""
        if self.text is None:
            raise ValueError(f"longer than {files.MOST_LINE_BYTES // 2**20} MiB")
        try:
            text = self.text.decode("utf-8")
            return {"text": text.rstrip("\r\n")} if self.is_plain else STRICT_JSON.decode(text)
        except UnicodeDecodeError as error:
            raise ValueError("not UTF-8 text") from error
        except RecursionError as error:
            raise ValueError("nested too deeply") from error

    @cached_property
    def custom_id(self) -> str:
        """As the line gives it, else `line-NUMBER`."""
        if self.text is None and not self.is_plain:
            return self.id_in(dict(_first_members(self.head)))
        try:
            value = self.parse()
        except ValueError:
            value = None
        return self.id_in(value)

    def id_in(self, value: Any) -> str:
        """`custom_id` of the line whose value this is."""
        given = value.get("custom_id") if isinstance(value, dict) else None
        if isinstance(given, str) and 0 < len(given) <= MOST_ID_CHARACTERS:
            return given
        return f"line-{self.number}"


@dataclass(frozen=True)
class Scan:
    """What one pass over the input found. ids: digests of custom ids, (rows,) in order. digest: of its `nbytes` bytes.

    prefix: digest of its first bytes, as many as were asked for; None where it has fewer.
    """

    ids: Digests
    nbytes: int
    digest: str
    prefix: str | None


@dataclass(frozen=True)
class Cut:
    """Where a part of the input begins: byte, number of the line, and row; and which of its rows are still to be done.

    left: (rows,) bool, of the rows from `row` on.
    """

    offset: int
    number: int
    row: int
    left: npt.NDArray[np.bool_]


def at_once(steps: Steps[Made]) -> Made:
    """What the steps come to."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            made: Made = end.value
            return made


def scan_input(path: Path, known_bytes: int = 0) -> Scan:
    """One pass over the input, in 16 bytes of memory a row. known_bytes: of the prefix whose digest is wanted.

    UsageError where two lines have the same id, or where the file is packed or UTF-16.
    """
    return at_once(scan_steps(path, known_bytes))


def scan_steps(path: Path, known_bytes: int = 0, most_rows: int | None = None) -> Steps[Scan]:
    """`scan_input` in steps. most_rows: UsageError where the file has more; None: any number."""
    ids, whole, prefix, nbytes = bytearray(), hashlib.blake2b(digest_size=DIGEST_BYTES), None, 0
    lines = step_bytes = 0
    for raw, line, is_end in _pieces(path):
        if not nbytes:
            for first, what in _FOREIGN.items():
                if raw.startswith(first):
                    raise UsageError(f"--input {path}: {what}")
        split = min(max(0, known_bytes - nbytes), len(raw))
        whole.update(raw[:split])
        if nbytes + split == known_bytes and prefix is None:
            prefix = whole.hexdigest()
        whole.update(raw[split:])
        nbytes += len(raw)
        if line is not None:
            ids += id_digest(line.custom_id)
        lines += is_end
        step_bytes += len(raw)
        if most_rows is not None:
            _check_rows(path, len(ids) // DIGEST_BYTES, lines, most_rows)
        if lines % STEP_LINES == 0 or step_bytes >= STEP_BYTES:
            step_bytes = 0
            yield
    found = Scan(np.frombuffer(ids, f"S{DIGEST_BYTES}"), nbytes, whole.hexdigest(), prefix)
    _refuse_duplicates(path, found.ids)
    return found


def _check_rows(path: Path, rows: int, lines: int, most_rows: int) -> None:
    if rows > most_rows:
        raise UsageError(f"--input {path}: has more than {most_rows} requests; cut it into several files")
    if lines > _LINES_A_ROW * most_rows:
        most = _LINES_A_ROW * most_rows
        raise UsageError(f"--input {path}: has more than {most} lines, blank ones included; leave blank lines out")


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a file that are not blank. UsageError naming --input where it cannot be read."""
    return (line for _, line, _ in _pieces(path) if line is not None)


def cut_input(path: Path, done: npt.NDArray[np.bool_], size: int) -> Iterator[Cut]:
    """The input in parts with `size` rows each that are not `done`, but for the last; one pass over it."""
    start, count = None, 0
    for line in islice(read_lines(path), len(done)):
        if done[line.row]:
            continue
        if start is not None and count == size:
            yield Cut(start.offset, start.number, start.row, ~done[start.row : line.row])
            start = None
        if start is None:
            start, count = line, 0
        count += 1
    if start is not None:
        yield Cut(start.offset, start.number, start.row, ~done[start.row :])


def read_cut(path: Path, cut: Cut) -> Iterator[Line]:
    """The lines of a part that are to be done."""
    lines = (line for _, line, _ in _pieces(path, cut.offset, cut.number, cut.row) if line is not None)
    return compress(lines, cut.left)


def read_in_turns(path: Path, cut: Cut) -> Iterator[Line]:
    """`read_cut`, and between two lines no descriptor is held, and few lines."""
    offset, number, row = cut.offset, cut.number, cut.row
    last = cut.row + len(cut.left)
    is_over = False
    while not is_over:
        ahead: list[Line] = []
        is_over = True
        start, first = offset, number
        with closing(_pieces(path, offset, number, row)) as pieces:
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


def begins_as(path: Path, nbytes: int, digest: str) -> bool:
    """Have the first `nbytes` of a file that digest, as `Scan` says it? True where it cannot be read any more."""
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
    """16 bytes that stand for an id: of a billion ids, two are alike with a chance of 1 in 10^20."""
    return hashlib.blake2b(custom_id.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def which_are_in(ids: Digests, done: Digests) -> npt.NDArray[np.bool_]:
    """For each of `ids`, is it among `done`? Sorts `done` in place and takes one byte a row."""
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
    """(bytes, the line without byte order mark, does the line end here?) from the line `number` at `offset` on, which
    is the row `row`.

    A line that is too long comes in pieces, and is a `Line` with the last of them. None: it goes on, or is blank.
    """
    head: bytes | None = None  # of a line that comes in pieces
    start = offset
    is_plain = path.suffix.lower() == ".txt"
    try:
        for raw, goes_on in files.read_lines(path, offset):
            line = None
            if goes_on or head is not None:
                head = raw[:_HEAD_BYTES] if head is None else head
                if not goes_on:
                    line = Line(number, None, head.removeprefix(_BOM), start, row, is_plain)
            elif (text := raw.removeprefix(_BOM) if number == 1 else raw).strip():
                line = Line(number, text, b"", start, row, is_plain)
            yield raw, line, not goes_on
            offset += len(raw)
            row += line is not None
            if not goes_on:
                number, head, start = number + 1, None, offset
    except OSError as error:
        raise UsageError(f"--input {path}: {error.strerror or error}") from error


def _first_members(head: bytes) -> Iterator[tuple[str, Any]]:
    """The members that the beginning of a JSON object has whole, each with its name."""

    def after_space(at: int) -> int:
        return _SPACE.match(text, at).end()  # type: ignore[union-attr]

    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
        at, before = after_space(0), "{"
        while text[at : at + 1] == before:
            name, at = STRICT_JSON.raw_decode(text, after_space(at + 1))
            at = after_space(at)
            if text[at : at + 1] != ":" or not isinstance(name, str):
                return
            value, at = STRICT_JSON.raw_decode(text, after_space(at + 1))
            at, before = after_space(at), ","
            if text[at : at + 1] not in (",", "}"):  # the head may end within a number
                return
            yield name, value
    except (ValueError, RecursionError):
        return


def _refuse_duplicates(path: Path, ids: Digests) -> None:
    """UsageError naming the first id that two lines have. The first 8 bytes of all digests are compared before whole
    digests, to save memory."""
    words = ids.view(np.uint64)[::2].copy() if len(ids) else np.empty(0, np.uint64)
    words.sort()
    alike = words[1:][words[1:] == words[:-1]]
    if not len(alike):
        return
    rows = np.flatnonzero(np.isin(ids.view(np.uint64)[::2], alike))
    first: dict[bytes, int] = {}
    pairs = [(before, row) for row in rows.tolist() if (before := first.setdefault(bytes(ids[row]), row)) != row]
    if not pairs:
        return
    one, other = pairs[0]
    found = {line.row: line for line in read_lines(path) if line.row in (one, other)}
    more = f", and {len(pairs) - 1} more lines repeat an id" if len(pairs) > 1 else ""
    raise UsageError(
        f"--input {path}: lines {found[one].number} and {found[other].number} both have the custom_id "
        f"{found[one].custom_id!r}{more}; give each line its own"
    )
