"""All compute rates of one dtype."""

from __future__ import annotations

from dataclasses import replace

import torch

from flexgen_h2o.profile import MOST_SPEEDUP, ComputeRates, Curve
from flexgen_h2o.profiling.attention import decode_rates, prefill_rates
from flexgen_h2o.profiling.bench import Bench
from flexgen_h2o.profiling.matmul import matmul_rates, speedups
from flexgen_h2o.profiling.memory import other_rates


def compute_rates(bench: Bench, host: Bench, dtype: str) -> ComputeRates:
    """host: the host's bench, which is `bench` itself where the host computes; nothing is measured twice there."""
    kind = getattr(torch, dtype)
    prefill, column_sums = prefill_rates(bench, kind)
    plain, scored = decode_rates(bench, kind)
    others = other_rates(bench, kind)
    faster = speedups(bench, kind)
    rates = ComputeRates(
        matmul_flops_per_s=matmul_rates(bench, kind),
        prefill_attention_flops_per_s=prefill,
        column_sums_flops_per_s=column_sums,
        device_attention_bytes_per_s=plain,
        device_scored_attention_bytes_per_s=scored,
        host_attention_bytes_per_s=plain,
        host_scored_attention_bytes_per_s=scored,
        elementwise_bytes_per_s=others.elementwise,
        device_dequantise_bytes_per_s=others.dequantise,
        host_dequantise_bytes_per_s=others.dequantise,
        logits_per_s=others.logits,
        blocked_speedup=_in_bounds(faster["blocked"]),
        int8_speedup=_in_bounds(faster["int8"]),
        requantise_speedup=_in_bounds(Curve.flat(others.requantise_speedup)).at(1),
    )
    return rates if host is bench else _with_host(rates, host, kind)


def _in_bounds(speedup: Curve) -> Curve:
    """On a busy machine a ratio of two timings may be anything, and a profile with it could not be read again."""
    return Curve(tuple((size, min(MOST_SPEEDUP, max(1 / MOST_SPEEDUP, ratio))) for size, ratio in speedup.points))


def _with_host(rates: ComputeRates, host: Bench, dtype: torch.dtype) -> ComputeRates:
    plain, scored = decode_rates(host, dtype)
    return replace(
        rates, host_attention_bytes_per_s=plain, host_scored_attention_bytes_per_s=scored,
        host_dequantise_bytes_per_s=other_rates(host, dtype).dequantise,
    )  # fmt: skip
