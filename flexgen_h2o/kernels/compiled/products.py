"""The compiled loop of products: bf16 by bf16 with sums in fp32, uint8 by int8 with sums in int32.

A word (4 bytes) is two adjacent columns in bf16, or four in int8. An instruction of AVX-512 adds to
each of 16 sums the product of two words. An instruction of AMX adds to each of 16 x 16 sums the
products of 16 words with 16 others. With AVX2, words are split, and multiplied in fp32, or in 16
bits with sums of pairs in int32.

A panel is PANEL adjacent rows of a weight. In the blocked layout, the first words of its rows are
adjacent, then the second words, and so on. AVX-512 and AMX need this layout (compiled/tiles.py). A
panel of rows in order is converted to it a chunk of words at a time, in the caches. So both layouts
give the same bits.

A sum goes through the columns in order, whatever else is multiplied with it. So a row of the result
depends on that row of the inputs alone, and not on how a matrix is split.
"""

from __future__ import annotations

import numpy as np

from flexgen_h2o.core.packing import GROUP
from flexgen_h2o.core.units import BLOCK_ROWS as PANEL
from flexgen_h2o.kernels.compiled.codes import CHUNK, mxfp4_numbers, packed_numbers, strip
from flexgen_h2o.kernels.compiled.emitter import LANES, room
from flexgen_h2o.kernels.compiled.int8 import SCALE_STEP, largest_of, scaled
from flexgen_h2o.kernels.compiled.tiles import (
    AVX2_CHUNK,
    LINE,
    REGISTERS,
    STEP,
    finish_floats,
    finish_ints,
    is_amx,
    is_avx2,
    is_float,
    lay,
    most_rows,
    release_registers,
    set_registers,
    tile,
)
from flexgen_h2o.kernels.jit import (
    floats_at,
    ints_at,
    jit,
    jit_rounded,
    longs_at,
    number_at,
    planes,
    records_at,
    rounded,
    set_number,
)
from flexgen_h2o.kernels.products import PACKED, ProductJob
from flexgen_h2o.kernels.workspace import part_end

# words of a row at a time: 128 KiB of a panel, in a 1 MiB cache that inputs and sums share
_CHUNK = 512
_TOKENS = 512  # input rows at a time, whose sums stay in the same cache from chunk to chunk
# The same with AMX, whose CPUs have 2 MiB of that cache. With few rows, the loop waits for the
# weights, and the next chunk must fit beside this one.
_AMX_CHUNK = 1024
_AMX_TOKENS = 256
_AMX_FEW = 128
_GROUP_WORDS = GROUP // 4
_PACKED_WORDS = GROUP // 2
_MXFP4_WORDS = CHUNK // 2
_jobs_at = records_at(ProductJob)
_part_end = jit(part_end)


