"""A device to measure on: its buffers filled with numbers, and the seconds of calls that take turns."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from flexgen_h2o import interrupts
from flexgen_h2o.profiling.sizes import Sizes
from flexgen_h2o.tiers.device import Device

ROUNDS = 5
LEAST_ROUNDS = 2  # of a call that takes longer than a figure should
Call = Callable[[], object]
_TABLE = 2**20  # normal numbers that buffers are filled with, over and over


@dataclass(frozen=True)
class Bench:
    """Where and how much is measured."""

    device: Device
    sizes: Sizes

    def seconds_of(self, *calls: Call) -> list[float]:
        """Median seconds of each call."""
        return [statistics.median(timings) for timings in self.rounds(*calls)]

    def rounds(self, *calls: Call) -> list[list[float]]:
        """Seconds of each call in each round.

        The calls take turns, so that a second in which the machine is slow spoils a round and not a figure. In a turn
        a call is made a few times; when it ends, the device has done everything.
        """
        tried = [self.once(call) for call in calls]
        counts = [max(1, int(self.sizes.figure_s / ROUNDS / seconds)) for seconds in tried]
        # What takes very long is timed once.
        found = [[seconds] * LEAST_ROUNDS if seconds > self.sizes.longest_s else [] for seconds in tried]
        for _ in range(ROUNDS):
            for call, count, timings in zip(calls, counts, found, strict=True):
                if len(timings) < LEAST_ROUNDS or sum(timings) * count < self.sizes.figure_s:
                    timings.append(self._batch(call, count))
        return found

    def once(self, call: Call) -> float:
        """Seconds of the second of two calls."""
        self._batch(call, 1)
        return self._batch(call, 1)

    def timed(self, call: Call) -> float:
        """Seconds of one call."""
        return self._batch(call, 1)

    def _batch(self, call: Call, count: int) -> float:
        interrupts.check()
        start = time.perf_counter()
        for _ in range(count):
            call()
        self.finish()
        return max(1e-9, (time.perf_counter() - start) / count)

    def finish(self) -> None:
        """Wait until the device has done what was issued."""
        self.device.fence().wait()

    def empty(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """A tensor in a buffer as the engine takes them."""
        return self.device.buffer(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def normal(self, dtype: torch.dtype, *shape: int) -> torch.Tensor:
        """The same, filled with normal numbers: zeros are computed on faster, and some disks do not store them."""
        made = self.empty(dtype, *shape)
        table = _table(made.device, dtype)
        for part in made.view(-1).split(_TABLE):
            part.copy_(table[: len(part)])
        self.finish()
        return made


@lru_cache(maxsize=2)
def _table(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(_TABLE, generator=torch.Generator().manual_seed(0)).to(device, dtype)
