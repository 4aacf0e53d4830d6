"""The ring: live regions never overlap, and a region's writer hears of every unfinished user of its bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexgen_h2o.core.units import PAGE
from flexgen_h2o.tiers.stream import Region, Ring


@dataclass(eq=False)
class Event:
    """A user of a region that is done when the test says so."""

    is_done: bool = False

    def wait(self) -> None:
        raise AssertionError("the ring must never wait")


@dataclass
class Model:
    """What the ring must do, page by page."""

    capacity: int
    live: list[Region] = field(default_factory=list)  # in the order they were taken, freed ones removed
    users: dict[int, list[Event]] = field(default_factory=dict)

    def unfinished(self, region: Region) -> set[Event]:
        pages = range(region.start // PAGE, region.end // PAGE)
        return {u for page in pages for u in self.users.get(page, ()) if not u.is_done}

    def check_taken(self, region: Region, nbytes: int) -> None:
        assert region.start % PAGE == 0 and region.start >= 0 and region.end <= self.capacity
        assert nbytes <= region.data.numel() == region.end - region.start < nbytes + PAGE + (nbytes == 0)
        assert all(region.end <= other.start or other.end <= region.start for other in self.live)
        # Done ones may be named too (they cost nothing), unfinished users of other bytes may not.
        assert {u for u in region.after if not u.is_done} == self.unfinished(region)
        self.live.append(region)

    def free(self, index: int, users: list[Event]) -> Region:
        region = self.live.pop(index)
        for page in range(region.start // PAGE, region.end // PAGE):
            self.users.setdefault(page, []).extend(users)
        return region


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


@given(st.integers(4, 9), actions)
def test_any_history(pages: int, history: list[tuple[str, int]]) -> None:
    buffer = torch.zeros(pages * PAGE, dtype=torch.uint8)
    ring, model, events = Ring(buffer), Model(pages * PAGE), [Event(is_done=True)]
    for what, number in history:
        if what == "take":
            region = ring.take(number)
            assert region is not None or model.live, "nothing is held, and yet there is no room"
            if region is not None:
                model.check_taken(region, number)
                assert region.data.data_ptr() == buffer.data_ptr() + region.start
        elif what == "finish":
            events[number % len(events)].is_done = True
        elif model.live:
            users = [Event() for _ in range(number)]
            events += users
            ring.give_back(model.free(0 if what == "give_back" else -1, users), users)


@given(st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=30), st.integers(1, 3))
def test_with_room_for_one_more_wrapping_is_never_in_the_way(sizes: list[int], depth: int) -> None:
    """In schedule order, `depth` units always fit a ring of depth + 1 times the largest."""
    largest = max(sizes) + PAGE
    ring, held = Ring(torch.zeros((depth + 1) * largest, dtype=torch.uint8)), []
    for size in sizes:
        if len(held) == depth:
            ring.give_back(held.pop(0))
        region = ring.take(size)
        assert region is not None
        held.append(region)


def taken(ring: Ring, nbytes: int) -> Region:
    region = ring.take(nbytes)
    assert region is not None
    return region


def test_what_does_not_fit_at_the_end_wraps_to_the_start() -> None:
    ring = Ring(torch.zeros(4 * PAGE, dtype=torch.uint8))
    first, second = taken(ring, 2 * PAGE), taken(ring, PAGE)
    assert ring.take(2 * PAGE) is None  # one page is left at the end
    event = Event()
    ring.give_back(first, [event])
    third = taken(ring, 2 * PAGE)
    assert (third.start, third.end, third.after) == (0, 2 * PAGE, [event])
    assert ring.take(1) is None  # between third and second there is nothing; the last page must wait for second
    ring.give_back(second)
    assert taken(ring, 2 * PAGE).start == 2 * PAGE


def test_a_full_wrapped_ring_takes_nothing() -> None:
    ring = Ring(torch.zeros(3 * PAGE, dtype=torch.uint8))
    first, _, _ = (taken(ring, PAGE) for _ in range(3))
    ring.give_back(first)
    assert taken(ring, PAGE).start == 0
    assert ring.take(PAGE) is None


def test_a_region_hears_of_all_regions_that_lay_where_it_lies_and_of_no_other() -> None:
    ring = Ring(torch.zeros(4 * PAGE, dtype=torch.uint8))
    old, events = [taken(ring, PAGE) for _ in range(4)], [Event() for _ in range(4)]
    for region, event in zip(old, events, strict=True):
        ring.give_back(region, [event])
    assert taken(ring, 3 * PAGE).after == events[:3]
    assert taken(ring, PAGE).after == events[3:]


def test_bytes_reused_twice_still_name_their_first_user() -> None:
    """A region that was given back unused hides nobody: who used the bytes before is still at work."""
    ring = Ring(torch.zeros(2 * PAGE, dtype=torch.uint8))
    event = Event()
    ring.give_back(taken(ring, 2 * PAGE), [event])
    ring.give_back(taken(ring, 2 * PAGE))
    assert taken(ring, PAGE).after == [event]


def test_more_than_the_ring_is_an_error_not_a_wait() -> None:
    ring = Ring(torch.zeros(2 * PAGE, dtype=torch.uint8))
    assert ring.capacity == 2 * PAGE
    with pytest.raises(ValueError, match="cannot hold"):
        ring.take(2 * PAGE + 1)
