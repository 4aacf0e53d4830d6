"""The compiled loops of `quantised`: decode matrices of checkpoints to bf16, fp32 or int8 rows.

Two adjacent numbers are computed at a time. In bf16 they form one 4-byte word, so a vector of words
is stored directly.
"""

from __future__ import annotations

import numpy as np

from flexgen_h2o.core.packing import GROUP
from flexgen_h2o.core.units import BLOCK_ROWS, STRIP_ROWS
from flexgen_h2o.kernels.compiled.codes import (
    CHUNK,
    HAS_SHUFFLES,
    float_strip,
    mxfp4_largest,
    mxfp4_numbers,
    mxfp4_strip,
    numbers_of_4,
    numbers_of_words,
    table_of_words,
)
from flexgen_h2o.kernels.compiled.emitter import LANES, room
from flexgen_h2o.kernels.compiled.int8 import SCALE_STEP, factor_of, largest_magnitude
from flexgen_h2o.kernels.jit import (
    HIGH,
    bits_to_float,
    bytes_at,
    float_to_bits,
    floats_at,
    ints_at,
    jit,
    planes,
    set_number,
    to_bf16,
    words_at,
)

_PAIRS = 16  # pairs of numbers per MXFP4 block
_BLOCK = 32  # numbers per MXFP4 block
_strip_room = room(4 * STRIP_ROWS)

_MIN_NORMAL = np.uint32(8)  # least normal magnitude of e4m3, as a code
_NAN_CODE = np.uint32(127)
_NAN = np.uint32(0x7FC00000)
_REBIASED = np.uint32((127 - 7) << 23)
_LEAST = np.float32(2**-9)


@jit
def e4m3(code):  # type: ignore[no-untyped-def]
    magnitude = np.uint32(code & np.uint32(127))
    bits = np.uint32((magnitude << np.uint32(20)) + _REBIASED)
    small = np.uint32(float_to_bits(np.float32(np.int32(magnitude)) * _LEAST))
    bits = small if magnitude < _MIN_NORMAL else bits
    bits = _NAN if magnitude == _NAN_CODE else bits
    return bits_to_float(np.uint32(bits | ((code & np.uint32(128)) << np.uint32(24))))


@jit
def number(code, zero, scale):  # type: ignore[no-untyped-def]
    return (np.float32(np.int32(code)) - zero) * scale


@jit
def bits_of(x):  # type: ignore[no-untyped-def]
    """Return the bits of a float32 in the form that vector code accepts."""
    return np.int64(float_to_bits(x))


@jit
def unpack_mxfp4(element, blocks, scales, groups, out, out_step, tables, first, end):  # type: ignore[no-untyped-def]
    """Decode rows first..end-1.

    blocks, scales, out: addresses of the first row's; groups: blocks per row; out_step: bytes from
    a row of out to the next; tables: address of MXFP4_TABLES.
    """
    for row in range(first, end):
        at = blocks + row * groups * _PAIRS
        ends = scales + row * groups
        to = out + row * out_step
        mxfp4_numbers(element, (groups, to, at, ends, tables))


# Strips of STRIP_ROWS rows become strips of a blocked int8 matrix. out: address of the matrix;
# sums, row_scales: addresses of the negative sums and of the scales of its rows; start: row of the
# matrix that receives the first row.


