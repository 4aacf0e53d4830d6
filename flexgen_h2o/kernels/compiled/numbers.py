"""Codes of quantised checkpoints into numbers: one by one, and by the same steps in vectors of LANES.

LLVM does not make vectors of such loops by itself: by them a number takes half as long.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from flexgen_h2o.kernels.compiled.emitter import F32, I32, Emitter, emitted_by_type
from flexgen_h2o.kernels.compiled.tiles import rounded
from flexgen_h2o.kernels.jit import bits_to_float, float_to_bits, jit, num_planes

LANES = 16
_WORDS = ir.VectorType(I32, LANES)
_FLOATS = ir.VectorType(F32, LANES)

_LEAST_NORMAL = np.uint32(8)  # of e4m3
_NAN_CODE, _NAN = np.uint32(127), np.uint32(0x7FC00000)
_REBIASED = np.uint32((127 - 7) << 23)
_LEAST = np.float32(2**-9)


@jit
def e4m3(code):  # type: ignore[no-untyped-def]
    magnitude = np.uint32(code & np.uint32(127))
    bits = np.uint32((magnitude << np.uint32(20)) + _REBIASED)
    small = np.uint32(float_to_bits(np.float32(np.int32(magnitude)) * _LEAST))
    bits = small if magnitude < _LEAST_NORMAL else bits
    bits = _NAN if magnitude == _NAN_CODE else bits
    return bits_to_float(np.uint32(bits | ((code & np.uint32(128)) << np.uint32(24))))


@jit
def number(code, zero, scale):  # type: ignore[no-untyped-def]
    return (np.float32(np.int32(code)) - zero) * scale


# ---- vectors


def _numbers(made: Callable[..., Any]) -> Any:
    """numbers(element, (vectors, out, at, ...)): made(e, the index of a vector, at, ...) of each, rounded to the
    element."""

    def emit(e: Emitter, element: Any, vectors: Any, out: Any, *source: Any) -> None:
        b, step = e.builder, e.number(LANES * 4 // num_planes(element))
        with e.loop(vectors) as loop:
            value = rounded(e, element, made(e, loop.index, *source))
            e.store(value, b.add(out, b.mul(loop.index, step)), align=2)

    return emitted_by_type(lambda element: element, emit)


def _spread_float(e: Emitter, bits: Any) -> Any:
    return e.spread([e.builder.bitcast(e.builder.trunc(bits, I32), F32)], LANES)


def _spread_word(e: Emitter, word: Any) -> Any:
    return e.spread([e.builder.trunc(word, I32)], LANES)


def _bytes_from(e: Emitter, at: Any, index: Any, count: int = LANES) -> Any:
    """So many bytes a vector, as words."""
    kind = ir.VectorType(ir.IntType(8), count)
    code = e.load(e.builder.add(at, e.builder.mul(index, e.number(count))), kind, align=1)
    return code if count < LANES else e.builder.zext(code, _WORDS)


def _less_zero(e: Emitter, codes: Any, zero: Any, scale: Any) -> Any:
    around = e.builder.fsub(e.builder.sitofp(codes, _FLOATS), _spread_float(e, zero))
    return e.builder.fmul(around, _spread_float(e, scale))


def _of_4(e: Emitter, index: Any, at: Any, zero: Any, scale: Any) -> Any:
    b, half = e.builder, _bytes_from(e, at, index, LANES // 2)
    twice = b.zext(e.shuffle(half, half, [lane // 2 for lane in range(LANES)]), _WORDS)
    codes = b.and_(b.lshr(twice, ir.Constant(_WORDS, [0, 4] * (LANES // 2))), e.constant(_WORDS, 15))
    return _less_zero(e, codes, zero, scale)


def _of_8(e: Emitter, index: Any, at: Any, flip: Any, zero: Any, scale: Any) -> Any:
    codes = e.builder.xor(_bytes_from(e, at, index), _spread_word(e, flip))
    return _less_zero(e, codes, zero, scale)


def _of_words(e: Emitter, index: Any, at: Any, shift: Any, zero: Any, scale: Any) -> Any:
    b, words = e.builder, e.load(e.onward(at, e.builder.mul(index, e.number(LANES))), _WORDS)
    codes = b.and_(b.lshr(words, _spread_word(e, shift)), e.constant(_WORDS, 15))
    return _less_zero(e, codes, zero, scale)


def _of_fp8(e: Emitter, index: Any, at: Any, scale: Any) -> Any:
    b, code = e.builder, _bytes_from(e, at, index)
    magnitude = b.and_(code, e.constant(_WORDS, 127))
    normal = b.add(b.shl(magnitude, e.constant(_WORDS, 20)), e.constant(_WORDS, int(_REBIASED)))
    small = b.fmul(b.sitofp(magnitude, _FLOATS), e.constant(_FLOATS, float(_LEAST)))
    is_small = b.icmp_unsigned("<", magnitude, e.constant(_WORDS, int(_LEAST_NORMAL)))
    bits = b.select(is_small, b.bitcast(small, _WORDS), normal)
    is_nan = b.icmp_unsigned("==", magnitude, e.constant(_WORDS, int(_NAN_CODE)))
    bits = b.select(is_nan, e.constant(_WORDS, int(_NAN)), bits)
    sign = b.shl(b.and_(code, e.constant(_WORDS, 128)), e.constant(_WORDS, 24))
    return b.fmul(b.bitcast(b.or_(bits, sign), _FLOATS), _spread_float(e, scale))


numbers_of_4, numbers_of_8, numbers_of_words = _numbers(_of_4), _numbers(_of_8), _numbers(_of_words)
fp8_numbers = _numbers(_of_fp8)


@jit
def bits_of(x):  # type: ignore[no-untyped-def]
    """As vector code takes a float32."""
    return np.int64(float_to_bits(x))
