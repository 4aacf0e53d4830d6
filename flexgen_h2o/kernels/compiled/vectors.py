"""Emit LLVM vector code for products of queries and slots, which numba's loops call.

numba has no vector types, and its loops over a runtime width of 64 are mostly prologue and
remainder. So the innermost loops are emitted here, without the auto-vectoriser: several queries and
slots at once, with sums in registers.

A tile is some adjacent slots, whose words (4 bytes) are read in chunks of `lanes`. The queries, or
the sums, are fp32 in scratch of (queries, chunks, planes, floats per vector), in the order of the
slots' words:

- Whole slots: a word is one fp32 number (one plane) or two in bf16 or fp16 (two planes, of which
  the low halves are the even numbers). If chunks do not divide a slot, the last chunk overlaps the
  one before. The caller zeroes the lanes of the queries that are in both.
- Packed slots (packing.SlotPacking): a word holds 16, 8 or 4 values, one per plane. In 3 bits the
  highest bits of a word's 16 values are a half word elsewhere. A value is masked but not shifted,
  so it is 2**(bits x plane) times too large. The caller divides by that in queries and sums. Only
  the highest plane is shifted, to avoid the sign bit. Scale and least value of a group are applied
  once per chunk: query . slot = scale x (query . values) + least x (sum of the query). The sum of
  the query is the last plane. A table lists the places of the chunks; each chunk is within one
  group. A vector of 16 is shared by two slots of 8 lanes, or by four of 4, which is what a group of
  64 has in 3 bits. Lanes that are not a chunk's own are 0 in a query and have no meaning in a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from flexgen_h2o.core.packing import low_bits_of
from flexgen_h2o.kernels.compiled.emitter import F32, I16, I32, I64, Emitter, emitted_by_type
from flexgen_h2o.kernels.jit import num_planes

WIDE = 16  # words per chunk of whole slots; 1 if a slot has fewer
# Slots per tile. More slots would be so far apart that the hardware no longer prefetches them.
SLOTS = 4
PACKED_WIDE = {8: 8, 4: 8, 3: 4}  # by bits: words per chunk of packed slots; 1 if a slot has fewer
SHARED = 16  # floats per vector of packed slots
# Numbers whose types stand for the bits of packed slots, so that a loop is compiled for each.
KINDS: dict[int, np.number[Any]] = {8: np.uint8(0), 4: np.int8(0), 3: np.int16(0)}
_BITS_OF_KIND = {types.uint8: 8, types.int8: 4, types.int16: 3}
PACKED_SLOTS = 8
# int32 numbers per chunk in the table; the first two are read here: its first word, and the word of
# its group
PLACE = 4
_QUERIES = 4  # queries per tile, if a kv-head has as many


@dataclass(frozen=True)
class _Chunk:
    """Hold a chunk of a tile, as LLVM values; lists have one item per vector."""

    number: Any  # index of the chunk
    words: list[Any]
    scales: list[Any]  # only packed slots: scale of the group
    least: list[Any]  # only packed slots: least value of the group
    high: list[Any]  # only 3 bits: half words of the highest bits


@dataclass(frozen=True)
class _Tile:
    """Emit code for a tile of whole slots."""

    e: Emitter
    lanes: int  # words of a chunk
    planes: int  # planes of scratch
    at: Any  # address of the first slot
    words: Any  # words per slot
    is_half: bool  # elements are fp16
    slots = SLOTS
    sharing = 1  # slots that share a vector

    @property
    def size(self) -> int:
        """Floats per vector."""
        return self.lanes * self.sharing

    @property
    def floats(self) -> Any:
        return ir.VectorType(F32, self.size)

    @property
    def ints(self) -> Any:
        return ir.VectorType(I32, self.size)

    @property
    def vectors(self) -> int:
        return self.slots // self.sharing

    def num_chunks(self) -> Any:
        return self.e.parts(self.words, self.lanes)

    def scratch(self, start: Any, query: int, chunk: Any, plane: int) -> Any:
        """Return the address of a vector of scratch."""
        b = self.e.builder
        e = self.e
        number = b.add(b.mul(self.num_chunks(), e.number(query)), chunk)
        number = b.add(b.mul(number, e.number(self.planes)), e.number(plane))
        return e.onward(start, b.mul(number, e.number(self.size)))

    @contextmanager
    def chunks(self) -> Iterator[_Chunk]:
        b = self.e.builder
        e = self.e
        last = b.sub(self.words, e.number(self.lanes))
        with e.loop(self.num_chunks()) as loop:
            regular = b.mul(loop.index, e.number(self.lanes))
            first = e.least(regular, last)
            places = [
                e.onward(self.at, b.add(b.mul(self.words, e.number(s)), first))
                for s in range(self.slots)
            ]
            yield _Chunk(loop.index, [e.load(place, self.ints) for place in places], [], [], [])

    def plane(self, chunk: _Chunk, i: int, plane: int) -> Any:
        """Return the numbers of vector i in a plane, as floats."""
        b = self.e.builder
        words = chunk.words[i]
        if self.is_half:
            halves = b.trunc(
                b.lshr(words, self.e.constant(self.ints, 16 * plane)), ir.VectorType(I16, self.size)
            )
            return b.fpext(b.bitcast(halves, ir.VectorType(ir.HalfType(), self.size)), self.floats)
        return (
            self.e.bf16_pairs(words)[plane] if self.planes == 2 else b.bitcast(words, self.floats)
        )

    def add_dots(
        self, chunk: _Chunk, i: int, asked: list[list[Any]], totals: list[Any]
    ) -> list[Any]:
        """Return totals[q] + the products of vector i and the query `asked[q]`.

        A query has one vector per plane.
        """
        for plane in range(self.planes):
            values = self.plane(chunk, i, plane)
            totals = [
                self.e.multiply_add(q[plane], values, total)
                for q, total in zip(asked, totals, strict=True)
            ]
        return totals

    def weights(self, chunk: _Chunk, p: list[Any], plane: int) -> list[Any]:
        """Return the factors of the vectors of a plane. p: the probabilities of their slots."""
        return p

    def slot_sums(self, vectors: list[Any]) -> list[Any]:
        """Return the sums over the lanes of vectors, in vectors of four, or one each."""
        e = self.e
        width = self.lanes
        together = min(self.lanes, self.slots)
        if width == 1:
            return vectors
        while width > together:
            width //= 2
            low = list(range(width))
            high = list(range(width, 2 * width))
            vectors = [e.add(e.shuffle(v, v, low), e.shuffle(v, v, high)) for v in vectors]
        while len(vectors) > 1:
            even = list(range(0, 2 * width, 2))
            odd = list(range(1, 2 * width, 2))
            pairs = zip(vectors[::2], vectors[1::2], strict=True)
            vectors = [e.add(e.shuffle(a, b, even), e.shuffle(a, b, odd)) for a, b in pairs]
        return vectors


@dataclass(frozen=True)
class _PackedTile(_Tile):
    """Emit code for a tile of packed slots."""

    bits: int
    places: Any  # address of the table of chunks
    count: Any  # number of chunks
    high_at: Any  # bytes from a slot to its half words of highest bits
    slots = PACKED_SLOTS

    @property
    def sharing(self) -> int:  # type: ignore[override]
        return SHARED // self.lanes if self.lanes > 1 else 1

    def num_chunks(self) -> Any:
        return self.count

    @contextmanager
    def chunks(self) -> Iterator[_Chunk]:
        b = self.e.builder
        e = self.e
        with e.loop(self.count) as loop:
            place = e.onward(self.places, b.mul(loop.index, e.number(PLACE)))
            first, group = (
                b.sext(e.load(e.onward(place, e.number(i)), I32), I64) for i in range(2)
            )
            chunk = _Chunk(loop.index, [], [], [], [])
            for slot in range(0, self.slots, self.sharing):
                each = [
                    e.onward(self.at, b.mul(self.words, e.number(slot + i)))
                    for i in range(self.sharing)
                ]
                chunk.words.append(
                    e.join(
                        [e.load(e.onward(a, first), ir.VectorType(I32, self.lanes)) for a in each]
                    )
                )
                if self.bits == 3:
                    halves = b.add(self.high_at, b.mul(first, e.number(2)))
                    high = [
                        e.load(b.add(a, halves), ir.VectorType(I16, self.lanes), align=2)
                        for a in each
                    ]
                    chunk.high.append(b.zext(e.join(high), self.ints))
                both = e.spread([e.load(e.onward(a, group), I32) for a in each], self.lanes)
                scale, least = e.bf16_pairs(both)
                chunk.scales.append(scale)
                chunk.least.append(least)
            yield chunk

    def plane(self, chunk: _Chunk, i: int, plane: int) -> Any:
        """Return values of vector i; the last plane is the least value.

        Values are 2**(bits x plane) times too large, except in the highest plane.
        """
        b = self.e.builder
        e = self.e
        values = chunk.words[i]
        step = low_bits_of(self.bits)
        if plane == self.planes - 1:
            return chunk.least[i]
        if plane == self.planes - 2:
            values = b.lshr(values, e.constant(self.ints, 32 - step))
        else:
            values = b.and_(values, e.constant(self.ints, (2**step - 1) << (step * plane)))
        if self.bits == 3:  # move the highest bit above the lower two
            bit = b.and_(chunk.high[i], e.constant(self.ints, 1 << plane))
            is_last = plane == self.planes - 2
            move, by = (b.lshr, plane - 2) if is_last else (b.shl, plane + 2)
            values = b.or_(values, move(bit, e.constant(self.ints, by)))
        return b.sitofp(values, self.floats)

    def add_dots(
        self, chunk: _Chunk, i: int, asked: list[list[Any]], totals: list[Any]
    ) -> list[Any]:
        e = self.e
        sums = [None] * len(asked)
        for plane in range(self.planes - 1):
            values = self.plane(chunk, i, plane)
            products = [e.multiply(values, q[plane]) for q in asked]
            sums = [
                new if old is None else e.add(old, new)
                for old, new in zip(sums, products, strict=True)
            ]
        scaled = [
            e.multiply_add(a, chunk.scales[i], total) for a, total in zip(sums, totals, strict=True)
        ]
        return [
            e.multiply_add(q[-1], chunk.least[i], total)
            for q, total in zip(asked, scaled, strict=True)
        ]

    def weights(self, chunk: _Chunk, p: list[Any], plane: int) -> list[Any]:
        if plane == self.planes - 1:
            return p
        return [self.e.multiply(share, scale) for share, scale in zip(p, chunk.scales, strict=True)]

    def slot_sums(self, vectors: list[Any]) -> list[Any]:
        """Add adjacent lanes until one number per slot is left.

        With 8 lanes the result is one vector, with 1 lane one vector per slot.
        """
        e = self.e
        lanes = self.lanes
        while lanes > 1:
            size = vectors[0].type.count
            others = vectors if len(vectors) == 1 else vectors[1::2]
            end = size if len(vectors) == 1 else 2 * size
            even = list(range(0, end, 2))
            odd = list(range(1, end, 2))
            pairs = zip(vectors[::2], others, strict=True)
            vectors = [e.add(e.shuffle(x, y, even), e.shuffle(x, y, odd)) for x, y in pairs]
            lanes //= 2
        return vectors


def _emit_dots(tile: _Tile, queries: int, scratch: Any, p: Any, stride: Any) -> None:
    """Emit p[query, slot] = query . slot."""
    e = tile.e
    b = tile.e.builder
    totals = e.variables(tile.floats, queries, tile.vectors)
    with tile.chunks() as chunk:
        places = [
            [tile.scratch(scratch, q, chunk.number, x) for x in range(tile.planes)]
            for q in range(queries)
        ]
        asked = [[e.load(place, tile.floats) for place in row] for row in places]
        for i in range(tile.vectors):
            sums = tile.add_dots(chunk, i, asked, [b.load(row[i]) for row in totals])
            for row, value in zip(totals, sums, strict=True):
                b.store(value, row[i])
    for q, row in enumerate(totals):
        for i, found in enumerate(tile.slot_sums([b.load(total) for total in row])):
            e.store(found, e.onward(p, b.add(b.mul(stride, e.number(q)), e.number(i))))


def _emit_mix(tile: _Tile, queries: int, scratch: Any, p: Any, stride: Any) -> None:
    """Emit sums[query] += sum over slots of p[query, slot] x slot."""
    e = tile.e
    b = tile.e.builder
    shares = []
    for q in range(queries):
        row = e.onward(p, b.mul(stride, e.number(q)))
        numbers = [e.load(e.onward(row, e.number(s)), F32) for s in range(tile.slots)]
        firsts = range(0, tile.slots, tile.sharing)
        shares.append([e.spread(numbers[s : s + tile.sharing], tile.lanes) for s in firsts])
    with tile.chunks() as chunk:
        for plane in range(tile.planes):
            values = [tile.plane(chunk, i, plane) for i in range(tile.vectors)]
            for q in range(queries):
                place = tile.scratch(scratch, q, chunk.number, plane)
                total = e.load(place, tile.floats)
                for value, weight in zip(
                    values, tile.weights(chunk, shares[q], plane), strict=True
                ):
                    total = e.multiply_add(value, weight, total)
                e.store(total, place)


def _for_queries(
    emit: Callable[..., None], tile: _Tile, scratch: Any, p: Any, stride: Any, group: Any
) -> None:
    """Emit loops over the queries: four at a time if vectors are wide, then one by one."""
    e = tile.e
    b = tile.e.builder

    def work(count: Any, first: Any, together: int) -> None:
        with e.loop(count) as loop:
            query = b.add(first, b.mul(loop.index, e.number(together)))
            floats = b.mul(tile.num_chunks(), e.number(tile.planes * tile.size))
            emit(
                tile,
                together,
                e.onward(scratch, b.mul(query, floats)),
                e.onward(p, b.mul(query, stride)),
                stride,
            )

    if tile.lanes == 1:
        work(group, e.number(0), 1)
        return
    fours = b.sdiv(group, e.number(_QUERIES))
    work(fours, e.number(0), _QUERIES)
    done = b.mul(fours, e.number(_QUERIES))
    work(b.sub(group, done), done, 1)


def _over_slots(emit: Callable[..., None], e: Emitter, element: Any, *numbers: Any) -> None:
    at, words, *queries = numbers
    is_wide = e.builder.icmp_signed(">=", words, e.number(WIDE))
    kind = num_planes(element), at, words, element == types.int16
    e.choose(is_wide, (WIDE, 1), lambda lanes: _for_queries(emit, _Tile(e, lanes, *kind), *queries))


def _over_packed_slots(emit: Callable[..., None], e: Emitter, bits: int, *numbers: Any) -> None:
    lanes, places, count, high_at, at, words, *queries = numbers
    planes = 32 // low_bits_of(bits) + 1

    kind = planes, at, words, False, bits, places, count, high_at
    is_wide = e.builder.icmp_signed(">", lanes, e.number(1))
    e.choose(
        is_wide,
        (PACKED_WIDE[bits], 1),
        lambda n: _for_queries(emit, _PackedTile(e, n, *kind), *queries),
    )


# dots(element, (at, words, scratch, p, stride, group)). at: a tile's first slot; words: words per
# slot; scratch: the first query (or sum); p: its first probability; stride: floats from one query's
# probabilities to the next; group: number of queries.
dots = emitted_by_type(lambda element: element, partial(_over_slots, _emit_dots))
mix = emitted_by_type(lambda element: element, partial(_over_slots, _emit_mix))
# packed_dots(kind, (lanes, places, chunks, high_at, at, words, scratch, p, stride, group)): the
# format, then the arguments of `dots`.
packed_dots = emitted_by_type(_BITS_OF_KIND.__getitem__, partial(_over_packed_slots, _emit_dots))
packed_mix = emitted_by_type(_BITS_OF_KIND.__getitem__, partial(_over_packed_slots, _emit_mix))
