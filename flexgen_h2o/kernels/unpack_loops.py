"""The compiled loop of `unpack_rows`: codes of a packed row into bf16 or fp32.

Two neighbours at a time: in bf16 they make one 4-byte word, so a vector of words is stored as it comes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexgen_h2o.kernels import vectors
from flexgen_h2o.kernels.jit import (
    bits_to_float,
    bytes_at,
    float_to_bits,
    floats_at,
    jit,
    shorts_at,
    words_at,
)
from flexgen_h2o.packing import GROUP

_PAIRS = GROUP // 2
_LOW, _HIGH = np.uint32(0xFFFF), np.uint32(0xFFFF0000)


class Job(NamedTuple):
    """packed, out: addresses of the first row; row_bytes, value_bytes: of a packed row and of its codes."""

    packed: int
    row_bytes: int
    value_bytes: int
    out: int
    columns: int
    bits: int


@jit
def unpack(element, job, first, end):  # type: ignore[no-untyped-def]
    """Rows first..end-1. element: a number whose type says what they become: uint16 for bf16, float32 for fp32."""
    size = 2 if vectors.planes(element) == 2 else 4
    for row in range(first, end):
        codes = job.packed + row * job.row_bytes
        ends = words_at(codes + job.value_bytes)
        out = job.out + row * job.columns * size
        whole = job.columns // GROUP
        for g in range(whole):
            at = codes + g * (GROUP * job.bits // 8)
            if job.bits == 4:
                _pairs_of_4(element, at, ends[g], out + g * GROUP * size, _PAIRS)
            else:
                _pairs_of_8(element, at, ends[g], out + g * GROUP * size, _PAIRS)
        rest = job.columns - whole * GROUP
        if rest > 0:
            at = codes + whole * (GROUP * job.bits // 8)
            to = out + whole * GROUP * size
            if job.bits == 4:
                _pairs_of_4(element, at, ends[whole], to, rest // 2)
            else:
                _pairs_of_8(element, at, ends[whole], to, rest // 2)
            if rest % 2 == 1:
                code = bytes_at(at)[(rest - 1) * job.bits // 8]
                code = code & np.uint8(15) if job.bits == 4 else code
                store_one(element, _value(np.uint32(code), ends[whole]), to, rest - 1)


@jit
def _pairs_of_4(element, at, ends, out, pairs):  # type: ignore[no-untyped-def]
    codes = bytes_at(at)
    for i in range(pairs):
        code = np.uint32(codes[i])
        _store(element, out, i, _value(code & np.uint32(15), ends), _value(code >> np.uint32(4), ends))


@jit
def _pairs_of_8(element, at, ends, out, pairs):  # type: ignore[no-untyped-def]
    codes = shorts_at(at)
    for i in range(pairs):
        code = np.uint32(codes[i])
        _store(element, out, i, _value(code & np.uint32(255), ends), _value(code >> np.uint32(8), ends))


@jit
def _value(code, ends):  # type: ignore[no-untyped-def]
    scale, least = bits_to_float(np.uint32(ends << np.uint32(16))), bits_to_float(np.uint32(ends & _HIGH))
    return np.float32(np.int32(code)) * scale + least


@jit
def _store(element, out, i, low, high):  # type: ignore[no-untyped-def]
    if vectors.planes(element) == 2:
        words_at(out)[i] = (_bf16(low) >> np.uint32(16)) | (_bf16(high) & _HIGH)
    else:
        floats_at(out)[2 * i] = low
        floats_at(out)[2 * i + 1] = high


@jit
def store_one(element, value, out, i):  # type: ignore[no-untyped-def]
    """Element i of those at `out`."""
    if vectors.planes(element) == 2:
        shorts_at(out)[i] = np.uint16(_bf16(value) >> np.uint32(16))
    else:
        floats_at(out)[i] = value


@jit
def _bf16(value):  # type: ignore[no-untyped-def]
    """A number's bits, the upper half rounded to the nearest bf16, ties to even."""
    bits = np.uint32(float_to_bits(value))
    return np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
