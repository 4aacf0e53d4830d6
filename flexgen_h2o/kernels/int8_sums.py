"""Products of int8 codes, as whole numbers: torch's, or the same by products of float32."""

from __future__ import annotations

from functools import lru_cache

import torch

from flexgen_h2o.limits import UNPACK_CHUNK

_EXACT = 1024  # products of codes (at most 127 x 127) whose sum float32 holds exactly, in any order


def int8_products(codes: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out = codes W^T. codes: (rows, columns), weight: (n, columns), both int8; out: (rows, n) int32, contiguous."""
    if codes.device.type == "cpu" and _int_mm_works():
        torch._int_mm(codes, weight.t(), out=out)
    else:
        int8_products_reference(codes, weight, out)


def int8_products_reference(codes: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """`int8_products` as products of float32, exact: some columns, and some rows of the weight, at a time."""
    out.zero_()
    step = UNPACK_CHUNK // _EXACT
    for k in range(0, codes.shape[1], _EXACT):
        inputs = codes[:, k : k + _EXACT].float()
        for a in range(0, len(weight), step):
            out[:, a : a + step] += (inputs @ weight[a : a + step, k : k + _EXACT].float().t()).to(torch.int32)


@lru_cache(maxsize=1)
def _int_mm_works() -> bool:
    """torch._int_mm is private, and instructions of older CPUs cut sums of large products: is it there, and exact?"""
    codes, weight = (torch.full((n, 260), 127, dtype=torch.int8) for n in (3, 32))
    codes[0, ::2], weight[1], weight[2, 1::2] = -127, -127, -127
    weight = weight[:, :256]  # rows that lie apart, as packed rows do
    out, want = (torch.empty(3, 32, dtype=torch.int32) for _ in range(2))
    try:
        torch._int_mm(codes[:, :256].contiguous(), weight.t(), out=out)
    except (AttributeError, RuntimeError, TypeError):
        return False
    int8_products_reference(codes[:, :256], weight, want)
    return torch.equal(out, want)
