"""The compiled loops of `elementwise` and `hadamard`, and the loop of `packed.unpack_rows`.

A loop makes one pass, while torch operations make several, each into new memory. Tensors are given
by their addresses; a step is in bytes. A loop runs on rows first..end-1.
"""

from __future__ import annotations

import numpy as np

from flexgen_h2o.core.packing import GROUP
from flexgen_h2o.kernels.compiled.codes import HAS_SHUFFLES, packed_numbers
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


@jit
def norm_rows(element, once, width, x, weight, out, x_step, out_step, eps, first, end):  # type: ignore[no-untyped-def]
    """Run `rms_norm`. once: round only after the weight."""
    for row in range(first, end):
        given = x + row * x_step
        normed = out + row * out_step
        total = np.float32(0)
        for i in range(width):
            total += number_at(element, given, i) * number_at(element, given, i)
        scale = np.float32(1) / np.sqrt(total / np.float32(width) + eps)
        for i in range(width):
            number = number_at(element, given, i) * scale
            number = number if once else rounded(element, number)
            set_number(element, normed, i, number * number_at(element, weight, i))


@jit
def silu_rows(element, gate, up, width, first, end):  # type: ignore[no-untyped-def]
    """Run `silu_gated`."""
    size = 4 // planes(element)
    gate = gate + size * first * width
    up = up + size * first * width
    for i in range((end - first) * width):
        x = number_at(element, gate, i)
        active = rounded(element, x / (np.float32(1) + exp2(-x * LOG2_E)))
        set_number(element, gate, i, active * number_at(element, up, i))


@jit
def clamped_gate_rows(element, x, out, width, alpha, limit, first, end):  # type: ignore[no-untyped-def]
    """Run `clamped_gate`. width: numbers per row of out."""
    size = 4 // planes(element)
    one = np.float32(1)
    x = x + size * first * 2 * width
    out = out + size * first * width
    for i in range((end - first) * width):
        gate = number_at(element, x, 2 * i)
        up = number_at(element, x, 2 * i + 1)
        gate = limit if gate > limit else gate
        up = limit if up > limit else (-limit if up < -limit else up)
        active = rounded(element, one / (one + exp2(-rounded(element, gate * alpha) * LOG2_E)))
        set_number(element, out, i, rounded(element, up + one) * rounded(element, gate * active))


@jit
def add_weighted_columns(element, columns, rows, width, x, tokens, weights, out, first, end):  # type: ignore[no-untyped-def]
    """Run `add_weighted` on columns first * columns..end * columns - 1 of all rows."""
    size = 4 // planes(element)
    start = first * columns
    stop = min(end * columns, width)
    for row in range(rows):
        weight = floats_at(weights)[row]
        added = x + size * (row * width + start)
        into = out + size * (ints_at(tokens)[row] * width + start)
        for i in range(stop - start):
            weighed = rounded(element, number_at(element, added, i) * weight)
            set_number(element, into, i, number_at(element, into, i) + weighed)


@jit
def rotate_rows(element, slots, width, pairs, keys, ranks, cos, sin, out, first, end):  # type: ignore[no-untyped-def]
    """Run `Rotation.rotated`. cos, sin: (slots, pairs) fp32.

    Slots without a rank are empty, and `out` keeps its content there.
    """
    size = 4 // planes(element)
    for slot in range(first * slots, end * slots):
        rank = ints_at(ranks)[slot]
        if rank < slots:
            cosines = floats_at(cos + 4 * rank * pairs)
            sines = floats_at(sin + 4 * rank * pairs)
            key = keys + size * slot * width
            turned = out + size * slot * width
            for i in range(pairs):
                a = number_at(element, key, i)
                b = number_at(element, key, pairs + i)
                set_number(element, turned, i, a * cosines[i] - b * sines[i])
                set_number(element, turned, pairs + i, b * cosines[i] + a * sines[i])
            for i in range(2 * pairs, width):
                set_number(element, turned, i, number_at(element, key, i))


@jit
def rotate_heads(element, heads, pairs, token_step, head_step, x, cos, sin, first, end):  # type: ignore[no-untyped-def]
    """Run `Rotation.rotate` on tokens. cos, sin: (tokens, pairs), in the dtype of x.

    Every product and sum is rounded, as in torch operations.
    """
    size = 4 // planes(element)
    for token in range(first, end):
        cosines = cos + size * token * pairs
        sines = sin + size * token * pairs
        for head in range(heads):
            numbers = x + token * token_step + head * head_step
            for i in range(pairs):
                a = number_at(element, numbers, i)
                b = number_at(element, numbers, pairs + i)
                c = number_at(element, cosines, i)
                s = number_at(element, sines, i)
                turned = rounded(element, a * c) - rounded(element, b * s)
                set_number(element, numbers, i, turned)
                turned = rounded(element, b * c) + rounded(element, a * s)
                set_number(element, numbers, pairs + i, turned)


@jit
def hadamard_rows(element, size, blocks, x, step, factor, first, end):  # type: ignore[no-untyped-def]
    """Run `hadamard`. size: numbers per block, a power of two; factor: of each sum."""
    bytes_of_number = 4 // planes(element)
    numbers = np.empty(size, np.float32)
    for row in range(first, end):
        for block in range(blocks):
            place = x + row * step + block * size * bytes_of_number
            for i in range(size):
                numbers[i] = number_at(element, place, i)
            apart = 1
            while apart < size:
                for start in range(0, size, 2 * apart):
                    for i in range(start, start + apart):
                        a = numbers[i]
                        b = numbers[i + apart]
                        numbers[i] = a + b
                        numbers[i + apart] = a - b
                apart *= 2
            for i in range(size):
                set_number(element, place, i, numbers[i] * factor)


_PAIRS = GROUP // 2  # pairs of numbers per group


@jit
def unpack(element, packed, out, row_step, value_bytes, columns, bits, group, first, end):  # type: ignore[no-untyped-def]
    """Run `unpack_rows`. value_bytes: of a row's values; group: values per group.

    Two adjacent numbers are computed at a time. In bf16 they form one 4-byte word, so a vector of
    words is stored directly.
    """
    size = 4 // planes(element)
    for row in range(first, end):
        codes = packed + row * row_step
        ends = words_at(codes + value_bytes)
        done = 0
        if HAS_SHUFFLES and planes(element) == 2 and bits == 4 and group == GROUP:
            done = columns // GROUP
            numbers = (done, out + row * columns * size, codes, codes + value_bytes)
            packed_numbers(element, numbers)
        for g in range(done, (columns + group - 1) // group):
            start = g * group
            count = min(group, columns - start)
            at = codes + start * bits // 8
            into = out + (row * columns + start) * size
            if count == GROUP:  # a constant, so that loops have a known length
                _pairs(element, bits, at, ends[g], into, _PAIRS)
            else:
                _pairs(element, bits, at, ends[g], into, count // 2)
            if count % 2 == 1:
                code = bytes_at(at)[(count - 1) * bits // 8]
                code = code & np.uint8(15) if bits == 4 else code
                set_number(element, into, count - 1, decoded(np.uint32(code), ends[g]))


@jit
def _pairs(element, bits, at, ends, out, pairs):  # type: ignore[no-untyped-def]
    for i in range(pairs):
        if bits == 4:
            code = np.uint32(bytes_at(at)[i])
            low = code & np.uint32(15)
            high = code >> np.uint32(4)
        else:
            code = np.uint32(shorts_at(at)[i])
            low = code & np.uint32(255)
            high = code >> np.uint32(8)
        _store(element, out, i, decoded(low, ends), decoded(high, ends))


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
