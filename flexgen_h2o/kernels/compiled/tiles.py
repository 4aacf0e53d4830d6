"""The vector code of the loop of products: tiles of sums, and panels in order into the blocked layout.

A tile is some input rows by a panel (compiled/products.py), by the products of words that AVX-512 has, by AMX, or by
AVX2's products of numbers. What is next of the weights is asked for meanwhile: else memory rests while cores multiply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from flexgen_h2o.core.units import BLOCK_ROWS as PANEL
from flexgen_h2o.kernels.compiled.emitter import F32, I16, I32, I64, Emitter, cgutils, each, emitted, emitted_by_type
from flexgen_h2o.kernels.jit import bytes_at, jit, num_planes, shorts_at

LANES = 16
LINE = 64  # bytes of a cache line
STEP = 4 * PANEL  # bytes of a word of each row of a panel
_VECTORS = PANEL // LANES
_MOST_ROWS = 6  # input rows by 4 vectors: 24 sums, of 32 registers; of AVX2, by one of two registers: 12 of 16
_SIDE = 16  # rows of a register of AMX, of LINE bytes each; a tile has up to twice as many input rows
REGISTERS, _WIDTHS, _HEIGHTS = 64, 16, 48  # bytes that say how AMX's registers are; where their bytes and rows are
_NEXT_CACHE = 2  # what is asked for goes there: a chunk is more than the nearest holds
_UNROLLED = 2  # words at a time: more are too long for the cache of decoded instructions
_INTS, _FLOATS = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
_SHORTS, _HALVES = ir.VectorType(I16, LANES), ir.VectorType(ir.HalfType(), LANES)
_PAIRS = ir.VectorType(I16, 2 * LANES)
AVX2_CHUNK = 256  # words of a row at a time: numbers of inputs, taken apart, are to be in the nearest cache


def _is_amx(kind: Any) -> bool:
    """Of the type of `kind` (products.multiply)."""
    return kind in (types.int8, types.int16)


def _is_avx2(kind: Any) -> bool:
    return kind in (types.int32, types.uint32)


def _is_float(kind: Any) -> bool:
    """Are inputs bf16?"""
    return kind in (types.int16, types.uint16, types.uint32)


def _known(meaning: Callable[[Any], bool]) -> Any:
    """An intrinsic that says of a number's type what is known at compile time."""

    @intrinsic
    def run(_context: Any, kind: Any) -> Any:
        constant = ir.Constant(ir.IntType(1), meaning(kind))
        return types.boolean(kind), lambda *_: constant

    return run


is_amx, is_avx2, is_float = _known(_is_amx), _known(_is_avx2), _known(_is_float)


@jit
def most_rows(kind):  # type: ignore[no-untyped-def]
    """Input rows of a tile at most."""
    return 2 * _SIDE if is_amx(kind) else _MOST_ROWS


def _dot(e: Emitter, is_float: bool, total: Any, x: Any, w: Any) -> Any:
    name = "avx512bf16.dpbf16ps.512" if is_float else "avx512.vpdpbusd.512"
    return e.call(f"x86.{name}", total.type, total, x, w)


def _emit_tile(e: Emitter, kind: Any, *numbers: Any) -> None:
    if _is_amx(kind):
        _emit_amx_tile(e, "tdpbf16ps" if _is_float(kind) else "tdpbusd", *numbers)
    else:
        _emit_vector_tile(e, _emit_avx2_rows if _is_avx2(kind) else _emit_rows, _is_float(kind), *numbers)


def _emit_vector_tile(e: Emitter, emit: Callable[..., None], is_float: bool, rows: Any, *numbers: Any) -> None:
    """The code of a tile of each size, of which one is run."""
    b = e.builder
    end = b.append_basic_block("end")
    choice = b.switch(rows, end)
    for count in range(1, _MOST_ROWS + 1):
        block = b.append_basic_block(f"tile{count}")
        choice.add_case(ir.Constant(I64, count), block)
        b.position_at_end(block)
        emit(e, is_float, count, numbers)
        b.branch(end)
    b.position_at_end(end)


