"""The compiled loops of `packed_slots`: columns into packed slots, and attention over these without unpacking them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexgen_h2o.core.packing import SlotPacking
from flexgen_h2o.kernels.compiled import packed_vectors as vectors
from flexgen_h2o.kernels.compiled.slots import (
    AHEAD,
    BLOCK,
    QUERIES,
    coming_at,
    fetch,
    fetch_scores,
    onwards,
    row_at,
    score_row,
    softmax,
    take,
)
from flexgen_h2o.kernels.compiled.vectors import planes, to_bf16, to_bf16_towards
from flexgen_h2o.kernels.jit import bits_to_float, float_to_bits, floats_at, ints_at, jit, ordered, shorts_at, words_at

_LEAST, _MOST = np.int32(-(2**31)), np.int32(2**31 - 1)


class Format(NamedTuple):
    """A packing in numbers. places: address of the table of chunks, int32 (chunks, PLACE): of each its first word, the
    word of its group, and from which word to before which its lanes count."""

    width: int
    bits: int
    group: int
    value_words: int
    lanes: int
    chunks: int
    places: int


def table_of(packing: SlotPacking) -> tuple[int, np.ndarray]:
    """The lanes of a chunk, and the table of chunks of `Format`."""
    lanes = vectors.LANES if packing.words >= vectors.LANES else 1
    places = []
    for group in range(packing.groups):
        end = min((group + 1) * packing.group_words, packing.value_words)
        for start in range(group * packing.group_words, end, lanes):
            # A chunk may reach into other groups, never beyond the slot.
            first = min(start, packing.words - lanes)
            places.append((first, packing.value_words + group, start, min(start + lanes, end)))
    return lanes, np.array(places, np.int32)


@jit
def attend_rows(element, form, slots, scale, book, first, end):  # type: ignore[no-untyped-def]
    """`attend` or `attend_scored` over packed slots for the rows first..end-1.

    element: a number whose type says what queries hold: uint16 for bf16, float32 for fp32. slots: as in `slot_loops`,
    `words` those of a packed slot.
    """
    sharing = 2 if form.lanes > 1 else 1
    shape = (slots.group, form.chunks, 32 // form.bits + 1, sharing * form.lanes)
    query, attn_out = np.empty(shape, np.float32), np.empty(shape, np.float32)
    p = np.empty((slots.group, -(-slots.most // BLOCK) * BLOCK), np.float32)
    few = np.empty(BLOCK * slots.words, np.uint32)
    one = np.empty(form.width, np.float32)
    size = (2 if planes(element) == 2 else 4) * slots.group * form.width
    query[:] = 0
    for r in range(first, end):
        filled = ints_at(slots.filled)[r]
        _spread(element, form, slots.q + r * size, one, query)
        if book.columns:
            fetch_scores(book, r)
        keys, values = row_at(slots, slots.keys, r), row_at(slots, slots.values, r)
        _pass(form, slots, keys, values, filled, few, query, p, True)
        softmax(p, filled, np.float32(scale), 0)
        attn_out[:] = 0
        _pass(form, slots, values, row_at(slots, slots.keys, r + 1), filled, few, attn_out, p, False)
        _gather(element, form, attn_out, one, slots.out + r * size)
        if book.columns:
            score_row(book, r, filled, p)


@jit
def _pass(form, slots, at, then, filled, few, scratch, p, is_dots):  # type: ignore[no-untyped-def]
    """One pass over the row's slots: dots of its keys (at `at`) with the queries, or its values mixed. then: what is
    read after it."""
    words, j, inside = slots.words, 0, 0
    step = scratch.itemsize * (scratch.size // slots.group)
    while j < filled:
        run = min(filled - j, slots.per_segment - inside) // BLOCK
        count = max(1, run)
        block = at + 4 * inside * words if run else take(slots, at, inside, j, filled, few)
        after = coming_at(slots, at, j + count * BLOCK, filled, inside + count * BLOCK, then)
        to = p.ctypes.data + p.itemsize * j
        if is_dots:
            _dots(form, block, words, count, after, scratch.ctypes.data, step, to, slots.group, p.shape[1])
        else:
            _mix(form, block, words, count, after, scratch.ctypes.data, step, to, slots.group, p.shape[1])
        for _ in range(count):
            at, inside = onwards(slots, at, inside)
        j += count * BLOCK


@jit
def number_at(element, at, i):  # type: ignore[no-untyped-def]
    """Number i at address `at`, in fp32."""
    if planes(element) == 2:
        return bits_to_float(np.uint32(shorts_at(at)[i]) << np.uint32(16))
    else:
        return floats_at(at)[i]


@jit
def set_number(element, at, i, x):  # type: ignore[no-untyped-def]
    if planes(element) == 2:
        shorts_at(at)[i] = np.uint16(to_bf16(x) >> np.uint32(16))
    else:
        floats_at(at)[i] = x


@jit
def _place(form, chunk):  # type: ignore[no-untyped-def]
    """The first word of a chunk, and from which word to before which its lanes count."""
    place = ints_at(form.places + 4 * vectors.PLACE * chunk)
    return place[0], place[2], place[3]


@jit
def _unit(form, plane):  # type: ignore[no-untyped-def]
    """What a value of the plane is multiplied with where it lies to be itself: a power of two."""
    lift = 0 if plane == 32 // form.bits - 1 else form.bits * plane
    return bits_to_float(np.uint32(127 - lift) << np.uint32(23))


@jit
def _spread(element, form, at, one, query):  # type: ignore[no-untyped-def]
    """Lay the queries at address `at` out as the vectors want them; all other lanes are 0 already.

    one: scratch of a column.
    """
    per_word, size = 32 // form.bits, query.shape[3]
    for g in range(query.shape[0]):
        for i in range(form.width):
            one[i] = number_at(element, at, g * form.width + i)
        for c in range(query.shape[1]):
            first, start, end = _place(form, c)
            lanes = query[g, c]
            lanes[per_word] = 0
            for k in range(per_word):
                unit = _unit(form, k)
                for word in range(start, min(end, (form.width - k + per_word - 1) // per_word)):
                    x = one[word * per_word + k]
                    lanes[k, word - first] = x * unit
                    lanes[per_word, word - first] += x
            for k in range(per_word + 1):
                for i in range(size - form.lanes):  # the second slot of a vector
                    lanes[k, form.lanes + i] = lanes[k, i]


@jit
def _gather(element, form, attn_out, one, at):  # type: ignore[no-untyped-def]
    """Write the sums to address `at`. one: scratch of a column."""
    per_word, second = 32 // form.bits, attn_out.shape[3] - form.lanes
    for g in range(attn_out.shape[0]):
        for c in range(attn_out.shape[1]):
            first, start, end = _place(form, c)
            lanes = attn_out[g, c]
            for k in range(per_word + 1):
                for i in range(second):
                    lanes[k, i] += lanes[k, form.lanes + i]
            for k in range(per_word):
                unit = _unit(form, k)
                for word in range(start, min(end, (form.width - k + per_word - 1) // per_word)):
                    one[word * per_word + k] = lanes[k, word - first] * unit + lanes[per_word, word - first]
        for i in range(form.width):
            set_number(element, at, g * form.width + i, one[i])


@jit
def _ahead(at, size, left, after):  # type: ignore[no-untyped-def]
    """Ask for the block that is needed AHEAD bytes later: in this run, which has `left` bytes more, or `after` it."""
    fetch(at + AHEAD if left > AHEAD else after + AHEAD - left, size)


@jit
def _dots(form, at, words, count, after, query, step, p, group, stride):  # type: ignore[no-untyped-def]
    """p[g, slot] = q[g] . key for `count` blocks, for all g while a block is in the nearest cache."""
    size = 4 * words * BLOCK
    for block in range(count):
        _ahead(at, size, (count - block) * size, after)
        asked, to, g = query, p + 4 * BLOCK * block, 0
        while g < group:
            together = QUERIES if form.lanes > 1 and g + QUERIES <= group else 1
            if form.bits == 4:
                if form.lanes == 1:
                    vectors.dots4_narrow(at, words, form.places, form.chunks, asked, to, stride)
                elif together == 1:
                    vectors.dots4_one(at, words, form.places, form.chunks, asked, to, stride)
                else:
                    vectors.dots4_four(at, words, form.places, form.chunks, asked, to, stride)
            elif form.lanes == 1:
                vectors.dots8_narrow(at, words, form.places, form.chunks, asked, to, stride)
            elif together == 1:
                vectors.dots8_one(at, words, form.places, form.chunks, asked, to, stride)
            else:
                vectors.dots8_four(at, words, form.places, form.chunks, asked, to, stride)
            g, asked, to = g + together, asked + together * step, to + together * 4 * stride
        at += size


@jit
def _mix(form, at, words, count, after, attn_out, step, p, group, stride):  # type: ignore[no-untyped-def]
    """mixed[g] += sum over the slots of `count` blocks of p[g, slot] x value."""
    size = 4 * words * BLOCK
    for block in range(count):
        _ahead(at, size, (count - block) * size, after)
        total, share, g = attn_out, p + 4 * BLOCK * block, 0
        while g < group:
            together = QUERIES if form.lanes > 1 and g + QUERIES <= group else 1
            if form.bits == 4:
                if form.lanes == 1:
                    vectors.mix4_narrow(at, words, form.places, form.chunks, total, share, stride)
                elif together == 1:
                    vectors.mix4_one(at, words, form.places, form.chunks, total, share, stride)
                else:
                    vectors.mix4_four(at, words, form.places, form.chunks, total, share, stride)
            elif form.lanes == 1:
                vectors.mix8_narrow(at, words, form.places, form.chunks, total, share, stride)
            elif together == 1:
                vectors.mix8_one(at, words, form.places, form.chunks, total, share, stride)
            else:
                vectors.mix8_four(at, words, form.places, form.chunks, total, share, stride)
            g, total, share = g + together, total + together * step, share + together * 4 * stride
        at += size


# ---- packing


@jit
def pack_rows(element, form, source, target, words, first, end):  # type: ignore[no-untyped-def]
    """Columns first..end-1 at address `source`, one behind the other, into packed slots at `target`.

    Short loops over small buffers, which all vectorise.
    """
    per_word, levels = 32 // form.bits, np.float32(2**form.bits - 1)
    most = -(-form.group // per_word)
    numbers, values = np.empty(form.group, np.float32), np.zeros(most * per_word, np.uint32)
    packed = np.empty(most, np.uint32)
    for r in range(first, end):
        slot, group = words_at(target + 4 * r * words), form.value_words
        for start in range(0, form.width, form.group):
            count = min(form.group, form.width - start)
            for i in range(count):
                numbers[i] = number_at(element, source, r * form.width + start + i)
            lowest, highest = _MOST, _LEAST
            for i in range(count):
                x = ordered(float_to_bits(numbers[i]))
                lowest, highest = min(lowest, x), max(highest, x)
            least = bits_to_float(to_bf16_towards(bits_to_float(np.uint32(ordered(lowest))), False))
            most = bits_to_float(np.uint32(ordered(highest)))
            scale = bits_to_float(to_bf16_towards((most - least) / levels, True))
            share = np.float32(1) / scale if np.float32(0) < scale < np.float32(np.inf) else np.float32(0)
            for i in range(count):
                value = (numbers[i] - least) * share + np.float32(0.5)
                value = value if value < levels else levels  # NaN too: its group's scale is NaN
                values[i] = np.uint32(np.int32(value if value > np.float32(0) else np.float32(0)))
            values[count:] = 0
            filled = -(-count // per_word)
            packed[:] = 0
            for k in range(per_word):
                for word in range(filled):
                    packed[word] |= values[word * per_word + k] << np.uint32(form.bits * k)
            for word in range(filled):
                slot[start // per_word + word] = packed[word]
            high = np.uint32(float_to_bits(least)) & np.uint32(0xFFFF0000)
            slot[group] = (np.uint32(float_to_bits(scale)) >> np.uint32(16)) | high
            group += 1