@jit
def mxfp4_strips(out, columns, sums, row_scales, start, blocks, scales, first, end):  # type: ignore[no-untyped-def]
    """Convert strips first..end-1. blocks, scales: addresses of the first row's."""
    own = _strip_room()
    groups = columns // _BLOCK
    row_bytes = groups * _PAIRS
    for row in range(first * STRIP_ROWS, end * STRIP_ROWS, STRIP_ROWS):
        here = blocks + row * row_bytes
        ends = scales + row * groups
        for r in range(STRIP_ROWS):
            mxfp4_largest((here + r * row_bytes, ends + r * groups, groups // 2, own + 4 * r))
        _set_factors(row_scales + 4 * (start + row), own)
        to = _strip_of(out, columns, start + row)
        mxfp4_strip((here, row_bytes, ends, groups, groups // 2, to, own))
        _set_sums(sums + 4 * (start + row), own)


@jit
def float_strips(out, columns, sums, row_scales, start, values, first, end):  # type: ignore[no-untyped-def]
    """Convert strips first..end-1. values: address of the first row, float32."""
    own = _strip_room()
    row_bytes = 4 * columns
    for row in range(first * STRIP_ROWS, end * STRIP_ROWS, STRIP_ROWS):
        here = values + row * row_bytes
        for r in range(STRIP_ROWS):
            floats_at(own)[r] = largest_magnitude(np.float32(0), here + r * row_bytes, columns)
        _set_factors(row_scales + 4 * (start + row), own)
        to = _strip_of(out, columns, start + row)
        float_strip((here, row_bytes, columns // GROUP, to, own))
        _set_sums(sums + 4 * (start + row), own)


@jit
def _set_factors(scales, own):  # type: ignore[no-untyped-def]
    """Set the scales of a strip's rows from their largest magnitudes.

    own: the largest magnitudes, which are replaced by the factors of the numbers.
    """
    for r in range(STRIP_ROWS):
        largest, floats_at(own)[r] = factor_of(floats_at(own)[r])
        floats_at(scales)[r] = largest * SCALE_STEP


@jit
def _set_sums(sums, own):  # type: ignore[no-untyped-def]
    for r in range(STRIP_ROWS):
        ints_at(sums)[r] = ints_at(own)[r]


@jit
def _strip_of(out, columns, row):  # type: ignore[no-untyped-def]
    """Return the address of the strip of a matrix that begins at a row."""
    return out + row // BLOCK_ROWS * BLOCK_ROWS * columns + 4 * (row % BLOCK_ROWS)


@jit
def _store_pair(element, out, i, low, high):  # type: ignore[no-untyped-def]
    if planes(element) == 2:
        words_at(out)[i] = (to_bf16(low) >> np.uint32(16)) | (to_bf16(high) & HIGH)
    else:
        floats_at(out)[2 * i] = low
        floats_at(out)[2 * i + 1] = high


@jit
def unpack_fp8(  # type: ignore[no-untyped-def]
    element, codes, columns, scales, scale_columns, start, high, wide, out, out_step, first, end
):
    """Decode rows first..end-1.

    codes, out: addresses of the first row's; scales: address of the first block's; scale_columns:
    scales per row of blocks; start: index of the first row within its block; high, wide: rows and
    columns per block; out_step: bytes from a row of out to the next.
    """
    size = 4 // planes(element)
    for row in range(first, end):
        of_row = floats_at(scales + 4 * ((start + row) // high) * scale_columns)
        at = codes + row * columns
        for block in range(scale_columns):
            begin = block * wide
            scale = of_row[block]
            code_at = bytes_at(at + begin)
            to = out + row * out_step + begin * size
            for i in range(min(wide, columns - begin)):
                set_number(element, to, i, e4m3(np.uint32(code_at[i])) * scale)


# Scales and zeros are those of groups of `group` columns, of which a row has `groups`; `at` is the
# position of the first column in its group.


@jit
def unpack_integers(  # type: ignore[no-untyped-def]
    element,
    codes,
    row_bytes,
    bits,
    flip,
    scales,
    zeros,
    groups,
    group,
    at,
    which,
    columns,
    out,
    out_step,
    first,
    end,
):
    """Decode rows first..end-1.

    codes, scales, zeros, out: addresses of the first row's; without zeros the address is 0;
    row_bytes: of codes; flip: value with which codes are xored; which: address of the columns'
    groups, if columns are not in order, otherwise 0; out_step: bytes from a row of out to the next.
    """
    size = 4 // planes(element)
    middle = np.float32(1 << (bits - 1))
    for row in range(first, end):
        of_row = codes + row * row_bytes
        to = out + row * out_step
        row_scales = floats_at(scales + 4 * row * groups)
        row_zeros = floats_at(zeros + 4 * row * groups)
        if which != 0:
            _by_index(element, bits, columns, ints_at(which), of_row, row_zeros, row_scales, to)
            continue
        for g in range(at // group, (at + columns - 1) // group + 1):
            start = max(0, g * group - at)
            count = min((g + 1) * group - at, columns) - start
            zero = middle
            if zeros != 0:
                zero = row_zeros[g]
            from_ = of_row + start * bits // 8
            into = to + start * size
            if bits == 4:
                _group_of_4(element, from_, zero, row_scales[g], into, count)
            else:
                _group_of_8(element, from_, np.uint32(flip), zero, row_scales[g], into, count)


@jit
def _by_index(element, bits, columns, which, codes, zeros, scales, out):  # type: ignore[no-untyped-def]
    """Decode a row whose columns may have any groups."""
    code_at = bytes_at(codes)
    for i in range(columns // 2):
        one = which[2 * i]
        other = which[2 * i + 1]
        if bits == 4:
            first = np.uint32(code_at[i]) & np.uint32(15)
            second = np.uint32(code_at[i]) >> np.uint32(4)
        else:
            first = np.uint32(code_at[2 * i])
            second = np.uint32(code_at[2 * i + 1])
        low = number(first, zeros[one], scales[one])
        _store_pair(element, out, i, low, number(second, zeros[other], scales[other]))


@jit
def _group_of_4(element, at, zero, scale, out, count):  # type: ignore[no-untyped-def]
    codes = bytes_at(at)
    done = 0
    if HAS_SHUFFLES and planes(element) == 2:
        done = count // CHUNK
        numbers_of_4(element, (done, out, at, bits_of(zero), bits_of(scale)))
    for i in range(done * CHUNK // 2, count // 2):
        code = np.uint32(codes[i])
        low = number(code & np.uint32(15), zero, scale)
        _store_pair(element, out, i, low, number(code >> np.uint32(4), zero, scale))
    if count % 2 == 1:
        code = np.uint32(codes[count // 2]) & np.uint32(15)
        set_number(element, out, count - 1, number(code, zero, scale))


@jit
def _group_of_8(element, at, flip, zero, scale, out, count):  # type: ignore[no-untyped-def]
    codes = bytes_at(at)
    for i in range(count):
        set_number(element, out, i, number(np.uint32(codes[i]) ^ flip, zero, scale))


@jit
def unpack_awq(  # type: ignore[no-untyped-def]
    element, words, skip, scales, zeros, groups, group, at, columns, out, out_step, first, end
):
    """Decode rows first..end-1.

    words: address; each word holds 8 rows of a column: its codes 0, 4, 1, 5, 2, 6, 3 and 7. skip:
    rows of the first words that are before the first row. scales, zeros, out: addresses of the
    first row's. out_step: bytes from a row of out to the next.
    """
    size = 4 // planes(element)
    for row in range(first, end):
        inside = (row + skip) % 8
        shift = np.uint32(4 * (inside // 2) + 16 * (inside % 2))
        of_row = words + 4 * ((row + skip) // 8) * columns
        to = out + row * out_step
        ends = 4 * row * groups
        for g in range(at // group, (at + columns - 1) // group + 1):
            start = max(0, g * group - at)
            count = min((g + 1) * group - at, columns) - start
            scale = floats_at(scales + ends)[g]
            zero = floats_at(zeros + ends)[g]
            _shifted(element, of_row + 4 * start, shift, zero, scale, to + start * size, count)


@jit
def _shifted(element, at, shift, zero, scale, out, count):  # type: ignore[no-untyped-def]
    words = words_at(at)
    code = np.int64(shift), bits_of(zero), bits_of(scale)
    done = 0
    if HAS_SHUFFLES and planes(element) == 2:
        done = count - count % CHUNK
        table_of_words(element, (done // CHUNK, out, at, *code))
    else:
        done = count - count % LANES
        numbers_of_words(element, (done // LANES, out, at, *code))
    for i in range(done, count):
        set_number(element, out, i, number((words[i] >> shift) & np.uint32(15), zero, scale))
