"""The machine's peak at this moment: large matrix products, and reading memory. Takes about half a second.

Measured beside a run and not taken from the profile, because neighbours make a machine twice as fast or slow.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flexgen_h2o.limits import BLOCK_CHUNK
from flexgen_h2o.planner.roofline import Peak
from flexgen_h2o.profiling.bench import Bench, Call
from flexgen_h2o.profiling.matmul import Held, Products
from flexgen_h2o.profiling.sizes import CARD, HOST, Sizes
from flexgen_h2o.tiers.device import Device
from flexgen_h2o.units import MIB

# The shapes of a block's MLP, at the rows that it sees in prefill; matrices, in order and blocked, and KV larger than
# the caches.
_HOST = replace(HOST, widths=(2048,), hidden=(2048,), heads=(), weight_bytes=128 * MIB, cache_bytes=128 * MIB)
_CARD = replace(CARD, widths=(4096,), hidden=(4096,), heads=())


class PeakProbe:
    """Calls that show the peak; their buffers are taken once."""

    def __init__(self, device: Device, dtype: torch.dtype, sizes: Sizes | None = None) -> None:
        self._bench = Bench(device, sizes or _sizes(device))
        rows, width = self._bench.sizes.rows[-1], self._bench.sizes.hidden[-1]
        products = Products(self._bench, dtype)
        self._flops = 2.0 * rows * width * 4 * width
        cache = self._bench.normal(dtype, self._bench.sizes.cache_bytes // dtype.itemsize).view(torch.int64)
        self._cache_bytes = cache.numel() * cache.itemsize
        pairs = ((width, 4 * width), (4 * width, width))
        ways: tuple[Held, ...] = ("in order", "blocked")
        self._calls: list[Call] = [products.call(rows, *pair, held) for held in ways for pair in pairs]
        self._calls.append(cache.sum)

    def best(self) -> Peak:
        """Of a few rounds."""
        with torch.inference_mode():
            return self._peak([min(rounds) for rounds in self._bench.rounds(*self._calls)])

    def now(self) -> Peak:
        """Of one call each."""
        with torch.inference_mode():
            return self._peak([self._bench.timed(call) for call in self._calls])

    def _peak(self, seconds: list[float]) -> Peak:
        *products, read = seconds
        return Peak(self._flops / min(products), self._cache_bytes / read)


def peak_bytes(device: Device, dtype: torch.dtype) -> int:
    """What measuring takes of the device: matrices and KV, inputs and results, and what is being blocked or made."""
    sizes = _sizes(device)
    ends = 2 * sizes.rows[-1] * 4 * sizes.hidden[-1] * dtype.itemsize
    return sizes.weight_bytes + sizes.cache_bytes + ends + 2 * BLOCK_CHUNK


def _sizes(device: Device) -> Sizes:
    return _HOST if device.is_host else _CARD


def measure_peak(device: Device, dtype: torch.dtype) -> Peak:
    """The best of a few rounds."""
    return PeakProbe(device, dtype).best()
