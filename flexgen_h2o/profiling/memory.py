"""Rates of memory, and of the work between the products of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from flexgen_h2o.kernels.int8_blocked import blank_int8_rows
from flexgen_h2o.kernels.packed_rows import pack_rows, unpack_rows
from flexgen_h2o.kernels.requantised import requantise_rows
from flexgen_h2o.packing import INT8, packed_row_bytes
from flexgen_h2o.profiling.bench import Bench, Call
from flexgen_h2o.sampling import SamplingParams, TokenChooser

PACKED_BITS = 4


@dataclass(frozen=True)
class OtherRates:
    """Of one dtype, a second: bytes read and written by norms and activations, bytes of dequantised results, logits.

    requantise_speedup: how many times faster the same values become int8 rows.
    """

    elementwise: float
    dequantise: float
    logits: float
    requantise_speedup: float


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
    packed = _packed(bench, dtype)
    calls = [_norm_and_activation(bench, dtype), _choice(logits), _dequantise(bench, dtype, packed)]
    if bench.device.is_host:  # no card has made int8 rows
        calls.append(_requantise(bench, packed))
    elementwise, choice, dequantise, *requantise = bench.seconds_of(*calls)
    return OtherRates(
        4 * tokens * width * dtype.itemsize / elementwise,
        bench.sizes.weight_bytes / dequantise,
        logits.numel() / choice,
        dequantise / requantise[0] if requantise else 1.0,
    )


def _norm_and_activation(bench: Bench, dtype: torch.dtype) -> Call:
    """Over the tokens of a chunk; each reads and writes all of them."""
    x = bench.normal(dtype, *bench.sizes.block)
    weight, bias = (bench.normal(dtype, x.shape[1]) for _ in range(2))
    return lambda: torch.relu_(F.layer_norm(x, (x.shape[1],), weight, bias))


def _packed(bench: Bench, dtype: torch.dtype) -> torch.Tensor:
    """Rows in 4 bits of weight_bytes of `dtype`, more than caches hold: one over and over."""
    width = bench.sizes.block[1]
    rows = bench.sizes.weight_bytes // (width * dtype.itemsize)
    packed = bench.empty(torch.uint8, rows, packed_row_bytes(width, PACKED_BITS))
    packed.copy_(pack_rows(bench.normal(dtype, 1, width).cpu(), PACKED_BITS))
    return packed


def _dequantise(bench: Bench, dtype: torch.dtype, packed: torch.Tensor) -> Call:
    """Into `dtype`, as the engine unpacks them."""
    out = bench.empty(dtype, len(packed), bench.sizes.block[1])
    return lambda: unpack_rows(packed, PACKED_BITS, out)


def _requantise(bench: Bench, packed: torch.Tensor) -> Call:
    """Into int8 rows, as the engine unpacks them for products in int8."""
    width = bench.sizes.block[1]
    parts = blank_int8_rows(bench.empty(torch.uint8, len(packed), INT8.row_bytes(width)))
    return lambda: requantise_rows(packed, 0, parts, width)


def _choice(logits: torch.Tensor) -> Call:
    """The greedy tokens of all rows."""
    chooser, rows = TokenChooser(SamplingParams()), range(len(logits))
    return lambda: chooser.choose(logits, rows, rows)
