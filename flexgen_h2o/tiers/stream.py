"""Shares into rows, events, rings of buffer space, and streams of units that are loaded ahead. No torch: the simulator
uses them too.

Events, not barriers: whoever overwrites bytes waits for their last readers and writers, and for nothing else. Where
both are on a card it is the card that waits, and the thread that issues work goes on. One
`Stream` for each thing that moves (weights, KV units, hidden states). Space is taken strictly in schedule order, so a
unit that is needed now never waits for space held by one that is needed later.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.config import TIERS
from flexgen_h2o.core.units import PAGE, round_up

if TYPE_CHECKING:
    import torch


Shares = tuple[float, float, float]


@dataclass(frozen=True)
class Part:
    """Rows [start, end) have their home on `tier`."""

    tier: str
    start: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.start


def split_rows(count: int, shares: Shares, multiple: int = 1) -> tuple[Part, ...]:
    """Cut `count` rows into at most three parts, device first, each share honoured to within `multiple` rows.

    A share of 0 gets no rows and the shares' sum is always all rows.
    """
    cuts, total = [0], 0.0
    for i, share in enumerate(shares):
        total += share
        if not any(s > 0 for s in shares[i + 1 :]):
            cuts.append(count)
        elif share == 0:
            cuts.append(cuts[-1])
        else:
            cuts.append(max(cuts[-1], min(count, round(count * total / multiple) * multiple)))
    return tuple(Part(tier, a, b) for tier, a, b in zip(TIERS, cuts[:-1], cuts[1:], strict=True) if b > a)


def tier_shares(shares: Shares, device_is_host: bool) -> Shares:
    """Shares as placed: where the device is host memory its share counts as host."""
    return (0.0, shares[0] + shares[1], shares[2]) if device_is_host else shares


def is_streamed(tier: str, device_is_host: bool) -> bool:
    """Must bytes with this home be brought to the device before a layer can use them?"""
    return tier == "disk" or (tier == "host" and not device_is_host)


class Waitable(Protocol):
    def wait(self) -> None: ...

    def wait_on_card(self) -> None:
        """Hold back what this thread gives its current stream of the card from now on. The thread itself waits only
        until the card knows what for; host memory may not be read or overwritten after that."""
        self.wait()

    @property
    def is_begun(self) -> bool:
        """Would `wait_on_card` return at once?"""
        return True

    @property
    def is_done(self) -> bool: ...


class Done(Waitable):
    """An event that may carry an error. `parts`: how many operations must finish first, and what they have begun."""

    def __init__(self, parts: int = 1) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._left = parts
        self._begun: list[Waitable] = []
        self._error: BaseException | None = None
        if parts == 0:
            self._event.set()

    def finish_one(self, error: BaseException | None = None, begun: Sequence[Waitable] = ()) -> None:
        """begun: what the operation did not wait for."""
        with self._lock:
            self._begun += begun
            self._left -= 1
            if error is not None and self._error is None:
                self._error = error
            if self._left <= 0 or error is not None:
                self._event.set()

    def wait(self) -> None:
        """Block until done; raises the operation's error."""
        self._wait_until_begun()
        wait_all(self._begun)

    def wait_on_card(self) -> None:
        self._wait_until_begun()
        wait_all_on_card(self._begun)

    def _wait_until_begun(self) -> None:
        interrupts.wait_for(self._event)
        if self._error is not None:
            raise self._error

    @property
    def is_begun(self) -> bool:
        return self._event.is_set()

    @property
    def is_done(self) -> bool:
        return self._event.is_set() and all(one.is_done for one in self._begun)


NOTHING = Done(0)


def wait_all(events: Iterable[Waitable]) -> None:
    for event in events:
        event.wait()


def wait_all_on_card(events: Iterable[Waitable]) -> None:
    """As `Waitable.wait_on_card`."""
    for event in events:
        event.wait_on_card()


@dataclass(eq=False)
class Region:
    """`data`: uint8 view, 4 KiB aligned. Its first writer must wait for `after`, the last users of those bytes.

    freed: given back; users: who then still used it.
    """

    start: int
    end: int
    data: torch.Tensor
    after: list[Waitable]
    freed: bool = False
    users: list[Waitable] = field(default_factory=list)


