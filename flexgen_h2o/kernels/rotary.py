"""Rotary position embeddings of queries and keys; rounded where transformers rounds them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexgen_h2o.kernels.threads import share_rows
from flexgen_h2o.limits import ROTARY_CHUNK


class Rotation:
    """The rotary embeddings of a model: pairs of numbers of a head turn by position x frequency.

    frequencies: (pairs,) fp32, scaling: config.Rotary's. Angles, sines and cosines are in fp32, products in the dtype
    of what is turned.
    """

    def __init__(self, frequencies: torch.Tensor, scaling: float) -> None:
        self._frequencies, self._scaling = frequencies, scaling

    def turn(self, tensors: Sequence[torch.Tensor], positions: torch.Tensor) -> None:
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

    def turned(self, keys: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
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

        from flexgen_h2o.kernels import rotary_loops

        (rows, slots, width), pairs = keys.shape, len(self._frequencies)
        if not (keys.is_contiguous() and ranks.is_contiguous() and ranks.shape == keys.shape[:2]):
            raise ValueError(f"turned: keys {tuple(keys.shape)} and ranks {tuple(ranks.shape)} do not go together")
        if ranks.dtype != torch.int32 or 2 * pairs > width:
            raise ValueError(f"turned: ranks are {ranks.dtype}, and {2 * pairs} numbers of {width} turn")
        cos, sin = self._angles(torch.arange(slots), torch.float32)
        out = torch.empty_like(keys)
        job = rotary_loops.Job(
            slots, width, pairs, keys.data_ptr(), ranks.data_ptr(), cos.data_ptr(), sin.data_ptr(), out.data_ptr()
        )
        element = np.float32(0) if keys.dtype == torch.float32 else np.uint16(0)
        share_rows(
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

    from flexgen_h2o.kernels import rotary_loops

    (tokens, heads, width), pairs = x.shape, cos.shape[1]
    if 2 * pairs > width:
        raise ValueError(f"turn: {2 * pairs} numbers of {width} cannot turn")
    token, head = (2 * step for step in x.stride()[:2])
    job = rotary_loops.Heads(heads, pairs, x.data_ptr(), token, head, cos.data_ptr(), sin.data_ptr())
    share_rows(lambda first, end: rotary_loops.turn_heads(np.uint16(0), job, first, end), tokens, 8 * heads * pairs)


def _turn(x: torch.Tensor, out: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """out = x with pairs (i, i + pairs) of its last dimension turned; out may be x. cos, sin: (..., pairs)."""
    pairs = cos.shape[-1]
    first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    turned = (first * cos).sub_(second * sin)
    out[..., pairs : 2 * pairs] = (second * cos).add_(first * sin)
    out[..., :pairs] = turned
