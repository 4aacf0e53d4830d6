"""Bytes of the step buffers that products in int8 take (kernels/int8_rows.py), each used by one product at a time."""

from __future__ import annotations

from itertools import chain

from flexgen_h2o.config import ModelSpec
from flexgen_h2o.limits import ALIGN, INT8_TILE, TOKEN_CHUNK
from flexgen_h2o.units import round_up


def int8_sizes(spec: ModelSpec, tokens: int) -> dict[str, int]:
    """By name, for the largest matrix of the model. tokens: the most that a step sees; TOKEN_CHUNK are quantised at a
    time, and INT8_TILE sums exist."""
    tensors = chain(spec.embedding, *spec.attention, *spec.mlp, spec.head)
    shapes = [t.shape for t in tensors if len(t.shape) == 2]
    outer, inner = (max(sizes) for sizes in zip(*shapes, strict=True))
    return product_sizes(min(TOKEN_CHUNK, tokens), inner, outer)


def product_sizes(rows: int, inner: int, outer: int) -> dict[str, int]:
    """By name, for `rows` inputs and matrices of at most (outer, inner)."""
    sizes = {
        "int8 inputs": rows * inner,
        "int8 input scales": rows * 4,
        "int8 weight scales": outer * 4,
        "int8 sums": min(rows * outer, INT8_TILE) * 4,
    }
    return {name: round_up(nbytes, ALIGN) for name, nbytes in sizes.items()}
