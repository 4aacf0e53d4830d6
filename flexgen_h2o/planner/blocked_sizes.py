"""Bytes that blocked weights (kernels/blocked_rows.py, int8_blocked.py) take beside their own: in products, and while
they are being blocked."""

from __future__ import annotations

from functools import lru_cache

from flexgen_h2o.config import ModelSpec
from flexgen_h2o.limits import BLOCK_CHUNK, INT8_BLOCK_ROWS, INT8_TILE, TOKEN_CHUNK
from flexgen_h2o.packing import INT8, INT8_ROW_BYTES, WeightForm

_SUM_BYTES = 4


def is_blocked(form: WeightForm, device_is_host: bool) -> bool:
    """May resident matrices in this form be blocked for products in bf16? On a CPU, dtypes of two bytes are bf16."""
    return device_is_host and form.packing is None and form.itemsize == 2


def is_int8_blocked(form: WeightForm, device_is_host: bool) -> bool:
    """May rows for products in int8 be blocked, resident ones or those that 4 bits are unpacked to?"""
    return device_is_host and (form.packing == INT8 or form.to_int8)


def product_bytes(spec: ModelSpec, tokens: int, rows: int, itemsize: int) -> int:
    """Of the largest product in bf16: of `tokens` with rows of a matrix of a block, beside what is added to it where it
    may be a residual sum; or of `rows` with rows of the head."""
    of_block = min(TOKEN_CHUNK, tokens) * max(
        _rows_at_a_time(shape, itemsize) * (2 if shape[0] == spec.hidden_size else 1) for shape in _block_shapes(spec)
    )
    of_head = min(TOKEN_CHUNK, rows) * max((_rows_at_a_time(s, itemsize) for s in _head_shapes(spec, False)), default=0)
    return max(of_block, of_head) * itemsize


def int8_product_bytes(spec: ModelSpec, tokens: int, rows: int) -> int:
    """Of the sums of the largest product in int8; a tied head is blocked too."""
    of_block = min(TOKEN_CHUNK, tokens) * max(outer for outer, _ in _block_shapes(spec))
    of_head = min(TOKEN_CHUNK, rows) * max((outer for outer, _ in _head_shapes(spec, True)), default=0)
    return _SUM_BYTES * min(max(of_block, of_head), INT8_TILE)


def blocking_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Of bf16 rows that are being blocked."""
    shapes = _block_shapes(spec) + _head_shapes(spec, False)
    return max(min(BLOCK_CHUNK, outer * inner * itemsize) for outer, inner in shapes)


def int8_blocking_bytes(spec: ModelSpec) -> int:
    """Of int8 rows that are being blocked, and of as many that oneDNN is asked for the layout of."""
    shapes = _block_shapes(spec) + _head_shapes(spec, True)
    rows = (min(BLOCK_CHUNK // inner, INT8_BLOCK_ROWS, outer) * (inner + INT8_ROW_BYTES) for outer, inner in shapes)
    return 2 * max(rows)


def _rows_at_a_time(shape: tuple[int, int], itemsize: int) -> int:
    outer, inner = shape
    return min(outer, BLOCK_CHUNK // (inner * itemsize))


@lru_cache(maxsize=16)
def _block_shapes(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    """(rows, columns) of the matrices of the transformer blocks, each once."""
    return tuple(
        {(t.shape[0], t.shape[1]) for block in (*spec.attention, *spec.mlp) for t in block if len(t.shape) == 2}
    )


@lru_cache(maxsize=16)
def _head_shapes(spec: ModelSpec, with_tied: bool) -> tuple[tuple[int, int], ...]:
    """Of the head's that are blocked: a tied table only where what is blocked can be looked up in as well."""
    if spec.shares_table and not with_tied:
        return ()
    return tuple({(t.shape[0], t.shape[1]) for t in spec.head if len(t.shape) == 2})
