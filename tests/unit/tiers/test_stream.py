"""Shares into rows; rings, whose live regions never overlap; streams, which load in order, never
more than `ahead`."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle, islice

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from flexgen_h2o.core.config import TIERS, Policy
from flexgen_h2o.core.units import PAGE
from flexgen_h2o.tiers.stream import Done, Region, Ring, Shares, Stream, split_rows, streamed_keys

# ---- shares into rows

pairs = st.integers(0, 100).flatmap(lambda a: st.tuples(st.just(a), st.integers(0, 100 - a)))
shares_of = pairs.map(lambda pair: Policy(percent=(*pair, 0, 0, 0, 0)).weight_shares)


@given(st.integers(0, 5000), shares_of, st.sampled_from([1, 2, 16, 64]))
def test_all_rows_are_placed_once_near_their_share(
    count: int, shares: Shares, multiple: int
) -> None:
    parts = split_rows(count, shares, multiple)
    assert [0, *(p.end for p in parts)] == [*(p.start for p in parts), count]
    rows = {p.tier: p.rows for p in parts}
    assert [*rows] == [tier for tier in TIERS if rows.get(tier)]
    assert all(p.end % multiple == 0 for p in parts[:-1])
    for tier, share in zip(TIERS, shares, strict=True):
        assert abs(rows.get(tier, 0) - share * count) <= multiple + 1e-6
        assert share > 0 or tier not in rows


# ---- rings


@dataclass(eq=False)
class Event:
    """A user of a region that is done when the test says so."""

    is_done: bool = False

    def wait(self) -> None:
        raise AssertionError("the ring must never wait")


@dataclass
class Model:
    """What the ring must do, page by page."""

    live: list[Region] = field(default_factory=list)  # in the order they were taken
    last_users: dict[int, list[Event]] = field(default_factory=dict)

    def check_taken(self, region: Region, nbytes: int) -> None:
        assert region.start % PAGE == 0 and region.start >= 0
        size = region.data.numel()
        assert nbytes <= size == region.end - region.start < nbytes + PAGE + (nbytes == 0)
        assert all(region.end <= other.start or other.end <= region.start for other in self.live)
        users = [u for page in pages_of(region) for u in self.last_users.get(page, ())]
        assert {u for u in users if not u.is_done} <= set(region.after)
        self.live.append(region)

    def free(self, index: int, users: list[Event]) -> Region:
        region = self.live.pop(index)
        if users:
            self.last_users |= dict.fromkeys(pages_of(region), users)
        return region


def pages_of(region: Region) -> range:
    return range(region.start // PAGE, region.end // PAGE)


actions = st.lists(
    st.one_of(
        st.tuples(st.just("take"), st.integers(0, 4 * PAGE)),
        st.tuples(st.just("take"), st.integers(1, 4).map(lambda pages: pages * PAGE)),
        st.tuples(st.just("give_back"), st.integers(0, 3)),  # users
        st.tuples(st.just("give_back_newest"), st.integers(0, 3)),
        st.tuples(st.just("finish"), st.integers(0, 20)),
    ),
    max_size=60,
)


WRAPS = [("take", 2 * PAGE), ("take", PAGE), ("give_back", 0), ("take", 2 * PAGE), ("take", PAGE)]


@given(st.integers(4, 9), actions)
@example(4, WRAPS)
def test_any_history(pages: int, history: list[tuple[str, int]]) -> None:
    buffer = torch.zeros(pages * PAGE, dtype=torch.uint8)
    ring = Ring(buffer)
    model = Model()
    events = [Event(is_done=True)]
    for what, number in history:
        if what == "take":
            region = ring.take(number)
            assert region is not None or model.live, "nothing is held, and yet there is no room"
            if region is not None:
                model.check_taken(region, number)
                assert region.end <= pages * PAGE
                assert region.data.data_ptr() == buffer.data_ptr() + region.start
        elif what == "finish":
            events[number % len(events)].is_done = True
        elif model.live:
            users = [Event() for _ in range(number)]
            events += users
            ring.give_back(model.free(0 if what == "give_back" else -1, users), users)


def test_more_than_the_ring_is_an_error_not_a_wait() -> None:
    ring = Ring(torch.zeros(2 * PAGE, dtype=torch.uint8))
    assert ring.capacity == 2 * PAGE
    with pytest.raises(ValueError, match="cannot hold"):
        ring.take(2 * PAGE + 1)


# ---- streams


@dataclass
class Fake:
    """A source of pages by key; loads are done at once unless `slow`, then when the test says
    so."""

    pages: dict[int, int]
    unwanted: set[int] = field(default_factory=set)
    unready: set[int] = field(default_factory=set)
    slow: bool = False
    started: list[int] = field(default_factory=list)
    loads: dict[int, Done] = field(default_factory=dict)

    def nbytes(self, key: int) -> int:
        return self.pages[key] * PAGE

    def is_needed(self, key: int) -> bool:
        return key not in self.unwanted

    def is_ready(self, key: int) -> bool:
        return key not in self.unready

    def load(self, key: int, region: Region) -> list[Done]:
        assert all(user.is_done for user in region.after)
        region.data.fill_(key % 251)
        self.started.append(key)
        self.loads[key] = Done(1 if self.slow else 0)
        return [self.loads[key]]


def stream_of(source: Fake, ring_pages: int, ahead: int) -> Stream[int]:
    ring = Ring(torch.zeros(ring_pages * PAGE, dtype=torch.uint8))
    return Stream(ring, iter(source.pages), source, ahead)


@given(
    st.lists(st.integers(0, 3), max_size=30),
    st.sets(st.integers(0, 29)),
    st.sets(st.integers(0, 29)),
    st.integers(0, 5),
    st.integers(3, 12),
)
def test_units_come_in_order_and_never_more_than_ahead(
    sizes: list[int], unwanted: set[int], lost: set[int], ahead: int, ring_pages: int
) -> None:
    """The executor asks for each unit in order. The rows of `lost` finish when loads are ahead."""
    source = Fake(dict(enumerate(sizes)), unwanted - lost)
    stream = stream_of(source, ring_pages, ahead)
    for key, pages in source.pages.items():
        stream.prefetch()
        assert source.started == sorted(source.started)
        assert len([k for k in source.started if k >= key]) <= max(1, ahead)
        if key in lost:
            source.unwanted.add(key)
        if key in source.unwanted:
            continue
        region = stream.take(key)
        assert (region is None) == (pages == 0)
        if region is not None:
            assert region.data.numel() == pages * PAGE and bool((region.data == key).all())
            stream.give_back(region)
    assert not set(source.started) & (unwanted - lost)


def test_a_unit_that_loses_its_rows_while_it_waits_for_space_is_passed_over() -> None:
    source = Fake({0: 2, 1: 2, 2: 1})
    stream = stream_of(source, 3, 3)
    stream.prefetch()
    source.unwanted.add(1)
    stream.prefetch()
    assert source.started == [0, 2]


def test_a_unit_that_is_not_ready_holds_back_all_behind_it() -> None:
    source = Fake({0: 1, 1: 1, 2: 1}, unready={1})
    stream = stream_of(source, 8, 3)
    stream.prefetch()
    assert source.started == [0]
    stream.take(0)
    with pytest.raises(AssertionError, match="1 cannot be loaded"):
        stream.take(1)
    source.unready.clear()
    stream.prefetch()
    assert source.started == [0, 1, 2]


def blocked(call: Callable[[], object]) -> threading.Thread:
    """Begin a call that waits for something."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    return thread


