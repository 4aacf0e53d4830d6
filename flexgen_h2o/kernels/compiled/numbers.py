"""Decode 4-bit codes of checkpoints by tables, and in vectors of LANES.

In bf16, a 4-bit code stands for one of 16 numbers of 2 bytes, as long as scales are the same. So
two shuffles of bytes (AVX2) look up CHUNK numbers, in half the time of numba's loop. If each word
holds one of the codes, vectors take three quarters of that loop's time. For codes of 8 bits, and
for adjacent codes in fp32, numba's loops are as fast. All give the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from flexgen_h2o.core.packing import E2M1, GROUP
from flexgen_h2o.kernels.compiled.emitter import F32, I16, I32, I64, Emitter, emitted_by_type
from flexgen_h2o.kernels.compiled.tiles import rounded
from flexgen_h2o.kernels.jit import bits_to_float, float_to_bits, jit, num_planes
from flexgen_h2o.kernels.workspace import cpu_has

LANES = 16
_WORDS = ir.VectorType(I32, LANES)
_FLOATS = ir.VectorType(F32, LANES)

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


def _spread_float(e: Emitter, bits: Any) -> Any:
    return e.spread([e.builder.bitcast(e.builder.trunc(bits, I32), F32)], LANES)


def _less_zero(e: Emitter, codes: Any, zero: Any, scale: Any) -> Any:
    around = e.builder.fsub(e.builder.sitofp(codes, _FLOATS), _spread_float(e, zero))
    return e.builder.fmul(around, _spread_float(e, scale))


# ---- tables

CHUNK = 32  # codes that are looked up at a time
HAS_SHUFFLES = cpu_has("avx2")
_I8 = ir.IntType(8)
_CODES = ir.VectorType(_I8, CHUNK)
_SIXTEEN = ir.VectorType(_I8, 16)
_SHORTS = ir.VectorType(I16, 16)


def _tables() -> np.ndarray[Any, np.dtype[np.uint8]]:
    numbers = np.array([*E2M1, *(-number for number in E2M1)], np.float64)
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


def _twice(e: Emitter, table: Any) -> Any:
    """Duplicate a table for both halves of a shuffle."""
    return e.shuffle(table, table, [*range(16), *range(16)])


def _table(e: Emitter, numbers: Any) -> list[Any]:
    """Return the low and the high bytes of 16 numbers of 16 bits, as tables."""
    b = e.builder
    return [
        _twice(e, b.trunc(b.lshr(numbers, e.constant(_SHORTS, shift)), _SIXTEEN))
        for shift in (0, 8)
    ]


def _looked_up(e: Emitter, table: list[Any], codes: Any) -> Any:
    """Look up CHUNK numbers of 16 bits. codes: one per byte."""
    low, high = (e.call("x86.avx2.pshuf.b", _CODES, part, codes) for part in table)
    both = e.shuffle(low, high, [lane // 2 + CHUNK * (lane % 2) for lane in range(2 * CHUNK)])
    return e.builder.bitcast(both, ir.VectorType(I16, CHUNK))


def _codes_of_4(e: Emitter, at: Any, index: Any) -> Any:
    place = e.builder.add(at, e.builder.mul(index, e.number(CHUNK // 2)))
    return codes_apart(e, e.load(place, _SIXTEEN, align=1))


def codes_apart(e: Emitter, codes: Any) -> Any:
    """Unpack codes, two per byte with the first in the low half, to one per byte."""
    b = e.builder
    wide = ir.VectorType(I16, codes.type.count)
    pairs = b.zext(codes, wide)
    apart = b.and_(b.or_(pairs, b.shl(pairs, e.constant(wide, 4))), e.constant(wide, 0x0F0F))
    return b.bitcast(apart, ir.VectorType(_I8, 2 * codes.type.count))


def packed_values(e: Emitter, ends: Any) -> Any:
    """Return the numbers of the 16 codes of a packed group, in fp32.

    ends: the address of the group's scale and least value.
    """
    b = e.builder
    scale, least = e.bf16_pairs(e.spread([e.load(ends, I32)], LANES))
    return b.fadd(
        b.fmul(ir.Constant(_FLOATS, [float(code) for code in range(LANES)]), scale), least
    )


def _codes_of_words(e: Emitter, at: Any, index: Any, shift: Any) -> Any:
    """Load CHUNK codes of which each word holds one at bit `shift`, as one per byte."""
    b = e.builder
    wide = ir.VectorType(I32, CHUNK)
    words = e.load(e.onward(at, b.mul(index, e.number(CHUNK))), wide)
    codes = b.lshr(words, e.spread([b.trunc(shift, I32)], CHUNK))
    return b.trunc(b.and_(codes, e.constant(wide, 15)), _CODES)


def _emit_by_code(codes_of: Callable[..., Any]) -> Callable[..., None]:
    """Return what emits (chunks, out, at, ..., zero, scale), which looks codes up in a table.

    The table is made of zero and scale. codes_of: returns the codes of a chunk.
    """

    def emit(e: Emitter, element: Any, chunks: Any, out: Any, *source: Any) -> None:
        if not by_tables(element):
            return
        b = e.builder
        numbers = _less_zero(e, ir.Constant(_WORDS, [*range(16)]), *source[-2:])
        table = _table(e, rounded(e, element, numbers))
        with e.loop(chunks) as loop:
            found = _looked_up(e, table, codes_of(e, source[0], loop.index, *source[1:-2]))
            e.store(found, b.add(out, b.mul(loop.index, e.number(2 * CHUNK))), align=2)

    return emit


def _emit_words(
    e: Emitter, element: Any, vectors: Any, out: Any, at: Any, shift: Any, zero: Any, scale: Any
) -> None:
    """Emit what decodes the code at bit `shift` of words, without a table."""
    b = e.builder
    step = e.number(LANES * 4 // num_planes(element))
    with e.loop(vectors) as loop:
        words = e.load(e.onward(at, b.mul(loop.index, e.number(LANES))), _WORDS)
        by = e.spread([b.trunc(shift, I32)], LANES)
        codes = b.and_(b.lshr(words, by), e.constant(_WORDS, 15))
        value = rounded(e, element, _less_zero(e, codes, zero, scale))
        e.store(value, b.add(out, b.mul(loop.index, step)), align=2)


def _emit_mxfp4(
    e: Emitter, element: Any, groups: Any, out: Any, blocks: Any, scales: Any, tables: Any
) -> None:
    if not HAS_SHUFFLES:
        return
    b = e.builder
    size = 4 // num_planes(element)
    with e.loop(groups) as loop:
        scale = b.zext(e.load(b.add(scales, loop.index), _I8, align=1), I64)
        table = b.add(tables, b.mul(scale, e.number(CHUNK)))
        parts = [_twice(e, e.load(b.add(table, e.number(at)), _SIXTEEN, align=1)) for at in (0, 16)]
        found = _looked_up(e, parts, _codes_of_4(e, blocks, loop.index))
        if size == 4:
            wide = ir.VectorType(I32, CHUNK)
            found = b.shl(b.zext(found, wide), e.constant(wide, 16))
        e.store(found, b.add(out, b.mul(loop.index, e.number(size * CHUNK))), align=2)


def _emit_packed(e: Emitter, element: Any, groups: Any, out: Any, packed: Any, ends: Any) -> None:
    if not by_tables(element):
        return
    b = e.builder
    chunks = GROUP // CHUNK
    with e.loop(groups) as loop:
        # there is no NaN, because packed weights are finite
        bits = b.bitcast(packed_values(e, e.onward(ends, loop.index)), _WORDS)
        odd = b.and_(b.lshr(bits, e.constant(_WORDS, 16)), e.constant(_WORDS, 1))
        near = b.lshr(b.add(b.add(bits, e.constant(_WORDS, 0x7FFF)), odd), e.constant(_WORDS, 16))
        table = _table(e, b.trunc(near, _SHORTS))
        for chunk in range(chunks):
            index = b.add(b.mul(loop.index, e.number(chunks)), e.number(chunk))
            found = _looked_up(e, table, _codes_of_4(e, packed, index))
            e.store(found, b.add(out, b.mul(index, e.number(2 * CHUNK))), align=2)


# numbers_of_4(element, (chunks, out, at, zero, scale)): decode 4-bit codes, two per byte; only if
# `by_tables`. table_of_words(element, (chunks, out, at, shift, zero, scale)): the same for words
# that hold one of the codes. numbers_of_words(element, (vectors, ...)): the same without a table.
numbers_of_4 = emitted_by_type(lambda element: element, _emit_by_code(_codes_of_4))
table_of_words = emitted_by_type(lambda element: element, _emit_by_code(_codes_of_words))
numbers_of_words = emitted_by_type(lambda element: element, _emit_words)
# mxfp4_numbers(element, (groups, out, blocks, scales, tables)): decode a row; only if HAS_SHUFFLES.
mxfp4_numbers = emitted_by_type(lambda element: element, _emit_mxfp4)
# packed_numbers(element, (groups, out, packed, ends)): decode whole groups of a packed row of 4
# bits; only if `by_tables`.
packed_numbers = emitted_by_type(lambda element: element, _emit_packed)


@jit
def bits_of(x):  # type: ignore[no-untyped-def]
    """Return the bits of a float32 in the form that vector code accepts."""
    return np.int64(float_to_bits(x))