class Ring:
    """Space of one buffer, first in, first out. Regions are contiguous; one that does not fit at the end wraps."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer, self.capacity = buffer, buffer.numel()
        self._live: deque[Region] = deque()
        self._old: list[Region] = []
        self._refused: int | None = None  # for so many bytes there was no room, and nothing was given back since

    def take(self, nbytes: int) -> Region | None:
        """A region of at least `nbytes`, or None while older regions still hold the space."""
        size = round_up(max(1, nbytes), PAGE)
        if size > self.capacity:
            raise ValueError(f"ring of {self.capacity} bytes cannot hold {size}")
        if self._refused is not None and size >= self._refused:
            return None
        while self._live and self._live[0].freed:
            self._old.append(self._live.popleft())
        start = self._place(size)
        if start is None:
            self._refused = size
            return None
        end, after, others = start + size, list[Waitable](), list[Region]()
        for old in self._old:
            if all(user.is_done for user in old.users):
                continue
            if old.start < end and start < old.end:
                after += old.users
            if old.start < start or end < old.end:  # else whoever waits for the new region's users waits for these
                others.append(old)
        self._old = others
        region = Region(start, end, self._buffer[start:end], after)
        self._live.append(region)
        return region

    def give_back(self, region: Region, users: Sequence[Waitable] = ()) -> None:
        """The space may be taken again; its next writer waits for `users`, who have waited for `region.after`."""
        self._refused, region.freed = None, True
        region.users = [u for u in users or region.after if not u.is_done]

    def _place(self, size: int) -> int | None:
        if not self._live:
            return 0
        tail, head = self._live[0].start, self._live[-1].end
        wrapped = self._live[-1].start < tail
        if wrapped:
            return head if tail - head >= size else None
        if self.capacity - head >= size:
            return head
        return 0 if tail >= size else None


Key = TypeVar("Key")
KeyIn = TypeVar("KeyIn", contravariant=True)


class Source(Protocol[KeyIn]):
    """Units that a stream loads."""

    def nbytes(self, key: KeyIn) -> int:
        """Ring bytes of the unit; 0: it is used where it lives."""

    def is_needed(self, key: KeyIn) -> bool:
        """False when the unit is not needed after all (its rows have finished)."""

    def is_ready(self, key: KeyIn) -> bool:
        """False while its last user has not stored it, so that its home is out of date."""

    def load(self, key: KeyIn, region: Region) -> list[Done]:
        """Start filling the region; [] for a unit that compute creates."""


def streamed_keys(keys: Iterator[Key], sweep: Iterable[Key], source: Source[Key]) -> Iterator[Key]:
    """`keys`, or none where no key of a `sweep` takes ring space: a stream would search endless keys for one."""
    return keys if any(source.nbytes(key) for key in sweep) else iter(())


class Stream(Generic[Key]):
    """Loads units in the order of `sequence`. ahead: how many may be loading besides the one in use."""

    def __init__(self, ring: Ring | None, sequence: Iterator[Key], source: Source[Key], ahead: int) -> None:
        self._ring, self._sequence, self._source, self._ahead = ring, sequence, source, ahead
        self._entries: deque[tuple[Key, Region, list[Done]]] = deque()  # whose loads have started
        self._pending: Key | None = None

    def prefetch(self) -> None:
        """Start every load that may start now, without waiting."""
        while len(self._entries) < self._ahead and self._start_one():
            pass

    def take(self, key: Key) -> Region | None:
        """Wait, on a card where it can, for the region of `key`; None when it takes no ring space. Keys come in the
        order of the sequence."""
        if not self._source.nbytes(key):
            return None
        while True:
            if not self._entries and not self._start_one():
                raise AssertionError(f"{key} cannot be loaded: it is not ready, out of order, or larger than the ring")
            found, region, loads = self._entries.popleft()
            if found == key:
                wait_all_on_card(loads)
                return region
            wait_all(loads)
            assert not self._source.is_needed(found), f"{key} asked for before {found}"
            self.give_back(region)

    def give_back(self, region: Region | None, users: Sequence[Waitable] = ()) -> None:
        """The region may be reused once `users`, its last readers and writers, are done."""
        if region is not None:
            assert self._ring is not None
            self._ring.give_back(region, users)

    def drain(self) -> None:
        """Wait for all loads under way and forget them."""
        while self._entries:
            _, region, loads = self._entries.popleft()
            wait_all(loads)
            self.give_back(region)

    def _start_one(self) -> bool:
        key = self._next_needed()
        if key is None or not self._source.is_ready(key):
            return False
        assert self._ring is not None
        region = self._ring.take(self._source.nbytes(key))
        if region is None:
            return False
        self._entries.append((key, region, self._source.load(key, region)))
        self._pending = None
        return True

    def _next_needed(self) -> Key | None:
        """The next key that takes ring space and is still needed; it stays pending until its load is started."""
        if self._pending is not None and not self._source.is_needed(self._pending):
            self._pending = None
        while self._pending is None:
            key = next(self._sequence, None)
            if key is None:
                return None
            if self._source.nbytes(key) and self._source.is_needed(key):
                self._pending = key
        return self._pending
