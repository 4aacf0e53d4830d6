"""LLVM vector code for packed slots (packing.SlotPacking): products with queries, without unpacking anything to memory.

As in `vectors`, but a word holds 8 or 4 values, a plane each. A value is not shifted into place: masked where it lies
it is 2**(bits x plane) times too large, and whoever fills the queries and reads the sums takes that off. Only the
highest plane is shifted, to stay clear of the sign. A group's scale and least value come in once a chunk:
query . slot = scale x (query . values) + least x (sum of the query).

Words are taken in chunks of `lanes`, each within one group, whose places in a slot are given as a table. With 8 lanes
two slots share a vector of 16. Queries and sums are fp32 in scratch of (queries, chunks, planes + 1, vector), the last
plane for what `least` is multiplied with; lanes that are not a chunk's own are 0 in a query and mean nothing in a sum.

LLVM vector code that turns 16 packed rows of 4 bits into a strip of a blocked int8 matrix (kernels/int8_blocked.py).

A group of a row has 16 codes, so its int8 values are a table of 16 bytes in a vector, and 64 codes are looked up by one
shuffle of bytes. What 16 rows make, 4 columns to a word, is transposed in registers, so that whole cache lines are
stored. Instructions are those of AVX-512 (BW), without which int8 rows are not blocked: see `is_there`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic

from flexgen_h2o.core.packing import GROUP
from flexgen_h2o.core.units import BLOCK_ROWS
from flexgen_h2o.kernels.compiled.vectors import prefetch_at

cgutils: Any = _cgutils  # without annotations
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
SLOTS = 8  # of a tile
LANES = 8  # words of a chunk; 1 where a slot has fewer
PLACE = 4  # int32 numbers of a chunk in the table, of which the first two are read here: its first word, its group's
_FLAGS = ("contract", "reassoc", "nsz")  # see jit.FASTMATH


@dataclass(frozen=True)
class _Chunk:
    """A chunk of the tile's slots: for each vector the words, and scale and least of their group."""

    words: list[Any]
    scales: list[Any]
    least: list[Any]


