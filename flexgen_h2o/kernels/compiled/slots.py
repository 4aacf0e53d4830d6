"""Compiled loops for decode attention over slots, and for copying columns to and from slots.

Attention makes one pass over the keys of each row and one over its values. Packed slots are not
unpacked to memory. The result of a row depends on that row alone: slots are always read in the same
groups of eight, whatever the segments.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from flexgen_h2o.core.packing import SlotPacking
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
    keep,
    longs_at,
    number_at,
    ordered,
    planes,
    set_number,
    to_bf16,
    to_bf16_towards,
    words_at,
)
from flexgen_h2o.kernels.workspace import element_of

BLOCK = 8  # slots that are looked up together
AHEAD = 2048  # bytes of slots that are prefetched, across the ends of segments, passes and rows
_SCORES_AHEAD = 512  # bytes of a row's scores, and of its positions, that are prefetched
_LINE = 64  # bytes of a cache line
_NONE = np.iinfo(np.int64).max
_LEAST = np.int32(-(2**31))
_MOST = np.int32(2**31 - 1)
_BF16 = np.uint16(0)
_FLOAT = np.float32(0)


# ---- what loops read and write: sizes and addresses


class Format(NamedTuple):
    """Describe how a slot stores its numbers; made by `format_of` and `packed_format`.

    A word is 4 bytes. In whole slots it is one fp32 number or two in 16 bits.
    """

    kind: np.number[Any]  # its type says what a word holds: an element of jit.py, or vectors.KINDS
    width: int  # numbers per slot
    step: int  # bits of a number that are adjacent in its word
    bits: int  # bits of a number; only packed slots, as are the next three
    group: int  # numbers that share a scale
    low_words: int
    value_words: int
    lanes: int  # words per chunk
    chunks: int
    # Address of the table of chunks, int32 (chunks, PLACE). Per chunk: its first word, the word of
    # its group, and the first and the end of the words for which its lanes stand.
    places: int


@cache
def format_of(dtype: torch.dtype, width: int) -> Format:
    """Return the format of whole slots."""
    words = width * dtype.itemsize // 4
    lanes = vectors.WIDE if words >= vectors.WIDE else 1
    places = _places(lanes, words, ((0, words, 0),))
    step = 8 * dtype.itemsize
    at = places.ctypes.data
    return Format(element_of(dtype), width, step, 0, 0, 0, 0, lanes, len(places), at)


@cache
def packed_format(packing: SlotPacking) -> Format:
    wide = vectors.PACKED_WIDE[packing.bits]
    # A chunk may reach into other groups, but not beyond the slot; in 3 bits not beyond the lower
    # bits.
    limit = packing.low_words if packing.bits == 3 else packing.words
    lanes = wide if limit >= wide else 1
    ends = [
        min((group + 1) * packing.group_words, packing.low_words) for group in range(packing.groups)
    ]
    groups = tuple(
        (group * packing.group_words, end, packing.value_words + group)
        for group, end in enumerate(ends)
    )
    places = _places(lanes, limit, groups)
    return Format(
        vectors.KINDS[packing.bits],
        packing.width,
        packing.low_bits,
        packing.bits,
        packing.group,
        packing.low_words,
        packing.value_words,
        lanes,
        len(places),
        places.ctypes.data,
    )


@cache
def _places(lanes: int, limit: int, groups: tuple[tuple[int, int, int], ...]) -> Any:
    """Return the table of chunks of `Format`. It is cached, because loops use its address.

    groups: for each, its first word, the end of its words, and the word of its scale.
    """
    places = [
        (min(start, limit - lanes), scale, start, min(start + lanes, end))
        for first, end, scale in groups
        for start in range(first, end, lanes)
    ]
    return np.array(places, np.int32)


class Area(NamedTuple):
    """Describe the memory of keys, or of values, in slots."""

    at: int  # address
    words: int  # 4-byte words per slot
    per_segment: int  # slots per segment
    segment_words: int  # words from one segment to the next


class AttendJob(NamedTuple):
    """Hold the other sizes and addresses that `attend_rows` reads and writes."""

    group: int  # query heads per kv-head
    most: int  # the largest of `filled`
    q: int
    filled: int
    out: int
    lse: int  # address of the log-sum-exp; 0: not wanted
    sinks: int  # address of each query's sink, fp32; 0: no sinks
    scale: float


class WholeAddresses(NamedTuple):
    """Hold the addresses of a WholeColumns; made by `whole_addresses`."""

    columns: int  # per row
    keys: Area  # as if all columns of a row were its slots
    values: Area
    slots: int
    centres: int  # 0 if keys are not smoothed
    ranges: int


NO_WHOLE = WholeAddresses(0, Area(0, 0, 0, 0), Area(0, 0, 0, 0), 0, 0, 0)


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


# ---- attention


@jit
def attend_rows(element, forms, areas, job, state, whole, first, end):  # type: ignore[no-untyped-def]
    """Run `attend` or `attend_lse` on the rows first..end-1.

    element: of the queries. forms: the Format of keys, of values, and of whole columns. areas: of
    keys and of values.
    """
    of_keys, of_values, of_whole = forms
    keys, values = areas
    width = of_keys.width
    packed = vectors.is_packed(of_keys.kind)
    columns = whole.columns if packed else 0
    query = _scratch(of_keys, job.group)
    attn_out = _scratch(of_values, job.group)
    scratch = _scratch(of_whole, job.group)
    p = np.empty((job.group, -(-job.most // BLOCK) * BLOCK), np.float32)
    newest = np.empty((job.group, -(-columns // BLOCK) * BLOCK), np.float32)
    gathered = np.empty(BLOCK * max(keys.words, values.words, whole.keys.words), np.uint32)
    one = np.empty((job.group, width), np.float32)
    size = 4 // planes(element) * job.group * width
    for r in range(first, end):
        filled = np.int64(ints_at(job.filled)[r])
        slots = ints_at(whole.slots + 4 * r * columns)
        q_at = job.q + r * size
        if packed:
            ranges = whole.ranges + 2 * r * width if whole.centres else 0
            _spread(element, of_keys, q_at, ranges, one, query)
        else:
            _unpack(element, q_at, keys.words, query)
        if state.columns:
            _fetch_scores(state, r)
        next_at = _row_at(values, r)
        _over_row(of_keys, keys, True, r, filled, next_at, gathered, query, p)
        if packed and whole.centres:
            _restore_centre(element, q_at, whole.centres + 2 * r * width, width, filled, p)
        if columns:
            _unpack(element, q_at, whole.keys.words, scratch)
            _over_row(of_whole, whole.keys, True, r, columns, next_at, gathered, scratch, newest)
            _exchange(slots, columns, newest, p, False)
        _softmax(p, filled, job, r)
        if columns:
            _exchange(slots, columns, newest, p, True)
        next_at = _row_at(keys, r + 1)
        attn_out[:] = 0
        _over_row(of_values, values, False, r, filled, next_at, gathered, attn_out, p)
        if packed:
            _gather(of_values, attn_out, one, False)
        else:
            _pack(element, attn_out, keys.words, job.out + r * size)
        if columns:
            scratch[:] = 0
            _over_row(of_whole, whole.values, False, r, columns, next_at, gathered, scratch, newest)
            _gather(of_whole, scratch, one, True)
            _exchange(slots, columns, newest, p, False)
        if packed:
            for g in range(job.group):
                for i in range(width):
                    set_number(element, job.out + r * size, g * width + i, one[g, i])
        if state.columns:
            score_row(state, r, filled, p)


@jit
def _scratch(form, group):  # type: ignore[no-untyped-def]
    """Return zeroed scratch for queries, or for their sums, by chunks, planes and lanes.

    It stays 0 in lanes to which nothing is spread.
    """
    lanes = vectors.SHARED if form.lanes > 1 else 1
    count = 32 // form.step + 1 if vectors.is_packed(form.kind) else 32 // form.step
    return np.zeros((group, form.chunks, count, lanes), np.float32)


@jit
def _over_row(form, area, is_dots, r, filled, next_at, gathered, scratch, p):  # type: ignore[no-untyped-def]
    """Run a pass over a row: queries times keys, or values added to the sums.

    It goes by runs of adjacent blocks, tile by tile, for all queries while a tile is in the nearest
    cache. is_dots: whether it multiplies queries; scratch: queries, or their sums; next_at: address
    of what is read next.
    """
    words = area.words
    slots = vectors.slots_of_tile(form.kind)
    size = 4 * words * slots
    layout = (form.lanes, form.places, form.chunks, 4 * form.low_words)
    scratch_at = np.int64(scratch.ctypes.data)
    p_at = np.int64(p.ctypes.data)
    stride = np.int64(p.shape[1])
    group = np.int64(p.shape[0])
    at = _row_at(area, r)
    j = np.int64(0)
    inside = np.int64(0)
    while j < filled:
        run = min(filled - j, area.per_segment - inside) // BLOCK * BLOCK
        tile = at + 4 * inside * words if run else _take(area, at, inside, j, filled, gathered)
        count = max(BLOCK, run)
        after = _address_ahead(area, at, j + count, filled, inside + count, next_at)
        for left in range(count // slots * size, 0, -size):
            # Prefetch what is AHEAD bytes later: in this run, which has `left` bytes more, or after
            # it.
            _fetch(tile + AHEAD if left > AHEAD else after + AHEAD - left, size)
            numbers = (tile, words, scratch_at, p_at + 4 * j, stride, group)
            if is_dots:
                vectors.dots(form.kind, layout + numbers)
            else:
                vectors.mix(form.kind, layout + numbers)
            tile = tile + size
            j += slots
        inside += count
        while inside >= area.per_segment:
            inside -= area.per_segment
            at += 4 * area.segment_words


@jit
def _unpack(element, at, words, query):  # type: ignore[no-untyped-def]
    """Spread the queries at address `at` over the planes of whole slots.

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
def _pack(element, attn_out, words, at):  # type: ignore[no-untyped-def]
    """Write the sums of whole slots to address `at` in their dtype."""
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
def _words_of_chunk(form, chunk):  # type: ignore[no-untyped-def]
    """Return a chunk's first word, and the first and the end of the words in its lanes."""
    place = ints_at(form.places + 4 * vectors.PLACE * chunk)
    return place[0], place[2], place[3]


