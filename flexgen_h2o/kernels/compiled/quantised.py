"""The compiled loops of `quantised`: decode matrices of checkpoints to bf16, fp32 or int8 rows.

Two adjacent numbers are computed at a time. In bf16 they form one 4-byte word, so a vector of words
is stored directly.
"""

from __future__ import annotations

from typing import NamedTuple

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


class Mxfp4Job(NamedTuple):
    """Hold the arguments of `unpack_mxfp4`; addresses are of the first row."""

    blocks: int  # address
    scales: int  # address
    groups: int  # blocks per row
    out: int  # address
    out_step: int  # bytes from a row of out to the next
    tables: int  # address of MXFP4_TABLES


@jit
def unpack_mxfp4(element, job, first, end):  # type: ignore[no-untyped-def]
    """Decode rows first..end-1."""
    for row in range(first, end):
        scales = job.scales + row * job.groups
        blocks = job.blocks + row * job.groups * _PAIRS
        out = job.out + row * job.out_step
        if HAS_SHUFFLES:
            mxfp4_numbers(element, (job.groups, out, blocks, scales, job.tables))
        else:
            _look_up_row(element, job, blocks, scales, out)


@jit
def _look_up_row(element, job, blocks, scales, out):  # type: ignore[no-untyped-def]
    """Decode a row number by number."""
    for group in range(job.groups):
        low = bytes_at(job.tables + _BLOCK * np.int64(bytes_at(scales)[group]))
        for i in range(_BLOCK):
            code = bytes_at(blocks + group * _PAIRS)[i >> 1] >> np.uint8(4 * (i & 1)) & np.uint8(15)
            half = np.uint32(low[code]) | (np.uint32(low[np.int64(code) + 16]) << np.uint32(8))
            set_number(
                element, out, group * _BLOCK + i, bits_to_float(np.uint32(half << np.uint32(16)))
            )


class StripJob(NamedTuple):
    """Describe a blocked int8 matrix to which strips are written."""

    out: int  # address of the matrix
    columns: int
    sums: int  # address of the negative sums of its rows
    row_scales: int  # address of the scales of its rows
    first: int  # row of the matrix that receives the first row


