"""Lanes, on which one failure reaches every waiter, and the mover, whose paths all bring the same
values."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.core.errors import FlexgenError
from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.core.units import PAGE, STAGING_BYTES, STAGING_SLOTS
from flexgen_h2o.tiers import transfers as mover_module
from flexgen_h2o.tiers.device import StandInDevice, host_buffer
from flexgen_h2o.tiers.disk import DirectFile, FileRange
from flexgen_h2o.tiers.stream import Done, Waitable, wait_all
from flexgen_h2o.tiers.transfers import Lanes, Memory, Mover

THREADS = {"disk_read": 2, "disk_write": 1, "h2d": 1}


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    opened = Lanes(THREADS, Timeline())
    yield opened
    opened.close()


@pytest.fixture
def gate(lanes: Lanes) -> Iterator[Done]:
    """Holds jobs back. Opened at the end, or a test that fails would leave the lanes waiting for
    it."""
    opened = Done()
    yield opened
    opened.finish_one()


def appends(log: list[object], what: object) -> Callable[[], int]:
    def job() -> int:
        log.append(what)
        return 1

    return job


def fails(error: BaseException) -> Callable[[], int]:
    def job() -> int:
        raise error

    return job


def test_the_first_error_ends_a_done_at_once_and_is_the_one_raised() -> None:
    done = Done(3)
    done.finish_one(OSError("first"))
    assert done.is_done
    done.finish_one(OSError("second"))
    for _ in range(2):
        with pytest.raises(OSError, match="first"):
            done.wait()


# ---- lanes


def test_the_first_failure_reaches_everyone_who_waits(lanes: Lanes, gate: Done) -> None:
    """Also who asks after the lanes were closed."""
    log: list[object] = []
    failed = lanes.submit("disk_read", "x", [fails(OSError("the first one"))], [gate])
    behind = lanes.submit("h2d", "x", [appends(log, "behind")], [failed])
    queued = lanes.submit("h2d", "x", [appends(log, "queued")])
    across = lanes.submit("disk_write", "x", [appends(log, "across")], [queued])
    gate.finish_one()
    with pytest.raises(OSError, match="the first one"):
        failed.wait()
    later = lanes.submit("h2d", "x", [appends(log, "later")])
    lanes.close()
    lanes.close()  # again, which does nothing
    for done in (behind, queued, across, later, lanes.submit("h2d", "late", [lambda: 0])):
        with pytest.raises(OSError, match="the first one"):
            done.wait()
    assert log == [] and lanes.bytes_moved == dict.fromkeys(THREADS, 0)


def test_kv_goes_to_the_card_while_weights_wait_for_their_space(lanes: Lanes, gate: Done) -> None:
    log: list[object] = []
    weights = [lanes.submit("h2d", "load_weight", [appends(log, i)], [gate]) for i in range(3)]
    lanes.submit("h2d", "load_cache", [appends(log, "kv")]).wait()
    assert log == ["kv"]
    gate.finish_one()
    wait_all(weights)
    assert log == ["kv", 0, 1, 2] and lanes.bytes_moved["h2d"] == 4


def test_close_drops_what_is_queued_and_ends_the_threads() -> None:
    before = set(threading.enumerate())
    lanes = Lanes(THREADS, Timeline())
    log = []
    gate = Done()
    running = threading.Event()

    def slow() -> int:
        running.set()
        gate.wait()
        log.append("slow")
        return 0

    slow_done = lanes.submit("h2d", "x", [slow])
    dropped = [lanes.submit("h2d", "x", [appends(log, "dropped")]) for _ in range(50)]
    assert running.wait(10)
    closer = threading.Thread(target=lanes.close)
    closer.start()
    while lanes._failure is None:  # until close has begun
        time.sleep(0.001)
    gate.finish_one()
    closer.join(10)
    assert not closer.is_alive() and set(threading.enumerate()) <= before
    assert log == ["slow"] and slow_done.is_done and all(done.is_done for done in dropped)
    with pytest.raises(FlexgenError, match="was closed while it generated"):
        dropped[0].wait()


# ---- the mover


CHUNK = 2 * PAGE  # of these tests, so that a few pages are several requests
FILE_BYTES = 40 * PAGE + 123
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


class CountingDevice(StandInDevice):
    """Counts copies, and staging buffers by thread."""

    def __init__(self) -> None:
        self.copies = 0
        self.staging: list[tuple[int, int]] = []

    def start_copy(self, dst: torch.Tensor, src: torch.Tensor) -> Waitable:
        self.copies += 1
        return super().start_copy(dst, src)

    def host_staging(self, nbytes: int) -> torch.Tensor:
        self.staging.append((threading.get_ident(), nbytes))
        return super().host_staging(nbytes)


@dataclass
class Room:
    """A mover, its device, a file of known bytes and one to write to."""

    mover: Mover
    device: CountingDevice
    source: DirectFile
    target: DirectFile
    data: torch.Tensor = field(repr=False)


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Room]:
    folder: Path = tmp_path_factory.mktemp("mover")
    # Exponents that all three dtypes have, so that bytes read as numbers are no infinities:
    # conversions stay exact.
    values = (torch.randint(-60, 60, (FILE_BYTES,), generator=torch.Generator().manual_seed(1))).to(
        torch.int8
    )
    data = values.view(torch.uint8)
    (folder / "source").write_bytes(bytes(data.tolist()))
    (folder / "target").write_bytes(bytes(FILE_BYTES))
    lanes = Lanes({"disk_read": 2, "disk_write": 1, "h2d": 1, "d2h": 1}, Timeline())
    device = CountingDevice()
    files = DirectFile(folder / "source"), DirectFile(folder / "target", writable=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mover_module, "TRANSFER_CHUNK", CHUNK)
        yield Room(Mover(device, lanes), device, *files, data)
    lanes.close()
    for file in files:
        file.close()


def misaligned(nbytes: int, shift: int) -> torch.Tensor:
    """A uint8 buffer of `nbytes` that starts `shift` bytes after a page."""
    return host_buffer(nbytes + shift)[shift:]


@given(
    st.integers(0, 20 * PAGE),
    st.integers(1, 10 * PAGE),
    st.sampled_from([0, 64, PAGE]),
    st.sampled_from(["host", "device"]),
    st.sampled_from([torch.uint8, *DTYPES]),
    st.sampled_from(DTYPES),
)
def test_any_bytes_come_and_are_converted_on_the_way(
    room: Room,
    offset: int,
    count: int,
    shift: int,
    memory: Memory,
    stored: torch.dtype,
    wanted: torch.dtype,
) -> None:
    """safetensors promises no alignment: an odd offset of the file is as good as any, and does not
    cost the file its direct reads."""
    wanted = torch.uint8 if stored == torch.uint8 else wanted
    count //= stored.itemsize if count >= stored.itemsize else 1
    nbytes = count * stored.itemsize
    is_direct = room.source.direct
    raw = room.data[offset : offset + nbytes].clone()
    buffer = misaligned(count * wanted.itemsize, shift).view(wanted)
    room.mover.read("r", buffer, memory, FileRange(room.source, offset, nbytes, stored)).wait()
    assert torch.equal(buffer.view(torch.uint8), raw.view(stored).to(wanted).view(torch.uint8))
    assert room.source.direct is is_direct


def test_whole_pages_into_whole_pages_are_read_in_place(room: Room) -> None:
    buffer = host_buffer(5 * PAGE)
    copies = room.device.copies
    before = room.mover.lanes.bytes_moved["disk_read"]
    room.mover.read("r", buffer, "host", FileRange(room.source, 3 * PAGE, 4 * PAGE + 7)).wait()
    assert room.device.copies == copies  # nothing was staged
    assert torch.equal(buffer, room.data[3 * PAGE : 8 * PAGE])
    assert room.mover.lanes.bytes_moved["disk_read"] - before == 5 * PAGE
    room.mover.read("r", buffer[1:], "host", FileRange(room.source, 3 * PAGE, 4 * PAGE)).wait()
    assert room.device.copies > copies


@pytest.mark.parametrize("near", [0, PAGE, 2**17])
@given(st.sets(st.integers(0, 300), min_size=1, max_size=9), st.sampled_from(DTYPES))
def test_rows_of_a_table_come_each_to_its_place(
    room: Room, near: int, wanted: set[int], dtype: torch.dtype
) -> None:
    """What lies between rows that are near each other is read with them, and nothing else."""
    table = FileRange(room.source, 37, 500, dtype)
    rows = [(torch.empty(table.nbytes // dtype.itemsize, dtype=dtype), i) for i in sorted(wanted)]
    before = room.mover.lanes.bytes_moved["disk_read"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mover_module, "NEAR_BYTES", near)
        room.mover.read_rows("look_up_weight", rows, table).wait()
    for row, i in rows:
        start = table.offset + i * table.nbytes
        raw = room.data[start : start + table.nbytes]
        assert torch.equal(row.view(torch.uint8), raw)
    gaps = sum(b - a - 1 for (_, a), (_, b) in pairwise(rows) if (b - a - 1) * table.nbytes <= near)
    read = room.mover.lanes.bytes_moved["disk_read"] - before
    assert read <= (len(rows) + gaps) * table.nbytes + 2 * PAGE * len(rows)


def test_every_kind_of_traffic_waits_for_what_it_comes_after(room: Room) -> None:
    gate = Done()
    buffer = host_buffer(PAGE)
    t = torch.zeros(1, 2, 3, 4)
    slots = torch.zeros(2, dtype=torch.int64)
    started = [
        room.mover.read("r", buffer, "host", FileRange(room.source, 0, PAGE), [gate]),
        room.mover.write("w", room.target, 0, buffer, "host", [gate]),
        room.mover.copy("h2d", "c", t, t, [gate]),
        room.mover.copy_kv_entries("c", [(t, t)], slots, [gate]),
    ]
    time.sleep(0.03)
    early = [done.is_done for done in started]
    gate.finish_one()
    wait_all(started)
    assert not any(early)


def test_a_thread_takes_one_staging_buffer_of_the_size_that_is_planned(room: Room) -> None:
    for _ in range(20):
        room.mover.read(
            "r", misaligned(5 * PAGE, 1), "host", FileRange(room.source, 1, 5 * PAGE)
        ).wait()
        room.mover.write("w", room.target, 0, misaligned(PAGE, 1), "device").wait()
    threads = [thread for thread, _ in room.device.staging]
    assert len(set(threads)) == len(threads) <= 4
    assert {nbytes for _, nbytes in room.device.staging} == {
        STAGING_BYTES,
        STAGING_SLOTS * STAGING_BYTES,
    }