@jit
def _unit(form, plane):  # type: ignore[no-untyped-def]
    """Return the power of two by which a value of the plane must be multiplied.

    A packed value is not shifted, so it is too large by its place in the word.
    """
    lift = 0 if plane == 32 // form.step - 1 else form.step * plane
    return bits_to_float(np.uint32(127 - lift) << np.uint32(23))


@jit
def _spread(element, form, at, ranges, one, query):  # type: ignore[no-untyped-def]
    """Spread the queries at address `at` over the planes of packed slots.

    All other lanes must be 0. ranges: address of the factors of the numbers; 0: none. one: scratch.
    """
    per_word = 32 // form.step
    size = query.shape[3]
    for g in range(query.shape[0]):
        for i in range(form.width):
            one[g, i] = number_at(element, at, g * form.width + i)
        if ranges:
            for i in range(form.width):
                one[g, i] *= number_at(_BF16, ranges, i)
        for c in range(query.shape[1]):
            first, start, end = _words_of_chunk(form, c)
            lanes = query[g, c]
            lanes[per_word] = 0
            for k in range(per_word):
                unit = _unit(form, k)
                for word in range(start, min(end, (form.width - k + per_word - 1) // per_word)):
                    x = one[g, word * per_word + k]
                    lanes[k, word - first] = x * unit
                    lanes[per_word, word - first] += x
            for k in range(per_word + 1):
                for i in range(size - form.lanes):  # the other slots that share the vector
                    lanes[k, form.lanes + i] = lanes[k, i]


@jit
def _gather(form, attn_out, one, adds):  # type: ignore[no-untyped-def]
    """Write the sums in the order of numbers to `one` (group, width), or add them to it."""
    per_word = 32 // form.step
    size = attn_out.shape[3]
    for g in range(attn_out.shape[0]):
        for c in range(attn_out.shape[1]):
            first, start, end = _words_of_chunk(form, c)
            lanes = attn_out[g, c]
            for k in range(attn_out.shape[2]):
                for i in range(form.lanes, size):
                    lanes[k, i % form.lanes] += lanes[k, i]
            for k in range(per_word):
                unit = _unit(form, k)
                for word in range(start, min(end, (form.width - k + per_word - 1) // per_word)):
                    x = lanes[k, word - first] * unit
                    if vectors.is_packed(form.kind):
                        x += lanes[per_word, word - first]
                    one[g, word * per_word + k] = one[g, word * per_word + k] + x if adds else x


@jit
def _restore_centre(element, at, centres, width, filled, p):  # type: ignore[no-untyped-def]
    """Add each query's product with the centre of the keys to p."""
    for g in range(p.shape[0]):
        shift = np.float32(0)
        for i in range(width):
            shift += number_at(element, at, g * width + i) * number_at(_BF16, centres, i)
        for j in range(filled):
            p[g, j] += shift


@jit
def _exchange(slots, columns, newest, p, takes):  # type: ignore[no-untyped-def]
    """Copy `newest` to its slots in p; or, if `takes`, move p's numbers to `newest`.

    Numbers that are moved become 0 in p, and `newest` becomes 0 beyond the columns.
    """
    for j in range(columns):
        slot = slots[j]
        for g in range(p.shape[0]):
            if takes:
                newest[g, j] = p[g, slot] if slot >= 0 else np.float32(0)
                if slot >= 0:
                    p[g, slot] = 0
            elif slot >= 0:
                p[g, slot] = newest[g, j]
    if takes:
        newest[:, columns:] = 0


@jit
def _row_at(area, r):  # type: ignore[no-untyped-def]
    """Return the address of row r in the first segment."""
    return area.at + 4 * r * area.per_segment * area.words


# A place among a row's slots is (at, inside): the row's address in a segment, and the number of
# slots before it in the segment. So no division per block is needed.


@jit
def _address_ahead(area, at, j, filled, inside, next_at):  # type: ignore[no-untyped-def]
    """Return the address of slot j, which is read soon.

    It is in this segment, in the next segment, or after the row at `next_at`.
    """
    if j >= filled:
        return next_at + 4 * max(0, j - -(-filled // BLOCK) * BLOCK) * area.words
    if inside >= area.per_segment:
        return at + 4 * (area.segment_words + (inside - area.per_segment) * area.words)
    return at + 4 * inside * area.words


@jit
def _fetch(at, size):  # type: ignore[no-untyped-def]
    """Prefetch `size` bytes.

    They are at most those of a tile, because more would delay what is needed now.
    """
    for line in range(at, at + size, _LINE):
        prefetch((line,))


@jit
def _fetch_scores(state, r):  # type: ignore[no-untyped-def]
    """Prefetch the beginning of row r's scores and positions; the hardware prefetches the rest."""
    start = 4 * r * state.columns
    _fetch(state.scores + start, min(_SCORES_AHEAD, 4 * state.columns))
    _fetch(state.positions + start, min(_SCORES_AHEAD, 4 * state.columns))
    _fetch(state.oldest + 4 * r, 1)
    _fetch(state.newest + 4 * r, 1)
    _fetch(state.victims + 4 * r, 1)


@jit
def _take(area, at, inside, j, filled, gathered):  # type: ignore[no-untyped-def]
    """Return the address of slots j..j+7 as adjacent memory.

    Slots beyond `filled` are zero there; their memory is not read.
    """
    words = area.words
    if inside + BLOCK <= area.per_segment and j + BLOCK <= filled:
        return at + 4 * inside * words
    for s in range(BLOCK):
        for i in range(words):
            gathered[s * words + i] = (
                words_at(at)[inside * words + i] if j + s < filled else np.uint32(0)
            )
        inside += 1
        if inside == area.per_segment:
            inside = 0
            at += 4 * area.segment_words
    return np.int64(gathered.ctypes.data)


@jit
def _softmax(p, filled, job, r):  # type: ignore[no-untyped-def]
    """Set p[g, :filled] = softmax(scale x p[g, :filled]), and the rest of the last block to 0.

    A sink is in the denominator, and in the log-sum-exp.
    """
    factor = np.float32(job.scale) * LOG2_E
    for g in range(p.shape[0]):
        row = p[g]
        sink = np.float32(-np.inf)
        if job.sinks:
            sink = floats_at(job.sinks)[r * job.group + g] * LOG2_E
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
        if job.lse:
            floats_at(job.lse)[r * job.group + g] = (top + np.log2(total)) * LN_2
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


# ---- columns to and from slots


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


# ---- packing


@jit
def pack_rows(element, form, source, target, words, first, end):  # type: ignore[no-untyped-def]
    """Pack columns first..end-1, adjacent at address `source`, into slots at `target`.

    The loops are short and over small buffers, so that all of them vectorise.
    """
    per_word = 32 // form.step
    levels = np.float32(2**form.bits - 1)
    low = np.uint32(2**form.step - 1)
    most = -(-form.group // per_word)
    numbers = np.empty(form.group, np.float32)
    values = np.zeros(most * per_word, np.uint32)
    packed = np.empty(most, np.uint32)
    for r in range(first, end):
        slot = words_at(target + 4 * r * words)
        group = form.value_words
        for i in range(form.low_words, form.value_words):
            slot[i] = 0
        for start in range(0, form.width, form.group):
            count = min(form.group, form.width - start)
            for i in range(count):
                numbers[i] = number_at(element, source, r * form.width + start + i)
            lowest = _MOST
            highest = _LEAST
            for i in range(count):
                x = ordered(float_to_bits(numbers[i]))
                lowest = min(lowest, x)
                highest = max(highest, x)
            least = bits_to_float(to_bf16_towards(bits_to_float(np.uint32(ordered(lowest))), False))
            most = bits_to_float(np.uint32(ordered(highest)))
            scale = bits_to_float(to_bf16_towards((most - least) / levels, True))
            share = (
                np.float32(1) / scale
                if np.float32(0) < scale < np.float32(np.inf)
                else np.float32(0)
            )
            for i in range(count):
                value = (numbers[i] - least) * share + np.float32(0.5)
                # also if the value is NaN; then the scale of its group is NaN
                value = value if value < levels else levels
                values[i] = np.uint32(np.int32(value if value > np.float32(0) else np.float32(0)))
            values[count:] = 0
            filled = -(-count // per_word)
            packed[:] = 0
            for k in range(per_word):
                for word in range(filled):
                    packed[word] |= (values[word * per_word + k] & low) << np.uint32(form.step * k)
            for word in range(filled):
                slot[start // per_word + word] = packed[word]
            if form.bits != form.step:
                for i in range(count):
                    place = form.low_words + (start + i) // 32
                    slot[place] |= (values[i] >> np.uint32(form.step)) << np.uint32(
                        (start + i) % 32
                    )
            high = np.uint32(float_to_bits(least)) & np.uint32(0xFFFF0000)
            slot[group] = (np.uint32(float_to_bits(scale)) >> np.uint32(16)) | high
            group += 1


@jit
def put_new(element, forms, job, new, whole, first, end):  # type: ignore[no-untyped-def]
    """Write new columns of the rows first..end-1 to packed slots, and to the whole columns.

    job: a ColumnSlots, whose columns are memory for packed slots. new: the addresses of keys and
    values (rows, width), and of each row's index among its whole columns, int64; -1 for none.
    """
    form, of_values = forms
    keys, values, places = new
    width = form.width
    count = end - first
    size = 4 // planes(element) * width
    smoothed = np.empty((count, width), np.float32)
    for r in range(first, end):
        centres = whole.centres + 2 * r * width
        ranges = whole.ranges + 2 * r * width
        for i in range(width):
            above = number_at(element, keys, r * width + i) - number_at(_BF16, centres, i)
            smoothed[r - first, i] = above / number_at(_BF16, ranges, i)
    packed_keys = job.column_keys + first * job.keys_step
    packed_values = job.column_values + first * job.values_step
    none = np.int64(0)
    source = np.int64(smoothed.ctypes.data)
    pack_rows(_FLOAT, form, source, packed_keys, job.key_bytes // 4, none, count)
    pack_rows(
        element, of_values, values + first * size, packed_values, job.value_bytes // 4, none, count
    )
    keep(smoothed)
    put(job, 1, first, end)
    for r in range(first, end):
        slot = longs_at(job.slots + r * job.slots_step)[0]
        place = longs_at(places)[r]
        held = ints_at(whole.slots + 4 * r * whole.columns)
        for j in range(whole.columns):
            if held[j] == slot:  # the slot's old column was evicted within the window
                held[j] = np.int32(-1)
        if place >= 0:
            at = (r * whole.columns + place) * size
            copy(whole.keys.at + at, keys + r * size, size)
            copy(whole.values.at + at, values + r * size, size)
            held[place] = np.int32(slot)
