"""The output file: whole lines only, one writer, whatever the disk does."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import EXIT_FAILED, FlexgenError, UsageError
from flexgen_h2o.jobs import output as module
from flexgen_h2o.jobs.output import OutputFile, count_rows, is_locked, to_line

ROWS = [
    {"custom_id": name, "response": {"text": text}, "error": None}
    for name, text in zip("abc", "xéz", strict=True)
]
LINES = [to_line(row) for row in ROWS]
WHOLE = b"".join(line + b"\n" for line in LINES)


Open = Callable[[], OutputFile]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.fixture
def opened(path: Path) -> Iterator[Open]:
    files: list[OutputFile] = []

    def make() -> OutputFile:
        files.append(OutputFile(path))
        return files[-1]

    yield make
    for file in files:
        with contextlib.suppress(OSError, FlexgenError):  # the test has closed it, or taken it away
            file.close()


# ---- torn ends


def test_a_last_line_torn_at_any_byte(path: Path) -> None:
    """Cut within the last line, or before it, or not at all: what was whole stays, and the rest can
    be done again."""
    for torn in range(len(LINES[2]) + 2):
        kept = len(WHOLE) - torn
        path.write_bytes(WHOLE[:kept])
        whole = 3 if torn == 0 else 2
        with contextlib.closing(OutputFile(path)) as file:
            assert list(file.rows()) == ROWS[:whole]
            assert file.cut_bytes == (
                0 if torn == 0 else kept - sum(len(line) + 1 for line in LINES[:2])
            )
            file.append(LINES[whole:])
        assert path.read_bytes() == WHOLE


def test_what_a_power_cut_leaves_at_the_end_is_cut_off(path: Path) -> None:
    hole = b"\0" * 50
    for tail in (hole * 100, hole + b"\n", LINES[0][:9] + hole + b"\n", b"\xff", b"{}"):
        path.write_bytes(WHOLE + tail)
        with contextlib.closing(OutputFile(path)) as file:
            assert list(file.rows()) == ROWS and file.cut_bytes == len(tail)
        assert path.read_bytes() == WHOLE


def test_a_whole_line_that_is_no_row_is_no_crash(path: Path) -> None:
    """At the end of the file, or with rows behind it."""
    tails = [b"{}\n", b"\xff\n", b"notes\nmore", b"a\n\0", b"oops\n" + WHOLE]
    for rows, tail in itertools.product((WHOLE, b""), tails):
        path.write_bytes(rows + tail)
        with (
            contextlib.closing(OutputFile(path)) as file,
            pytest.raises(UsageError, match=rf"out.jsonl:{rows.count(10) + 1}: is not a row"),
        ):
            list(file.rows())
        assert path.read_bytes() == rows + tail


def test_long_rows_are_not_kept_as_objects(path: Path) -> None:
    entry = {"token": "a", "logprob": -1.5, "bytes": [97]}
    body = {"choices": [{"logprobs": {"content": [entry] * 60_000}}]}
    rows = [
        {"id": "x", "custom_id": "a", "response": {"body": body}, "error": None},
        {"custom_id": "b", "response": None, "error": {"code": "c", "message": "m" * 2**20}},
    ]
    path.write_bytes(b"".join(to_line(row) + b"\n" for row in rows))
    size = path.stat().st_size
    with contextlib.closing(OutputFile(path)) as output:
        tracemalloc.start()
        try:
            found = [(row["custom_id"], row["error"]) for row in output.rows()]
            assert tracemalloc.get_traced_memory()[1] < 4 * size
        finally:
            tracemalloc.stop()
    assert found == [("a", None), ("b", rows[1]["error"])]
    assert count_rows(path) == (2, 1)


@pytest.mark.parametrize(("tail", "end"), [(b"\0", b"\n"), (b"x", b"")])
def test_a_line_that_is_longer_than_a_row_can_be(
    tail: bytes, end: bytes, path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the hole is that a file has whose size somebody has set; it is read in pieces."""
    monkeypatch.setattr(module, "_PIECE_BYTES", 9)
    path.write_bytes(WHOLE + tail * 10_000 + end)
    assert count_rows(path) == (3, 0), "rows have several pieces"
    file = opened()
    assert list(file.rows()) == ROWS and file.cut_bytes == 10_000 + len(end)
    assert path.read_bytes() == WHOLE
    file.close()
    path.write_bytes(WHOLE + b"x" * 10_000 + b"\n")
    with pytest.raises(UsageError, match=r"out.jsonl:4: is not a row"):
        list(opened().rows())


# ---- one writer


@pytest.mark.parametrize("has_locks", [True, False])
def test_one_writer(
    path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch, has_locks: bool
) -> None:
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    if not has_locks:
        monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(module, "_LOCK_WAIT_S", 0.0)
    assert not is_locked(path)
    first = opened()
    first.append(LINES)
    assert is_locked(path)
    with pytest.raises(UsageError, match="another job writes to it"):
        OutputFile(path)
    first.close()
    assert not is_locked(path)
    again = opened()
    assert list(again.rows()) == ROWS and again.has_guard is not has_locks
    again.drop("b")
    assert is_locked(path) and list(again.rows()) == [ROWS[0], ROWS[2]]
    again.append(LINES[1:2])
    assert path.read_bytes() == b"".join(LINES[i] + b"\n" for i in (0, 2, 1))


