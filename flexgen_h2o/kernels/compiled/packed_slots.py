"""Compiled loops over packed slots: packing columns, and attention without unpacking to memory."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from flexgen_h2o.core.packing import KVPacking, SlotPacking
from flexgen_h2o.kernels.compiled import vectors
from flexgen_h2o.kernels.compiled.beside import (
    FLOAT,
    WholeColumnArea,
    add_sums,
    beside_dots,
    beside_mix,
    beside_scratch,
    spread_beside,
)
from flexgen_h2o.kernels.compiled.slots import (
    AHEAD,
    BLOCK,
    Pass,
    address_ahead,
    copy,
    fetch,
    fetch_scores,
    onwards,
    put,
    row_at,
    score_row,
    softmax,
    take,
)
from flexgen_h2o.kernels.jit import (
    bits_to_float,
    float_to_bits,
    ints_at,
    jit,
    keep,
    longs_at,
    number_at,
    ordered,
    planes,
    set_number,
    to_bf16_towards,
    words_at,
)

_LEAST = np.int32(-(2**31))
_MOST = np.int32(2**31 - 1)


class Format(NamedTuple):
    """Describe a packing in numbers; made by `format_of`."""

    kind: np.number[Any]  # its type says how many bits (vectors.KINDS)
    width: int
    bits: int
    step: int  # bits of a value that are adjacent in its word
    group: int
    low_words: int
    value_words: int
    lanes: int
    chunks: int
    # Address of the table of chunks, int32 (chunks, PLACE). Per chunk: its first word, the word of
    # its group, and the first and the end of the words for which its lanes stand.
    places: int


def format_of(packing: SlotPacking) -> Format:
    lanes, table = _table_of(packing)
    return Format(
        vectors.KINDS[packing.bits],
        packing.width,
        packing.bits,
        packing.low_bits,
        packing.group,
        packing.low_words,
        packing.value_words,
        lanes,
        len(table),
        table.ctypes.data,
    )


def formats_of(packing: KVPacking) -> tuple[Format, Format]:
    return format_of(packing.keys), format_of(packing.values)


@lru_cache
def _table_of(packing: SlotPacking) -> tuple[int, np.ndarray]:
    """Return the lanes of a chunk, and the table of chunks of `Format`.

    The result is cached, because loops use the table's address.
    """
    wide = vectors.PACKED_WIDE[packing.bits]
    # A chunk may reach into other groups, but not beyond the slot; in 3 bits not beyond the lower
    # bits.
    limit = packing.low_words if packing.bits == 3 else packing.words
    lanes = wide if limit >= wide else 1
    places = []
    for group in range(packing.groups):
        end = min((group + 1) * packing.group_words, packing.low_words)
        for start in range(group * packing.group_words, end, lanes):
            first = min(start, limit - lanes)
            places.append((first, packing.value_words + group, start, min(start + lanes, end)))
    return lanes, np.array(places, np.int32)


_BF16 = np.uint16(0)


@jit
def attend_rows(element, forms, jobs, state, whole, first, end):  # type: ignore[no-untyped-def]
    """Run `attend` over packed slots for the rows first..end-1.

    element: of the queries. forms, jobs: for keys and for values; jobs as for whole slots, with
    `words` of a packed slot. whole: the WholeAddresses of the rows.
    """
    form, of_values = forms
    slots, value_slots = jobs
    query = scratch_of(form, slots.group)
    attn_out = scratch_of(of_values, slots.group)
    p = np.empty((slots.group, -(-slots.most // BLOCK) * BLOCK), np.float32)
    of_whole = beside_scratch(element, slots.group, whole.width)
    newest = np.empty((slots.group, whole.columns), np.float32)
    gathered = np.empty(BLOCK * max(slots.words, value_slots.words), np.uint32)
    one = np.empty((slots.group, form.width), np.float32)
    size = 4 // planes(element) * slots.group * form.width
    for r in range(first, end):
        filled = np.int64(ints_at(slots.filled)[r])
        q_at = slots.q + r * size
        spread(
            element,
            form,
            q_at,
            whole.ranges + 2 * r * form.width if whole.centres else 0,
            one,
            query,
        )
        if state.columns:
            fetch_scores(state, r)
        keys = row_at(slots, slots.keys, r)
        values = row_at(value_slots, slots.values, r)
        over_row(form, slots, Pass(True, keys, values, filled), gathered, query, p)
        if whole.centres:
            restore_centre(element, q_at, whole.centres + 2 * r * form.width, form.width, filled, p)
        if whole.columns:
            spread_beside(element, element, q_at, whole.width, of_whole)
            beside_dots(
                element,
                WholeColumnArea(whole.columns, whole.width, whole.keys),
                r,
                of_whole,
                newest,
                np.int64(0),
            )
            exchange(ints_at(whole.slots + 4 * r * whole.columns), newest, p, False)
        softmax(p, filled, slots, r)
        if whole.columns:
            exchange(ints_at(whole.slots + 4 * r * whole.columns), newest, p, True)
        attn_out[:] = 0
        after = row_at(slots, slots.keys, r + 1)
        over_row(of_values, value_slots, Pass(False, values, after, filled), gathered, attn_out, p)
        gather(of_values, attn_out, one)
        if whole.columns:
            beside_mix(
                element,
                WholeColumnArea(whole.columns, whole.width, whole.values),
                r,
                of_whole,
                newest,
                np.int64(0),
            )
            add_sums(element, of_whole, one)
            exchange(ints_at(whole.slots + 4 * r * whole.columns), newest, p, False)
        for g in range(slots.group):
            for i in range(form.width):
                set_number(element, slots.out + r * size, g * form.width + i, one[g, i])
        if state.columns:
            score_row(state, r, filled, p)


@jit
def scratch_of(form, group):  # type: ignore[no-untyped-def]
    """Return zeroed scratch for queries, or for their sums, by chunks, planes and lanes.

    It stays 0 in lanes to which nothing is spread.
    """
    lanes = vectors.SHARED if form.lanes > 1 else 1
    return np.zeros((group, form.chunks, 32 // form.step + 1, lanes), np.float32)


@jit
def over_row(form, slots, row, gathered, scratch, p):  # type: ignore[no-untyped-def]
    """Run a pass by runs of adjacent blocks, block by block for all queries.

    scratch: queries, or their sums.
    """
    words = slots.words
    group = np.int64(p.shape[0])
    stride = np.int64(p.shape[1])
    layout = (form.lanes, form.places, form.chunks, 4 * form.low_words)
    scratch_at = np.int64(scratch.ctypes.data)
    p_at = np.int64(p.ctypes.data)
    size = 4 * words * BLOCK
    at = row.at
    j = np.int64(0)
    inside = np.int64(0)
    while j < row.filled:
        run = min(row.filled - j, slots.per_segment - inside) // BLOCK
        count = max(1, run)
        block = at + 4 * inside * words if run else take(slots, at, inside, j, row.filled, gathered)
        after = address_ahead(
            slots, at, j + count * BLOCK, row.filled, inside + count * BLOCK, row.next_at
        )
        for left in range(count * size, 0, -size):
            # Prefetch what is AHEAD bytes later: in this run, which has `left` bytes more, or after
            # it.
            fetch(block + AHEAD if left > AHEAD else after + AHEAD - left, size)
            numbers = (block, words, scratch_at, p_at + 4 * j, stride, group)
            if row.is_dots:
                vectors.packed_dots(form.kind, layout + numbers)
            else:
                vectors.packed_mix(form.kind, layout + numbers)
            block = block + size
            j = j + BLOCK
            at, inside = onwards(slots, at, inside)


@jit
def restore_centre(element, at, centres, width, filled, p):  # type: ignore[no-untyped-def]
    """Add each query's product with the centre of the keys to p."""
    for g in range(p.shape[0]):
        shift = np.float32(0)
        for i in range(width):
            shift += number_at(element, at, g * width + i) * number_at(_BF16, centres, i)
        for j in range(filled):
            p[g, j] += shift


