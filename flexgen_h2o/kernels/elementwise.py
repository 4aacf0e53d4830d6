"""The gate of a gated MLP with SiLU (Shazeer 2020, SwiGLU without its products); rounded where transformers rounds.

Root-mean-square norm (Zhang and Sennrich 2019), rounded where transformers' LLaMA rounds it.

Rotary position embeddings of queries and keys; rounded where transformers rounds them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from flexgen_h2o.core.units import NORM_CHUNK, ROTARY_CHUNK
from flexgen_h2o.kernels.workspace import parallel_rows


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

    from flexgen_h2o.kernels.compiled import rows as row_loops

    rows, width = gate.shape
    element = np.float32(0) if gate.dtype == torch.float32 else np.uint16(0)
    places = gate.data_ptr(), up.data_ptr()
    parallel_rows(
        lambda first, end: row_loops.silu_rows(element, *places, width, first, end), rows, 3 * width * gate.itemsize
    )
    return gate


def silu_gated_reference(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu_gated` in torch operations."""
    return F.silu(gate, inplace=True).mul_(up)


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

    from flexgen_h2o.kernels.compiled import rows as row_loops

    steps = [t.stride(0) * t.itemsize for t in (x, out)]
    job = row_loops.Norm(x.shape[1], x.data_ptr(), steps[0], weight.data_ptr(), out.data_ptr(), steps[1])
    element = np.float32(0) if x.dtype == torch.float32 else np.uint16(0)
    parallel_rows(
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


class Rotation:
    """The rotary embeddings of a model: pairs of numbers of a head turn by position x frequency.

    frequencies: (pairs,) fp32, scaling: config.Rotary's. Angles, sines and cosines are in fp32, products in the dtype
    of what is turned.
    """

    def __init__(self, frequencies: torch.Tensor, scaling: float) -> None:
        self._frequencies, self._scaling = frequencies, scaling

    def rotate(self, tensors: Sequence[torch.Tensor], positions: torch.Tensor) -> None:
        """Turn heads in place. tensors: (tokens, heads, d) of one dtype; positions: (tokens,) ints, on any device."""
        where, dtype = tensors[0].device, tensors[0].dtype
        for start in range(0, len(positions), ROTARY_CHUNK):
            here = slice(start, start + ROTARY_CHUNK)
            cos, sin = self._angles(positions[here].to(where), dtype)
            for t in tensors:
                if where.type == "cpu" and dtype == torch.bfloat16 and t.stride(2) == 1:
                    _turn_compiled(t[here], cos, sin)
                else:
                    _turn(t[here], t[here], cos.unsqueeze(1), sin.unsqueeze(1))

    def rotated(self, keys: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
        """Keys (rows, slots, d), each turned by its rank, as a tensor of their own; ranks: (rows, slots) int32.

        Slots whose rank is not below the number of slots hold nothing, and may hold anything in the result.
        """
        if keys.device.type != "cpu" or keys.dtype not in (torch.float32, torch.bfloat16):
            return self.turned_reference(keys, ranks)
        return self._turned_compiled(keys, ranks)

    def turned_reference(self, keys: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
        """`turned` in torch operations."""
        cos, sin = self._angles(torch.arange(keys.shape[1], device=keys.device), keys.dtype)
        out, index = keys.clone(), ranks.clamp(max=keys.shape[1] - 1).long()
        _turn(keys, out, cos[index], sin[index])
        return out

    def _turned_compiled(self, keys: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
        """Rounds once, at the end."""
        import numpy as np

        from flexgen_h2o.kernels.compiled import rows as rotary_loops

        (rows, slots, width), pairs = keys.shape, len(self._frequencies)
        if not (keys.is_contiguous() and ranks.is_contiguous() and ranks.shape == keys.shape[:2]):
            raise ValueError(f"rotated: keys {tuple(keys.shape)} and ranks {tuple(ranks.shape)} do not go together")
        if ranks.dtype != torch.int32 or 2 * pairs > width:
            raise ValueError(f"rotated: ranks are {ranks.dtype}, and {2 * pairs} numbers of {width} turn")
        cos, sin = self._angles(torch.arange(slots), torch.float32)
        out = torch.empty_like(keys)
        job = rotary_loops.RotaryJob(
            slots, width, pairs, keys.data_ptr(), ranks.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr()
        )
        element = np.float32(0) if keys.dtype == torch.float32 else np.uint16(0)
        parallel_rows(
            lambda first, end: rotary_loops.turn_rows(element, job, first, end), rows, 2 * slots * width * keys.itemsize
        )
        return out

    def _angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of positions, each (positions, pairs)."""
        frequencies = self._frequencies.to(positions.device)
        angles = positions.float().unsqueeze(1) * frequencies
        return (angles.cos() * self._scaling).to(dtype), (angles.sin() * self._scaling).to(dtype)


def _turn_compiled(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Heads in bf16 (tokens, heads, d), in place, to the bit as `_turn`; cos, sin: (tokens, pairs) in bf16.

    Not for fp32: a compiled loop may fuse a product with a sum, which rounds less often.
    """
    import numpy as np

    from flexgen_h2o.kernels.compiled import rows as rotary_loops

    (tokens, heads, width), pairs = x.shape, cos.shape[1]
    if 2 * pairs > width:
        raise ValueError(f"rotate: {2 * pairs} numbers of {width} cannot turn")
    token, head = (2 * step for step in x.stride()[:2])
    job = rotary_loops.Heads(heads, pairs, x.data_ptr(), token, head, cos.data_ptr(), sin.data_ptr())
    parallel_rows(lambda first, end: rotary_loops.turn_heads(np.uint16(0), job, first, end), tokens, 8 * heads * pairs)


def _turn(x: torch.Tensor, out: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """out = x with pairs (i, i + pairs) of its last dimension turned; out may be x. cos, sin: (..., pairs)."""
    pairs = cos.shape[-1]
    first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    rotated = (first * cos).sub_(second * sin)
    out[..., pairs : 2 * pairs] = (second * cos).add_(first * sin)
    out[..., :pairs] = rotated