def _emit_rows(e: Emitter, is_float: bool, rows: int, numbers: tuple[Any, ...]) -> None:
    b, (words, weight, x, x_step, sums, begun, *to_come) = e.builder, numbers
    kind = _FLOATS if is_float else _INTS
    totals = e.variables(kind, rows, _VECTORS)
    places = [[b.add(sums, e.number(r * STEP + 4 * LANES * v)) for v in range(_VECTORS)] for r in range(rows)]
    with b.if_then(b.icmp_signed("!=", begun, e.number(0))):
        for total, place in each(totals, places):
            b.store(e.load(place, kind), total)
    coming = _Ahead.begin(e, *to_come)
    with e.loop(e.parts(words, LANES)) as block:
        coming.ask()
        first = b.mul(block.index, e.number(LANES))
        for r in range(rows, 2 * rows):
            e.prefetch(e.onward(b.add(x, b.mul(x_step, e.number(r))), first), _NEXT_CACHE)
        left = b.sub(words, first)
        with e.loop(e.least(left, e.number(LANES))) as loop:
            word = b.add(first, loop.index)
            at = b.add(weight, b.mul(word, e.number(STEP)))
            vectors = [e.load(b.add(at, e.number(4 * LANES * v)), _INTS) for v in range(_VECTORS)]
            for r in range(rows):
                asked = e.load(e.onward(b.add(x, b.mul(x_step, e.number(r))), word), I32)
                spread = e.spread([asked], LANES)
                for total, vector in zip(totals[r], vectors, strict=True):
                    b.store(_dot(e, is_float, b.load(total), spread, vector), total)
    for total, place in each(totals, places):
        e.store(b.load(total), place)


