"""Bytes that products take besides their matrices.

In int8 (kernels/int8.py) they take step buffers, each used by one product at a time. With blocked matrices
(kernels/linear.py, int8.py) torch takes temporaries, in products and while rows are being blocked.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain

from flexgen_h2o.checkpoint.formats import WeightFormat
from flexgen_h2o.core.model import ModelSpec, TensorSpec
from flexgen_h2o.core.packing import INT8_ROW_BYTES
from flexgen_h2o.core.units import ALIGN, BLOCK_CHUNK, INT8_BLOCK_ROWS, INT8_TILE, TOKEN_CHUNK, round_up

_SUM_BYTES = 4


def int8_sizes(spec: ModelSpec, tokens: int) -> dict[str, int]:
    """Step buffers by name, for the largest matrix of the model. tokens: the most that a step sees; TOKEN_CHUNK are
    quantised at a time."""
    tensors = chain(spec.embedding, *_blocks(spec), spec.head)
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


def blocked_bytes(spec: ModelSpec, form: WeightFormat, device_is_host: bool, tokens: int, rows: int) -> tuple[int, int]:
    """Temporaries of the largest product with blocked matrices, and of blocking them; 0 where none is blocked.

    tokens: the most that a step sees; rows: of a micro-batch, which the head sees.
    """
    if is_blocked(form, device_is_host):
        return product_bytes(spec, tokens, rows, form.itemsize), blocking_bytes(spec, form.itemsize)
    if device_is_host and form.in_int8:  # resident rows, or those that are decoded
        return int8_product_bytes(spec, tokens, rows), int8_blocking_bytes(spec)
    return 0, 0


def product_bytes(spec: ModelSpec, tokens: int, rows: int, itemsize: int) -> int:
    """Result of the largest product in bf16: of `tokens` with a transformer block's matrix, twice where it is added to
    the residual stream; or of `rows` with the head."""
    of_block = min(TOKEN_CHUNK, tokens) * max(
        _rows_at_a_time(shape, itemsize) * (2 if shape[0] == spec.hidden_size else 1) for shape in _block_shapes(spec)
    )
    of_head = min(TOKEN_CHUNK, rows) * max((_rows_at_a_time(s, itemsize) for s in _head_shapes(spec, False)), default=0)
    return max(of_block, of_head) * itemsize


def int8_product_bytes(spec: ModelSpec, tokens: int, rows: int) -> int:
    """Sums of the largest product in int8; a tied head is blocked too."""
    of_block = min(TOKEN_CHUNK, tokens) * max(outer for outer, _ in _block_shapes(spec))
    of_head = min(TOKEN_CHUNK, rows) * max((outer for outer, _ in _head_shapes(spec, True)), default=0)
    return _SUM_BYTES * min(max(of_block, of_head), INT8_TILE)


def blocking_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Copy of bf16 rows that are being blocked."""
    shapes = _block_shapes(spec) + _head_shapes(spec, False)
    return max(min(BLOCK_CHUNK, outer * inner * itemsize) for outer, inner in shapes)


def int8_blocking_bytes(spec: ModelSpec) -> int:
    """Copy of int8 rows that are being blocked, and as much for the rows whose layout oneDNN is asked for."""
    shapes = _block_shapes(spec) + _head_shapes(spec, True)
    rows = (min(BLOCK_CHUNK // inner, INT8_BLOCK_ROWS, outer) * (inner + INT8_ROW_BYTES) for outer, inner in shapes)
    return 2 * max(rows)


def _rows_at_a_time(shape: tuple[int, int], itemsize: int) -> int:
    outer, inner = shape
    return min(outer, BLOCK_CHUNK // (inner * itemsize))


def _blocks(spec: ModelSpec) -> Iterator[tuple[TensorSpec, ...]]:
    """Tensors of the transformer blocks, of experts those of the first one: they are alike."""
    return chain(
        spec.attention, spec.mlp, (experts[0] for experts in spec.experts.tensors if experts) if spec.experts else ()
    )


@lru_cache(maxsize=16)
def _block_shapes(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of the matrices of the transformer blocks, each once."""
    return tuple({(t.shape[0], t.shape[1]) for block in _blocks(spec) for t in block if len(t.shape) == 2})


@lru_cache(maxsize=16)
def _head_shapes(spec: ModelSpec, with_tied: bool) -> tuple[tuple[int, int], ...]:
    """Of the head's matrices that are blocked. A tied table only where blocked rows can be looked up."""
    if spec.shares_table and not with_tied:
        return ()
    return tuple({(t.shape[0], t.shape[1]) for t in spec.head if len(t.shape) == 2})
