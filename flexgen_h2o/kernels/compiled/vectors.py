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
from flexgen_h2o.kernels.compiled.emitter import (
    F32,
    I16,
    I32,
    I64,
    Emitter,
    Value,
    bf16_pairs,
    emitted_by_type,
    join,
    least,
)
from flexgen_h2o.kernels.jit import known, num_planes

WIDE = 16  # words per chunk of whole slots; 1 if a slot has fewer
PACKED_WIDE = {8: 8, 4: 8, 3: 4}  # by bits: words per chunk of packed slots; 1 if a slot has fewer
SHARED = 16  # floats per vector, which packed slots may share
# Numbers whose types stand for the bits of packed slots, so that a loop is compiled for each.
KINDS: dict[int, np.number[Any]] = {8: np.uint8(0), 4: np.int8(0), 3: np.uint32(0)}
_BITS_OF_KIND = {types.uint8: 8, types.int8: 4, types.uint32: 3}
# int32 numbers per chunk in the table; the first two are read here: its first word, and the word of
# its group
PLACE = 4
_QUERIES = 4  # queries per tile, if a kv-head has as many


def _bits(kind: Any) -> int:
    """Return the bits of packed slots; 0 if slots are whole."""
    return _BITS_OF_KIND.get(kind, 0)


def _per_word(kind: Any) -> int:
    """Return how many numbers a word holds; their highest bits may be elsewhere."""
    bits = _bits(kind)
    return 32 // low_bits_of(bits) if bits else num_planes(kind)


def _slots(kind: Any) -> int:
    """Return the slots per tile.

    More whole slots would be so far apart that the hardware no longer prefetches them.
    """
    return 8 if _bits(kind) else 4


# what the type of a Format's kind says, for loops
is_packed = known(lambda kind: _bits(kind) > 0)
slots_of_tile = known(_slots)


@dataclass(frozen=True)
class _Chunk:
    """Hold a chunk of a tile; lists have one item per vector."""

    number: Value  # index of the chunk
    words: list[Value]
    scales: list[Value]  # only packed slots: scale of the group
    least: list[Value]  # only packed slots: least value of the group
    high: list[Value]  # only 3 bits: half words of the highest bits


@dataclass(frozen=True)
class _Tile:
    """Emit code for a tile of whole slots."""

    e: Emitter
    kind: Any  # numba type of a Format's kind
    lanes: int  # words of a chunk
    places: Value  # address of the table of chunks
    num_chunks: Value
    high_at: Value  # only 3 bits: bytes from a slot to its half words of highest bits
    at: Value  # address of the first slot
    words: Value  # words per slot

    @property
    def planes(self) -> int:
        return _per_word(self.kind)

    @property
    def sharing(self) -> int:
        """Slots that share a vector."""
        return SHARED // self.lanes if self.lanes > 1 else 1

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
        return _slots(self.kind) // self.sharing

    def scratch(self, start: Value, query: int, chunk: Value, plane: int) -> Value:
        """Return the address of a vector of scratch."""
        number = (self.num_chunks * query + chunk) * self.planes + plane
        return start + number * (4 * self.size)

    @contextmanager
    def chunks(self) -> Iterator[_Chunk]:
        with self.e.loop(self.num_chunks) as index:
            place = self.places + index * (4 * PLACE)
            first = self.first_word(index, place)
            chunk = _Chunk(index, [], [], [], [])
            for slot in range(0, _slots(self.kind), self.sharing):
                each = [self.at + self.words * (4 * (slot + i)) for i in range(self.sharing)]
                kind = ir.VectorType(I32, self.lanes)
                chunk.words.append(join([self.e.load(at + first * 4, kind) for at in each]))
                self.load_ends(chunk, each, place, first)
            yield chunk

    def first_word(self, chunk: Value, place: Value) -> Value:
        """Return the first word of a chunk; place: address of its row in the table."""
        return least(chunk * self.lanes, self.words - self.lanes)

    def load_ends(self, chunk: _Chunk, each: list[Value], place: Value, first: Value) -> None:
        """Load what else packed slots have; `each`: the addresses of the slots of a vector."""

    def plane(self, chunk: _Chunk, i: int, plane: int) -> Value:
        """Return the numbers of vector i in a plane, as floats."""
        words = chunk.words[i]
        if self.kind == types.int16:
            halves = (words >> 16 * plane).trunc(ir.VectorType(I16, self.size))
            return halves.bitcast(ir.VectorType(ir.HalfType(), self.size)).fpext(self.floats)
        return bf16_pairs(words)[plane] if self.planes == 2 else words.bitcast(self.floats)

    def add_dots(
        self, chunk: _Chunk, i: int, asked: list[list[Value]], totals: list[Value]
    ) -> list[Value]:
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

    def weights(self, chunk: _Chunk, p: list[Value], plane: int) -> list[Value]:
        """Return the factors of the vectors of a plane. p: the probabilities of their slots."""
        return p

    def slot_sums(self, vectors: list[Value]) -> list[Value]:
        """Return the sums over the lanes of vectors, in vectors of four, or one each."""
        width = self.lanes
        together = min(self.lanes, _slots(self.kind))
        if width == 1:
            return vectors
        while width > together:
            width //= 2
            low = list(range(width))
            high = list(range(width, 2 * width))
            vectors = [self.e.add(v.take(low), v.take(high)) for v in vectors]
        while len(vectors) > 1:
            vectors = self.adjacent_sums(vectors)
        return vectors

    def adjacent_sums(self, vectors: list[Value]) -> list[Value]:
        """Return the sums of adjacent lanes, of two vectors at a time if there are several."""
        others = vectors if len(vectors) == 1 else vectors[1::2]
        end = vectors[0].type.count * (1 if len(vectors) == 1 else 2)
        even = list(range(0, end, 2))
        odd = list(range(1, end, 2))
        pairs = zip(vectors[::2], others, strict=True)
        return [self.e.add(a.shuffle(b, even), a.shuffle(b, odd)) for a, b in pairs]


