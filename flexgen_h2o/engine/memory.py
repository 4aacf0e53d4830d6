"""Bytes of every buffer of a run under one policy.

`MemoryPlanner` lists them. Temporaries are upper estimates of what torch allocates and frees. The
module imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import chain

from flexgen_h2o.checkpoint.formats import Codec, weight_format
from flexgen_h2o.core.config import TIERS, Policy
from flexgen_h2o.core.model import (
    LOAD_AFTER_ROUTER_BELOW,
    LayerPlan,
    ModelSpec,
    TensorSpec,
    with_head_rows,
)
from flexgen_h2o.core.packing import INT8_ROW_BYTES, int8_row_bytes
from flexgen_h2o.core.units import (
    ALIGN,
    BLOCK_CHUNK,
    BLOCK_ROWS,
    INT8_TILE,
    MASK_ROWS,
    PACKED_CHUNK,
    PAGE,
    READ_THREADS,
    REQUANTISE_CHUNK,
    ROLLING_CHUNK,
    SAMPLING_CHUNK,
    SCORE_TILE_BYTES,
    STAGING_BYTES,
    STAGING_SLOTS,
    TOKEN_CHUNK,
    UNPACK_CHUNK,
    WIRE_BUFFERS,
    WRITE_THREADS,
    round_up,
)
from flexgen_h2o.engine.memory_plan import (
    OVERLAPPED,
    SEQUENTIAL,
    BlockShape,
    Buffer,
    Depth,
    MemoryPlan,
    hidden_home_bytes,
    hidden_is_streamed,
    packing_of,
)
from flexgen_h2o.engine.weight_units import (
    UnitKinds,
    WeightBytes,
    even_head_rows,
    layer_plan,
    ring_contents,
    unit_bytes,
    unit_kinds,
)
from flexgen_h2o.kvcache.eviction.policy import RANKS
from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.tiers.stream import Part, Shares, is_streamed, tier_shares

# Bytes per weight while torch operations unpack it: codes, halves of them, fp32, the result.
UNPACK_BYTES = 16
# Bytes per number of KV while torch operations unpack it. The number, scale and minimum take 4
# bytes each.
UNPACK_KV_BYTES = 28
# Bytes per probability while the largest are chosen: itself, sorted, with int64 places and ranks.
LARGEST_BYTES = 40
# Bytes per KV entry while it is ranked: sums, ranks, sorted copies of both, and int64 indices.
RANK_BYTES = 48
ROUTER_BYTES = 20  # per token and expert: logits and probabilities in fp32, and their order
ROUTING_BYTES = 40  # per expert that a token chose: the expert, sorted, with int64 places


@dataclass(frozen=True)
class MemoryPlanner:
    """Sizes of all that a model's run under a policy holds."""

    spec: ModelSpec
    policy: Policy
    # Bytes of a number of the compute dtype, in which weights and KV are held.
    itemsize: int
    device_is_host: bool

    # ---- what the policy makes of the model

    @cached_property
    def form(self) -> Codec:
        """Format in which weights are held."""
        return weight_format(self.spec, self.policy, self.itemsize)

    @cached_property
    def weight_shares(self) -> Shares:
        """Shares of the weights on device, host and disk."""
        return tier_shares(self.policy.weight_shares, self.device_is_host)

    @cached_property
    def cache_shares(self) -> Shares:
        """Shares of the KV cache on device, host and disk."""
        return tier_shares(self.policy.cache_shares, self.device_is_host)

    @cached_property
    def hidden_shares(self) -> Shares:
        """Shares of the hidden states on device, host and disk."""
        return tier_shares(self.policy.hidden_shares, self.device_is_host)

    @cached_property
    def hidden_is_streamed(self) -> bool:
        """Whether hidden states are streamed, so that each layer loads and stores them."""
        return hidden_is_streamed(self.hidden_shares, self.device_is_host)

    @cached_property
    def attends_on_host(self) -> bool:
        """Whether attention runs on the host.

        It does if the device is host memory, or with --cpu-cache-compute.
        """
        return self.device_is_host or self.policy.cpu_cache_compute

    @property
    def blocks_rows(self) -> bool:
        """Whether resident matrices may be blocked for multiplications in bf16.

        On a CPU, dtypes of two bytes are bf16.
        """
        form = self.form
        return (
            self.device_is_host
            and form.decoded_at == "never"
            and not form.in_int8
            and form.itemsize == 2
        )

    @cached_property
    def expert_group(self) -> int:
        """Number of experts of a unit; 0 if the model has none.

        If experts stay on the device, one pass over all experts of a block is fastest. But if they
        are decoded, all experts of a unit are decoded at a time.
        """
        spec = self.spec
        policy = self.policy
        if spec.experts is None:
            return 0
        decoded = spec.quantization or (policy.compress_weight and not policy.int8_compute)
        stay = policy.percent[0] == 100 and not decoded
        asked = policy.expert_group or (spec.experts.count if stay else 0)
        return spec.experts.group_size(asked, policy.block_size)

    @cached_property
    def waits_for_router(self) -> bool:
        """Whether groups of experts are loaded only after their block's router has chosen.

        Groups that no token chose are then not loaded. Otherwise groups are loaded ahead of the
        router, like all other weights.
        """
        experts = self.spec.experts
        return experts is not None and (
            experts.share_used(self.policy.block_size, self.expert_group) < LOAD_AFTER_ROUTER_BELOW
        )

    def makes_graphs(self, in_one_launch: bool) -> bool:
        """Return whether decode steps may become CUDA graphs (engine/graphs.py).

        Steps of as many sequences must launch the same kernels, and everything that they read and
        write must stay in place. So all weights, KV cache and hidden states are on the GPU. Routers
        rule graphs out, because they are asked in the middle of a step. So does a run without
        overlap, because each step is waited for.

        in_one_launch: as in Needs of the eviction policy.
        """
        policy = self.policy
        shares = policy.weight_shares, policy.cache_shares, policy.hidden_shares
        stays = all(on_device == 1 for on_device, *_ in shares) and not policy.cpu_cache_compute
        alike = in_one_launch and policy.attn_sparsity == 1 and not self.spec.experts
        return stays and alike and policy.overlap

    # ---- plans

    def plan(self, shape: BlockShape, depth: Depth) -> MemoryPlan:
        """Return all buffers of a run."""
        cut = self.with_head_rows(self.head_rows(shape, depth))
        spec = cut.spec
        weights = cut.weights(depth.weights)
        workspace = cut.workspace(shape)
        # A stage of a pipeline exchanges the hidden states of a micro-batch with one or two
        # neighbours.
        neighbours = (not spec.embedding) + (not spec.head)
        message = round_up(shape.most_tokens * spec.hidden_size * self.itemsize, PAGE)
        row_threads = any(tensor.looked_up for tensor in spec.embedding)
        column_threads = self.policy.cache_shares[1] > 0 and not self.attends_on_host
        of_readers = READ_THREADS * (1 if self.device_is_host else STAGING_SLOTS)
        staging = of_readers + WRITE_THREADS + row_threads + column_threads
        common_prefix = round_up(shape.common * spec.kv_bytes_per_token(self.itemsize), ALIGN)
        buffers = [
            Buffer("weights", "device", weights.device),
            Buffer("weights", "host", weights.host),
            Buffer("weight ring", "device", weights.ring),
            Buffer("unpacked weights", "device", weights.unpacked),
            *cut.cache(shape, depth.cache),
            Buffer("common prefix", "device", common_prefix),
            *cut.hidden(shape, depth.hidden),
            Buffer("wire", "device", neighbours * WIRE_BUFFERS * message),
            Buffer("workspace", "device", sum(workspace.values())),
            *cut.temporaries(shape),
            Buffer("staging", "host", staging * STAGING_BYTES),
            Buffer("prompts", "host", shape.held_bytes),
        ]
        merged: Counter[tuple[str, str]] = Counter()
        for b in buffers:
            if b.nbytes:
                tier = "host" if self.device_is_host and b.tier == "device" else b.tier
                merged[b.name, tier] += b.nbytes
        placed = tuple(Buffer(name, tier, nbytes) for (name, tier), nbytes in merged.items())
        return MemoryPlan(placed, tuple(workspace.items()), shape, depth, spec.head_rows)

    def plan_within(self, shape: BlockShape, budgets: Mapping[str, int | None]) -> MemoryPlan:
        """Return the plan with the deepest look-ahead that fits the budgets.

        Raise DoesNotFitError if not even the shallowest one fits.
        """
        for depth in OVERLAPPED if self.policy.overlap else (SEQUENTIAL,):
            plan = self.plan(shape, depth)
            if not plan.overflow(budgets):
                return plan
        plan.check(budgets)
        return plan

    # ---- weights

    @cached_property
    def layers(self) -> LayerPlan:
        """Layers and weight units of a sweep."""
        return layer_plan(self.spec, self.policy.sep_layer, self.expert_group)

    @property
    def unit_kinds(self) -> UnitKinds:
        """Weight units, grouped by what they hold."""
        return unit_kinds(self.layers, self.form)

    def weights(self, depth: int) -> WeightBytes:
        """Return the bytes of all weights, with room for `depth` loads in the ring."""
        kinds = self.unit_kinds
        sizes = [
            unit_bytes(layouts, self.weight_shares, self.device_is_host)
            for layouts in kinds.layouts
        ]
        device, host = (
            sum(count * size[i] for size, count in zip(sizes, kinds.counts, strict=True))
            for i in (0, 1)
        )
        ring = max(
            sum(sizes[kind].ring for kind in held)
            for held in ring_contents(self.layers, self.form, depth)
        )
        return WeightBytes(device, host, ring, max(s.unpacked for s in sizes))

    def with_head_rows(self, rows: int) -> MemoryPlanner:
        """Return the planner of the model with `rows` rows of the head's table in a unit."""
        spec = with_head_rows(self.spec, rows)
        return self if spec is self.spec else replace(self, spec=spec)

    def head_rows(self, shape: BlockShape, depth: Depth) -> int:
        """Return the rows of the head's table that form a weight unit; 0: all of them.

        See ModelSpec.head_rows. The ring has room for the largest units, and the head often is one.
        In parts it takes no more than other layers. But then the logits of all micro-batches of a
        block are held until the last part. So the head is cut only if that takes fewer bytes in
        all.
        """
        if shape.needs_all_logits:
            return 0
        rows = even_head_rows(self.spec, self.layers, self.form, self.device_is_host)
        if not rows:
            return 0
        whole = sum(self.weights(depth.weights))
        cut = sum(self.with_head_rows(rows).weights(depth.weights))
        more_logits = (shape.micro_batches - 1) * shape.rows * self.spec.vocab_size * self.itemsize
        # The thread that reads rows of the table needs a staging buffer.
        more_staging = STAGING_BYTES if self.spec.shares_table else 0
        return rows if cut + more_logits + more_staging < whole else 0

    # ---- KV cache and hidden states

    def record_in(self, block: int, record: tuple[str, ...]) -> tuple[str, ...]:
        """Return the `record` argument of `kv_layout` for a transformer block.

        A block with a window records nothing and reads all KV entries that it holds.

        record: what the eviction policy records of slots in blocks without a window.
        """
        return record if self.spec.window(block) is None else ()

    def kv_layout(self, sequences: int, slots: int, record: tuple[str, ...]) -> UnitLayout:
        """Return the layout of the KV unit of a micro-batch under the policy's cache shares.

        record: tensors that are recorded of each slot (`record_in`).
        """
        spec = self.spec
        streamed = any(
            share > 0 and is_streamed(tier, self.attends_on_host)
            for tier, share in zip(TIERS, self.cache_shares, strict=True)
        )
        return UnitLayout(
            sequences,
            spec.num_kv_heads,
            slots,
            spec.head_dim,
            self.itemsize,
            self.cache_shares,
            record,
            streamed,
            packing_of(spec, self.policy),
            self.policy.cache_window,
        )

    def sequence_bytes(self, slots: Sequence[int], record: tuple[str, ...]) -> dict[str, int]:
        """Return the bytes of a sequence by the kind of its units, "kv" or "state".

        The record of slots is not included.

        slots: slots of the sequence in each transformer block.
        record: what the eviction policy keeps in blocks without a window.
        """
        found: Counter[str] = Counter()
        for block, count in enumerate(slots):
            layout = self.kv_layout(1, count, self.record_in(block, record))
            found[layout.kind] += layout.sequence_bytes
        return dict(found)

    def cache(self, shape: BlockShape, depth: int) -> list[Buffer]:
        """Return the buffers of the KV cache, with room for `depth` units in the ring."""
        attends_on = "host" if self.attends_on_host else "device"
        found = []
        ring = 0
        records = [self.record_in(block, shape.record) for block in range(len(shape.slots))]
        for (slots, record), blocks in Counter(zip(shape.slots, records, strict=True)).items():
            layout = self.kv_layout(shape.rows, slots, record)
            units = blocks * shape.micro_batches
            streamed = 0
            for tier, share in zip(TIERS, self.cache_shares, strict=True):
                part = Part(tier, 0, layout.most_part_rows(share))
                room = layout.room_bytes(part) if part.rows else 0
                is_brought = is_streamed(tier, self.attends_on_host)
                found.append(Buffer("cache", tier, round_up(units * room, PAGE)))
                record_tier = attends_on if is_brought else tier
                record_bytes = units * layout.metadata_bytes(part)
                found.append(Buffer("cache record", record_tier, record_bytes))
                if is_brought:
                    streamed += round_up(room, PAGE)
                if tier == "disk":
                    overlay = units * layout.overlay_bytes(part)
                    found.append(Buffer("cache overlay", "host", overlay))
            ring = max(ring, streamed)
        return [*found, Buffer("cache ring", attends_on, depth * ring)]

    @property
    def hidden_row_bytes(self) -> tuple[int, ...]:
        """Bytes of a token in each field of the hidden states (models.Hidden)."""
        experts = self.spec.experts
        width = self.spec.hidden_size * self.itemsize
        return (width, width, 4 * experts.per_token, 4 * experts.per_token) if experts else (width,)

    def hidden(self, shape: BlockShape, depth: int) -> list[Buffer]:
        """Return the buffers of the hidden states, with room for `depth` units in the ring."""
        tokens = shape.most_tokens
        rows = self.hidden_row_bytes
        found = [
            Buffer("hidden", tier, shape.micro_batches * nbytes)
            for row in rows
            for tier, nbytes in hidden_home_bytes(tokens, self.hidden_shares, row).items()
        ]
        if self.hidden_is_streamed:
            ring = depth * sum(round_up(tokens * row, PAGE) for row in rows)
            found.append(Buffer("hidden ring", "device", ring))
        return found

    # ---- what a step takes besides its inputs

    def workspace(self, shape: BlockShape) -> dict[str, int]:
        """Return the bytes of the named step buffers for the largest micro-batch.

        See kernels/workspace.py.
        """
        spec = self.spec
        attending = shape.most_attending
        tokens = shape.joined * spec.experts.per_token if spec.experts else shape.most_tokens
        chunk = min(TOKEN_CHUNK, tokens)
        q_width = spec.num_heads * spec.head_dim
        kv_width = spec.num_kv_heads * spec.head_dim
        embedding = max((t.shape[-1] for t in spec.embedding), default=0)
        logits = shape.rows * shape.micro_batches if spec.head_rows else shape.logits
        widths = {
            "q": attending * q_width,
            "k": attending * kv_width,
            "v": attending * kv_width,
            "mixed": attending * q_width,
            "normed": max(chunk, shape.rows) * max(spec.hidden_size, embedding),
            "ffn": chunk * max(spec.ffn_size, spec.hidden_size, embedding),
            "logits": logits * spec.vocab_size if spec.head else 0,
            **{buffer.name: chunk * buffer.width for buffer in spec.buffers},
        }
        sizes = {name: round_up(count * self.itemsize, ALIGN) for name, count in widths.items()}
        return sizes | self._int8_sizes(chunk) if self.form.in_int8 else sizes

    def _int8_sizes(self, inputs: int) -> dict[str, int]:
        """Return the bytes of the step buffers of int8 multiplications by name.

        They suffice for the largest matrix of the model. One multiplication uses them at a time.

        inputs: the most that are quantised at a time.
        """
        tensors = chain(self.spec.embedding, *_blocks(self.spec), self.spec.head)
        shapes = [t.shape for t in tensors if len(t.shape) == 2]
        outer, inner = (max(sizes) for sizes in zip(*shapes, strict=True))
        requantises = self.form.decoded_at == "product"
        rows = max(requantised_bytes(*shape) for shape in shapes) if requantises else 0
        return product_sizes(inputs, inner, outer) | {"int8 rows": rows}

    def temporaries(self, shape: BlockShape) -> list[Buffer]:
        """Return upper estimates of what torch allocates and frees."""
        on_device = max(self.step_bytes(shape), self.blocking_bytes)
        return [
            Buffer("temporaries", "device", on_device),
            Buffer("temporaries", "device", self._unpacked_cache_bytes(shape)),
            Buffer("temporaries", "host", self._prompt_to_pack_bytes(shape)),
        ]

    @property
    def blocking_bytes(self) -> int:
        """Bytes of the copy of resident rows that are being blocked, some at a time.

        See kernels/linear.py and int8.py. In int8 the copy has their scales and sums too.
        """
        in_int8 = self.form.in_int8
        if not self.blocks_rows and not (self.device_is_host and in_int8):
            return 0
        itemsize = 1 if in_int8 else self.itemsize
        ends = 3 * INT8_ROW_BYTES if in_int8 else 0
        return max(
            min(outer, max(BLOCK_ROWS, BLOCK_CHUNK // (inner * itemsize))) * inner * itemsize
            + outer * ends
            for outer, inner in _blocked_shapes(self.spec)
        )

    def step_bytes(self, shape: BlockShape) -> int:
        """Return an upper estimate of the bytes that torch allocates and frees inside one step.

        They are for attention, sampling, norms and activations. Packed weights count too. Torch
        operations unpack them between steps, or multiply them in int8, if nothing is compiled.
        """
        spec = self.spec
        policy = self.policy
        itemsize = self.itemsize
        q_width = spec.num_heads * spec.head_dim
        kv_width = spec.num_kv_heads * spec.head_dim
        row = shape.most_slots * spec.head_dim
        numbers = shape.rows * spec.num_kv_heads * row
        tokens = min(shape.tokens, shape.most_attending)
        prefill = tokens * (q_width * itemsize + 4 * spec.num_heads)
        scores = shape.rows * spec.num_heads * (shape.most_slots + shape.common)
        decode = scores * (8 + itemsize)
        copies = 2  # keys and values of a shared prefix, with those of the sequences' own tokens
        if shape.common:
            # Queries by KV head; results from the copy and from slots, and both in fp32.
            decode += shape.rows * q_width * (4 * itemsize + 8)
        if shape.record:  # sums per KV entry with their tile, ranks and their order
            prefill += tokens * spec.num_kv_heads * RANK_BYTES + 2 * SCORE_TILE_BYTES
            decode += shape.rows * spec.num_kv_heads * shape.most_slots * RANK_BYTES
        if RANKS in shape.record:  # unrotated keys of prompts, and copies of keys in slots
            prefill += tokens * kv_width * itemsize
            copies += 1
            decode += 4 * itemsize * min(numbers, max(ROLLING_CHUNK, row))
        if shape.sharing:
            columns = max(shape.sharing, TOKEN_CHUNK) * spec.num_kv_heads
            prefill += columns * copies * spec.head_dim * itemsize
            prefill += columns * RANK_BYTES if shape.record else 0
            prefill += MASK_ROWS * shape.sharing * itemsize  # the mask of own queries
        if spec.windows:  # the mask of some queries within a window
            window = max(w or 0 for w in spec.windows)
            seen = min(max(shape.sharing, shape.tokens), MASK_ROWS + window)
            prefill += MASK_ROWS * seen * itemsize
        if policy.attn_sparsity < 1:
            # Probabilities of some rows; values, or unpacked keys and values.
            chosen = min(numbers, max(PACKED_CHUNK, row))
            probabilities = chosen // spec.head_dim * (spec.num_heads // spec.num_kv_heads)
            unpacking = UNPACK_KV_BYTES + 2 * itemsize if policy.compress_cache else 0
            decode += probabilities * LARGEST_BYTES + chosen * (itemsize + unpacking)
        # Probabilities are sorted and summed in float64, with their indices.
        logits = shape.logits * spec.vocab_size if spec.head else 0
        sampling = 50 * min(logits, max(SAMPLING_CHUNK, spec.vocab_size))
        chunk = min(TOKEN_CHUNK, shape.most_tokens)
        step = max(prefill, decode) + chunk * (3 * spec.hidden_size + spec.ffn_size) * itemsize
        step = max(step, sampling + 3 * shape.logits * spec.hidden_size * itemsize)
        step += self._routing_bytes(shape) if spec.experts else 0
        if self.form.decoded_at == "load" or self.form.in_int8:
            largest = max(spec.vocab_size, spec.ffn_size, q_width) * spec.hidden_size
            step = max(step, UNPACK_BYTES * min(UNPACK_CHUNK, largest))
        return step

    def _routing_bytes(self, shape: BlockShape) -> int:
        """Return the bytes of routing tokens to experts.

        They are a router's probabilities, sorted, for a chunk of tokens; the sorting of chosen
        experts; and the experts' results, weighted in fp32.
        """
        assert self.spec.experts is not None
        chunk = min(TOKEN_CHUNK, shape.most_tokens)
        pairs = shape.joined * self.spec.experts.per_token
        weighed = 4 * min(TOKEN_CHUNK, pairs) * self.spec.hidden_size
        return ROUTER_BYTES * chunk * self.spec.experts.count + ROUTING_BYTES * pairs + weighed

    def _unpacked_cache_bytes(self, shape: BlockShape) -> int:
        """Return the bytes of the KV entries that a GPU unpacks to read, some sequences at a time.

        A host unpacks in place.
        """
        policy = self.policy
        on_card = not self.device_is_host and (policy.percent[2] > 0 or not self.attends_on_host)
        if not policy.compress_cache or not on_card:
            return 0
        row = shape.most_slots * self.spec.head_dim
        numbers = min(shape.rows * self.spec.num_kv_heads * row, max(PACKED_CHUNK, row))
        return numbers * (UNPACK_KV_BYTES + 2 * self.itemsize)

    def _prompt_to_pack_bytes(self, shape: BlockShape) -> int:
        """Return the bytes of a prompt's keys and values that a GPU computes and the host packs.

        One layer is packed at a time.
        """
        policy = self.policy
        if self.device_is_host or not policy.cpu_cache_compute or not policy.compress_cache:
            return 0
        width = self.spec.num_kv_heads * self.spec.head_dim
        return 2 * shape.most_attending * width * self.itemsize


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


def _blocks(spec: ModelSpec) -> Iterator[tuple[TensorSpec, ...]]:
    """Return the tensors of the transformer blocks.

    Only the first expert counts, because all are alike.
    """
    experts = (experts[0] for experts in spec.experts.tensors if experts) if spec.experts else ()
    return chain(spec.attention, spec.mlp, experts)


@lru_cache(maxsize=16)
def _blocked_shapes(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    """Return (rows, columns) of the matrices that may be blocked, each once."""
    tables = spec.embedding if spec.shares_table else ()
    units = (*_blocks(spec), spec.head, tables)
    return tuple({(t.shape[0], t.shape[1]) for unit in units for t in unit if len(t.shape) == 2})
