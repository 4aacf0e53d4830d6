"""The compiled loops of `select`: choose columns by the sketch, gather them, and attend over them and the sums of the
others' values. The passes over the gathered columns are those of slots.py and packed_slots.py."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexgen_h2o.core.packing import SKETCH_BLOCK, SKETCH_CODES
from flexgen_h2o.kernels.compiled import packed_slots, slots, vectors
from flexgen_h2o.kernels.compiled.beside import (
    FLOAT,
    Columns,
    add_sums,
    beside_dots,
    beside_mix,
    beside_scratch,
    spread_beside,
)
from flexgen_h2o.kernels.compiled.sketch import PICKED, pick, sketch_dots
from flexgen_h2o.kernels.compiled.slots import BLOCK, Pass, Slots
from flexgen_h2o.kernels.jit import (
    LOG2_E,
    bits_to_float,
    exp2,
    float_to_bits,
    floats_at,
    ints_at,
    jit,
    number_at,
    ordered,
    planes,
    set_number,
)

_FAR = 2**40  # slots of a segment where there is one
_MIDDLE = np.float32(1.5)  # of the codes
_MOST = 2**31 - 1  # the bits of a NaN, above those of all costs


class Chosen(NamedTuple):
    """Scratch of a thread. estimates: (g, columns), log2(e) times products. costs: (columns,), -log2 of the probability
    by the sketch, the least of the query heads. places: the slots that are read, ascending; of_blocks: how many of each
    block; both int32. weights: (g, blocks) of sums. query: (channels,) int16. below: of `sketch.pick`. offsets: of
    `_locate`."""

    estimates: np.ndarray
    costs: np.ndarray
    places: np.ndarray
    of_blocks: np.ndarray
    weights: np.ndarray
    query: np.ndarray
    below: np.ndarray
    offsets: np.ndarray


@jit
def _scratch(group, sketch):  # type: ignore[no-untyped-def]
    columns = sketch.blocks * SKETCH_BLOCK
    return Chosen(
        np.empty((group, columns), np.float32), np.empty(columns, np.float32), np.empty(columns + 1, np.int32),
        np.empty(sketch.blocks, np.int32), np.empty((group, sketch.blocks), np.float32),
        np.zeros(sketch.numbers * SKETCH_CODES, np.int16), np.empty(1, np.int64),
        np.empty((2, columns), np.int64),
    )  # fmt: skip


@jit
def attend_rows(element, job, sketch, first, end):  # type: ignore[no-untyped-def]
    """`attend_selected` over whole slots for the rows first..end-1."""
    found = _scratch(job.group, sketch)
    most = _most(sketch, first, end)
    lanes = vectors.WIDE if job.words >= vectors.WIDE else 1
    query = np.empty((job.group, -(-job.words // lanes), planes(element), lanes), np.float32)
    attn_out = np.empty_like(query)
    p = np.empty((job.group, -(-most // BLOCK) * BLOCK), np.float32)
    keys, values = np.empty(most * job.words, np.uint32), np.empty(most * job.words, np.uint32)
    tail = np.empty(BLOCK * job.words, np.uint32)
    of_sums, sums = beside_scratch(FLOAT, job.group, sketch.width), np.empty((job.group, sketch.width), np.float32)
    own = _gathered(job, most, np.int64(keys.ctypes.data), np.int64(values.ctypes.data))
    for r in range(first, end):
        offset = r * job.group * job.words * 4
        count = _choose(element, job, sketch, r, job.q + offset, found)
        _locate(job, job, r, found, count)
        _gather(job.keys, job.words, found.offsets[0], count, keys)
        slots.unpack(element, job.q + offset, job.words, query)
        slots.over_row(element, own, Pass(True, own.keys, own.values, count), tail, query, p)
        _gather(job.values, job.words, found.offsets[1], count, values)
        _weigh(job, r, count, found, p)
        attn_out[:] = 0
        slots.over_row(element, own, Pass(False, own.values, own.keys, count), tail, attn_out, p)
        sums[:] = 0
        _add_rest(sketch, r, found, of_sums, sums)
        slots.add(element, sums, job.words, attn_out)
        slots.pack(element, attn_out, job.words, job.out + offset)


@jit
def attend_packed_rows(element, forms, jobs, sketch, whole, first, end):  # type: ignore[no-untyped-def]
    """`attend_selected` over packed slots for the rows first..end-1. forms, jobs: of keys and of values."""
    (form, of_values), (job, value_job) = forms, jobs
    found = _scratch(job.group, sketch)
    most = _most(sketch, first, end)
    query, attn_out = packed_slots.scratch_of(form, job.group), packed_slots.scratch_of(of_values, job.group)
    p = np.empty((job.group, -(-most // BLOCK) * BLOCK), np.float32)
    keys, values = np.empty(most * job.words, np.uint32), np.empty(most * value_job.words, np.uint32)
    tail = np.empty(BLOCK * max(job.words, value_job.words), np.uint32)
    of_sums, of_whole = beside_scratch(FLOAT, job.group, form.width), beside_scratch(element, job.group, whole.width)
    newest, places = np.empty((job.group, whole.columns), np.float32), np.empty(whole.columns, np.int32)
    one = np.empty((job.group, form.width), np.float32)
    at = np.int64(keys.ctypes.data), np.int64(values.ctypes.data)
    own, own_values = _gathered(job, most, at[0], at[1]), _gathered(value_job, most, at[0], at[1])
    size = 4 // planes(element) * job.group * form.width
    for r in range(first, end):
        q_at, centres = job.q + r * size, whole.centres + 2 * r * form.width
        count = _choose(element, job, sketch, r, q_at, found)
        _locate(job, value_job, r, found, count)
        _gather(job.keys, job.words, found.offsets[0], count, keys)
        packed_slots.spread(element, form, q_at, whole.ranges + 2 * r * form.width if whole.centres else 0, one, query)
        packed_slots.over_row(form, own, Pass(True, own.keys, own.values, count), tail, query, p)
        if whole.centres:
            packed_slots.restore_centre(element, q_at, centres, form.width, count, p)
        if whole.columns:
            _find(ints_at(whole.slots + 4 * r * whole.columns), found.places, count, places)
            spread_beside(element, element, q_at, whole.width, of_whole)
            beside_dots(element, Columns(whole.columns, whole.width, whole.keys), r, of_whole, newest, np.int64(0))
            packed_slots.exchange(places, newest, p, False)
        _gather(job.values, value_job.words, found.offsets[1], count, values)
        _weigh(job, r, count, found, p)
        if whole.columns:
            packed_slots.exchange(places, newest, p, True)
        attn_out[:] = 0
        packed_slots.over_row(of_values, own_values, Pass(False, own.values, own.keys, count), tail, attn_out, p)
        packed_slots.gather(of_values, attn_out, one)
        _add_rest(sketch, r, found, of_sums, one)
        if whole.columns:
            beside_mix(element, Columns(whole.columns, whole.width, whole.values), r, of_whole, newest, np.int64(0))
            add_sums(element, of_whole, one)
        for g in range(job.group):
            for i in range(form.width):
                set_number(element, job.out + r * size, g * form.width + i, one[g, i])


@jit
def _gathered(job, most, keys, values):  # type: ignore[no-untyped-def]
    """The slots of one row that was gathered."""
    return Slots(job.group, job.words, _FAR, 0, most, job.q, keys, values, 0, job.out, 0, 0, job.scale)


@jit
def _most(sketch, first, end):  # type: ignore[no-untyped-def]
    counts, most = ints_at(sketch.counts), np.int32(1)
    for r in range(first, end):
        most = max(most, counts[r])
    return np.int64(most)


@jit
def _choose(element, job, sketch, r, at, found):  # type: ignore[no-untyped-def]
    """Fill in the places that row r's queries at address `at` read, and estimates; how many they are."""
    filled, count = np.int64(ints_at(job.filled)[r]), np.int64(ints_at(sketch.counts)[r])
    found.costs[:filled] = np.float32(np.inf)
    for g in range(job.group):
        query = (at, g, filled, np.float32(job.scale) * LOG2_E, slots.sink_of(job, r, g))
        _estimate(element, sketch, r, query, found)
    newest = min(np.int64(sketch.newest), count // 2)
    chosen = _pick(found, filled - newest, count - newest)
    for j in range(filled - newest, filled):
        found.places[chosen] = j
        chosen += 1
    return chosen


@jit
def _estimate(element, sketch, r, query, found):  # type: ignore[no-untyped-def]
    """A query's products into estimates[g], times log2(e); costs fall to those of this query. query: its address, g,
    how many columns, the factor of products, and its sink."""
    at, g, filled, factor, sink = query
    width = sketch.width
    centres, steps = floats_at(sketch.centres + 4 * r * width), floats_at(sketch.steps + 4 * r * width)
    row, largest, shift = found.estimates[g], np.int32(0), np.float32(0)
    for i in range(width):
        x = number_at(element, at, g * width + i)
        shift += x * centres[i]
        largest = max(largest, float_to_bits(x * steps[i]) & np.int32(0x7FFFFFFF))
    most = max(bits_to_float(np.uint32(largest)), np.float32(1e-30))
    to_whole, total = np.float32(sketch.levels) / most, np.float32(0)
    for i in range(width):
        whole = np.rint(number_at(element, at, g * width + i) * steps[i] * to_whole)
        total += whole
        found.query[i] = np.int16(np.int32(whole))
    codes = sketch.codes + 2 * r * sketch.blocks * sketch.numbers * SKETCH_BLOCK
    blocks = -(-filled // SKETCH_BLOCK)
    sketch_dots((codes, blocks, sketch.numbers, np.int64(found.query.ctypes.data), np.int64(row.ctypes.data)))
    unit = factor / to_whole
    shift = factor * shift - unit * total * _MIDDLE
    top = ordered(float_to_bits(sink))
    for j in range(filled):
        row[j] = row[j] * unit + shift
        top = max(top, ordered(float_to_bits(row[j])))
    largest_estimate, total = bits_to_float(np.uint32(ordered(top))), np.float32(1)
    if found.estimates.shape[0] > 1:  # the columns of one query have the same sum
        total = np.float32(0)
        for j in range(filled):
            total += exp2(row[j] - largest_estimate)
        total += exp2(sink - largest_estimate)
    most = largest_estimate + np.float32(np.log2(total))
    for j in range(filled):
        cost = most - row[j]
        found.costs[j] = cost if cost < found.costs[j] else found.costs[j]


@jit
def _pick(found, end, wanted):  # type: ignore[no-untyped-def]
    """The places of the `wanted` smallest of costs[:end], which are not negative; of equal ones the first.

    Halving the interval of their bits, until as many are below its middle.
    """
    groups = -(-end // PICKED)
    found.costs[end : groups * PICKED] = bits_to_float(np.uint32(_MOST))
    costs, places = np.int64(found.costs.ctypes.data), np.int64(found.places.ctypes.data)
    cell, below = np.int64(found.below.ctypes.data), found.below
    low, high = np.int64(0), np.int64(_MOST)
    is_exact = (wanted == 0) | (wanted == end)
    middle = high if wanted else low
    while not is_exact and high - low > 1:  # fewer than wanted are below low, more below high
        middle = low + (high - low) // 2
        pick((costs, groups, middle, cell, np.int64(0)))
        is_exact = below[0] == wanted
        if below[0] < wanted:
            low = middle
        else:
            high = middle
    if is_exact:
        pick((costs, groups, middle, cell, places))
        return np.int64(wanted)
    pick((costs, groups, low, cell, np.int64(0)))
    equal, chosen = wanted - below[0], np.int64(0)
    for j in range(end):
        bits = np.int64(float_to_bits(found.costs[j]))
        is_equal = (bits == low) & (equal > 0)
        found.places[chosen] = j
        chosen += np.int64((bits < low) | is_equal)
        equal -= np.int64(is_equal)
    return chosen


@jit
def _locate(job, value_job, r, found, count):  # type: ignore[no-untyped-def]
    """Where row r's columns that are read begin, in words from the first key and from the first value; they are
    prefetched, since they lie anywhere. job, value_job: of keys and of values."""
    keys, values = found.offsets[0], found.offsets[1]
    for i in range(count):
        segment, inside = np.int64(0), np.int64(found.places[i])
        if inside >= job.per_segment:
            segment = inside // job.per_segment
            inside -= segment * job.per_segment
        place = r * job.per_segment + inside
        keys[i] = segment * job.segment_words + place * job.words
        values[i] = segment * value_job.segment_words + place * value_job.words
        slots.fetch(job.keys + 4 * keys[i], 4 * job.words)
    for i in range(count):
        slots.fetch(job.values + 4 * values[i], 4 * value_job.words)


@jit
def _gather(memory, words, offsets, count, to):  # type: ignore[no-untyped-def]
    """The columns at these offsets, one behind the other. `to`: an array, so that its memory is held as long."""
    start = np.int64(to.ctypes.data)
    for i in range(count):
        slots.copy(start + 4 * i * words, memory + 4 * offsets[i], 4 * words)


@jit
def _weigh(job, r, count, found, p):  # type: ignore[no-untyped-def]
    """p[g, :count], products, become what the columns that are read weigh; the weights of sums are filled in.

    A sum has the columns that are read, too, so what a column of its block weighs is taken off theirs.
    """
    filled, scale = np.int64(ints_at(job.filled)[r]), np.float32(job.scale)
    used = -(-filled // SKETCH_BLOCK)
    found.of_blocks[:used] = 0
    for i in range(count):
        found.of_blocks[found.places[i] // SKETCH_BLOCK] += 1
    for g in range(p.shape[0]):
        row, estimates, weights = p[g], found.estimates[g], found.weights[g]
        estimates[filled : used * SKETCH_BLOCK] = -np.inf
        sink = slots.sink_of(job, r, g)
        top = ordered(float_to_bits(sink))
        for i in range(count):
            estimates[found.places[i]] = -np.inf
            row[i] *= scale * LOG2_E
            top = max(top, ordered(float_to_bits(row[i])))
        for j in range(filled):
            top = max(top, ordered(float_to_bits(estimates[j])))
        largest = bits_to_float(np.uint32(ordered(top)))
        total = np.float32(0)
        for i in range(count):
            row[i] = exp2(row[i] - largest)
            total += row[i]
        for b in range(used):
            end = min(SKETCH_BLOCK, filled - b * SKETCH_BLOCK)
            mass = np.float32(0)
            for j in range(SKETCH_BLOCK):
                mass += exp2(estimates[b * SKETCH_BLOCK + j] - largest)
            total += mass
            left = end - found.of_blocks[b]
            weights[b] = mass / np.float32(left) if left > 0 else np.float32(0)
        total += exp2(sink - largest)
        share = np.float32(1) / total
        weights[:used] *= share
        weights[used:] = 0
        for i in range(count):
            row[i] = row[i] * share - weights[found.places[i] // SKETCH_BLOCK]
        row[count : -(-count // BLOCK) * BLOCK] = 0


@jit
def _add_rest(sketch, r, found, of_sums, sums):  # type: ignore[no-untyped-def]
    """Add the blocks' values by their weights to `sums` (g, width)."""
    beside_mix(FLOAT, Columns(sketch.blocks, sketch.width, sketch.sums), r, of_sums, found.weights, np.int64(0))
    add_sums(FLOAT, of_sums, sums)


@jit
def _find(slots_of_whole, places, count, found):  # type: ignore[no-untyped-def]
    """Where each slot is among the places, which ascend; -1 for none."""
    for i in range(len(found)):
        low, high, slot = 0, count, slots_of_whole[i]
        while low < high:
            middle = (low + high) // 2
            if places[middle] < slot:
                low = middle + 1
            else:
                high = middle
        found[i] = low if low < count and places[low] == slot else -1
