"""Files: results appear whole, or the older file stays; locks have one holder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o.core.config import Policy, SavedPolicy, write_policy
from flexgen_h2o.core.errors import FlexgenError, UsageError
from flexgen_h2o.core.files import (
    check_writable,
    close_locked,
    guard_of,
    is_still,
    open_new,
    try_lock,
    usable_path,
    user_cache_dir,
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
def test_a_file_is_on_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that a power cut leaves the older file or the new one, whole."""
    done: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def noted(*given: Any, name: str = name, real: Callable[..., None] = real) -> None:
            done.append(name)
            real(*given)

        monkeypatch.setattr(os, name, noted)
    write_whole(tmp_path / "a.json", "new")
    assert done == ["fsync", "replace", "fsync"]  # of the file, and of its folder
    assert (tmp_path / "a.json").read_text() == "new"


@pytest.mark.usefixtures("_drafts")
@pytest.mark.parametrize("follow", [True, False])
def test_a_link_stays_or_is_replaced(follow: bool, tmp_path: Path) -> None:
    """If it stays, its target is replaced and keeps its mode."""
    target = tmp_path / "target"
    link = tmp_path / "link"
    target.write_text("old")
    target.chmod(0o640)
    link.symlink_to(target)
    write_whole(link, "new", follow)
    assert link.is_symlink() is follow and link.read_text() == "new"
    assert target.read_text() == ("new" if follow else "old")
    assert target.stat().st_mode & 0o777 == 0o640


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


def test_check_writable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    monkeypatch.chdir(tmp_path)
    for fine in (path, Path("run.json"), Path("/dev/null")):
        check_writable(fine, "--json")
    assert os.listdir(tmp_path) == []
    for wrong, says in ((tmp_path / "no" / "x", "does not exist"), (tmp_path, "is a folder")):
        with pytest.raises(UsageError, match=f"^--json .*{says}"):
            check_writable(wrong, "--json")
    # As root everything may be written: permissions are played. A file that is there needs them
    # itself, a new one needs those of its folder.
    for forbidden in (tmp_path, path):
        monkeypatch.setattr("os.access", lambda asked, mode, no=forbidden: asked != no)
        with pytest.raises(UsageError, match=r"^--json .*no permission"):
            check_writable(path, "--json")
        path.touch()


# ---- locks


@pytest.fixture(params=[None, errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def lock_error(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int | None:
    """The error of flock where a file system has no locks; None where it has."""

    def refuse(fd: int, operation: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    if request.param is not None:
        monkeypatch.setattr(fcntl, "flock", refuse)
    return request.param  # type: ignore[no-any-return]


def test_a_lock_has_one_holder_and_is_waited_for(tmp_path: Path, lock_error: int | None) -> None:
    path = tmp_path / "lock"
    path.touch()
    first, second = (os.open(path, os.O_RDONLY) for _ in range(2))  # as by two processes
    assert try_lock(first) and not try_lock(second) and not try_lock(second, shared=True)
    timer = threading.Timer(0.05, os.close, [first])
    timer.start()
    wait_for_lock(second)
    timer.join()
    assert is_still(path, second)
    path.unlink()
    assert not is_still(path, second)
    path.touch()
    assert not is_still(path, second)
    close_locked(second)
    assert [one.name for one in tmp_path.iterdir()] == ["lock"]


def test_a_guard_outlives_no_process_of_this_machine(
    tmp_path: Path, lock_error: int | None
) -> None:
    """One of another machine counts as alive, as nobody can tell."""
    path = tmp_path / "lock"
    path.touch()
    code = (
        "import errno, fcntl, os, sys; from flexgen_h2o.core import files\n"
        "def refuse(fd, operation): raise OSError(int(sys.argv[2]), 'no')\n"
        "if int(sys.argv[2]): fcntl.flock = refuse\n"
        "assert files.try_lock(os.open(sys.argv[1], os.O_RDWR)); print('held', flush=True)\n"
        "sys.stdin.read()"
    )
    argv = [sys.executable, "-c", code, str(path), str(lock_error or 0)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline() == b"held\n"
        fd = os.open(path, os.O_RDWR)
        assert not try_lock(fd) and not try_lock(fd, shared=True)
        other.kill()
    assert try_lock(fd, shared=True) and try_lock(fd)
    if lock_error is not None:
        guard = guard_of(path)
        away = json.loads(guard.read_text())
        guard.write_text(json.dumps(["elsewhere", *away[1:]]))
        assert not try_lock(fd)
        for text in ("", "{}", "[1", json.dumps([away[0], "before the machine began", *away[2:]])):
            guard.write_text(text)
            os.utime(guard, (0, 0))
            assert try_lock(fd)
    close_locked(fd)


# ---- a home


@pytest.mark.parametrize("home", [None, "", "/nonexistent", "gone/home"])
def test_without_a_home_there_is_a_folder_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str | None
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if home is None:
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])  # a uid without an entry
    else:
        monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    base = tmp_path / f"flexgen_h2o-{os.getuid()}"
    assert usable_path("~/offload", "--offload-dir") == base / "offload"
    assert user_cache_dir() == base / ".cache/flexgen_h2o"
    assert base.stat().st_mode & 0o777 == 0o700
    base.rmdir()
    base.symlink_to(tmp_path)  # somebody else's
    with pytest.raises(UsageError, match=r"--offload-dir .*set HOME"):
        usable_path("~/offload", "--offload-dir")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert usable_path("~/offload", "--offload-dir") == tmp_path / "offload"
