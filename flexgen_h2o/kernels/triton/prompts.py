"""Prompts on a card, one launch each: causal attention with its log-sum-exp (Dao 2023, FlashAttention-2, whose backward
pass we have no use for) and what each column received of it, without an n x n matrix; the columns that stay, and their
way into slots. R, d, C, S, W: as in kernels/slots.py."""

from __future__ import annotations

import triton
import triton.language as tl

from flexgen_h2o.kernels.triton.slots import pack, softmax_start, softmax_step

_MOST = tl.constexpr(3.4028234663852886e38)  # the largest number in fp32
# Sizes that differ from prompt to prompt or from plan to plan, and make no code faster: none is compiled in.
_SIZES = (
    "tokens", "begin", "end", "heavy", "kept_batch", "kept_head", "length", "columns", "count", "first", "windows",
    "window",
)  # fmt: skip
_ROWS = "rank", "kept", "given", "scores", "positions", "whole_slots"  # of any number of columns: may begin anywhere


@triton.jit(do_not_specialize=("rows", "keys", "window"))
def attend(
    q, k, v, out, lse, q_batch, q_head, q_token, k_batch, k_head, k_token, v_batch, v_head, v_token,
    out_batch, out_head, out_token, heads, group, rows, keys, window, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """ROWS queries of a head. rows: the last so many of all `keys`; window: keys that a query sees."""
    of_all = tl.program_id(0)  # a head of a prompt, on the first axis: others end at 65,535
    start, batch, head = tl.program_id(1) * ROWS, (of_all // heads).to(tl.int64), of_all % heads
    number, query = tl.arange(0, WIDTH), start + tl.arange(0, ROWS)
    row, in_head = keys - rows + query, number < D
    of_query, asked = query[:, None] * q_token + number[None, :], (query < rows)[:, None] & in_head[None, :]
    tile = tl.load(q + batch * q_batch + head * q_head + of_query, mask=asked, other=0.0)
    k += batch * k_batch + head // group * k_head
    v += batch * v_batch + head // group * v_head
    most, total, mixed = softmax_start(ROWS, WIDTH)
    first = tl.maximum(0, keys - rows + start + 1 - window) // KEYS * KEYS
    for begin in range(first, tl.minimum(keys, keys - rows + start + ROWS), KEYS):
        key = begin + tl.arange(0, KEYS)
        loads = (key < keys)[:, None] & in_head[None, :]
        some = tl.load(k + key[:, None] * k_token + number[None, :], mask=loads, other=0.0)
        product = tl.dot(tile, tl.trans(some), input_precision="ieee") * scale
        seen = (key[None, :] <= row[:, None]) & (key[None, :] > row[:, None] - window) & (key < keys)[None, :]
        product = tl.where(seen, product, float("-inf"))
        some = tl.load(v + key[:, None] * v_token + number[None, :], mask=loads, other=0.0)
        most, total, mixed = softmax_step(product, some, most, total, mixed)
    total = tl.where(query < rows, total, 1.0)
    of_query = query[:, None] * out_token + number[None, :]
    mixed = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + batch * out_batch + head * out_head + of_query, mixed, mask=asked)
    tl.store(lse + of_all.to(tl.int64) * rows + query, most + tl.log(total), mask=query < rows)


@triton.jit(do_not_specialize=("lse_batch", "lse_head", "rows", "keys", "first_row"))
def column_sums(
    q, k, lse, sums, q_batch, q_head, q_token, k_batch, k_head, k_token, lse_batch, lse_head, lse_token,
    kv_heads, group, rows, keys, first_row, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """KEYS columns of a kv-head, over the queries of its group: nobody else adds to them."""
    begin, of_all = tl.program_id(1) * KEYS, tl.program_id(0)
    batch, kv_head = (of_all // kv_heads).to(tl.int64), of_all % kv_heads
    number, key = tl.arange(0, WIDTH), begin + tl.arange(0, KEYS)
    in_head, before = number < D, keys - rows
    loads = (key < keys)[:, None] & in_head[None, :]
    of_keys = tl.load(k + batch * k_batch + kv_head * k_head + key[:, None] * k_token + number[None, :], mask=loads,
                      other=0.0)  # fmt: skip
    received = tl.zeros([KEYS], tl.float32)
    least = tl.maximum(tl.maximum(first_row, begin), before)
    for head in range(kv_head * group, (kv_head + 1) * group):
        for start in range(least, keys, ROWS):
            row = start + tl.arange(0, ROWS)
            query = row - before
            asked = (row < keys)[:, None] & in_head[None, :]
            at = batch * q_batch + head * q_head + query[:, None] * q_token + number[None, :]
            tile = tl.load(q + at, mask=asked, other=0.0)
            at = batch * lse_batch + head * lse_head + query * lse_token
            query_lse = tl.load(lse + at, mask=row < keys, other=0.0)
            product = tl.dot(tile, tl.trans(of_keys), input_precision="ieee") * scale
            seen = (key[None, :] <= row[:, None]) & (row < keys)[:, None]
            received += tl.sum(tl.where(seen, tl.exp(product - query_lse[:, None]), 0.0), 0)
    tl.store(sums + of_all.to(tl.int64) * keys + key, received, mask=key < keys)


# ---- the columns that stay


@triton.jit(do_not_specialize=_SIZES[:4], do_not_specialize_on_alignment=_ROWS[:2])
def choose(rank, kept, tokens, begin, end, heavy, BLOCK: tl.constexpr):
    """A row of `choose_kept`. The lowest rank that stays is found bit by bit, by how many are as high."""
    row, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    rank += row * tokens
    kept += row * (begin + heavy + tokens - end)
    step = row * 0 + 2147483648
    lowest = -step
    for _ in range(32):
        high, _ = _above(rank, begin, end, lowest + step - 1, BLOCK)
        lowest = tl.where(high >= heavy, lowest + step, lowest)
        step = step >> 1
    high, equal = _above(rank, begin, end, lowest, BLOCK)
    skipped, seen, written = equal - (heavy - high), 0, 0  # the oldest of equals go
    for start in range(0, tokens, BLOCK):
        at = start + place
        judged = (at >= begin) & (at < end)
        order = _order(tl.load(rank + at, mask=judged, other=0.0))
        equals = (judged & (order == lowest)).to(tl.int32)
        is_newer = seen + tl.cumsum(equals, 0) > skipped
        stays = (judged & ((order > lowest) | ((equals > 0) & is_newer))) | ((at < tokens) & (judged == 0))
        place_of = written + tl.cumsum(stays.to(tl.int32), 0) - 1
        tl.store(kept + place_of, at.to(tl.int64), mask=stays)
        seen += tl.sum(equals, 0)
        written += tl.sum(stays.to(tl.int32), 0)


@triton.jit
def _above(rank, begin, end, limit, BLOCK: tl.constexpr):
    """How many ranks of [begin, end) are above, and how many are equal to, what `_order` made of another."""
    above, equal = 0, 0
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < end
        order = _order(tl.load(rank + at, mask=inside, other=0.0))
        above += tl.sum((inside & (order > limit)).to(tl.int32), 0)
        equal += tl.sum((inside & (order == limit)).to(tl.int32), 0)
    return above, equal


@triton.jit
def _order(x):
    """Integers that compare as ranks do: NaN and -inf as the least number, inf as the largest, both zeros alike."""
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -_MOST), _MOST), -_MOST)
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


