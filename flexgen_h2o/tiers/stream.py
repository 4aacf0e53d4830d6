"""Shares into rows, events, rings of buffer space, and streams of units that are loaded ahead.

No torch: the simulator uses this module too.

Events, not barriers: whoever overwrites bytes waits for their last readers and writers, and for
nothing else. If both are on a card, the card waits, and the thread that issues work continues.
There is one `Stream` for each thing that moves (weights, KV units, hidden states). Space is taken
strictly in schedule order, so a unit that is needed now never waits for space held by one that is
needed later.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar, cast

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.config import TIERS
from flexgen_h2o.core.units import PAGE, round_up

if TYPE_CHECKING:
    import torch


Shares = tuple[float, float, float]


@dataclass(frozen=True)
class Part:
    """Rows [start, end) of a tensor or a batch, whose home is `tier`."""

    tier: str
    start: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.start


def split_rows(count: int, shares: Shares, multiple: int = 1) -> tuple[Part, ...]:
    """Cut `count` rows into at most three parts, device first.

    Each share is honoured to within `multiple` rows. A share of 0 gets no rows. The parts together
    are always all rows.
    """
    cuts = [0]
    total = 0.0
    for i, share in enumerate(shares):
        total += share
        if not any(s > 0 for s in shares[i + 1 :]):
            cuts.append(count)
        elif share == 0:
            cuts.append(cuts[-1])
        else:
            cuts.append(max(cuts[-1], min(count, round(count * total / multiple) * multiple)))
    return tuple(
        Part(tier, a, b) for tier, a, b in zip(TIERS, cuts[:-1], cuts[1:], strict=True) if b > a
    )


def tier_shares(shares: Shares, device_is_host: bool) -> Shares:
    """Return shares as placed: if the device is host memory, its share counts as host."""
    return (0.0, shares[0] + shares[1], shares[2]) if device_is_host else shares


def is_streamed(tier: str, device_is_host: bool) -> bool:
    """Return whether bytes on `tier` must be copied to the device before a layer uses them."""
    return tier == "disk" or (tier == "host" and not device_is_host)


class Waitable(Protocol):
    """An operation, on a thread or on a card, that others wait for."""

    def wait(self) -> None: ...

    def wait_on_card(self) -> None:
        """Let the card's current stream wait for this operation before any work that follows.

        The thread itself waits only until the card knows what to wait for. After that call,
        host memory may still not be read or overwritten.
        """
        self.wait()

    @property
    def is_started(self) -> bool:
        """Whether `wait_on_card` would return at once."""
        return True

    @property
    def is_done(self) -> bool: ...


class Done(Waitable):
    """An event that may carry an error.

    parts: number of jobs that must finish first. What they have begun must be done, too.
    """

    def __init__(self, parts: int = 1) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._left = parts
        self._begun: list[Waitable] = []
        self._error: BaseException | None = None
        if parts == 0:
            self._event.set()

    def finish_one(
        self, error: BaseException | None = None, begun: Sequence[Waitable] = ()
    ) -> None:
        """Record that one of the parts has finished.

        begun: operations that the part has started without waiting for their end.
        """
        with self._lock:
            self._begun += begun
            self._left -= 1
            if error is not None and self._error is None:
                self._error = error
            if self._left <= 0 or error is not None:
                self._event.set()

    def wait(self) -> None:
        """Block until done. Raises the operation's error."""
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
    def is_started(self) -> bool:
        return self._event.is_set()

    @property
    def is_done(self) -> bool:
        return self._event.is_set() and all(one.is_done for one in self._begun)


NOTHING = Done(0)


def wait_all(events: Iterable[Waitable]) -> None:
    for event in events:
        event.wait()


def wait_all_on_card(events: Iterable[Waitable]) -> None:
    """Call `Waitable.wait_on_card` of each event."""
    for event in events:
        event.wait_on_card()


@dataclass(eq=False)
class Region:
    """Space in a ring, which `Ring.take` returns."""

    start: int  # byte in the ring's buffer, a multiple of 4 KiB
    end: int
    data: torch.Tensor  # uint8 view of the buffer, 4 KiB aligned
    after: list[Waitable]  # last users of these bytes; the first writer must wait for them
    freed: bool = False  # set by `Ring.give_back`
    # Operations that still used the region when it was given back. Set by `Ring.give_back`.
    users: list[Waitable] = field(default_factory=list)


