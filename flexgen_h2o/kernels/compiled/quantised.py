"""The compiled loops of `quantised`: matrices of checkpoints in few bits into bf16 or fp32, or into int8 rows.

Two neighbours at a time: in bf16 they make one 4-byte word, so that a vector of words is stored as it comes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexgen_h2o.core.units import BLOCK_ROWS, STRIP_ROWS
from flexgen_h2o.kernels.compiled.emitter import room
from flexgen_h2o.kernels.compiled.int8 import SCALE_STEP, factor_of, mxfp4_largest, mxfp4_strip
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

_PAIRS = 16  # of a block
_BLOCK = 32
_strip_room = room(4 * STRIP_ROWS)


class Mxfp4Job(NamedTuple):
    """Addresses of the first row's blocks, scales and numbers; groups: blocks of a row; out_step: bytes from a row of
    `out` to the next."""

    blocks: int
    scales: int
    groups: int
    out: int
    out_step: int


@jit
def unpack_mxfp4(element, job, first, end):  # type: ignore[no-untyped-def]
    """Rows first..end-1."""
    size = 4 // planes(element)
    for row in range(first, end):
        scales = bytes_at(job.scales + row * job.groups)
        blocks, out = job.blocks + row * job.groups * _PAIRS, job.out + row * job.out_step
        for group in range(job.groups):
            scale = np.uint32(scales[group])
            at, to = blocks + group * _PAIRS, out + group * _BLOCK * size
            if np.uint32(2) <= scale <= np.uint32(252):
                _block(element, at, (scale - np.uint32(1)) << np.uint32(7), to)
            else:  # some numbers are too small or too large for what follows
                _any_block(element, at, scale, to)


@jit
def _block(element, at, base, out):  # type: ignore[no-untyped-def]
    codes = bytes_at(at)
    if planes(element) == 2:
        for i in range(_PAIRS):
            code = np.uint32(codes[i])
            words_at(out)[i] = _half(code, base) | (_half(code >> np.uint32(4), base) << np.uint32(16))
    else:
        for i in range(_PAIRS):
            code = np.uint32(codes[i])
            words_at(out)[2 * i] = _half(code, base) << np.uint32(16)
            words_at(out)[2 * i + 1] = _half(code >> np.uint32(4), base) << np.uint32(16)


@jit
def _half(code, base):  # type: ignore[no-untyped-def]
    """The upper 16 bits of a float32, which has no others. e2m1's exponent and mantissa bits lie together, as those of
    a float do: they are added to the scale's exponent less one. 0.5, which is not normal there, and 0 are not."""
    magnitude = code & np.uint32(7)
    bits = base + (magnitude << np.uint32(6))
    bits = base if magnitude == np.uint32(1) else bits
    bits = np.uint32(0) if magnitude == np.uint32(0) else bits
    return bits | ((code & np.uint32(8)) << np.uint32(12))


@jit
def _any_block(element, at, scale, out):  # type: ignore[no-untyped-def]
    # Twice the number times half the power, or half times twice: 2^-127 and 2^128 are no float32 with all their bits.
    shift = np.int32(1) if scale > np.uint32(127) else np.int32(-1)
    power = bits_to_float(np.uint32((np.int32(scale) - shift) << np.int32(23)))
    codes, base = bytes_at(at), np.uint32((126 + shift) << np.int32(7))
    for i in range(_BLOCK):
        code = np.uint32(codes[i >> 1]) >> np.uint32(4 * (i & 1))
        set_number(element, out, i, bits_to_float(np.uint32(_half(code, base) << np.uint32(16))) * power)


class StripJob(NamedTuple):
    """Addresses of the first row's blocks and scales, of a blocked int8 matrix, and of its rows' negative sums and
    scales. groups: blocks of a row; first: the matrix's row that the first one becomes."""

    blocks: int
    scales: int
    groups: int
    first: int
    out: int
    columns: int
    sums: int
    row_scales: int


@jit
def mxfp4_strips(job, first, end):  # type: ignore[no-untyped-def]
    """Strips first..end-1 of STRIP_ROWS rows."""
    own, row_bytes, groups = _strip_room(), job.groups * _PAIRS, job.groups // 2
    for strip in range(first, end):
        blocks, scales = job.blocks + strip * STRIP_ROWS * row_bytes, job.scales + strip * STRIP_ROWS * job.groups
        row = job.first + strip * STRIP_ROWS
        for r in range(STRIP_ROWS):
            mxfp4_largest((blocks + r * row_bytes, scales + r * job.groups, groups, own + 4 * r))
            largest, floats_at(own)[r] = factor_of(floats_at(own)[r])
            floats_at(job.row_scales)[row + r] = largest * SCALE_STEP
        out = job.out + row // BLOCK_ROWS * BLOCK_ROWS * job.columns + 4 * (row % BLOCK_ROWS)
        mxfp4_strip((blocks, row_bytes, scales, job.groups, groups, out, own))
        for r in range(STRIP_ROWS):
            ints_at(job.sums)[row + r] = ints_at(own)[r]