# ---- their way into slots


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_ROWS)
def put(
    k, v, kept, keys, values, given, scores, positions,
    k_batch, k_token, k_head, v_batch, v_token, v_head, kept_batch, kept_head, segment, length, columns, count, tokens,
    kv_heads, first,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, RECORDS: tl.constexpr,
):  # fmt: skip
    """BLOCK of a row's `count` columns, which tokens kept[row] of its prompt have, into its slots from the first on.
    first: of the prompts' rows, the one that is row 0 of the slots."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = (first + row) // kv_heads, (first + row) % kv_heads
    slot, number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    token = tl.load(kept + batch * kept_batch + head * kept_head + slot, mask=slot < count, other=0)
    if RECORDS:
        _record(row, slot, token, given + (first + row) * tokens, scores, positions, columns, count)
    loads = (slot < count)[:, None] & (number < D)[None, :]
    at = (slot // length).to(tl.int64) * segment + (row * length + slot % length) * D
    at = at[:, None] + number[None, :]
    of_keys = batch * k_batch + token[:, None] * k_token + head * k_head + number[None, :]
    of_values = batch * v_batch + token[:, None] * v_token + head * v_head + number[None, :]
    tl.store(keys + at, tl.load(k + of_keys, mask=loads, other=0.0), mask=loads)
    tl.store(values + at, tl.load(v + of_values, mask=loads, other=0.0), mask=loads)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_ROWS)
def put_packed(
    k, v, kept, keys, values, given, scores, positions, centres, ranges, whole_keys, whole_values, whole_slots,
    k_batch, k_token, k_head, v_batch, v_token, v_head, kept_batch, kept_head, segment, length, columns, count, tokens,
    kv_heads, first, value_segment, windows, window, k_low, k_codes, k_words, v_low, v_codes, v_words,
    D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, RECORDS: tl.constexpr, K_BITS: tl.constexpr,
    K_SHARING: tl.constexpr, K_GROUPS: tl.constexpr, V_BITS: tl.constexpr, V_SHARING: tl.constexpr,
    V_GROUPS: tl.constexpr,
):  # fmt: skip
    """The same, packed; the newest `window` tokens also whole, of the `windows` places beside. k_, v_: as of
    slots.attend_packed_step. `begin_whole` comes first."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = (first + row) // kv_heads, (first + row) % kv_heads
    slot, number = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    here, in_head = slot < count, number < D
    token = tl.load(kept + batch * kept_batch + head * kept_head + slot, mask=here, other=0)
    if RECORDS:
        _record(row, slot, token, given + (first + row) * tokens, scores, positions, columns, count)
    loads = here[:, None] & in_head[None, :]
    of_keys = batch * k_batch + token[:, None] * k_token + head * k_head + number[None, :]
    of_values = batch * v_batch + token[:, None] * v_token + head * v_head + number[None, :]
    new_keys, new_values = tl.load(k + of_keys, mask=loads, other=0.0), tl.load(v + of_values, mask=loads, other=0.0)
    centre = tl.load(centres + row * D + number, mask=in_head, other=0.0).to(tl.float32)
    spread = tl.load(ranges + row * D + number, mask=in_head, other=1.0).to(tl.float32)
    spread = tl.broadcast_to(spread[None, :], [BLOCK, WIDTH])
    smoothed = tl.div_rn(new_keys.to(tl.float32) - centre[None, :], spread)
    part, place = (slot // length).to(tl.int64), row * length + slot % length
    at = part * segment + place * k_words
    pack(smoothed, keys, at, here, k_low, k_codes, D, WIDTH, BLOCK, K_BITS, K_SHARING, K_GROUPS)
    at = part * value_segment + place * v_words
    pack(new_values.to(tl.float32), values, at, here, v_low, v_codes, D, WIDTH, BLOCK, V_BITS, V_SHARING, V_GROUPS)
    goes = here & (token >= tokens - window)
    entry = row * windows + token % tl.maximum(window, 1)
    tl.store(whole_slots + entry, slot, mask=goes)
    at, stores = entry[:, None] * D + number[None, :], goes[:, None] & in_head[None, :]
    tl.store(whole_keys + at, new_keys, mask=stores)
    tl.store(whole_values + at, new_values, mask=stores)


@triton.jit
def _record(row, slot, token, given, scores, positions, columns, count):
    """What is recorded of columns. given: the scores of the row's tokens."""
    at, here = row * columns + slot, slot < count
    tl.store(positions + at, token.to(tl.int32), mask=here)
    tl.store(scores + at, tl.load(given + token, mask=here, other=0.0), mask=here)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_ROWS)
