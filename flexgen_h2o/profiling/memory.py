"""Rates of memory, and of the work between the products of a layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from flexgen_h2o.profiling.bench import Bench, Call
from flexgen_h2o.sampling import SamplingParams, TokenChooser

GROUP = 64  # values that share a scale and a minimum


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
        width * width * dtype.itemsize / dequantise,
        logits.numel() / choice,
    )


def _norm_and_activation(bench: Bench, dtype: torch.dtype) -> Call:
    """Over the tokens of a chunk; each reads and writes all of them."""
    x = bench.normal(dtype, *bench.sizes.block)
    weight, bias = (bench.normal(dtype, x.shape[1]) for _ in range(2))
    return lambda: torch.relu_(F.layer_norm(x, (x.shape[1],), weight, bias))


def _dequantise(bench: Bench, dtype: torch.dtype) -> Call:
    """A matrix of int4 in pairs, a scale and a minimum for each group, into `dtype`.

    The plain way, in torch operations: what an engine that has nothing better would do.
    """
    groups = bench.sizes.block[1] ** 2 // GROUP
    packed = bench.empty(torch.uint8, groups, GROUP // 2).random_(0, 256)
    scale, least = (bench.normal(dtype, groups, 1) for _ in range(2))
    out = bench.empty(dtype, groups, GROUP)
    pairs = out.view(groups, GROUP // 2, 2)

    def work() -> None:
        pairs[..., 0].copy_(packed >> 4)
        pairs[..., 1].copy_(packed & 15)
        out.mul_(scale).add_(least)

    return work


def _choice(logits: torch.Tensor) -> Call:
    """The greedy tokens of all rows."""
    chooser, rows = TokenChooser(SamplingParams()), range(len(logits))
    return lambda: chooser.choose(logits, rows, rows)