@dataclass(frozen=True)
class _Emitter:
    builder: Any
    bits: int
    lanes: int

    @property
    def planes(self) -> int:
        return 32 // self.bits

    @property
    def sharing(self) -> int:
        """Slots of one vector."""
        return 2 if self.lanes > 1 else 1

    @property
    def size(self) -> int:
        return self.lanes * self.sharing

    def vector(self, kind: Any, count: int | None = None) -> Any:
        return ir.VectorType(kind, count or self.size)

    def constant(self, kind: Any, value: Any) -> Any:
        return ir.Constant(self.vector(kind), [value] * self.size)

    def number(self, value: int) -> Any:
        return ir.Constant(_I64, value)

    def onward(self, address: Any, words: Any) -> Any:
        """`address` moved by a number of words."""
        return self.builder.add(address, self.builder.mul(words, self.number(4)))

    def load(self, address: Any, kind: Any) -> Any:
        return self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), align=4)

    def store(self, value: Any, address: Any) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer()), align=4)

    def shuffle(self, a: Any, b: Any, lanes: list[int]) -> Any:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))

    def add(self, a: Any, b: Any) -> Any:
        return self.builder.fadd(a, b, flags=_FLAGS)

    def multiply(self, a: Any, b: Any) -> Any:
        return self.builder.fmul(a, b, flags=_FLAGS)

    def multiply_add(self, a: Any, b: Any, to: Any) -> Any:
        return self.add(to, self.multiply(a, b))

    def each(self, values: list[Any], kind: Any) -> Any:
        """One number a slot of a vector, in all its lanes."""
        few = ir.Constant(ir.VectorType(kind, len(values)), ir.Undefined)
        for i, value in enumerate(values):
            few = self.builder.insert_element(few, value, ir.Constant(_I32, i))
        return self.shuffle(few, few, [lane // self.lanes for lane in range(self.size)])

    def joined(self, parts: list[Any]) -> Any:
        return parts[0] if len(parts) == 1 else self.shuffle(parts[0], parts[1], list(range(self.size)))

    def chunk(self, at: Any, words: Any, places: Any, number: Any) -> _Chunk:
        b = self.builder
        place = self.onward(places, b.mul(number, self.number(PLACE)))
        first, group = (b.sext(self.load(self.onward(place, self.number(i)), _I32), _I64) for i in range(2))
        found = _Chunk([], [], [])
        for slot in range(0, SLOTS, self.sharing):
            each = [self.onward(at, b.mul(words, self.number(slot + i))) for i in range(self.sharing)]
            parts = [self.load(self.onward(a, first), self.vector(_I32, self.lanes)) for a in each]
            found.words.append(self.joined(parts))
            both = self.each([self.load(self.onward(a, group), _I32) for a in each], _I32)
            scale = b.shl(both, self.constant(_I32, 16))
            least = b.and_(both, self.constant(_I32, 0xFFFF0000))
            found.scales.append(b.bitcast(scale, self.vector(_F32)))
            found.least.append(b.bitcast(least, self.vector(_F32)))
        return found

    def plane(self, words: Any, plane: int) -> Any:
        """The values of a plane, 2**(bits x plane) times too large but for the highest."""
        b, top = self.builder, plane == self.planes - 1
        if top:
            values = b.lshr(words, self.constant(_I32, 32 - self.bits))
        else:
            values = b.and_(words, self.constant(_I32, (2**self.bits - 1) << (self.bits * plane)))
        return b.sitofp(values, self.vector(_F32))

    def scratch(self, start: Any, chunks: Any, query: int, chunk: Any, plane: int) -> Any:
        """The address of a vector of scratch."""
        b = self.builder
        number = b.add(b.mul(chunks, self.number(query)), chunk)
        number = b.add(b.mul(number, self.number(self.planes + 1)), self.number(plane))
        return self.onward(start, b.mul(number, self.number(self.size)))

    def slot_sums(self, vectors: list[Any]) -> list[Any]:
        """The sums over each slot's lanes, in order, as one vector (8 lanes) or one each (1 lane): neighbours are
        added until one number a slot is left."""
        lanes = self.lanes
        while lanes > 1:
            size = vectors[0].type.count
            if len(vectors) > 1:
                evens, odds = list(range(0, 2 * size, 2)), list(range(1, 2 * size, 2))
                pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
            else:
                evens, odds = list(range(0, size, 2)), list(range(1, size, 2))
                pairs = [(vectors[0], vectors[0])]
            vectors = [self.add(self.shuffle(x, y, evens), self.shuffle(x, y, odds)) for x, y in pairs]
            lanes //= 2
        return vectors


def _tile(emit: Any, bits: int, queries: int, lanes: int) -> Any:
    """An intrinsic over `queries` queries and `SLOTS` neighbouring slots.

    Arguments: the address of the first slot, words of a slot, the address of the table of chunks, how many there are,
    the address of the first query (or sum) in scratch, that of its first probability, floats from one query's
    probabilities to the next's. All int64.
    """

    @intrinsic
    def tile(_context: Any, at: Any, words: Any, places: Any, chunks: Any, scratch: Any, p: Any, stride: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            emit(_Emitter(builder, bits, lanes), queries, *arguments)
            return cgutils.get_null_value(_I64)

        return types.int64(*[types.int64] * 7), generate

    return tile


def _emit_dots(
    e: _Emitter, queries: int, at: Any, words: Any, places: Any, chunks: Any, scratch: Any, p: Any, stride: Any
) -> None:
    """p[query, slot] = query . slot."""
    b, vectors = e.builder, range(SLOTS // e.sharing)
    totals = [[cgutils.alloca_once(b, e.vector(_F32)) for _ in vectors] for _ in range(queries)]
    for row in totals:
        for total in row:
            b.store(e.constant(_F32, 0.0), total)
    with cgutils.for_range(b, chunks, intp=_I64) as loop:
        chunk = e.chunk(at, words, places, loop.index)
        asked = [
            [e.load(e.scratch(scratch, chunks, q, loop.index, plane), e.vector(_F32)) for plane in range(e.planes + 1)]
            for q in range(queries)
        ]
        for i in vectors:
            sums: list[Any] = [None] * queries
            for plane in range(e.planes):
                values = e.plane(chunk.words[i], plane)
                for q in range(queries):
                    product = e.multiply(values, asked[q][plane])
                    sums[q] = product if sums[q] is None else e.add(sums[q], product)
            for q in range(queries):
                total = e.multiply_add(sums[q], chunk.scales[i], b.load(totals[q][i]))
                b.store(e.multiply_add(asked[q][e.planes], chunk.least[i], total), totals[q][i])
    for q, row in enumerate(totals):
        for i, sums in enumerate(e.slot_sums([b.load(total) for total in row])):
            e.store(sums, e.onward(p, b.add(b.mul(stride, e.number(q)), e.number(i))))


def _emit_mix(
    e: _Emitter, queries: int, at: Any, words: Any, places: Any, chunks: Any, scratch: Any, p: Any, stride: Any
) -> None:
    """sums[query] += sum over slots of p[query, slot] x slot."""
    b, vectors = e.builder, range(SLOTS // e.sharing)
    shares = []
    for q in range(queries):
        row = e.onward(p, b.mul(stride, e.number(q)))
        numbers = [e.load(e.onward(row, e.number(s)), _F32) for s in range(SLOTS)]
        shares.append([e.each(numbers[i * e.sharing : (i + 1) * e.sharing], _F32) for i in vectors])
    with cgutils.for_range(b, chunks, intp=_I64) as loop:
        chunk = e.chunk(at, words, places, loop.index)
        weights = [[e.multiply(shares[q][i], chunk.scales[i]) for i in vectors] for q in range(queries)]
        for plane in range(e.planes + 1):
            values = [e.plane(w, plane) for w in chunk.words] if plane < e.planes else chunk.least
            for q in range(queries):
                place = e.scratch(scratch, chunks, q, loop.index, plane)
                total = e.load(place, e.vector(_F32))
                for i in vectors:
                    total = e.multiply_add(values[i], (weights if plane < e.planes else shares)[q][i], total)
                e.store(total, place)


dots4_one, dots4_four, dots4_narrow = (_tile(_emit_dots, 4, q, n) for q, n in ((1, LANES), (4, LANES), (1, 1)))
dots8_one, dots8_four, dots8_narrow = (_tile(_emit_dots, 8, q, n) for q, n in ((1, LANES), (4, LANES), (1, 1)))
mix4_one, mix4_four, mix4_narrow = (_tile(_emit_mix, 4, q, n) for q, n in ((1, LANES), (4, LANES), (1, 1)))
mix8_one, mix8_four, mix8_narrow = (_tile(_emit_mix, 8, q, n) for q, n in ((1, LANES), (4, LANES), (1, 1)))


# without annotations
_I8, _I16 = ir.IntType(8), ir.IntType(16)
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
