"""LLVM vector code that turns 16 packed rows of 4 bits into a strip of a blocked int8 matrix (kernels/int8_blocked.py).

A group of a row has 16 codes, so its int8 values are a table of 16 bytes in a vector, and 64 codes are looked up by one
shuffle of bytes. What 16 rows make, 4 columns to a word, is transposed in registers, so that whole cache lines are
stored. Instructions are those of AVX-512 (BW), without which int8 rows are not blocked: see `is_there`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic

from flexgen_h2o.kernels.vectors import prefetch_at
from flexgen_h2o.limits import BLOCK_ROWS
from flexgen_h2o.packing import GROUP

cgutils: Any = _cgutils  # without annotations
_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
ROWS = 16  # of a strip: one word of each fills a vector
_WORD = 4  # columns of a word
_GROUP_BYTES = ROWS * (GROUP // 2 + 4)  # of one group of a strip's packed rows
_LINE = 64  # bytes of a cache line
_BYTES, _HALVES = ir.VectorType(_I8, GROUP), ir.VectorType(_I16, GROUP // 2)
_WORDS, _FLOATS = ir.VectorType(_I32, ROWS), ir.VectorType(_F32, ROWS)


@lru_cache(maxsize=1)
def is_there() -> bool:
    """Has this CPU the instructions?"""
    return bool(binding.get_host_cpu_features().get("avx512bw", False))


def _strip(_context: Any, packed: Any, row_bytes: Any, ends: Any, groups: Any, out: Any, totals: Any) -> Any:
    """An intrinsic. packed: the address of 16 packed rows, `row_bytes` apart; ends: where in a row those of its groups
    begin; groups: of a row; out: where the strip begins; totals: of 16 floats, what values are multiplied with before
    they are rounded, which become the negative sums of the rows, int32."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        _emit(builder, *arguments)
        return cgutils.get_null_value(_I64)

    return types.int64(*[types.int64] * 6), generate


strip: Any = intrinsic(_strip)


def _quotient(_context: Any, above: Any, below: Any) -> Any:
    """Of two float32, rounded: what jit.FASTMATH allows may be off by the last bit."""
    return types.float32(above, below), lambda _context, builder, _signature, arguments: builder.fdiv(*arguments)


quotient: Any = intrinsic(_quotient)


