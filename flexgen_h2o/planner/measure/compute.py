"""Measure all rates of one dtype: those of measure/bench.py and the decoding of weights.

Weights are decoded from 4 bits and from the formats of quantised checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from flexgen_h2o.checkpoint.formats import Codec, Shard, TensorLayout, weight_format
from flexgen_h2o.checkpoint.writing import any_bytes
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.model import ModelSpec, TensorSpec
from flexgen_h2o.core.packing import SlotPacking
from flexgen_h2o.kernels.linear import RowParts, linear
from flexgen_h2o.kernels.packed import pack_rows, unpack_rows
from flexgen_h2o.kernels.workspace import Workspace
from flexgen_h2o.models import built_in_spec
from flexgen_h2o.planner.measure.bench import (
    PACKED_BITS,
    Bench,
    Call,
    Figures,
    decode_rates,
    matmul_rates,
    other_rates,
    prefill_rates,
    speedups,
)
from flexgen_h2o.planner.profile import MAX_SPEEDUP, ComputeRates, Curve

_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
# A quantization_config of each format whose decoder is measured.
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "mxfp4": {"quant_method": "mxfp4"},
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "compressed-tensors": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _INT4}},
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128},
}
# A decoded matrix has this fraction (1/16) of the rows that fill weight_bytes, so that ten of them
# take little memory.
DECODED_SHARE = 16
# _EXPERT_ROWS: rows of inputs. _MIN_LONGER: the least share of a product's time that can be told
# from no time at all.
_EXPERT_ROWS = 4
_MIN_LONGER = 0.02
_WHOLE_BLOCKS = 128  # rows and columns are multiples of it, so they fill blocks of all formats


def compute_rates(bench: Bench, host: Bench, dtype: str) -> ComputeRates:
    """Measure and return all rates of one dtype.

    host: the bench of the host. If the host computes, it is `bench` itself, and nothing is measured
        twice.
    """
    kind = getattr(torch, dtype)
    prefill, column_sums = prefill_rates(bench, kind)
    plain, scored = decode_rates(bench, kind)
    unpacking, decoding = weight_rates(bench, kind)
    faster: Figures = {
        name: Curve(tuple((rows, _in_bounds(ratio)) for rows, ratio in curve.points))
        for name, curve in speedups(bench, kind).items()
    }
    rates = ComputeRates(
        matmul_flops_per_s=matmul_rates(bench, kind),
        prefill_attention_flops_per_s=prefill,
        column_sums_flops_per_s=column_sums,
        device_attention_bytes_per_s=plain,
        device_scored_attention_bytes_per_s=scored,
        host_attention_bytes_per_s=plain,
        host_scored_attention_bytes_per_s=scored,
        device_dequantise_bytes_per_s=unpacking,
        host_dequantise_bytes_per_s=unpacking,
        decode_speedup={name: _in_bounds(ratio) for name, ratio in decoding.items()},
        **other_rates(bench, kind),
        **faster,
    )
    if not bench.device.is_host:
        rates = rates.requantising(kind.itemsize)
    if host is bench:
        return rates
    plain, scored = decode_rates(host, kind)
    return replace(
        rates,
        host_attention_bytes_per_s=plain,
        host_scored_attention_bytes_per_s=scored,
        host_dequantise_bytes_per_s=weight_rates(host, kind, {})[0],
    )


def _in_bounds(speedup: float) -> float:
    """Return a speedup within the bounds of a profile.

    On a busy machine, the ratio of two timings may be anything.
    """
    return min(MAX_SPEEDUP, max(1 / MAX_SPEEDUP, speedup))


def weight_rates(
    bench: Bench, dtype: torch.dtype, checkpoints: Mapping[str, Mapping[str, Any]] = CHECKPOINTS
) -> tuple[float, dict[str, float]]:
    """Measure the unpacking of 4-bit weights and the decoding of quantised checkpoints.

    Return the bytes of the dtype per second that 4-bit weights are unpacked into, and how many
    times faster values of quantised checkpoints become the dtype or int8 rows. The keys are those
    of ComputeRates.decode_speedup. Int8 rows are made only if the host computes, since no card has
    made them.

    checkpoints: a quantization_config by name of its format.
    """
    width = bench.sizes.block[1]
    # Rows in 4 bits that unpack to weight_bytes of the dtype, more than the CPU or GPU caches hold.
    # All rows are copies of one row.
    packed = bench.empty(
        torch.uint8,
        bench.sizes.weight_bytes // (width * dtype.itemsize),
        SlotPacking(width, PACKED_BITS).slot_bytes,
    )
    packed.copy_(pack_rows(bench.normal(dtype, 1, width).cpu(), PACKED_BITS))
    out = bench.empty(dtype, len(packed), width)
    calls: dict[str, tuple[Call, int]] = {
        "": (lambda: unpack_rows(packed, PACKED_BITS, out), out.numel())
    }
    columns = -(-width // _WHOLE_BLOCKS) * _WHOLE_BLOCKS
    rows = -(-len(packed) // DECODED_SHARE // _WHOLE_BLOCKS) * _WHOLE_BLOCKS
    for config in checkpoints.values():
        for to_int8 in (False, True)[: 1 + bench.device.is_host]:
            form = quantised_format(config, dtype, to_int8)
            calls[form.decoder] = decoding(bench, form, dtype, rows, columns), rows * columns
    seconds = bench.seconds_of(*(call for call, _ in calls.values()))
    rates = {
        name: count / spent
        for (name, (_, count)), spent in zip(calls.items(), seconds, strict=True)
    }
    unpacking = rates.pop("")
    if checkpoints and bench.device.is_host:
        packed_form = weight_format(
            _known_spec(), Policy(compress_weight=True, weight_bits=PACKED_BITS), dtype.itemsize
        )
        for form in (quantised_format(checkpoints["mxfp4"], dtype, False), packed_form):
            rates |= in_product_rate(bench, form, dtype, len(packed) // 2, columns)
    return unpacking * dtype.itemsize, {name: rate / unpacking for name, rate in rates.items()}


def quantised_format(config: Mapping[str, Any], dtype: torch.dtype, in_int8: bool) -> Codec:
    """Return the weight format of checkpoints with this quantization_config."""
    spec = replace(_known_spec(), quantization=config)
    return weight_format(spec, Policy(int8_compute=in_int8), dtype.itemsize)


def _known_spec() -> ModelSpec:
    """Return any known model's spec; only its formats count."""
    known = built_in_spec("facebook/opt-125m")
    assert known is not None
    return known[0]


