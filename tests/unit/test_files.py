"""Results appear whole: what cannot be written to its end leaves the older file as it was, and nothing beside it."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from flexgen_h2o.config import Policy, SavedPolicy, write_policy
from flexgen_h2o.errors import FlexgenError
from flexgen_h2o.files import write_whole
from flexgen_h2o.profile import write_profile
from flexgen_h2o.profiling.nominal import nominal_profile
from flexgen_h2o.timeline import Timeline

WRITERS: dict[str, Callable[[Path], None]] = {
    "policy": lambda path: write_policy(path, SavedPolicy(Policy())),
    "profile": lambda path: write_profile(path, nominal_profile(True)),
    "trace": lambda path: Timeline().write_chrome_trace(path),
}


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
