"""The compiled loops of int8 products: rows of numbers into int8 before them, and their sums into numbers after.

The compiled loops of `requantise_rows`: packed rows of 4 bits into int8 rows, in order or in strips of blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexgen_h2o.core.packing import GROUP
from flexgen_h2o.core.units import BLOCK_ROWS
from flexgen_h2o.kernels.compiled import vectors
from flexgen_h2o.kernels.compiled.packed_vectors import ROWS, quotient, strip
from flexgen_h2o.kernels.compiled.rows import store_one
from flexgen_h2o.kernels.jit import (
    bits_to_float,
    bytes_at,
    float_to_bits,
    floats_at,
    ints_at,
    is_float,
    jit,
    shorts_at,
    words_at,
)

_LEVELS = np.float32(127)
_NOTHING = np.float32(1e-30)  # a row without larger values is all zeros: 127 over it would be infinite


class QuantiseJob(NamedTuple):
    """Addresses of the first row's values, codes and scale; *_step: bytes from a row to the next."""

    values: int
    values_step: int
    columns: int
    codes: int
    codes_step: int
    scales: int
    scales_step: int


@jit
def quantise(element, job, first, end):  # type: ignore[no-untyped-def]
    """Rows first..end-1. element: a number whose type says what they are: uint16 for bf16, float32 for fp32."""
    for row in range(first, end):
        values = job.values + row * job.values_step
        most = np.int32(0)  # bits of numbers without their sign sort as the numbers do, NaN last
        for i in range(job.columns):
            most = max(most, float_to_bits(_load(element, values, i)) & np.int32(0x7FFFFFFF))
        largest = bits_to_float(np.uint32(most))
        steps = _LEVELS / largest
        if largest < _NOTHING:
            largest = steps = np.float32(0)
        codes = bytes_at(job.codes + row * job.codes_step)
        for i in range(job.columns):
            codes[i] = np.uint8(np.int32(np.rint(_load(element, values, i) * steps)))
        floats_at(job.scales + row * job.scales_step)[0] = largest / _LEVELS


class RescaleJob(NamedTuple):
    """Addresses: sums (rows, columns), int32 or fp32; fp32 scales of the rows and of the columns; bias and out.

    bias, out: elements; bias: 0 where there is none. out_step: bytes from a row to the next. adds: to what is in `out`.
    """

    sums: int
    columns: int
    row_scales: int
    column_scales: int
    bias: int
    out: int
    out_step: int
    adds: bool


@jit
def rescale(element, counted, job, first, end):  # type: ignore[no-untyped-def]
    """Rows first..end-1 of out = sums x scale of the row x scale of the column (+ bias) (+ out).

    counted: a number whose type says what the sums are: int32 or float32.
    """
    columns = floats_at(job.column_scales)
    for row in range(first, end):
        sums, out = job.sums + 4 * row * job.columns, job.out + row * job.out_step
        scale = floats_at(job.row_scales)[row]
        if job.adds and job.bias != 0:
            for i in range(job.columns):
                value = _sum(counted, sums, i) * scale * columns[i]
                store_one(element, value + _load(element, job.bias, i) + _load(element, out, i), out, i)
        elif job.adds:
            for i in range(job.columns):
                store_one(element, _sum(counted, sums, i) * scale * columns[i] + _load(element, out, i), out, i)
        elif job.bias != 0:
            for i in range(job.columns):
                store_one(element, _sum(counted, sums, i) * scale * columns[i] + _load(element, job.bias, i), out, i)
        else:
            for i in range(job.columns):
                store_one(element, _sum(counted, sums, i) * scale * columns[i], out, i)


@jit
def _sum(counted, at, i):  # type: ignore[no-untyped-def]
    return floats_at(at)[i] if is_float(counted) else np.float32(ints_at(at)[i])


@jit
def _load(element, at, i):  # type: ignore[no-untyped-def]
    if vectors.planes(element) == 2:
        return bits_to_float(np.uint32(np.uint32(shorts_at(at)[i]) << np.uint32(16)))
    return floats_at(at)[i]


_STEP = np.float32(1 / 127)
# as in int8_loops
_HIGH = np.uint32(0xFFFF0000)
_MAGNITUDE = np.int32(0x7FFFFFFF)
_MOST = np.uint32(15)  # the last code


