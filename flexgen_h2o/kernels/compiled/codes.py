"""Vector code that decodes 4-bit codes, to numbers or to int8, by tables of the 16 codes.

As long as scales are the same, a 4-bit code stands for one of 16 numbers: of 2 bytes in bf16, of
one byte in int8. So one or two shuffles of bytes (AVX2, or AVX-512 BW) look up a vector of codes.
That takes half the time of numba's loop. If each word holds one of the codes, vectors take three
quarters of that loop's time. For codes of 8 bits, and for adjacent codes in fp32, numba's loops are
as fast. All give the same numbers.

A strip is 16 packed rows that become int8. Their int8 values, 4 columns per word, are transposed in
registers, so that whole cache lines are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir

from flexgen_h2o.core.packing import E2M1, GROUP
from flexgen_h2o.core.units import BLOCK_ROWS
from flexgen_h2o.core.units import STRIP_ROWS as ROWS  # one word of each row fills a vector
from flexgen_h2o.kernels.compiled.emitter import (
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    SHORTS,
    Emitter,
    Value,
    Variable,
    bf16_pairs,
    emitted,
    emitted_by_type,
    join,
    near_bf16,
    rounded,
    transposed,
)
from flexgen_h2o.kernels.jit import num_planes
from flexgen_h2o.kernels.workspace import cpu_has

# ---- codes to numbers

CHUNK = 32  # codes that are looked up at a time
HAS_SHUFFLES = cpu_has("avx2")
_CODES = ir.VectorType(I8, CHUNK)
_SIXTEEN = ir.VectorType(I8, 16)
_WIDE = ir.VectorType(I32, CHUNK)
_SIGNED_E2M1 = [*E2M1, *(-number for number in E2M1)]


def _tables() -> np.ndarray[Any, np.dtype[np.uint8]]:
    numbers = np.array(_SIGNED_E2M1, np.float64)
    with np.errstate(over="ignore"):
        values = (numbers * 2.0 ** (np.arange(256)[:, None] - 127)).astype(np.float32)
    halves = values.view(np.uint32) >> 16
    return np.concatenate([halves & 255, halves >> 8], 1).astype(np.uint8)


# (256, 32): for each scale of an MXFP4 block the numbers of its 16 codes, first all low bytes. bf16
# holds them exactly.
MXFP4_TABLES = _tables()


def by_tables(element: Any) -> bool:
    """Return whether numbers are bf16 and the CPU has the instructions for tables."""
    return num_planes(element) == 2 and HAS_SHUFFLES


def _spread_float(e: Emitter, bits: Value) -> Value:
    return e.spread([bits.trunc(I32).bitcast(F32)], LANES)


def _less_zero(e: Emitter, codes: Value, zero: Value, scale: Value) -> Value:
    return (codes.sitofp(FLOATS) - _spread_float(e, zero)) * _spread_float(e, scale)


def _twice(table: Value) -> Value:
    """Duplicate a table for both halves of a shuffle."""
    return table.take([*range(16), *range(16)])


def _table(numbers: Value) -> list[Value]:
    """Return the low and the high bytes of 16 numbers of 16 bits, as tables."""
    return [_twice((numbers >> shift).trunc(_SIXTEEN)) for shift in (0, 8)]


def _looked_up(e: Emitter, table: list[Value], codes: Value) -> Value:
    """Look up CHUNK numbers of 16 bits. codes: one per byte."""
    low, high = (e.call("x86.avx2.pshuf.b", _CODES, part, codes) for part in table)
    both = low.shuffle(high, [lane // 2 + CHUNK * (lane % 2) for lane in range(2 * CHUNK)])
    return both.bitcast(ir.VectorType(I16, CHUNK))


def _codes_of_4(e: Emitter, at: Value, index: Value) -> Value:
    return _codes_apart(e.load(at + index * (CHUNK // 2), _SIXTEEN, align=1))


def _codes_apart(codes: Value) -> Value:
    """Unpack codes, two per byte with the first in the low half, to one per byte."""
    pairs = codes.zext(ir.VectorType(I16, codes.type.count))
    return ((pairs | pairs << 4) & 0x0F0F).bitcast(ir.VectorType(I8, 2 * codes.type.count))


def _packed_values(e: Emitter, ends: Value) -> Value:
    """Return the numbers of the 16 codes of a packed group, in fp32.

    ends: the address of the group's scale and least value.
    """
    scale, least = bf16_pairs(e.spread([e.load(ends, I32)], LANES))
    return e.vector(F32, [float(code) for code in range(LANES)]) * scale + least


def _codes_of_words(e: Emitter, at: Value, index: Value, shift: Value) -> Value:
    """Load CHUNK codes of which each word holds one at bit `shift`, as one per byte."""
    words = e.load(at + index * (4 * CHUNK), _WIDE)
    return ((words >> e.spread([shift.trunc(I32)], CHUNK)) & 15).trunc(_CODES)


def _emit_by_code(
    codes_of: Callable[..., Value],
    e: Emitter,
    element: Any,
    chunks: Value,
    out: Value,
    at: Value,
    *source: Value,
) -> None:
    """Emit what looks codes up in a table, which is made of zero and scale, the last of `source`.

    codes_of: returns the codes of a chunk.
    """
    if not by_tables(element):
        return
    codes = e.vector(I32, [*range(LANES)])
    table = _table(rounded(element, _less_zero(e, codes, *source[-2:])))
    with e.loop(chunks) as index:
        found = _looked_up(e, table, codes_of(e, at, index, *source[:-2]))
        e.store(found, out + index * (2 * CHUNK), align=2)


def _emit_words(
    e: Emitter,
    element: Any,
    vectors: Value,
    out: Value,
    at: Value,
    shift: Value,
    zero: Value,
    scale: Value,
) -> None:
    """Emit what decodes the code at bit `shift` of words, without a table."""
    with e.loop(vectors) as index:
        words = e.load(at + index * (4 * LANES), INTS)
        codes = (words >> e.spread([shift.trunc(I32)], LANES)) & 15
        value = rounded(element, _less_zero(e, codes, zero, scale))
        e.store(value, out + index * (LANES * 4 // num_planes(element)), align=2)


def _emit_mxfp4(
    e: Emitter,
    element: Any,
    groups: Value,
    out: Value,
    blocks: Value,
    scales: Value,
    tables: Value,
) -> None:
    if not HAS_SHUFFLES:
        return
    size = 4 // num_planes(element)
    with e.loop(groups) as index:
        scale = e.load(scales + index, I8, align=1).zext(I64)
        table = tables + scale * CHUNK
        halves = [_twice(e.load(table + at, _SIXTEEN, align=1)) for at in (0, 16)]
        found = _looked_up(e, halves, _codes_of_4(e, blocks, index))
        if size == 4:
            found = found.zext(_WIDE) << 16
        e.store(found, out + index * (size * CHUNK), align=2)


def _emit_packed(
    e: Emitter, element: Any, groups: Value, out: Value, packed: Value, ends: Value
) -> None:
    if not by_tables(element):
        return
    chunks = GROUP // CHUNK
    with e.loop(groups) as index:
        # there is no NaN, because packed weights are finite
        bits = _packed_values(e, ends + index * 4).bitcast(INTS)
        table = _table((near_bf16(bits) >> 16).trunc(SHORTS))
        for chunk in range(chunks):
            number = index * chunks + chunk
            found = _looked_up(e, table, _codes_of_4(e, packed, number))
            e.store(found, out + number * (2 * CHUNK), align=2)


# numbers_of_4(element, (chunks, out, at, zero, scale)): decode 4-bit codes, two per byte; only if
# `by_tables`. table_of_words(element, (chunks, out, at, shift, zero, scale)): the same for words
# that hold one of the codes. numbers_of_words(element, (vectors, ...)): the same without a table.
numbers_of_4 = emitted_by_type(partial(_emit_by_code, _codes_of_4))
table_of_words = emitted_by_type(partial(_emit_by_code, _codes_of_words))
numbers_of_words = emitted_by_type(_emit_words)
# mxfp4_numbers(element, (groups, out, blocks, scales, tables)): decode a row; only if HAS_SHUFFLES.
mxfp4_numbers = emitted_by_type(_emit_mxfp4)
# packed_numbers(element, (groups, out, packed, ends)): decode whole groups of a packed row of 4
# bits; only if `by_tables`.
packed_numbers = emitted_by_type(_emit_packed)

# ---- codes to int8

LAST_CODE = 15
_WORD = 4  # columns per word
_ALL_ZERO = -1024  # orders a block of zeros below all others
_ORDER_BITS = 22  # bits of a float below its exponent and first mantissa bit
_INFINITE = 255 << 1
_GROUP_BYTES = ROWS * (GROUP // 2 + 4)  # bytes of one group of a strip's packed rows
_LINE = 64  # bytes per cache line
_BYTES = ir.VectorType(I8, GROUP)
_HALF_BYTES = ir.VectorType(I8, GROUP // 2)
_BYTE_PAIRS = ir.VectorType(I16, GROUP // 2)


def _emit_strip(
    line: Callable[..., Value],
    ahead: int,
    e: Emitter,
    at: Value,
    row_bytes: Value,
    *places: Value,
) -> None:
    """Emit what converts a strip of rows to int8.

    line: makes the GROUP int8 values of a group of a row, as words. ahead: bytes of the next strip
    that are prefetched with each group.
    """
    *ends, groups, out, totals = places
    sums = Variable(e.constant(INTS, 0))
    with e.loop(groups) as group:
        lines = []
        for row in range(ROWS):
            step = e.load(totals + 4 * row, F32)
            lines.append(line(e, group, row, step, at + row_bytes * row, *ends))
        # The hardware cannot prefetch as many as 16 rows at once.
        next_one = at + row_bytes * ROWS + group * ahead
        for some in range(0, ahead, _LINE):
            e.prefetch(next_one + some)
        to = out + group * (GROUP * BLOCK_ROWS)
        total = e.constant(_BYTE_PAIRS, 0)
        for number, words in enumerate(transposed(lines)):
            e.store(words, to + number * (_WORD * BLOCK_ROWS))
            total = total + _pair_sums(e, words)
        sums.value = sums.value - _halves_added(total)
    e.store(sums.value, totals)


def _line_of_codes(
    end_bytes: int,
    table: Callable[..., Value],
    e: Emitter,
    group: Value,
    row: int,
    step: Value,
    packed: Value,
    ends: Value,
    ends_step: Value,
) -> Value:
    """Return a line for `_emit_strip` whose codes are looked up in a table.

    end_bytes: bytes that say how GROUP codes of a row are scaled; table: makes the codes' int8
    values from the address of these bytes.
    """
    end = ends + ends_step * row + group * end_bytes
    codes = e.load(packed + group * (GROUP // 2), _HALF_BYTES, align=1)
    return _look_up(e, table(e, end, step), codes).bitcast(INTS)


def _line_of_floats(e: Emitter, group: Value, _row: int, step: Value, values: Value) -> Value:
    steps = e.spread([step], ROWS)
    at = values + group * (4 * GROUP)
    numbers = [e.load(at + 4 * i, FLOATS) for i in range(0, GROUP, ROWS)]
    return join([_nearest(e, part * steps) for part in numbers]).bitcast(INTS)


def _emit_row(
    e: Emitter, packed: Value, ends: Value, groups: Value, out: Value, total: Value
) -> None:
    step = e.load(total, F32)
    sums = Variable(e.constant(INTS, 0))
    with e.loop(groups) as group:
        codes = e.load(packed + group * (GROUP // 2), _HALF_BYTES)
        values = _look_up(e, _int8_table(e, ends + group * 4, step), codes)
        e.store(values, out + group * GROUP)
        sums.value = sums.value + _halves_added(_pair_sums(e, values))
    e.store(e.call(f"vector.reduce.add.v{ROWS}i32", I32, sums.value), total)


def _halves_added(halves: Value) -> Value:
    """Return the sums of two adjacent int16 each, as int32."""
    pairs = halves.bitcast(INTS)
    return (pairs << 16).ashr(16) + pairs.ashr(16)


def _int8_table(e: Emitter, ends: Value, step: Value) -> Value:
    """Return the int8 values of the 16 codes of a group, repeated four times.

    ends: the address of the group's scale and least value.
    """
    table = _nearest(e, _packed_values(e, ends) * e.spread([step], ROWS))
    return table.take([i % ROWS for i in range(GROUP)])


def _mxfp4_table(e: Emitter, scales: Value, step: Value) -> Value:
    """Return the int8 values of the 16 codes of two MXFP4 blocks, repeated twice each.

    scales: the address of the blocks' scales.
    """
    tables = []
    for i in range(2):
        scale = e.load(scales + i, I8, align=1).zext(I32)
        # 2^(scale - 128). It is 0 if it is not a normal number: compared with the least largest
        # magnitude of a row, 1e-30, all such numbers become 0.
        power = (e.call("usub.sat.i32", I32, scale, ir.Constant(I32, 1)) << 23).bitcast(F32)
        value = e.vector(F32, [2 * number for number in _SIGNED_E2M1]) * e.spread([power], ROWS)
        tables.append(_nearest(e, value * e.spread([step], ROWS)))
    lanes = [i % ROWS + i // (GROUP // 2) * ROWS for i in range(GROUP)]
    return tables[0].shuffle(tables[1], lanes)


def _emit_mxfp4_largest(
    e: Emitter, blocks: Value, scales: Value, groups: Value, out: Value
) -> None:
    """Emit the largest magnitude of MXFP4 codes m with scales s.

    2 s + m - 2 is the exponent and first mantissa bit of a magnitude. Exceptions: 0.5 (m = 1) is
    one power less than 1, and 0 is less than all.
    """
    most = Variable(e.constant(_BYTE_PAIRS, _ALL_ZERO))
    with e.loop(groups) as group:
        codes = e.load(blocks + group * (GROUP // 2), _HALF_BYTES, align=1)
        m = e.call("umax.v32i8", _HALF_BYTES, codes & 7, (codes >> 4) & 7).zext(_BYTE_PAIRS)
        for code, order in ((0, _ALL_ZERO), (1, 0)):
            m = (m == code).select(e.constant(_BYTE_PAIRS, order), m)
        both = e.load(scales + group * 2, ir.VectorType(I8, 2), align=1)
        twice = both.zext(ir.VectorType(I16, 2)).take([i // 16 for i in range(32)]) << 1
        most.value = e.call("smax.v32i16", _BYTE_PAIRS, most.value, twice + m)
    largest = e.call("vector.reduce.smax.v32i16", I16, most.value) - 2
    # subnormal numbers become 0 or similar, and larger ones infinite
    for name, bound in (("smax", 0), ("smin", _INFINITE)):
        largest = e.call(f"{name}.i16", I16, largest, ir.Constant(I16, bound))
    e.store(largest.zext(I32) << _ORDER_BITS, out)


def _emit_largest(e: Emitter, ends: Value, vectors: Value, out: Value) -> None:
    """Emit the largest magnitude of 16 groups at a time, by the bits of magnitudes.

    A loop over one group after another takes longer than a strip.
    """
    most = Variable(e.constant(INTS, 0))
    with e.loop(vectors) as index:
        scale, least = bf16_pairs(e.load(ends + index * (4 * ROWS), INTS))
        for code in (0.0, float(LAST_CODE)):
            bits = (scale * code + least).bitcast(INTS) & 0x7FFFFFFF
            most.value = e.call(f"smax.v{ROWS}i32", INTS, most.value, bits)
    e.store(e.call(f"vector.reduce.smax.v{ROWS}i32", I32, most.value), out)


def _nearest(e: Emitter, values: Value) -> Value:
    """Return the nearest int8 numbers."""
    whole = e.call(f"rint.v{ROWS}f32", FLOATS, values)
    return whole.fptosi(INTS).trunc(ir.VectorType(I8, ROWS))


def _look_up(e: Emitter, table: Value, codes: Value) -> Value:
    """Look up codes, two per byte with the first in the low half."""
    return _on_bytes(e, "pshuf.b", "pshuf.b", I8, table, _codes_apart(codes))


def _pair_sums(e: Emitter, words: Value) -> Value:
    """Return the sums of two adjacent int8 each, as int16."""
    ones = e.constant(_BYTES, 1)
    return _on_bytes(e, "pmaddubs.w", "pmadd.ub.sw", I16, ones, words.bitcast(_BYTES))


def _on_bytes(e: Emitter, avx512: str, avx2: str, result: Any, *vectors: Value) -> Value:
    """Emit an instruction on 64 bytes, by its name in AVX-512 or AVX2.

    result: type of its numbers.
    """
    if cpu_has("avx512bw"):
        return e.call(
            f"x86.avx512.{avx512}.512", ir.VectorType(result, 8 * GROUP // result.width), *vectors
        )
    return e.call_by_halves(
        f"x86.avx2.{avx2}", ir.VectorType(result, 4 * GROUP // result.width), *vectors
    )


# largest_in_lanes((ends, vectors, out)): write the bits of the largest magnitude of `vectors` x 16
# groups to an int32.
largest_in_lanes = emitted(_emit_largest)
# strip((packed, row_bytes, ends, ends_step, groups, out, totals)). packed: the address of 16 packed
# rows, `row_bytes` apart; ends: address of the scales and least values of the first row,
# `ends_step` from those of the next; groups: per row; out: the address of the strip; totals: of 16
# floats, the factors of the values before rounding, which become the negative sums of the rows,
# int32.
# - mxfp4_strip: the same, but `ends` are the scales, and a group is two blocks.
# - float_strip((values, row_bytes, groups, out, totals)): the same for rows of float32.
# - mxfp4_largest((blocks, scales, groups, out)): write the largest magnitude of a row to a float.
#   If it is subnormal, the result may be any subnormal number. groups: as in mxfp4_strip.
mxfp4_largest = emitted(_emit_mxfp4_largest)
_packed_line = partial(_line_of_codes, 4, _int8_table)
_mxfp4_line = partial(_line_of_codes, 2, _mxfp4_table)
strip = emitted(partial(_emit_strip, _packed_line, _GROUP_BYTES))
mxfp4_strip = emitted(partial(_emit_strip, _mxfp4_line, _GROUP_BYTES))
float_strip = emitted(partial(_emit_strip, _line_of_floats, 0))
# row_of_groups((packed, ends, groups, out, total)), compiled only if HAS_SHUFFLES. packed, ends:
# the addresses of a packed row, and of its scales and least values; out: address of its int8
# values; total: address of a float, the factor of the values, which becomes their sum, int32.
row_of_groups = emitted(_emit_row)
