"""Results appear whole: what cannot be written to its end leaves the older file as it was, and nothing beside it."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o.core.config import Policy, SavedPolicy, write_policy
from flexgen_h2o.core.errors import FlexgenError, UsageError
from flexgen_h2o.core.files import check_writable, open_new, replacing, write_whole
from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.planner.measure.machine import nominal_profile
from flexgen_h2o.planner.profile import write_profile

WRITERS: dict[str, Callable[[Path], None]] = {
    "policy": lambda path: write_policy(path, SavedPolicy(Policy())),
    "profile": lambda path: write_profile(path, nominal_profile(True)),
    "trace": lambda path: Timeline().write_chrome_trace(path),
}


@pytest.fixture(params=["drafts without a name", "drafts with a name"], autouse=True)
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


@pytest.mark.parametrize("name", WRITERS)
def test_no_room_leaves_the_older_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text("what was there before")
    with no_room(), pytest.raises((OSError, FlexgenError), match="File too large"):
        WRITERS[name](path)
    assert path.read_text() == "what was there before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_and_the_mode_of_its_target(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
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


def test_a_link_is_replaced_where_it_is_not_to_be_followed(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_whole(link, "new", follow=False)
    assert not link.is_symlink() and (link.read_text(), target.read_text()) == ("new", "old")


def test_a_draft_has_no_name_that_can_be_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
