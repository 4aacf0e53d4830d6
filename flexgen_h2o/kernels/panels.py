"""LLVM vector code for products of fp32 panels: c (+)= a b, a tile of ROWS rows by 64 or 16 columns in registers.

The numbers of `a` are spread over a vector one by one, those of `b` lie side by side, so nothing is ever summed across
the lanes of a vector. Addresses and counts are int64, steps in floats.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic

cgutils: Any = _cgutils  # without annotations
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
LANES = 16
ROWS = 4  # of a tile: with 4 vectors each, 16 sums, which is enough to wait for none of them
WIDE = 64  # columns of a wide tile
# See jit.FASTMATH: no assumption that there is no NaN.
_FLAGS = ("contract", "reassoc", "nsz")


def _product(vectors: int, adds: bool) -> Any:
    """An intrinsic for tiles of `vectors` x LANES columns. adds: to what is in c.

    Arguments: the address of a, its step from row to row; of b, its step; of c, its step; how many columns of a, which
    are as many rows of b.
    """

    @intrinsic
    def product(_context: Any, a: Any, a_step: Any, b: Any, b_step: Any, c: Any, c_step: Any, count: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            _emit(builder, vectors, adds, *arguments)
            return cgutils.get_null_value(_I64)

        return types.int64(*[types.int64] * 7), generate

    return product


def _emit(
    e: Any, vectors: int, adds: bool, a: Any, a_step: Any, b: Any, b_step: Any, c: Any, c_step: Any, count: Any
) -> None:
    kind = ir.VectorType(_F32, LANES)

    def at(address: Any, floats: Any, of: Any) -> Any:
        return e.inttoptr(e.add(address, e.mul(floats, ir.Constant(_I64, 4))), of.as_pointer())

    def number(value: int) -> Any:
        return ir.Constant(_I64, value)

    places = [
        [at(c, e.add(e.mul(c_step, number(row)), number(v * LANES)), kind) for v in range(vectors)]
        for row in range(ROWS)
    ]
    totals = [[cgutils.alloca_once(e, kind) for _ in range(vectors)] for _ in range(ROWS)]
    for row in range(ROWS):
        for v in range(vectors):
            start = e.load(places[row][v], align=4) if adds else ir.Constant(kind, [0.0] * LANES)
            e.store(start, totals[row][v])
    with cgutils.for_range(e, count, intp=_I64) as loop:
        line = e.mul(b_step, loop.index)
        many = [e.load(at(b, e.add(line, number(v * LANES)), kind), align=4) for v in range(vectors)]
        for row in range(ROWS):
            one = e.load(at(a, e.add(e.mul(a_step, number(row)), loop.index), _F32), align=4)
            single = e.insert_element(ir.Constant(kind, ir.Undefined), one, ir.Constant(_I32, 0))
            spread = e.shuffle_vector(single, single, ir.Constant(ir.VectorType(_I32, LANES), [0] * LANES))
            for v in range(vectors):
                product = e.fmul(spread, many[v], flags=_FLAGS)
                e.store(e.fadd(e.load(totals[row][v]), product, flags=_FLAGS), totals[row][v])
    for row in range(ROWS):
        for v in range(vectors):
            e.store(e.load(totals[row][v]), places[row][v], align=4)


set_wide, add_wide, add_narrow = _product(WIDE // LANES, False), _product(WIDE // LANES, True), _product(1, True)
