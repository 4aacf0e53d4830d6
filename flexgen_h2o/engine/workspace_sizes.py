"""Bytes of the step buffers that products in int8 take (kernels/int8.py), each used by one product at a time.

Bytes that blocked weights (kernels/blocked.py, int8_blocked.py) take beside their own: in products, and while
they are being blocked.

Bytes that torch allocates and frees within a step: estimated, charged, not taken by us.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING

from flexgen_h2o.checkpoint.formats import WeightFormat, weight_format
from flexgen_h2o.core.config import ModelSpec, Policy
from flexgen_h2o.core.packing import INT8_ROW_BYTES
from flexgen_h2o.core.units import (
    ALIGN,
    BLOCK_CHUNK,
    INT8_BLOCK_ROWS,
    INT8_TILE,
    MASK_ROWS,
    PACKED_CHUNK,
    ROLLING_CHUNK,
    SAMPLING_CHUNK,
    SCORE_TILE_BYTES,
    SPARSE_CHUNK,
    TOKEN_CHUNK,
    UNPACK_CHUNK,
    round_up,
)

if TYPE_CHECKING:
    from flexgen_h2o.engine.memory_plan import BlockShape


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


_SUM_BYTES = 4


def is_blocked(form: WeightFormat, device_is_host: bool) -> bool:
    """May resident matrices in this form be blocked for products in bf16? On a CPU, dtypes of two bytes are bf16."""
    return device_is_host and not form.decodes and not form.in_int8 and form.itemsize == 2


def is_int8_blocked(form: WeightFormat, device_is_host: bool) -> bool:
    """May rows for products in int8 be blocked, resident ones or those that are decoded?"""
    return device_is_host and form.in_int8


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


UNPACK_BYTES = 16  # of a weight while torch operations unpack it: codes, halves of them, fp32, the result
# Of a value of KV while it is unpacked by torch operations: itself, scale and least, in 4 bytes each.
UNPACK_KV_BYTES = 28
RANK_BYTES = 48  # of a column while it is ranked: sums, ranks, sorted copies of both and int64 indices


def temporary_bytes(spec: ModelSpec, shape: BlockShape, itemsize: int, policy: Policy) -> int:
    """Upper estimate of what torch allocates and frees inside one step: attention, sampling, norms and activations.

    Packed weights are unpacked between steps, or multiplied in int8, by torch operations where nothing is compiled.
    """
    q_width = spec.num_heads * spec.head_dim
    prefill = shape.tokens * (q_width * itemsize + 4 * spec.num_heads)
    scores = shape.rows * spec.num_heads * (shape.most_slots + shape.common)
    decode = scores * (8 + itemsize)
    copies = 2  # keys and values of a shared prefix and of rows' own tokens, put together
    if shape.common:  # queries by kv-head, what they get from the copy and from slots, and both in fp32
        decode += shape.rows * q_width * (4 * itemsize + 8)
    if shape.record:  # column sums with the tile that they are summed in, ranks and their order
        prefill += shape.tokens * spec.num_kv_heads * RANK_BYTES + 2 * SCORE_TILE_BYTES
        decode += shape.rows * spec.num_kv_heads * shape.most_slots * RANK_BYTES
    if "norms" in shape.record:
        prefill += shape.tokens * spec.num_kv_heads * spec.head_dim * 4
    if "ranks" in shape.record:  # prompts' keys before they are rotated; copies of keys in slots, and what turns them
        prefill += shape.tokens * spec.num_kv_heads * spec.head_dim * itemsize
        copies += 1
        row = shape.most_slots * spec.head_dim
        decode += 4 * itemsize * min(shape.rows * spec.num_kv_heads * row, max(ROLLING_CHUNK, row))
    if shape.sharing:
        columns = max(shape.sharing, TOKEN_CHUNK) * spec.num_kv_heads
        prefill += columns * copies * spec.head_dim * itemsize
        prefill += columns * RANK_BYTES if shape.record else 0
        prefill += MASK_ROWS * shape.sharing * itemsize  # the mask of own queries
    if policy.attn_sparsity < 1:  # probabilities, their order, and a chunk of gathered values in two dtypes
        gathered = min(scores * spec.head_dim, max(SPARSE_CHUNK, shape.most_slots * spec.head_dim))
        decode = scores * 36 + gathered * (4 + itemsize)
    # Probabilities, sorted and summed in float64 with their indices.
    logits = shape.rows * spec.vocab_size if spec.head else 0
    sampling = 50 * min(logits, max(SAMPLING_CHUNK, spec.vocab_size))
    chunk = min(TOKEN_CHUNK, max(shape.tokens, shape.rows))
    step = max(prefill, decode, sampling) + chunk * (3 * spec.hidden_size + spec.ffn_size) * itemsize
    form = weight_format(spec, policy, itemsize)
    if form.decodes or form.in_int8:
        largest = max(spec.vocab_size, spec.ffn_size, q_width) * spec.hidden_size
        step = max(step, UNPACK_BYTES * min(UNPACK_CHUNK, largest))
    return step


def step_bytes(spec: ModelSpec, policy: Policy, shape: BlockShape, itemsize: int, device_is_host: bool) -> int:
    """`temporary_bytes` with the largest product of blocked weights, where those of this run are blocked."""
    step, form = temporary_bytes(spec, shape, itemsize, policy), weight_format(spec, policy, itemsize)
    tokens = max(shape.tokens, shape.rows)
    if is_blocked(form, device_is_host):
        return max(step + product_bytes(spec, tokens, shape.rows, itemsize), blocking_bytes(spec, itemsize))
    if is_int8_blocked(form, device_is_host):
        return max(step + int8_product_bytes(spec, tokens, shape.rows), int8_blocking_bytes(spec))
    return step


def unpacked_cache_bytes(
    spec: ModelSpec, policy: Policy, shape: BlockShape, itemsize: int, device_is_host: bool
) -> int:
    """What a card takes to read packed KV, some rows at a time: a host reads it as it lies."""
    on_card = not device_is_host and (policy.percent[2] > 0 or not policy.cpu_cache_compute)
    if not policy.compress_cache or not on_card:
        return 0
    row = shape.most_slots * spec.head_dim
    return min(shape.rows * spec.num_kv_heads * row, max(PACKED_CHUNK, row)) * (UNPACK_KV_BYTES + 2 * itemsize)
