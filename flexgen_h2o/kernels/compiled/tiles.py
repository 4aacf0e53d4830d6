"""Vector code for the loop of products: tiles of sums, and panels in order to the blocked layout.

A tile is some input rows by a panel (compiled/products.py). AVX-512 and AMX multiply words, AVX2
multiplies numbers. Meanwhile the code prefetches the next weights. Otherwise memory would be idle
while cores multiply.
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
from flexgen_h2o.kernels.compiled.emitter import (
    F32,
    I16,
    I32,
    I64,
    Emitter,
    cgutils,
    each,
    emitted,
    emitted_by_type,
)
from flexgen_h2o.kernels.jit import bytes_at, jit, num_planes, shorts_at

LANES = 16
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
_INTS = ir.VectorType(I32, LANES)
_FLOATS = ir.VectorType(F32, LANES)
_SHORTS = ir.VectorType(I16, LANES)
_HALVES = ir.VectorType(ir.HalfType(), LANES)
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


def _known(meaning: Callable[[Any], bool]) -> Any:
    """Return an intrinsic that returns `meaning` of a number's type, known at compile time."""

    @intrinsic
    def run(_context: Any, kind: Any) -> Any:
        constant = ir.Constant(ir.IntType(1), meaning(kind))
        return types.boolean(kind), lambda *_: constant

    return run


is_amx = _known(_is_amx)
is_avx2 = _known(_is_avx2)
is_float = _known(_is_float)


@jit
def most_rows(kind):  # type: ignore[no-untyped-def]
    """Return the maximal number of input rows of a tile."""
    return 2 * _SIDE if is_amx(kind) else _MAX_ROWS


def _dot(e: Emitter, is_float: bool, total: Any, x: Any, w: Any) -> Any:
    name = "avx512bf16.dpbf16ps.512" if is_float else "avx512.vpdpbusd.512"
    return e.call(f"x86.{name}", total.type, total, x, w)


def _emit_tile(e: Emitter, kind: Any, *numbers: Any) -> None:
    if _is_amx(kind):
        _emit_amx_tile(e, "tdpbf16ps" if _is_float(kind) else "tdpbusd", *numbers)
    else:
        _emit_vector_tile(
            e, _emit_avx2_rows if _is_avx2(kind) else _emit_rows, _is_float(kind), *numbers
        )


def _emit_vector_tile(
    e: Emitter, emit: Callable[..., None], is_float: bool, rows: Any, *numbers: Any
) -> None:
    """Emit the code of a tile of each size, of which one runs."""
    b = e.builder
    end = b.append_basic_block("end")
    choice = b.switch(rows, end)
    for count in range(1, _MAX_ROWS + 1):
        block = b.append_basic_block(f"tile{count}")
        choice.add_case(ir.Constant(I64, count), block)
        b.position_at_end(block)
        emit(e, is_float, count, numbers)
        b.branch(end)
    b.position_at_end(end)


