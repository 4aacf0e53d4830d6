"""Multiply few input rows; weights in few bits are decoded in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from flexgen_h2o.kernels.triton.rows import scale_and_least

FIELDS = tl.constexpr(6)  # int64 numbers per product in `table`


@triton.jit(do_not_specialize=("tokens",))
def few_rows(
    x,
    words,
    group_params,
    bias,
    out,
    table,
    tokens,
    rows,
    columns,
    x_row,
    words_row,
    params_row,
    out_row,
    group,
    BITS: tl.constexpr,
    MX: tl.constexpr,
    BIASED: tl.constexpr,
    ADDS: tl.constexpr,
    TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Multiply all tokens with ROWS rows of the weight, WORDS words of each row at a time.

    BITS: of a column; 0: words are numbers of x's dtype. group_params: for a group of columns its
    scale and least value in a word, or with MX its exponent in a byte. Sums are in fp32; weights
    are rounded to x's dtype first.

    TABLE: the launch has several products. Each has FIELDS int64 in `table`: its tokens, and the
    offsets (in numbers) of its x, words, group_params, bias and out from the arguments. ALIGNED:
    the offsets of x and words are multiples of 16.
    """
    per_word: tl.constexpr = 32 // BITS if BITS else 1
    if TABLE:
        own = table + tl.program_id(1) * FIELDS
        tokens = tl.load(own)
        first_input = tl.load(own + 1)
        first_word = tl.load(own + 2)
        if ALIGNED:
            first_input = tl.multiple_of(first_input, 16)
            first_word = tl.multiple_of(first_word, 16)
        x += first_input
        words += first_word
        group_params += tl.load(own + 3)
        bias += tl.load(own + 4)
        out += tl.load(own + 5)
    token = tl.arange(0, TOKENS)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([TOKENS, ROWS], tl.float32)
    for first in range(0, columns, WORDS * per_word):
        column = first + tl.arange(0, WORDS) * per_word  # the first column of each word
        loads = (row < rows)[:, None] & (column < columns)[None, :]
        word = tl.load(
            words + row[:, None] * words_row + (column // per_word)[None, :], mask=loads, other=0
        )
        if BITS == 0:
            total += tl.dot(
                _inputs(x, token, tokens, x_row, column, columns),
                tl.trans(word),
                input_precision="ieee",
            )
        else:
            end = tl.load(
                group_params + row[:, None] * params_row + (column // group)[None, :],
                mask=loads,
                other=0,
            )
            if TOKENS <= 16:
                # Multiply the columns at one place in each word at a time. A sum has no order, and
                # codes stay with the thread that loaded their word. With more tokens, gathering x
                # in this way takes longer than sending codes to other threads.
                for place in tl.static_range(per_word):
                    tile = _decoded(word >> (place * BITS), end, BITS, MX).to(x.dtype.element_ty)
                    inputs = _inputs(x, token, tokens, x_row, column + place, columns)
                    total += tl.dot(inputs, tl.trans(tile), input_precision="ieee")
            else:
                codes = word[:, :, None] >> (tl.arange(0, per_word) * BITS)[None, None, :]
                weight = _decoded(codes, end[:, :, None], BITS, MX).to(x.dtype.element_ty)
                tile = tl.reshape(weight, [ROWS, WORDS * per_word])
                inputs = _inputs(
                    x, token, tokens, x_row, first + tl.arange(0, WORDS * per_word), columns
                )
                total += tl.dot(inputs, tl.trans(tile), input_precision="ieee")
    if BIASED:
        total += tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)[None, :]
    at = out + token.to(tl.int64)[:, None] * out_row + row[None, :]
    asked = (token < tokens)[:, None] & (row < rows)[None, :]
    if ADDS:
        total += tl.load(at, mask=asked, other=0.0).to(tl.float32)
    tl.store(at, total.to(out.dtype.element_ty), mask=asked)


@triton.jit
def _decoded(code, end, BITS: tl.constexpr, MX: tl.constexpr):
    """Return the number of the lowest bits of `code` in fp32.

    end: the parameters of its group, as in `few_rows`.
    """
    code = code & ((1 << BITS) - 1)
    if MX:
        number = twice_e2m1(code) * half_power(end)
    else:
        scale, least = scale_and_least(end)
        number = code.to(tl.float32) * scale + least
    return number


@triton.jit
def _inputs(x, token, tokens, x_row, column, columns):
    wanted = (token < tokens)[:, None] & (column < columns)[None, :]
    return tl.load(x + token[:, None] * x_row + column[None, :], mask=wanted, other=0.0)


@triton.jit
def unpack_mxfp4(words, group_params, out, words_row, out_row, columns, BLOCK: tl.constexpr):
    """Decode BLOCK columns of a row, as in `quantised.unpack_mxfp4`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    word = tl.load(words + row * words_row + column // 8, mask=inside, other=0)
    end = tl.load(group_params + row * (columns // 32) + column // 32, mask=inside, other=0)
    value = twice_e2m1((word >> (column % 8 * 4)) & 15) * half_power(end)
    tl.store(out + row * out_row + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def twice_e2m1(code):
    """Return twice the e2m1 number of 4-bit codes in int32, in fp32.

    These are 0, 1, 2, 3, 4, 6, 8, 12 and their negatives.
    """
    # an fp32 number of the same exponent and fraction, 2^127 times too small
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 1.7014118346046923e38


@triton.jit
def half_power(end):
    """Return 2^(end - 128) in fp32 for bytes `end`: half of a block's scale.

    The largest scale itself exceeds fp32. The results for the two least bytes are subnormal.
    """
    bits = end.to(tl.int32)
    return tl.where(bits < 2, (1 << 21) << (bits & 1), (bits - 1) << 23).to(
        tl.float32, bitcast=True
    )
