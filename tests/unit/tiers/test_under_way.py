"""Copies that a worker has begun and goes on beside: how many, what is done when, and what spans
say of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.core.units import STAGING_SLOTS, TRANSFER_CHUNK
from flexgen_h2o.tiers.device import StandInDevice, host_buffer
from flexgen_h2o.tiers.disk import DirectFile, FileRange
from flexgen_h2o.tiers.stream import Done, Waitable
from flexgen_h2o.tiers.transfers import MAX_UNDER_WAY, Lanes, Mover


class _Copy(Waitable):
    """Is done once the gate is open."""

    def __init__(self, gate: threading.Event) -> None:
        self._gate = gate

    def wait(self) -> None:
        assert self._gate.wait(60)

    @property
    def is_done(self) -> bool:
        return self._gate.is_set()


class _Late(_Copy):
    """As a fence of a card, which a thread passes that makes the card wait."""

    def wait_on_card(self) -> None:
        pass


class _Gated(StandInDevice):
    """Whose copies each end when their own gate is opened."""

    def __init__(self) -> None:
        self.gates = [threading.Event() for _ in range(MAX_UNDER_WAY + 2)]
        self.begun = 0

    def start_copy(self, dst: torch.Tensor, src: torch.Tensor) -> _Copy:
        self.begun += 1
        return _Copy(self.gates[self.begun - 1])

    def open(self, count: int) -> None:
        for gate in self.gates[:count]:
            gate.set()


@contextmanager
def gated(pins: bool = True) -> Iterator[tuple[_Gated, Mover]]:
    device = _Gated()
    lanes = Lanes({"h2d": 1, "d2h": 1, "disk_read": 1}, Timeline())
    lanes.timeline.keep_spans = True
    try:
        yield device, Mover(device, lanes, pins)
    finally:
        device.open(len(device.gates))
        lanes.close()


def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        time.sleep(0.001)
    raise AssertionError("it does not come")


def test_as_many_reads_as_slots_go_on_beside_copies(tmp_path: Path) -> None:
    nbytes = (STAGING_SLOTS + 2) * TRANSFER_CHUNK
    (tmp_path / "bytes").write_bytes(bytes(nbytes))
    with gated() as (device, mover), closing(DirectFile(tmp_path / "bytes")) as file:
        done = mover.read("r", host_buffer(nbytes), "device", FileRange(file, 0, nbytes))
        until(lambda: device.begun == STAGING_SLOTS)
        time.sleep(0.02)
        assert device.begun == STAGING_SLOTS and not done.is_done
        device.open(len(device.gates))
        done.wait()


def test_a_worker_goes_on_beside_copies_that_are_under_way() -> None:
    """But not beside any number of them; each operation is done once its copy is."""
    t = torch.zeros(2)
    with gated() as (device, mover):
        held = Done()
        done = [mover.copy("h2d", "c", t, t, [held]) for _ in device.gates]
        held.finish_one()
        until(lambda: device.begun == MAX_UNDER_WAY)
        time.sleep(0.02)
        assert device.begun == MAX_UNDER_WAY and [one.is_started for one in done[-3:]] == [
            True,
            False,
            False,
        ]
        assert not any(one.is_done for one in done)
        device.open(2)
        done[1].wait()
        until(lambda: device.begun == len(done))
        device.open(len(done))
        for one in done:
            one.wait()


def test_a_thread_goes_on_where_the_card_waits() -> None:
    """Once the card knows what for; an error is raised as ever."""
    done = Done(2)
    gate = threading.Event()
    waiter = threading.Thread(target=done.wait_on_card, daemon=True)
    waiter.start()
    done.finish_one(begun=[_Late(gate)])
    waiter.join(0.05)
    assert waiter.is_alive() and not done.is_started
    done.finish_one()
    waiter.join(10)
    assert not waiter.is_alive() and done.is_started and not done.is_done
    failed = Done()
    failed.finish_one(OSError("why"))
    with pytest.raises(OSError, match="why"):
        failed.wait_on_card()
    on_host = Done()
    on_host.finish_one(begun=[copy := _Copy(gate)])
    waiter = threading.Thread(target=on_host.wait_on_card, daemon=True)
    waiter.start()
    waiter.join(0.05)
    assert waiter.is_alive() and not copy.is_done  # what is not on a card it waits for itself
    gate.set()
    waiter.join(10)
    assert not waiter.is_alive()


def test_memory_that_is_not_pinned_is_copied_one_after_another() -> None:
    t = torch.zeros(2)
    with gated(pins=False) as (device, mover):
        done = [mover.copy("h2d", "c", t, t) for _ in range(2)]
        until(lambda: device.begun == 1)
        time.sleep(0.02)
        assert device.begun == 1 and not done[0].is_started


def test_an_error_of_a_copy_under_way_ends_the_lanes() -> None:
    class Broken(_Copy):
        def wait(self) -> None:
            raise OSError("of the card")

    t = torch.zeros(2)
    with gated() as (device, mover), pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "start_copy", lambda dst, src: Broken(threading.Event()))
        for one in (mover.copy("h2d", "c", t, t), mover.copy("h2d", "c", t, t)):
            with pytest.raises(OSError, match="of the card"):
                one.wait()
        with pytest.raises(OSError, match="of the card"):
            until(lambda: mover.lanes.submit("d2h", "x", [lambda: 0]).wait() is not None)
