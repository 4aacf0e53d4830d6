"""Bytes that torch allocates and frees within a step: estimated, charged, not taken by us."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flexgen_h2o.config import ModelSpec, Policy
from flexgen_h2o.limits import (
    MASK_ROWS,
    PACKED_CHUNK,
    ROLLING_CHUNK,
    SAMPLING_CHUNK,
    SCORE_TILE_BYTES,
    SPARSE_CHUNK,
    TOKEN_CHUNK,
    UNPACK_CHUNK,
)
from flexgen_h2o.packing import weight_form
from flexgen_h2o.planner.blocked_sizes import (
    blocking_bytes,
    int8_blocking_bytes,
    int8_product_bytes,
    is_blocked,
    is_int8_blocked,
    product_bytes,
)

if TYPE_CHECKING:
    from flexgen_h2o.planner.memory import Shape

UNPACK_BYTES = 16  # of a weight while torch operations unpack it: codes, halves of them, fp32, the result
# Of a value of KV while it is unpacked by torch operations: itself, scale and least, in 4 bytes each.
UNPACK_KV_BYTES = 28
RANK_BYTES = 48  # of a column while it is ranked: sums, ranks, sorted copies of both and int64 indices


def temporary_bytes(spec: ModelSpec, shape: Shape, itemsize: int, policy: Policy) -> int:
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
    if policy.compress_weight or policy.int8_compute:
        largest = max(spec.vocab_size, spec.ffn_size, q_width) * spec.hidden_size
        step = max(step, UNPACK_BYTES * min(UNPACK_CHUNK, largest))
    return step


def step_bytes(spec: ModelSpec, policy: Policy, shape: Shape, itemsize: int, device_is_host: bool) -> int:
    """`temporary_bytes` with the largest product of blocked weights, where those of this run are blocked."""
    step, form = temporary_bytes(spec, shape, itemsize, policy), weight_form(policy, itemsize)
    tokens = max(shape.tokens, shape.rows)
    if is_blocked(form, device_is_host):
        return max(step + product_bytes(spec, tokens, shape.rows, itemsize), blocking_bytes(spec, itemsize))
    if is_int8_blocked(form, device_is_host):
        return max(step + int8_product_bytes(spec, tokens, shape.rows), int8_blocking_bytes(spec))
    return step


def unpacked_cache_bytes(spec: ModelSpec, policy: Policy, shape: Shape, itemsize: int, device_is_host: bool) -> int:
    """What a card takes to read packed KV, some rows at a time: a host reads it as it lies."""
    on_card = not device_is_host and (policy.percent[2] > 0 or not policy.cpu_cache_compute)
    if not policy.compress_cache or not on_card:
        return 0
    row = shape.most_slots * spec.head_dim
    return min(shape.rows * spec.num_kv_heads * row, max(PACKED_CHUNK, row)) * (UNPACK_KV_BYTES + 2 * itemsize)