def test_take_and_drain_wait_for_loads_under_way() -> None:
    source = Fake({0: 2, 1: 2, 2: 4}, slow=True)
    stream = stream_of(source, 4, 3)
    stream.prefetch()
    taken: list[Region | None] = []
    taker = blocked(lambda: taken.append(stream.take(0)))
    source.loads[0].finish_one()
    taker.join(10)
    stream.give_back(taken[0])
    drainer = blocked(stream.drain)
    source.loads[1].finish_one()
    drainer.join(10)
    assert not drainer.is_alive()
    stream.prefetch()
    assert source.started == [0, 1, 2]  # the whole ring is free again


def test_an_unwanted_unit_under_way_is_waited_for_before_its_space_is_reused() -> None:
    source = Fake({0: 1, 1: 1}, slow=True)
    stream = stream_of(source, 1, 2)
    stream.prefetch()
    source.unwanted.add(0)
    source.loads[0].finish_one(OSError("seen"))
    with pytest.raises(OSError, match="seen"):
        stream.take(1)


def test_keys_without_end_are_none_where_nothing_is_brought() -> None:
    """A stream would look for one for ever."""
    here = Fake({0: 0, 1: 0})
    brought = Fake({0: 0, 1: 5})
    assert list(streamed_keys(cycle([0, 1]), [0, 1], here)) == []
    assert list(islice(streamed_keys(cycle([0, 1]), [0, 1], brought), 3)) == [0, 1, 0]
