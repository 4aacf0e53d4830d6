"""Bytes that products take besides their matrices.

In int8 (kernels/int8.py) they take step buffers, each used by one product at a time. While rows are being blocked
(kernels/linear.py, int8.py) torch takes temporaries.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain

from flexgen_h2o.checkpoint.formats import WeightFormat
from flexgen_h2o.core.config import ModelSpec
from flexgen_h2o.core.packing import INT8_ROW_BYTES
from flexgen_h2o.core.units import ALIGN, BLOCK_CHUNK, BLOCK_ROWS, INT8_TILE, TOKEN_CHUNK, round_up


def int8_sizes(spec: ModelSpec, tokens: int) -> dict[str, int]:
    """Step buffers by name, for the largest matrix of the model. tokens: the most that a step sees; TOKEN_CHUNK are
    quantised at a time."""
    tensors = chain(spec.embedding, *spec.attention, *spec.mlp, spec.head)
    shapes = [t.shape for t in tensors if len(t.shape) == 2]
    outer, inner = (max(sizes) for sizes in zip(*shapes, strict=True))
    return product_sizes(min(TOKEN_CHUNK, tokens), inner, outer)


def product_sizes(rows: int, inner: int, outer: int) -> dict[str, int]:
    """Step buffers by name, for `rows` inputs and matrices of at most (outer, inner); at most INT8_TILE sums exist."""
    sizes = {
        "int8 inputs": rows * inner,
        "int8 input scales": rows * 4,
        "int8 weight scales": outer * 4,
        "int8 sums": min(rows * outer, INT8_TILE) * 4,
    }
    return {name: round_up(nbytes, ALIGN) for name, nbytes in sizes.items()}


def is_blocked(form: WeightFormat, device_is_host: bool) -> bool:
    """May resident matrices in this form be blocked for products in bf16? On a CPU, dtypes of two bytes are bf16."""
    return device_is_host and not form.decodes and not form.in_int8 and form.itemsize == 2


def blocking_bytes(spec: ModelSpec, form: WeightFormat, device_is_host: bool) -> int:
    """Copy of resident rows that are being blocked, some at a time; in int8 also of their scales and sums."""
    if not is_blocked(form, device_is_host) and not (device_is_host and form.in_int8):
        return 0
    itemsize, ends = (1, 3 * INT8_ROW_BYTES) if form.in_int8 else (form.itemsize, 0)
    return max(
        min(outer, max(BLOCK_ROWS, BLOCK_CHUNK // (inner * itemsize))) * inner * itemsize + outer * ends
        for outer, inner in _blocked_shapes(spec, form.blocks_tables)
    )


@lru_cache(maxsize=16)
def _blocked_shapes(spec: ModelSpec, with_table: bool) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of the matrices that may be blocked, each once. with_table: one that the head shares too."""
    head = () if spec.shares_table and not with_table else (spec.head,)
    blocks = (*spec.attention, *spec.mlp, *head)
    return tuple({(t.shape[0], t.shape[1]) for tensors in blocks for t in tensors if len(t.shape) == 2})
