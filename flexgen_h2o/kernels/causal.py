"""Causal attention over prompts, and the same with the log-sum-exp that the column sums need.

There may be more keys than queries: the queries are then the last rows of the prompt.

On a CPU with AVX-512, fp32 and bf16 go through a compiled loop (`prompt_loops`): 2 to 3 times as fast as torch's own.

Elsewhere torch computes the log-sum-exp inside its fused attention, but gives it out only through private operations.
They are tried once against `causal_attention_lse_reference` on a small case, and left alone where they are missing,
raise or differ. The CUDA one has not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache

import torch

from flexgen_h2o.kernels.threads import share_rows
from flexgen_h2o.kernels.tiles import REFERENCE_ROWS
from flexgen_h2o.limits import MASK_ROWS

Result = tuple[torch.Tensor, torch.Tensor]
_Fused = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], Result]

# Of a self-check: rows on both sides of a tile's edge, of them queries where they are fewer, and how far results in a
# dtype may be apart.
_CHECK_ROWS, _CHECK_LAST = 37, 5
_CHECK_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of the last m rows of prompts, or of all, O(n) memory.

    q: (b, heads, m, d), k and v: (b, kv_heads, n, d), same dtype, m <= n. Returns (b, heads, m, d).
    """
    if _is_compiled(q, k, v):
        return _attend_compiled(q, k, v, scale)[0]
    rows, n = q.shape[2], k.shape[2]
    if rows < n and rows > 1:
        pieces = [
            torch.nn.functional.scaled_dot_product_attention(
                some, keys, values, attn_mask=_last_rows(some, keys), scale=scale, enable_gqa=q.shape[1] != k.shape[1]
            )
            for some, keys, values in _row_pieces(q, k, v)
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=rows > 1, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def causal_attention_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Result:
    """`causal_attention`, and for each query the natural logarithm of the sum of exp(scale x q.k) over its keys.

    q: (b, heads, m, d), k and v: (b, kv_heads, n, d), same dtype, any strides, m <= n. Returns (b, heads, m, d) in q's
    dtype and (b, heads, m) fp32.
    """
    if _is_compiled(q, k, v):
        return _attend_compiled(q, k, v, scale)
    fused = _checked(q.device.type, q.dtype, q.shape[1] != k.shape[1])
    return (fused or causal_attention_lse_reference)(q, k, v, scale)


def causal_attention_lse_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Result:
    """`causal_attention_lse` in torch operations, `REFERENCE_ROWS` queries at a time: memory O(n x REFERENCE_ROWS)."""
    batch, heads, rows, width = q.shape
    kv_heads, before = k.shape[1], k.shape[2] - rows
    grouped = (batch, kv_heads, heads // kv_heads)
    out = torch.empty(*grouped, rows, width, dtype=q.dtype, device=q.device)
    lse = torch.empty(*grouped, rows, dtype=torch.float32, device=q.device)
    queries, keys, values = q.unflatten(1, grouped[1:]), k.unsqueeze(2), v.unsqueeze(2)
    for start in range(0, rows, REFERENCE_ROWS):
        end = min(rows, start + REFERENCE_ROWS)
        seen = before + end
        products = (queries[..., start:end, :].float() @ keys[..., :seen, :].float().transpose(-1, -2)).mul_(scale)
        later = torch.ones(end - start, seen, dtype=torch.bool, device=q.device).triu_(before + start + 1)
        products.masked_fill_(later, float("-inf"))
        lse[..., start:end] = torch.logsumexp(products, dim=-1)
        p = products.sub_(lse[..., start:end, None]).exp_()
        out[..., start:end, :] = p @ values[..., :seen, :].float()
    return out.view(q.shape), lse.view(batch, heads, rows)


def _row_pieces(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """A few of the last rows at a time, each with the keys that it may see: masks stay small, and so does the work."""
    before = k.shape[2] - q.shape[2]
    for start in range(0, q.shape[2], MASK_ROWS):
        end = min(q.shape[2], start + MASK_ROWS)
        yield q[:, :, start:end], k[:, :, : before + end], v[:, :, : before + end]


def _last_rows(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The mask of queries that are the last of as many rows as there are keys: (queries, keys), 0 or -inf."""
    rows, n = q.shape[2], k.shape[2]
    return torch.full((rows, n), float("-inf"), dtype=q.dtype, device=q.device).triu_(n - rows + 1)


def _is_compiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether the compiled loop can read these, and is the faster one."""
    right = q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16)
    return right and all(t.stride(3) == 1 for t in (q, k, v)) and _has_wide_vectors()


@lru_cache(maxsize=1)
def _has_wide_vectors() -> bool:
    """AVX-512: 32 registers of 16 floats, as many as a tile of the compiled loop takes."""
    from llvmlite import binding

    return bool(binding.get_host_cpu_features().get("avx512f", False))


def _attend_compiled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Result:
    """The result has the heads of a token side by side. What a prompt gets depends on that prompt alone."""
    import numpy as np

    from flexgen_h2o.kernels import prompt_loops

    (batch, heads, n, width), (kv_heads, keys) = q.shape, k.shape[1:3]
    if (
        k.shape != (batch, kv_heads, keys, width)
        or keys < n
        or v.shape != k.shape
        or heads % kv_heads
        or not k.dtype == v.dtype == q.dtype
    ):
        shapes = (f"{tuple(t.shape)} {t.dtype}" for t in (q, k, v))
        raise ValueError("causal_attention: q, k, v do not go together: {}; {}; {}".format(*shapes))
    out = torch.empty(batch, n, heads, width, dtype=q.dtype).transpose(1, 2)
    lse = torch.empty(batch, heads, n, dtype=torch.float32)
    places = [x for t in (q, k, v, out) for x in (t.data_ptr(), *(t.itemsize * step for step in t.stride()[:3]))]
    places.append(lse.data_ptr())
    group, block = heads // kv_heads, prompt_loops.KEYS
    queries = min(max(1, prompt_loops.QUERIES // group // block), -(-n // block)) * block
    job = prompt_loops.Prompts(kv_heads, group, n, keys - n, width, queries, *places)
    element = np.float32(0) if q.dtype == torch.float32 else np.uint16(0)
    units = batch * kv_heads * -(-n // queries)
    share_rows(
        lambda first, end: prompt_loops.attend_units(element, job, np.float32(scale), first, end),
        units, 4 * group * queries * width * q.itemsize,
    )  # fmt: skip
    return out, lse


def _fused_cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Result:
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if q.shape[2] == k.shape[2]:
        out, lse = fused(q, k, v, is_causal=True, scale=scale)
        return out, lse
    pieces = [
        fused(some, keys, values, attn_mask=_last_rows(some, keys), scale=scale)
        for some, keys, values in _row_pieces(q, k, v)
    ]
    if len(pieces) == 1:
        return pieces[0][0], pieces[0][1]
    return torch.cat([out for out, _ in pieces], dim=2), torch.cat([lse for _, lse in pieces], dim=2)


def _fused_cuda(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Result:
    """The head width must be a multiple of 8, as in all models we know; others raise, and the check sees only 16.

    With more keys than queries these are the last rows, as they should be; the check sees whether that is so.
    """
    if q.shape[3] % 8:
        return causal_attention_lse_reference(q, k, v, scale)
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True, scale=scale)
    return out, lse[..., : q.shape[2]]


_FUSED: dict[str, tuple[_Fused, tuple[torch.dtype, ...]]] = {
    "cpu": (_fused_cpu, (torch.float32, torch.bfloat16)),
    "cuda": (_fused_cuda, (torch.float16, torch.bfloat16)),
}


@lru_cache
def _checked(device: str, dtype: torch.dtype, shared: bool) -> _Fused | None:
    """The fused operation of a kind of device, if it does what we think; shared: fewer kv-heads than heads."""
    fused, dtypes = _FUSED.get(device, (None, ()))
    if fused is None or dtype not in dtypes:
        return None
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, _CHECK_ROWS, heads, 16, generator=generator).to(device, dtype).transpose(1, 2)
        for heads in (4, 2 if shared else 4, 2 if shared else 4)
    )
    for queries in (q, q[:, :, -_CHECK_LAST:]):
        try:
            result = fused(queries, k, v, 0.3)
        except (RuntimeError, AttributeError, TypeError, ValueError):  # gone, renamed, or not for this hardware
            return None
        expected = causal_attention_lse_reference(queries, k, v, 0.3)
        if not all(
            a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, atol=_CHECK_TOLERANCE[dtype], rtol=0.0)
            for a, b in zip(result, expected, strict=True)
        ):
            return None
    return fused
