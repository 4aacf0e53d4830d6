"""Vector code for the loop of products: tiles of sums, and panels in order to the blocked layout.

A tile is some input rows by a panel (compiled/products.py). AVX-512 and AMX multiply words, AVX2
multiplies numbers. Meanwhile the code prefetches the next weights. Otherwise memory would be idle
while cores multiply.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types

from flexgen_h2o.core.units import BLOCK_ROWS as PANEL
from flexgen_h2o.kernels.compiled.emitter import (
    F32,
    FLOATS,
    I8,
    I16,
    I32,
    I64,
    INTS,
    LANES,
    Emitter,
    Value,
    Variable,
    across,
    bf16_pairs,
    emitted,
    emitted_by_type,
    least,
    load_numbers,
    parts,
    rounded,
    widened,
)
from flexgen_h2o.kernels.jit import bytes_at, jit, known, num_planes, shorts_at

LINE = 64  # bytes per cache line
STEP = 4 * PANEL  # bytes of one word of each row of a panel
_VECTORS = PANEL // LANES
# Input rows per tile. By 4 vectors they are 24 sums, of 32 registers. With AVX2, by one vector of
# two registers, they are 12 of 16.
_MAX_ROWS = 6
_SIDE = 16  # rows of an AMX register, of LINE bytes each; a tile has up to twice as many input rows
# bytes that configure AMX's registers; offsets of their widths and of their heights
REGISTERS = 64
_WIDTHS = 16
_HEIGHTS = 48
_NEXT_CACHE = 2  # cache to which is prefetched: a chunk exceeds the nearest cache
_UNROLLED = 2  # words at a time: longer loops exceed the cache of decoded instructions
_PAIRS = ir.VectorType(I16, 2 * LANES)
AVX2_CHUNK = 256  # words of a row at a time: the split numbers of inputs must fit the nearest cache


def _is_amx(kind: Any) -> bool:
    """Return whether AMX multiplies, for the type of `kind` (products.multiply)."""
    return kind in (types.int8, types.int16)


def _is_avx2(kind: Any) -> bool:
    return kind in (types.int32, types.uint32)


def _is_float(kind: Any) -> bool:
    """Return whether inputs are bf16."""
    return kind in (types.int16, types.uint16, types.uint32)


is_amx = known(_is_amx)
is_avx2 = known(_is_avx2)
is_float = known(_is_float)


@jit
def most_rows(kind):  # type: ignore[no-untyped-def]
    """Return the maximal number of input rows of a tile."""
    return 2 * _SIDE if is_amx(kind) else _MAX_ROWS


def _emit_tile(e: Emitter, kind: Any, *numbers: Value) -> None:
    if _is_amx(kind):
        _emit_amx_tile(e, "tdpbf16ps" if _is_float(kind) else "tdpbusd", *numbers)
    else:
        emit = _emit_avx2_rows if _is_avx2(kind) else _emit_rows
        _emit_vector_tile(e, partial(emit, e, _is_float(kind)), *numbers)


def _emit_vector_tile(e: Emitter, emit: Callable[..., None], rows: Value, *numbers: Value) -> None:
    """Emit the code of a tile of each size, of which one runs."""
    b = e.builder
    end = b.append_basic_block("end")
    choice = b.switch(rows.ir, end)
    for count in range(1, _MAX_ROWS + 1):
        block = b.append_basic_block(f"tile{count}")
        choice.add_case(ir.Constant(I64, count), block)
        b.position_at_end(block)
        emit(count, *numbers)
        b.branch(end)
    b.position_at_end(end)


def _emit_rows(
    e: Emitter,
    is_float: bool,
    rows: int,
    words: Value,
    weight: Value,
    x: Value,
    x_step: Value,
    sums: Value,
    begun: Value,
    *to_come: Value,
) -> None:
    dot = "x86.avx512bf16.dpbf16ps.512" if is_float else "x86.avx512.vpdpbusd.512"
    kind = FLOATS if is_float else INTS
    totals = e.variables(kind, rows, _VECTORS)
    places = [[sums + (r * STEP + v * LINE) for v in range(_VECTORS)] for r in range(rows)]
    with e.when(begun != 0):
        e.load_each(totals, places)
    ahead = _Ahead(e, *to_come)
    with e.loop(parts(words, LANES)) as block:
        ahead.prefetch()
        first = block * LANES
        for r in range(rows, 2 * rows):
            e.prefetch(x + x_step * r + first * 4, _NEXT_CACHE)
        with e.loop(least(words - first, e.constant(I64, LANES))) as index:
            word = first + index
            at = weight + word * STEP
            vectors = [e.load(at + v * LINE, INTS) for v in range(_VECTORS)]
            for r in range(rows):
                spread = e.spread([e.load(x + x_step * r + word * 4, I32)], LANES)
                for total, vector in zip(totals[r], vectors, strict=True):
                    total.value = e.call(dot, kind, total.value, spread, vector)
    e.store_each(totals, places)


def _emit_avx2_rows(
    e: Emitter,
    is_float: bool,
    rows: int,
    words: Value,
    weight: Value,
    x: Value,
    x_step: Value,
    sums: Value,
    begun: Value,
    lines: Value,
    *to_come: Value,
) -> None:
    """Emit a tile for AVX2: as many vectors of the panel at a time as registers hold sums.

    Inputs are split once for all vectors.
    """
    kind = FLOATS if is_float else INTS
    together = max(1, _VECTORS // rows)
    num_parts = _VECTORS // together
    size = 4 * (AVX2_CHUNK + LANES)
    room = e.room(2 * rows * size)
    apart = [[room + (2 * r + half) * size for half in range(2)] for r in range(rows)]
    blocks = parts(words, LANES)
    with e.loop(blocks) as block:
        first = least(block * LANES, words - LANES)
        for r, halves in enumerate(apart):
            found = e.load(x + x_step * r + first * 4, INTS)
            for half, place in enumerate(halves):
                e.store(_half(is_float, found, half, False), place + first * 4)
    ahead = _Ahead(e, parts(lines, num_parts), *to_come)
    # Rounding up above must not exceed the tile's share.
    ahead.left.value = least(ahead.left.value, lines * blocks)
    with e.loop(num_parts) as part:
        lanes = part * (together * LINE)
        starts = [sums + r * STEP + lanes for r in range(rows)]
        places = [[start + v * LINE for v in range(together)] for start in starts]
        totals = e.variables(kind, rows, together)
        with e.when(begun != 0):
            e.load_each(totals, places)
        with e.loop(blocks) as block:
            ahead.prefetch()
            begin = block * LANES
            count = least(words - begin, e.constant(I64, LANES))
            # In int8, odd numbers come after the even ones of all words, because both at once
            # exceed the registers.
            for some in ((0, 1),) if is_float else ((0,), (1,)):
                for word in e.unrolled(begin, count, _UNROLLED):
                    at = weight + lanes + word * STEP
                    for half in some:
                        vectors = [e.load(at + v * LINE, INTS) for v in range(together)]
                        ours = [_half(is_float, vector, half, True) for vector in vectors]
                        at = e.once_more(at)
                        for of_row, of_inputs in zip(totals, apart, strict=True):
                            one = e.load(of_inputs[half] + word * 4, kind.element)
                            spread = e.spread([one], LANES)
                            for total, values in zip(of_row, ours, strict=True):
                                total.value = _add_products(e, total.value, spread, values)
        e.store_each(totals, places)


def _half(is_float: bool, words: Value, half: int, is_signed: bool) -> Value:
    """Return the even or the odd numbers of words in a vector.

    Of two bf16 it returns one, as fp32. Of four int8 (or uint8) it returns two, as 16 bits.
    """
    if is_float:
        return bf16_pairs(words)[half]
    shorts = words.bitcast(_PAIRS)
    upper = shorts if half else shorts << 8
    return (upper.ashr(8) if is_signed else upper >> 8).bitcast(INTS)


def _add_products(e: Emitter, total: Value, x: Value, w: Value) -> Value:
    """Return total + the products of x and w, as numbers, or as pairs of 16 bits.

    Sums of pairs fit 32 bits.
    """
    if total.type == FLOATS:
        return e.call(f"fma.v{LANES}f32", FLOATS, x, w, total)
    half = ir.VectorType(I32, LANES // 2)
    return total + e.call_by_halves("x86.avx2.pmadd.wd", half, x.bitcast(_PAIRS), w.bitcast(_PAIRS))


def _amx(e: Emitter, name: str, *arguments: Any) -> None:
    """Emit an AMX instruction.

    Registers are given as int. The first argument that is no int is an address.
    """
    values = [ir.Constant(I8, a) if isinstance(a, int) else a for a in arguments]
    addresses = [i for i, a in enumerate(arguments) if not isinstance(a, int)][:1]
    for i in addresses:
        values[i] = e.pointer(arguments[i], I8)
    e.call(f"x86.{name}", ir.VoidType(), *values)


def _emit_amx_tile(e: Emitter, dot: str, rows: Value, *numbers: Value) -> None:
    with e.builder.if_else((rows > _SIDE).ir) as (pair, single):
        with pair:
            for half in (0, 1):
                _emit_registers(e, dot, half, True, *numbers)
        with single:
            _emit_registers(e, dot, 0, False, *numbers)


def _emit_registers(
    e: Emitter,
    dot: str,
    half: int,
    is_pair: bool,
    words: Value,
    weight: Value,
    x: Value,
    x_step: Value,
    sums: Value,
    begun: Value,
    lines: Value,
    ahead_at: Value,
    ahead_step: Value,
    run: Value,
    first: Value,
) -> None:
    """Emit 16 input rows by a panel, or two times 16 rows by half of it.

    Registers of 16 rows: 0 to 3 are sums, 4 and 5 input rows, 6 and 7 words of 16 rows of the
    panel.
    """
    step = e.constant(I64, STEP)
    start = sums + half * 2 * LINE
    rest = start + (_SIDE * STEP if is_pair else 2 * LINE)
    places = [start, start + LINE, rest, rest + LINE]
    with e.builder.if_else((begun != 0).ir) as (again, fresh):
        with again:
            for register, place in enumerate(places):
                _amx(e, "tileloadd64", register, place, step)
        with fresh:
            for register in range(4):
                _amx(e, "tilezero", register)
    steps = words // _SIDE
    # each half prefetches its half; otherwise memory would be idle during the other half
    if is_pair:
        lines = parts(lines, 2)
        first = first + lines * steps * half
    ahead = _Ahead(e, lines, ahead_at, ahead_step, run, first)
    with e.loop(steps) as index:
        ahead.prefetch()
        at = weight + index * (_SIDE * STEP)
        mine = x + index * LINE
        _amx(e, "tileloadd64", 4, mine, x_step)
        if is_pair:
            _amx(e, "tileloadd64", 5, mine + x_step * _SIDE, x_step)
        for vector in range(2 if is_pair else _VECTORS):
            register = 6 + vector % 2
            _amx(e, "tileloadd64", register, at + LINE * (2 * half + vector), step)
            _amx(e, dot, vector, 4, register)
            if is_pair:
                _amx(e, dot, vector + 2, 5, register)
    for register, place in enumerate(places):
        _amx(e, "tilestored64", register, place, step)


class _Ahead:
    """Prefetch lines of memory while a tile is computed.

    There are PANEL runs of `run` lines, `step` bytes apart, from address `at` on. The first line to
    prefetch is `first`.
    """

    def __init__(
        self, e: Emitter, lines: Value, at: Value, step: Value, run: Value, first: Value
    ) -> None:
        self.e = e
        self.lines = lines  # lines that are prefetched at a time
        self.run = run
        self.step = step
        some = (run > 0).select(run, e.constant(I64, 1))
        of_run = first // some
        column = first - of_run * some
        self.place = Variable(at + of_run * step + column * LINE)  # address of the next line
        self.column = Variable(column)  # index of the next line in its run
        self.left = Variable(run * PANEL - first)  # number of lines from the next line on

    def prefetch(self) -> None:
        e = self.e
        left = self.left.value
        with e.loop(least(left, self.lines)):
            place = self.place.value
            column = self.column.value + 1
            e.prefetch(place, _NEXT_CACHE)
            is_last = column == self.run
            onward = place + LINE
            back = self.step - self.run * LINE
            self.place.value = is_last.select(onward + back, onward)
            self.column.value = is_last.select(e.constant(I64, 0), column)
        self.left.value = left - self.lines


def _emit_lay(
    e: Emitter,
    source: Value,
    step: Value,
    last: Value,
    words: Value,
    out: Value,
    *to_come: Value,
) -> None:
    ahead = _Ahead(e, *to_come)
    for group in range(_VECTORS):
        rows = [e.constant(I64, group * LANES + i) for i in range(LANES)]
        starts = [source + step * least(row, last) for row in rows]
        with e.loop(parts(words, LANES)) as block:
            ahead.prefetch()
            first = least(block * LANES, words - LANES)
            at = out + first * STEP + group * LINE
            for quarter in range(0, LANES, 4):
                places = [start + first * 4 + quarter * 4 for start in starts]
                lines = across([_quarters(e, places[i::4]) for i in range(4)])
                for i, line in enumerate(lines, quarter):
                    e.store(line, at + i * STEP)


def _quarters(e: Emitter, places: list[Value]) -> Value:
    """Return a vector of 4 words from each of four addresses.

    Words are loaded into their place in the vector, so no shuffle instruction is needed.
    """
    found: Value | None = None
    for number, place in enumerate(places):
        spread = e.load(place, ir.VectorType(I32, 4)).take(list(range(4)) * 4)
        mask = e.vector(ir.IntType(1), [lane // 4 == number for lane in range(LANES)])
        found = spread if found is None else mask.select(spread, found)
    assert found is not None
    return found


def _emit_finish(
    is_int: bool,
    e: Emitter,
    element: Any,
    rows: Value,
    vectors: Value,
    sums: Value,
    out: Value,
    out_step: Value,
    bias: Value,
    adds: Value,
    relu: Value,
    *ends: Value,
) -> None:
    """Emit the conversion of sums to results.

    Call it from a jit_rounded function, which computes the same for what is less than a vector.
    """
    zero = e.constant(FLOATS, 0.0)
    size = 4 // num_planes(element)
    is_added = adds != 0
    has_bias = bias != 0
    has_relu = relu != 0
    with e.loop(rows) as row, e.loop(vectors) as vector:
        first = vector * LANES
        at = sums + row * STEP + first * 4
        place = out + row * out_step + first * size
        before = Variable(zero)
        added = Variable(zero)
        with e.when(is_added):
            before.value = load_numbers(e, element, place)
        with e.when(has_bias):
            added.value = load_numbers(e, element, bias + first * size)
        if is_int:
            total = _rescaled(e, at, row, first, *ends) + added.value + before.value
        else:
            value = Variable(e.load(at, FLOATS) + before.value)
            with e.when(is_added & has_bias):
                value.value = widened(element, rounded(element, value.value))
            total = value.value + added.value
        above = (total < 0.0).select(zero, total)
        result = has_relu.select(above, total)
        e.store(rounded(element, result), place, align=2)


def _rescaled(
    e: Emitter, at: Value, row: Value, first: Value, x_scales: Value, ends: Value
) -> Value:
    """Return sums of codes as int8.scaled has them before the bias.

    ends: address of the scales of the panel's rows, followed by what is added to sums.
    """
    scales = ends + first * 4
    total = e.load(at, INTS) + e.load(scales + STEP, INTS)
    x_scale = e.spread([e.load(x_scales + row * 4, F32)], LANES)
    return total.sitofp(FLOATS) * x_scale * e.load(scales, FLOATS)


# tile(kind, (rows, words, weight, x, x_step, sums, begun, lines, ahead, step, run, first)): compute
# sums (rows, PANEL) over `words` words; add to them if begun. The last five arguments are what is
# prefetched (_Ahead).
tile = emitted_by_type(_emit_tile)
# finish_floats(element, (rows, vectors, sums, out, out_step, bias, adds, relu)): convert `vectors`
# vectors of a panel's sums of each input row to results. finish_ints: the same with (..., x_scales,
# ends), see _rescaled.
finish_floats = emitted_by_type(partial(_emit_finish, False))
finish_ints = emitted_by_type(partial(_emit_finish, True))
# load_registers(kind, (address,)), release_registers(kind, ()): configure or release AMX; they do
# nothing for other kinds.
load_registers = emitted_by_type(
    lambda e, kind, at: _amx(e, "ldtilecfg", at) if _is_amx(kind) else None
)
release_registers = emitted_by_type(
    lambda e, kind: _amx(e, "tilerelease") if _is_amx(kind) else None
)
# lay((source, row_step, last, words, out, lines, ahead, step, run, first)): convert a panel of rows
# in order to the blocked layout. Rows beyond `last` repeat it. words: at least LANES.
lay = emitted(_emit_lay)


@jit
def set_registers(kind, registers, rows):  # type: ignore[no-untyped-def]
    """Tell AMX how many input rows its registers hold, if that changed; see `_emit_registers`.

    registers: the address of REGISTERS bytes, zeros at first.
    """
    if not is_amx(kind):
        return
    first = min(rows, _SIDE)
    second = rows - first if rows > first else first
    heights = bytes_at(registers + _HEIGHTS)
    if heights[0] == first and heights[2] == second:
        return
    bytes_at(registers)[0] = 1
    for i in range(8):
        shorts_at(registers + _WIDTHS)[i] = LINE
        heights[i] = _SIDE
    for i in (0, 1, 4):
        heights[i] = first
    for i in (2, 3, 5):
        heights[i] = second
    load_registers(kind, (registers,))
