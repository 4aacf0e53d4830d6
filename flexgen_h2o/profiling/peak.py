"""The machine's peak at this moment: large matrix products, and reading memory. Takes about half a second.

Measured beside a run and not taken from the profile, because neighbours make a machine twice as fast or slow.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flexgen_h2o.planner.roofline import Peak
from flexgen_h2o.profiling.bench import Bench, Call
from flexgen_h2o.profiling.matmul import Products
from flexgen_h2o.profiling.sizes import CARD, HOST, Sizes
from flexgen_h2o.tiers.device import Device
from flexgen_h2o.units import MIB

# The shapes of a block's MLP, at the rows that it sees in prefill; matrices and KV larger than the caches.
_HOST = replace(HOST, widths=(2048,), hidden=(2048,), heads=(), weight_bytes=128 * MIB, cache_bytes=128 * MIB)
_CARD = replace(CARD, widths=(4096,), hidden=(4096,), heads=())


def measure_peak(device: Device, dtype: torch.dtype, sizes: Sizes | None = None) -> Peak:
    """The best of a few rounds."""
    bench = Bench(device, sizes or (_HOST if device.is_host else _CARD))
    with torch.inference_mode():
        rows, width = bench.sizes.rows[-1], bench.sizes.hidden[-1]
        products = Products(bench, dtype)
        calls: list[Call] = [products.call(rows, width, 4 * width), products.call(rows, 4 * width, width)]
        cache = bench.normal(dtype, bench.sizes.cache_bytes // dtype.itemsize).view(torch.int64)
        *product_rounds, read_rounds = bench.rounds(*calls, cache.sum)
        flops = 2.0 * rows * width * 4 * width / min(min(rounds) for rounds in product_rounds)
        return Peak(flops, cache.numel() * cache.itemsize / min(read_rounds))
