"""A built folder is complete or absent, is built once, and nobody's left-overs stay."""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest

from flexgen_h2o.checkpoint import atomic_folder, weight_files
from flexgen_h2o.checkpoint.atomic_folder import building, sample_digest
from flexgen_h2o.core.errors import DoesNotFitError, UsageError
from flexgen_h2o.core.files import MARK, mark


def build(folder: Path, pause: float = 0.0) -> bool:
    """Whether this call did the building."""
    with building(folder) as temp:
        if temp is None:
            return False
        (temp / "half").write_text("1")
        time.sleep(pause)
        (temp / "whole").write_text("2")
    return True


def count_builds(folder: Path, log: Path) -> None:
    if build(folder, pause=0.2):
        with log.open("a") as file:
            file.write("built\n")


def test_built_once_then_found(tmp_path: Path, names_in) -> None:
    folder = tmp_path / "deep" / "down" / "made"
    assert build(folder)
    assert not build(folder)
    assert names_in(tmp_path) == [f"deep/down/made/{name}" for name in (MARK, "half", "whole")]


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=repr)
def test_failure_leaves_nothing(tmp_path: Path, names_in, error: BaseException) -> None:
    def fail() -> None:
        with building(tmp_path / "made") as temp:
            assert temp is not None
            (temp / "half").write_text("1")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert names_in(tmp_path) == []
    assert build(tmp_path / "made")


def test_a_full_disk_names_the_flag(tmp_path: Path, names_in) -> None:
    """Found on the way, or before anything is written."""
    says = rf"--offload-dir {tmp_path}: made: needs 10 B, .* are free"
    with pytest.raises(DoesNotFitError, match=says), building(tmp_path / "made", nbytes=10):
        raise OSError(errno.ENOSPC, "No space left on device")
    with (
        pytest.raises(DoesNotFitError, match="--offload-dir"),
        building(tmp_path / "made", nbytes=2**60),
    ):
        pytest.fail("must not be reached")
    assert names_in(tmp_path) == []


def test_what_is_in_the_way(tmp_path: Path) -> None:
    """A file as the folder or its parent, a link to nowhere or to an empty folder: no folder can be
    renamed onto it."""
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"--offload-dir .*file/sub: cannot be written to"):
        build(tmp_path / "file" / "sub" / "made")
    (tmp_path / "empty").mkdir()
    for name in ("nowhere", "empty"):
        (tmp_path / f"to {name}").symlink_to(tmp_path / name)
    for name in ("file", "to nowhere", "to empty"):
        with pytest.raises(UsageError, match=f"{name} is in the way"):
            build(tmp_path / name)


def test_two_processes_build_once(tmp_path: Path, names_in) -> None:
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    workers = [
        context.Process(target=count_builds, args=(tmp_path / "p" / "made", log)) for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert log.read_text() == "built\n"
    assert names_in(tmp_path / "p") == [f"made/{name}" for name in (MARK, "half", "whole")]


def test_a_failing_builder_hands_over(tmp_path: Path) -> None:
    inside = threading.Event()
    leave = threading.Event()

    def fail() -> None:
        with contextlib.suppress(ValueError), building(tmp_path / "made"):
            inside.set()
            leave.wait(60)
            raise ValueError("mine")

    first = threading.Thread(target=fail)
    first.start()
    assert inside.wait(60)
    second = threading.Thread(target=build, args=(tmp_path / "made",))
    second.start()
    leave.set()
    first.join()
    second.join()
    assert (tmp_path / "made" / "whole").exists()


@pytest.mark.parametrize("following", ["made", "other"])
def test_what_a_killed_builder_left_is_removed(tmp_path: Path, names_in, following: str) -> None:
    worker = multiprocessing.get_context("fork").Process(target=build, args=(tmp_path / "made", 60))
    worker.start()
    while not any(name.endswith("/half") for name in names_in(tmp_path)):
        time.sleep(0.01)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    worker.join()
    assert names_in(tmp_path), "the kill must leave something, or this tests nothing"
    assert build(tmp_path / following)
    assert names_in(tmp_path) == [f"{following}/{name}" for name in (MARK, "half", "whole")]


def test_what_others_call_as_we_do_is_left_alone(tmp_path: Path) -> None:
    """A folder without our mark, a link to one that has it, a lock that is a link."""
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "made").mkdir(parents=True)
    mark(elsewhere / "made")
    theirs = tmp_path / ".theirs.flexgen-building"
    theirs.mkdir()
    files = [theirs / "thesis.txt", tmp_path / ".theirs.flexgen-lock", elsewhere / "file"]
    for file in files:
        file.write_text("mine")
    (tmp_path / ".made.flexgen-building").symlink_to(elsewhere / "made")
    (tmp_path / ".made.flexgen-lock").touch()
    (tmp_path / ".more.flexgen-lock").symlink_to(elsewhere / "file")
    assert build(tmp_path / "other")
    for name, says in (
        ("theirs", "is in the way"),
        ("made", "is in the way"),
        ("more", "cannot be written to"),
    ):
        with pytest.raises(UsageError, match=rf"--offload-dir .* ?{says}"):
            build(tmp_path / name)
    assert (elsewhere / "made" / MARK).is_file()
    assert [file.read_text() for file in files] == ["mine"] * 3


# ---- fingerprints, and the files of which they are taken


@pytest.mark.parametrize("whole", [2**20, 1000])
def test_a_copy_is_the_same_and_other_weights_are_not(
    whole: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large files by pieces: what changes a matrix changes some piece."""
    monkeypatch.setattr(atomic_folder, "WHOLE_BYTES", whole)
    path = tmp_path / "model.safetensors"
    copy = tmp_path / "copy" / "model.safetensors"
    data = bytes(i * 7 % 251 for i in range(600_000))
    path.write_bytes(data)
    copy.parent.mkdir()
    shutil.copyfile(path, copy)
    first = sample_digest([path])
    assert first == sample_digest([copy]) and len(first) == 16
    for at in (0, 300_000, 580_000):
        path.write_bytes(data[:at] + bytes(20_000) + data[at + 20_000 :])
        assert sample_digest([path]) != first
    path.write_bytes(data + b"x")
    assert sample_digest([path]) != first


def test_the_files_with_the_weights(tmp_path: Path) -> None:
    assert weight_files(tmp_path) == []
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text('{"weight_map": {"b": "2.bin", "a": "1.bin", "c": "2.bin"}}')
    (tmp_path / "1.bin").touch()
    with pytest.raises(UsageError, match=r"2.bin: pytorch_model.bin.index.json lists this shard"):
        weight_files(tmp_path)
    (tmp_path / "2.bin").touch()
    assert weight_files(tmp_path) == [tmp_path / "1.bin", tmp_path / "2.bin"]
    (tmp_path / "model.safetensors").touch()
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
