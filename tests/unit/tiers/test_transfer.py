"""Lanes: order, events across lanes, one failure that reaches every waiter, and an end without a hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from flexgen_h2o.core.timeline import Timeline
from flexgen_h2o.tiers.stream import NOTHING, Done, wait_all
from flexgen_h2o.tiers.transfers import Lanes

pytestmark = pytest.mark.timeout(30)

THREADS = {"disk_read": 2, "disk_write": 1, "h2d": 1}


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    opened = Lanes(THREADS, Timeline())
    yield opened
    opened.close()


@pytest.fixture
def gate(lanes: Lanes) -> Iterator[Done]:
    """Holds jobs back. Opened at the end, or a test that fails would leave the lanes waiting for it."""
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


# ---- events


def test_done_waits_for_all_its_parts() -> None:
    done = Done(2)
    done.finish_one()
    assert not done.is_done
    done.finish_one()
    assert done.is_done
    done.wait()


def test_nothing_is_done_and_stays_done() -> None:
    assert NOTHING.is_done and Done(0).is_done
    NOTHING.wait()


def test_the_first_error_ends_a_done_at_once_and_is_the_one_raised() -> None:
    done = Done(3)
    done.finish_one(OSError("first"))
    assert done.is_done
    done.finish_one(OSError("second"))
    for _ in range(2):
        with pytest.raises(OSError, match="first"):
            done.wait()


def test_wait_all_raises_what_any_of_them_ended_with() -> None:
    bad = Done()
    bad.finish_one(OSError("bad"))
    with pytest.raises(OSError, match="bad"):
        wait_all([NOTHING, bad])


# ---- lanes


def test_one_thread_keeps_the_order_of_its_queue(lanes: Lanes) -> None:
    log: list[object] = []
    done = [lanes.submit("h2d", "x", [appends(log, (i, part)) for part in range(3)]) for i in range(20)]
    wait_all(done)
    assert log == [(i, part) for i in range(20) for part in range(3)]


def test_two_threads_work_at_the_same_time(lanes: Lanes) -> None:
    meeting = threading.Barrier(2, timeout=10)

    def job() -> int:
        meeting.wait()
        return 0

    lanes.submit("disk_read", "x", [job, job]).wait()


def test_an_operation_starts_after_what_it_names_on_another_lane(lanes: Lanes, gate: Done) -> None:
    log: list[object] = []
    read = lanes.submit("disk_read", "read", [appends(log, "read"), appends(log, "read")], [gate])
    copied = lanes.submit("h2d", "copy", [appends(log, "copy")], [read])
    written = lanes.submit("disk_write", "write", [appends(log, "write")], [copied, read])
    time.sleep(0.02)
    assert log == [] and not written.is_done
    gate.finish_one()
    written.wait()
    assert log == ["read", "read", "copy", "write"]


def test_bytes_and_time_are_counted_by_lane(lanes: Lanes) -> None:
    wait_all([lanes.submit("disk_read", "load", [lambda: 5, lambda: 7]), lanes.submit("h2d", "copy", [lambda: 11])])
    assert lanes.bytes_moved == {"disk_read": 12, "disk_write": 0, "h2d": 11}
    assert lanes.timeline.seconds("disk_read", "load") > 0 == lanes.timeline.seconds("disk_write")


def test_time_spent_waiting_is_not_time_spent_moving(lanes: Lanes, gate: Done) -> None:
    done = lanes.submit("h2d", "copy", [lambda: 1], [gate])
    time.sleep(0.1)
    gate.finish_one()
    done.wait()
    assert lanes.timeline.seconds("h2d") < 0.08


def test_workers_are_in_inference_mode_like_the_compute_thread(lanes: Lanes) -> None:
    modes: list[object] = []

    def job() -> int:
        modes.append(torch.is_inference_mode_enabled())
        return 0

    lanes.submit("h2d", "x", [job]).wait()
    assert modes == [True]


# ---- failure


def test_the_first_failure_reaches_everyone_who_waits(lanes: Lanes, gate: Done) -> None:
    log: list[object] = []
    failed = lanes.submit("disk_read", "x", [fails(OSError("the first one"))], [gate])
    behind = lanes.submit("h2d", "x", [appends(log, "behind")], [failed])
    queued = lanes.submit("h2d", "x", [appends(log, "queued")])
    across = lanes.submit("disk_write", "x", [appends(log, "across")], [queued])
    gate.finish_one()
    for done in (failed, behind, queued, across):
        with pytest.raises(OSError, match="the first one"):
            done.wait()
    with pytest.raises(OSError, match="the first one"):
        lanes.submit("h2d", "x", [appends(log, "later")]).wait()
    assert log == [] and lanes.bytes_moved == dict.fromkeys(THREADS, 0)


def test_later_failures_do_not_hide_the_first(lanes: Lanes) -> None:
    first = lanes.submit("disk_write", "x", [fails(OSError("first"))])
    with pytest.raises(OSError, match="first"):
        first.wait()
    second = lanes.submit("h2d", "x", [fails(OSError("second"))])
    with pytest.raises(OSError, match="first"):
        second.wait()


def test_of_two_that_fail_side_by_side_the_first_is_the_reason(lanes: Lanes) -> None:
    running, go_on = threading.Event(), threading.Event()

    def fails_late() -> int:
        running.set()
        go_on.wait(10)
        raise OSError("second")

    late = lanes.submit("disk_read", "x", [fails_late])
    assert running.wait(10)
    with pytest.raises(OSError, match="first"):
        lanes.submit("h2d", "x", [fails(OSError("first"))]).wait()
    go_on.set()
    with pytest.raises(OSError, match="first"):
        late.wait()


def test_even_an_exit_inside_a_job_is_a_failure_not_a_dead_thread(lanes: Lanes) -> None:
    with pytest.raises(SystemExit):
        lanes.submit("h2d", "x", [fails(SystemExit(3))]).wait()
    with pytest.raises(SystemExit):
        lanes.submit("h2d", "x", [lambda: 0]).wait()


def test_a_job_that_waits_for_a_failed_one_fails_with_it(lanes: Lanes) -> None:
    bad = Done()
    bad.finish_one(OSError("elsewhere"))
    with pytest.raises(OSError, match="elsewhere"):
        lanes.submit("h2d", "x", [lambda: 0], [bad]).wait()


# ---- the end


def test_close_drops_what_is_queued_and_ends_the_threads() -> None:
    before = set(threading.enumerate())
    lanes, log, gate, running = Lanes(THREADS, Timeline()), [], Done(), threading.Event()

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
    with pytest.raises(Exception, match="the run has ended"):
        dropped[0].wait()


def test_close_after_a_failure_keeps_the_failure() -> None:
    lanes = Lanes(THREADS, Timeline())
    bad = lanes.submit("h2d", "x", [fails(OSError("why"))])
    with pytest.raises(OSError, match="why"):
        bad.wait()
    behind = lanes.submit("disk_read", "x", [lambda: 0, lambda: 0])
    lanes.close()
    with pytest.raises(OSError, match="why"):
        behind.wait()


def test_close_twice_is_harmless() -> None:
    lanes = Lanes(THREADS, Timeline())
    lanes.close()
    lanes.close()


def test_what_is_submitted_after_the_end_is_refused_and_not_waited_for() -> None:
    lanes = Lanes({"h2d": 1}, Timeline())
    lanes.close()
    with pytest.raises(Exception, match="the run has ended"):
        lanes.submit("h2d", "late", [lambda: 0]).wait()