@jit
def _store_pair(element, out, i, low, high):  # type: ignore[no-untyped-def]
    if planes(element) == 2:
        words_at(out)[i] = (to_bf16(low) >> np.uint32(16)) | (to_bf16(high) & HIGH)
    else:
        floats_at(out)[2 * i] = low
        floats_at(out)[2 * i + 1] = high


class Fp8Job(NamedTuple):
    """Addresses of the first row's codes, of the first block's scales and of the first row's numbers.

    scale_columns: scales of a row of blocks; first: of the rows, within its block; high, wide: rows and columns of a
    block.
    """

    codes: int
    columns: int
    scales: int
    scale_columns: int
    first: int
    high: int
    wide: int
    out: int
    out_step: int


_LEAST_NORMAL = np.uint32(8)  # of e4m3
_NAN_CODE, _NAN = np.uint32(127), np.uint32(0x7FC00000)
_REBIASED = np.uint32((127 - 7) << 23)
_LEAST = np.float32(2**-9)


@jit
def _e4m3(code):  # type: ignore[no-untyped-def]
    magnitude = np.uint32(code & np.uint32(127))
    bits = np.uint32((magnitude << np.uint32(20)) + _REBIASED)
    small = np.uint32(float_to_bits(np.float32(np.int32(magnitude)) * _LEAST))
    bits = small if magnitude < _LEAST_NORMAL else bits
    bits = _NAN if magnitude == _NAN_CODE else bits
    return bits_to_float(np.uint32(bits | ((code & np.uint32(128)) << np.uint32(24))))


