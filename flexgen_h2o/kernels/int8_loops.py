"""The compiled loops of int8 products: rows of numbers into int8 before them, and their sums into numbers after."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexgen_h2o.kernels import vectors
from flexgen_h2o.kernels.jit import bits_to_float, bytes_at, float_to_bits, floats_at, ints_at, is_float, jit, shorts_at
from flexgen_h2o.kernels.unpack_loops import store_one

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
