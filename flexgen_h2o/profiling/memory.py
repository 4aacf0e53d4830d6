"""Rates of memory, and of the work between the products of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from flexgen_h2o.kernels.packed_rows import pack_rows, unpack_rows
from flexgen_h2o.packing import packed_row_bytes
from flexgen_h2o.profiling.bench import Bench, Call
from flexgen_h2o.sampling import SamplingParams, TokenChooser

PACKED_BITS = 4


@dataclass(frozen=True)
class OtherRates:
    """Of one dtype, a second: bytes read and written by norms and activations, bytes of dequantised results, logits."""

    elementwise: float
    dequantise: float
    logits: float


def memory_rate(bench: Bench) -> float:
    """Bytes a second, read and written, of a copy between two buffers larger than the caches."""
    target, source = (bench.empty(torch.uint8, bench.sizes.memory_bytes) for _ in range(2))
    return 2 * bench.sizes.memory_bytes / bench.seconds_of(lambda: target.copy_(source))[0]


def kernel_seconds(bench: Bench) -> float:
    """Seconds of one operation that has next to nothing to do, with others before and after it."""
    one = bench.normal(torch.float32, 1)
    return bench.seconds_of(lambda: one.add_(1.0))[0]


def other_rates(bench: Bench, dtype: torch.dtype) -> OtherRates:
    (tokens, width), logits = bench.sizes.block, bench.normal(dtype, *bench.sizes.logits)
    calls = _norm_and_activation(bench, dtype), _dequantise(bench, dtype), _choice(logits)
    elementwise, dequantise, choice = bench.seconds_of(*calls)
    return OtherRates(
        4 * tokens * width * dtype.itemsize / elementwise,
        bench.sizes.weight_bytes / dequantise,
        logits.numel() / choice,
    )


def _norm_and_activation(bench: Bench, dtype: torch.dtype) -> Call:
    """Over the tokens of a chunk; each reads and writes all of them."""
    x = bench.normal(dtype, *bench.sizes.block)
    weight, bias = (bench.normal(dtype, x.shape[1]) for _ in range(2))
    return lambda: torch.relu_(F.layer_norm(x, (x.shape[1],), weight, bias))


def _dequantise(bench: Bench, dtype: torch.dtype) -> Call:
    """Packed weights in 4 bits into weight_bytes of `dtype`, more than caches hold, as the engine unpacks them."""
    width = bench.sizes.block[1]
    rows = bench.sizes.weight_bytes // (width * dtype.itemsize)
    packed = bench.empty(torch.uint8, rows, packed_row_bytes(width, PACKED_BITS))
    packed.copy_(pack_rows(bench.normal(dtype, 1, width).cpu(), PACKED_BITS))  # a row over and over
    out = bench.empty(dtype, rows, width)
    return lambda: unpack_rows(packed, PACKED_BITS, out)


def _choice(logits: torch.Tensor) -> Call:
    """The greedy tokens of all rows."""
    chooser, rows = TokenChooser(SamplingParams()), range(len(logits))
    return lambda: chooser.choose(logits, rows, rows)
