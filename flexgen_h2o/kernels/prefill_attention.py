"""Causal attention over prompts with the log-sum-exp, and the attention that each key received.

The attention that a key received is summed over queries, never as an n x n matrix. If there are
more keys than queries, the queries are the last rows of the prompt.

On a CPU with AVX2, our compiled loop is used (with AVX-512 it is 2-3x as fast as torch). The
exception is whole prompts in bf16 on AMX, where torch's fused kernel is 1.3-5.8x as fast as ours.
CPUs without AVX2 use that kernel for whole prompts, too. Only a private operation of torch returns
its log-sum-exp. It is tried once against torch operations on a small case. It is not used if it is
missing, raises an error or gives another result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial

import numpy as np
import torch

from flexgen_h2o.core.units import MASK_ROWS, SCORE_TILE_BYTES
from flexgen_h2o.kernels import triton
from flexgen_h2o.kernels.ops import op, run_loop
from flexgen_h2o.kernels.workspace import (
    cpu_has,
    element_of,
    is_compiled,
    mismatch,
    multiplies_slowly,
    parallel_rows,
)

TILE_ROWS = 256  # query rows per tile; fewer if such a tile would exceed TILE_BYTES per thread
MIN_TILE_ROWS = 16  # query rows per tile at least; fewer make matrix products slow
TILE_BYTES = SCORE_TILE_BYTES  # bytes of all products that exist at a time
QUERY_ROWS = 32  # query rows at a time if all heads of all prompts are computed at once
ALL_ROWS = 2**31 - 1


@op
def column_sums(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    last: int | None = None,
    lines: triton.PromptPlaces | None = None,
) -> torch.Tensor:
    """Return the sum of exp(scale x q_i.k_j - lse_i) for each key j.

    The sum is over the `last` query rows i >= j, or over all (None), and over the query heads of a
    kv-group.

    q: (b, heads, m, d), the last m of n rows; k: (b, kv_heads, n, d), any strides; lse: (b, heads,
    m) fp32, from `causal_attention_lse`. Returns (b, kv_heads, n) fp32. Memory: `TILE_BYTES` of
    products, and as many queries and keys copied.

    lines: packed prompts of any lengths, which are whole and adjacent, and b = 1; None: a batch.

    The result in fp32 is exact to a few 1e-6. In bf16, products of a tile are rounded to bf16, by
    at most 2**-9 of each (on a CPU with only AVX2 they stay fp32). One probability may thus be off
    by scale x |q.k| / 512 of itself, in either direction. The sum of a column over many rows is off
    by far less.
    """
    if lines is not None:
        sums = torch.empty(k.shape[:3], dtype=torch.float32, device=q.device)
        for rows_of, keys_of, _ in _places(lines, len(q)):
            sums[keys_of] = column_sums.torch(q[rows_of], k[keys_of], lse[rows_of], scale, last)
        return sums
    batch, kv_heads, n, width = k.shape
    first_row = 0 if last is None else max(0, n - last)
    group = q.shape[1] // kv_heads
    before = n - q.shape[2]
    dtype = torch.float32 if multiplies_slowly(q.device.type, q.dtype) else q.dtype
    q = q.unflatten(1, (kv_heads, group))
    lse = lse.unflatten(1, (kv_heads, group))
    sums = torch.zeros(batch, kv_heads, n, dtype=torch.float32, device=q.device)
    threads = min(torch.get_num_threads(), batch * kv_heads)
    row_bytes = group * n * dtype.itemsize  # bytes of one kv-head's products with one row
    rows = max(MIN_TILE_ROWS, min(TILE_ROWS, TILE_BYTES // (row_bytes * threads)))
    buffer = torch.empty(
        max(TILE_BYTES, rows * row_bytes) // dtype.itemsize, dtype=dtype, device=q.device
    )
    for piece in _pieces(batch, kv_heads, max(1, TILE_BYTES // (rows * row_bytes))):
        queries, keys, ends, into = (t[piece].flatten(0, 1) for t in (q, k, lse, sums))
        # Keys are copied at most once: after a conversion they are contiguous.
        heads = len(keys)
        keys = keys.to(dtype, memory_format=torch.contiguous_format).contiguous()
        for start in range(max(before, first_row), n, rows):
            end = min(n, start + rows)
            count = end - start
            here = slice(start - before, end - before)
            products = buffer[: heads * group * count * end].view(heads, group * count, end)
            tile = queries[:, :, here].reshape(heads, group * count, width).to(dtype)
            torch.bmm(tile, keys[:, :end].transpose(1, 2), out=products)
            add_tile(
                products.view(heads, group, count, end),
                ends[:, :, here].contiguous(),
                scale,
                into,
                start,
            )
    return sums


@column_sums.kernel
def _column_sums_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    last: int | None = None,
    lines: triton.PromptPlaces | None = None,
) -> torch.Tensor:
    lines = lines or (triton.PromptPlace(0, q.shape[2], k.shape[2]),) * len(q)
    sums = torch.empty(k.shape[:3], dtype=torch.float32, device=q.device)
    constants = _tile(q)
    kv_heads = k.shape[1]
    strides = [step for t in (q, k, lse) for step in triton.batch_strides(t, 3)]
    group = q.shape[1] // kv_heads
    most = ALL_ROWS if last is None else last
    sizes = *strides, *triton.batch_strides(sums, 2), kv_heads, group, most, scale
    grid = len(lines) * kv_heads, -(-max(line.keys for line in lines) // constants["KEYS"])
    arguments = q, k, lse, sums, triton.prompt_table(lines, q.device), *sizes
    triton.launch("prompts.column_sums", grid, arguments, **constants)
    return sums


_Place = tuple[slice, slice, slice]


def _places(
    lines: triton.PromptPlaces, batch: int
) -> Iterator[tuple[_Place, _Place, triton.PromptPlace]]:
    """Yield for each prompt the indices of its queries and of its keys in a launch's tensors."""
    for i, line in enumerate(lines):
        own = slice(i, i + 1) if batch > 1 else slice(None)
        queries = slice(line.start, line.start + line.rows)
        yield (own, slice(None), queries), (own, slice(None), line.tokens), line


