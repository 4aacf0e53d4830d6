"""The compiled loop of `pack_rows`: the ends of each group, and its codes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexgen_h2o.kernels.jit import bits_to_float, bytes_at, float_to_bits, floats_at, jit, ordered, words_at
from flexgen_h2o.kernels.rounding_loops import to_bf16_towards
from flexgen_h2o.packing import GROUP

_EXPONENT = np.uint32(0x7F800000)  # all set: infinite, or not a number


class Job(NamedTuple):
    """values, packed, bad: addresses of the fp32 rows, the packed rows, an int32 a row; sizes as in unpack_loops."""

    values: int
    columns: int
    packed: int
    row_bytes: int
    value_bytes: int
    bits: int
    bad: int


@jit
def pack(job, first, end):  # type: ignore[no-untyped-def]
    """Rows first..end-1; a row's `bad` is set where a group cannot be packed. Bytes of codes must be zero before."""
    levels = np.float32((1 << job.bits) - 1)
    for row in range(first, end):
        codes = job.packed + row * job.row_bytes
        ends = words_at(codes + job.value_bytes)
        for g in range((job.columns + GROUP - 1) // GROUP):
            values = floats_at(job.values + 4 * (row * job.columns + g * GROUP))
            n = min(GROUP, job.columns - g * GROUP)
            low = high = ordered(float_to_bits(values[0]))
            for i in range(n):
                key = ordered(float_to_bits(values[i]))
                low, high = min(low, key), max(high, key)
            least = to_bf16_towards(bits_to_float(np.uint32(ordered(low))), False)
            most = bits_to_float(np.uint32(ordered(high)))
            scale = to_bf16_towards((most - bits_to_float(least)) / levels, True)
            if (least & _EXPONENT) == _EXPONENT or (scale & _EXPONENT) == _EXPONENT:
                words_at(job.bad)[row] = np.uint32(1)
            ends[g] = (scale >> np.uint32(16)) | least
            step = bits_to_float(scale) if scale != np.uint32(0) else np.float32(1)
            _codes(codes + g * (GROUP * job.bits // 8), values, n, bits_to_float(least), step, levels, job.bits)


@jit
def _codes(at, values, n, least, step, levels, bits):  # type: ignore[no-untyped-def]
    codes = bytes_at(at)
    if bits == 8:
        for i in range(n):
            codes[i] = np.uint8(_code(values[i], least, step, levels))
    else:
        for i in range(n // 2):
            low, high = _code(values[2 * i], least, step, levels), _code(values[2 * i + 1], least, step, levels)
            codes[i] = np.uint8(low | (high << np.int32(4)))
        if n % 2 == 1:
            codes[n // 2] = np.uint8(_code(values[n - 1], least, step, levels))


@jit
def _code(value, least, step, levels):  # type: ignore[no-untyped-def]
    code = np.rint((value - least) / step)
    return np.int32(min(max(code, np.float32(0)), levels))
