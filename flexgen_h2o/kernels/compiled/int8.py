"""The compiled loops of int8 products: quantise inputs, rescale sums, and requantise 4-bit rows.

4-bit rows become int8 rows in order here, or in strips of blocks in the loop of products.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexgen_h2o.core.packing import GROUP
from flexgen_h2o.core.units import STRIP_ROWS as ROWS
from flexgen_h2o.kernels.compiled.codes import LAST_CODE, largest_in_lanes, row_of_groups
from flexgen_h2o.kernels.jit import (
    bits_to_float,
    bytes_at,
    decoded,
    float_to_bits,
    floats_at,
    ints_at,
    jit,
    jit_rounded,
    number_at,
    set_number,
    shorts_at,
    words_at,
)

# the bits of a float without its sign, which sort as magnitudes do, NaN last
_MAGNITUDE = np.int32(0x7FFFFFFF)
_LEVELS = np.float32(127)
# a row without larger magnitudes is all zeros, because 127 divided by it would be infinite
_TINY = np.float32(1e-30)


@jit_rounded
def scaled(total, scale, column_scale, bias, before):  # type: ignore[no-untyped-def]
    """Convert a sum of products of codes to a result. bias, before: 0 if there is none."""
    return total * scale * column_scale + bias + before


@jit_rounded
def quotient(above, below):  # type: ignore[no-untyped-def]
    return above / below


class QuantiseJob(NamedTuple):
    """Hold the arguments of `quantise`; addresses are of the first row."""

    values: int  # address
    values_step: int  # bytes from a row to the next
    columns: int
    codes: int  # address
    codes_step: int  # bytes from a row to the next
    scales: int  # address
    scales_step: int  # bytes from a row's scale to the next row's
    zero: int  # added to each code


@jit
def quantise(element, job, first, end):  # type: ignore[no-untyped-def]
    """Quantise rows first..end-1.

    element: a number whose type says what values are (see jit.py).
    """
    for row in range(first, end):
        values = job.values + row * job.values_step
        largest, steps = factor_of(largest_magnitude(element, values, job.columns))
        codes = bytes_at(job.codes + row * job.codes_step)
        zero = np.int32(job.zero)
        for i in range(job.columns):
            codes[i] = np.uint8(np.int32(np.rint(number_at(element, values, i) * steps)) + zero)
        floats_at(job.scales + row * job.scales_step)[0] = largest / _LEVELS


@jit
def largest_magnitude(element, values, columns):  # type: ignore[no-untyped-def]
    """Return the largest magnitude of a row of numbers of that type, or NaN if there is one."""
    most = np.int32(0)
    for i in range(columns):
        most = max(most, float_to_bits(number_at(element, values, i)) & _MAGNITUDE)
    return bits_to_float(np.uint32(most))


class RescaleJob(NamedTuple):
    """Hold the arguments of `rescale`."""

    sums: int  # address of (rows, columns) int32
    columns: int
    row_scales: int  # address of (rows,) fp32
    column_scales: int  # address of (columns,) fp32
    bias: int  # address of (columns,) elements; 0: none
    out: int  # address of (rows, columns) elements
    out_step: int  # bytes from a row of out to the next
    adds: bool  # add to what is in `out`


@jit
def rescale(element, job, first, end):  # type: ignore[no-untyped-def]
    """Set out = sums x row's scale x column's scale (+ bias) (+ out) in rows first..end-1."""
    columns = floats_at(job.column_scales)
    for row in range(first, end):
        sums = ints_at(job.sums + 4 * row * job.columns)
        out = job.out + row * job.out_step
        scale = floats_at(job.row_scales)[row]
        for i in range(job.columns):
            bias = number_at(element, job.bias, i) if job.bias != 0 else np.float32(0)
            before = number_at(element, out, i) if job.adds else np.float32(0)
            set_number(
                element, out, i, scaled(np.float32(sums[i]), scale, columns[i], bias, before)
            )


SCALE_STEP = np.float32(1 / 127)
_MOST = np.uint32(LAST_CODE)


class RequantiseJob(NamedTuple):
    """Hold the arguments of `in_order`."""

    packed: int  # address of the first packed row
    row_bytes: int  # bytes per packed row
    value_bytes: int  # bytes of a row's codes
    group: int  # values per group
    columns: int
    out: int  # address of the first int8 row
    out_step: int  # bytes from an int8 row to the next


@jit
def in_order(job, first, end):  # type: ignore[no-untyped-def]
    """Requantise rows first..end-1: values, scale and sum (packing.int8_row_bytes)."""
    groups = (job.columns + job.group - 1) // job.group
    for row in range(first, end):
        codes = job.packed + row * job.row_bytes
        out = job.out + row * job.out_step
        ends = words_at(codes + job.value_bytes)
        largest, steps = largest_of(codes + job.value_bytes, groups, out + job.out_step - 4)
        total = np.int32(0)
        for g in range(groups):
            n = min(job.group, job.columns - g * job.group)
            total += _group(codes + g * (job.group // 2), ends[g], steps, out + g * job.group, n)
        for i in range(job.columns, job.out_step - 8):
            bytes_at(out)[i] = np.uint8(0)
        floats_at(out + job.out_step - 8)[0] = largest * SCALE_STEP
        ints_at(out + job.out_step - 4)[0] = total


@jit
def in_order_by_groups(job, first, end):  # type: ignore[no-untyped-def]
    """Run `in_order` on rows whose columns are whole groups of GROUP values."""
    groups = job.columns // GROUP
    for row in range(first, end):
        codes = job.packed + row * job.row_bytes
        out = job.out + row * job.out_step
        ends = codes + job.value_bytes
        total = out + job.out_step - 4
        largest, steps = largest_of(ends, groups, total)
        floats_at(out + job.out_step - 8)[0] = largest * SCALE_STEP
        floats_at(total)[0] = steps
        row_of_groups((codes, ends, groups, out, total))


@jit
def largest_of(ends, groups, place):  # type: ignore[no-untyped-def]
    """Return the largest magnitude that codes of these groups can stand for, and 127 divided by it.

    Both are zero if the magnitude is too small. ends: address of the groups' scales and least
    values; place: address of 4 bytes that are overwritten.
    """
    largest_in_lanes((ends, groups // ROWS, place))
    most = ints_at(place)[0]
    for g in range(groups // ROWS * ROWS, groups):
        for code in (np.uint32(0), _MOST):
            most = max(most, float_to_bits(decoded(code, words_at(ends)[g])) & _MAGNITUDE)
    return factor_of(bits_to_float(np.uint32(most)))


@jit
def factor_of(largest):  # type: ignore[no-untyped-def]
    """Return the largest magnitude of a row, and 127 divided by it; zeros if it is too small."""
    steps = quotient(_LEVELS, largest)
    if largest < _TINY:
        largest = steps = np.float32(0)
    return largest, steps


@jit
def _group(at, ends, steps, out, n):  # type: ignore[no-untyped-def]
    """Write n values of a group, and return their sum."""
    codes = bytes_at(at)
    total = np.int32(0)
    for i in range(n // 2):
        code = np.uint32(codes[i])
        low = _int8(code & np.uint32(15), ends, steps)
        high = _int8(code >> np.uint32(4), ends, steps)
        shorts_at(out)[i] = np.uint16(
            (low & np.int32(255)) | ((high & np.int32(255)) << np.int32(8))
        )
        total += low + high
    if n % 2 == 1:
        last = _int8(np.uint32(codes[n // 2]) & np.uint32(15), ends, steps)
        bytes_at(out)[n - 1] = np.uint8(last)
        total += last
    return total


@jit
def _int8(code, ends, steps):  # type: ignore[no-untyped-def]
    return np.int32(np.rint(decoded(code, ends) * steps))
