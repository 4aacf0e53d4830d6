"""The gate of a gated MLP with SiLU (Shazeer 2020, SwiGLU without its products); rounded where transformers rounds."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from flexgen_h2o.kernels.threads import share_rows


def silu_gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """gate = silu(gate) x up, in place; silu in fp32, rounded to the dtype before the product. Returns gate.

    gate, up: (rows, width) of one dtype, contiguous. On the CPU, fp32 and bf16 go through one compiled loop.
    """
    if gate.device.type != "cpu" or gate.dtype not in (torch.float32, torch.bfloat16):
        return silu_gated_reference(gate, up)
    if gate.shape != up.shape or gate.dtype != up.dtype or not (gate.is_contiguous() and up.is_contiguous()):
        shapes = (f"{tuple(t.shape)} {t.dtype} {t.stride()}" for t in (gate, up))
        raise ValueError("silu_gated: gate and up do not go together: {}; {}".format(*shapes))
    import numpy as np

    from flexgen_h2o.kernels import row_loops

    rows, width = gate.shape
    element = np.float32(0) if gate.dtype == torch.float32 else np.uint16(0)
    places = gate.data_ptr(), up.data_ptr()
    share_rows(
        lambda first, end: row_loops.silu_rows(element, *places, width, first, end), rows, 3 * width * gate.itemsize
    )
    return gate


def silu_gated_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu_gated` in torch operations."""
    return F.silu(gate, inplace=True).mul_(up)
