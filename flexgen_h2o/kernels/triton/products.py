"""Products of few input rows; weights in few bits are decoded in registers."""

from __future__ import annotations

import triton
import triton.language as tl

FIELDS = tl.constexpr(6)  # of a product in `table`


@triton.jit(do_not_specialize=("tokens",))
def few_rows(
    x, words, group_params, bias, out, table, tokens, rows, columns, x_row, words_row, params_row, out_row, group,
    BITS: tl.constexpr, MX: tl.constexpr, BIASED: tl.constexpr, ADDS: tl.constexpr, TABLE: tl.constexpr,
    ALIGNED: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """All tokens with ROWS rows of the weight, WORDS words of each at a time. BITS: of a column; 0: words are numbers
    of x's dtype. group_params: of a group of columns its scale and least value in a word, or, MX, its exponent in a
    byte. Sums are in fp32; weights are rounded to x's dtype first.

    TABLE: of several products, each of which has FIELDS int64 in `table`: its tokens, and how many numbers behind x,
    words, group_params, bias and out its own begin; ALIGNED: those of words, in 16s.
    """
    per_word: tl.constexpr = 32 // BITS if BITS else 1
    if TABLE:
        own = table + tl.program_id(1) * FIELDS
        tokens = tl.load(own)
        x += tl.load(own + 1)
        first_word = tl.load(own + 2)
        if ALIGNED:
            first_word = tl.multiple_of(first_word, 16)
        words += first_word
        group_params += tl.load(own + 3)
        bias += tl.load(own + 4)
        out += tl.load(own + 5)
    token = tl.arange(0, TOKENS)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    for first in range(0, columns, WORDS * per_word):
        column = first + tl.arange(0, WORDS) * per_word  # the first of each word
        loads = (row < rows)[:, None] & (column < columns)[None, :]
        word = tl.load(words + row[:, None] * words_row + (column // per_word)[None, :], mask=loads, other=0)
        if BITS == 0:
            tile = word
        else:
            end = tl.load(group_params + row[:, None] * params_row + (column // group)[None, :], mask=loads, other=0)
            code = (word[:, :, None] >> (tl.arange(0, per_word) * BITS)[None, None, :]) & ((1 << BITS) - 1)
            if MX:
                weight = twice_e2m1(code) * half_power(end)[:, :, None]
            else:
                scale, least = (end << 16).to(tl.float32, bitcast=True), (end & -65536).to(tl.float32, bitcast=True)
                weight = code.to(tl.float32) * scale[:, :, None] + least[:, :, None]
            tile = tl.reshape(weight.to(x.dtype.element_ty), [ROWS, WORDS * per_word])
        each = first + tl.arange(0, WORDS * per_word)
        wanted = (token < tokens)[:, None] & (each < columns)[None, :]
        inputs = tl.load(x + token[:, None] * x_row + each[None, :], mask=wanted, other=0.0)
        total += tl.dot(inputs, tl.trans(tile), input_precision="ieee")
    if BIASED:
        total += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[None, :]
    at = out + token.to(tl.int64)[:, None] * out_row + row[None, :]
    asked = (token < tokens)[:, None] & (row < rows)[None, :]
    if ADDS:
        total += tl.load(at, mask=asked, other=0.0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=asked)


@triton.jit
def unpack_mxfp4(words, group_params, out, words_row, out_row, columns, BLOCK: tl.constexpr):
    """A row of `quantised.unpack_mxfp4`, BLOCK columns of it."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    word = tl.load(words + row * words_row + column // 8, mask=inside, other=0)
    end = tl.load(group_params + row * (columns // 32) + column // 32, mask=inside, other=0)
    value = twice_e2m1((word >> (column % 8 * 4)) & 15) * half_power(end)
    tl.store(out + row * out_row + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def twice_e2m1(code):
    """0, 1, 2, 3, 4, 6, 8, 12 and their negatives, of int32 codes of 4 bits, in fp32."""
    exponent, last = (code >> 1) & 3, code & 1
    size = tl.where(exponent == 0, last, (2 + last) << tl.maximum(exponent - 1, 0)).to(tl.float32)
    return tl.where(code >= 8, -size, size)


@triton.jit
def half_power(end):
    """2^(end - 128) in fp32, of bytes: half a block's scale, since the largest one is beyond fp32. The two least are
    not normal."""
    bits = end.to(tl.int32)
    return tl.where(bits < 2, (1 << 21) << (bits & 1), (bits - 1) << 23).to(tl.float32, bitcast=True)
