"""The run's own folder: gone at its end, kept while its run lives, removed when its run is dead, never half full."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from flexgen_h2o.core.errors import DoesNotFitError, UsageError
from flexgen_h2o.core.files import MARK
from flexgen_h2o.core.units import PAGE
from flexgen_h2o.tiers.device import host_buffer
from flexgen_h2o.tiers.disk import Scratch


@pytest.fixture
def offload(tmp_path: Path) -> Path:
    return tmp_path / "deep" / "offload"


@pytest.fixture
def scratch(offload: Path) -> Iterator[Scratch]:
    opened = Scratch(offload)
    yield opened
    opened.close()


def names_in(offload: Path) -> list[str]:
    return sorted(p.name for p in offload.iterdir())


def test_nothing_is_left_behind(offload: Path) -> None:
    scratch = Scratch(offload)
    scratch.create("cache.bin", 3 * PAGE).close()
    assert scratch.folder.parent == offload and scratch.folder.is_dir()
    scratch.close()
    assert names_in(offload) == []


def test_other_files_of_the_offload_dir_are_left_alone(offload: Path) -> None:
    (offload / "weights").mkdir(parents=True)
    (offload / "run-notes.txt").write_text("mine")
    Scratch(offload).close()
    assert names_in(offload) == ["run-notes.txt", "weights"]


def test_two_runs_share_an_offload_dir(offload: Path, scratch: Scratch) -> None:
    scratch.create("cache.bin", PAGE).close()
    with_it = Scratch(offload)
    assert with_it.folder != scratch.folder
    with_it.close()
    assert (scratch.folder / "cache.bin").is_file()


def test_the_folder_of_a_dead_run_is_removed_by_the_next(offload: Path) -> None:
    dead = Scratch(offload)
    dead.create("cache.bin", PAGE).close()
    assert dead._lock is not None
    os.close(dead._lock)  # as the kernel does for a run killed with -9
    live = Scratch(offload)
    assert names_in(offload) == [live.folder.name]
    live.close()


def test_many_runs_may_start_and_end_at_once(offload: Path) -> None:
    """None takes another's young folder for a dead one, and none is refused."""
    problems: list[object] = []

    def work() -> None:
        try:
            for _ in range(60):
                scratch = Scratch(offload)
                assert scratch.folder.is_dir() and (scratch.folder / MARK).is_file()
                scratch.close()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == [] and names_in(offload) == []


def test_space_is_taken_at_once(scratch: Scratch) -> None:
    file = scratch.create("cache.bin", 300 * PAGE + 1)
    status = os.stat(file.path)
    assert status.st_size == 300 * PAGE + 1 and status.st_blocks * 512 >= status.st_size
    buffer = host_buffer(PAGE)
    buffer.fill_(7)
    file.write(buffer, 299 * PAGE)
    assert file.read(buffer.zero_(), 299 * PAGE, PAGE) == PAGE and bool((buffer == 7).all())
    file.close()


def test_a_full_disk_is_said_before_the_run(scratch: Scratch, offload: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def posix_fallocate(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", posix_fallocate)
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(DoesNotFitError, match=f"--offload-dir {offload}: 3.00 GiB are needed.*free.*--percent"):
        scratch.create("cache.bin", 3 * 2**30)
    assert len(os.listdir("/proc/self/fd")) == open_before


def test_a_disk_without_inodes_is_full_too(scratch: Scratch, offload: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_inode(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "mkdir", no_inode)
    with pytest.raises(DoesNotFitError, match=f"--offload-dir {offload}"):
        Scratch(offload)
    monkeypatch.setattr(os, "open", no_inode)
    with pytest.raises(DoesNotFitError, match=f"--offload-dir {offload}: .*No space left"):
        scratch.create("cache.bin", PAGE)


def test_more_than_any_disk_has_is_said_too(scratch: Scratch) -> None:
    with pytest.raises(DoesNotFitError, match="are needed on disk"):
        scratch.create("cache.bin", 2**60)


def test_a_place_that_cannot_be_a_folder_is_unusable_input(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=f"--offload-dir {tmp_path / 'file'}: cannot be used"):
        Scratch(tmp_path / "file")
