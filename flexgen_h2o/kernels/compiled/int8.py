"""The compiled loops of int8 products: quantise inputs, and requantise 4-bit rows.

4-bit rows become int8 rows in order here, or in strips of blocks in the loop of products.
"""

from __future__ import annotations

import numpy as np

from flexgen_h2o.core.packing import GROUP
from flexgen_h2o.core.units import STRIP_ROWS as ROWS
from flexgen_h2o.kernels.compiled.codes import (
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


SCALE_STEP = np.float32(1 / 127)
_MOST = np.uint32(LAST_CODE)


@jit
def in_order(packed, row_bytes, value_bytes, columns, out, out_step, first, end):  # type: ignore[no-untyped-def]
    """Requantise rows first..end-1: values, scale and sum (packing.int8_row_bytes).

    packed, out: addresses of the first packed row and of the first int8 row, which are `row_bytes`
    and `out_step` apart; value_bytes: of a row's codes. A row has whole groups, so its values have
    no padding behind them.
    """
    groups = columns // GROUP
    for row in range(first, end):
        codes = packed + row * row_bytes
        to = out + row * out_step
        ends = codes + value_bytes
        place = to + out_step - 4
        largest, steps = largest_of(ends, groups, place)
        floats_at(to + out_step - 8)[0] = largest * SCALE_STEP
        floats_at(place)[0] = steps
        row_of_groups((codes, ends, groups, to, place))


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
