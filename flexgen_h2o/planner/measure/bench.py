"""A device to measure on: sizes of what is measured, buffers of numbers, and seconds of calls that run in turn."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from flexgen_h2o.core import interrupts
from flexgen_h2o.core.units import GIB, MIB, TOKEN_CHUNK
from flexgen_h2o.tiers.device import Device


@dataclass(frozen=True)
class Sizes:
    """Of what is measured. Buffers in bytes, all larger than the caches, so that a figure is that of memory.

    figure_s: seconds that one figure should take. longest_s: a product that would take longer is not measured, another
    call is timed once. disk_bytes, disk_s: of the file, whichever is reached first. link_bytes: walked through by
    copies over the link. memory_bytes: copied from and to. weight_bytes: matrices that products cycle through. rows: of
    products; widths: of square matrices; hidden: h of (4 h, h) and (h, 4 h) matrices; heads: h of (16 h, h) ones.
    prompt_tokens: of a micro-batch of prompts; prompt_lengths: of one prompt; prompt_width: heads x head width.
    cache_bytes: keys and values that decode attention reads; head_widths, slots: their shape. block: (tokens, width) of
    elementwise work, width also of unpacked matrices. logits: (rows, vocabulary). steps: decode sweeps of a small
    model; step_rows: its micro-batches; step_width: its width; step_prompt: tokens of a prompt in its prefill sweep.
    beside_s: seconds of disk reads and compute together.
    """

    figure_s: float = 0.12
    longest_s: float = 0.5
    disk_bytes: int = 2 * GIB
    disk_s: float = 3.0
    link_bytes: int = 256 * MIB
    memory_bytes: int = 256 * MIB
    weight_bytes: int = 256 * MIB
    widths: tuple[int, ...] = (64, 256, 768, 2048, 4096, 8192)
    hidden: tuple[int, ...] = (64, 256, 768, 2048, 4096)
    heads: tuple[int, ...] = (768, 2048)
    rows: tuple[int, ...] = (1, 4, 16, 32, 64, 128, 256, TOKEN_CHUNK)
    prompt_tokens: int = 2048
    prompt_lengths: tuple[int, ...] = (64, 256, 1024, 2048)
    prompt_width: int = 2048
    cache_bytes: int = 256 * MIB
    head_widths: tuple[int, ...] = (64, 80, 128)
    slots: int = 512
    block: tuple[int, int] = (1024, 4096)
    logits: tuple[int, int] = (32, 50272)
    steps: int = 48
    step_rows: tuple[int, int] = (8, 64)
    step_width: int = 768
    step_prompt: int = 128
    beside_s: float = 1.5


HOST = Sizes()
# A card has larger caches and needs more work at a time to be busy; its prompts of a micro-batch fill it.
CARD = replace(
    HOST, memory_bytes=GIB, weight_bytes=GIB, widths=(*HOST.widths, 12288), hidden=(256, 2048, 4096, 12288),
    prompt_tokens=16384,
    cache_bytes=GIB, head_widths=(64, 128),
)  # fmt: skip
# Of a card's host: attention there may run through torch operations that a CPU computes slowly.
CARD_HOST = replace(HOST, head_widths=CARD.head_widths)
TINY = Sizes(
    figure_s=0.002, longest_s=0.05, disk_bytes=8 * MIB, disk_s=0.1, link_bytes=MIB, memory_bytes=MIB,
    weight_bytes=MIB, widths=(64, 128), hidden=(64,), heads=(64,), rows=(1, 8), prompt_tokens=64,
    prompt_lengths=(16, 32), prompt_width=128, cache_bytes=MIB, head_widths=(64,), slots=32, block=(64, 128),
    logits=(4, 512), steps=6, step_rows=(2, 4), step_width=64, step_prompt=32, beside_s=0.05,
)  # fmt: skip


ROUNDS = 5
MIN_ROUNDS = 2  # of a call that takes longer than a figure should
Call = Callable[[], object]
Figures = dict[str, Any]  # fields of a profile
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

        The calls run in turn, so that a second in which the machine is slow spoils a round and not a figure.
        """
        tried = [self.once(call) for call in calls]
        counts = [max(1, int(self.sizes.figure_s / ROUNDS / seconds)) for seconds in tried]
        # What takes very long is timed once.
        found = [[seconds] * MIN_ROUNDS if seconds > self.sizes.longest_s else [] for seconds in tried]
        for _ in range(ROUNDS):
            for call, count, timings in zip(calls, counts, found, strict=True):
                if len(timings) < MIN_ROUNDS or sum(timings) * count < self.sizes.figure_s:
                    timings.append(self.timed(call, count))
        return found

    def once(self, call: Call) -> float:
        """Seconds of the second of two calls."""
        self.timed(call)
        return self.timed(call)

    def timed(self, call: Call, count: int = 1) -> float:
        """Mean seconds of `count` calls, until the device has done everything."""
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
