"""Root-mean-square norm (Zhang and Sennrich 2019), rounded where transformers' LLaMA rounds it."""

from __future__ import annotations

import torch

from flexgen_h2o.limits import NORM_CHUNK


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> torch.Tensor:
    """out = weight x (x / sqrt(mean(x^2) + eps)): in fp32, then rounded to x's dtype, then times the weight.

    x, out: (rows, width); weight: (width,). NORM_CHUNK rows exist in fp32 at a time.
    """
    for rows, into in zip(x.split(NORM_CHUNK), out.split(NORM_CHUNK), strict=True):
        wide = rows.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        into.copy_(wide * scale).mul_(weight)
    return out
