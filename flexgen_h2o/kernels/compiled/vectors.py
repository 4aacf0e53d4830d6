"""LLVM vector code that numba's loops call: products of queries and slots, with nothing left to the auto-vectoriser.

numba has no vector types, and its loops over a runtime width of 64 are mostly prologue and rest. So the innermost
loops are emitted here: `lanes` floats at a time, several queries and slots at once, sums in registers.

A slot's d elements are `words` of 4 bytes: an fp32 number (one plane), or two neighbours in bf16 (two planes: the low
half is the even one; a shift and a mask make fp32 of them). Words are taken in chunks of `lanes`; where they do not
divide, the last chunk starts early and overlaps the one before it. Queries and sums are fp32 in the same order, in
scratch of (queries, chunks, planes, lanes); the queries' overlapping lanes are zeroed by whoever fills them.

Addresses and counts are int64.

Rounding to bf16 in compiled loops: what comes back are bits, of which the upper 16 are the number.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic

from flexgen_h2o.kernels.jit import float_to_bits, jit

cgutils: Any = _cgutils  # without annotations
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
SLOTS = 4  # of a tile: more of them jump so far in memory that the hardware no longer fetches ahead
# See jit.FASTMATH: no assumption that there is no NaN.
_FLAGS = ("contract", "reassoc", "nsz")


@dataclass(frozen=True)
class _Emitter:
    """Emits vector instructions of `lanes` floats for slots of a type of element."""

    builder: Any
    planes: int
    lanes: int

    @property
    def _words(self) -> Any:
        return ir.VectorType(_I32, self.lanes)

    @property
    def floats(self) -> Any:
        return ir.VectorType(_F32, self.lanes)

    def number(self, value: int) -> Any:
        return ir.Constant(_I64, value)

    def offset(self, address: Any, floats: Any) -> Any:
        """`address` moved by a number of 4-byte words."""
        return self.builder.add(address, self.builder.mul(floats, self.number(4)))

    def load(self, address: Any, kind: Any) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=4)

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=4)

    def slot(self, address: Any) -> list[Any]:
        """A chunk of a slot: a vector a plane."""
        words = self.load(address, self._words)
        if self.planes == 1:
            return [self.builder.bitcast(words, self.floats)]
        shift, mask = (ir.Constant(self._words, [x] * self.lanes) for x in (16, 0xFFFF0000))
        halves = self.builder.shl(words, shift), self.builder.and_(words, mask)
        return [self.builder.bitcast(half, self.floats) for half in halves]

    def multiply_add(self, a: Any, b: Any, to: Any) -> Any:
        return self.builder.fadd(to, self.builder.fmul(a, b, flags=_FLAGS), flags=_FLAGS)

    def splat(self, value: Any) -> Any:
        one = self.builder.insert_element(ir.Constant(self.floats, ir.Undefined), value, ir.Constant(_I32, 0))
        return self._shuffle(one, one, [0] * self.lanes)

    def sums(self, vectors: list[Any]) -> Any:
        """The sums over the lanes of four vectors (or of one), as a vector of four (or one)."""
        width = self.lanes
        while width > len(vectors):
            width //= 2
            low, high = list(range(width)), list(range(width, 2 * width))
            vectors = [self._add(self._shuffle(v, v, low), self._shuffle(v, v, high)) for v in vectors]
        while len(vectors) > 1:
            even, odd = list(range(0, 2 * width, 2)), list(range(1, 2 * width, 2))
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [self._add(self._shuffle(a, b, even), self._shuffle(a, b, odd)) for a, b in pairs]
        return vectors[0]

    def _add(self, a: Any, b: Any) -> Any:
        return self.builder.fadd(a, b, flags=_FLAGS)

    def _shuffle(self, a: Any, b: Any, lanes: list[int]) -> Any:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))

    @contextmanager
    def chunks(self, words: Any) -> Iterator[tuple[Any, Any]]:
        """A loop over the chunks of a slot: (number of the chunk, its first word)."""
        b = self.builder
        count = b.sdiv(b.add(words, self.number(self.lanes - 1)), self.number(self.lanes))
        last = b.sub(words, self.number(self.lanes))
        with cgutils.for_range(b, count, intp=_I64) as loop:
            regular = b.mul(loop.index, self.number(self.lanes))
            yield loop.index, b.select(b.icmp_signed("<", regular, last), regular, last)


def _planes(element: Any) -> int:
    return 2 if element == types.uint16 else 1


def _planes_of(_context: Any, element: Any) -> Any:
    """How many planes slots of the type of this number have; known when compiled."""
    number = _planes(element)
    return types.int64(element), lambda *_: ir.Constant(_I64, number)


planes: Any = intrinsic(_planes_of)


def _prefetch(_context: Any, address: Any) -> Any:
    """Ask for the cache line at `address`, which need not exist."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        prefetch_at(builder, arguments[0])
        return cgutils.get_null_value(_I64)

    return types.int64(types.int64), generate


prefetch: Any = intrinsic(_prefetch)


