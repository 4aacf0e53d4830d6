"""Bytes that blocked weights (kernels/blocked_rows.py) take beside their own: in products, and while blocking."""

from __future__ import annotations

from flexgen_h2o.config import ModelSpec
from flexgen_h2o.limits import BLOCK_CHUNK, TOKEN_CHUNK
from flexgen_h2o.packing import WeightForm


def is_blocked(form: WeightForm, device_is_host: bool) -> bool:
    """May resident matrices in this form be blocked? On a CPU, dtypes of two bytes are bf16."""
    return device_is_host and form.packing is None and form.itemsize == 2


def product_bytes(spec: ModelSpec, tokens: int, rows: int, itemsize: int) -> int:
    """Of the largest product: of `tokens` with rows of an MLP's first matrix, or with those of its second one, beside
    what is added to it; or of `rows` with rows of the head."""
    most = BLOCK_CHUNK // (spec.hidden_size * itemsize)  # rows of a matrix that are multiplied at a time
    of_block = min(TOKEN_CHUNK, tokens) * max(min(spec.ffn_size, most), 2 * min(spec.hidden_size, most))
    of_head = min(TOKEN_CHUNK, rows) * min(_head_rows(spec), most)
    return max(of_block, of_head) * itemsize


def blocking_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Of rows that are being blocked."""
    return min(BLOCK_CHUNK, max(spec.ffn_size, _head_rows(spec)) * spec.hidden_size * itemsize)


def _head_rows(spec: ModelSpec) -> int:
    """Of a head that may be blocked: a tied one is looked up in as well."""
    return spec.vocab_size if spec.head and not spec.shares_table else 0
