"""The compiled loop of products of few rows: bf16 by bf16 with sums in fp32, uint8 by int8 with sums in int32.

A word (4 bytes) is two neighbouring columns in bf16, or four in int8; an instruction of AVX-512 adds to each of 16 sums
the product of two words. A panel is PANEL neighbouring rows of a weight. Blocked, its first words are side by side, one
of each row, then its second ones: four vectors are multiplied with the word of an input row, spread over a vector. A
panel of rows in order is brought into that layout a chunk of words at a time, in the caches, so that both give the same
bits. What is next of the weights is asked for meanwhile: else memory rests while cores multiply.

A sum goes through the columns in order, whatever else is multiplied with it. So a row of the result depends on that row
of the inputs alone, and not on how a matrix is split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from flexgen_h2o.core.packing import GROUP
from flexgen_h2o.core.units import BLOCK_ROWS as PANEL
from flexgen_h2o.kernels.compiled.int8 import SCALE_STEP, largest_of, scaled, strip
from flexgen_h2o.kernels.compiled.vectors import F32, I32, I64, Emitter, cgutils, emitted, emitted_by_type, prefetch
from flexgen_h2o.kernels.jit import (
    floats_at,
    ints_at,
    jit,
    longs_at,
    num_planes,
    number_at,
    planes,
    rounded,
    set_number,
    words_at,
)
from flexgen_h2o.kernels.products import Job

LANES = 16
_TILE = 6  # input rows by 4 vectors: 24 sums, of 32 registers
_CHUNK = 512  # words of a row at a time: 128 KiB of a panel, of 1 MiB of the cache that they share with inputs and sums
_TOKENS = 512  # input rows at a time, whose sums wait in the same cache from chunk to chunk
_LINE = 64  # bytes of a cache line
_VECTORS = PANEL // LANES
_STEP = 4 * PANEL  # bytes of a word of each row of a panel
_LAY_SHARES = 1  # of what is asked for, while a panel is laid out: as if it were as many tiles
_GROUP_WORDS = GROUP // 4
_NEXT_CACHE = 2  # what is asked for goes there: a chunk is more than the nearest holds
INTS, FLOATS = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)


_FIELDS = len(Job._fields)


class Ending(NamedTuple):
    """What becomes of the sums. adds: to what is in `out`; relu: of the result."""

    adds: bool
    relu: bool


@jit
def multiply(kind, element, table, ending, skip, first, end):  # type: ignore[no-untyped-def]
    """Panels first..end-1 of all jobs. kind: a number whose type says what inputs are: uint16 for bf16, uint8 for int8.

    element: of biases and results. table: its address, how many jobs it has, and the panels of all of them. skip: times
    as many panels as these are others' before the next that this thread is likely to get.
    """
    jobs, count, panels = table
    rooms = _sums_room(), _strip_room(), _ends_room(), _factors_room()
    number, ahead = np.int64(0), np.int64(0)
    for panel in range(first, end):
        number = _job_of(jobs, count, number, panel)
        after = panel + 1 if panel + 1 < end else end + skip * (end - first)
        ahead = _job_of(jobs, count, number, after)
        job, next_job = _job(jobs, number), _job(jobs, ahead)
        come = np.int64(0), np.int64(0), np.int64(0)
        if after < panels and next_job.ends == 0:
            _, words = _chunk(next_job, 0)
            come = _place(next_job, after - next_job.first, 0), _line_step(next_job, words), words
        _multiply_panel(kind, element, job, ending, panel - job.first, come, rooms)


@jit
def _job_of(jobs, count, number, panel):  # type: ignore[no-untyped-def]
    """The number of the job that a panel is of, from `number` on."""
    while number + 1 < count and longs_at(jobs + 8 * _FIELDS * (number + 1))[0] <= panel:
        number += 1
    return number


@jit
def _job(jobs, number):  # type: ignore[no-untyped-def]
    f = longs_at(jobs + 8 * _FIELDS * number)
    return Job(
        f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7], f[8], f[9], f[10], f[11], f[12], f[13], f[14], f[15], f[16],
        f[17],
    )  # fmt: skip


@jit
def _chunk(job, number):  # type: ignore[no-untyped-def]
    """The first word of a chunk, and how many it has: at least LANES, as a row has."""
    count = (job.words + _CHUNK - 1) // _CHUNK
    first = job.words * number // count // LANES * LANES
    end = job.words if number + 1 == count else job.words * (number + 1) // count // LANES * LANES
    return first, end - first


@jit
def _place(job, panel, word):  # type: ignore[no-untyped-def]
    """The address of a word of a panel's first row."""
    if job.row_step == 0:
        return job.weight + (panel * job.words + word) * _STEP
    return job.weight + panel * PANEL * job.row_step + 4 * word