def _tile(q: torch.Tensor) -> dict[str, int]:
    """Return the kernel's constants.

    The numbers of queries and keys at a time are small enough that their tiles fit the shared
    memory of a T4.
    """
    width = q.shape[3]
    wide = triton.power_of_two(q.shape[3], 16)
    count = max(16, 128 // q.itemsize // max(1, wide // 128))
    return {"D": width, "WIDTH": wide, "ROWS": count, "KEYS": count}


def _pieces(batch: int, kv_heads: int, most: int) -> Iterator[tuple[slice, slice]]:
    """Yield slices of sequences and of kv-heads, with at most `most` kv-heads in each piece.

    A piece has whole sequences if they fit.
    """
    if most >= kv_heads:
        step = most // kv_heads
        yield from ((slice(i, i + step), slice(None)) for i in range(0, batch, step))
        return
    for i in range(batch):
        yield from ((slice(i, i + 1), slice(h, h + most)) for h in range(0, kv_heads, most))


@op
def add_tile(
    products: torch.Tensor, lse: torch.Tensor, scale: float, sums: torch.Tensor, first: int
) -> None:
    """Add a tile's probabilities to `sums`.

    products: (rows, group, count, end), where rows are kv-heads and count is the tile's queries;
    lse: (rows, group, count), of these queries; sums: (rows, n) fp32; first: row of the first
    query.
    """
    p = products.float().mul_(scale).sub_(lse[..., None]).exp_().tril_(first)
    sums[:, : products.shape[3]] += p.sum(dim=(1, 2))


@add_tile.loop
def _add_tile_loop(
    products: torch.Tensor, lse: torch.Tensor, scale: float, sums: torch.Tensor, first: int
) -> None:
    rows, group, count, end = products.shape
    addresses = products.data_ptr(), lse.data_ptr(), sums.data_ptr()
    numbers = (group, count, end, sums.shape[1], first, *addresses, scale)
    row_bytes = 4 * products[0].nbytes
    run_loop("prompts.add_tile", products.dtype, rows, row_bytes, *numbers)


Result = tuple[torch.Tensor, torch.Tensor]
_Fused = Callable[..., Result]  # (q, k, v, is_causal, scale)


def _is_compiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Return whether the compiled loop can read these tensors and is faster than torch.

    Torch is faster if it uses AMX; `_fused_for` handles that case.
    """
    return is_compiled(q) and all(t.stride(3) == 1 for t in (q, k, v)) and cpu_has("avx2")


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None = None
) -> torch.Tensor:
    """Return causal attention of the last m rows of prompts, or of all rows, in O(n) memory.

    q: (b, heads, m, d), k and v: (b, kv_heads, n, d), same dtype, m <= n. Returns (b, heads, m, d).
    window: number of keys that a query sees, its own and those before it; None: all. Only keys that
    are seen cost work.
    """
    if triton.supports(q) or _is_compiled(q, k, v):
        return causal_attention_lse(q, k, v, scale, window)[0]
    rows = q.shape[2]
    n = k.shape[2]
    enable_gqa = q.shape[1] != k.shape[1]
    attend = partial(
        torch.nn.functional.scaled_dot_product_attention, scale=scale, enable_gqa=enable_gqa
    )
    if 1 < rows < n or _hides(window, n):
        pieces = _row_pieces(q, k, v, window)
        return _joined([attend(some, a, b, _last_rows(some, a, window)) for some, a, b in pieces])
    return attend(q, k, v, is_causal=rows > 1)


@op
def causal_attention_lse(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None = None
) -> Result:
    """Return `causal_attention` and its log-sum-exp.

    The log-sum-exp of a query is the natural logarithm of the sum of exp(scale x q.k) over its
    keys.

    q: (b, heads, m, d), k and v: (b, kv_heads, n, d), same dtype, any strides, m <= n. Returns (b,
    heads, m, d) in q's dtype and (b, heads, m) fp32. Torch operations compute in fp32, QUERY_ROWS
    queries at a time, in O(n x QUERY_ROWS) memory.
    """
    batch, heads, rows, width = q.shape
    kv_heads = k.shape[1]
    before = k.shape[2] - rows
    grouped = (batch, kv_heads, heads // kv_heads)
    out = torch.empty(*grouped, rows, width, dtype=q.dtype, device=q.device)
    lse = torch.empty(*grouped, rows, dtype=torch.float32, device=q.device)
    queries = q.unflatten(1, grouped[1:])
    keys = k.unsqueeze(2)
    values = v.unsqueeze(2)
    for start in range(0, rows, QUERY_ROWS):
        end = min(rows, start + QUERY_ROWS)
        seen = slice(_first_key(before + start, window), before + end)
        k, v = (t[..., seen, :].float() for t in (keys, values))
        products = (queries[..., start:end, :].float() @ k.transpose(-1, -2)).mul_(scale)
        products.masked_fill_(_hidden(products, window), float("-inf"))
        lse[..., start:end] = torch.logsumexp(products, dim=-1)
        p = products.sub_(lse[..., start:end, None]).exp_()
        out[..., start:end, :] = p @ v
    return out.view(q.shape), lse.view(batch, heads, rows)


@causal_attention_lse.kernel
def _attend_on_card(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None = None
) -> Result:
    """Run the Triton kernel; in the memory of the result, the heads of a token are adjacent."""
    batch, heads, rows, width = q.shape
    out = torch.empty(batch, rows, heads, width, dtype=q.dtype, device=q.device).transpose(1, 2)
    lines = (triton.PromptPlace(0, rows, k.shape[2]),) * batch
    return out, _packed_attention_kernel(q, k, v, lines, scale, window, out)


@op
def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lines: triton.PromptPlaces,
    scale: float,
    window: int | None,
    out: torch.Tensor,
) -> torch.Tensor:
    """Run `causal_attention_lse` on a card for a batch, or for packed prompts of any lengths.

    It is one launch. Packed prompts are whole and adjacent, and b = 1. The result is written to
    `out`, which has the shape and dtype of q. Returns the log-sum-exp, (b, heads, m) fp32.
    """
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    for queries, keys, _ in _places(lines, len(q)):
        out[queries], lse[queries] = causal_attention_lse.torch(
            q[queries], k[keys], v[keys], scale, window
        )
    return lse


@packed_attention.kernel
def _packed_attention_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lines: triton.PromptPlaces,
    scale: float,
    window: int | None,
    out: torch.Tensor,
) -> torch.Tensor:
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    constants = _tile(q)
    assert all(t.stride(3) == 1 for t in (q, k, v))
    strides = [step for t in (q, k, v, out) for step in triton.batch_strides(t, 3)]
    heads = q.shape[1]
    most = ALL_ROWS if window is None else window
    sizes = *strides, *triton.batch_strides(lse, 2), heads, heads // k.shape[1], most, scale
    grid = len(lines) * heads, -(-max(line.rows for line in lines) // constants["ROWS"])
    arguments = q, k, v, out, lse, triton.prompt_table(lines, q.device), *sizes
    triton.launch("prompts.attend", grid, arguments, **constants)
    return lse


def with_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> Result:
    """Add a sink to the softmax of each query: one more column, without a value.

    out: (b, heads, m, d); lse: (b, heads, m) fp32; sinks: (heads,), the logits. The result is
    written to the memory of `out`, and `lse` is overwritten too.
    """
    joined = torch.logaddexp(lse, sinks.float().view(1, -1, 1))
    return out.mul_(lse.sub_(joined).exp_().unsqueeze(3)), joined


def _hides(window: int | None, keys: int) -> bool:
    return window is not None and window < keys


def _first_key(row: int, window: int | None) -> int:
    """Return the first key that the query of row `row` (of all n rows) sees."""
    return 0 if window is None else max(0, row + 1 - window)


def _hidden(products: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return the mask of keys that the last m of n rows do not see, (m, n) bool.

    products: (..., m, n).
    """
    rows, n = products.shape[-2:]
    seen = torch.ones(rows, n, dtype=torch.bool, device=products.device).tril_(n - rows)
    return ~(seen if window is None else seen.triu_(n - rows + 1 - window))


def _row_pieces(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield a few rows at a time, each with the keys that it may see.

    So masks and work stay small.
    """
    before = k.shape[2] - q.shape[2]
    for start in range(0, q.shape[2], MASK_ROWS):
        end = min(q.shape[2], start + MASK_ROWS)
        seen = slice(_first_key(before + start, window), before + end)
        yield q[:, :, start:end], k[:, :, seen], v[:, :, seen]


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def _last_rows(q: torch.Tensor, k: torch.Tensor, window: int | None) -> torch.Tensor:
    """Return the attention mask if the queries are the last rows: (queries, keys), 0 or -inf."""
    mask = torch.zeros(q.shape[2], k.shape[2], dtype=q.dtype, device=q.device)
    return mask.masked_fill_(_hidden(mask, window), float("-inf"))


def _fused_for(q: torch.Tensor, k: torch.Tensor, window: int | None) -> _Fused | None:
    """Return torch's fused operation if it is right for these prompts and faster than our loop."""
    is_whole = q.shape[2] == k.shape[2] and not _hides(window, k.shape[2])
    on_amx = q.dtype == torch.bfloat16 and cpu_has("amx-bf16")
    if not is_whole or (cpu_has("avx2") and not on_amx):
        return None
    return _fused(q.dtype, q.shape[1] != k.shape[1])


def _has_loop(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None = None
) -> bool:
    return _is_compiled(q, k, v) or (is_compiled(q) and _fused_for(q, k, window) is not None)


@causal_attention_lse.loop_if(_has_loop)
def _attend_on_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None = None
) -> Result:
    """Attend in the compiled loop, or in torch's fused kernel if that is faster.

    In the memory of the result, the heads of a token are adjacent.
    """
    fused = _fused_for(q, k, window)
    if fused is not None:
        return _attend_in_pieces(fused, q, k, v, scale)
    return _attend_compiled(q, k, v, scale, window)


def _attend_in_pieces(
    fused: _Fused, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> Result:
    """Run the fused operation on whole prompts, some sequences and heads at a time.

    The operation copies keys and values for each query head. These copies and its own result take
    at most `TILE_BYTES`, or those of one kv-head.
    """
    batch, heads, n, width = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    out = torch.empty(batch, n, heads, width, dtype=q.dtype, device="cpu").transpose(1, 2)
    lse = torch.empty(batch, heads, n, dtype=torch.float32, device="cpu")
    most = max(1, TILE_BYTES // (3 * group * n * width * q.itemsize))
    for rows, some in _pieces(batch, kv_heads, most):
        of_queries = (
            slice(None) if some == slice(None) else slice(some.start * group, some.stop * group)
        )
        out[rows, of_queries], lse[rows, of_queries] = fused(
            q[rows, of_queries], k[rows, some], v[rows, some], is_causal=True, scale=scale
        )
    return out, lse


def _attend_compiled(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None = None
) -> Result:
    """Attend in the compiled loop. The result of a prompt depends on that prompt alone."""
    from flexgen_h2o.kernels.compiled import prompts as prompt_loops

    batch, heads, n, width = q.shape
    kv_heads, keys = k.shape[1:3]
    ok = (
        k.shape == v.shape == (batch, kv_heads, keys, width) and keys >= n and heads % kv_heads == 0
    )
    if not ok or not k.dtype == v.dtype == q.dtype:
        raise mismatch("causal_attention: q, k, v", q, k, v)
    out = torch.empty(batch, n, heads, width, dtype=q.dtype, device="cpu").transpose(1, 2)
    lse = torch.empty(batch, heads, n, dtype=torch.float32, device="cpu")

    def heads_of(t: torch.Tensor) -> prompt_loops.HeadStrides:
        batch_step, head_step, token_step = (t.itemsize * step for step in t.stride()[:3])
        return prompt_loops.HeadStrides(t.data_ptr(), batch_step, head_step, token_step)

    group = heads // kv_heads
    block = prompt_loops.KEYS
    queries = min(max(1, prompt_loops.QUERIES // group // block), -(-n // block)) * block
    job = prompt_loops.PromptsJob(
        kv_heads,
        group,
        n,
        keys - n,
        keys if window is None else window,
        width,
        queries,
        heads_of(q),
        heads_of(k),
        heads_of(v),
        heads_of(out),
        lse.data_ptr(),
    )
    loop = partial(prompt_loops.attend_units, element_of(q.dtype), job, np.float32(scale))
    parallel_rows(
        loop, batch * kv_heads * -(-n // queries), 4 * group * queries * width * q.itemsize
    )
    return out, lse


@lru_cache
def _fused(dtype: torch.dtype, shared: bool) -> _Fused | None:
    """Return torch's fused operation for whole prompts if it passes the self-check.

    shared: there are fewer kv-heads than heads.
    """
    found = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
    return found if found is not None and _is_right(found, dtype, shared) else None


def _is_right(fused: _Fused, dtype: torch.dtype, shared: bool) -> bool:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 37, heads, 16, generator=generator, dtype=torch.float32, device="cpu")
        .to(dtype)
        .transpose(1, 2)
        for heads in (4, 2 if shared else 4, 2 if shared else 4)
    )
    try:
        result = fused(q, k, v, is_causal=True, scale=0.3)
    # the operation is renamed, or not for this hardware
    except (RuntimeError, TypeError, ValueError):
        return False
    tolerance = 4e-2 if dtype == torch.bfloat16 else 1e-4
    return all(
        a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, atol=tolerance, rtol=0.0)
        for a, b in zip(result, causal_attention_lse.torch(q, k, v, 0.3), strict=True)
    )
