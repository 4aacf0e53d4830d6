"""Attention over prompts on a card: causal attention with its log-sum-exp (Dao 2023, FlashAttention-2, whose backward
pass we have no use for), and what each column received of it. One launch each; no n x n matrix exists."""

from __future__ import annotations

import triton
import triton.language as tl

from flexgen_h2o.kernels.triton.slots import softmax_start, softmax_step


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
