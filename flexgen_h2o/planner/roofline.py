"""The roofline of a run: the seconds that its matrix products and its reading of KV take at the machine's peak.

What else a run does (norms, transfers, choosing tokens, waiting) is what it loses to its roofline.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from flexgen_h2o.config import ModelSpec, TensorSpec
from flexgen_h2o.prefixes import FedPrompts


@dataclass(frozen=True)
class RunWork:
    """FLOPs of all matrix products of a phase, those of causal attention with them; bytes of KV read by decode."""

    prefill_flops: float
    decode_flops: float
    decode_kv_bytes: float


@dataclass(frozen=True)
class Peak:
    """Measured: FLOPs a second of large matrix products with the faster layout, bytes a second of reading memory."""

    flops_per_s: float
    memory_bytes_per_s: float


@dataclass(frozen=True)
class Roofline:
    """Seconds at the peak."""

    prefill_s: float
    decode_s: float


def run_work(spec: ModelSpec, fed: FedPrompts, decode_tokens: int, kv_bytes: float) -> RunWork:
    """fed: the prompts; decode_tokens: that all rows got after their first one; kv_bytes: columns that decode
    attention read. The head sees one token of each prompt."""
    block = 2.0 * _elements(t for tensors in (*spec.attention, *spec.mlp) for t in tensors)
    head = 2.0 * _elements(spec.head)
    # n^2 / 2 pairs of a query and a key, two products of 2 FLOPs each
    causal = 2.0 * fed.pairs * spec.num_heads * spec.head_dim * spec.num_blocks
    prefill = fed.tokens * block + fed.rows * head + causal
    return RunWork(prefill, decode_tokens * (block + head), kv_bytes)


def roofline(work: RunWork, peak: Peak) -> Roofline:
    return Roofline(
        work.prefill_flops / peak.flops_per_s,
        work.decode_flops / peak.flops_per_s + work.decode_kv_bytes / peak.memory_bytes_per_s,
    )


def _elements(tensors: Iterable[TensorSpec]) -> int:
    """Of matrices."""
    return sum(t.numel for t in tensors if len(t.shape) == 2)
