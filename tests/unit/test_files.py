"""Files: results appear whole, or the older file stays; locks have one holder; impossible paths are
refused."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o.core.config import Policy, SavedPolicy, write_policy
from flexgen_h2o.core.errors import FlexgenError, UsageError
from flexgen_h2o.core.files import (
    MARK,
    check_writable,
    is_still,
    open_new,
    read_mark,
    replacing,
    try_lock,
    usable_path,
    wait_for_lock,
    write_whole,
)
from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.engine.prompts import write_outputs
from flexgen_h2o.engine.sequence import Sequence
from flexgen_h2o.planner.profile import nominal_profile, write_profile

WRITERS: dict[str, Callable[[Path], None]] = {
    "policy": lambda path: write_policy(path, SavedPolicy(Policy())),
    "profile": lambda path: write_profile(path, nominal_profile(True)),
    "trace": lambda path: Timeline().write_chrome_trace(path),
    "output": lambda path: write_outputs(
        path, [Sequence(0, (), token_ids=[3], finish_reason="length")]
    ),
}


@pytest.fixture(params=["drafts without a name", "drafts with a name"])
def _drafts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the two ways to write a draft, the second is for file systems that cannot do the first."""
    real = os.open

    def refuse(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return real(path, flags, *more, **named)

    if request.param == "drafts with a name":
        monkeypatch.setattr(os, "open", refuse)


@contextmanager
def no_room() -> Iterator[None]:
    """A file cannot become longer than ten bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("_drafts")
@pytest.mark.parametrize("name", WRITERS)
def test_no_room_leaves_the_older_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("what was there before")
    with no_room(), pytest.raises((OSError, FlexgenError), match="File too large"):
        WRITERS[name](path)
    assert path.read_text() == "what was there before"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("_drafts")
def test_a_link_stays_and_the_mode_of_its_target(tmp_path: Path) -> None:
    target = tmp_path / "target"
    link = tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    write_whole(link, "new")
    assert link.is_symlink() and target.read_text() == "new"
    assert target.stat().st_mode & 0o777 == 0o640


def test_what_is_no_regular_file_is_written_to(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", "text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()
    write_whole(Path(os.devnull), "text")
    assert not Path(os.devnull).is_file()


@pytest.mark.usefixtures("_drafts")
def test_a_link_is_replaced_where_it_is_not_to_be_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    link = tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_whole(link, "new", follow=False)
    assert not link.is_symlink() and (link.read_text(), target.read_text()) == ("new", "old")


@pytest.mark.usefixtures("_drafts")
def test_a_draft_has_no_name_that_can_be_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what has the name all the same is not opened, a link neither."""
    (tmp_path / "victim").write_text("mine")
    names = []
    for _ in range(2):
        with monkeypatch.context() as patched:
            patched.setattr(os, "replace", lambda draft, path: names.append(draft))
            write_whole(tmp_path / "result", "text")
    assert names[0] != names[1]
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    (tmp_path / "dangling").symlink_to(tmp_path / "new")
    for name in ("link", "dangling", "victim"):
        with pytest.raises(FileExistsError):
            open_new(tmp_path / name)
    assert (tmp_path / "victim").read_text() == "mine" and not (tmp_path / "new").exists()


KILLED = """
import os, sys
from pathlib import Path
from flexgen_h2o.core.files import replacing
with replacing(Path(sys.argv[1])) as file:
    file.write("half of it")
    file.flush()
    os.kill(os.getpid(), 9)
"""


def test_a_writer_that_is_killed_leaves_no_draft(tmp_path: Path) -> None:
    try:
        os.close(os.open(tmp_path, os.O_TMPFILE | os.O_WRONLY))
    except OSError:
        pytest.skip("this file system has no files without a name")
    path = tmp_path / "result"
    path.write_text("old")
    assert subprocess.run([sys.executable, "-c", KILLED, str(path)], check=False).returncode == -9
    assert list(tmp_path.iterdir()) == [path] and path.read_text() == "old"


@pytest.mark.usefixtures("_drafts")
def test_bytes_may_be_written_too(tmp_path: Path) -> None:
    with replacing(tmp_path / "picture") as file:
        file.buffer.write(b"\x89PNG")
    assert (tmp_path / "picture").read_bytes() == b"\x89PNG"


def test_check_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    check_writable(path, "--json")
    monkeypatch.chdir(tmp_path)
    check_writable(Path("run.json"), "--json")
    assert os.listdir(tmp_path) == []
    check_writable(Path("/dev/null"), "--log-file")
    with pytest.raises(UsageError, match=r"^--trace .*does not exist"):
        check_writable(tmp_path / "no" / "x", "--trace")
    with pytest.raises(UsageError, match=r"^--json .*is a folder"):
        check_writable(tmp_path, "--json")
    # As root everything may be written: permissions are played.
    monkeypatch.setattr("os.access", lambda asked, mode: asked != tmp_path)
    with pytest.raises(UsageError, match=r"^--json .*no permission"):
        check_writable(path, "--json")
    path.touch()
    check_writable(path, "--json")
    monkeypatch.setattr("os.access", lambda asked, mode: asked != path)
    with pytest.raises(UsageError, match=r"^--json .*no permission"):
        check_writable(path, "--json")


# ---- paths


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert usable_path("~/x y/\u00fc", "--json") == tmp_path / "x y" / "\u00fc"


@pytest.mark.parametrize("text", ["~nosuchuser-at-all/x", "a" * 5000, "b" * 300, "nul\0byte"])
def test_what_cannot_be_a_path(text: str) -> None:
    with pytest.raises(UsageError, match=r"--offload-dir .*not a usable path"):
        usable_path(text, "--offload-dir")


def test_what_lies_below_a_folder_that_may_not_be_looked_into(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As root it may: permissions are played."""

    def refuse(*args: Any, **named: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", refuse)
        with pytest.raises(
            UsageError, match=r"--offload-dir .*not a usable path \(Permission denied\)"
        ):
            usable_path("/closed/folder", "--offload-dir")


# ---- locks


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "lock").touch()
    return tmp_path / "lock"


@pytest.fixture
def two(path: Path) -> Iterator[tuple[int, int]]:
    """The file opened twice, as by two processes; the first may be closed by the test."""
    fds = os.open(path, os.O_RDONLY), os.open(path, os.O_RDONLY)
    yield fds
    for fd in fds:
        try:
            os.close(fd)
        except OSError:
            pass  # closed by the test


def test_one_holds_it(two: tuple[int, int]) -> None:
    assert try_lock(two[0]) and not try_lock(two[1]) and not try_lock(two[1], shared=True)
    os.close(two[0])
    assert try_lock(two[1])


def test_those_who_share_hold_it_together(two: tuple[int, int]) -> None:
    assert try_lock(two[0], shared=True) and try_lock(two[1], shared=True) and not try_lock(two[1])


def test_it_is_waited_for(two: tuple[int, int]) -> None:
    assert try_lock(two[0])
    timer = threading.Timer(0.05, os.close, [two[0]])
    timer.start()
    wait_for_lock(two[1])
    timer.join()


def test_a_file_that_was_removed_or_replaced_is_not_the_one_that_is_open(
    path: Path, two: tuple[int, int]
) -> None:
    assert is_still(path, two[0])
    path.unlink()
    assert not is_still(path, two[0])
    path.touch()
    assert not is_still(path, two[0])


def test_a_folder_in_the_place_of_a_mark_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / MARK).mkdir()
    before = os.listdir("/proc/self/fd")
    assert read_mark(tmp_path) is None
    assert os.listdir("/proc/self/fd") == before