@jit
def _line_step(job, words):  # type: ignore[no-untyped-def]
    """Bytes from one to the next of PANEL runs of memory that a chunk of a panel is made of."""
    return 4 * words if job.row_step == 0 else job.row_step


@jit
def _multiply_panel(kind, element, job, ending, panel, come, rooms):  # type: ignore[no-untyped-def]
    """come: of the chunk that follows these, the address, the line step, and the words."""
    sums, panel_room, ends, factors = rooms
    chunks, size = (job.words + _CHUNK - 1) // _CHUNK, 4 // planes(element)
    for token in range(0, job.tokens, _TOKENS):
        tokens = min(_TOKENS, job.tokens - token)
        tiles = (tokens + _TILE - 1) // _TILE
        for number in range(chunks):
            word, words = _chunk(job, number)
            ahead, step, more = come
            if job.ends != 0:
                more = np.int64(0)
            elif number + 1 < chunks:
                following, more = _chunk(job, number + 1)
                ahead, step = _place(job, panel, following), _line_step(job, more)
            elif token + tokens < job.tokens:
                more = np.int64(0)
            here = _place(job, panel, word)
            # In each tile its share of the lines, over all blocks of 16 words.
            run, blocks = (more + LANES - 1) // LANES, (words + LANES - 1) // LANES
            shares = tiles if job.row_step == 0 else tiles + _LAY_SHARES
            lines = (PANEL * run + shares * blocks - 1) // (shares * blocks)
            asked = np.int64(0)
            if job.ends != 0:
                _requantise(job, panel, (word, words), (panel_room, ends, factors))
                here = panel_room
            elif job.row_step != 0:
                last = min(PANEL, job.rows - panel * PANEL) - 1
                lay((here, job.row_step, last, words, panel_room, lines, ahead, step, run, asked))
                here, asked = panel_room, _LAY_SHARES * blocks * lines
            done = np.int64(0)
            for t in range(tiles):
                rows = tokens * (t + 1) // tiles - tokens * t // tiles
                x = job.x + (token + done) * job.x_step + 4 * word
                to_come = lines, ahead, step, run, asked
                if number + 1 == chunks:
                    _ask_for_results(job, token + done, rows, size * panel * PANEL, size * PANEL)
                tile(kind, (rows, words, here, x, job.x_step, sums + done * _STEP, number, *to_come))
                done += rows
                asked += blocks * lines
        if planes(kind) == 1 and job.ends == 0:
            _gather_ends(job, panel * PANEL, ends)
        for t in range(tokens):
            out = job.out + (token + t) * job.out_step + size * panel * PANEL
            if planes(kind) == 2:
                _finish(element, job, ending, panel * PANEL, sums + t * _STEP, out)
            else:
                scale = floats_at(job.x_scales)[token + t]
                _finish_int8(element, job, ending, panel * PANEL, sums + t * _STEP, (scale, ends, out))


