"""Kernels on prompts, one launch each.

They compute causal attention with its log-sum-exp (Dao 2023, FlashAttention-2, without its backward
pass), and the attention that each column received, without an n x n matrix. They also choose the
columns that stay, and put them into slots. R, d, C, S, W: as in kernels/slots.py.

prompts: a row of numbers for each prompt of a launch (`PromptPlace`). If prompts are packed,
tensors have a batch stride of 0, and each prompt begins at the start in its row. In a batch this
start is 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexgen_h2o.kernels.triton.slots import pack, softmax_start, softmax_step

_MOST = tl.constexpr(3.4028234663852886e38)  # the largest number in fp32
# Sizes that differ from prompt to prompt or from plan to plan. They make no code faster, so none is
# compiled in.
_SIZES = (
    "lse_batch",
    "lse_head",
    "sums_batch",
    "sums_head",
    "last",
    "window",
    "rank_batch",
    "rank_head",
    "kept_batch",
    "kept_head",
    "given_batch",
    "given_head",
    "length",
    "columns",
    "first",
    "windows",
)
# any number of columns, so rows may have any alignment
_ROWS = "rank", "kept", "given", "scores", "positions", "whole_slots"


@triton.jit(do_not_specialize=_SIZES)
def attend(
    q,
    k,
    v,
    out,
    lse,
    prompts,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    v_batch,
    v_head,
    v_token,
    out_batch,
    out_head,
    out_token,
    lse_batch,
    lse_head,
    heads,
    group,
    window,
    scale,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Attend with ROWS queries of a head. The queries belong to the last keys of the prompt.

    window: number of keys that a query sees.
    """
    # a head of a prompt; on the first axis, because the other axes end at 65,535
    of_all = tl.program_id(0)
    start = tl.program_id(1) * ROWS
    batch = (of_all // heads).to(tl.int64)
    head = of_all % heads
    origin, rows, keys = _line(prompts, batch)
    number = tl.arange(0, WIDTH)
    query = start + tl.arange(0, ROWS)
    row = keys - rows + query
    in_head = number < D
    of_query = query[:, None] * q_token + number[None, :]
    asked = (query < rows)[:, None] & in_head[None, :]
    tile = tl.load(
        q + batch * q_batch + origin * q_token + head * q_head + of_query, mask=asked, other=0.0
    )
    k += batch * k_batch + origin * k_token + head // group * k_head
    v += batch * v_batch + origin * v_token + head // group * v_head
    most, total, mixed = softmax_start(ROWS, WIDTH)
    first = tl.maximum(0, keys - rows + start + 1 - window) // KEYS * KEYS
    # The grid of a longer prompt has more programs than this prompt has queries.
    end = tl.where(start < rows, tl.minimum(keys, keys - rows + start + ROWS), 0)
    for begin in range(first, end, KEYS):
        key = begin + tl.arange(0, KEYS)
        loads = (key < keys)[:, None] & in_head[None, :]
        some = tl.load(k + key[:, None] * k_token + number[None, :], mask=loads, other=0.0)
        product = tl.dot(tile, tl.trans(some), input_precision="ieee") * scale
        seen = (
            (key[None, :] <= row[:, None])
            & (key[None, :] > row[:, None] - window)
            & (key < keys)[None, :]
        )
        product = tl.where(seen, product, float("-inf"))
        some = tl.load(v + key[:, None] * v_token + number[None, :], mask=loads, other=0.0)
        most, total, mixed = softmax_step(product, some, most, total, mixed)
    total = tl.where(query < rows, total, 1.0)
    of_query = query[:, None] * out_token + number[None, :]
    mixed = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(
        out + batch * out_batch + origin * out_token + head * out_head + of_query, mixed, mask=asked
    )
    tl.store(
        lse + batch * lse_batch + head * lse_head + origin + query,
        most + tl.log(total),
        mask=query < rows,
    )


@triton.jit(do_not_specialize=_SIZES)
def column_sums(
    q,
    k,
    lse,
    sums,
    prompts,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    lse_batch,
    lse_head,
    lse_token,
    sums_batch,
    sums_head,
    kv_heads,
    group,
    last,
    scale,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Sum the attention of KEYS columns of a kv-head over the queries of its group.

    No other program adds to these columns. last: number of last queries that count.
    """
    begin = tl.program_id(1) * KEYS
    of_all = tl.program_id(0)
    batch = (of_all // kv_heads).to(tl.int64)
    kv_head = of_all % kv_heads
    origin, rows, keys = _line(prompts, batch)
    number = tl.arange(0, WIDTH)
    key = begin + tl.arange(0, KEYS)
    in_head = number < D
    before = keys - rows
    loads = (key < keys)[:, None] & in_head[None, :]
    k += batch * k_batch + origin * k_token + kv_head * k_head
    of_keys = tl.load(k + key[:, None] * k_token + number[None, :], mask=loads, other=0.0)
    received = tl.zeros([KEYS], tl.float32)
    least = tl.maximum(tl.maximum(keys - last, begin), before)
    q += batch * q_batch + origin * q_token
    lse += batch * lse_batch + origin * lse_token
    for head in range(kv_head * group, (kv_head + 1) * group):
        for start in range(least, keys, ROWS):
            row = start + tl.arange(0, ROWS)
            query = row - before
            asked = (row < keys)[:, None] & in_head[None, :]
            tile = tl.load(
                q + head * q_head + query[:, None] * q_token + number[None, :],
                mask=asked,
                other=0.0,
            )
            query_lse = tl.load(
                lse + head * lse_head + query * lse_token, mask=row < keys, other=0.0
            )
            product = tl.dot(tile, tl.trans(of_keys), input_precision="ieee") * scale
            seen = (key[None, :] <= row[:, None]) & (row < keys)[:, None]
            received += tl.sum(tl.where(seen, tl.exp(product - query_lse[:, None]), 0.0), 0)
    tl.store(
        sums + batch * sums_batch + kv_head * sums_head + origin + key, received, mask=key < keys
    )


@triton.jit
def _line(prompts, batch):
    """Return where a prompt begins, and its numbers of queries and keys."""
    line = prompts + batch * 8
    return tl.load(line).to(tl.int64), tl.load(line + 1), tl.load(line + 2)


@triton.jit
def _stays(prompts, batch):
    """Return where a prompt's columns that stay begin, and how many they are."""
    line = prompts + batch * 8
    return tl.load(line + 3).to(tl.int64), tl.load(line + 4)


# ---- the columns that stay


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_ROWS)
def choose(
    rank, kept, prompts, rank_batch, rank_head, kept_batch, kept_head, kv_heads, BLOCK: tl.constexpr
):
    """Compute a row of `choose_kept`.

    The lowest rank that stays is found bit by bit, by counting how many ranks are as high.
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    batch = row // kv_heads
    head = row % kv_heads
    origin, _, tokens = _line(prompts, batch)
    kept_at, count = _stays(prompts, batch)
    begin = tl.load(prompts + batch * 8 + 5)
    end = tl.load(prompts + batch * 8 + 6)
    heavy = count - tokens + end - begin
    rank += batch * rank_batch + head * rank_head + origin
    kept += batch * kept_batch + head * kept_head + kept_at
    step = row * 0 + 2147483648
    lowest = -step
    for _ in range(32):
        high, _ = _above(rank, begin, end, lowest + step - 1, BLOCK)
        lowest = tl.where(high >= heavy, lowest + step, lowest)
        step = step >> 1
    high, equal = _above(rank, begin, end, lowest, BLOCK)
    # if ranks are equal, the oldest columns leave
    skipped = equal - (heavy - high)
    seen = 0
    written = 0
    for start in range(0, tokens, BLOCK):
        at = start + place
        judged = (at >= begin) & (at < end)
        order = _order(tl.load(rank + at, mask=judged, other=0.0))
        equals = (judged & (order == lowest)).to(tl.int32)
        is_newer = seen + tl.cumsum(equals, 0) > skipped
        stays = (judged & ((order > lowest) | ((equals > 0) & is_newer))) | (
            (at < tokens) & (judged == 0)
        )
        place_of = written + tl.cumsum(stays.to(tl.int32), 0) - 1
        tl.store(kept + place_of, at.to(tl.int64), mask=stays)
        seen += tl.sum(equals, 0)
        written += tl.sum(stays.to(tl.int32), 0)


@triton.jit
def _above(rank, begin, end, limit, BLOCK: tl.constexpr):
    """Return how many ranks in [begin, end) are above `limit`, and how many are equal to it.

    limit: a result of `_order`.
    """
    above = 0
    equal = 0
    for start in range(begin, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < end
        order = _order(tl.load(rank + at, mask=inside, other=0.0))
        above += tl.sum((inside & (order > limit)).to(tl.int32), 0)
        equal += tl.sum((inside & (order == limit)).to(tl.int32), 0)
    return above, equal


@triton.jit
def _order(x):
    """Return integers that compare as ranks do.

    NaN and -inf become the least number, inf the largest; both zeros are equal.
    """
    x = tl.where(x == x, tl.minimum(tl.maximum(x, -_MOST), _MOST), -_MOST)
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


# ---- columns to slots


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_ROWS)
def put(
    k,
    v,
    kept,
    keys,
    values,
    given,
    scores,
    positions,
    prompts,
    centres,
    ranges,
    whole_keys,
    whole_values,
    whole_slots,
    k_batch,
    k_token,
    k_head,
    v_batch,
    v_token,
    v_head,
    kept_batch,
    kept_head,
    given_batch,
    given_head,
    segment,
    length,
    columns,
    kv_heads,
    first,
    windows,
    value_segment,
    k_low,
    k_codes,
    k_words,
    v_low,
    v_codes,
    v_words,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    RECORDS: tl.constexpr,
    K_BITS: tl.constexpr,
    K_SHARING: tl.constexpr,
    K_GROUPS: tl.constexpr,
    V_BITS: tl.constexpr,
    V_SHARING: tl.constexpr,
    V_GROUPS: tl.constexpr,
):
    """Write BLOCK columns of a row, those of tokens kept[row] of its prompt, to its first slots.

    first: row of the prompts that is row 0 of the slots.

    K_BITS: 0 if slots are not packed, as in slots.attend_step. Beside packed slots, a prompt's
    newest tokens are also written as whole columns, to some of the `windows` places. `begin_whole`
    runs first.
    """
    row = tl.program_id(0).to(tl.int64)
    batch = (first + row) // kv_heads
    head = (first + row) % kv_heads
    origin, _, tokens = _line(prompts, batch)
    kept_at, count = _stays(prompts, batch)
    slot = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = tl.arange(0, WIDTH)
    here = slot < count
    in_head = number < D
    token = tl.load(
        kept + batch * kept_batch + head * kept_head + kept_at + slot, mask=here, other=0
    )
    if RECORDS:
        given += batch * given_batch + head * given_head + origin
        at = row * columns + slot
        tl.store(positions + at, token.to(tl.int32), mask=here)
        tl.store(scores + at, tl.load(given + token, mask=here, other=0.0), mask=here)
    loads = here[:, None] & in_head[None, :]
    k += batch * k_batch + origin * k_token + head * k_head
    v += batch * v_batch + origin * v_token + head * v_head
    new_keys = tl.load(k + token[:, None] * k_token + number[None, :], mask=loads, other=0.0)
    new_values = tl.load(v + token[:, None] * v_token + number[None, :], mask=loads, other=0.0)
    part = (slot // length).to(tl.int64)
    place = row * length + slot % length
    if K_BITS:
        centre = tl.load(centres + row * D + number, mask=in_head, other=0.0).to(tl.float32)
        spread = tl.load(ranges + row * D + number, mask=in_head, other=1.0).to(tl.float32)
        spread = tl.broadcast_to(spread[None, :], [BLOCK, WIDTH])
        x = tl.div_rn(new_keys.to(tl.float32) - centre[None, :], spread)
        at = part * segment + place * k_words
        pack(x, keys, at, here, k_low, k_codes, D, WIDTH, BLOCK, K_BITS, K_SHARING, K_GROUPS)
        x = new_values.to(tl.float32)
        at = part * value_segment + place * v_words
        pack(x, values, at, here, v_low, v_codes, D, WIDTH, BLOCK, V_BITS, V_SHARING, V_GROUPS)
        window = tl.load(prompts + batch * 8 + 7)
        goes = here & (token >= tokens - window)
        entry = row * windows + token % tl.maximum(window, 1)
        tl.store(whole_slots + entry, slot, mask=goes)
        at = entry[:, None] * D + number[None, :]
        stores = goes[:, None] & in_head[None, :]
        tl.store(whole_keys + at, new_keys, mask=stores)
        tl.store(whole_values + at, new_values, mask=stores)
    else:
        at = (part * segment + place * D)[:, None] + number[None, :]
        tl.store(keys + at, new_keys, mask=loads)
        tl.store(values + at, new_values, mask=loads)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_ROWS)
def begin_whole(
    k,
    prompts,
    centres,
    ranges,
    whole_keys,
    whole_values,
    whole_slots,
    k_batch,
    k_token,
    k_head,
    kv_heads,
    first,
    windows,
    least_range,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    SMOOTHS: tl.constexpr,
):
    """Initialise a row of WholeColumns, without whole columns. SMOOTHS: PromptSlots.smooths."""
    row = tl.program_id(0).to(tl.int64)
    batch = (first + row) // kv_heads
    head = (first + row) % kv_heads
    number = tl.arange(0, WIDTH)
    in_head = number < D
    centre = tl.full([WIDTH], 0, tl.float32)
    spread = tl.full([WIDTH], 1, tl.float32)
    if SMOOTHS:
        origin, _, tokens = _line(prompts, batch)
        k += batch * k_batch + origin * k_token + head * k_head
        least = tl.full([WIDTH], float("inf"), tl.float32)
        most = tl.full([WIDTH], float("-inf"), tl.float32)
        for start in range(0, tokens, BLOCK):
            token = start + tl.arange(0, BLOCK)
            loads = (token < tokens)[:, None] & in_head[None, :]
            some = tl.load(
                k + token.to(tl.int64)[:, None] * k_token + number[None, :], mask=loads, other=0.0
            )
            some = some.to(tl.float32)
            least = tl.minimum(least, tl.min(tl.where(loads, some, float("inf")), 0))
            most = tl.maximum(most, tl.max(tl.where(loads, some, float("-inf")), 0))
        spread = tl.where(in_head, most - least, 0.0)
        spread = tl.maximum(spread, tl.sum(spread, 0) / D * least_range)
        spread = tl.where(spread > 0, spread, 1.0)
        centre = (most + least) * 0.5
    tl.store(centres + row * D + number, centre.to(tl.bfloat16), mask=in_head)
    tl.store(ranges + row * D + number, spread.to(tl.bfloat16), mask=in_head)
    for start in range(0, windows, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        there = entry < windows
        tl.store(whole_slots + row * windows + entry, -1, mask=there)
        at = (row * windows + entry)[:, None] * D + number[None, :]
        stores = there[:, None] & in_head[None, :]
        tl.store(whole_keys + at, 0.0, mask=stores)
        tl.store(whole_values + at, 0.0, mask=stores)