@jit
def mxfp4_strips(job, blocks, scales, first, end):  # type: ignore[no-untyped-def]
    """Convert strips first..end-1 of STRIP_ROWS rows.

    blocks, scales: addresses of the first row's.
    """
    own = _strip_room()
    groups = job.columns // _BLOCK
    row_bytes = groups * _PAIRS
    for strip in range(first, end):
        row = strip * STRIP_ROWS
        here = blocks + row * row_bytes
        ends = scales + row * groups
        for r in range(STRIP_ROWS):
            mxfp4_largest((here + r * row_bytes, ends + r * groups, groups // 2, own + 4 * r))
        _set_factors(job, row, own)
        mxfp4_strip((here, row_bytes, ends, groups, groups // 2, _strip_of(job, row), own))
        _set_sums(job, row, own)


@jit
def float_strips(job, values, first, end):  # type: ignore[no-untyped-def]
    """Convert strips first..end-1 of STRIP_ROWS rows. values: address of the first row, float32."""
    own = _strip_room()
    row_bytes = 4 * job.columns
    for strip in range(first, end):
        row = strip * STRIP_ROWS
        here = values + row * row_bytes
        for r in range(STRIP_ROWS):
            floats_at(own)[r] = largest_magnitude(np.float32(0), here + r * row_bytes, job.columns)
        _set_factors(job, row, own)
        float_strip((here, row_bytes, job.columns // GROUP, _strip_of(job, row), own))
        _set_sums(job, row, own)


@jit
def _set_factors(job, row, own):  # type: ignore[no-untyped-def]
    """Set the scales of rows from their largest magnitudes.

    own: the largest magnitudes, which are replaced by the factors of the numbers.
    """
    for r in range(STRIP_ROWS):
        largest, floats_at(own)[r] = factor_of(floats_at(own)[r])
        floats_at(job.row_scales)[job.first + row + r] = largest * SCALE_STEP


@jit
def _set_sums(job, row, own):  # type: ignore[no-untyped-def]
    for r in range(STRIP_ROWS):
        ints_at(job.sums)[job.first + row + r] = ints_at(own)[r]


@jit
def _strip_of(job, row):  # type: ignore[no-untyped-def]
    """Return the address of a strip in its block."""
    at = job.first + row
    return job.out + at // BLOCK_ROWS * BLOCK_ROWS * job.columns + 4 * (at % BLOCK_ROWS)


@jit
def _store_pair(element, out, i, low, high):  # type: ignore[no-untyped-def]
    if planes(element) == 2:
        words_at(out)[i] = (to_bf16(low) >> np.uint32(16)) | (to_bf16(high) & HIGH)
    else:
        floats_at(out)[2 * i] = low
        floats_at(out)[2 * i + 1] = high


class Fp8Job(NamedTuple):
    """Hold the arguments of `unpack_fp8`."""

    codes: int  # address of the first row's codes
    columns: int
    scales: int  # address of the first block's scale
    scale_columns: int  # scales per row of blocks
    first: int  # index of the first row within its block
    high: int  # rows per block
    wide: int  # columns per block
    out: int  # address of the first row's numbers
    out_step: int  # bytes from a row of out to the next


@jit
def unpack_fp8(element, job, first, end):  # type: ignore[no-untyped-def]
    """Decode rows first..end-1."""
    size = 4 // planes(element)
    for row in range(first, end):
        scales = floats_at(job.scales + 4 * ((job.first + row) // job.high) * job.scale_columns)
        codes = job.codes + row * job.columns
        out = job.out + row * job.out_step
        for block in range(job.scale_columns):
            start = block * job.wide
            count = min(job.wide, job.columns - start)
            scale = scales[block]
            at = bytes_at(codes + start)
            to = out + start * size
            for i in range(count):
                set_number(element, to, i, e4m3(np.uint32(at[i])) * scale)


class IntegerJob(NamedTuple):
    """Hold the arguments of `unpack_integers`; addresses are of the first row."""

    codes: int  # address
    row_bytes: int  # bytes of codes per row
    bits: int
    flip: int  # value with which codes are xored
    scales: int  # address
    zeros: int  # address; 0: there are no zeros
    groups: int  # scales per row
    group: int  # columns that share a scale
    at: int  # position of the first column in its group
    which: int  # address of the columns' groups, if columns are not in order; otherwise 0
    columns: int
    out: int  # address
    out_step: int  # bytes from a row of out to the next


@jit
def unpack_integers(element, job, first, end):  # type: ignore[no-untyped-def]
    """Decode rows first..end-1."""
    size = 4 // planes(element)
    middle = np.float32(1 << (job.bits - 1))
    for row in range(first, end):
        codes = job.codes + row * job.row_bytes
        out = job.out + row * job.out_step
        ends = 4 * row * job.groups
        if job.which != 0:
            _by_index(
                element, job, codes, floats_at(job.zeros + ends), floats_at(job.scales + ends), out
            )
            continue
        for g in range(job.at // job.group, (job.at + job.columns - 1) // job.group + 1):
            start = max(0, g * job.group - job.at)
            count = min((g + 1) * job.group - job.at, job.columns) - start
            scale = floats_at(job.scales + ends)[g]
            zero = middle
            if job.zeros != 0:
                zero = floats_at(job.zeros + ends)[g]
            from_ = codes + start * job.bits // 8
            to = out + start * size
            if job.bits == 4:
                _group_of_4(element, from_, zero, scale, to, count)
            else:
                _group_of_8(element, from_, np.uint32(job.flip), zero, scale, to, count)


@jit
def _by_index(element, job, codes, zeros, scales, out):  # type: ignore[no-untyped-def]
    """Decode a row whose columns may have any groups."""
    which = ints_at(job.which)
    code_at = bytes_at(codes)
    if job.bits == 4:
        for i in range(job.columns // 2):
            code = np.uint32(code_at[i])
            one = which[2 * i]
            other = which[2 * i + 1]
            low = number(code & np.uint32(15), zeros[one], scales[one])
            _store_pair(
                element, out, i, low, number(code >> np.uint32(4), zeros[other], scales[other])
            )
    else:
        for i in range(job.columns // 2):
            one = which[2 * i]
            other = which[2 * i + 1]
            low = number(np.uint32(code_at[2 * i]), zeros[one], scales[one])
            high = number(np.uint32(code_at[2 * i + 1]), zeros[other], scales[other])
            _store_pair(element, out, i, low, high)


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


class AwqJob(NamedTuple):
    """Hold the arguments of `unpack_awq`."""

    words: int  # address; each word holds 8 rows of a column
    skip: int  # rows of the first words that are before the first row
    scales: int  # address of the first row's scales
    zeros: int  # address of the first row's zeros
    groups: int  # as in IntegerJob
    group: int  # as in IntegerJob
    at: int  # as in IntegerJob
    columns: int
    out: int  # address of the first row's numbers
    out_step: int  # bytes from a row of out to the next


@jit
def unpack_awq(element, job, first, end):  # type: ignore[no-untyped-def]
    """Decode rows first..end-1.

    The 8 rows of a word have its codes 0, 4, 1, 5, 2, 6, 3 and 7.
    """
    size = 4 // planes(element)
    for row in range(first, end):
        at = (row + job.skip) // 8
        inside = (row + job.skip) % 8
        shift = np.uint32(4 * (inside // 2) + 16 * (inside % 2))
        words = job.words + 4 * at * job.columns
        out = job.out + row * job.out_step
        ends = 4 * row * job.groups
        for g in range(job.at // job.group, (job.at + job.columns - 1) // job.group + 1):
            start = max(0, g * job.group - job.at)
            count = min((g + 1) * job.group - job.at, job.columns) - start
            scale = floats_at(job.scales + ends)[g]
            zero = floats_at(job.zeros + ends)[g]
            _shifted(element, words + 4 * start, shift, zero, scale, out + start * size, count)


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


@jit
def sum_rows(codes, columns, sums, first, end):  # type: ignore[no-untyped-def]
    """Sum the int8 codes of rows first..end-1."""
    for row in range(first, end):
        at = bytes_at(codes + row * columns)
        total = np.int32(0)
        for i in range(columns):  # a byte, minus 256 if its sign bit is set
            total += np.int32(at[i]) - ((np.int32(at[i]) & np.int32(128)) << np.int32(1))
        ints_at(sums)[row] = total


_LINE_WORDS = 16  # words per cache line


@jit
def block_rows(codes, columns, out, first, end):  # type: ignore[no-untyped-def]
    """Convert blocks first..end-1 of int8 rows to the blocked layout (kernels/int8.py).

    It copies a cache line of each row at a time. If rows are a power of two of bytes apart, few of
    their lines stay in the cache.
    """
    words = columns // 4
    for block in range(first, end):
        start = BLOCK_ROWS * block * columns
        for begin in range(0, words, _LINE_WORDS):
            to = words_at(out + start + 4 * begin * BLOCK_ROWS)
            for row in range(BLOCK_ROWS):
                line = words_at(codes + start + row * columns + 4 * begin)
                for i in range(_LINE_WORDS):
                    to[i * BLOCK_ROWS + row] = line[i]
