"""A byte ring of reusable buffer space, taken and given back in schedule order."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flexgen_h2o.limits import PAGE
from flexgen_h2o.tiers.events import Waitable
from flexgen_h2o.units import round_up

if TYPE_CHECKING:
    import torch


@dataclass(eq=False)
class Region:
    """`data`: uint8 view, 4 KiB aligned. Its first writer must wait for `after`, the last users of those bytes."""

    start: int
    end: int
    data: torch.Tensor
    after: list[Waitable]
    freed: bool = False
    users: list[Waitable] = field(default_factory=list)


class Ring:
    """FIFO space in one buffer. Regions are contiguous; what does not fit at the end wraps to the start."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._live: deque[Region] = deque()
        self._old: list[Region] = []

    @property
    def capacity(self) -> int:
        return self._buffer.numel()

    def take(self, nbytes: int) -> Region | None:
        """A region of at least `nbytes`, or None while older regions still hold the space."""
        size = round_up(max(1, nbytes), PAGE)
        if size > self.capacity:
            raise ValueError(f"ring of {self.capacity} bytes cannot hold {size}")
        while self._live and self._live[0].freed:
            self._old.append(self._live.popleft())
        start = self._place(size)
        if start is None:
            return None
        self._old = [r for r in self._old if not all(u.is_done for u in r.users)]
        after = [u for r in self._old if r.start < start + size and start < r.end for u in r.users]
        region = Region(start, start + size, self._buffer[start : start + size], after)
        self._live.append(region)
        return region

    def give_back(self, region: Region, users: Sequence[Waitable] = ()) -> None:
        """The space may be taken again; its next writer waits for `users`."""
        region.freed = True
        region.users = [u for u in users if not u.is_done]

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
