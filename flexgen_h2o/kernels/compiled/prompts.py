"""LLVM vector code for products of fp32 panels: c (+)= a b, a tile of ROWS rows by 64 or 16 columns in registers.

The numbers of `a` are spread over a vector one by one, those of `b` lie side by side, so nothing is ever summed across
the lanes of a vector. Addresses and counts are int64, steps in floats.

The compiled loop of `column_sums`: one pass over a tile of products.

The compiled loop of `causal_attention`: tiles of queries against blocks of keys, with a running softmax.

Flash attention (Dao 2023, algorithm 1) in fp32: the scores of a tile of queries with WIDE keys exist at a time. Keys
are laid out by columns, so that products need no sums across a vector.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic

from flexgen_h2o.kernels.compiled import vectors
from flexgen_h2o.kernels.compiled.packed_slots import number_at, set_number
from flexgen_h2o.kernels.jit import bits_to_float, exp2, float_to_bits, floats_at, jit, ordered, shorts_at

cgutils: Any = _cgutils  # without annotations
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
LANES = 16
ROWS = 4  # of a tile: with 4 vectors each, 16 sums, which is enough to wait for none of them
WIDE = 64  # columns of a wide tile
# See jit.FASTMATH: no assumption that there is no NaN.
_FLAGS = ("contract", "reassoc", "nsz")


def _tile(vectors: int, adds: bool) -> Any:
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


set_wide, add_wide, add_narrow = _tile(WIDE // LANES, False), _tile(WIDE // LANES, True), _tile(1, True)


_LOG2_E = np.float32(1.4426950408889634)
_ROWS = 4  # query rows whose exponentials are added up before they go to memory


class Tile(NamedTuple):
    """Products of the query rows first..first+rows-1 with the keys 0..columns-1, and where their sums go.

    products: address of (kv-heads, group, rows, columns); lse: of (kv-heads, group, rows) fp32; sums: of (kv-heads, n)
    fp32, whole, from column 0.
    """

    group: int
    rows: int
    columns: int
    n: int
    first: int
    products: int
    lse: int
    sums: int


@jit
def add_tile(element, tile, scale, start, end):  # type: ignore[no-untyped-def]
    """sums[j] += exp(scale x product[i, j] - lse[i]) for all i >= j of the tile, for the kv-heads start..end-1.

    element: a number whose type says what products are: uint16 for bf16, float32 for fp32. Where rows and columns meet
    the diagonal, each row simply ends sooner: no mask.
    """
    factor = np.float32(scale) * _LOG2_E
    size = 2 if vectors.planes(element) == 2 else 4
    for head in range(start, end):
        sums = floats_at(tile.sums + 4 * head * tile.n)
        for g in range(tile.group):
            row = (head * tile.group + g) * tile.rows
            lse = floats_at(tile.lse + 4 * row)
            i = 0
            while i + _ROWS <= tile.rows:
                at = tile.products + size * (row + i) * tile.columns
                _add_four(element, at, tile.columns, lse, i, factor, sums, tile.first + i + 1)
                for late in range(1, _ROWS):  # the corner that the first of the four rows does not have
                    for j in range(tile.first + i + 1, tile.first + i + 1 + late):
                        s = _product(element, at + size * late * tile.columns, j)
                        sums[j] += exp2(s * factor - lse[i + late] * _LOG2_E)
                i += _ROWS
            while i < tile.rows:
                at = tile.products + size * (row + i) * tile.columns
                for j in range(tile.first + i + 1):
                    sums[j] += exp2(_product(element, at, j) * factor - lse[i] * _LOG2_E)
                i += 1


@jit
def _add_four(element, at, columns, lse, i, factor, sums, end):  # type: ignore[no-untyped-def]
    a, b, c, d = lse[i] * _LOG2_E, lse[i + 1] * _LOG2_E, lse[i + 2] * _LOG2_E, lse[i + 3] * _LOG2_E
    for j in range(end):
        ab = exp2(_product(element, at, j) * factor - a) + exp2(_product(element, at, columns + j) * factor - b)
        cd = exp2(_product(element, at, 2 * columns + j) * factor - c) + exp2(
            _product(element, at, 3 * columns + j) * factor - d
        )
        sums[j] += ab + cd


@jit
def _product(element, at, j):  # type: ignore[no-untyped-def]
    if vectors.planes(element) == 2:
        return bits_to_float(np.uint32(shorts_at(at)[j]) << np.uint32(16))
    else:
        return floats_at(at)[j]


KEYS = WIDE  # of a block
QUERIES = 512  # of a unit, about: as many as make use of keys that were laid out once
_LN_2 = np.float32(0.6931471805599453)
_LOWEST = np.int32(-(2**31))


class Prompts(NamedTuple):
    """Sizes, then addresses and steps in bytes of (batch, heads, tokens, width); lse: (batch, heads, tokens) fp32."""

    kv_heads: int
    group: int  # query heads of a kv-head
    tokens: int  # queries of a prompt, its last ones
    before: int  # keys in front of those of the queries
    width: int
    queries: int  # tokens of a unit, a multiple of KEYS
    q: int
    q_batch: int
    q_head: int
    q_token: int
    k: int
    k_batch: int
    k_head: int
    k_token: int
    v: int
    v_batch: int
    v_head: int
    v_token: int
    out: int
    out_batch: int
    out_head: int
    out_token: int
    lse: int


@jit
def attend_units(element, job, scale, first, end):  # type: ignore[no-untyped-def]
    """Units first..end-1: (prompt, kv-head, run of `queries` tokens), each with all query heads of its kv-head.

    element: a number whose type says what q, k and v are: uint16 for bf16, float32 for fp32.
    """
    units = -(-job.tokens // job.queries)
    wide = -(-job.width // LANES) * LANES
    rows = job.group * job.queries
    query, attn_out = np.empty((rows, job.width), np.float32), np.empty((rows, wide), np.float32)
    top, total = np.empty(rows, np.float32), np.empty(rows, np.float32)
    keys, values = np.empty((job.width, KEYS), np.float32), np.zeros((KEYS, wide), np.float32)
    scores = np.empty((ROWS, KEYS), np.float32)
    for unit in range(first, end):
        batch, rest = unit // (job.kv_heads * units), unit % (job.kv_heads * units)
        head, start = rest // units, (rest % units) * job.queries
        stop = min(job.tokens, start + job.queries)
        _take_queries(element, job, scale, batch, head, start, stop, query)
        attn_out[:], total[:], top[:] = 0, 0, -np.float32(np.inf)
        k, v = job.k + batch * job.k_batch + head * job.k_head, job.v + batch * job.v_batch + head * job.v_head
        for block in range(0, job.before + stop, KEYS):
            count = min(KEYS, job.before + stop - block)
            own = block - job.before - start  # the first query that sees none before this block
            _take_block(element, job, k, v, block, count, keys, values)
            for g in range(job.group):
                for i in range(max(0, own // ROWS * ROWS), stop - start, ROWS):
                    row = g * job.queries + i
                    set_wide(
                        query.ctypes.data + 4 * row * job.width, job.width, keys.ctypes.data, KEYS,
                        scores.ctypes.data, KEYS, job.width,
                    )  # fmt: skip
                    seen = min(count, i + ROWS - own)
                    for r in range(ROWS):
                        _weigh(scores[r], min(count, i + r + 1 - own), row + r, top, total, attn_out)
                    _add_values(scores, values, attn_out, row, seen)
        _give(element, job, batch, head, start, stop, attn_out, top, total)


@jit
def _take_queries(element, job, scale, batch, head, start, stop, query):  # type: ignore[no-untyped-def]
    """Queries in fp32, times `scale` and log2(e): powers of 2 are taken of scores. Rows beyond `stop` are 0."""
    factor = scale * _LOG2_E
    for g in range(job.group):
        q = job.q + batch * job.q_batch + (head * job.group + g) * job.q_head
        for i in range(job.queries):
            row = query[g * job.queries + i]
            if start + i < stop:
                at = q + (start + i) * job.q_token
                for d in range(job.width):
                    row[d] = number_at(element, at, d) * factor
            elif start + i < stop + ROWS:
                row[:] = 0


@jit
def _take_block(element, job, k, v, block, count, keys, values):  # type: ignore[no-untyped-def]
    """Keys by columns, values by rows, in fp32; what a block lacks is 0."""
    for j in range(KEYS):
        if j < count:
            at, there = k + (block + j) * job.k_token, v + (block + j) * job.v_token
            for d in range(job.width):
                keys[d, j] = number_at(element, at, d)
                values[j, d] = number_at(element, there, d)
        else:
            for d in range(job.width):
                keys[d, j] = 0
                values[j, d] = 0


@jit
def _weigh(scores, seen, row, top, total, attn_out):  # type: ignore[no-untyped-def]
    """Turn a row's scores of the first `seen` keys into weights, the others into 0, and rescale what the row has.

    Always all KEYS of them: loops of a known length have no rest.
    """
    if seen <= 0:
        scores[:] = 0
        return
    largest = ordered(float_to_bits(top[row]))
    for j in range(KEYS):
        largest = max(largest, ordered(float_to_bits(scores[j])) if j < seen else _LOWEST)
    now = bits_to_float(np.uint32(ordered(largest)))
    added = np.float32(0)
    for j in range(KEYS):
        weight = exp2(scores[j] - now) if j < seen else np.float32(0)
        scores[j] = weight
        added += weight
    if now != top[row]:
        decay = exp2(top[row] - now)
        total[row] *= decay
        for d in range(attn_out.shape[1]):
            attn_out[row, d] *= decay
        top[row] = now
    total[row] += added


@jit
def _add_values(weights, values, attn_out, row, seen):  # type: ignore[no-untyped-def]
    """mixed[row..row+ROWS-1] += weights x the first `seen` values."""
    wide = values.shape[1]
    to, source = attn_out.ctypes.data + 4 * row * wide, values.ctypes.data
    done = 0
    while done + KEYS <= wide:
        add_wide(weights.ctypes.data, KEYS, source + 4 * done, wide, to + 4 * done, wide, seen)
        done += KEYS
    while done < wide:
        add_narrow(weights.ctypes.data, KEYS, source + 4 * done, wide, to + 4 * done, wide, seen)
        done += LANES


@jit
def _give(element, job, batch, head, start, stop, attn_out, top, total):  # type: ignore[no-untyped-def]
    """Sums over weights into `out`, and the log-sum-exp of each query."""
    for g in range(job.group):
        place = head * job.group + g
        out = job.out + batch * job.out_batch + place * job.out_head
        lse = job.lse + 4 * (batch * job.kv_heads * job.group + place) * job.tokens
        for i in range(stop - start):
            row = g * job.queries + i
            share, at = np.float32(1) / total[row], out + (start + i) * job.out_token
            for d in range(job.width):
                set_number(element, at, d, attn_out[row, d] * share)
            floats_at(lse)[start + i] = (top[row] + np.log2(total[row])) * _LN_2