class Ring:
    """Space of one buffer, first in, first out.

    Regions are contiguous; one that does not fit at the end wraps.

    buffer: the memory; for a simulation only its bytes. Regions then have no data.
    """

    def __init__(self, buffer: torch.Tensor | int) -> None:
        self._buffer = None if isinstance(buffer, int) else buffer
        self.capacity = buffer if isinstance(buffer, int) else buffer.numel()
        self._live: deque[Region] = deque()
        self._old: list[Region] = []

    def take(self, nbytes: int) -> Region | None:
        """Return a region of at least `nbytes`, or None while older regions hold the space."""
        size = round_up(max(1, nbytes), PAGE)
        if size > self.capacity:
            raise ValueError(f"ring of {self.capacity} bytes cannot hold {size}")
        while self._live and self._live[0].freed:
            self._old.append(self._live.popleft())
        start = self._place(size)
        if start is None:
            return None
        end = start + size
        after = list[Waitable]()
        others = list[Region]()
        for old in self._old:
            if all(user.is_done for user in old.users):
                continue
            if old.start < end and start < old.end:
                after += old.users
            # Otherwise whoever waits for the new region's users waits for the old region's users,
            # too.
            if old.start < start or end < old.end:
                others.append(old)
        self._old = others
        data = None if self._buffer is None else self._buffer[start:end]
        region = Region(start, end, cast("torch.Tensor", data), after)
        self._live.append(region)
        return region

    def give_back(self, region: Region, users: Sequence[Waitable] = ()) -> None:
        """Free the region's space for others.

        The next writer waits for `users`, which themselves have waited for `region.after`.
        """
        region.freed = True
        region.users = [u for u in users or region.after if not u.is_done]

    def _place(self, size: int) -> int | None:
        if not self._live:
            return 0
        tail = self._live[0].start
        head = self._live[-1].end
        wrapped = self._live[-1].start < tail
        if wrapped:
            return head if tail - head >= size else None
        if self.capacity - head >= size:
            return head
        return 0 if tail >= size else None


Key = TypeVar("Key")
KeyIn = TypeVar("KeyIn", contravariant=True)


class Source(Protocol[KeyIn]):
    """The units that a stream loads."""

    def nbytes(self, key: KeyIn) -> int:
        """Return the unit's bytes in the ring; 0: the unit is used where it lives."""

    def is_needed(self, key: KeyIn) -> bool:
        """Return False if the unit is not needed after all, because its rows have finished."""

    def is_ready(self, key: KeyIn) -> bool:
        """Return False while the unit's home is out of date.

        Its last user has not stored it yet.
        """

    def load(self, key: KeyIn, region: Region) -> list[Done]:
        """Start filling the region. Returns [] for a unit that compute creates."""


def streamed_keys(keys: Iterator[Key], sweep: Iterable[Key], source: Source[Key]) -> Iterator[Key]:
    """Return `keys`, or an empty iterator if no key of a `sweep` takes ring space.

    A stream would otherwise search endless keys for one that does.
    """
    return keys if any(source.nbytes(key) for key in sweep) else iter(())


class Stream(Generic[Key]):
    """Loads units in the order of `sequence`.

    ahead: number of units that may be loading besides the one in use.
    """

    def __init__(
        self, ring: Ring | None, sequence: Iterator[Key], source: Source[Key], ahead: int
    ) -> None:
        self._ring = ring
        self._sequence = sequence
        self._source = source
        self._ahead = ahead
        # Units whose loads have started: (key, region, loads).
        self._entries: deque[tuple[Key, Region, list[Done]]] = deque()
        self._pending: Key | None = None

    def prefetch(self) -> None:
        """Start every load that may start now, without waiting."""
        while len(self._entries) < self._ahead and self._start_one():
            pass

    def take(self, key: Key) -> Region | None:
        """Return the region of `key` once it is loaded; None if the unit takes no ring space.

        The card waits for the loads if it can, otherwise this thread does. Keys come in the order
        of the sequence.
        """
        if not self._source.nbytes(key):
            return None
        while True:
            if not self._entries and not self._start_one():
                raise AssertionError(
                    f"{key} cannot be loaded: it is not ready, out of order, or larger than the "
                    "ring"
                )
            found, region, loads = self._entries.popleft()
            if found == key:
                wait_all_on_card(loads)
                return region
            wait_all(loads)
            assert not self._source.is_needed(found), f"{key} asked for before {found}"
            self.give_back(region)

    def give_back(self, region: Region | None, users: Sequence[Waitable] = ()) -> None:
        """Let the region be reused once `users`, its last readers and writers, are done."""
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
        """Return the next key that takes ring space and is still needed.

        The key stays pending until its load is started.
        """
        if self._pending is not None and not self._source.is_needed(self._pending):
            self._pending = None
        while self._pending is None:
            key = next(self._sequence, None)
            if key is None:
                return None
            if self._source.nbytes(key) and self._source.is_needed(key):
                self._pending = key
        return self._pending
