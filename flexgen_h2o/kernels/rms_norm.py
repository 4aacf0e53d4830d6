"""Root-mean-square norm (Zhang and Sennrich 2019), rounded where transformers' LLaMA rounds it."""

from __future__ import annotations

import torch

from flexgen_h2o.kernels.threads import share_rows
from flexgen_h2o.limits import NORM_CHUNK


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> torch.Tensor:
    """out = weight x (x / sqrt(mean(x^2) + eps)): in fp32, then rounded to x's dtype, then times the weight.

    x, out: (rows, width); weight: (width,), all of one dtype. A row's result depends on that row alone. On the CPU,
    fp32 and bf16 go through one compiled loop, which adds in another order than torch; the rest through torch
    operations.
    """
    together = (x, weight, out)
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.bfloat16):
        return rms_norm_reference(x, weight, eps, out)
    if any(t.dtype != x.dtype or t.stride(-1) != 1 for t in together) or not x.shape == out.shape == (
        len(x),
        *weight.shape,
    ):
        raise ValueError(f"rms_norm: {', '.join(f'{tuple(t.shape)} {t.dtype} {t.stride()}' for t in together)}")
    import numpy as np

    from flexgen_h2o.kernels import row_loops

    steps = [t.stride(0) * t.itemsize for t in (x, out)]
    job = row_loops.Norm(x.shape[1], x.data_ptr(), steps[0], weight.data_ptr(), out.data_ptr(), steps[1])
    element = np.float32(0) if x.dtype == torch.float32 else np.uint16(0)
    share_rows(
        lambda first, end: row_loops.norm_rows(element, job, np.float32(eps), first, end),
        len(x), 2 * x.shape[1] * x.itemsize,
    )  # fmt: skip
    return out


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> torch.Tensor:
    """`rms_norm` in torch operations, as transformers does it. NORM_CHUNK rows exist in fp32 at a time."""
    for rows, into in zip(x.split(NORM_CHUNK), out.split(NORM_CHUNK), strict=True):
        wide = rows.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        into.copy_(wide * scale).mul_(weight)
    return out