class Job(NamedTuple):
    """packed: the address of the first packed row; row_bytes, value_bytes: of one, and of its codes.

    out: the address of the first row in order, or of a blocked part, in which the first row is `first_row`; rows: of
    this part; out_step: bytes from a row to the next, in order; group: values of a group.
    """

    packed: int
    row_bytes: int
    value_bytes: int
    columns: int
    out: int
    out_step: int
    rows: int
    first_row: int
    group: int


@jit
def in_order(job, first, end):  # type: ignore[no-untyped-def]
    """Rows first..end-1: values, scale and sum (packing.int8_row_bytes)."""
    groups = (job.columns + job.group - 1) // job.group
    for row in range(first, end):
        codes, out = job.packed + row * job.row_bytes, job.out + row * job.out_step
        ends = words_at(codes + job.value_bytes)
        largest, steps = _largest(ends, groups)
        total = np.int32(0)
        for g in range(groups):
            n = min(job.group, job.columns - g * job.group)
            total += _group(codes + g * (job.group // 2), ends[g], steps, out + g * job.group, n)
        for i in range(job.columns, job.out_step - 8):
            bytes_at(out)[i] = np.uint8(0)
        floats_at(out + job.out_step - 8)[0] = largest * _STEP
        ints_at(out + job.out_step - 4)[0] = total


@jit
def blocked(job, first, end):  # type: ignore[no-untyped-def]
    """Strips first..end-1, ROWS rows each, of a blocked part: values, negative sums and scales."""
    groups = job.columns // GROUP
    for number in range(first, end):
        row, packed = job.first_row + number * ROWS, job.packed + number * ROWS * job.row_bytes
        sums = job.out + job.rows * job.columns + 4 * row
        scales = floats_at(sums + 4 * job.rows)
        for i in range(ROWS):
            ends = words_at(packed + i * job.row_bytes + job.value_bytes)
            largest, steps = _largest(ends, groups)
            scales[i] = largest * _STEP
            floats_at(sums)[i] = steps
        block, inside = row // BLOCK_ROWS, row % BLOCK_ROWS
        out = job.out + block * BLOCK_ROWS * job.columns + 4 * inside
        strip(packed, job.row_bytes, job.value_bytes, groups, out, sums)


@jit
def _largest(ends, groups):  # type: ignore[no-untyped-def]
    """The largest magnitude that codes of these groups can stand for, and 127 over it; zeros where there is none."""
    most = np.int32(0)  # bits of numbers without their sign sort as the numbers do
    for g in range(groups):
        most = max(most, float_to_bits(_value(np.uint32(0), ends[g])) & _MAGNITUDE)
        most = max(most, float_to_bits(_value(_MOST, ends[g])) & _MAGNITUDE)
    largest = bits_to_float(np.uint32(most))
    steps = quotient(_LEVELS, largest)
    if largest < _NOTHING:
        largest = steps = np.float32(0)
    return largest, steps


@jit
def _group(at, ends, steps, out, n):  # type: ignore[no-untyped-def]
    """n values of a group, and their sum."""
    codes, total = bytes_at(at), np.int32(0)
    for i in range(n // 2):
        code = np.uint32(codes[i])
        low, high = _int8(code & np.uint32(15), ends, steps), _int8(code >> np.uint32(4), ends, steps)
        shorts_at(out)[i] = np.uint16((low & np.int32(255)) | ((high & np.int32(255)) << np.int32(8)))
        total += low + high
    if n % 2 == 1:
        last = _int8(np.uint32(codes[n // 2]) & np.uint32(15), ends, steps)
        bytes_at(out)[n - 1] = np.uint8(last)
        total += last
    return total


@jit
def _int8(code, ends, steps):  # type: ignore[no-untyped-def]
    return np.int32(np.rint(_value(code, ends) * steps))


@jit
def _value(code, ends):  # type: ignore[no-untyped-def]
    scale, least = bits_to_float(np.uint32(ends << np.uint32(16))), bits_to_float(np.uint32(ends & _HIGH))
    return np.float32(np.int32(code)) * scale + least
