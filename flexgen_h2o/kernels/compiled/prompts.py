"""The compiled loops of prompts: column sums over a tile of products, and causal attention.

Attention is flash attention (Dao 2023, algorithm 1) in fp32: only the scores of a tile of queries
with WIDE keys exist at a time. Keys are laid out by columns, so that products need no sums across a
vector.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from flexgen_h2o.kernels.compiled.emitter import F32, FLOATS, LANES, Emitter, Value, emitted
from flexgen_h2o.kernels.jit import (
    LN_2,
    LOG2_E,
    bits_to_float,
    exp2,
    float_to_bits,
    floats_at,
    jit,
    number_at,
    ordered,
    planes,
    set_number,
)
from flexgen_h2o.kernels.workspace import cpu_has

# rows of a tile: with 4 vectors each, 16 sums (of AVX-512), which is enough to hide their latency
ROWS = 4
WIDE = 64  # columns of a wide tile


def _emit_gemm(
    vectors: int,
    adds: bool,
    e: Emitter,
    a: Value,
    a_step: Value,
    b: Value,
    b_step: Value,
    c: Value,
    c_step: Value,
    count: Value,
) -> None:
    """Emit a product of a tile of `vectors` x LANES columns.

    adds: add to what is in c. The numbers of a row of `a` are broadcast one by one.
    """
    # Registers of AVX-512 hold all sums, those of AVX2 one vector per row.
    together = vectors if cpu_has("avx512f") else 1
    for part in range(0, vectors, together):
        columns = [v * LANES for v in range(part, part + together)]
        places = [[c + (c_step * row + column) * 4 for column in columns] for row in range(ROWS)]
        totals = e.variables(FLOATS, ROWS, together)
        if adds:
            e.load_each(totals, places)
        with e.loop(count) as index:
            many = [e.load(b + (b_step * index + column) * 4, FLOATS) for column in columns]
            for row in range(ROWS):
                one = e.spread([e.load(a + (a_step * row + index) * 4, F32)], LANES)
                for value, total in zip(many, totals[row], strict=True):
                    total.value = e.multiply_add(one, value, total.value)
        e.store_each(totals, places)


# gemm_tile((a, a_step, b, b_step, c, c_step, count)): c (+)= a b in fp32, ROWS rows by WIDE or
# LANES columns in registers. a, b, c: addresses; *_step: floats from row to row; count: columns of
# a, which are rows of b.
gemm_tile = emitted(partial(_emit_gemm, WIDE // LANES, False))
add_gemm_tile = emitted(partial(_emit_gemm, WIDE // LANES, True))
add_narrow_gemm_tile = emitted(partial(_emit_gemm, 1, True))

_ROWS = 4  # query rows whose exponentials are added before they are written to memory


@jit
def add_tile(  # type: ignore[no-untyped-def]
    element, group, rows, columns, n, first, products, lse, sums, scale, start, end
):
    """Add exp(scale x product[i, j] - lse[i]) to sums[j], for kv-heads start..end-1.

    The sum is over all i >= j of the tile. element: type of the products. If the tile crosses the
    diagonal, each row simply ends sooner, so there is no mask.

    The tile has the query rows first..first+rows-1 and the keys 0..columns-1. products: address of
    (kv-heads, group, rows, columns); lse: of (kv-heads, group, rows) fp32; sums: of (kv-heads, n)
    fp32, from column 0.
    """
    factor = np.float32(scale) * LOG2_E
    row_bytes = 4 // planes(element) * columns
    for head in range(start, end):
        of_head = floats_at(sums + 4 * head * n)
        for g in range(group):
            row = (head * group + g) * rows
            i = 0
            while i + _ROWS <= rows:
                seen = first + i + 1
                at = products + row_bytes * (row + i)
                of_rows = floats_at(lse + 4 * (row + i))
                _add_four(element, at, columns, of_rows, factor, of_head, seen)
                # the corner of the tile that the first of the four rows does not have
                for late in range(1, _ROWS):
                    for j in range(seen, seen + late):
                        s = number_at(element, at + row_bytes * late, j)
                        of_head[j] += exp2(s * factor - of_rows[late] * LOG2_E)
                i += _ROWS
            while i < rows:
                at = products + row_bytes * (row + i)
                of_rows = floats_at(lse + 4 * (row + i))
                for j in range(first + i + 1):
                    of_head[j] += exp2(number_at(element, at, j) * factor - of_rows[0] * LOG2_E)
                i += 1


@jit
def _add_four(element, at, columns, lse, factor, sums, end):  # type: ignore[no-untyped-def]
    a = lse[0] * LOG2_E
    b = lse[1] * LOG2_E
    c = lse[2] * LOG2_E
    d = lse[3] * LOG2_E
    for j in range(end):
        ab = exp2(number_at(element, at, j) * factor - a) + exp2(
            number_at(element, at, columns + j) * factor - b
        )
        cd = exp2(number_at(element, at, 2 * columns + j) * factor - c) + exp2(
            number_at(element, at, 3 * columns + j) * factor - d
        )
        sums[j] += ab + cd


KEYS = WIDE  # keys per block
QUERIES = 512  # queries per unit, about: enough to reuse keys that were laid out once
_LOWEST = np.int32(-(2**31))


class HeadStrides(NamedTuple):
    """Hold the address of a tensor (batch, heads, tokens, width), and its steps in bytes."""

    at: int
    batch_step: int
    head_step: int
    token_step: int


class PromptsJob(NamedTuple):
    """Hold the arguments of `attend_units`."""

    kv_heads: int
    group: int  # query heads per kv-head
    tokens: int  # queries of a prompt, its last tokens
    before: int  # keys before the first query's own key
    window: int  # keys that a query sees at most; its own key is the last
    width: int
    queries: int  # tokens per unit, a multiple of KEYS
    q: HeadStrides
    k: HeadStrides
    v: HeadStrides
    out: HeadStrides
    lse: int  # address of (batch, heads, tokens) fp32


class PromptUnit(NamedTuple):
    """Identify the tokens start..stop-1 of a prompt, with all query heads of a kv-head."""

    batch: int
    kv_head: int
    start: int
    stop: int


@jit
def attend_units(element, job, scale, first, end):  # type: ignore[no-untyped-def]
    """Attend for the units first..end-1, each a (prompt, kv-head, run of `queries` tokens).

    element: type of q, k and v.
    """
    units = -(-job.tokens // job.queries)
    wide = -(-job.width // LANES) * LANES
    rows = job.group * job.queries
    query = np.empty((rows, job.width), np.float32)
    attn_out = np.empty((rows, wide), np.float32)
    top = np.empty(rows, np.float32)
    total = np.empty(rows, np.float32)
    keys = np.empty((job.width, KEYS), np.float32)
    values = np.zeros((KEYS, wide), np.float32)
    scores = np.empty((ROWS, KEYS), np.float32)
    query_at = np.int64(query.ctypes.data)
    keys_at = np.int64(keys.ctypes.data)
    scores_at = np.int64(scores.ctypes.data)
    for number in range(first, end):
        batch = number // (job.kv_heads * units)
        rest = number % (job.kv_heads * units)
        start = (rest % units) * job.queries
        unit = PromptUnit(batch, rest // units, start, min(job.tokens, start + job.queries))
        _take_queries(element, job, scale, unit, query)
        attn_out[:] = 0
        total[:] = 0
        top[:] = -np.float32(np.inf)
        for block in range(
            max(0, job.before + start + 1 - job.window) // KEYS * KEYS, job.before + unit.stop, KEYS
        ):
            count = min(KEYS, job.before + unit.stop - block)
            own = block - job.before - start  # the first query that sees keys of this block
            # later queries see no keys of this block
            end_of_block = min(unit.stop - start, own + count - 1 + job.window)
            _take_block(element, job, unit, block, count, keys, values)
            for g in range(job.group):
                for i in range(max(0, own // ROWS * ROWS), end_of_block, ROWS):
                    row = g * job.queries + i
                    rows_at = query_at + 4 * row * job.width
                    gemm_tile((rows_at, job.width, keys_at, KEYS, scores_at, KEYS, job.width))
                    seen = min(count, i + ROWS - own)
                    for r in range(ROWS):
                        ends = i + r + 1 - own
                        _weigh(
                            scores[r],
                            (ends - job.window, min(count, ends)),
                            row + r,
                            top,
                            total,
                            attn_out,
                        )
                    _add_values(scores, values, attn_out, row, seen)
        _write(element, job, unit, top, total, attn_out)


@jit
def _head_at(heads, batch, head):  # type: ignore[no-untyped-def]
    return heads.at + batch * heads.batch_step + head * heads.head_step


@jit
def _take_queries(element, job, scale, unit, query):  # type: ignore[no-untyped-def]
    """Copy queries to fp32, times `scale` and log2(e), because weights are powers of 2.

    Rows beyond `stop` are 0.
    """
    factor = scale * LOG2_E
    for g in range(job.group):
        q = _head_at(job.q, unit.batch, unit.kv_head * job.group + g)
        for i in range(job.queries):
            row = query[g * job.queries + i]
            if unit.start + i < unit.stop:
                at = q + (unit.start + i) * job.q.token_step
                for d in range(job.width):
                    row[d] = number_at(element, at, d) * factor
            elif unit.start + i < unit.stop + ROWS:
                row[:] = 0


@jit
def _take_block(element, job, unit, block, count, keys, values):  # type: ignore[no-untyped-def]
    """Copy keys by columns and values by rows, in fp32. What the last block lacks is 0."""
    k = _head_at(job.k, unit.batch, unit.kv_head)
    v = _head_at(job.v, unit.batch, unit.kv_head)
    for j in range(KEYS):
        if j < count:
            key = k + (block + j) * job.k.token_step
            value = v + (block + j) * job.v.token_step
            for d in range(job.width):
                keys[d, j] = number_at(element, key, d)
                values[j, d] = number_at(element, value, d)
        else:
            for d in range(job.width):
                keys[d, j] = 0
                values[j, d] = 0


@jit
def _weigh(scores, seen, row, top, total, attn_out):  # type: ignore[no-untyped-def]
    """Turn a row's scores into weights, and rescale the row's sums.

    seen: (first, end) of the keys that the row sees; all other weights become 0. top, total,
    attn_out: per row the largest score, the sum of the weights and the sum of the weighted values
    so far. Loops always cover all KEYS, because loops of a known length have no remainder.
    """
    first, end = seen
    if end <= max(0, first):
        scores[:] = 0
        return
    largest = ordered(float_to_bits(top[row]))
    for j in range(KEYS):
        largest = max(
            largest, ordered(float_to_bits(scores[j])) if (first <= j) & (j < end) else _LOWEST
        )
    now = bits_to_float(np.uint32(ordered(largest)))
    added = np.float32(0)
    for j in range(KEYS):
        weight = exp2(scores[j] - now) if (first <= j) & (j < end) else np.float32(0)
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
    """Add weights x the first `seen` values to attn_out[row..row+ROWS-1]."""
    wide = np.int64(values.shape[1])
    to = np.int64(attn_out.ctypes.data) + 4 * row * wide
    source = np.int64(values.ctypes.data)
    weights_at = np.int64(weights.ctypes.data)
    done = 0
    while done + KEYS <= wide:
        add_gemm_tile((weights_at, KEYS, source + 4 * done, wide, to + 4 * done, wide, seen))
        done += KEYS
    while done < wide:
        add_narrow_gemm_tile((weights_at, KEYS, source + 4 * done, wide, to + 4 * done, wide, seen))
        done += LANES


@jit
def _write(element, job, unit, top, total, attn_out):  # type: ignore[no-untyped-def]
    """Write sums divided by total weights to `out`, and the log-sum-exp of each query."""
    for g in range(job.group):
        head = unit.kv_head * job.group + g
        out = _head_at(job.out, unit.batch, head)
        lse = job.lse + 4 * (unit.batch * job.kv_heads * job.group + head) * job.tokens
        for token in range(unit.start, unit.stop):
            row = g * job.queries + token - unit.start
            share = np.float32(1) / total[row]
            at = out + token * job.out.token_step
            for d in range(job.width):
                set_number(element, at, d, attn_out[row, d] * share)
            floats_at(lse)[token] = (top[row] + np.log2(total[row])) * LN_2
