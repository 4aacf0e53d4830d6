"""Rotary position embeddings of queries and keys, in place; rounded where transformers rounds them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from flexgen_h2o.limits import ROTARY_CHUNK


def rotate(tensors: Iterable[torch.Tensor], positions: torch.Tensor, frequencies: torch.Tensor, scaling: float) -> None:
    """Turn the first 2 x pairs numbers of each head by the token's position (config.Rotary).

    tensors: each (tokens, heads, d), changed; positions: (tokens,) ints, on any device; frequencies: (pairs,) fp32.
    Angles, sines and cosines are in fp32, products in the tensors' dtype.
    """
    tensors = tuple(tensors)
    pairs, where, dtype = len(frequencies), tensors[0].device, tensors[0].dtype
    for start in range(0, len(positions), ROTARY_CHUNK):
        here = slice(start, start + ROTARY_CHUNK)
        angles = positions[here].to(where).float().unsqueeze(1) * frequencies
        cos, sin = ((values * scaling).to(dtype).unsqueeze(1) for values in (angles.cos(), angles.sin()))
        for t in tensors:
            first, second = t[here, :, :pairs], t[here, :, pairs : 2 * pairs]
            turned = (first * cos).sub_(second * sin)
            second.mul_(cos).add_(first * sin)
            first.copy_(turned)