@jit
def multiply(kind, element, table, adds, relu, threads, first, end):  # type: ignore[no-untyped-def]
    """Multiply panels first..end-1 of all jobs.

    kind: a number whose type says what inputs are and what multiplies. uint16 and uint8 stand for
    bf16 and int8 with AVX-512, int16 and int8 with AMX, uint32 and int32 with AVX2.

    element: type of biases and results. table: its address, its number of jobs, and the panels of
    all jobs. adds: add to what results contain. relu: apply relu to results. threads: number of
    threads that share the panels, in parts (workspace.part_end).
    """
    jobs, count, panels = table
    rooms = (
        _sums_room(),
        _strip_room(),
        _rows_room(),
        _ends_room(),
        _factors_room(),
        _registers_room(),
    )
    for i in range(REGISTERS // 8):
        longs_at(rooms[-1])[i] = 0
    # upcoming: the part that this thread is likely to get next
    token = np.int64(0)
    more = True
    upcoming = end
    for _ in range(threads - 1):
        upcoming = _part_end(upcoming, panels, threads)
    while more:  # a group of input rows stays in the caches while all panels are multiplied with it
        more = False
        number = np.int64(0)
        ahead = np.int64(0)
        for panel in range(first, end):
            number = _job_of(jobs, count, number, panel)
            after = panel + 1 if panel + 1 < end else upcoming
            ahead = _job_of(jobs, count, number, after)
            job = _jobs_at(jobs)[number]
            next_job = _jobs_at(jobs)[ahead]
            come = np.int64(0), np.int64(0), np.int64(0)
            if after < panels and next_job.ends == 0:
                chunk = _chunk(next_job, 0, _chunks(kind, next_job))
                come = _place(next_job, after - next_job.first, chunk)
            if token < job.tokens:
                place = panel - job.first, token
                _multiply_panel(kind, element, job, adds, relu, place, come, rooms)
            more = more or token + _tokens(kind) < job.tokens
        token += _tokens(kind)
    release_registers(kind, ())


@jit
def _job_of(jobs, count, number, panel):  # type: ignore[no-untyped-def]
    """Return the number of the job to which a panel belongs, searching from `number` on."""
    while number + 1 < count and _jobs_at(jobs)[number + 1].first <= panel:
        number += 1
    return number


@jit
def _tokens(kind):  # type: ignore[no-untyped-def]
    return _AMX_TOKENS if is_amx(kind) else _TOKENS


@jit
def _chunks(kind, job):  # type: ignore[no-untyped-def]
    size = AVX2_CHUNK if is_avx2(kind) else _CHUNK
    if is_amx(kind) and (job.ends != 0 or job.tokens > _AMX_FEW):
        size = _AMX_CHUNK
    return (job.words + size - 1) // size


@jit
def _chunk(job, number, count):  # type: ignore[no-untyped-def]
    """Return the first word of chunk `number` of `count`, and its number of words.

    A chunk has at least LANES words, as a row has, and whole groups.
    """
    group = _PACKED_WORDS if job.coded == PACKED else LANES
    first = job.words * number // count // group * group
    end = job.words if number + 1 == count else job.words * (number + 1) // count // group * group
    return first, end - first


@jit
def _place(job, panel, chunk):  # type: ignore[no-untyped-def]
    """Return the PANEL runs of memory that form a chunk of a panel.

    The result is the address of the first run, bytes from one run to the next, and words per run.
    """
    word, words = chunk
    if job.row_step == 0:
        return job.weight + (panel * job.words + word) * STEP, 4 * words, words
    start = job.weight + panel * PANEL * job.row_step
    if job.coded != 0:
        return start + word, job.row_step, (words + 3) // 4
    return start + 4 * word, job.row_step, words


@jit
def _multiply_panel(kind, element, job, adds, relu, place, come, rooms):  # type: ignore[no-untyped-def]
    """Multiply a panel with a group of input rows.

    place: the panel within the job, and the first of the input rows. come: memory to prefetch after
    this panel: address of the first run, bytes from one run to the next, and words per run.
    """
    panel, token = place
    sums, panel_room, rows_room, ends, factors, registers = rooms
    tokens = min(_tokens(kind), job.tokens - token)
    most = most_rows(kind)
    chunks = _chunks(kind, job)
    tiles = (tokens + most - 1) // most
    for number in range(chunks):
        word, words = _chunk(job, number, chunks)
        ahead, step, more = come
        if job.ends != 0:
            more = np.int64(0)
        elif number + 1 < chunks:
            ahead, step, more = _place(job, panel, _chunk(job, number + 1, chunks))
        here, row_step, _ = _place(job, panel, (word, words))
        # Each tile prefetches its share of the lines, over all blocks of 16 words; laying a panel
        # out counts as one more tile.
        run = (more + LANES - 1) // LANES
        blocks = (words + LANES - 1) // LANES
        shares = tiles if job.row_step == 0 else tiles + 1
        lines = (PANEL * run + shares * blocks - 1) // (shares * blocks)
        asked = np.int64(0)
        if job.ends != 0:
            _requantise(job, panel, (word, words), (panel_room, ends, factors))
            here = panel_room
        elif job.row_step != 0:
            if is_float(kind) and job.coded != 0:
                _decode(job, panel, (word, words), rows_room)
                here = rows_room
                row_step = 4 * words
            last = min(PANEL, job.rows - panel * PANEL) - 1
            lay((here, row_step, last, words, panel_room, lines, ahead, step, run, asked))
            here = panel_room
            asked = blocks * lines
        if number + 1 == chunks and not is_float(kind) and job.ends == 0:
            _gather_ends(job, panel * PANEL, ends)
        done = np.int64(0)
        for t in range(tiles):
            rows = tokens * (t + 1) // tiles - tokens * t // tiles
            x = job.x + (token + done) * job.x_step + 4 * word
            to_come = lines, ahead, step, run, asked
            set_registers(kind, registers, rows)
            tile(kind, (rows, words, here, x, job.x_step, sums + done * STEP, number, *to_come))
            if number + 1 == chunks:
                _finish(
                    kind,
                    element,
                    job,
                    adds,
                    relu,
                    (panel, token + done, rows),
                    (sums + done * STEP, ends),
                )
            done += rows
            asked += blocks * lines


@jit_rounded
def _finish(kind, element, job, adds, relu, place, rooms):  # type: ignore[no-untyped-def]
    """Convert a tile's sums to results while they are in the nearest cache.

    place: the panel, the first input row, and the number of input rows. The sums are rounded once.
    In bf16, if they are added to what is there, they are rounded once more for the bias.
    """
    panel, token, rows = place
    sums, ends = rooms
    size = 4 // planes(element)
    row = panel * PANEL
    out = job.out + token * job.out_step + size * panel * PANEL
    bias = job.bias + size * row if job.bias != 0 else job.bias
    flags = np.int64(adds), np.int64(relu)
    count = min(PANEL, job.rows - row)
    whole = count // LANES
    if is_float(kind):
        finish_floats(element, (rows, whole, sums, out, job.out_step, bias, *flags))
    else:
        finish_ints(
            element,
            (rows, whole, sums, out, job.out_step, bias, *flags, job.x_scales + 4 * token, ends),
        )
    for t in range(rows):
        for i in range(whole * LANES, count):
            at = out + t * job.out_step
            added = number_at(element, bias, i) if bias != 0 else np.float32(0)
            before = number_at(element, at, i) if adds else np.float32(0)
            if not is_float(kind):
                total = np.float32(ints_at(sums + t * STEP)[i] + ints_at(ends)[PANEL + i])
                scale = floats_at(job.x_scales)[token + t]
                value = scaled(total, scale, floats_at(ends)[i], added, before)
            else:
                value = floats_at(sums + t * STEP)[i] + before
                value = (rounded(element, value) if adds and bias != 0 else value) + added
            set_number(element, at, i, np.float32(0) if relu and value < np.float32(0) else value)


@jit
def _decode(job, panel, chunk, out):  # type: ignore[no-untyped-def]
    """Decode a chunk of a panel of coded rows to bf16 rows, in order and adjacent."""
    word, words = chunk
    for r in range(min(PANEL, job.rows - panel * PANEL)):
        row = panel * PANEL + r
        to = out + 4 * r * words
        codes = job.weight + row * job.row_step + word
        scales = job.scales + row * job.scale_step
        if job.coded == PACKED:
            group = word // _PACKED_WORDS
            packed_numbers(np.uint16(0), (words // _PACKED_WORDS, to, codes, scales + 4 * group))
        else:
            group = word // _MXFP4_WORDS
            mxfp4_numbers(
                np.uint16(0), (words // _MXFP4_WORDS, to, codes, scales + group, job.tables)
            )


@jit
def _requantise(job, panel, chunk, places):  # type: ignore[no-untyped-def]
    """Convert a chunk of a panel of rows in 4 bits to int8 in the blocked layout.

    With the first chunk, the ends of the panel are computed too. Strips after the last row keep
    their old content, and their results are not used. places: addresses of the panel, of its ends,
    and of the factors of its rows' values before rounding.
    """
    word, words = chunk
    out, ends, factors = places
    group = word // _GROUP_WORDS
    groups = words // _GROUP_WORDS
    own = factors + STEP  # the factors of one strip, which the strip overwrites
    for i in range(0, min(PANEL, job.rows - panel * PANEL), LANES):
        packed = job.weight + (panel * PANEL + i) * job.row_step
        for r in range(LANES):
            if word == 0:
                start = packed + r * job.row_step + job.ends
                place = ends + 4 * (PANEL + i + r)
                largest, factor = largest_of(start, job.words // _GROUP_WORDS, place)
                floats_at(ends)[i + r] = largest * SCALE_STEP
                ints_at(ends)[PANEL + i + r] = 0
                floats_at(factors)[i + r] = factor
            floats_at(own)[r] = floats_at(factors)[i + r]
        places = (
            packed + group * (GROUP // 2),
            job.row_step,
            packed + job.ends + 4 * group,
            job.row_step,
        )
        strip((*places, groups, out + 4 * i, own))
        for r in range(LANES):
            ints_at(ends)[PANEL + i + r] += ints_at(own)[r] * np.int32(job.zero)


@jit
def _gather_ends(job, row, ends):  # type: ignore[no-untyped-def]
    """Copy the scales of a panel's rows, and what is added to products, to adjacent memory."""
    for i in range(min(PANEL, job.rows - row)):
        floats_at(ends)[i] = floats_at(job.scales + (row + i) * job.scale_step)[0]
        ints_at(ends)[PANEL + i] = ints_at(job.row_sums + (row + i) * job.sum_step)[0] * np.int32(
            job.zero
        )


_sums_room = room(_TOKENS * STEP)
_strip_room = room(_AMX_CHUNK * STEP)
_rows_room = room(_AMX_CHUNK * STEP)
_ends_room = room(2 * STEP)
_factors_room = room(STEP + LINE)
_registers_room = room(REGISTERS)
