"""The compiled loop of `causal_attention`: tiles of queries against blocks of keys, with a running softmax.

Flash attention (Dao 2023, algorithm 1) in fp32: the scores of a tile of queries with WIDE keys exist at a time. Keys
are laid out by columns, so that products need no sums across a vector.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexgen_h2o.kernels import panels
from flexgen_h2o.kernels.jit import bits_to_float, exp2, float_to_bits, floats_at, jit, ordered
from flexgen_h2o.kernels.packed_loops import number_at, set_number

KEYS = panels.WIDE  # of a block
ROWS = panels.ROWS
QUERIES = 512  # of a unit, about: as many as make use of keys that were laid out once
_LOG2_E, _LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
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
    wide = -(-job.width // panels.LANES) * panels.LANES
    rows = job.group * job.queries
    query, mixed = np.empty((rows, job.width), np.float32), np.empty((rows, wide), np.float32)
    top, total = np.empty(rows, np.float32), np.empty(rows, np.float32)
    keys, values = np.empty((job.width, KEYS), np.float32), np.zeros((KEYS, wide), np.float32)
    scores = np.empty((ROWS, KEYS), np.float32)
    for unit in range(first, end):
        batch, rest = unit // (job.kv_heads * units), unit % (job.kv_heads * units)
        head, start = rest // units, (rest % units) * job.queries
        stop = min(job.tokens, start + job.queries)
        _take_queries(element, job, scale, batch, head, start, stop, query)
        mixed[:], total[:], top[:] = 0, 0, -np.float32(np.inf)
        k, v = job.k + batch * job.k_batch + head * job.k_head, job.v + batch * job.v_batch + head * job.v_head
        for block in range(0, job.before + stop, KEYS):
            count = min(KEYS, job.before + stop - block)
            own = block - job.before - start  # the first query that sees none before this block
            _take_block(element, job, k, v, block, count, keys, values)
            for g in range(job.group):
                for i in range(max(0, own // ROWS * ROWS), stop - start, ROWS):
                    row = g * job.queries + i
                    panels.set_wide(
                        query.ctypes.data + 4 * row * job.width, job.width, keys.ctypes.data, KEYS,
                        scores.ctypes.data, KEYS, job.width,
                    )  # fmt: skip
                    seen = min(count, i + ROWS - own)
                    for r in range(ROWS):
                        _weigh(scores[r], min(count, i + r + 1 - own), row + r, top, total, mixed)
                    _add_values(scores, values, mixed, row, seen)
        _give(element, job, batch, head, start, stop, mixed, top, total)


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
def _weigh(scores, seen, row, top, total, mixed):  # type: ignore[no-untyped-def]
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
        fade = exp2(top[row] - now)
        total[row] *= fade
        for d in range(mixed.shape[1]):
            mixed[row, d] *= fade
        top[row] = now
    total[row] += added


@jit
def _add_values(weights, values, mixed, row, seen):  # type: ignore[no-untyped-def]
    """mixed[row..row+ROWS-1] += weights x the first `seen` values."""
    wide = values.shape[1]
    to, source = mixed.ctypes.data + 4 * row * wide, values.ctypes.data
    done = 0
    while done + KEYS <= wide:
        panels.add_wide(weights.ctypes.data, KEYS, source + 4 * done, wide, to + 4 * done, wide, seen)
        done += KEYS
    while done < wide:
        panels.add_narrow(weights.ctypes.data, KEYS, source + 4 * done, wide, to + 4 * done, wide, seen)
        done += panels.LANES


@jit
def _give(element, job, batch, head, start, stop, mixed, top, total):  # type: ignore[no-untyped-def]
    """Sums over weights into `out`, and the log-sum-exp of each query."""
    for g in range(job.group):
        place = head * job.group + g
        out = job.out + batch * job.out_batch + place * job.out_head
        lse = job.lse + 4 * (batch * job.kv_heads * job.group + place) * job.tokens
        for i in range(stop - start):
            row = g * job.queries + i
            share, at = np.float32(1) / total[row], out + (start + i) * job.out_token
            for d in range(job.width):
                set_number(element, at, d, mixed[row, d] * share)
            floats_at(lse)[start + i] = (top[row] + np.log2(total[row])) * _LN_2
