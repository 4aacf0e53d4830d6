"""Compiled loops for decode attention over whole slots, and for copying columns to and from slots.

Attention makes one pass over the keys of each row and one over its values. The result of a row
depends on that row alone: slots are always read in the same groups of eight, whatever the segments.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexgen_h2o.kernels.compiled import vectors
from flexgen_h2o.kernels.compiled.emitter import prefetch
from flexgen_h2o.kernels.jit import (
    HIGH,
    LN_2,
    LOG2_E,
    bits_to_float,
    bytes_at,
    exp2,
    float_to_bits,
    float_to_half,
    floats_at,
    half_to_float,
    ints_at,
    is_half,
    jit,
    longs_at,
    ordered,
    planes,
    to_bf16,
    words_at,
)

BLOCK = 8  # slots that are looked up together
AHEAD = 2048  # bytes of slots that are prefetched, across the ends of segments, passes and rows
_SCORES_AHEAD = 512  # bytes of a row's scores, and of its positions, that are prefetched
_LINE = 64  # bytes of a cache line
_NONE = np.iinfo(np.int64).max


class Slots(NamedTuple):
    """Hold the sizes and addresses that `attend_rows` reads and writes; made by `_slots_job`.

    A word is 4 bytes: one fp32 number or two in bf16.
    """

    group: int  # query heads per kv-head
    words: int  # 4-byte words per slot
    per_segment: int  # slots per segment
    segment_words: int  # words from one segment to the next
    most: int  # the largest of `filled`
    q: int
    keys: int
    values: int
    filled: int
    out: int
    lse: int  # address of the log-sum-exp; 0: not wanted
    sinks: int  # address of each query's sink, fp32; 0: no sinks
    scale: float


class Scores(NamedTuple):
    """Hold the addresses of a ScoreState's tensors, and its number; made by `_score_addresses`."""

    columns: int  # slots per row; 0: nothing is scored
    scores: int
    positions: int
    oldest: int
    newest: int
    victims: int
    gains: int
    now: int  # 0: scores are compared as they are
    decay: float


NO_SCORES = Scores(0, 0, 0, 0, 0, 0, 0, 0, 0.0)


class Pass(NamedTuple):
    """Describe a pass over a row: queries times keys, or values added to the sums."""

    is_dots: bool  # True: products with keys; False: sums of values
    at: int  # address of the row
    next_at: int  # address of what is read next, for prefetching
    filled: int | np.int64  # filled slots of the row


