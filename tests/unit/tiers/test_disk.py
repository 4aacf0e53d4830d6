"""Files around the page cache, where O_DIRECT is refused too, and a run's own scratch folder."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
import torch

from flexgen_h2o.core.errors import DoesNotFitError, TransferError, UsageError
from flexgen_h2o.core.files import MARK
from flexgen_h2o.core.units import PAGE, round_up
from flexgen_h2o.tiers.device import host_buffer
from flexgen_h2o.tiers.disk import DirectFile, Scratch

SIZES = [1, PAGE, 3 * PAGE + 77]
Opened = Callable[..., DirectFile]


def content(nbytes: int) -> bytes:
    return bytes(torch.randint(0, 256, (nbytes,), dtype=torch.uint8).tolist())


def filled(data: bytes) -> torch.Tensor:
    buffer = host_buffer(len(data))
    return buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))


@pytest.fixture(params=["", "open", "preadv pwritev"])
def anywhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs with O_DIRECT, and where the file system refuses it, when files are opened or
    only when they are used."""
    for name in request.param.split():
        call = getattr(os, name)

        def refusing(*args: Any, name: str = name, call: Any = call) -> Any:
            flags = args[1] if name == "open" else fcntl.fcntl(args[0], fcntl.F_GETFL)
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return call(*args)

        refusing.__name__ = name
        monkeypatch.setattr(os, name, refusing)


@pytest.fixture
def opened() -> Iterator[Opened]:
    with ExitStack() as files:
        yield lambda path, writable=False: files.enter_context(closing(DirectFile(path, writable)))


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("nbytes", SIZES)
def test_what_is_written_is_read_back(tmp_path: Path, opened: Opened, nbytes: int) -> None:
    """The end of a file may be short."""
    (tmp_path / "f").write_bytes(b"x" * (2 * PAGE + nbytes))
    file = opened(tmp_path / "f", writable=True)
    data = content(PAGE)
    assert file.write(filled(data), PAGE) == PAGE
    expected = b"x" * PAGE + data + b"x" * nbytes
    assert (tmp_path / "f").read_bytes() == expected
    buffer = host_buffer(round_up(len(expected), PAGE) + PAGE)
    assert file.read(buffer, 0, len(expected)) == len(expected)
    assert bytes(buffer[: len(expected)].tolist()) == expected


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("have", [0, 2 * PAGE - 1])
def test_a_truncated_file_is_an_error_with_its_name_and_size(
    tmp_path: Path, opened: Opened, have: int
) -> None:
    (tmp_path / "f").write_bytes(content(have))
    with pytest.raises(
        TransferError, match=f"{tmp_path / 'f'}: ends at byte {have}, {2 * PAGE} are needed"
    ):
        opened(tmp_path / "f").read(host_buffer(2 * PAGE), 0, 2 * PAGE)


def test_what_comes_in_pieces_is_put_together(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel may move less than it was asked for."""
    data = content(3 * PAGE)
    preadv = os.preadv
    pwritev = os.pwritev
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:PAGE]], at))
    monkeypatch.setattr(os, "pwritev", lambda fd, views, at: pwritev(fd, [views[0][:PAGE]], at))
    (tmp_path / "f").touch()
    file = opened(tmp_path / "f", writable=True)
    source = filled(data)
    assert file.write(source, 0) == 3 * PAGE
    assert (tmp_path / "f").read_bytes() == data
    source.zero_()
    assert file.read(source, 0, 3 * PAGE) == 3 * PAGE and bytes(source.tolist()) == data


@pytest.mark.parametrize(
    ("number", "kind", "says"),
    [
        (errno.ENOSPC, DoesNotFitError, "the disk is full.*--offload-dir"),
        (errno.EIO, TransferError, "pwritev failed"),
    ],
)
def test_a_failing_write_names_the_place(
    tmp_path: Path,
    opened: Opened,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[Exception],
    says: str,
) -> None:
    def pwritev(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    (tmp_path / "f").touch()
    file = opened(tmp_path / "f", writable=True)
    monkeypatch.setattr(os, "pwritev", pwritev)
    with pytest.raises(kind, match=f"{tmp_path}.*{says}"):
        file.write(host_buffer(PAGE), 0)


def test_what_cannot_be_opened_is_unusable_input(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{tmp_path / 'none'}: cannot be opened .No such file"):
        DirectFile(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=f"--offload-dir {tmp_path / 'file'}: cannot be used"):
        Scratch(tmp_path / "file")


def test_two_threads_refused_at_once_both_go_on_buffered(
    tmp_path: Path, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread turned `direct` off while this one's request was being refused."""
    (tmp_path / "f").write_bytes(content(PAGE))
    file = opened(tmp_path / "f")
    preadv = os.preadv
    calls = [0]

    def refused_once(*args: Any) -> int:
        calls[0] += 1
        if calls[0] == 1:
            file.direct = False
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return preadv(*args)

    refused_once.__name__ = "preadv"
    monkeypatch.setattr(os, "preadv", refused_once)
    assert file.read(host_buffer(PAGE), 0, PAGE) == PAGE


# ---- scratch folders


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


def test_a_full_disk_is_said_before_the_run(
    scratch: Scratch, offload: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def posix_fallocate(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", posix_fallocate)
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(
        DoesNotFitError, match=f"--offload-dir {offload}: 3.00 GiB are needed.*free.*--percent"
    ):
        scratch.create("cache.bin", 3 * 2**30)
    assert len(os.listdir("/proc/self/fd")) == open_before
