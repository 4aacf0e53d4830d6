"""Locks: one holder at a time, shared ones beside each other, gone with their holder."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexgen_h2o.core.files import MARK, is_still, read_mark, try_lock, wait_for_lock


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


def test_a_process_that_dies_leaves_none(path: Path, two: tuple[int, int]) -> None:
    code = "import os, sys; from flexgen_h2o.core.files import try_lock; "
    code += "print(try_lock(os.open(sys.argv[1], os.O_RDONLY)), flush=True); os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
    assert done.stdout == "True\n" and done.returncode == -9, done.stderr
    assert try_lock(two[0])


def test_a_file_that_was_removed_or_replaced_is_not_the_one_that_is_open(path: Path, two: tuple[int, int]) -> None:
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
