"""Bytes that a step takes besides its inputs.

They are step buffers, and upper estimates of what torch allocates and frees. Matrix multiplications
in int8 (kernels/int8.py) take step buffers besides; one multiplication uses them at a time. While
rows are being blocked (kernels/linear.py, int8.py), torch takes temporaries.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from typing import TYPE_CHECKING

from flexgen_h2o.checkpoint.formats import WeightFormat, weight_format
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.model import ModelSpec, TensorSpec
from flexgen_h2o.core.packing import INT8_ROW_BYTES, int8_row_bytes
from flexgen_h2o.core.units import (
    ALIGN,
    BLOCK_CHUNK,
    BLOCK_ROWS,
    INT8_TILE,
    MASK_ROWS,
    PACKED_CHUNK,
    QUERY_CHUNK,
    REQUANTISE_CHUNK,
    ROLLING_CHUNK,
    SAMPLING_CHUNK,
    SCORE_TILE_BYTES,
    TOKEN_CHUNK,
    UNPACK_CHUNK,
    round_up,
)

if TYPE_CHECKING:
    from flexgen_h2o.engine.memory_plan import BlockShape

# Bytes per weight while torch operations unpack it: codes, halves of them, fp32, the result.
UNPACK_BYTES = 16
# Bytes per number of KV while torch operations unpack it. The number, scale and minimum take 4
# bytes each.
UNPACK_KV_BYTES = 28
# Bytes per probability while the largest are chosen: itself, sorted, with int64 places and ranks.
LARGEST_BYTES = 40
# Bytes per KV entry while it is ranked: sums, ranks, sorted copies of both, and int64 indices.
RANK_BYTES = 48
QUERY_KEY_BYTES = 24  # per number of a key or a query while an eviction policy looks at it
ROUTER_BYTES = 20  # per token and expert: logits and probabilities in fp32, and their order
ROUTING_BYTES = 40  # per expert that a token chose: the expert, sorted, with int64 places


def workspace_sizes(spec: ModelSpec, shape: BlockShape, itemsize: int) -> dict[str, int]:
    """Return the bytes of the named step buffers for the largest micro-batch.

    See kernels/workspace.py.
    """
    max_attending_tokens = shape.most_attending
    chunk = min(
        TOKEN_CHUNK, shape.joined * spec.experts.per_token if spec.experts else shape.most_tokens
    )
    q_width = spec.num_heads * spec.head_dim
    kv_width = spec.num_kv_heads * spec.head_dim
    embedding = max((t.shape[-1] for t in spec.embedding), default=0)
    logits = shape.rows * shape.micro_batches if spec.head_rows else shape.logits
    widths = {
        "q": max_attending_tokens * q_width,
        "k": max_attending_tokens * kv_width,
        "v": max_attending_tokens * kv_width,
        "mixed": max_attending_tokens * q_width,
        "normed": max(chunk, shape.rows) * max(spec.hidden_size, embedding),
        "ffn": chunk * max(spec.ffn_size, spec.hidden_size, embedding),
        "logits": logits * spec.vocab_size if spec.head else 0,
        **{buffer.name: chunk * buffer.width for buffer in spec.buffers},
    }
    return {name: round_up(count * itemsize, ALIGN) for name, count in widths.items()}


def int8_sizes(spec: ModelSpec, tokens: int, requantises: bool) -> dict[str, int]:
    """Return the bytes of the step buffers of int8 multiplications by name.

    They suffice for the largest matrix of the model.

    tokens: the most that a step sees. With experts, each token counts once per chosen expert. At
        most TOKEN_CHUNK inputs are quantised at a time.
    requantises: as in the weight format.
    """
    tensors = chain(spec.embedding, *_blocks(spec), spec.head)
    shapes = [t.shape for t in tensors if len(t.shape) == 2]
    outer, inner = (max(sizes) for sizes in zip(*shapes, strict=True))
    inputs = tokens * (spec.experts.per_token if spec.experts else 1)
    rows = max(requantised_bytes(*shape) for shape in shapes) if requantises else 0
    return product_sizes(min(TOKEN_CHUNK, inputs), inner, outer) | {"int8 rows": rows}


def requantised_bytes(outer: int, inner: int) -> int:
    """Return the bytes of the int8 rows that a part of an (outer, inner) matrix in 4 bits becomes.

    This is for matrices whose int8 rows the compiled loop does not make.
    """
    return round_up(min(outer, max(1, REQUANTISE_CHUNK // inner)) * int8_row_bytes(inner), ALIGN)


def product_sizes(rows: int, inner: int, outer: int) -> dict[str, int]:
    """Return the bytes of step buffers by name for `rows` inputs.

    The matrices have at most `outer` rows and `inner` columns. At most INT8_TILE sums exist.
    """
    sizes = {
        "int8 inputs": rows * inner,
        "int8 input scales": rows * 4,
        "int8 weight scales": outer * 4,
        "int8 sums": min(rows * outer, INT8_TILE) * 4,
    }
    return {name: round_up(nbytes, ALIGN) for name, nbytes in sizes.items()}


def is_blocked(form: WeightFormat, device_is_host: bool) -> bool:
    """Return whether resident matrices in this form may be blocked for multiplications in bf16.

    On a CPU, dtypes of two bytes are bf16.
    """
    return device_is_host and not form.decodes and not form.in_int8 and form.itemsize == 2


def blocking_bytes(spec: ModelSpec, form: WeightFormat, device_is_host: bool) -> int:
    """Return the bytes of the copy of resident rows that are being blocked, some at a time.

    In int8 the copy has their scales and sums too.
    """
    if not is_blocked(form, device_is_host) and not (device_is_host and form.in_int8):
        return 0
    itemsize, ends = (1, 3 * INT8_ROW_BYTES) if form.in_int8 else (form.itemsize, 0)
    return max(
        min(outer, max(BLOCK_ROWS, BLOCK_CHUNK // (inner * itemsize))) * inner * itemsize
        + outer * ends
        for outer, inner in _blocked_shapes(spec)
    )


def _blocks(spec: ModelSpec) -> Iterator[tuple[TensorSpec, ...]]:
    """Return the tensors of the transformer blocks.

    Of experts only those of the first one count: all are alike.
    """
    experts = (experts[0] for experts in spec.experts.tensors if experts) if spec.experts else ()
    return chain(spec.attention, spec.mlp, experts)


@lru_cache(maxsize=16)
def _blocked_shapes(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    """Return (rows, columns) of the matrices that may be blocked, each once."""
    tables = spec.embedding if spec.shares_table else ()
    units = (*_blocks(spec), spec.head, tables)
    return tuple({(t.shape[0], t.shape[1]) for unit in units for t in unit if len(t.shape) == 2})


def temporary_bytes(spec: ModelSpec, shape: BlockShape, itemsize: int, policy: Policy) -> int:
    """Return an upper estimate of the bytes that torch allocates and frees inside one step.

    They are for attention, sampling, norms and activations. Packed weights count too. Torch
    operations unpack them between steps, or multiply them in int8, if nothing is compiled.
    """
    q_width = spec.num_heads * spec.head_dim
    tokens = min(shape.tokens, shape.most_attending)
    prefill = tokens * (q_width * itemsize + 4 * spec.num_heads)
    scores = shape.rows * spec.num_heads * (shape.most_slots + shape.common)
    decode = scores * (8 + itemsize)
    copies = 2  # keys and values of a shared prefix, with those of the sequences' own tokens
    if shape.common:  # queries by KV head; results from the copy and from slots, and both in fp32
        decode += shape.rows * q_width * (4 * itemsize + 8)
    if shape.record:  # sums per KV entry with their tile, ranks and their order
        prefill += tokens * spec.num_kv_heads * RANK_BYTES + 2 * SCORE_TILE_BYTES
        decode += shape.rows * spec.num_kv_heads * shape.most_slots * RANK_BYTES
    if "norms" in shape.record.names:
        prefill += tokens * spec.num_kv_heads * spec.head_dim * 4
    if "ranks" in shape.record.names:  # unrotated keys of prompts, and copies of keys in slots
        prefill += tokens * spec.num_kv_heads * spec.head_dim * itemsize
        copies += 1
        row = shape.most_slots * spec.head_dim
        decode += 4 * itemsize * min(shape.rows * spec.num_kv_heads * row, max(ROLLING_CHUNK, row))
    if shape.record.query_numbers:  # queries or keys, fp32 copies, and the lengths of their pairs
        prefill += QUERY_KEY_BYTES * max(QUERY_CHUNK, tokens * spec.head_dim)
        row = shape.most_slots * spec.head_dim
        each = QUERY_KEY_BYTES + (2 * UNPACK_KV_BYTES if policy.compress_cache else 0)
        decode += each * min(shape.rows * spec.num_kv_heads * row, max(QUERY_CHUNK, row))
    if shape.sharing:
        columns = max(shape.sharing, TOKEN_CHUNK) * spec.num_kv_heads
        prefill += columns * copies * spec.head_dim * itemsize
        prefill += columns * RANK_BYTES if shape.record else 0
        prefill += MASK_ROWS * shape.sharing * itemsize  # the mask of own queries
    if spec.windows:  # the mask of some queries within a window
        seen = min(max(shape.sharing, shape.tokens), MASK_ROWS + max(w or 0 for w in spec.windows))
        prefill += MASK_ROWS * seen * itemsize
    if policy.attn_sparsity < 1:  # probabilities of some rows; values, or unpacked keys and values
        row = shape.most_slots * spec.head_dim
        numbers = min(shape.rows * spec.num_kv_heads * row, max(PACKED_CHUNK, row))
        probabilities = numbers // spec.head_dim * (spec.num_heads // spec.num_kv_heads)
        unpacking = UNPACK_KV_BYTES + 2 * itemsize if policy.compress_cache else 0
        decode += probabilities * LARGEST_BYTES + numbers * (itemsize + unpacking)
    # Probabilities are sorted and summed in float64, with their indices.
    logits = shape.logits * spec.vocab_size if spec.head else 0
    sampling = 50 * min(logits, max(SAMPLING_CHUNK, spec.vocab_size))
    chunk = min(TOKEN_CHUNK, shape.most_tokens)
    step = max(prefill, decode) + chunk * (3 * spec.hidden_size + spec.ffn_size) * itemsize
    step = max(step, sampling + 3 * shape.logits * spec.hidden_size * itemsize)
    step += _routing_bytes(spec, shape) if spec.experts else 0
    form = weight_format(spec, policy, itemsize)
    if form.decodes or form.in_int8:
        largest = max(spec.vocab_size, spec.ffn_size, q_width) * spec.hidden_size
        step = max(step, UNPACK_BYTES * min(UNPACK_CHUNK, largest))
    return step


def _routing_bytes(spec: ModelSpec, shape: BlockShape) -> int:
    """Return the bytes of routing tokens to experts.

    They are a router's probabilities, sorted, for a chunk of tokens; the sorting of chosen experts;
    and the experts' results, weighted in fp32.
    """
    assert spec.experts is not None
    chunk = min(TOKEN_CHUNK, shape.most_tokens)
    pairs = shape.joined * spec.experts.per_token
    weighed = 4 * min(TOKEN_CHUNK, pairs) * spec.hidden_size
    return ROUTER_BYTES * chunk * spec.experts.count + ROUTING_BYTES * pairs + weighed


def unpacked_cache_bytes(
    spec: ModelSpec, policy: Policy, shape: BlockShape, itemsize: int, device_is_host: bool
) -> int:
    """Return the bytes of the KV entries that a GPU unpacks to read, some sequences at a time.

    A host unpacks in place.
    """
    on_card = not device_is_host and (policy.percent[2] > 0 or not policy.cpu_cache_compute)
    if not policy.compress_cache or not on_card:
        return 0
    row = shape.most_slots * spec.head_dim
    return min(shape.rows * spec.num_kv_heads * row, max(PACKED_CHUNK, row)) * (
        UNPACK_KV_BYTES + 2 * itemsize
    )


def prompt_to_pack_bytes(
    spec: ModelSpec, policy: Policy, shape: BlockShape, itemsize: int, device_is_host: bool
) -> int:
    """Return the bytes of a prompt's keys and values that a GPU computes and the host packs.

    One layer is packed at a time.
    """
    if device_is_host or not policy.cpu_cache_compute or not policy.compress_cache:
        return 0
    return 2 * shape.most_attending * spec.num_kv_heads * spec.head_dim * itemsize
