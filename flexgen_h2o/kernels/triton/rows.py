"""Kernels on rows.

They unpack weights, and compute RMS norms, gates, weighted sums, rotary embeddings and Hadamard
transforms. Each is one launch.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def unpack(
    packed, out, row_words, columns, value_words, group, BITS: tl.constexpr, BLOCK: tl.constexpr
):
    """Unpack BLOCK columns of a row, as in `unpack_rows`. packed: int32 words of (n, row words)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    per_word: tl.constexpr = 32 // BITS
    words = packed + row * row_words
    word = tl.load(words + column // per_word, mask=inside, other=0)
    code = (word >> (column % per_word * BITS)) & ((1 << BITS) - 1)
    end = tl.load(words + value_words + column // group, mask=inside, other=0)
    scale, least = scale_and_least(end)
    value = code.to(tl.float32) * scale + least
    tl.store(out + row * columns + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def scale_and_least(word):
    """Return scale and least value of a group's word in fp32 (core/packing.SlotPacking)."""
    return (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def rms_norm(x, weight, out, x_row, out_row, width, eps, ONCE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute a row of `rms_norm`; BLOCK is at least its width."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    kind = out.dtype.element_ty
    wide = tl.load(x + row * x_row + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    wide = wide * (1 / tl.sqrt_rn(tl.sum(wide * wide, 0) / width + eps))
    if not ONCE:
        wide = wide.to(kind).to(tl.float32)
    tl.store(out + row * out_row + column, (wide * factor).to(kind), mask=inside)


@triton.jit
def silu_gated(gate, up, count, BLOCK: tl.constexpr):
    """Compute BLOCK numbers of `silu_gated`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    kind = gate.dtype.element_ty
    x = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    activated = (x / (1 + tl.exp(-x))).to(kind).to(tl.float32)
    other = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(gate + at, (activated * other).to(kind), mask=inside)


@triton.jit(do_not_specialize=("rows",), do_not_specialize_on_alignment=("tokens", "weights"))
def add_weighted(x, tokens, weights, out, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute BLOCK columns of `add_weighted` for the token of one row.

    If a token has several rows, the program of its first row adds all of them, in order.
    """
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(tokens + row)
    place = tl.arange(0, ROWS)
    kind = out.dtype.element_ty
    before = 0
    for start in range(0, row, ROWS):
        at = start + place
        before += tl.sum(
            ((tl.load(tokens + at, mask=at < row, other=-1) == token) & (at < row)).to(tl.int32), 0
        )
    stores = (column < width) & (before == 0)
    into = out + token.to(tl.int64) * width + column
    mixed = tl.load(into, mask=stores, other=0.0)
    for start in range(row, tl.where(before == 0, rows, 0), ROWS):
        at = start + place
        same = (tl.load(tokens + at, mask=at < rows, other=-1) == token) & (at < rows)
        last = start - 1
        for _ in range(tl.sum(same.to(tl.int32), 0)):
            last = tl.min(tl.where(same & (at > last), at, rows), 0)
            added = tl.load(x + last.to(tl.int64) * width + column, mask=stores, other=0.0).to(
                tl.float32
            )
            added = (added * tl.load(weights + last)).to(kind).to(tl.float32)
            mixed = (mixed.to(tl.float32) + added).to(kind)
    tl.store(into, mixed, mask=stores)


@triton.jit
def clamped_gate(x, out, alpha, limit, count, BLOCK: tl.constexpr):
    """Compute BLOCK numbers of `clamped_gate`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    kind = out.dtype.element_ty
    gate = tl.minimum(tl.load(x + 2 * at, mask=inside, other=0.0).to(tl.float32), limit)
    up = tl.load(x + 2 * at + 1, mask=inside, other=0.0).to(tl.float32)
    up = _rounded(tl.minimum(tl.maximum(up, -limit), limit) + 1, kind)
    share = _rounded(1 / (1 + tl.exp(-_rounded(gate * alpha, kind))), kind)
    tl.store(out + at, (up * _rounded(gate * share, kind)).to(kind), mask=inside)


@triton.jit
def rotate(
    q,
    k,
    positions,
    frequencies,
    scaling,
    q_token,
    k_token,
    heads,
    width,
    pairs,
    BLOCK: tl.constexpr,
):
    """Rotate a head of a token: the first `heads` heads are q's, the others k's.

    Angles are in fp32, products in the dtype of q.
    """
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    pair = tl.arange(0, BLOCK)
    inside = pair < pairs
    if head < heads:
        start = q + token * q_token + head * width
    else:
        start = k + token * k_token + (head - heads) * width
    kind = q.dtype.element_ty
    angle = tl.load(positions + token).to(tl.float32) * tl.load(
        frequencies + pair, mask=inside, other=0.0
    )
    cos = _rounded(tl.cos(angle) * scaling, kind)
    sin = _rounded(tl.sin(angle) * scaling, kind)
    first = tl.load(start + pair, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(start + pairs + pair, mask=inside, other=0.0).to(tl.float32)
    turned = _rounded(first * cos, kind) - _rounded(second * sin, kind)
    tl.store(start + pair, turned.to(kind), mask=inside)
    turned = _rounded(second * cos, kind) + _rounded(first * sin, kind)
    tl.store(start + pairs + pair, turned.to(kind), mask=inside)


@triton.jit
def hadamard(x, x_token, factor, SIZE: tl.constexpr):
    """Transform a block of SIZE numbers of a token in place.

    Number i becomes the sum of all numbers j, where j is subtracted if i & j has an odd number of
    bits.
    """
    start = x + tl.program_id(0).to(tl.int64) * x_token + tl.program_id(1) * SIZE
    place = tl.arange(0, SIZE)
    odd = place[:, None] & place[None, :]
    odd = odd ^ (odd >> 8)
    odd = odd ^ (odd >> 4)
    odd = odd ^ (odd >> 2)
    odd = (odd ^ (odd >> 1)) & 1
    given = tl.load(start + place).to(tl.float32)[None, :]
    mixed = tl.sum(tl.where(odd == 1, -given, given), 1) * factor
    tl.store(start + place, mixed.to(x.dtype.element_ty))


@triton.jit
def _rounded(x, kind: tl.constexpr):
    """Return x rounded to the dtype `kind`, in fp32."""
    return x.to(kind).to(tl.float32)