@jit
def exchange(places, newest, p, takes):  # type: ignore[no-untyped-def]
    """Copy `newest` to its slots in p; or, if `takes`, move p's numbers to `newest`.

    Numbers that are moved become 0 in p.
    """
    for j in range(newest.shape[1]):
        slot = places[j]
        for g in range(p.shape[0]):
            if takes:
                newest[g, j] = p[g, slot] if slot >= 0 else np.float32(0)
                if slot >= 0:
                    p[g, slot] = 0
            elif slot >= 0:
                p[g, slot] = newest[g, j]


@jit
def _place(form, chunk):  # type: ignore[no-untyped-def]
    """Return a chunk's first word, and the first and the end of the words in its lanes."""
    place = ints_at(form.places + 4 * vectors.PLACE * chunk)
    return place[0], place[2], place[3]


@jit
def _unit(form, plane):  # type: ignore[no-untyped-def]
    """Return the power of two by which a value of the plane must be multiplied.

    A value is not shifted, so it is too large by its place in the word.
    """
    lift = 0 if plane == 32 // form.step - 1 else form.step * plane
    return bits_to_float(np.uint32(127 - lift) << np.uint32(23))


@jit
def spread(element, form, at, ranges, one, query):  # type: ignore[no-untyped-def]
    """Spread the queries at address `at` over the planes of chunks; all other lanes must be 0.

    ranges: address of the factors of the numbers; 0: none. one: scratch.
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
            first, start, end = _place(form, c)
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
def gather(form, attn_out, one):  # type: ignore[no-untyped-def]
    """Write the sums in the order of numbers to `one` (group, width)."""
    per_word = 32 // form.step
    size = attn_out.shape[3]
    for g in range(attn_out.shape[0]):
        for c in range(attn_out.shape[1]):
            first, start, end = _place(form, c)
            lanes = attn_out[g, c]
            for k in range(per_word + 1):
                for i in range(form.lanes, size):
                    lanes[k, i % form.lanes] += lanes[k, i]
            for k in range(per_word):
                unit = _unit(form, k)
                for word in range(start, min(end, (form.width - k + per_word - 1) // per_word)):
                    one[g, word * per_word + k] = (
                        lanes[k, word - first] * unit + lanes[per_word, word - first]
                    )


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
    width = whole.width
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
    pack_rows(FLOAT, form, source, packed_keys, job.key_bytes // 4, none, count)
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
            copy(whole.keys + at, keys + r * size, size)
            copy(whole.values + at, values + r * size, size)
            held[place] = np.int32(slot)