@jit
def _requantise(job, panel, chunk, places):  # type: ignore[no-untyped-def]
    """A chunk of a panel of rows in 4 bits as int8 in the blocked layout; the first one's also has the panel's ends.

    places: of the panel, of its ends, and of the factors of its rows' values before they are rounded.
    """
    (word, words), (out, ends, factors) = chunk, places
    group, groups = word // _GROUP_WORDS, words // _GROUP_WORDS
    own = factors + _STEP  # a strip's factors, which it overwrites
    for i in range(0, PANEL, LANES):
        packed = job.weight + (panel * PANEL + i) * job.row_step
        for r in range(LANES):
            if word == 0:
                largest, factor = largest_of(words_at(packed + r * job.row_step + job.ends), job.words // _GROUP_WORDS)
                floats_at(ends)[i + r] = largest * SCALE_STEP
                ints_at(ends)[PANEL + i + r] = 0
                floats_at(factors)[i + r] = factor
            floats_at(own)[r] = floats_at(factors)[i + r]
        codes = packed + group * (GROUP // 2)
        strip((codes, job.row_step, packed + job.ends + 4 * group - codes, groups, out + 4 * i, own))
        for r in range(LANES):
            ints_at(ends)[PANEL + i + r] += ints_at(own)[r] * np.int32(job.zero)


@jit
def _ask_for_results(job, token, tokens, place, nbytes):  # type: ignore[no-untyped-def]
    """The lines that a tile's rows of a panel end in, which the next products would wait for."""
    for t in range(token, token + tokens):
        at = job.out + t * job.out_step + place
        for line in range(at, at + nbytes, _LINE):
            prefetch((line,))


@jit
def _finish(element, job, ending, row, sums, out):  # type: ignore[no-untyped-def]
    """Rounded once; where it is added to what is there, once more for the bias. Each loop is vectorised."""
    count, bias = min(PANEL, job.rows - row), job.bias
    if ending.adds:
        for i in range(count):
            value = floats_at(sums)[i] + number_at(element, out, i)
            if bias != 0:
                value = rounded(element, value) + number_at(element, bias, row + i)
            set_number(element, out, i, _active(ending.relu, value))
    elif bias != 0:
        for i in range(count):
            value = floats_at(sums)[i] + number_at(element, bias, row + i)
            set_number(element, out, i, _active(ending.relu, value))
    else:
        for i in range(count):
            set_number(element, out, i, _active(ending.relu, floats_at(sums)[i]))


@jit
def _active(relu, value):  # type: ignore[no-untyped-def]
    return np.float32(0) if relu and value < np.float32(0) else value


@jit
def _gather_ends(job, row, ends):  # type: ignore[no-untyped-def]
    """Side by side, the scales of a panel's rows, and what is added to their products."""
    for i in range(min(PANEL, job.rows - row)):
        floats_at(ends)[i] = floats_at(job.scales + (row + i) * job.scale_step)[0]
        ints_at(ends)[PANEL + i] = ints_at(job.row_sums + (row + i) * job.sum_step)[0] * np.int32(job.zero)


@jit
def _finish_int8(element, job, ending, row, sums, places):  # type: ignore[no-untyped-def]
    """In fp32, rounded once (int8.rescale). places: the input row's scale, the ends, and the result."""
    scale, ends, out = places
    for i in range(min(PANEL, job.rows - row)):
        total = np.float32(ints_at(sums)[i] + ints_at(ends)[PANEL + i])
        bias = number_at(element, job.bias, row + i) if job.bias != 0 else np.float32(0)
        before = number_at(element, out, i) if ending.adds else np.float32(0)
        value = scaled(total, scale, floats_at(ends)[i], bias, before)
        set_number(element, out, i, _active(ending.relu, value))


# ---- vector code


def _room(nbytes: int) -> Any:
    """An intrinsic that gives the address of so many bytes of the loop's own stack."""

    @intrinsic
    def run(_context: Any) -> Any:
        def generate(_context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
            with builder.goto_entry_block():  # numba's own helper would fill it with zeros, word by word
                memory = builder.alloca(ir.ArrayType(ir.IntType(8), nbytes))
                memory.align = _LINE
            return builder.ptrtoint(memory, I64)

        return types.int64(), generate

    return run


_sums_room, _strip_room, _ends_room = _room(_TOKENS * _STEP), _room(_CHUNK * _STEP), _room(2 * _STEP)
_factors_room = _room(_STEP + _LINE)


def dot(e: Emitter, planes_of: int, total: Any, x: Any, w: Any) -> Any:
    kind, name = (FLOATS, "avx512bf16.dpbf16ps.512") if planes_of == 2 else (INTS, "avx512.vpdpbusd.512")
    function = ir.FunctionType(kind, [kind, INTS, INTS])
    return e.builder.call(cgutils.get_or_insert_function(e.builder.module, function, f"llvm.x86.{name}"), [total, x, w])


def _emit_tile(e: Emitter, planes_of: int, rows: Any, *numbers: Any) -> None:
    """The code of a tile of each size, of which one is run."""
    b = e.builder
    end = b.append_basic_block("end")
    choice = b.switch(rows, end)
    for count in range(1, _TILE + 1):
        block = b.append_basic_block(f"tile{count}")
        choice.add_case(ir.Constant(I64, count), block)
        b.position_at_end(block)
        _emit_rows(e, planes_of, count, numbers)
        b.branch(end)
    b.position_at_end(end)


def _emit_rows(e: Emitter, planes_of: int, rows: int, numbers: tuple[Any, ...]) -> None:
    b, (words, weight, x, x_step, sums, begun, *to_come) = e.builder, numbers
    kind = FLOATS if planes_of == 2 else INTS
    totals = e.variables(kind, rows, _VECTORS)
    places = [[b.add(sums, e.number(r * _STEP + 4 * LANES * v)) for v in range(_VECTORS)] for r in range(rows)]
    with b.if_then(b.icmp_signed("!=", begun, e.number(0))):
        for total, place in _each(totals, places):
            b.store(e.load(place, kind), total)
    coming = _Ahead.begin(e, *to_come)
    with e.loop(b.sdiv(b.add(words, e.number(LANES - 1)), e.number(LANES))) as block:
        coming.ask()
        first = b.mul(block.index, e.number(LANES))
        for r in range(rows, 2 * rows):
            e.prefetch(e.onward(b.add(x, b.mul(x_step, e.number(r))), first), _NEXT_CACHE)
        left = b.sub(words, first)
        with e.loop(b.select(b.icmp_signed("<", left, e.number(LANES)), left, e.number(LANES))) as loop:
            word = b.add(first, loop.index)
            at = b.add(weight, b.mul(word, e.number(_STEP)))
            vectors = [e.load(b.add(at, e.number(4 * LANES * v)), INTS) for v in range(_VECTORS)]
            for r in range(rows):
                asked = e.load(e.onward(b.add(x, b.mul(x_step, e.number(r))), word), I32)
                spread = e.spread([asked], LANES)
                for total, vector in zip(totals[r], vectors, strict=True):
                    b.store(dot(e, planes_of, b.load(total), spread, vector), total)
    for total, place in _each(totals, places):
        e.store(b.load(total), place)


def _each(totals: list[list[Any]], places: list[list[Any]]) -> list[tuple[Any, Any]]:
    return [pair for of_row in zip(totals, places, strict=True) for pair in zip(*of_row, strict=True)]


@dataclass(frozen=True)
class _Ahead:
    """Lines to ask for: of PANEL runs of `run` lines, `step` bytes apart, those from `first` on.

    lines: at a time. place, column, left: variables: the next line's address, its number in its run, and how many lines
    there are from it on.
    """

    e: Emitter
    lines: Any
    run: Any
    step: Any
    place: Any
    column: Any
    left: Any

    @classmethod
    def begin(cls, e: Emitter, lines: Any, ahead: Any, step: Any, run: Any, first: Any) -> _Ahead:
        b = e.builder
        some = b.select(b.icmp_signed(">", run, e.number(0)), run, e.number(1))
        of_run = b.sdiv(first, some)
        column = b.sub(first, b.mul(of_run, some))
        place = b.add(ahead, b.add(b.mul(of_run, step), b.mul(column, e.number(_LINE))))
        left = b.sub(b.mul(run, e.number(PANEL)), first)
        return cls(e, lines, run, step, *(cgutils.alloca_once_value(b, value) for value in (place, column, left)))

    def ask(self) -> None:
        e, b = self.e, self.e.builder
        left = b.load(self.left)
        with e.loop(b.select(b.icmp_signed("<", left, self.lines), left, self.lines)):
            place, column = b.load(self.place), b.add(b.load(self.column), e.number(1))
            e.prefetch(place, _NEXT_CACHE)
            is_last = b.icmp_signed("==", column, self.run)
            back = b.sub(self.step, b.mul(self.run, e.number(_LINE)))
            onward = b.add(place, e.number(_LINE))
            b.store(b.select(is_last, b.add(onward, back), onward), self.place)
            b.store(b.select(is_last, e.number(0), column), self.column)
        b.store(b.sub(left, self.lines), self.left)


def _emit_lay(e: Emitter, source: Any, step: Any, last: Any, words: Any, out: Any, *to_come: Any) -> None:
    b, coming = e.builder, _Ahead.begin(e, *to_come)
    end = b.sub(words, e.number(LANES))
    blocks = b.sdiv(b.add(words, e.number(LANES - 1)), e.number(LANES))
    for group in range(_VECTORS):
        rows = [e.number(group * LANES + i) for i in range(LANES)]
        starts = [b.add(source, b.mul(step, b.select(b.icmp_signed("<", r, last), r, last))) for r in rows]
        with e.loop(blocks) as loop:
            coming.ask()
            regular = b.mul(loop.index, e.number(LANES))
            first = b.select(b.icmp_signed("<", regular, end), regular, end)
            at = b.add(b.add(out, b.mul(first, e.number(_STEP))), e.number(4 * LANES * group))
            for quarter in range(0, LANES, 4):
                places = [e.onward(e.onward(start, first), e.number(quarter)) for start in starts]
                lines = e.across([_quarters(e, places[i::4]) for i in range(4)])
                for i, line in enumerate(lines, quarter):
                    e.store(line, b.add(at, e.number(i * _STEP)))


def _quarters(e: Emitter, places: list[Any]) -> Any:
    """A vector of 4 words each from four addresses: loaded into place, which takes no shuffle."""
    found = None
    for number, place in enumerate(places):
        words = e.load(place, ir.VectorType(I32, 4))
        spread = e.shuffle(words, words, list(range(4)) * 4)
        mask = ir.Constant(ir.VectorType(ir.IntType(1), LANES), [lane // 4 == number for lane in range(LANES)])
        found = spread if found is None else e.builder.select(mask, spread, found)
    return found


# tile(kind, (rows, words, weight, x, x_step, sums, begun, lines, ahead, step, run, first)): sums (rows, PANEL), which
# products of so many words begin, or are added to; and what is asked for meanwhile (_Ahead).
tile = emitted_by_type(num_planes, _emit_tile)
# lay((source, row_step, last, words, out, lines, ahead, step, run, first)): a panel of rows in order into the blocked
# layout; rows beyond the last one are like it. words: at least LANES.
lay = emitted(_emit_lay)