@dataclass(frozen=True)
class _PackedTile(_Tile):
    """Emit code for a tile of packed slots."""

    @property
    def planes(self) -> int:
        return _per_word(self.kind) + 1

    def first_word(self, chunk: Value, place: Value) -> Value:
        return self.e.load(place, I32).sext(I64)

    def load_ends(self, chunk: _Chunk, each: list[Value], place: Value, first: Value) -> None:
        e = self.e
        if _bits(self.kind) == 3:
            halves = self.high_at + first * 2
            kind = ir.VectorType(I16, self.lanes)
            high = [e.load(at + halves, kind, align=2) for at in each]
            chunk.high.append(join(high).zext(self.ints))
        group = e.load(place + 4, I32).sext(I64) * 4
        both = e.spread([e.load(at + group, I32) for at in each], self.lanes)
        scale, lowest = bf16_pairs(both)
        chunk.scales.append(scale)
        chunk.least.append(lowest)

    def plane(self, chunk: _Chunk, i: int, plane: int) -> Value:
        """Return values of vector i; the last plane is the least value.

        Values are 2**(bits x plane) times too large, except in the highest plane.
        """
        bits = _bits(self.kind)
        step = low_bits_of(bits)
        is_last = plane == self.planes - 2
        if plane == self.planes - 1:
            return chunk.least[i]
        if is_last:
            values = chunk.words[i] >> 32 - step
        else:
            values = chunk.words[i] & (2**step - 1) << (step * plane)
        if bits == 3:  # move the highest bit above the lower two
            bit = chunk.high[i] & (1 << plane)
            values = values | (bit >> plane - 2 if is_last else bit << plane + 2)
        return values.sitofp(self.floats)

    def add_dots(
        self, chunk: _Chunk, i: int, asked: list[list[Value]], totals: list[Value]
    ) -> list[Value]:
        e = self.e
        sums: list[Value] = []
        for plane in range(self.planes - 1):
            values = self.plane(chunk, i, plane)
            products = [e.multiply(values, q[plane]) for q in asked]
            sums = list(map(e.add, sums, products)) if sums else products
        scale = chunk.scales[i]
        scaled = [e.multiply_add(a, scale, total) for a, total in zip(sums, totals, strict=True)]
        last = [q[-1] for q in asked]
        return [e.multiply_add(q, chunk.least[i], a) for q, a in zip(last, scaled, strict=True)]

    def weights(self, chunk: _Chunk, p: list[Value], plane: int) -> list[Value]:
        if plane == self.planes - 1:
            return p
        return [self.e.multiply(share, scale) for share, scale in zip(p, chunk.scales, strict=True)]

    def slot_sums(self, vectors: list[Value]) -> list[Value]:
        """Add adjacent lanes until one number per slot is left.

        With 8 lanes the result is one vector, with 1 lane one vector per slot.
        """
        lanes = self.lanes
        while lanes > 1:
            vectors = self.adjacent_sums(vectors)
            lanes //= 2
        return vectors