def in_product_rate(
    bench: Bench, form: Codec, dtype: torch.dtype, rows: int, columns: int
) -> dict[str, float]:
    """Return {form.decoder_in_products: numbers per second}, or {} if products read no codes.

    The rate is the matrix's numbers over the time that a product of few rows takes longer from
    codes than from the decoded matrix. Both are read from memory.
    """
    layout, whole, out = _matrix(bench, form, dtype, rows, columns)
    form.decode(layout, whole, out)
    coded = form.coded_parts(layout, whole, out)
    if not coded:
        return {}
    x = bench.normal(dtype, _EXPERT_ROWS, columns)
    result = bench.empty(dtype, _EXPERT_ROWS, rows)
    plain, own = bench.seconds_of(
        lambda: linear(x, out, None, result), lambda: linear(x, coded, None, result)
    )
    return {form.decoder_in_products: rows * columns / max(own - plain, _MIN_LONGER * plain)}


def decoding(bench: Bench, form: Codec, dtype: torch.dtype, rows: int, columns: int) -> Call:
    """Return a call that decodes a matrix of random bytes."""
    layout, whole, out = _matrix(bench, form, dtype, rows, columns)
    return lambda: form.decode(layout, whole, out)


def _matrix(
    bench: Bench, form: Codec, dtype: torch.dtype, rows: int, columns: int
) -> tuple[TensorLayout, list[Shard], RowParts]:
    """Return the layout of a matrix of random bytes, the matrix, and the rows for decoding it."""
    layout = form.layout(TensorSpec("", form.sample_name, (rows, columns)))
    raw = [any_bytes(stored) for stored in layout.stored]
    pieces = []
    for stored, made in zip(layout.stored, raw, strict=True):
        held = stored.held(made, stored.dtypes[0])
        pieces.append(bench.empty(torch.uint8, held.numel()).copy_(held.view(-1)))
    memory = bench.empty(torch.uint8, rows * layout.decoded_row_bytes)
    out = form.decoded_parts(layout, memory, Workspace(memory, {}, dtype))
    return layout, [Shard("host", 0, layout.cut_shape[0], pieces)], out
