"""Decode attention on a card, in one launch.

The kernel writes each row's new column to its slot, attends over the filled slots, adds to their
scores what they received, and names the row's next victim. R, g, d, C, S, W: as in
kernels/slots.py. Fields of a step's state: as in kernels/decode_step.StepSlots, `sequences` numbers
apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flexgen_h2o.kernels.triton.rows import scale_and_least

_NO_POSITION = tl.constexpr(2147483647)
# Sizes that differ from sweep to sweep, or from plan to plan. They make no code faster, so none is
# compiled in.
_SIZES = "sequences", "first_row", "length", "columns", "windows"
_SCALARS = "gains", "victims"  # read number by number, so they need no alignment


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_SCALARS)
def attend_step(
    q,
    k,
    v,
    out,
    keys,
    values,
    state,
    gains,
    scores,
    positions,
    victims,
    products,
    taken,
    before,
    before_lse,
    centres,
    ranges,
    whole_keys,
    whole_values,
    whole_slots,
    q_token,
    k_token,
    v_token,
    out_token,
    segment,
    sequences,
    first_row,
    kv_heads,
    length,
    columns,
    scale,
    decay,
    windows,
    value_segment,
    k_low,
    k_codes,
    k_words,
    v_low,
    v_codes,
    v_words,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    RECORDS: tl.constexpr,
    PER_QUERY: tl.constexpr,
    BEFORE: tl.constexpr,
    K_BITS: tl.constexpr,
    K_SHARING: tl.constexpr,
    K_GROUPS: tl.constexpr,
    V_BITS: tl.constexpr,
    V_SHARING: tl.constexpr,
    V_GROUPS: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Run a row of kernels/decode_step.attend_step.

    GROUP, WIDTH: g and d, rounded up to powers of two. products: (R, g, C) fp32, written. BEFORE: 1
    if the log-sum-exp of what is in front of the slots is given, 2 if its values are given too.

    K_BITS: 0 if slots are not packed; `centres` to `whole_slots` and `windows` to `v_words` are
    None then. k_, v_: for keys and values, the words of lower bits, of codes, of a slot. SHARING:
    numbers that share a scale. windows: number of whole columns; WINDOW: the next power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    sequence = (first_row + row) // kv_heads
    head = (first_row + row) % kv_heads
    filled = tl.load(state + sequence)
    slot = tl.load(state + sequences + sequence)
    now = state + 2 * sequences + sequence
    slot = _record(row, slot, now, scores, positions, victims, taken, columns, RECORDS)
    numbers = tl.arange(0, WIDTH)
    in_head = numbers < D
    new_key = tl.load(k + sequence * k_token + head * D + numbers, mask=in_head, other=0.0)
    new_value = tl.load(v + sequence * v_token + head * D + numbers, mask=in_head, other=0.0)
    new_part = (slot // length).to(tl.int64)
    new_place = row * length + slot % length
    if K_BITS:
        one = tl.arange(0, 1)
        centre = tl.load(centres + row * D + numbers, mask=in_head, other=0.0).to(tl.float32)
        spread = tl.load(ranges + row * D + numbers, mask=in_head, other=1.0).to(tl.float32)
        smoothed = tl.div_rn(new_key.to(tl.float32) - centre, spread)[None, :]
        wide = new_value.to(tl.float32)[None, :]
        key_at = new_part * segment + new_place * k_words + one
        value_at = new_part * value_segment + new_place * v_words + one
        is_one = one == 0
        pack(
            smoothed,
            keys,
            key_at,
            is_one,
            k_low,
            k_codes,
            D,
            WIDTH,
            1,
            K_BITS,
            K_SHARING,
            K_GROUPS,
        )
        pack(
            wide, values, value_at, is_one, v_low, v_codes, D, WIDTH, 1, V_BITS, V_SHARING, V_GROUPS
        )
        entry = tl.arange(0, WINDOW)
        goes = tl.load(state + 6 * sequences + sequence)
        its = _enter(whole_slots + row * windows, entry, windows, slot, goes)
        entry_at = (row * windows + goes) * D + numbers
        if goes >= 0:
            tl.store(whole_keys + entry_at, new_key, mask=in_head)
            tl.store(whole_values + entry_at, new_value, mask=in_head)
    else:
        new_at = new_part * segment + new_place * D + numbers
        tl.store(keys + new_at, new_key, mask=in_head)
        tl.store(values + new_at, new_value, mask=in_head)
    tl.debug_barrier()
    query, of_query, asked, tile = _queries(q + sequence * q_token, head, G, GROUP, D, WIDTH)
    most, total, mixed = _begin(
        before, before_lse, first_row + row, query, asked, G, GROUP, D, WIDTH, BEFORE
    )
    for first in range(0, filled, BLOCK):
        column = first + tl.arange(0, BLOCK)
        here = column < filled
        part = (column // length).to(tl.int64)
        place = row * length + column % length
        if K_BITS:
            here = here & (tl.max((column[:, None] == its[None, :]).to(tl.int32), 1) == 0)
            key_words = part * segment + place * k_words
            of_keys = _unpack(keys, key_words, here, k_low, k_codes, D, WIDTH, K_BITS, K_SHARING)
            of_keys = (of_keys * spread[None, :] + centre[None, :]).to(tile.dtype)
            words = part * value_segment + place * v_words
            of_values = _unpack(values, words, here, v_low, v_codes, D, WIDTH, V_BITS, V_SHARING)
            of_values = of_values.to(tile.dtype)
        else:
            at = (part * segment + place * D)[:, None] + numbers[None, :]
            loads = here[:, None] & in_head[None, :]
            of_keys = tl.load(keys + at, mask=loads, other=0.0)
            of_values = tl.load(values + at, mask=loads, other=0.0)
        product = _products(tile, of_keys, here, scale)
        if RECORDS:
            _keep(products, row, query, column, product, here, columns, G)
        most, total, mixed = softmax_step(product, of_values, most, total, mixed)
    if K_BITS:
        whole_at = (row * windows + entry)[:, None] * D + numbers[None, :]
        reads = (its >= 0)[:, None] & in_head[None, :]
        of_whole = tl.load(whole_keys + whole_at, mask=reads, other=0.0)
        of_these = _products(tile, of_whole, its >= 0, scale)
        if RECORDS:
            _keep(products, row, query, its, of_these, its >= 0, columns, G)
        of_whole = tl.load(whole_values + whole_at, mask=reads, other=0.0)
        most, total, mixed = softmax_step(of_these, of_whole, most, total, mixed)
    mixed = (mixed / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + sequence * out_token + of_query, mixed, mask=asked)
    if RECORDS:
        _score(
            row,
            filled,
            most + tl.log(total),
            tl.load(gains + sequence),
            now,
            sequences,
            scores,
            positions,
            victims,
            products,
            columns,
            decay,
            G,
            GROUP,
            BLOCK,
            PER_QUERY,
        )


@triton.jit
def _queries(q, head, G: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr):
    """Load the queries of a kv-head of one sequence.

    Returns the query numbers, the offsets of the tile, its mask, and the tile.
    """
    query = tl.arange(0, GROUP)
    number = tl.arange(0, WIDTH)
    of_query = (head * G + query)[:, None] * D + number[None, :]
    asked = (query < G)[:, None] & (number < D)[None, :]
    return query, of_query, asked, tl.load(q + of_query, mask=asked, other=0.0)


@triton.jit
def _begin(
    before,
    before_lse,
    row,
    query,
    asked,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BEFORE: tl.constexpr,
):
    """Return the softmax's initial state.

    It includes what the queries attend to in front of the slots. row: of the unit.
    """
    most, total, mixed = softmax_start(GROUP, WIDTH)
    if BEFORE > 0:
        most = tl.load(before_lse + row * G + query, mask=query < G, other=float("-inf"))
        total = tl.where(query < G, 1.0, 0.0)
    if BEFORE > 1:
        at = (row * G + query)[:, None] * D + tl.arange(0, WIDTH)[None, :]
        mixed = tl.load(before + at, mask=asked, other=0.0).to(tl.float32)
    return most, total, mixed


@triton.jit
def _record(row, slot, position, scores, positions, victims, taken, columns, RECORDS: tl.constexpr):
    """Return the slot of the new column, and record its position and a score of 0."""
    if RECORDS:
        slot = tl.where(slot < 0, tl.load(victims + row), slot)
        tl.store(positions + row * columns + slot, tl.load(position))
        tl.store(scores + row * columns + slot, 0.0)
    tl.store(taken + row, slot.to(tl.int64))
    return slot


@triton.jit
def _enter(whole_slots, entry, windows, slot, goes):
    """Return the slots whose columns are whole, with the new one at `goes`, and store them.

    It replaces the column that leaves the window.
    """
    its = tl.load(whole_slots + entry, mask=entry < windows, other=-1)
    # the old column of `slot` was evicted within the window
    its = tl.where(entry == goes, slot, tl.where(its == slot, -1, its))
    tl.store(whole_slots + entry, its, mask=entry < windows)
    return its


@triton.jit
def _products(tile, of_columns, here, scale):
    """Return scale x q.k, (GROUP, columns) fp32, with -inf if there is no column."""
    product = tl.dot(tile, tl.trans(of_columns), input_precision="ieee") * scale
    return tl.where(here[None, :], product, float("-inf"))


@triton.jit
def _keep(products, row, query, column, product, here, columns, G: tl.constexpr):
    kept = products + (row * G + query)[:, None] * columns + column[None, :]
    tl.store(kept, product, mask=(query < G)[:, None] & here[None, :])


@triton.jit
def softmax_start(GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """Return the initial state for `softmax_step`: maximum, sum, and weighted values."""
    most = tl.full([GROUP], float("-inf"), tl.float32)
    return most, tl.zeros([GROUP], tl.float32), tl.zeros([GROUP, WIDTH], tl.float32)


@triton.jit
def softmax_step(product, of_columns, most, total, mixed):
    """Return the softmax's state after more columns, of which each is read once.

    The state is the running maximum, the sum, and the weighted values (Milakov and Gimelshein
    2018).
    """
    highest = tl.maximum(most, tl.max(product, 1))
    safe = tl.where(highest == float("-inf"), 0.0, highest)  # true only if there was no column yet
    less = tl.exp(most - safe)
    share = tl.exp(product - safe[:, None])
    total = total * less + tl.sum(share, 1)
    added = tl.dot(share.to(of_columns.dtype), of_columns, input_precision="ieee")
    return highest, total, mixed * less[:, None] + added


@triton.jit
def _score(
    row,
    filled,
    lse,
    gain,
    now,
    sequences,
    scores,
    positions,
    victims,
    products,
    columns,
    decay,
    G: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_QUERY: tl.constexpr,
):
    """Add to scores what their columns received, and store the row's victim.

    The victim is the column of the lowest score that may leave, the earliest if scores are equal.
    now: address of the POSITION field of the state; OLDEST and NEWEST follow it.
    """
    tl.debug_barrier()  # other threads wrote the products
    query = tl.arange(0, GROUP)
    oldest = tl.load(now + sequences)
    newest = tl.load(now + 2 * sequences)
    now = tl.load(now)
    lowest = float("inf")
    earliest = _NO_POSITION + 0
    victim = -1
    for first in range(0, filled, BLOCK):
        column = first + tl.arange(0, BLOCK)
        here = column < filled
        kept = products + (row * G + query)[:, None] * columns + column[None, :]
        product = tl.load(kept, mask=(query < G)[:, None] & here[None, :], other=float("-inf"))
        received = tl.sum(tl.exp(product - lse[:, None]), 0)
        score = (
            decay * tl.load(scores + row * columns + column, mask=here, other=0.0) + gain * received
        )
        tl.store(scores + row * columns + column, score, mask=here)
        position = tl.load(positions + row * columns + column, mask=here, other=0)
        may_leave = here & (position >= oldest) & (position <= newest)
        if PER_QUERY:
            score = tl.div_rn(score, tl.where(may_leave, now + 1 - position, 1).to(tl.float32))
        # NaN counts as lowest, so that a row always has a victim
        score = tl.where(score == score, score, float("-inf"))
        candidate = tl.where(may_leave, score, float("inf"))
        low = tl.min(candidate, 0)
        old = tl.min(tl.where(may_leave & (candidate == low), position, _NO_POSITION), 0)
        its = tl.max(tl.where(may_leave & (candidate == low) & (position == old), column, -1), 0)
        better = (its >= 0) & ((low < lowest) | ((low == lowest) & (old < earliest)))
        lowest = tl.where(better, low, lowest)
        earliest = tl.where(better, old, earliest)
        victim = tl.where(better, its, victim)
    tl.store(victims + row, victim)


# ---- packed slots (core/packing.SlotPacking)


@triton.jit
def _unpack(
    area,
    at,
    here,
    low_words,
    value_words,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    SHARING: tl.constexpr,
):
    """Decode the slots that begin at the words `at` to (columns, WIDTH) fp32."""
    low_bits: tl.constexpr = 2 if BITS == 3 else BITS
    shared: tl.constexpr = 32 // low_bits if 32 // low_bits < WIDTH else WIDTH  # numbers per word
    rows: tl.constexpr = at.shape[0]
    of_word = tl.arange(0, shared)
    word = tl.arange(0, WIDTH // shared)
    loads = here[:, None] & (word * shared < D)[None, :]
    low = tl.load(area + at[:, None] + word[None, :], mask=loads, other=0)
    code = (low[:, :, None] >> (of_word * low_bits)[None, None, :]) & ((1 << low_bits) - 1)
    if BITS == 3:
        high = tl.load(
            area + at[:, None] + (low_words + word * shared // 32)[None, :], mask=loads, other=0
        )
        high = high >> (word * shared % 32)[None, :]
        code = code | (((high[:, :, None] >> of_word[None, None, :]) & 1) << 2)
    end = tl.load(
        area + at[:, None] + (value_words + word * shared // SHARING)[None, :], mask=loads, other=0
    )
    scale, least = scale_and_least(end)
    return tl.reshape(code.to(tl.float32) * scale[:, :, None] + least[:, :, None], [rows, WIDTH])


@triton.jit
def pack(
    x,
    area,
    at,
    here,
    low_words,
    value_words,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    SHARING: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Pack numbers (COLUMNS, WIDTH) fp32 into the slots that begin at the words `at`, if `here`."""
    low_bits: tl.constexpr = 2 if BITS == 3 else BITS
    levels: tl.constexpr = (1 << BITS) - 1
    number = tl.arange(0, WIDTH)
    code = tl.zeros([COLUMNS, WIDTH], tl.int32)
    for group in tl.static_range(GROUPS):
        inside = ((number >= group * SHARING) & (number < (group + 1) * SHARING) & (number < D))[
            None, :
        ]
        is_odd = tl.max((inside & (x != x)).to(tl.int32), 1) > 0
        least = tl.where(is_odd, float("nan"), tl.min(tl.where(inside, x, float("inf")), 1))
        least = _outwards(least, True)
        most = tl.max(tl.where(inside, x, float("-inf")), 1)
        scale = _outwards(tl.div_rn(most - least, levels * 1.0), False)
        high = least.to(tl.int32, bitcast=True) & -65536
        low = (scale.to(tl.int32, bitcast=True) >> 16) & 0xFFFF
        tl.store(area + at + value_words + group, high | low, mask=here)
        level = tl.floor(
            tl.div_rn(x - least[:, None], tl.broadcast_to(scale[:, None], [COLUMNS, WIDTH])) + 0.5
        )
        level = tl.where(level == level, level, 0.0)  # a group of equal numbers has a scale of 0
        code = tl.where(inside, tl.minimum(tl.maximum(level, 0.0), levels * 1.0).to(tl.int32), code)
    _join(code & ((1 << low_bits) - 1), area, at, here, low_words, WIDTH, COLUMNS, low_bits)
    if BITS == 3:
        _join(code >> 2, area, at + low_words, here, value_words - low_words, WIDTH, COLUMNS, 1)


@triton.jit
def _join(
    code, area, at, here, count, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, BITS: tl.constexpr
):
    """Store codes in `count` words of a slot, from the lowest bit on."""
    per_word: tl.constexpr = 32 // BITS
    if per_word > WIDTH:
        tl.store(area + at, tl.sum(code << (tl.arange(0, WIDTH) * BITS)[None, :], 1), mask=here)
    else:
        parts = tl.reshape(code, [COLUMNS, WIDTH // per_word, per_word])
        joined = tl.sum(parts << (tl.arange(0, per_word) * BITS)[None, None, :], 2)
        word = tl.arange(0, WIDTH // per_word)
        tl.store(
            area + at[:, None] + word[None, :], joined, mask=here[:, None] & (word < count)[None, :]
        )


@triton.jit
def _outwards(x, down):
    """Round fp32 down or up to a bf16 number; NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + tl.where((x < 0) == down, 0xFFFF, 0)) & -65536
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
