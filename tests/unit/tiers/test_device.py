"""The device tier without a card: buffers, which device is opened, and budgets that nobody gave."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import threading
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch

from flexgen_h2o.core.config import TIERS, MemoryBudget
from flexgen_h2o.core.errors import DoesNotFitError, UsageError
from flexgen_h2o.core.units import GIB, PAGE, DiskBudget
from flexgen_h2o.tiers import device as machine
from flexgen_h2o.tiers.device import (
    HUGE_PAGE,
    CudaDevice,
    Device,
    HostDevice,
    NewFiles,
    StandInDevice,
    host_buffer,
    less_new_files,
    open_device,
    resolve_budgets,
)


@pytest.mark.parametrize("nbytes", [0, PAGE + 1, HUGE_PAGE, 2 * HUGE_PAGE + 5])
def test_a_buffer_is_aligned_zero_and_all_its_own(nbytes: int) -> None:
    buffer = host_buffer(nbytes)
    align = HUGE_PAGE if nbytes >= HUGE_PAGE else PAGE
    assert (buffer.dtype, buffer.shape, buffer.is_contiguous()) == (torch.uint8, (nbytes,), True)
    assert nbytes == 0 or buffer.data_ptr() % align == 0
    assert not bool(buffer.any())
    buffer.fill_(255)
    assert int(buffer.sum(dtype=torch.int64)) == 255 * nbytes


def test_a_buffer_that_the_machine_cannot_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """What commands answer with one line, not what a broken file is."""
    monkeypatch.setattr(
        mmap, "mmap", MagicMock(side_effect=OSError(errno.ENOMEM, "Cannot allocate memory"))
    )
    with pytest.raises(MemoryError, match=r"4\.00 KiB: Cannot allocate memory"):
        host_buffer(PAGE)


# ---- devices


@pytest.mark.parametrize(
    ("name", "says"), [("cuda", "no CUDA device"), ("tpu", "'tpu' is not one of auto, cpu, cuda")]
)
def test_a_device_that_is_not_there_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=f"--device.*{says}"):
        open_device(name, separate_budget=False)


def test_what_a_cpu_computes_in() -> None:
    """As asked, else as stored; never in half precision."""
    asked = [(None, "float32"), ("float32", "float16"), (None, "float16"), ("bfloat16", "float32")]
    found = [HostDevice().compute_dtype(*one) for one in asked]
    assert found == ["float32", "float32", "bfloat16", "bfloat16"]
    with pytest.raises(UsageError, match=r"--dtype float16: .*bfloat16"):
        HostDevice().compute_dtype("float16", "float16")


class _Runtime:
    """CUDA's runtime, as far as pinning goes. used: the device that each call found current."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.pinned: dict[int, int] = {}
        self.used: list[torch.device] = []
        self._current = [torch.device("cuda", 0)]

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self._current.append(device)
        yield
        self._current.pop()

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.used.append(self._current[-1])
        if not self.code:
            self.pinned[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address: int) -> None:
        self.used.append(self._current[-1])
        del self.pinned[address]


def _card_with(runtime: _Runtime, monkeypatch: pytest.MonkeyPatch, number: int = 0) -> CudaDevice:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: number)
    monkeypatch.setattr(torch.cuda, "device", runtime.device)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return CudaDevice()