def begin_whole(
    k, centres, ranges, whole_keys, whole_values, whole_slots, k_batch, k_token, k_head, tokens, kv_heads, first,
    windows, least_range, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row of what lies beside packed slots, without whole columns."""
    row = tl.program_id(0).to(tl.int64)
    batch, head = (first + row) // kv_heads, (first + row) % kv_heads
    number = tl.arange(0, WIDTH)
    in_head = number < D
    k += batch * k_batch + head * k_head
    least, most = tl.full([WIDTH], float("inf"), tl.float32), tl.full([WIDTH], float("-inf"), tl.float32)
    for start in range(0, tokens, BLOCK):
        token = start + tl.arange(0, BLOCK)
        loads = (token < tokens)[:, None] & in_head[None, :]
        some = tl.load(k + token.to(tl.int64)[:, None] * k_token + number[None, :], mask=loads, other=0.0)
        some = some.to(tl.float32)
        least = tl.minimum(least, tl.min(tl.where(loads, some, float("inf")), 0))
        most = tl.maximum(most, tl.max(tl.where(loads, some, float("-inf")), 0))
    spread = tl.where(in_head, most - least, 0.0)
    spread = tl.maximum(spread, tl.sum(spread, 0) / D * least_range)
    spread = tl.where(spread > 0, spread, 1.0)
    tl.store(centres + row * D + number, ((most + least) * 0.5).to(tl.bfloat16), mask=in_head)
    tl.store(ranges + row * D + number, spread.to(tl.bfloat16), mask=in_head)
    for start in range(0, windows, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        there = entry < windows
        tl.store(whole_slots + row * windows + entry, -1, mask=there)
        at, stores = (row * windows + entry)[:, None] * D + number[None, :], there[:, None] & in_head[None, :]
        tl.store(whole_keys + at, 0.0, mask=stores)
        tl.store(whole_values + at, 0.0, mask=stores)
