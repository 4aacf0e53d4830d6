"""The compiled loops of int8 products: quantise inputs, rescale sums, and requantise 4-bit rows.

4-bit rows become int8 rows in order here, or in strips of blocks in the loop of products.
"""

from __future__ import annotations

import numpy as np

from flexgen_h2o.core.packing import GROUP
from flexgen_h2o.core.units import STRIP_ROWS as ROWS
from flexgen_h2o.kernels.compiled.codes import (
    HAS_SHUFFLES,
    LAST_CODE,
    largest_in_lanes,
    row_of_groups,
)
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


@jit
def quantise(  # type: ignore[no-untyped-def]
    element, values, values_step, columns, codes, codes_step, scales, scales_step, zero, first, end
):
    """Quantise rows first..end-1.

    element: a number whose type says what values are (see jit.py). values, codes, scales: addresses
    of the first row's; *_step: bytes from a row's to the next row's. zero: added to each code.
    """
    for row in range(first, end):
        at = values + row * values_step
        largest, steps = factor_of(largest_magnitude(element, at, columns))
        to = bytes_at(codes + row * codes_step)
        for i in range(columns):
            code = np.int32(np.rint(number_at(element, at, i) * steps))
            to[i] = np.uint8(code + np.int32(zero))
        floats_at(scales + row * scales_step)[0] = largest / _LEVELS


@jit
def largest_magnitude(element, values, columns):  # type: ignore[no-untyped-def]
    """Return the largest magnitude of a row of numbers of that type, or NaN if there is one."""
    most = np.int32(0)
    for i in range(columns):
        most = max(most, float_to_bits(number_at(element, values, i)) & _MAGNITUDE)
    return bits_to_float(np.uint32(most))


@jit
def rescale(  # type: ignore[no-untyped-def]
    element, sums, columns, row_scales, column_scales, bias, out, out_step, adds, first, end
):
    """Set out = sums x row's scale x column's scale (+ bias) (+ out) in rows first..end-1.

    sums: address of (rows, columns) int32; row_scales, column_scales: addresses of fp32; bias:
    address of (columns,) elements, or 0; out: address of (rows, columns) elements, with rows
    `out_step` bytes apart; adds: whether to add to what is in `out`.
    """
    for row in range(first, end):
        of_row = ints_at(sums + 4 * row * columns)
        to = out + row * out_step
        scale = floats_at(row_scales)[row]
        for i in range(columns):
            added = number_at(element, bias, i) if bias != 0 else np.float32(0)
            before = number_at(element, to, i) if adds else np.float32(0)
            total = np.float32(of_row[i])
            value = scaled(total, scale, floats_at(column_scales)[i], added, before)
            set_number(element, to, i, value)


SCALE_STEP = np.float32(1 / 127)
_MOST = np.uint32(LAST_CODE)


@jit
def in_order(packed, row_bytes, value_bytes, group, columns, out, out_step, first, end):  # type: ignore[no-untyped-def]
    """Requantise rows first..end-1: values, scale and sum (packing.int8_row_bytes).

    packed, out: addresses of the first packed row and of the first int8 row, which are `row_bytes`
    and `out_step` apart; value_bytes: of a row's codes; group: values per group.
    """
    groups = (columns + group - 1) // group
    for row in range(first, end):
        codes = packed + row * row_bytes
        to = out + row * out_step
        ends = codes + value_bytes
        place = to + out_step - 4
        largest, steps = largest_of(ends, groups, place)
        floats_at(to + out_step - 8)[0] = largest * SCALE_STEP
        if columns % GROUP == 0 and HAS_SHUFFLES:
            floats_at(place)[0] = steps
            row_of_groups((codes, ends, groups, to, place))
            continue
        total = np.int32(0)
        for g in range(groups):
            n = min(group, columns - g * group)
            total += _group(codes + g * (group // 2), words_at(ends)[g], steps, to + g * group, n)
        for i in range(columns, out_step - 8):
            bytes_at(to)[i] = np.uint8(0)
        ints_at(place)[0] = total


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
