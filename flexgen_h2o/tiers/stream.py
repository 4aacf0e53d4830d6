"""Look-ahead: brings units into a ring in schedule order, before compute asks for them.

One `Stream` for each thing that moves (weights, KV units, hidden states). Space is taken strictly in schedule order, so
a unit that is needed now never waits for space held by one that is needed later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from flexgen_h2o.tiers.events import Done, Waitable, wait_all
from flexgen_h2o.tiers.ring import Region, Ring

Key = TypeVar("Key")
KeyIn = TypeVar("KeyIn", contravariant=True)


class Source(Protocol[KeyIn]):
    """What a stream brings."""

    def nbytes(self, key: KeyIn) -> int:
        """Ring bytes that the unit takes; 0: it is used where it lives."""

    def is_wanted(self, key: KeyIn) -> bool:
        """False when the unit is not needed after all (its rows have finished)."""

    def is_ready(self, key: KeyIn) -> bool:
        """False while the unit's last user has not given it back, so that its home is out of date."""

    def load(self, key: KeyIn, region: Region) -> list[Done]:
        """Start filling the region; empty for a unit that compute creates."""


def streamed_keys(keys: Iterator[Key], sweep: Iterable[Key], source: Source[Key]) -> Iterator[Key]:
    """`keys`, or none where no key of a `sweep` takes ring space: in keys without end a stream would look for one for
    ever."""
    return keys if any(source.nbytes(key) for key in sweep) else iter(())


@dataclass(eq=False)
class _Entry(Generic[Key]):
    key: Key
    region: Region
    loads: list[Done]


class Stream(Generic[Key]):
    """Units in `sequence` order. `ahead`: how many may be on their way besides the one in use."""

    def __init__(self, ring: Ring | None, sequence: Iterator[Key], source: Source[Key], ahead: int) -> None:
        self._ring, self._sequence, self._source, self._ahead = ring, sequence, source, ahead
        self._entries: deque[_Entry[Key]] = deque()
        self._pending: Key | None = None

    def prefetch(self) -> None:
        """Start every load that may start now; never blocks."""
        while len(self._entries) < self._ahead and self._start_one():
            pass

    def take(self, key: Key) -> Region | None:
        """The region of `key`, loaded; None when it takes no ring space. Keys are asked for in sequence order."""
        if not self._source.nbytes(key):
            return None
        while True:
            if not self._entries and not self._start_one():
                raise AssertionError(f"no room for {key}: the ring is smaller than its largest unit")
            entry = self._entries.popleft()
            wait_all(entry.loads)
            if entry.key == key:
                return entry.region
            assert not self._source.is_wanted(entry.key), f"{key} asked for before {entry.key}"
            self.give_back(entry.region)

    def give_back(self, region: Region | None, users: Sequence[Waitable] = ()) -> None:
        """The region's space may be reused once `users`, its last readers and writers, are done."""
        if region is not None:
            assert self._ring is not None
            self._ring.give_back(region, users)

    def drain(self) -> None:
        """Wait for all loads under way and forget them."""
        while self._entries:
            entry = self._entries.popleft()
            wait_all(entry.loads)
            self.give_back(entry.region)

    def _start_one(self) -> bool:
        key = self._next_wanted()
        if key is None or not self._source.is_ready(key):
            return False
        assert self._ring is not None
        region = self._ring.take(self._source.nbytes(key))
        if region is None:
            return False
        self._entries.append(_Entry(key, region, self._source.load(key, region)))
        self._pending = None
        return True

    def _next_wanted(self) -> Key | None:
        """The next key that takes ring space and is still wanted; it stays pending until it is started."""
        if self._pending is not None and not self._source.is_wanted(self._pending):
            self._pending = None
        while self._pending is None:
            key = next(self._sequence, None)
            if key is None:
                return None
            if self._source.nbytes(key) and self._source.is_wanted(key):
                self._pending = key
        return self._pending
