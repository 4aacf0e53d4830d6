"""Look-ahead: order, readiness, dropped units, never more than `ahead`, and a take that waits for its bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.core.units import PAGE
from flexgen_h2o.tiers.stream import Done, Region, Ring, Stream, streamed_keys


@dataclass
class Fake:
    """A source of pages by key; loads are done at once unless `slow`, then when the test says so."""

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


def walk(stream: Stream[int], source: Fake, ahead: int) -> Iterator[int]:
    """Ask for every wanted unit in order, as the executor does; yields the keys that came in a region."""
    taken = 0
    for key, pages in source.pages.items():
        stream.prefetch()
        assert source.started == sorted(source.started)
        assert len([k for k in source.started if k >= key]) <= max(1, ahead)
        if key in source.unwanted:
            continue
        region = stream.take(key)
        assert (region is None) == (pages == 0)
        if region is not None:
            assert region.data.numel() == pages * PAGE and bool((region.data == key).all())
            stream.give_back(region)
            taken += 1
            yield key


@given(st.lists(st.integers(0, 3), max_size=30), st.sets(st.integers(0, 29)), st.integers(0, 5), st.integers(3, 12))
def test_units_come_in_order_and_never_more_than_ahead(
    sizes: list[int], unwanted: set[int], ahead: int, ring_pages: int
) -> None:
    source = Fake(dict(enumerate(sizes)), unwanted)
    stream = stream_of(source, ring_pages, ahead)
    expected = [k for k, pages in enumerate(sizes) if pages and k not in unwanted]
    assert list(walk(stream, source, ahead)) == expected == source.started


@given(st.lists(st.integers(1, 3), min_size=1, max_size=20), st.data())
def test_units_that_lose_their_rows_on_the_way_are_dropped(sizes: list[int], data: st.DataObject) -> None:
    source = Fake(dict(enumerate(sizes)))
    stream = stream_of(source, 8, 4)
    for key in range(len(sizes)):
        stream.prefetch()
        if data.draw(st.booleans()):
            source.unwanted.add(key)
            continue
        region = stream.take(key)
        assert region is not None and bool((region.data == key).all())
        stream.give_back(region)


def test_without_look_ahead_nothing_starts_early() -> None:
    source = Fake({0: 1, 1: 1})
    stream = stream_of(source, 8, 0)
    stream.prefetch()
    assert source.started == []
    stream.give_back(stream.take(0))
    assert source.started == [0]


def test_a_unit_that_is_not_ready_holds_back_all_behind_it() -> None:
    source = Fake({0: 1, 1: 1, 2: 1}, unready={1})
    stream = stream_of(source, 8, 3)
    stream.prefetch()
    assert source.started == [0]
    source.unready.clear()
    stream.prefetch()
    assert source.started == [0, 1, 2]


def test_a_unit_in_the_ring_waits_for_room_and_comes_later() -> None:
    source = Fake({0: 2, 1: 2, 2: 2})
    stream = stream_of(source, 4, 3)
    stream.prefetch()
    assert source.started == [0, 1]
    region = stream.take(0)
    stream.prefetch()
    assert source.started == [0, 1]  # the unit in use still holds its pages
    stream.give_back(region)
    stream.prefetch()
    assert source.started == [0, 1, 2]


@pytest.mark.timeout(20)
def test_take_waits_until_the_bytes_are_there() -> None:
    source = Fake({7: 1}, slow=True)
    stream = stream_of(source, 4, 1)
    stream.prefetch()
    found: list[Region | None] = []
    taker = threading.Thread(target=lambda: found.append(stream.take(7)), daemon=True)
    taker.start()
    taker.join(0.05)
    assert taker.is_alive() and not found
    source.loads[7].finish_one()
    taker.join(10)
    assert not taker.is_alive() and found[0] is not None


def test_take_raises_what_its_load_ended_with() -> None:
    source = Fake({7: 1}, slow=True)
    stream = stream_of(source, 4, 1)
    stream.prefetch()
    source.loads[7].finish_one(OSError("the disk is gone"))
    with pytest.raises(OSError, match="the disk is gone"):
        stream.take(7)


def test_an_unwanted_unit_under_way_is_waited_for_before_its_space_is_reused() -> None:
    source = Fake({0: 1, 1: 1}, slow=True)
    stream = stream_of(source, 1, 2)
    stream.prefetch()
    source.unwanted.add(0)
    source.loads[0].finish_one(OSError("seen"))
    with pytest.raises(OSError, match="seen"):
        stream.take(1)


def test_asking_out_of_order_is_a_programming_error() -> None:
    source = Fake({0: 1, 1: 1})
    stream = stream_of(source, 4, 2)
    stream.prefetch()
    with pytest.raises(AssertionError, match="1 asked for before 0"):
        stream.take(1)


def test_a_unit_that_can_never_come_is_said() -> None:
    stream = stream_of(Fake({0: 1}, unready={0}), 4, 1)
    with pytest.raises(AssertionError, match="no room for 0"):
        stream.take(0)


@pytest.mark.timeout(20)
def test_drain_waits_for_loads_under_way_and_frees_their_space() -> None:
    source = Fake({0: 2, 1: 2, 2: 4}, slow=True)
    stream = stream_of(source, 4, 3)
    stream.prefetch()
    drainer = threading.Thread(target=stream.drain, daemon=True)
    drainer.start()
    source.loads[0].finish_one()
    drainer.join(0.05)
    assert drainer.is_alive()
    source.loads[1].finish_one()
    drainer.join(10)
    assert not drainer.is_alive()
    stream.prefetch()
    assert source.started == [0, 1, 2]  # the whole ring is free again


def test_any_number_of_unwanted_units_is_skipped() -> None:
    source = Fake(dict.fromkeys(range(2000), 1), unwanted=set(range(1999)))
    region = stream_of(source, 4, 1).take(1999)
    assert region is not None and source.started == [1999]


def test_keys_without_end_are_none_where_nothing_is_brought() -> None:
    """A stream would look for one for ever."""
    here, brought = Fake({0: 0, 1: 0}), Fake({0: 0, 1: 5})
    assert list(streamed_keys(cycle([0, 1]), [0, 1], here)) == []
    assert list(islice(streamed_keys(cycle([0, 1]), [0, 1], brought), 3)) == [0, 1, 0]
