"""Rotary position embeddings of queries and keys; rounded where transformers rounds them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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
            cos, sin = (angles.unsqueeze(1) for angles in self._angles(positions[here].to(where), dtype))
            for t in tensors:
                _turn(t[here], t[here], cos, sin)

    def turned(self, keys: torch.Tensor, ranks: torch.Tensor) -> torch.Tensor:
        """A copy of keys (rows, slots, d), each turned by its rank, (rows, slots) ints below the number of slots."""
        cos, sin = self._angles(torch.arange(keys.shape[1], device=keys.device), keys.dtype)
        out = keys.clone()
        _turn(keys, out, cos[ranks], sin[ranks])
        return out

    def _angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of positions, each (positions, pairs)."""
        frequencies = self._frequencies.to(positions.device)
        angles = positions.float().unsqueeze(1) * frequencies
        return (angles.cos() * self._scaling).to(dtype), (angles.sin() * self._scaling).to(dtype)


def _turn(x: torch.Tensor, out: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """out = x with pairs (i, i + pairs) of its last dimension turned; out may be x. cos, sin: (..., pairs)."""
    pairs = cos.shape[-1]
    first, second = x[..., :pairs], x[..., pairs : 2 * pairs]
    turned = (first * cos).sub_(second * sin)
    out[..., pairs : 2 * pairs] = (second * cos).add_(first * sin)
    out[..., :pairs] = turned