def _emit(e: Any, packed: Any, row_bytes: Any, ends: Any, groups: Any, out: Any, totals: Any) -> None:
    sums = cgutils.alloca_once(e, _WORDS)
    e.store(ir.Constant(_WORDS, [0] * ROWS), sums)
    with cgutils.for_range(e, groups, intp=_I64) as loop:
        lines = []
        for row in range(ROWS):
            start = e.add(packed, e.mul(row_bytes, _number(row)))
            step = _load(e, e.add(totals, _number(4 * row)), _F32)
            pair = _load(e, e.add(e.add(start, ends), e.mul(loop.index, _number(4))), _I32)
            codes = _load(e, e.add(start, e.mul(loop.index, _number(GROUP // 2))), ir.VectorType(_I8, GROUP // 2))
            lines.append(e.bitcast(_look_up(e, _table(e, pair, step), codes), _WORDS))
        # Of the next strip: 16 rows side by side are too many for the hardware to fetch ahead.
        ahead = e.add(e.add(packed, e.mul(row_bytes, _number(ROWS))), e.mul(loop.index, _number(_GROUP_BYTES)))
        for line in range(0, _GROUP_BYTES, _LINE):
            prefetch_at(e, e.add(ahead, _number(line)))
        at = e.add(out, e.mul(loop.index, _number(GROUP * BLOCK_ROWS)))
        total: Any = ir.Constant(_HALVES, [0] * (GROUP // 2))
        for number, words in enumerate(_transposed(e, lines)):
            _store(e, words, e.add(at, _number(number * _WORD * BLOCK_ROWS)))
            total = e.add(total, _pair_sums(e, words))
        pairs = e.bitcast(total, _WORDS)
        half = _all(_WORDS, 16)
        own = e.add(e.ashr(e.shl(pairs, half), half), e.ashr(pairs, half))
        e.store(e.sub(e.load(sums), own), sums)
    _store(e, e.load(sums), totals)


def _table(e: Any, pair: Any, step: Any) -> Any:
    """The int8 values of the 16 codes of a group, four times over."""
    pairs = _spread(e, pair, _WORDS)
    scale = e.bitcast(e.shl(pairs, _all(_WORDS, 16)), _FLOATS)
    least = e.bitcast(e.and_(pairs, _all(_WORDS, 0xFFFF0000)), _FLOATS)
    codes = ir.Constant(_FLOATS, [float(code) for code in range(ROWS)])
    values = e.fmul(e.fadd(e.fmul(codes, scale), least), _spread(e, step, _FLOATS))
    rint = cgutils.get_or_insert_function(e.module, ir.FunctionType(_FLOATS, [_FLOATS]), "llvm.rint.v16f32")
    table = e.trunc(e.fptosi(e.call(rint, [values]), _WORDS), ir.VectorType(_I8, ROWS))
    return e.shuffle_vector(table, table, _lanes([i % ROWS for i in range(GROUP)]))


def _look_up(e: Any, table: Any, codes: Any) -> Any:
    """codes: two to a byte, the first in the low half."""
    wide = e.zext(codes, _HALVES)
    single = e.and_(e.or_(wide, e.shl(wide, _all(_HALVES, 4))), _all(_HALVES, 0x0F0F))
    kind = ir.FunctionType(_BYTES, [_BYTES, _BYTES])
    shuffle = cgutils.get_or_insert_function(e.module, kind, "llvm.x86.avx512.pshuf.b.512")
    return e.call(shuffle, [table, e.bitcast(single, _BYTES)])


def _pair_sums(e: Any, words: Any) -> Any:
    """Sums of two neighbouring int8 each, as int16."""
    kind = ir.FunctionType(_HALVES, [_BYTES, _BYTES])
    multiply_add = cgutils.get_or_insert_function(e.module, kind, "llvm.x86.avx512.pmaddubs.w.512")
    return e.call(multiply_add, [_all(_BYTES, 1), e.bitcast(words, _BYTES)])


def _transposed(e: Any, lines: list[Any]) -> list[Any]:
    """16 vectors of 16 words: word i of line j becomes word j of line i.

    Four times, lines that are `apart` swap the halves of their blocks of 2 x `apart` words.
    """
    apart = 1
    while apart < ROWS:
        firsts = [i - i % (2 * apart) + i % apart for i in range(ROWS)]
        low = [i if i % (2 * apart) < apart else i - apart + ROWS for i in range(ROWS)]
        high = [i + apart if i % (2 * apart) < apart else i + ROWS for i in range(ROWS)]
        lines = [
            e.shuffle_vector(lines[first], lines[first + apart], _lanes(low if i == first else high))
            for i, first in enumerate(firsts)
        ]
        apart *= 2
    return lines


def _number(value: int) -> Any:
    return ir.Constant(_I64, value)


def _all(kind: Any, value: int) -> Any:
    return ir.Constant(kind, [value] * kind.count)


def _lanes(lanes: list[int]) -> Any:
    return ir.Constant(ir.VectorType(_I32, len(lanes)), lanes)


def _spread(e: Any, value: Any, kind: Any) -> Any:
    one = e.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_I32, 0))
    return e.shuffle_vector(one, one, _lanes([0] * ROWS))


def _load(e: Any, address: Any, kind: Any) -> Any:
    return e.load(e.inttoptr(address, kind.as_pointer()), align=4)


def _store(e: Any, value: Any, address: Any) -> None:
    e.store(value, e.inttoptr(address, value.type.as_pointer()), align=4)
