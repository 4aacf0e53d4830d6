"""Causal attention over whole prompts, and the same with the log-sum-exp that the column sums need.

On a CPU with AVX-512, fp32 and bf16 go through a compiled loop (`prompt_loops`): 2 to 3 times as fast as torch's own.

Elsewhere torch computes the log-sum-exp inside its fused attention, but gives it out only through private operations.
They are tried once against `causal_attention_lse_reference` on a small case, and left alone where they are missing,
raise or differ. The CUDA one has not run on a GPU yet.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from flexgen_h2o.kernels.threads import share_rows
from flexgen_h2o.kernels.tiles import REFERENCE_ROWS

if TYPE_CHECKING:
    from flexgen_h2o.kernels.prompt_loops import Heads

Result = tuple[torch.Tensor, torch.Tensor]
_Fused = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], Result]

# Of a self-check: rows on both sides of a tile's edge, and how far results in a dtype may be apart.
_CHECK_ROWS = 37
_CHECK_TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Causal attention of whole prompts, O(n) memory.

    q: (b, heads, n, d), k and v: (b, kv_heads, n, d), same dtype. Returns (b, heads, n, d).
    """
    if _is_compiled(q, k, v):
        return _attend_compiled(q, k, v, scale)[0]
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=q.shape[2] > 1, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def causal_attention_lse(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Result:
    """`causal_attention`, and for each query the natural logarithm of the sum of exp(scale x q.k) over its keys.

    q: (b, heads, n, d), k and v: (b, kv_heads, n, d), same dtype, any strides. Returns (b, heads, n, d) in q's dtype
    and (b, heads, n) fp32.
    """
    if _is_compiled(q, k, v):
        return _attend_compiled(q, k, v, scale)
    fused = _checked(q.device.type, q.dtype, q.shape[1] != k.shape[1])
    return (fused or causal_attention_lse_reference)(q, k, v, scale)


def causal_attention_lse_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Result:
    """`causal_attention_lse` in torch operations, `REFERENCE_ROWS` queries at a time: memory O(n x REFERENCE_ROWS)."""
    batch, heads, n, width = q.shape
    kv_heads = k.shape[1]
    grouped = (batch, kv_heads, heads // kv_heads)
    out = torch.empty(*grouped, n, width, dtype=q.dtype, device=q.device)
    lse = torch.empty(*grouped, n, dtype=torch.float32, device=q.device)
    queries, keys, values = q.view(*grouped, n, width), k.unsqueeze(2), v.unsqueeze(2)
    for start in range(0, n, REFERENCE_ROWS):
        end = min(n, start + REFERENCE_ROWS)
        products = (queries[..., start:end, :].float() @ keys[..., :end, :].float().transpose(-1, -2)).mul_(scale)
        later = torch.ones(end - start, end, dtype=torch.bool, device=q.device).triu_(start + 1)
        products.masked_fill_(later, float("-inf"))
        lse[..., start:end] = torch.logsumexp(products, dim=-1)
        p = products.sub_(lse[..., start:end, None]).exp_()
        out[..., start:end, :] = p @ values[..., :end, :].float()
    return out.view(q.shape), lse.view(batch, heads, n)


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

    (batch, heads, n, width), kv_heads = q.shape, k.shape[1]
    if (
        k.shape != (batch, kv_heads, n, width)
        or v.shape != k.shape
        or heads % kv_heads
        or not k.dtype == v.dtype == q.dtype
    ):
        shapes = (f"{tuple(t.shape)} {t.dtype}" for t in (q, k, v))
        raise ValueError("causal_attention: q, k, v do not go together: {}; {}; {}".format(*shapes))
    out = torch.empty(batch, n, heads, width, dtype=q.dtype).transpose(1, 2)
    lse = torch.empty(batch, heads, n, dtype=torch.float32)
    group, block = heads // kv_heads, prompt_loops.KEYS
    queries = min(max(1, prompt_loops.QUERIES // group // block), -(-n // block)) * block
    places = dict(zip("qkv", map(_place, (q, k, v)), strict=True))
    job = prompt_loops.Prompts(kv_heads, group, n, width, queries, **places, out=_place(out), lse=lse.data_ptr())
    element = np.float32(0) if q.dtype == torch.float32 else np.uint16(0)
    units = batch * kv_heads * -(-n // queries)
    share_rows(
        lambda first, end: prompt_loops.attend_units(element, job, np.float32(scale), first, end),
        units, 4 * group * queries * width * q.itemsize,
    )  # fmt: skip
    return out, lse


def _place(t: torch.Tensor) -> Heads:
    from flexgen_h2o.kernels.prompt_loops import Heads

    batch, head, token = (t.itemsize * step for step in t.stride()[:3])
    return Heads(t.data_ptr(), batch, head, token)


def _fused_cpu(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Result:
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=True, scale=scale)
    return out, lse


def _fused_cuda(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> Result:
    """The head width must be a multiple of 8, as in all models we know; others raise, and the check sees only 16."""
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
    try:
        result = fused(q, k, v, 0.3)
    except (RuntimeError, AttributeError, TypeError, ValueError):  # gone, renamed, or not for this hardware
        return None
    expected = causal_attention_lse_reference(q, k, v, 0.3)
    same = all(
        a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, atol=_CHECK_TOLERANCE[dtype], rtol=0.0)
        for a, b in zip(result, expected, strict=True)
    )
    return fused if same else None