def test_a_worker_pins_memory_for_its_own_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card is current for one thread: in another one the first is, which belongs to another
    process. Memory that stays registered would pin whatever is mapped there next."""
    runtime = _Runtime(0)
    own = torch.device("cuda", 3)
    card = _card_with(runtime, monkeypatch, own.index)
    made = list[torch.Tensor]()
    worker = threading.Thread(target=lambda: made.append(card.host_staging(3 * PAGE)))
    worker.start()
    worker.join()
    assert runtime.pinned == {made[0].data_ptr(): 3 * PAGE} and runtime.used == [own]
    made.clear()
    assert not runtime.pinned and runtime.used == [own, own]


def test_what_an_old_card_computes_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision in place of a bfloat16 that is stored; none that is asked for, or measured."""
    card = _card_with(_Runtime(0), monkeypatch)
    for capability, stored in (((7, 5), "float16"), ((8, 0), "bfloat16")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert card.dtypes[0] == "float16" and ("bfloat16" in card.dtypes) is (stored == "bfloat16")
        assert card.compute_dtype(None, "bfloat16") == stored
    assert card.compute_dtype("bfloat16", "float32") == "bfloat16"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    with pytest.raises(UsageError, match=r"--dtype bfloat16: .*float16"):
        card.compute_dtype("bfloat16", "float16")


def test_who_copies_sleeps_until_the_bytes_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    event = MagicMock()
    card = _card_with(_Runtime(0), monkeypatch)
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(card, "copy_stream", nullcontext)
    target = torch.zeros(3)
    card.copy(target, torch.ones(3))
    event.assert_called_once_with(blocking=True)
    event.return_value.synchronize.assert_called_once_with()
    assert target.tolist() == [1, 1, 1]
    card.fence().wait_on_card()
    event.return_value.wait.assert_called_once_with()


def test_memory_that_cannot_be_pinned_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--pin-weight 0"):
        _card_with(_Runtime(2), monkeypatch).host_staging(PAGE)


# ---- budgets

Disk = namedtuple("Disk", "free")


@pytest.fixture
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 GiB of RAM and 500 GiB of disk free."""
    monkeypatch.setattr(machine, "free_host_bytes", lambda: 100 * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Disk(500 * GIB))


class CardOf4GiB(StandInDevice):
    def free_bytes(self) -> int:
        return 4 * GIB


GIVEN = MemoryBudget("1GiB", "2GiB", "3GiB")


@pytest.mark.usefixtures("_machine")
@pytest.mark.parametrize(
    ("budget", "device", "found"),
    [
        (GIVEN, StandInDevice(), (1, 2, 3)),
        (GIVEN, HostDevice(), (0, 2, 3)),
        (MemoryBudget(), HostDevice(), (0, 90, 498)),
        (MemoryBudget(), CardOf4GiB(), (3.5, 90, 498)),
        (MemoryBudget("4GiB"), CardOf4GiB(), (4, 90, 498)),
    ],
)
def test_budgets_are_those_given_or_what_is_free_less_a_margin(
    tmp_path: Path, budget: MemoryBudget, device: Device, found: tuple[float, ...]
) -> None:
    resolved = resolve_budgets(budget, device, tmp_path)
    assert tuple(resolved[tier] for tier in TIERS) == tuple(gib * GIB for gib in found)


@pytest.mark.usefixtures("_machine")
def test_no_budget_is_more_than_there_is(tmp_path: Path) -> None:
    most = resolve_budgets(MemoryBudget(host="1TiB"), HostDevice(), tmp_path)["host"]
    assert most == machine.host_memory()[0] < 2**40, "or the run would go into the wall"
    says = r"--device-mem 5\.00 GiB: the GPU has 4\.00 GiB free; give less, or end"
    with pytest.raises(DoesNotFitError, match=says):
        resolve_budgets(MemoryBudget("5GiB"), CardOf4GiB(), tmp_path)


def test_the_disk_is_the_one_of_the_folder_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def disk_usage(folder: Path) -> Disk:
        asked.append(folder)
        return Disk(500 * GIB)

    monkeypatch.setattr(shutil, "disk_usage", disk_usage)
    resolve_budgets(MemoryBudget(host=1), HostDevice(), tmp_path / "not" / "yet")
    monkeypatch.chdir(tmp_path)
    resolve_budgets(MemoryBudget(host=1), HostDevice(), Path("not/yet"))
    assert asked == [tmp_path, tmp_path]


# Bytes of new files in the offload folder and in a folder that may be on another disk; is it; the
# budget; is it given; what is left of it (None: the files do not fit).
NEW_FILES = [
    (3, 2, False, 8, False, (3, 5)),
    (3, 2, True, 8, False, (5, 7)),
    (3, 2, False, 4, True, (4, 5)),
    (3, 2, False, 7, True, (5, 5)),
    (3, 8, False, 8, False, None),
    (3, 8, True, 8, False, (5, 7)),
    (11, 0, True, 8, False, None),
]


@pytest.mark.parametrize(("here", "there", "is_other", "disk", "is_given", "left"), NEW_FILES)
def test_files_that_are_written_before_a_run_take_their_disk(
    here: int,
    there: int,
    is_other: bool,
    disk: int,
    is_given: bool,
    left: tuple[int, int] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Disk(10 * GIB))
    stat = os.stat

    def on_disk(path: Path, **more: bool) -> os.stat_result:
        found = stat(path, **more)
        number = 1 if is_other and Path(path).name == "other" else 0
        return os.stat_result((*found[:2], number, *found[3:]))

    monkeypatch.setattr(os, "stat", on_disk)
    folders = {"weights": here, "other": there}
    files = [NewFiles(n, tmp_path / n, g * GIB, "do that") for n, g in folders.items()]
    budget = DiskBudget(disk * GIB, 10 * GIB)
    if left is None:
        with pytest.raises(DoesNotFitError, match=r"GiB are free, .* too little; .*do that"):
            less_new_files(budget, tmp_path, files, is_given)
        return
    found = less_new_files(budget, tmp_path, files, is_given)
    assert (found, found.free) == tuple(gib * GIB for gib in left)