def test_an_output_that_was_never_written_goes_away(path: Path) -> None:
    OutputFile(path).close()
    assert not path.exists()
    path.write_bytes(b"")
    OutputFile(path).close()
    assert path.exists(), "it was there before"


# ---- syncs


@pytest.mark.parametrize(("slow", "least", "most"), [(0.0, 90, 100), (0.5, 8, 12)])
def test_syncs_are_at_most_one_a_second_and_fewer_on_a_slow_disk(
    slow: float, least: int, most: int, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fsync takes `slow` seconds: together at most a twentieth of the time."""
    now = [100.0]
    syncs = []

    def fsync(fd: int) -> None:
        now[0] += slow
        syncs.append(now[0])

    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module.os, "fsync", fsync)
    file = opened()
    while now[0] < 200:
        file.append(LINES[:1])
        now[0] += 0.1
    assert least <= len(syncs) <= most
    now[0] += 50
    for sync in (file.sync_if_due, file.sync_if_due, file.sync):
        sync()
    assert len(syncs) <= most + 1, "nothing is left to be synced"


# ---- disks that fail


def failing(
    monkeypatch: pytest.MonkeyPatch, name: str, after: int, error: int = errno.ENOSPC
) -> None:
    """`os.write` writes `after` bytes more, and then none; `os.fsync` works `after` times."""
    real = getattr(os, name)
    left = [after]

    def call(fd: int, *data: Any) -> Any:
        take = len(data[0]) if data else 1
        if left[0] <= 0:
            raise OSError(error, os.strerror(error))
        take, left[0] = min(take, left[0]), left[0] - take
        return real(fd, data[0][:take]) if data else real(fd)

    monkeypatch.setattr(module.os, name, call)


def test_a_full_disk_tears_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for room in range(0, len(WHOLE), 7):
        path.unlink(missing_ok=True)
        with contextlib.closing(OutputFile(path)) as file:
            with monkeypatch.context() as patched:
                failing(patched, "write", room)
                with pytest.raises(
                    FlexgenError, match=r"No space left on device; the rows in it are whole"
                ) as error:
                    file.append(LINES)
            assert error.value.exit_code == EXIT_FAILED
            fits = max(n for n in range(4) if sum(len(line) + 1 for line in LINES[:n]) <= room)
            assert path.read_bytes() == b"".join(line + b"\n" for line in LINES[:fits])
            file.append(LINES[fits:])
        assert path.read_bytes() == WHOLE


def test_what_a_failed_sync_may_have_lost_is_cut_off(
    path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a failed fsync the kernel forgets: the rows since the last good one are done again."""
    file = opened()
    file.append(LINES[:1])
    file.sync()
    file.append(LINES[1:])
    failing(monkeypatch, "fsync", 0, errno.EIO)
    with pytest.raises(FlexgenError, match="Input/output error"):
        file.sync()
    assert path.read_bytes() == LINES[0] + b"\n"


# ---- somebody else (tests/fault/test_jobs.py has whole jobs)


def interfering(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[], None], error: int = 0
) -> None:
    """Somebody changes the file after the job has looked at it and before it writes, or fails
    to."""
    real = os.write

    def write(fd: int, data: bytes) -> int:
        change()
        if error:
            raise OSError(error, os.strerror(error))
        return real(fd, data)

    monkeypatch.setattr(module.os, "write", write)


@pytest.mark.parametrize("left", [0, len(LINES[0]) + 9])
@pytest.mark.parametrize("error", [0, errno.ENOSPC])
def test_a_cut_at_the_moment_of_a_write(
    left: int, error: int, path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is not made longer, with zeros, and no row is written behind a torn one."""
    file = opened()
    file.append(LINES[:1])
    file.append(LINES[1:2])
    interfering(monkeypatch, lambda: os.truncate(path, left), error)
    with pytest.raises(
        FlexgenError, match="No space" if error else f"somebody else cut it .*\\({left} bytes"
    ):
        file.append([LINES[2]] * 3)
    monkeypatch.undo()
    assert path.read_bytes() == WHOLE[:left]
    with pytest.raises(FlexgenError, match="somebody else"):
        file.append(LINES[2:])
    assert path.read_bytes() == WHOLE[:left]


def test_a_failed_sync_does_not_make_a_cut_file_longer(
    path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = opened()
    file.append(LINES[:2])
    file.sync()
    file.append(LINES[2:])

    def fsync(fd: int) -> None:
        if path.stat().st_size == len(WHOLE):
            os.truncate(path, 5)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(module.os, "fsync", fsync)
    with pytest.raises(FlexgenError, match="Input/output error"):
        file.sync()
    assert path.read_bytes() == WHOLE[:5]


def test_a_signal_comes_between_lines(
    path: Path, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It arrives in the middle of a write that takes two calls; the line is whole before it is
    heard."""
    real = os.write

    def write(fd: int, data: bytes) -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        return real(fd, data[: len(data) // 2 + 1])

    file = opened()
    monkeypatch.setattr(module.os, "write", write)
    with interrupts.as_exceptions():
        file.append(LINES)
        assert path.read_bytes() == WHOLE
        with pytest.raises(interrupts.Interrupted):
            interrupts.check()