def prefetch_at(builder: Any, address: Any) -> None:
    """Emit `prefetch`."""
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    function = builder.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
    read, keep, data = (ir.Constant(_I32, x) for x in (0, 3, 1))
    builder.call(function, [builder.inttoptr(address, pointer), read, keep, data])


def _tile(emit: Any, queries: int, lanes: int) -> Any:
    """An intrinsic over `queries` queries and `SLOTS` neighbouring slots.

    Arguments: a number of the slots' type (uint16 stands for bf16), the address of the first slot, words of a slot,
    the address of the first query (or sum) in scratch, the address of its first probability, floats from one query's
    probabilities to the next's.
    """

    @intrinsic
    def tile(_context: Any, element: Any, at: Any, words: Any, scratch: Any, p: Any, stride: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            emit(_Emitter(builder, _planes(element), lanes), queries, *arguments[1:])
            return cgutils.get_null_value(_I64)

        return types.int64(element, types.int64, types.int64, types.int64, types.int64, types.int64), generate

    return tile


def _query_address(e: _Emitter, scratch: Any, words: Any, query: int, chunk: Any, plane: int) -> Any:
    b = e.builder
    chunks = b.sdiv(b.add(words, e.number(e.lanes - 1)), e.number(e.lanes))
    number = b.add(b.mul(chunks, e.number(query)), chunk)
    return e.offset(scratch, b.mul(b.add(b.mul(number, e.number(e.planes)), e.number(plane)), e.number(e.lanes)))


def _emit_dots(e: _Emitter, queries: int, at: Any, words: Any, scratch: Any, p: Any, stride: Any) -> None:
    """p[query, slot] = query . slot."""
    b = e.builder
    zero = ir.Constant(e.floats, [0.0] * e.lanes)
    totals = [[cgutils.alloca_once(b, e.floats) for _ in range(SLOTS)] for _ in range(queries)]
    for total in chain.from_iterable(totals):
        b.store(zero, total)
    with e.chunks(words) as (chunk, first):
        planes = range(e.planes)
        asked = [
            [e.load(_query_address(e, scratch, words, q, chunk, plane), e.floats) for plane in planes]
            for q in range(queries)
        ]
        for s in range(SLOTS):
            parts = e.slot(e.offset(at, b.add(b.mul(words, e.number(s)), first)))
            for row, query in zip(totals, asked, strict=True):
                total = b.load(row[s])
                for x, y in zip(query, parts, strict=True):
                    total = e.multiply_add(x, y, total)
                b.store(total, row[s])
    together = min(e.lanes, SLOTS)
    for q, row in enumerate(totals):
        for s in range(0, SLOTS, together):
            sums = e.sums([b.load(total) for total in row[s : s + together]])
            e.store(sums, e.offset(p, b.add(b.mul(stride, e.number(q)), e.number(s))))


def _emit_mix(e: _Emitter, queries: int, at: Any, words: Any, scratch: Any, p: Any, stride: Any) -> None:
    """sums[query] += sum over slots of p[query, slot] x slot."""
    b = e.builder
    shares = [
        [e.splat(e.load(e.offset(p, b.add(b.mul(stride, e.number(q)), e.number(s))), _F32)) for s in range(SLOTS)]
        for q in range(queries)
    ]
    with e.chunks(words) as (chunk, first):
        places = [
            [_query_address(e, scratch, words, q, chunk, plane) for plane in range(e.planes)] for q in range(queries)
        ]
        totals = [[e.load(place, e.floats) for place in row] for row in places]
        for s in range(SLOTS):
            parts = e.slot(e.offset(at, b.add(b.mul(words, e.number(s)), first)))
            for q in range(queries):
                totals[q] = [
                    e.multiply_add(shares[q][s], part, total) for part, total in zip(parts, totals[q], strict=True)
                ]
        for row, values in zip(places, totals, strict=True):
            for place, value in zip(row, values, strict=True):
                e.store(value, place)


dots_one, dots_four, dots_narrow = _tile(_emit_dots, 1, 16), _tile(_emit_dots, 4, 16), _tile(_emit_dots, 1, 1)
mix_one, mix_four, mix_narrow = _tile(_emit_mix, 1, 16), _tile(_emit_mix, 4, 16), _tile(_emit_mix, 1, 1)


_QUIET = np.uint32(0x400000)  # set in a NaN, so that its upper half is one too


@jit
def to_bf16(x):  # type: ignore[no-untyped-def]
    """x rounded to bf16, half to even; the lower half of the result is of no use."""
    bits = np.uint32(float_to_bits(x))
    return bits | _QUIET if x != x else bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))


@jit
def to_bf16_towards(x, up):  # type: ignore[no-untyped-def]
    """The nearest bf16 number that is not below x (up) or not above it, the lower half 0; NaN stays NaN."""
    bits = np.uint32(float_to_bits(x))
    if x != x:
        bits |= _QUIET
    elif (x < np.float32(0)) != up:  # away from zero
        bits += np.uint32(0xFFFF)
    return np.uint32(bits & np.uint32(0xFFFF0000))
