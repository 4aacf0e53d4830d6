"""The compiled loops of int8 products: quantise inputs, rescale sums, and requantise 4-bit rows.

4-bit rows become int8 rows in order, or in strips of blocks. Rows of whole groups are made by LLVM
vector code. A group of a row has 16 codes, so its int8 values are a table of 16 bytes in a vector.
One shuffle of bytes looks up 64 codes. A strip is 16 packed rows. Their int8 values, 4 columns per
word, are transposed in registers, so that whole cache lines are stored. The instructions are those
of AVX-512 (BW), or of AVX2 for each half.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from flexgen_h2o.core.packing import E2M1, GROUP
from flexgen_h2o.core.units import BLOCK_ROWS
from flexgen_h2o.core.units import STRIP_ROWS as ROWS  # one word of each row fills a vector
from flexgen_h2o.kernels.compiled.emitter import F32, I32, Emitter, cgutils, emitted
from flexgen_h2o.kernels.compiled.numbers import codes_apart, packed_values
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
from flexgen_h2o.kernels.workspace import cpu_has

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
_MOST = np.uint32(15)  # the last code


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


# ---- strips

_WORD = 4  # columns per word
_ALL_ZERO = -1024  # orders a block of zeros below all others
_ORDER_BITS = 22  # bits of a float below its exponent and first mantissa bit
_INFINITE = 255 << 1
_GROUP_BYTES = ROWS * (GROUP // 2 + 4)  # bytes of one group of a strip's packed rows
_LINE = 64  # bytes per cache line
_I8 = ir.IntType(8)
_I16 = ir.IntType(16)
_BYTES = ir.VectorType(_I8, GROUP)
_HALVES = ir.VectorType(_I16, GROUP // 2)
_WORDS = ir.VectorType(I32, ROWS)
_FLOATS = ir.VectorType(F32, ROWS)


def _strip(line: Callable[..., Any], ahead: int = 0) -> Any:
    """Return an intrinsic that converts a strip of rows to int8.

    line: makes the GROUP int8 values of a group of a row, as words, from the addresses of the
    strip's rows. ahead: bytes of the next strip that are prefetched with each group.
    """

    def emit(e: Emitter, *places: Any) -> None:
        _emit_strip(e, line, ahead, *places)

    return emitted(emit)


def _emit_strip(e: Emitter, line: Any, ahead: int, *places: Any) -> None:
    b = e.builder
    *rows, groups, out, totals = places
    sums = cgutils.alloca_once(b, _WORDS)
    b.store(e.constant(_WORDS, 0), sums)
    with e.loop(groups) as loop:
        lines = []
        for row in range(ROWS):
            step = e.load(b.add(totals, e.number(4 * row)), F32)
            lines.append(line(e, rows, row, loop.index, step))
        # The hardware cannot prefetch as many as 16 rows at once.
        start, row_bytes = rows[:2]
        next_one = b.add(
            b.add(start, b.mul(row_bytes, e.number(ROWS))), b.mul(loop.index, e.number(ahead))
        )
        for at in range(0, ahead, _LINE):
            e.prefetch(b.add(next_one, e.number(at)))
        at = b.add(out, b.mul(loop.index, e.number(GROUP * BLOCK_ROWS)))
        total = e.constant(_HALVES, 0)
        for number, words in enumerate(e.transposed(lines)):
            e.store(words, b.add(at, e.number(number * _WORD * BLOCK_ROWS)))
            total = b.add(total, _pair_sums(e, words))
        b.store(b.sub(b.load(sums), _halves_added(e, total)), sums)
    e.store(b.load(sums), totals)


def _line_of_codes(end_bytes: int, table: Callable[[Emitter, Any, Any], Any]) -> Callable[..., Any]:
    """Return a `line` for `_strip` that looks codes up in tables.

    end_bytes: bytes that say how GROUP codes of a row are scaled; table: makes the codes' int8
    values from the address of these bytes.
    """

    def line(e: Emitter, rows: list[Any], row: int, group: Any, step: Any) -> Any:
        b = e.builder
        packed, row_bytes, ends, ends_step = rows
        end = b.add(b.add(ends, b.mul(ends_step, e.number(row))), b.mul(group, e.number(end_bytes)))
        start = b.add(packed, b.mul(row_bytes, e.number(row)))
        at = b.add(start, b.mul(group, e.number(GROUP // 2)))
        codes = e.load(at, ir.VectorType(_I8, GROUP // 2), align=1)
        return b.bitcast(_look_up(e, table(e, end, step), codes), _WORDS)

    return line


def _line_of_floats(e: Emitter, rows: list[Any], row: int, group: Any, step: Any) -> Any:
    b = e.builder
    values, row_bytes = rows
    steps = e.spread([step], ROWS)
    at = b.add(b.add(values, b.mul(row_bytes, e.number(row))), b.mul(group, e.number(4 * GROUP)))
    parts = [e.load(b.add(at, e.number(4 * i)), _FLOATS) for i in range(0, GROUP, ROWS)]
    return b.bitcast(e.join([_rounded(e, b.fmul(part, steps)) for part in parts]), _WORDS)


def _emit_row(e: Emitter, packed: Any, ends: Any, groups: Any, out: Any, total: Any) -> None:
    b = e.builder
    step = e.load(total, F32)
    sums = cgutils.alloca_once(b, _WORDS)
    b.store(e.constant(_WORDS, 0), sums)
    with e.loop(groups) as loop:
        codes = e.load(
            b.add(packed, b.mul(loop.index, e.number(GROUP // 2))), ir.VectorType(_I8, GROUP // 2)
        )
        values = _look_up(e, _table(e, b.add(ends, b.mul(loop.index, e.number(4))), step), codes)
        e.store(values, b.add(out, b.mul(loop.index, e.number(GROUP))))
        b.store(b.add(b.load(sums), _halves_added(e, _pair_sums(e, values))), sums)
    e.store(e.call(f"vector.reduce.add.v{ROWS}i32", I32, b.load(sums)), total)


def _halves_added(e: Emitter, halves: Any) -> Any:
    """Return the sums of two adjacent int16 each, as int32."""
    b = e.builder
    pairs = e.builder.bitcast(halves, _WORDS)
    half = e.constant(_WORDS, 16)
    return b.add(b.ashr(b.shl(pairs, half), half), b.ashr(pairs, half))


def _table(e: Emitter, ends: Any, step: Any) -> Any:
    """Return the int8 values of the 16 codes of a group, repeated four times.

    ends: the address of the group's scale and least value.
    """
    table = _rounded(e, e.builder.fmul(packed_values(e, ends), e.spread([step], ROWS)))
    return e.shuffle(table, table, [i % ROWS for i in range(GROUP)])


def _mxfp4_table(e: Emitter, scales: Any, step: Any) -> Any:
    """Return the int8 values of the 16 codes of two MXFP4 blocks, repeated twice each.

    scales: the address of the blocks' scales.
    """
    b = e.builder
    tables = []
    twice = ir.Constant(_FLOATS, [2 * number for number in (*E2M1, *(-number for number in E2M1))])
    for i in range(2):
        scale = b.zext(e.load(b.add(scales, e.number(i)), _I8, align=1), I32)
        # 2^(scale - 128). It is 0 if it is not a normal number: compared with the least largest
        # magnitude of a row, 1e-30, all such numbers become 0.
        bits = e.call("usub.sat.i32", I32, scale, ir.Constant(I32, 1))
        power = b.bitcast(b.shl(bits, ir.Constant(I32, 23)), F32)
        value = b.fmul(twice, e.spread([power], ROWS))
        tables.append(_rounded(e, b.fmul(value, e.spread([step], ROWS))))
    return e.shuffle(
        tables[0], tables[1], [i % ROWS + i // (GROUP // 2) * ROWS for i in range(GROUP)]
    )


def _emit_mxfp4_largest(e: Emitter, blocks: Any, scales: Any, groups: Any, out: Any) -> None:
    """Emit the largest magnitude of MXFP4 codes m with scales s.

    2 s + m - 2 is the exponent and first mantissa bit of a magnitude. Exceptions: 0.5 (m = 1) is
    one power less than 1, and 0 is less than all.
    """
    b = e.builder
    bytes_, halves, scale_pair = (
        ir.VectorType(*kind) for kind in ((_I8, 32), (_I16, 32), (_I8, 2))
    )
    most = cgutils.alloca_once(b, halves)
    b.store(e.constant(halves, _ALL_ZERO), most)
    with e.loop(groups) as loop:
        codes = e.load(b.add(blocks, b.mul(loop.index, e.number(GROUP // 2))), bytes_, align=1)
        seven = e.constant(bytes_, 7)
        pair = b.and_(codes, seven), b.and_(b.lshr(codes, e.constant(bytes_, 4)), seven)
        m = b.zext(e.call("umax.v32i8", bytes_, *pair), halves)
        for code, order in ((0, _ALL_ZERO), (1, 0)):
            m = b.select(
                b.icmp_unsigned("==", m, e.constant(halves, code)), e.constant(halves, order), m
            )
        both = e.load(b.add(scales, b.mul(loop.index, e.number(2))), scale_pair, align=1)
        pair = b.zext(both, ir.VectorType(_I16, 2))
        twice = b.shl(e.shuffle(pair, pair, [i // 16 for i in range(32)]), e.constant(halves, 1))
        b.store(e.call("smax.v32i16", halves, b.load(most), b.add(twice, m)), most)
    order = b.sub(e.call("vector.reduce.smax.v32i16", _I16, b.load(most)), ir.Constant(_I16, 2))
    # subnormal numbers become 0 or similar, and larger ones infinite
    for name, bound in (("smax", 0), ("smin", _INFINITE)):
        order = e.call(f"{name}.i16", _I16, order, ir.Constant(_I16, bound))
    e.store(b.shl(b.zext(order, I32), ir.Constant(I32, _ORDER_BITS)), out)


def _emit_largest(e: Emitter, ends: Any, vectors: Any, out: Any) -> None:
    """Emit the largest magnitude of 16 groups at a time, by the bits of magnitudes.

    A loop over one group after another takes longer than a strip.
    """
    b = e.builder
    most = cgutils.alloca_once(e.builder, _WORDS)
    b.store(e.constant(_WORDS, 0), most)
    with e.loop(vectors) as loop:
        scale, least = e.bf16_pairs(
            e.load(b.add(ends, b.mul(loop.index, e.number(4 * ROWS))), _WORDS)
        )
        for code in (0.0, float(_MOST)):
            value = b.fadd(b.fmul(e.constant(_FLOATS, code), scale), least)
            bits = b.and_(b.bitcast(value, _WORDS), e.constant(_WORDS, int(_MAGNITUDE)))
            b.store(e.call(f"smax.v{ROWS}i32", _WORDS, b.load(most), bits), most)
    e.store(e.call(f"vector.reduce.smax.v{ROWS}i32", I32, b.load(most)), out)


def _rounded(e: Emitter, values: Any) -> Any:
    whole = e.call(f"rint.v{ROWS}f32", _FLOATS, values)
    return e.builder.trunc(e.builder.fptosi(whole, _WORDS), ir.VectorType(_I8, ROWS))


def _look_up(e: Emitter, table: Any, codes: Any) -> Any:
    """Look up codes, two per byte with the first in the low half."""
    return _on_bytes(e, "pshuf.b", "pshuf.b", _I8, table, codes_apart(e, codes))


def _pair_sums(e: Emitter, words: Any) -> Any:
    """Return the sums of two adjacent int8 each, as int16."""
    bytes_of = e.builder.bitcast(words, _BYTES)
    return _on_bytes(e, "pmaddubs.w", "pmadd.ub.sw", _I16, e.constant(_BYTES, 1), bytes_of)


def _on_bytes(e: Emitter, avx512: str, avx2: str, result: Any, *vectors: Any) -> Any:
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
strip = _strip(_line_of_codes(4, _table), _GROUP_BYTES)
mxfp4_strip = _strip(_line_of_codes(2, _mxfp4_table), _GROUP_BYTES)
float_strip = _strip(_line_of_floats)
# row_of_groups((packed, ends, groups, out, total)). packed, ends: the addresses of a packed row,
# and of its scales and least values; out: address of its int8 values; total: address of a float,
# the factor of the values, which becomes their sum, int32.
row_of_groups = emitted(_emit_row)
