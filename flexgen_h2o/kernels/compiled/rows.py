"""The compiled loops of `elementwise`, and the loop of `packed.unpack_rows`.

A loop makes one pass, while torch operations make several, each into new memory.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexgen_h2o.core.packing import GROUP
from flexgen_h2o.kernels.compiled.numbers import HAS_SHUFFLES, packed_numbers
from flexgen_h2o.kernels.jit import (
    HIGH,
    LOG2_E,
    bytes_at,
    decoded,
    exp2,
    float_to_bits,
    floats_at,
    ints_at,
    jit,
    number_at,
    planes,
    rounded,
    set_number,
    shorts_at,
    words_at,
)


class Norm(NamedTuple):
    """Hold the arguments of `norm_rows`: x, weight and out are addresses."""

    once: bool  # round only after the weight, as in `rms_norm`
    width: int
    x: int
    x_step: int  # bytes from a row of x to the next
    weight: int
    out: int
    out_step: int  # bytes from a row of out to the next


@jit
def norm_rows(element, job, eps, first, end):  # type: ignore[no-untyped-def]
    """Run `rms_norm` on rows first..end-1."""
    for row in range(first, end):
        x = job.x + row * job.x_step
        out = job.out + row * job.out_step
        total = np.float32(0)
        for i in range(job.width):
            total += number_at(element, x, i) * number_at(element, x, i)
        scale = np.float32(1) / np.sqrt(total / np.float32(job.width) + eps)
        for i in range(job.width):
            normed = number_at(element, x, i) * scale
            normed = normed if job.once else rounded(element, normed)
            set_number(element, out, i, normed * number_at(element, job.weight, i))


@jit
def silu_rows(element, gate, up, width, first, end):  # type: ignore[no-untyped-def]
    """Set gate = silu(gate) x up for rows first..end-1 at the addresses `gate` and `up`."""
    size = 4 // planes(element)
    gate = gate + size * first * width
    up = up + size * first * width
    for i in range((end - first) * width):
        x = number_at(element, gate, i)
        active = rounded(element, x / (np.float32(1) + exp2(-x * LOG2_E)))
        set_number(element, gate, i, active * number_at(element, up, i))


class Gate(NamedTuple):
    """Hold the arguments of `clamped_gate_rows`."""

    width: int  # numbers per row of out
    x: int  # address; rows have 2 x width numbers
    out: int  # address
    alpha: np.float32
    limit: np.float32


@jit
def clamped_gate_rows(element, job, first, end):  # type: ignore[no-untyped-def]
    """Run `clamped_gate` on rows first..end-1."""
    size = 4 // planes(element)
    one = np.float32(1)
    width = job.width
    alpha = job.alpha
    limit = job.limit
    x = job.x + size * first * 2 * width
    out = job.out + size * first * width
    for i in range((end - first) * width):
        gate = number_at(element, x, 2 * i)
        up = number_at(element, x, 2 * i + 1)
        gate = limit if gate > limit else gate
        up = limit if up > limit else (-limit if up < -limit else up)
        active = rounded(element, one / (one + exp2(-rounded(element, gate * alpha) * LOG2_E)))
        set_number(element, out, i, rounded(element, up + one) * rounded(element, gate * active))


class Weighted(NamedTuple):
    """Hold the arguments of `add_weighted_columns`."""

    rows: int
    width: int
    x: int  # address of (rows, width)
    tokens: int  # address of (rows,) int32
    weights: int  # address of (rows,) fp32
    out: int  # address of (tokens, width)


COLUMNS = 64  # columns that a thread adds at a time


@jit
def add_weighted_columns(element, job, first, end):  # type: ignore[no-untyped-def]
    """Run `add_weighted` on columns first * COLUMNS..end * COLUMNS - 1."""
    size = 4 // planes(element)
    start = first * COLUMNS
    stop = min(end * COLUMNS, job.width)
    tokens = ints_at(job.tokens)
    weights = floats_at(job.weights)
    for row in range(job.rows):
        x = job.x + size * (row * job.width + start)
        out = job.out + size * (tokens[row] * job.width + start)
        for i in range(stop - start):
            weighed = rounded(element, number_at(element, x, i) * weights[row])
            set_number(element, out, i, number_at(element, out, i) + weighed)


class RotaryJob(NamedTuple):
    """Hold the arguments of `rotate_rows`."""

    slots: int
    width: int
    pairs: int
    keys: int  # address of (rows, slots, width)
    ranks: int  # address of (rows, slots) int32
    cos: int  # address of (slots, pairs) fp32
    sin: int  # address of (slots, pairs) fp32
    out: int  # address of (rows, slots, width)


@jit
def rotate_rows(element, job, first, end):  # type: ignore[no-untyped-def]
    """Rotate the keys of rows first..end-1.

    Slots without a rank are empty, and `out` keeps its content there.
    """
    size = 4 // planes(element)
    for slot in range(first * job.slots, end * job.slots):
        rank = ints_at(job.ranks)[slot]
        if rank < job.slots:
            cos = floats_at(job.cos + 4 * rank * job.pairs)
            sin = floats_at(job.sin + 4 * rank * job.pairs)
            key = job.keys + size * slot * job.width
            out = job.out + size * slot * job.width
            for i in range(job.pairs):
                a = number_at(element, key, i)
                b = number_at(element, key, job.pairs + i)
                set_number(element, out, i, a * cos[i] - b * sin[i])
                set_number(element, out, job.pairs + i, b * cos[i] + a * sin[i])
            for i in range(2 * job.pairs, job.width):
                set_number(element, out, i, number_at(element, key, i))


class RotateHeadsJob(NamedTuple):
    """Hold the arguments of `rotate_heads`."""

    heads: int
    pairs: int
    x: int  # address of (tokens, heads, width)
    token_step: int  # bytes from a token to the next
    head_step: int  # bytes from a head to the next
    cos: int  # address of (tokens, pairs), in the dtype of x
    sin: int  # address of (tokens, pairs), in the dtype of x


@jit
def rotate_heads(element, job, first, end):  # type: ignore[no-untyped-def]
    """Rotate the heads of tokens first..end-1 in place.

    Every product and sum is rounded, as in torch operations.
    """
    size = 4 // planes(element)
    for token in range(first, end):
        cos = job.cos + size * token * job.pairs
        sin = job.sin + size * token * job.pairs
        for head in range(job.heads):
            x = job.x + token * job.token_step + head * job.head_step
            for i in range(job.pairs):
                a = number_at(element, x, i)
                b = number_at(element, x, job.pairs + i)
                c = number_at(element, cos, i)
                s = number_at(element, sin, i)
                set_number(element, x, i, rounded(element, a * c) - rounded(element, b * s))
                set_number(
                    element, x, job.pairs + i, rounded(element, b * c) + rounded(element, a * s)
                )


class Hadamard(NamedTuple):
    """Hold the arguments of `hadamard_rows`."""

    size: int  # numbers per block, a power of two
    blocks: int  # blocks per row
    x: int  # address
    step: int  # bytes from a row to the next
    factor: np.float32  # factor of each sum


@jit
def hadamard_rows(element, job, first, end):  # type: ignore[no-untyped-def]
    """Run `hadamard` on rows first..end-1, in place."""
    size = job.size
    bytes_of_number = 4 // planes(element)
    numbers = np.empty(size, np.float32)
    for row in range(first, end):
        for block in range(job.blocks):
            x = job.x + row * job.step + block * size * bytes_of_number
            for i in range(size):
                numbers[i] = number_at(element, x, i)
            step = 1
            while step < size:
                for start in range(0, size, 2 * step):
                    for i in range(start, start + step):
                        a = numbers[i]
                        b = numbers[i + step]
                        numbers[i] = a + b
                        numbers[i + step] = a - b
                step *= 2
            for i in range(size):
                set_number(element, x, i, numbers[i] * job.factor)


_PAIRS = GROUP // 2  # pairs of numbers per group


class UnpackJob(NamedTuple):
    """Hold the arguments of `unpack`."""

    packed: int  # address of the first packed row
    row_bytes: int  # bytes per packed row
    value_bytes: int  # bytes of a row's values
    out: int  # address of the first row of out
    columns: int
    bits: int
    group: int  # values per group (packing.SlotPacking)


@jit
def unpack(element, job, first, end):  # type: ignore[no-untyped-def]
    """Unpack rows first..end-1 to bf16 or fp32.

    Two adjacent numbers are computed at a time. In bf16 they form one 4-byte word, so a vector of
    words is stored directly.
    """
    size = 4 // planes(element)
    for row in range(first, end):
        codes = job.packed + row * job.row_bytes
        ends = words_at(codes + job.value_bytes)
        done = 0
        if HAS_SHUFFLES and planes(element) == 2 and job.bits == 4 and job.group == GROUP:
            done = job.columns // GROUP
            packed_numbers(
                element, (done, job.out + row * job.columns * size, codes, codes + job.value_bytes)
            )
        for g in range(done, (job.columns + job.group - 1) // job.group):
            start = g * job.group
            count = min(job.group, job.columns - start)
            at = codes + start * job.bits // 8
            out = job.out + (row * job.columns + start) * size
            if count == GROUP:  # a constant, so that loops have a known length
                _pairs(element, job.bits, at, ends[g], out, _PAIRS)
            else:
                _pairs(element, job.bits, at, ends[g], out, count // 2)
            if count % 2 == 1:
                code = bytes_at(at)[(count - 1) * job.bits // 8]
                code = code & np.uint8(15) if job.bits == 4 else code
                set_number(element, out, count - 1, decoded(np.uint32(code), ends[g]))


@jit
def _pairs(element, bits, at, ends, out, pairs):  # type: ignore[no-untyped-def]
    if bits == 4:
        _pairs_of_4(element, at, ends, out, pairs)
    else:
        _pairs_of_8(element, at, ends, out, pairs)


@jit
def _pairs_of_4(element, at, ends, out, pairs):  # type: ignore[no-untyped-def]
    codes = bytes_at(at)
    for i in range(pairs):
        code = np.uint32(codes[i])
        _store(
            element,
            out,
            i,
            decoded(code & np.uint32(15), ends),
            decoded(code >> np.uint32(4), ends),
        )


@jit
def _pairs_of_8(element, at, ends, out, pairs):  # type: ignore[no-untyped-def]
    codes = shorts_at(at)
    for i in range(pairs):
        code = np.uint32(codes[i])
        _store(
            element,
            out,
            i,
            decoded(code & np.uint32(255), ends),
            decoded(code >> np.uint32(8), ends),
        )


@jit
def _store(element, out, i, low, high):  # type: ignore[no-untyped-def]
    if planes(element) == 2:
        words_at(out)[i] = (_finite_to_bf16(low) >> np.uint32(16)) | (_finite_to_bf16(high) & HIGH)
    else:
        floats_at(out)[2 * i] = low
        floats_at(out)[2 * i + 1] = high


@jit
def _finite_to_bf16(value):  # type: ignore[no-untyped-def]
    """Round to bf16 as `to_bf16` does, for values that are not NaN, in half the instructions.

    Packed weights are finite.
    """
    bits = np.uint32(float_to_bits(value))
    return np.uint32(bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
