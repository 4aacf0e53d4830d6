"""The compiled loops of a sketch (kernels/select.Sketch): made from columns, and multiplied with queries."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from flexgen_h2o.core.packing import SKETCH_BLOCK, SKETCH_CODES
from flexgen_h2o.kernels.compiled.emitter import F32, I16, I32, I64, Emitter, cgutils, emitted
from flexgen_h2o.kernels.jit import floats_at, jit, longs_at, number_at, shorts_at

PICKED = 16  # numbers that are compared together


class SketchAddresses(NamedTuple):
    """A Sketch: blocks, 16-bit numbers of a column, width, the largest whole number of a query, how many of the newest
    columns are read in any case, and the constants of a grid; addresses, and that of each row's count of columns to
    read."""

    blocks: int
    numbers: int
    width: int
    levels: int
    newest: int
    step: float
    least_step: float
    centres: int
    steps: int
    codes: int
    sums: int
    counts: int


class Fed(NamedTuple):
    """Columns that a sketch is fed: addresses of the first key and value, `columns` a row, bytes from one to the next
    and from a row to the next; slots: address of the int64 slot of each row's only column, 0 for slots 0, 1, ..."""

    keys: int
    values: int
    columns: int
    column_step: int
    row_step: int
    slots: int


def _emit_dots(e: Emitter, *numbers: Any) -> None:
    """A lane is a column: 16-bit sums of a query's whole numbers times the codes of a block's columns, as fp32."""
    codes, blocks, per_column, query, out = numbers
    b, kind = e.builder, ir.VectorType(I16, SKETCH_BLOCK)
    ((total,),) = e.variables(kind, 1, 1)
    with e.loop(blocks) as block:
        b.store(e.constant(kind, 0), total)
        with e.loop(per_column) as column:
            number = b.add(b.mul(block.index, per_column), column.index)
            packed = e.load(e.onward(codes, b.mul(number, e.number(SKETCH_BLOCK // 2))), kind, align=2)
            found = b.load(total)
            for i in range(SKETCH_CODES):
                code = b.and_(b.lshr(packed, e.constant(kind, 2 * i)), e.constant(kind, 3))
                place = b.add(query, b.mul(column.index, e.number(2 * SKETCH_CODES)))
                asked = e.load(b.add(place, e.number(2 * i)), I16, align=2)
                found = b.add(found, b.mul(code, e.spread([asked], SKETCH_BLOCK)))
            b.store(found, total)
        wide = b.sext(b.load(total), ir.VectorType(I32, SKETCH_BLOCK))
        to = e.onward(out, b.mul(block.index, e.number(SKETCH_BLOCK)))
        e.store(b.sitofp(wide, ir.VectorType(F32, SKETCH_BLOCK)), to)


def _emit_pick(e: Emitter, numbers: Any, vectors: Any, bits: Any, count: Any, places: Any) -> None:
    """Which of fp32 numbers have smaller bits, as int32: how many, to the int64 at `count`, and, unless the address is
    0, their places, ascending, to `places`."""
    b, kind = e.builder, ir.VectorType(I32, PICKED)
    few = ir.IntType(PICKED)
    limit = e.spread([b.trunc(bits, I32)], PICKED)
    found = cgutils.alloca_once_value(b, e.number(0))
    with e.loop(vectors) as loop:
        first = b.mul(loop.index, e.number(PICKED))
        is_below = b.icmp_signed("<", e.load(e.onward(numbers, first), kind), limit)
        with b.if_then(b.icmp_signed("!=", places, e.number(0))):
            here = b.add(e.spread([b.trunc(first, I32)], PICKED), ir.Constant(kind, list(range(PICKED))))
            place = e.pointer(e.onward(places, b.load(found)), I32)
            e.call(f"masked.compressstore.v{PICKED}i32", ir.VoidType(), here, place, is_below)
        b.store(b.add(b.load(found), b.zext(b.ctpop(b.bitcast(is_below, few)), I64)), found)
    b.store(b.load(found), e.pointer(count, I64))


# sketch_dots((codes, blocks, numbers of a column, query, out)): a row's codes, int16 query, fp32 out.
sketch_dots = emitted(_emit_dots)
# pick((numbers, vectors of them, bits, count, places)): those with smaller bits.
pick = emitted(_emit_pick)


@jit
def fill(element, sketch, fed, first, end):  # type: ignore[no-untyped-def]
    """Grids, codes and sums of the rows first..end-1 from their prompts; codes and sums are 0 before."""
    width = sketch.width
    share = np.float32(1) / np.float32(fed.columns)
    for r in range(first, end):
        centres, steps = floats_at(sketch.centres + 4 * r * width), floats_at(sketch.steps + 4 * r * width)
        start = fed.keys + r * fed.row_step
        for i in range(width):
            centres[i] = steps[i] = 0
        for j in range(fed.columns):
            for i in range(width):
                centres[i] += number_at(element, start + j * fed.column_step, i)
        for i in range(width):
            centres[i] *= share
        for j in range(fed.columns):
            for i in range(width):
                x = number_at(element, start + j * fed.column_step, i) - centres[i]
                steps[i] += x * x
        mean = np.float32(0)
        for i in range(width):
            steps[i] = np.float32(sketch.step) * np.sqrt(steps[i] * share)
            mean += steps[i]
        least = mean / np.float32(width) * np.float32(sketch.least_step)
        for i in range(width):
            steps[i] = max(steps[i], least) if max(steps[i], least) > 0 else np.float32(1)
        for j in range(fed.columns):
            _add_column(element, sketch, r, fed, j, j)


@jit
def add(element, sketch, fed, first, end):  # type: ignore[no-untyped-def]
    """The only column of each of the rows first..end-1."""
    for r in range(first, end):
        _add_column(element, sketch, r, fed, np.int64(0), longs_at(fed.slots)[r])


@jit
def _add_column(element, sketch, r, fed, j, slot):  # type: ignore[no-untyped-def]
    """Column j of row r, which is in a slot."""
    width, step = sketch.width, j * fed.column_step + r * fed.row_step
    centres, steps = floats_at(sketch.centres + 4 * r * width), floats_at(sketch.steps + 4 * r * width)
    block = r * sketch.blocks + slot // SKETCH_BLOCK
    codes = shorts_at(sketch.codes + 2 * (block * sketch.numbers * SKETCH_BLOCK + slot % SKETCH_BLOCK))
    for n in range(sketch.numbers):
        packed = np.uint32(0)
        for i in range(min(SKETCH_CODES, width - n * SKETCH_CODES)):
            channel = n * SKETCH_CODES + i
            x = (number_at(element, fed.keys + step, channel) - centres[channel]) / steps[channel] + np.float32(2)
            code = np.uint32(np.int32(min(x, np.float32(3)))) if x > 0 else np.uint32(0)  # NaN is 0
            packed |= code << np.uint32(2 * i)
        codes[n * SKETCH_BLOCK] = np.uint16(packed)
    sums = floats_at(sketch.sums + 4 * block * width)
    for i in range(width):
        sums[i] += number_at(element, fed.values + step, i)