def _emit_dots(tile: _Tile, queries: int, scratch: Value, p: Value, stride: Value) -> None:
    """Emit p[query, slot] = query . slot."""
    e = tile.e
    totals = e.variables(tile.floats, queries, tile.vectors)
    with tile.chunks() as chunk:
        asked = []
        for q in range(queries):
            places = [tile.scratch(scratch, q, chunk.number, x) for x in range(tile.planes)]
            asked.append([e.load(place, tile.floats) for place in places])
        for i in range(tile.vectors):
            sums = tile.add_dots(chunk, i, asked, [row[i].value for row in totals])
            for row, value in zip(totals, sums, strict=True):
                row[i].value = value
    for q, row in enumerate(totals):
        for i, found in enumerate(tile.slot_sums([total.value for total in row])):
            e.store(found, p + (stride * q + i) * 4)


def _emit_mix(tile: _Tile, queries: int, scratch: Value, p: Value, stride: Value) -> None:
    """Emit sums[query] += sum over slots of p[query, slot] x slot."""
    e = tile.e
    shares = []
    for q in range(queries):
        numbers = [e.load(p + stride * (4 * q) + 4 * s, F32) for s in range(_slots(tile.kind))]
        firsts = range(0, _slots(tile.kind), tile.sharing)
        shares.append([e.spread(numbers[s : s + tile.sharing], tile.lanes) for s in firsts])
    with tile.chunks() as chunk:
        for plane in range(tile.planes):
            values = [tile.plane(chunk, i, plane) for i in range(tile.vectors)]
            for q in range(queries):
                place = tile.scratch(scratch, q, chunk.number, plane)
                total = e.load(place, tile.floats)
                weights = tile.weights(chunk, shares[q], plane)
                for value, weight in zip(values, weights, strict=True):
                    total = e.multiply_add(value, weight, total)
                e.store(total, place)


def _for_queries(
    emit: Callable[..., None], tile: _Tile, scratch: Value, p: Value, stride: Value, group: Value
) -> None:
    """Emit loops over the queries: four at a time if vectors are wide, then one by one."""

    def work(count: Value, first: Any, together: int) -> None:
        with tile.e.loop(count) as index:
            query = index * together + first
            size = tile.num_chunks * (4 * tile.planes * tile.size)
            emit(tile, together, scratch + query * size, p + query * stride * 4, stride)

    if tile.lanes == 1:
        work(group, 0, 1)
        return
    fours = group // _QUERIES
    done = fours * _QUERIES
    work(fours, 0, _QUERIES)
    work(group - done, done, 1)


def _over_slots(
    emit: Callable[..., None],
    e: Emitter,
    kind: Any,
    lanes: Value,
    places: Value,
    chunks: Value,
    high_at: Value,
    at: Value,
    words: Value,
    *queries: Value,
) -> None:
    bits = _bits(kind)
    tile = _PackedTile if bits else _Tile

    def work(wide: int) -> None:
        _for_queries(emit, tile(e, kind, wide, places, chunks, high_at, at, words), *queries)

    e.choose(lanes > 1, (PACKED_WIDE.get(bits, WIDE), 1), work)


# dots(kind, (lanes, places, chunks, high_at, at, words, scratch, p, stride, group)). lanes, places,
# chunks: of a Format; high_at: bytes from a slot to its highest bits in 3 bits; at: a tile's first
# slot; words: words per slot; scratch: the first query (or sum); p: its first probability; stride:
# floats from one query's probabilities to the next; group: number of queries.
dots = emitted_by_type(partial(_over_slots, _emit_dots))
mix = emitted_by_type(partial(_over_slots, _emit_mix))
