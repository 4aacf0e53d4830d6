"""The input as a stream: lines, ids, duplicates, digests."""

from __future__ import annotations

import gzip
import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.engine.prompts import without_bom
from flexgen_h2o.jobs import input as module
from flexgen_h2o.jobs.input import (
    begins_as,
    cut_input,
    id_digest,
    read_lines,
    read_part,
    scan_input,
)


def test_lines_keep_their_numbers(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(
        b'\xef\xbb\xbf{"custom_id": "a"}\r\n\n  \n{bad\n{"custom_id": 3}\n'
        b'\xef\xbb\xbf{"custom_id": ""}\n\xef\xbb\xbf\xef\xbb\xbf\n["x"]'
    )
    found = list(read_lines(path))
    assert [
        without_bom(path.read_bytes()[line.offset :]).startswith(line.text or b"-")
        for line in found[1:]
    ] == [True] * 4
    assert [line.number for line in found] == [1, 4, 5, 6, 8]
    assert [line.custom_id for line in found] == ["a", "line-4", "line-5", "line-6", "line-8"]
    assert len(scan_input(path).ids) == 5


def test_a_line_that_is_too_long_is_one_line_without_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexgen_h2o.core.files.MAX_LINE_BYTES", 10)
    path = tmp_path / "in.jsonl"
    for last in (b"", b"y" * 3, b"\n", b"y" * 3 + b"\n{}"):
        path.write_bytes(b"1\n" + b"x" * 30 + last)
        found = [(line.number, line.text, line.offset) for line in read_lines(path)]
        assert found[:2] == [(1, b"1\n", 0), (2, None, 2)]
        assert found[2:] == ([(3, b"{}", 36)] if last.endswith(b"{}") else [])
        assert scan_input(path).nbytes == 32 + len(last)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (gzip.compress(b"{}\n", mtime=0), "is packed by gzip; unpack it"),
        ("{}\n".encode("utf-16"), "is UTF-16 text"),
        ("{}\n".encode("utf-16-le"), "has NUL bytes, as UTF-16 text has"),
        ("{}\n".encode("utf-32-be"), "has NUL bytes, as UTF-16 text has"),
    ],
)
def test_a_packed_file_is_refused_as_a_whole(data: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(data)
    for read in (scan_input, lambda path: list(read_lines(path))):
        with pytest.raises(UsageError, match=f"--input {path}: {says}"):
            read(path)
    path.write_bytes(b"{}\n" + data)
    assert len(scan_input(path).ids) > 1, "bytes like that in the middle are a bad line"


def test_duplicates_are_found_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "in.jsonl"
    ids = ["a", "b", "line-6", "c", "b"]
    path.write_text("\n".join(json.dumps({"custom_id": i}) for i in ids) + "\n{}\n")
    with pytest.raises(UsageError) as error:
        scan_input(path)
    says = "lines 2 and 5 both have the custom_id 'b', and 1 more lines repeat an id"
    assert str(error.value).startswith(f"--input {path}: {says}")
    with monkeypatch.context() as alike:  # in their first words, which are compared first
        alike.setattr(module, "id_digest", lambda name: b"8 bytes " + id_digest(name)[:8])
        path.write_text("{}\n{}\n")
        assert len(scan_input(path).ids) == 2


def test_an_input_that_has_grown_begins_as_before(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("{}\n{}")
    old = scan_input(path)
    for text, is_alike in (
        ("{}\n{}", True),
        ("{}\n{}\n{}\n", True),
        ("{}\n[]\n{}\n", False),
        ("{}\n", False),
    ):
        path.write_text(text)
        assert begins_as(path, old.nbytes, old.digest) is is_alike


def test_a_scan_can_be_ended(tmp_path: Path) -> None:
    def check() -> None:
        raise InterruptedError

    path = tmp_path / "in.jsonl"
    path.write_text("{}\n" * 10_000)
    with pytest.raises(InterruptedError):
        scan_input(path, check=check)


# ---- parts of it, for the actors of a job on Ray


def test_parts_have_the_rows_that_are_left_and_no_others(tmp_path: Path) -> None:
    """Blank lines, a byte order mark and no newline at the end among them."""
    source = tmp_path / "in.jsonl"
    source.write_bytes(
        b'\xef\xbb\xbf{"a": 1}\n\n  \n'
        + b"\n".join(b'{"a": %d}\n' % i * 2 for i in range(9))
        + b"{}"
    )
    lines = list(read_lines(source))
    for pattern, size in product(
        (0b0, 0b10110100, 0b11, 1 << 18, 2**19 - 1, 2**20 - 1), (1, 2, 3, 7, 100)
    ):
        done = np.array([bool(pattern >> i & 1) for i in range(len(lines))])
        cuts = list(cut_input(source, done, size))
        assert [int(cut.left.sum()) for cut in cuts[:-1]] == [size] * (len(cuts) - 1)
        found = [one for cut in cuts for one in read_part(source, cut)]
        assert found == [line for line in lines if not done[line.row]]
    cuts = list(cut_input(source, np.zeros(len(lines), bool), 100, most_bytes=24))
    assert len(cuts) > 4 and max(int(cut.left.sum()) for cut in cuts) <= 4
    assert [one for cut in cuts for one in read_part(source, cut)] == lines


def test_lines_that_came_later_are_in_no_part_and_a_long_one_is_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexgen_h2o.core.files.MAX_LINE_BYTES", 20)
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"a": 1}\n{"a": "' + b"x" * 50 + b'"}\n{"a": 3}\n{}\n')
    found = [
        line for cut in cut_input(source, np.zeros(3, bool), 1) for line in read_part(source, cut)
    ]
    assert [(line.row, line.number, line.text is None) for line in found] == [
        (0, 1, False),
        (1, 2, True),
        (2, 3, False),
    ]