def _emit_avx2_rows(e: Emitter, is_float: bool, rows: int, numbers: tuple[Any, ...]) -> None:
    """As many vectors of the panel at a time as registers hold sums of; inputs are taken apart once for all."""
    b, (words, weight, x, x_step, sums, begun, lines, *to_come) = e.builder, numbers
    kind, together = _FLOATS if is_float else _INTS, max(1, _VECTORS // rows)
    parts = _VECTORS // together
    size = 4 * (AVX2_CHUNK + LANES)
    room = e.room(2 * rows * size)
    apart = [[b.add(room, e.number((2 * r + half) * size)) for half in range(2)] for r in range(rows)]
    end = b.sub(words, e.number(LANES))
    blocks = e.parts(words, LANES)
    with e.loop(blocks) as block:
        regular = b.mul(block.index, e.number(LANES))
        first = e.least(regular, end)
        for r, halves in enumerate(apart):
            found = e.load(e.onward(b.add(x, b.mul(x_step, e.number(r))), first), _INTS)
            for half, place in enumerate(halves):
                e.store(_half(e, is_float, found, half, False), e.onward(place, first))
    coming = _Ahead.begin(e, e.parts(lines, parts), *to_come)
    # No more than the tile's share, whatever is rounded up above.
    b.store(e.least(b.load(coming.left), b.mul(lines, blocks)), coming.left)
    with e.loop(e.number(parts)) as part:
        lanes = b.mul(part.index, e.number(together * LINE))
        starts = [b.add(b.add(sums, e.number(r * STEP)), lanes) for r in range(rows)]
        places = [[b.add(start, e.number(v * LINE)) for v in range(together)] for start in starts]
        totals = e.variables(kind, rows, together)
        with b.if_then(b.icmp_signed("!=", begun, e.number(0))):
            for total, place in each(totals, places):
                b.store(e.load(place, kind), total)
        with e.loop(blocks) as block:
            coming.ask()
            begin = b.mul(block.index, e.number(LANES))
            count = e.least(b.sub(words, begin), e.number(LANES))
            # Of int8 the odd numbers after the even ones of all words: both at once are more than registers hold.
            for some in ((0, 1),) if is_float else ((0,), (1,)):
                for word in e.unrolled(begin, count, _UNROLLED):
                    at = b.add(b.add(weight, lanes), b.mul(word, e.number(STEP)))
                    for half in some:
                        vectors = [e.load(b.add(at, e.number(v * LINE)), _INTS) for v in range(together)]
                        ours = [_half(e, is_float, vector, half, True) for vector in vectors]
                        at = e.once_more(at)
                        for of_row, of_inputs in zip(totals, apart, strict=True):
                            spread = e.spread([e.load(e.onward(of_inputs[half], word), kind.element)], LANES)
                            for total, values in zip(of_row, ours, strict=True):
                                b.store(_add_products(e, b.load(total), spread, values), total)
        for total, place in each(totals, places):
            e.store(b.load(total), place)


def _half(e: Emitter, is_float: bool, words: Any, half: int, is_signed: bool) -> Any:
    """Every other number of words in a vector, the even or the odd ones: of two bf16 one, as fp32; of four int8 (or
    uint8) two, as 16 bits."""
    b = e.builder
    if is_float:
        return e.bf16_pairs(words)[half]
    shorts, eight = b.bitcast(words, _PAIRS), e.constant(_PAIRS, 8)
    move = b.ashr if is_signed else b.lshr
    return b.bitcast(move(shorts if half else b.shl(shorts, eight), eight), _INTS)


def _add_products(e: Emitter, total: Any, x: Any, w: Any) -> Any:
    """total + the numbers, or pairs of 16 bits, of x times those of w: sums of pairs hold in 32 bits."""
    if total.type == _FLOATS:
        return e.call(f"fma.v{LANES}f32", _FLOATS, x, w, total)
    pairs = (e.builder.bitcast(v, _PAIRS) for v in (x, w))
    return e.builder.add(total, e.call_by_halves("x86.avx2.pmadd.wd", ir.VectorType(I32, LANES // 2), *pairs))


def _amx(e: Emitter, name: str, *arguments: Any) -> None:
    """An instruction of AMX. Registers are int; of other numbers the first is an address."""
    values = [ir.Constant(ir.IntType(8), a) if isinstance(a, int) else a for a in arguments]
    addresses = [i for i, a in enumerate(arguments) if not isinstance(a, int)][:1]
    for i in addresses:
        values[i] = e.pointer(arguments[i], ir.IntType(8))
    e.call(f"x86.{name}", ir.VoidType(), *values)


def _emit_amx_tile(e: Emitter, dot: str, rows: Any, *numbers: Any) -> None:
    with e.builder.if_else(e.builder.icmp_signed(">", rows, e.number(_SIDE))) as (pair, single):
        with pair:
            for half in (0, 1):
                _emit_registers(e, dot, numbers, half, is_pair=True)
        with single:
            _emit_registers(e, dot, numbers, 0, is_pair=False)


def _emit_registers(e: Emitter, dot: str, numbers: tuple[Any, ...], half: int, is_pair: bool) -> None:
    """16 input rows by a panel, or two times 16 by a half of it. Registers of 16 rows: 0 to 3 are sums, 4 and 5 input
    rows, 6 and 7 words of 16 rows of the panel."""
    b, (words, weight, x, x_step, sums, begun, *to_come) = e.builder, numbers
    step, many = e.number(STEP), e.number(_SIDE)
    start = b.add(sums, e.number(half * 2 * LINE))
    rest = b.add(start, e.number(_SIDE * STEP if is_pair else 2 * LINE))
    places = [start, b.add(start, e.number(LINE)), rest, b.add(rest, e.number(LINE))]
    with b.if_else(b.icmp_signed("!=", begun, e.number(0))) as (again, fresh):
        with again:
            for register, place in enumerate(places):
                _amx(e, "tileloadd64", register, place, step)
        with fresh:
            for register in range(4):
                _amx(e, "tilezero", register)
    steps = b.sdiv(words, many)
    if is_pair:  # each half asks for half of it: memory would rest during the other
        lines, *where, first = to_come
        some = e.parts(lines, 2)
        to_come = [some, *where, b.add(first, b.mul(e.number(half), b.mul(some, steps)))]
    coming = _Ahead.begin(e, *to_come)
    with e.loop(steps) as loop:
        coming.ask()
        at = b.add(weight, b.mul(loop.index, e.number(_SIDE * STEP)))
        mine = b.add(x, b.mul(loop.index, e.number(LINE)))
        _amx(e, "tileloadd64", 4, mine, x_step)
        if is_pair:
            _amx(e, "tileloadd64", 5, b.add(mine, b.mul(many, x_step)), x_step)
        for vector in range(2 if is_pair else _VECTORS):
            register = 6 + vector % 2
            _amx(e, "tileloadd64", register, b.add(at, e.number(LINE * (2 * half + vector))), step)
            _amx(e, dot, vector, 4, register)
            if is_pair:
                _amx(e, dot, vector + 2, 5, register)
    for register, place in enumerate(places):
        _amx(e, "tilestored64", register, place, step)


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
        place = b.add(ahead, b.add(b.mul(of_run, step), b.mul(column, e.number(LINE))))
        left = b.sub(b.mul(run, e.number(PANEL)), first)
        return cls(e, lines, run, step, *(cgutils.alloca_once_value(b, value) for value in (place, column, left)))

    def ask(self) -> None:
        e, b = self.e, self.e.builder
        left = b.load(self.left)
        with e.loop(e.least(left, self.lines)):
            place, column = b.load(self.place), b.add(b.load(self.column), e.number(1))
            e.prefetch(place, _NEXT_CACHE)
            is_last = b.icmp_signed("==", column, self.run)
            back = b.sub(self.step, b.mul(self.run, e.number(LINE)))
            onward = b.add(place, e.number(LINE))
            b.store(b.select(is_last, b.add(onward, back), onward), self.place)
            b.store(b.select(is_last, e.number(0), column), self.column)
        b.store(b.sub(left, self.lines), self.left)


def _emit_lay(e: Emitter, source: Any, step: Any, last: Any, words: Any, out: Any, *to_come: Any) -> None:
    b, coming = e.builder, _Ahead.begin(e, *to_come)
    end = b.sub(words, e.number(LANES))
    blocks = e.parts(words, LANES)
    for group in range(_VECTORS):
        rows = [e.number(group * LANES + i) for i in range(LANES)]
        starts = [b.add(source, b.mul(step, e.least(r, last))) for r in rows]
        with e.loop(blocks) as loop:
            coming.ask()
            regular = b.mul(loop.index, e.number(LANES))
            first = e.least(regular, end)
            at = b.add(b.add(out, b.mul(first, e.number(STEP))), e.number(4 * LANES * group))
            for quarter in range(0, LANES, 4):
                places = [e.onward(e.onward(start, first), e.number(quarter)) for start in starts]
                lines = e.across([_quarters(e, places[i::4]) for i in range(4)])
                for i, line in enumerate(lines, quarter):
                    e.store(line, b.add(at, e.number(i * STEP)))


def _quarters(e: Emitter, places: list[Any]) -> Any:
    """A vector of 4 words each from four addresses: loaded into place, which takes no shuffle."""
    found = None
    for number, place in enumerate(places):
        words = e.load(place, ir.VectorType(I32, 4))
        spread = e.shuffle(words, words, list(range(4)) * 4)
        mask = ir.Constant(ir.VectorType(ir.IntType(1), LANES), [lane // 4 == number for lane in range(LANES)])
        found = spread if found is None else e.builder.select(mask, spread, found)
    return found


def _numbers(e: Emitter, element: Any, at: Any) -> Any:
    """A vector of the numbers at an address, in fp32 (jit.number_at)."""
    return e.load(at, _FLOATS) if element == types.float32 else _widened(e, element, e.load(at, _SHORTS, align=2))


def _widened(e: Emitter, element: Any, kept: Any) -> Any:
    if element == types.float32:
        return kept
    if element == types.int16:
        return e.builder.fpext(e.builder.bitcast(kept, _HALVES), _FLOATS)
    return e.builder.bitcast(e.builder.shl(e.builder.zext(kept, _INTS), e.constant(_INTS, 16)), _FLOATS)


def rounded(e: Emitter, element: Any, value: Any) -> Any:
    """A vector of fp32 as it is kept: fp32, or 16 bits of each (jit.set_number)."""
    b = e.builder
    if element == types.float32:
        return value
    if element == types.int16:
        return b.bitcast(b.fptrunc(value, _HALVES), _SHORTS)
    bits = b.bitcast(value, _INTS)
    odd = b.and_(b.lshr(bits, e.constant(_INTS, 16)), e.constant(_INTS, 1))
    near = b.add(b.add(bits, e.constant(_INTS, 0x7FFF)), odd)
    quiet = b.or_(bits, e.constant(_INTS, 0x400000))
    kept = b.select(b.fcmp_unordered("uno", value, value), quiet, near)
    return b.trunc(b.lshr(kept, e.constant(_INTS, 16)), _SHORTS)


def _emit_finish(is_int: bool, e: Emitter, element: Any, *numbers: Any) -> None:
    """To be called from what is jit_rounded, which gets the same of what is less than a vector."""
    b, (rows, vectors, sums, out, out_step, bias, *flags) = e.builder, numbers
    ends, zero, size = flags[2:], e.constant(_FLOATS, 0.0), e.number(4 // num_planes(element))
    is_added, has_relu, has_bias = (b.icmp_signed("!=", flag, e.number(0)) for flag in (*flags[:2], bias))
    with e.loop(rows) as row, e.loop(vectors) as vector:
        first = b.mul(vector.index, e.number(LANES))
        at = e.onward(b.add(sums, b.mul(row.index, e.number(STEP))), first)
        place = b.add(b.add(out, b.mul(row.index, out_step)), b.mul(first, size))
        there, added = (cgutils.alloca_once_value(b, zero) for _ in range(2))
        with b.if_then(is_added):
            b.store(_numbers(e, element, place), there)
        with b.if_then(has_bias):
            b.store(_numbers(e, element, b.add(bias, b.mul(first, size))), added)
        if is_int:
            total = b.fadd(b.fadd(_rescaled(e, at, row.index, first, *ends), b.load(added)), b.load(there))
        else:
            value = cgutils.alloca_once_value(b, b.fadd(e.load(at, _FLOATS), b.load(there)))
            with b.if_then(b.and_(is_added, has_bias)):
                b.store(_widened(e, element, rounded(e, element, b.load(value))), value)
            total = b.fadd(b.load(value), b.load(added))
        least = b.select(b.fcmp_ordered("<", total, zero), zero, total)
        e.store(rounded(e, element, b.select(has_relu, least, total)), place, align=2)


def _rescaled(e: Emitter, at: Any, row: Any, first: Any, x_scales: Any, ends: Any) -> Any:
    """Sums of codes as int8.scaled has them before bias. ends: scales of the panel's rows, then what is added."""
    b, scales = e.builder, e.onward(ends, first)
    total = b.add(e.load(at, _INTS), e.load(b.add(scales, e.number(STEP)), _INTS))
    x_scale = e.spread([e.load(e.onward(x_scales, row), F32)], LANES)
    return b.fmul(b.fmul(b.sitofp(total, _FLOATS), x_scale), e.load(scales, _FLOATS))


# tile(kind, (rows, words, weight, x, x_step, sums, begun, lines, ahead, step, run, first)): sums (rows, PANEL), which
# products of so many words begin, or are added to; and what is asked for meanwhile (_Ahead).
tile = emitted_by_type(lambda kind: kind, _emit_tile)
# finish_floats(element, (rows, vectors, sums, out, out_step, bias, adds, relu)): so many vectors of a panel's sums of
# each input row are the result; finish_ints: the same with (..., x_scales, ends), see _rescaled.
finish_floats = emitted_by_type(lambda element: element, partial(_emit_finish, False))
finish_ints = emitted_by_type(lambda element: element, partial(_emit_finish, True))
# load_registers(kind, (address,)), release_registers(kind, ()): of AMX; nothing for other kinds.
load_registers = emitted_by_type(_is_amx, lambda e, is_amx, at: _amx(e, "ldtilecfg", at) if is_amx else None)
release_registers = emitted_by_type(_is_amx, lambda e, is_amx: _amx(e, "tilerelease") if is_amx else None)
# lay((source, row_step, last, words, out, lines, ahead, step, run, first)): a panel of rows in order into the blocked
# layout; rows beyond the last one are like it. words: at least LANES.
lay = emitted(_emit_lay)


@jit
def set_registers(kind, registers, rows):  # type: ignore[no-untyped-def]
    """Tell AMX how many input rows its registers hold, where it is not so yet; they are what `_emit_registers` says.

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