@jit
def unpack_fp8(element, job, first, end):  # type: ignore[no-untyped-def]
    """Rows first..end-1."""
    size = 4 // planes(element)
    for row in range(first, end):
        scales = floats_at(job.scales + 4 * ((job.first + row) // job.high) * job.scale_columns)
        codes, out = job.codes + row * job.columns, job.out + row * job.out_step
        for block in range(job.scale_columns):
            start = block * job.wide
            count, scale = min(job.wide, job.columns - start), scales[block]
            at, to = bytes_at(codes + start), out + start * size
            for i in range(count // 2):
                low, high = _e4m3(np.uint32(at[2 * i])), _e4m3(np.uint32(at[2 * i + 1]))
                _store_pair(element, to, i, low * scale, high * scale)
            if count % 2 == 1:
                set_number(element, to, count - 1, _e4m3(np.uint32(at[count - 1])) * scale)


class IntegerJob(NamedTuple):
    """Addresses of the first row's codes, scales, zeros (0: none) and numbers. flip: what codes are xored with.

    groups: scales of a row; group: columns that share one, of which the first column is `at` columns in; which: the
    address of the columns' groups where that is not so, or 0.
    """

    codes: int
    row_bytes: int
    bits: int
    flip: int
    scales: int
    zeros: int
    groups: int
    group: int
    at: int
    which: int
    columns: int
    out: int
    out_step: int


@jit
def unpack_integers(element, job, first, end):  # type: ignore[no-untyped-def]
    """Rows first..end-1."""
    size, middle = 4 // planes(element), np.float32(1 << (job.bits - 1))
    for row in range(first, end):
        codes, out = job.codes + row * job.row_bytes, job.out + row * job.out_step
        ends = 4 * row * job.groups
        if job.which != 0:
            _by_index(element, job, codes, floats_at(job.zeros + ends), floats_at(job.scales + ends), out)
            continue
        for g in range(job.at // job.group, (job.at + job.columns - 1) // job.group + 1):
            start = max(0, g * job.group - job.at)
            count = min((g + 1) * job.group - job.at, job.columns) - start
            scale, zero = floats_at(job.scales + ends)[g], middle
            if job.zeros != 0:
                zero = floats_at(job.zeros + ends)[g]
            from_, to = codes + start * job.bits // 8, out + start * size
            if job.bits == 4:
                _group_of_4(element, from_, zero, scale, to, count)
            else:
                _group_of_8(element, from_, np.uint32(job.flip), zero, scale, to, count)


@jit
def _by_index(element, job, codes, zeros, scales, out):  # type: ignore[no-untyped-def]
    """A row whose columns have any group."""
    which, code_at = ints_at(job.which), bytes_at(codes)
    if job.bits == 4:
        for i in range(job.columns // 2):
            code, one, other = np.uint32(code_at[i]), which[2 * i], which[2 * i + 1]
            low = _number(code & np.uint32(15), zeros[one], scales[one])
            _store_pair(element, out, i, low, _number(code >> np.uint32(4), zeros[other], scales[other]))
    else:
        for i in range(job.columns // 2):
            one, other = which[2 * i], which[2 * i + 1]
            low = _number(np.uint32(code_at[2 * i]), zeros[one], scales[one])
            high = _number(np.uint32(code_at[2 * i + 1]), zeros[other], scales[other])
            _store_pair(element, out, i, low, high)


@jit
def _group_of_4(element, at, zero, scale, out, count):  # type: ignore[no-untyped-def]
    codes = bytes_at(at)
    for i in range(count // 2):
        code = np.uint32(codes[i])
        low, high = _number(code & np.uint32(15), zero, scale), _number(code >> np.uint32(4), zero, scale)
        _store_pair(element, out, i, low, high)
    if count % 2 == 1:
        set_number(element, out, count - 1, _number(np.uint32(codes[count // 2]) & np.uint32(15), zero, scale))


@jit
def _group_of_8(element, at, flip, zero, scale, out, count):  # type: ignore[no-untyped-def]
    codes = bytes_at(at)
    for i in range(count // 2):
        low, high = np.uint32(codes[2 * i]) ^ flip, np.uint32(codes[2 * i + 1]) ^ flip
        _store_pair(element, out, i, _number(low, zero, scale), _number(high, zero, scale))
    if count % 2 == 1:
        set_number(element, out, count - 1, _number(np.uint32(codes[count - 1]) ^ flip, zero, scale))


@jit
def _number(code, zero, scale):  # type: ignore[no-untyped-def]
    return (np.float32(np.int32(code)) - zero) * scale


class AwqJob(NamedTuple):
    """Addresses of words (of 8 rows, one for each column), and of the first row's scales, zeros and numbers.

    skip: rows of the first words that are before the first; groups, group, at: as of IntegerJob.
    """

    words: int
    skip: int
    scales: int
    zeros: int
    groups: int
    group: int
    at: int
    columns: int
    out: int
    out_step: int


@jit
def unpack_awq(element, job, first, end):  # type: ignore[no-untyped-def]
    """Rows first..end-1. One of 8 in a word has code 0, 4, 1, 5, 2, 6, 3 or 7 of it."""
    size = 4 // planes(element)
    for row in range(first, end):
        at, inside = (row + job.skip) // 8, (row + job.skip) % 8
        shift = np.uint32(4 * (inside // 2) + 16 * (inside % 2))
        words, out = job.words + 4 * at * job.columns, job.out + row * job.out_step
        ends = 4 * row * job.groups
        for g in range(job.at // job.group, (job.at + job.columns - 1) // job.group + 1):
            start = max(0, g * job.group - job.at)
            count = min((g + 1) * job.group - job.at, job.columns) - start
            scale, zero = floats_at(job.scales + ends)[g], floats_at(job.zeros + ends)[g]
            _shifted(element, words + 4 * start, shift, zero, scale, out + start * size, count)


@jit
def _shifted(element, at, shift, zero, scale, out, count):  # type: ignore[no-untyped-def]
    words = words_at(at)
    for i in range(count // 2):
        low, high = (words[2 * i] >> shift) & np.uint32(15), (words[2 * i + 1] >> shift) & np.uint32(15)
        _store_pair(element, out, i, _number(low, zero, scale), _number(high, zero, scale))
    if count % 2 == 1:
        set_number(element, out, count - 1, _number((words[count - 1] >> shift) & np.uint32(15), zero, scale))


@jit
def sum_rows(codes, columns, sums, first, end):  # type: ignore[no-untyped-def]
    """Of int8, of rows first..end-1."""
    for row in range(first, end):
        at, total = bytes_at(codes + row * columns), np.int32(0)
        for i in range(columns):  # a byte less 256 where its sign is set
            total += np.int32(at[i]) - ((np.int32(at[i]) & np.int32(128)) << np.int32(1))
        ints_at(sums)[row] = total


_LINE_WORDS = 16


@jit
def block_rows(codes, columns, out, first, end):  # type: ignore[no-untyped-def]
    """Blocks first..end-1 of int8 rows: of BLOCK_ROWS rows together 4 columns in turn (kernels/int8.py). A cache line
    of each row at a time: where rows are a power of two of bytes apart, few of their lines stay in the cache."""
    words = columns // 4
    for block in range(first, end):
        start = BLOCK_ROWS * block * columns
        for begin in range(0, words, _LINE_WORDS):
            to = words_at(out + start + 4 * begin * BLOCK_ROWS)
            for row in range(BLOCK_ROWS):
                line = words_at(codes + start + row * columns + 4 * begin)
                for i in range(_LINE_WORDS):
                    to[i * BLOCK_ROWS + row] = line[i]