@jit
def attend_rows(element, slots, state, first, end):  # type: ignore[no-untyped-def]
    """Run `attend` or `attend_lse` on the rows first..end-1. In bf16 d is even."""
    lanes = vectors.WIDE if slots.words >= vectors.WIDE else 1
    chunks = -(-slots.words // lanes)
    query = np.empty((slots.group, chunks, planes(element), lanes), np.float32)
    attn_out = np.empty((slots.group, chunks, planes(element), lanes), np.float32)
    p = np.empty((slots.group, -(-slots.most // BLOCK) * BLOCK), np.float32)
    gathered = np.empty(BLOCK * slots.words, np.uint32)
    for r in range(first, end):
        filled = np.int64(ints_at(slots.filled)[r])
        offset = r * slots.group * slots.words * 4
        unpack(element, slots.q + offset, slots.words, query)
        if state.columns:
            fetch_scores(state, r)
        keys = row_at(slots, slots.keys, r)
        values = row_at(slots, slots.values, r)
        over_row(element, slots, Pass(True, keys, values, filled), gathered, query, p)
        softmax(p, filled, slots, r)
        attn_out[:] = 0
        over_row(
            element,
            slots,
            Pass(False, values, row_at(slots, slots.keys, r + 1), filled),
            gathered,
            attn_out,
            p,
        )
        pack(element, attn_out, slots.words, slots.out + offset)
        if state.columns:
            score_row(state, r, filled, p)


@jit
def over_row(element, slots, row, gathered, scratch, p):  # type: ignore[no-untyped-def]
    """Run a pass tile by tile, for all queries while a tile is in the nearest cache.

    scratch: queries, or their sums.
    """
    words = slots.words
    group = np.int64(p.shape[0])
    stride = np.int64(p.shape[1])
    ahead = max(1, AHEAD // (BLOCK * 4 * words)) * BLOCK
    scratch_at = np.int64(scratch.ctypes.data)
    p_at = np.int64(p.ctypes.data)
    tile = vectors.SLOTS * 4 * words  # bytes per tile
    at = row.at
    inside = np.int64(0)
    for j in range(0, row.filled, BLOCK):
        ahead_at = address_ahead(slots, at, j + ahead, row.filled, inside + ahead, row.next_at)
        block = take(slots, at, inside, j, row.filled, gathered)
        for start in range(j, j + BLOCK, vectors.SLOTS):
            fetch(ahead_at, tile)
            numbers = (block, words, scratch_at, p_at + 4 * start, stride, group)
            if row.is_dots:
                vectors.dots(element, numbers)
            else:
                vectors.mix(element, numbers)
            block = block + tile
            ahead_at = ahead_at + tile
        at, inside = onwards(slots, at, inside)


@jit
def unpack(element, at, words, query):  # type: ignore[no-untyped-def]
    """Spread the queries at address `at` over planes.

    Lanes that the last chunk shares with the one before are 0.
    """
    lanes = query.shape[3]
    for g in range(query.shape[0]):
        done = 0
        for c in range(query.shape[1]):
            start = min(c * lanes, words - lanes)
            for i in range(lanes):
                word = words_at(at)[g * words + start + i] if start + i >= done else np.uint32(0)
                if is_half(element):
                    query[g, c, 0, i] = half_to_float(np.uint16(word & np.uint32(0xFFFF)))
                    query[g, c, 1, i] = half_to_float(np.uint16(word >> np.uint32(16)))
                elif planes(element) == 2:
                    query[g, c, 0, i] = bits_to_float(word << np.uint32(16))
                    query[g, c, 1, i] = bits_to_float(word & HIGH)
                else:
                    query[g, c, 0, i] = bits_to_float(word)
            done = start + lanes


@jit
def pack(element, attn_out, words, at):  # type: ignore[no-untyped-def]
    """Write the sums to address `at` in the dtype of the slots."""
    lanes = attn_out.shape[3]
    for g in range(attn_out.shape[0]):
        for c in range(attn_out.shape[1]):
            start = g * words + min(c * lanes, words - lanes)
            for i in range(lanes):
                if is_half(element):
                    first = float_to_half(attn_out[g, c, 0, i])
                    second = float_to_half(attn_out[g, c, 1, i])
                    words_at(at)[start + i] = np.uint32(first) | (
                        np.uint32(second) << np.uint32(16)
                    )
                elif planes(element) == 2:
                    low = to_bf16(attn_out[g, c, 0, i])
                    high = to_bf16(attn_out[g, c, 1, i])
                    words_at(at)[start + i] = (low >> np.uint32(16)) | (high & HIGH)
                else:
                    floats_at(at)[start + i] = attn_out[g, c, 0, i]


@jit
def add(element, sums, words, attn_out):  # type: ignore[no-untyped-def]
    """Add sums (group, width) to those in the order of slots.

    Lanes that two chunks share get the same numbers in both.
    """
    lanes = attn_out.shape[3]
    for g in range(attn_out.shape[0]):
        for c in range(attn_out.shape[1]):
            start = min(c * lanes, words - lanes)
            for plane in range(planes(element)):
                for i in range(lanes):
                    attn_out[g, c, plane, i] += sums[g, planes(element) * (start + i) + plane]


@jit
def row_at(slots, memory, r):  # type: ignore[no-untyped-def]
    """Return the address of row r in the first segment."""
    return memory + 4 * r * slots.per_segment * slots.words


# A place among a row's slots is (at, inside): the row's address in a segment, and the number of
# slots before it in the segment. So no division per block is needed.


@jit
def onwards(slots, at, inside):  # type: ignore[no-untyped-def]
    """Return the place of the next block."""
    inside += BLOCK
    while inside >= slots.per_segment:
        inside -= slots.per_segment
        at += 4 * slots.segment_words
    return at, inside


@jit
def address_ahead(slots, at, j, filled, inside, next_at):  # type: ignore[no-untyped-def]
    """Return the address of slot j, which is read soon.

    It is in this segment, in the next segment, or after the row at `next_at`.
    """
    if j >= filled:
        return next_at + 4 * max(0, j - -(-filled // BLOCK) * BLOCK) * slots.words
    if inside >= slots.per_segment:
        return at + 4 * (slots.segment_words + (inside - slots.per_segment) * slots.words)
    return at + 4 * inside * slots.words


@jit
def fetch(at, size):  # type: ignore[no-untyped-def]
    """Prefetch `size` bytes.

    They are at most those of a tile, because more would delay what is needed now.
    """
    for line in range(at, at + size, _LINE):
        prefetch((line,))


@jit
def fetch_scores(state, r):  # type: ignore[no-untyped-def]
    """Prefetch the beginning of row r's scores and positions; the hardware prefetches the rest."""
    start = 4 * r * state.columns
    fetch(state.scores + start, min(_SCORES_AHEAD, 4 * state.columns))
    fetch(state.positions + start, min(_SCORES_AHEAD, 4 * state.columns))
    fetch(state.oldest + 4 * r, 1)
    fetch(state.newest + 4 * r, 1)
    fetch(state.victims + 4 * r, 1)


@jit
def take(slots, at, inside, j, filled, gathered):  # type: ignore[no-untyped-def]
    """Return the address of slots j..j+7 as adjacent memory.

    Slots beyond `filled` are zero there; their memory is not read.
    """
    words = slots.words
    if inside + BLOCK <= slots.per_segment and j + BLOCK <= filled:
        return at + 4 * inside * words
    for s in range(BLOCK):
        for i in range(words):
            gathered[s * words + i] = (
                words_at(at)[inside * words + i] if j + s < filled else np.uint32(0)
            )
        inside += 1
        if inside == slots.per_segment:
            inside = 0
            at += 4 * slots.segment_words
    return np.int64(gathered.ctypes.data)


@jit
def sink_of(slots, r, g):  # type: ignore[no-untyped-def]
    """Return log2(e) times the sink of a query of row r, or -inf if there are no sinks."""
    return (
        floats_at(slots.sinks)[r * slots.group + g] * LOG2_E if slots.sinks else np.float32(-np.inf)
    )


@jit
def softmax(p, filled, slots, r):  # type: ignore[no-untyped-def]
    """Set p[g, :filled] = softmax(scale x p[g, :filled]), and the rest of the last block to 0.

    A sink is in the denominator, and in the log-sum-exp.
    """
    factor = np.float32(slots.scale) * LOG2_E
    for g in range(p.shape[0]):
        row = p[g]
        sink = sink_of(slots, r, g)
        largest = ordered(float_to_bits(sink))
        for j in range(filled):
            row[j] *= factor
            largest = max(largest, ordered(float_to_bits(row[j])))
        top = bits_to_float(np.uint32(ordered(largest)))
        total = np.float32(0)
        for j in range(filled):
            row[j] = exp2(row[j] - top)
            total += row[j]
        total += exp2(sink - top)
        if slots.lse:
            floats_at(slots.lse)[r * slots.group + g] = (top + np.log2(total)) * LN_2
        share = np.float32(1) / total
        for j in range(filled):
            row[j] *= share
        row[filled : -(-filled // BLOCK) * BLOCK] = 0


@jit
def score_row(state, r, filled, p):  # type: ignore[no-untyped-def]
    """Update the column scores of row r, and set its victim; p is overwritten.

    Integers from `ordered` and 64-bit pairs make all loops vectorise.
    """
    scores = floats_at(state.scores + 4 * r * state.columns)
    positions = ints_at(state.positions + 4 * r * state.columns)
    oldest = ints_at(state.oldest)[r]
    newest = ints_at(state.newest)[r]
    decay = np.float32(state.decay)
    gain = floats_at(state.gains)[r]
    lowest = np.int32(2**31 - 1)
    for g in range(1, p.shape[0]):
        for j in range(filled):
            p[0, j] += p[g, j]
    ranks = p[0]
    for j in range(filled):
        score = decay * scores[j] + gain * ranks[j]
        scores[j] = score
        # NaN counts as lowest, so that a row always has a victim
        ranks[j] = score if score == score else np.float32(-np.inf)
    if state.now:
        now = ints_at(state.now)[r] + np.int32(1)
        for j in range(filled):
            ranks[j] /= np.float32(now - positions[j])
    for j in range(filled):
        allowed = (oldest <= positions[j]) & (positions[j] <= newest)
        lowest = min(lowest, ordered(float_to_bits(ranks[j])) if allowed else np.int32(2**31 - 1))
    floor = bits_to_float(np.uint32(ordered(lowest)))
    best = np.int64(_NONE)
    for j in range(filled):
        allowed = (oldest <= positions[j]) & (positions[j] <= newest) & (ranks[j] == floor)
        best = min(
            best,
            (np.int64(positions[j]) << np.int64(32)) + np.int64(j) if allowed else np.int64(_NONE),
        )
    ints_at(state.victims)[r] = (
        np.int32(-1) if best == _NONE else np.int32(best & np.int64(0xFFFFFFFF))
    )


class ColumnSlots(NamedTuple):
    """Hold sizes and addresses for copying columns to and from slots; sizes and steps in bytes.

    Slot j of row r is slot j % per_segment of the row in segment j // per_segment. The columns of a
    row are adjacent.
    """

    keys: int
    values: int
    per_segment: int
    segment_step: int
    key_bytes: int  # bytes per slot
    value_bytes: int
    slots: int  # address of the slot numbers, int64
    slots_step: int  # from a row's first slot number to the next row's
    column_keys: int  # address of the columns' keys
    column_values: int  # address of the columns' values
    keys_step: int  # from a row's first key to the next row's
    values_step: int  # from a row's first value to the next row's


@jit
def put(job, count, first, end):  # type: ignore[no-untyped-def]
    """Copy `count` columns of each of the rows first..end-1 to their slots, in order."""
    for row in range(first, end):
        slots = longs_at(job.slots + row * job.slots_step)
        key = job.column_keys + row * job.keys_step
        value = job.column_values + row * job.values_step
        for i in range(count):
            copy(job.keys + _place(job, row, slots[i], job.key_bytes), key, job.key_bytes)
            copy(job.values + _place(job, row, slots[i], job.value_bytes), value, job.value_bytes)
            key += job.key_bytes
            value += job.value_bytes


@jit
def get(job, count, first, end):  # type: ignore[no-untyped-def]
    """Copy the slot of column number `count` of each row to that column.

    Earlier columns of the same slot get it too.
    """
    for row in range(first, end):
        slots = longs_at(job.slots + row * job.slots_step)
        key = job.keys + _place(job, row, slots[count], job.key_bytes)
        value = job.values + _place(job, row, slots[count], job.value_bytes)
        for i in range(count + 1):
            if slots[i] == slots[count]:
                copy(job.column_keys + row * job.keys_step + i * job.key_bytes, key, job.key_bytes)
                copy(
                    job.column_values + row * job.values_step + i * job.value_bytes,
                    value,
                    job.value_bytes,
                )


@jit
def _place(job, row, slot, size):  # type: ignore[no-untyped-def]
    """Return the offset in bytes of a row's slot of `size` bytes."""
    segment = slot // job.per_segment
    inside = slot - segment * job.per_segment
    return segment * job.segment_step + (row * job.per_segment + inside) * size


@jit
def copy(to, source, size):  # type: ignore[no-untyped-def]
    if size % 4 == 0:
        for i in range(size // 4):
            words_at(to)[i] = words_at(source)[i]
    else:
        for i in range(size):
            bytes_at(to)[i] = bytes_at(source)[i]