def _emit_rows(e: Emitter, is_float: bool, rows: int, numbers: tuple[Any, ...]) -> None:
    b = e.builder
    words, weight, x, x_step, sums, begun, *to_come = numbers
    kind = _FLOATS if is_float else _INTS
    totals = e.variables(kind, rows, _VECTORS)
    places = [
        [b.add(sums, e.number(r * STEP + 4 * LANES * v)) for v in range(_VECTORS)]
        for r in range(rows)
    ]
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
    """Emit a tile for AVX2: as many vectors of the panel at a time as registers hold sums.

    Inputs are split once for all vectors.
    """
    b = e.builder
    words, weight, x, x_step, sums, begun, lines, *to_come = numbers
    kind = _FLOATS if is_float else _INTS
    together = max(1, _VECTORS // rows)
    parts = _VECTORS // together
    size = 4 * (AVX2_CHUNK + LANES)
    room = e.room(2 * rows * size)
    apart = [
        [b.add(room, e.number((2 * r + half) * size)) for half in range(2)] for r in range(rows)
    ]
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
    # Rounding up above must not exceed the tile's share.
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
            # In int8, odd numbers come after the even ones of all words, because both at once
            # exceed the registers.
            for some in ((0, 1),) if is_float else ((0,), (1,)):
                for word in e.unrolled(begin, count, _UNROLLED):
                    at = b.add(b.add(weight, lanes), b.mul(word, e.number(STEP)))
                    for half in some:
                        vectors = [
                            e.load(b.add(at, e.number(v * LINE)), _INTS) for v in range(together)
                        ]
                        ours = [_half(e, is_float, vector, half, True) for vector in vectors]
                        at = e.once_more(at)
                        for of_row, of_inputs in zip(totals, apart, strict=True):
                            spread = e.spread(
                                [e.load(e.onward(of_inputs[half], word), kind.element)], LANES
                            )
                            for total, values in zip(of_row, ours, strict=True):
                                b.store(_add_products(e, b.load(total), spread, values), total)
        for total, place in each(totals, places):
            e.store(b.load(total), place)


def _half(e: Emitter, is_float: bool, words: Any, half: int, is_signed: bool) -> Any:
    """Return the even or the odd numbers of words in a vector.

    Of two bf16 it returns one, as fp32. Of four int8 (or uint8) it returns two, as 16 bits.
    """
    b = e.builder
    if is_float:
        return e.bf16_pairs(words)[half]
    shorts = b.bitcast(words, _PAIRS)
    eight = e.constant(_PAIRS, 8)
    move = b.ashr if is_signed else b.lshr
    return b.bitcast(move(shorts if half else b.shl(shorts, eight), eight), _INTS)


def _add_products(e: Emitter, total: Any, x: Any, w: Any) -> Any:
    """Return total + the products of x and w, as numbers, or as pairs of 16 bits.

    Sums of pairs fit 32 bits.
    """
    if total.type == _FLOATS:
        return e.call(f"fma.v{LANES}f32", _FLOATS, x, w, total)
    pairs = (e.builder.bitcast(v, _PAIRS) for v in (x, w))
    return e.builder.add(
        total, e.call_by_halves("x86.avx2.pmadd.wd", ir.VectorType(I32, LANES // 2), *pairs)
    )


def _amx(e: Emitter, name: str, *arguments: Any) -> None:
    """Emit an AMX instruction.

    Registers are given as int. The first argument that is no int is an address.
    """
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


def _emit_registers(
    e: Emitter, dot: str, numbers: tuple[Any, ...], half: int, is_pair: bool
) -> None:
    """Emit 16 input rows by a panel, or two times 16 rows by half of it.

    Registers of 16 rows: 0 to 3 are sums, 4 and 5 input rows, 6 and 7 words of 16 rows of the
    panel.
    """
    b = e.builder
    words, weight, x, x_step, sums, begun, *to_come = numbers
    step = e.number(STEP)
    many = e.number(_SIDE)
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
    # each half prefetches its half; otherwise memory would be idle during the other half
    if is_pair:
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
    """Emit the prefetch of lines.

    There are PANEL runs of `run` lines, `step` bytes apart. The first line to prefetch is `first`.
    """

    e: Emitter
    lines: Any  # lines that are prefetched at a time
    run: Any
    step: Any
    place: Any  # variable: address of the next line
    column: Any  # variable: index of the next line in its run
    left: Any  # variable: number of lines from the next line on

    @classmethod
    def begin(cls, e: Emitter, lines: Any, ahead: Any, step: Any, run: Any, first: Any) -> _Ahead:
        b = e.builder
        some = b.select(b.icmp_signed(">", run, e.number(0)), run, e.number(1))
        of_run = b.sdiv(first, some)
        column = b.sub(first, b.mul(of_run, some))
        place = b.add(ahead, b.add(b.mul(of_run, step), b.mul(column, e.number(LINE))))
        left = b.sub(b.mul(run, e.number(PANEL)), first)
        return cls(
            e,
            lines,
            run,
            step,
            *(cgutils.alloca_once_value(b, value) for value in (place, column, left)),
        )

    def ask(self) -> None:
        e = self.e
        b = self.e.builder
        left = b.load(self.left)
        with e.loop(e.least(left, self.lines)):
            place = b.load(self.place)
            column = b.add(b.load(self.column), e.number(1))
            e.prefetch(place, _NEXT_CACHE)
            is_last = b.icmp_signed("==", column, self.run)
            back = b.sub(self.step, b.mul(self.run, e.number(LINE)))
            onward = b.add(place, e.number(LINE))
            b.store(b.select(is_last, b.add(onward, back), onward), self.place)
            b.store(b.select(is_last, e.number(0), column), self.column)
        b.store(b.sub(left, self.lines), self.left)


def _emit_lay(
    e: Emitter, source: Any, step: Any, last: Any, words: Any, out: Any, *to_come: Any
) -> None:
    b = e.builder
    coming = _Ahead.begin(e, *to_come)
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
    """Return a vector of 4 words from each of four addresses.

    Words are loaded into their place in the vector, so no shuffle instruction is needed.
    """
    found = None
    for number, place in enumerate(places):
        words = e.load(place, ir.VectorType(I32, 4))
        spread = e.shuffle(words, words, list(range(4)) * 4)
        mask = ir.Constant(
            ir.VectorType(ir.IntType(1), LANES), [lane // 4 == number for lane in range(LANES)]
        )
        found = spread if found is None else e.builder.select(mask, spread, found)
    return found


def _numbers(e: Emitter, element: Any, at: Any) -> Any:
    """Load a vector of numbers at an address, in fp32 (as jit.number_at)."""
    return (
        e.load(at, _FLOATS)
        if element == types.float32
        else _widened(e, element, e.load(at, _SHORTS, align=2))
    )


def _widened(e: Emitter, element: Any, kept: Any) -> Any:
    if element == types.float32:
        return kept
    if element == types.int16:
        return e.builder.fpext(e.builder.bitcast(kept, _HALVES), _FLOATS)
    return e.builder.bitcast(
        e.builder.shl(e.builder.zext(kept, _INTS), e.constant(_INTS, 16)), _FLOATS
    )


def rounded(e: Emitter, element: Any, value: Any) -> Any:
    """Round a vector of fp32 to its stored form: fp32, or 16 bits each (as jit.set_number)."""
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
    """Emit the conversion of sums to results.

    Call it from a jit_rounded function, which computes the same for what is less than a vector.
    """
    b = e.builder
    rows, vectors, sums, out, out_step, bias, *flags = numbers
    ends = flags[2:]
    zero = e.constant(_FLOATS, 0.0)
    size = e.number(4 // num_planes(element))
    is_added, has_relu, has_bias = (
        b.icmp_signed("!=", flag, e.number(0)) for flag in (*flags[:2], bias)
    )
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
            total = b.fadd(
                b.fadd(_rescaled(e, at, row.index, first, *ends), b.load(added)), b.load(there)
            )
        else:
            value = cgutils.alloca_once_value(b, b.fadd(e.load(at, _FLOATS), b.load(there)))
            with b.if_then(b.and_(is_added, has_bias)):
                b.store(_widened(e, element, rounded(e, element, b.load(value))), value)
            total = b.fadd(b.load(value), b.load(added))
        least = b.select(b.fcmp_ordered("<", total, zero), zero, total)
        e.store(rounded(e, element, b.select(has_relu, least, total)), place, align=2)


def _rescaled(e: Emitter, at: Any, row: Any, first: Any, x_scales: Any, ends: Any) -> Any:
    """Return sums of codes as int8.scaled has them before the bias.

    ends: address of the scales of the panel's rows, followed by what is added to sums.
    """
    b = e.builder
    scales = e.onward(ends, first)
    total = b.add(e.load(at, _INTS), e.load(b.add(scales, e.number(STEP)), _INTS))
    x_scale = e.spread([e.load(e.onward(x_scales, row), F32)], LANES)
    return b.fmul(b.fmul(b.sitofp(total, _FLOATS), x_scale), e.load(scales, _FLOATS))


# tile(kind, (rows, words, weight, x, x_step, sums, begun, lines, ahead, step, run, first)): compute
# sums (rows, PANEL) over `words` words; add to them if begun. The last five arguments are what is
# prefetched (_Ahead).
tile = emitted_by_type(lambda kind: kind, _emit_tile)
# finish_floats(element, (rows, vectors, sums, out, out_step, bias, adds, relu)): convert `vectors`
# vectors of a panel's sums of each input row to results. finish_ints: the same with (..., x_scales,
# ends), see _rescaled.
finish_floats = emitted_by_type(lambda element: element, partial(_emit_finish, False))
finish_ints = emitted_by_type(lambda element: element, partial(_emit_finish, True))
# load_registers(kind, (address,)), release_registers(kind, ()): configure or release AMX; they do
# nothing for other kinds.
load_registers = emitted_by_type(
    _is_amx, lambda e, is_amx, at: _amx(e, "ldtilecfg", at) if is_amx else None
)
release_registers = emitted_by_type(
    _is_amx, lambda e, is_amx: _amx(e, "tilerelease") if is_amx else None
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
