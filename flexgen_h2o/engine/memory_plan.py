"""Bytes of every buffer of a run by tier.

The engine allocates exactly this list, so what fits here runs.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace

from flexgen_h2o.checkpoint.formats import layouts_of, weight_format
from flexgen_h2o.core.config import DTYPE_BYTES, TIERS, Policy
from flexgen_h2o.core.errors import DoesNotFitError
from flexgen_h2o.core.model import LayerKind, ModelSpec, with_head_rows
from flexgen_h2o.core.packing import KVPacking, KVSizes
from flexgen_h2o.core.units import (
    ALIGN,
    JOINED_TOKENS,
    PAGE,
    READ_THREADS,
    SCORED_CHUNK,
    STAGING_BYTES,
    STAGING_SLOTS,
    WIRE_BUFFERS,
    WRITE_THREADS,
    advice,
    format_bytes,
    round_up,
)
from flexgen_h2o.engine.temporaries import (
    blocking_bytes,
    int8_sizes,
    prompt_to_pack_bytes,
    temporary_bytes,
    unpacked_cache_bytes,
    workspace_sizes,
)
from flexgen_h2o.engine.weight_units import even_head_rows, weight_bytes
from flexgen_h2o.kvcache.eviction.policy import NO_RECORD, RowRecord
from flexgen_h2o.kvcache.layout import UnitLayout
from flexgen_h2o.tiers.stream import Part, Shares, is_streamed, tier_shares


@dataclass(frozen=True)
class BlockShape:
    """The largest block of a run, from which the buffers are sized.

    `workload.shape_of` or `shape_of_blocks` makes it.
    """

    # Sequences of the largest micro-batch.
    rows: int
    micro_batches: int
    # Tokens of the largest micro-batch in the prefill sweep.
    tokens: int
    # KV slots of a sequence in each transformer block.
    slots: tuple[int, ...]
    # What is kept of a sequence besides its KV entries.
    record: RowRecord = NO_RECORD
    # Tokens of the longest prompt that shares a prefix with others, or 0.
    sharing: int = 0
    # KV entries of the prefix that all sequences have in one copy, outside of slots.
    common: int = 0
    # Whether tokens of prompts get log-probabilities.
    scores: bool = False
    # Whether a sequence needs logits of more than one token in a sweep. The head is then not cut
    # (`head_rows`).
    needs_all_logits: bool = False
    # The most tokens of a micro-batch that attend at a time, or 0 for all. A larger micro-batch
    # attends in parts of its prompts (SweepInput.parts).
    max_attending_tokens: int = 0

    @property
    def logits(self) -> int:
        """Rows of logits that exist at a time."""
        return max(self.rows, min(SCORED_CHUNK, self.tokens)) if self.scores else self.rows

    @property
    def most_tokens(self) -> int:
        """The most tokens of a micro-batch in any sweep."""
        return max(self.tokens, self.rows)

    @property
    def most_attending(self) -> int:
        """The most tokens for which queries, keys and values exist at a time in an attention layer.

        Sequences that share a prefix cannot be split, so all their tokens count.
        """
        return (
            self.most_tokens
            if self.sharing
            else min(self.max_attending_tokens or self.most_tokens, self.most_tokens)
        )

    def most_joined(self, kind: LayerKind) -> int:
        """Return the most tokens of micro-batches that a layer of this kind computes together.

        See loop.joined. Except for experts, the limit is the room that the step buffers have
        anyway. So decode steps are joined, and prompts seldom.
        """
        if kind == "experts":
            return JOINED_TOKENS
        return self.most_tokens if kind == "mlp" else self.most_attending

    @property
    def joined(self) -> int:
        """The most tokens that a group of experts computes together."""
        return max(self.most_tokens, min(JOINED_TOKENS, self.micro_batches * self.most_tokens))

    @property
    def most_slots(self) -> int:
        return max(self.slots)

    def has_slots(self, slots: tuple[int, ...]) -> bool:
        """Return whether each transformer block has at least so many slots."""
        return all(mine >= asked for mine, asked in zip(self.slots, slots, strict=True))

    def covers(self, other: BlockShape) -> bool:
        """Return whether buffers of this shape also serve the other shape."""
        mine, theirs = (
            (
                s.rows,
                s.micro_batches,
                s.tokens,
                s.most_attending,
                s.sharing,
                s.common,
                s.scores,
                *s.slots,
            )
            for s in (self, other)
        )
        return self.record == other.record and all(
            a >= b for a, b in zip(mine, theirs, strict=True)
        )

    def union(self, other: BlockShape) -> BlockShape:
        """Return the smallest shape that covers both.

        They must be of one eviction policy and model.
        """
        names = (
            "rows",
            "micro_batches",
            "tokens",
            "sharing",
            "common",
            "scores",
            "needs_all_logits",
        )
        most = {name: max(getattr(self, name), getattr(other, name)) for name in names}
        slots = tuple(map(max, self.slots, other.slots))
        max_attending_tokens = max(self.most_attending, other.most_attending)
        return replace(self, slots=slots, max_attending_tokens=max_attending_tokens, **most)


@dataclass(frozen=True)
class Depth:
    """How many units each ring holds. 1 means that a load waits for the unit before it."""

    weights: int
    cache: int
    hidden: int


SEQUENTIAL = Depth(1, 1, 1)
OVERLAPPED = (Depth(6, 4, 4), Depth(4, 3, 3), Depth(3, 3, 3), Depth(2, 2, 2), SEQUENTIAL)


@dataclass(frozen=True)
class Buffer:
    """One allocation."""

    # What the buffer is for.
    name: str
    # The tier whose budget is charged.
    tier: str
    nbytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """All buffers of a run and the shapes for which they were sized. `memory_plan` makes it."""

    buffers: tuple[Buffer, ...]
    # (name, bytes) of each step buffer.
    workspace: tuple[tuple[str, int], ...]
    shape: BlockShape
    depth: Depth
    # As in ModelSpec.
    head_rows: int = 0

    def serves(self, shape: BlockShape) -> bool:
        """Return whether the buffers suffice for blocks of this shape."""
        return self.shape.covers(shape) and not (self.head_rows and shape.needs_all_logits)

    def bytes_on(self, tier: str) -> int:
        return sum(b.nbytes for b in self.buffers if b.tier == tier)

    def size(self, name: str) -> int:
        """Return the bytes of the buffer called `name` over all tiers."""
        return sum(b.nbytes for b in self.buffers if b.name == name)

    def overflow(self, budgets: dict[str, int | None]) -> dict[str, int]:
        """Return the bytes over budget by tier, or an empty dict if the plan fits."""
        limits = {tier: budget for tier in TIERS if (budget := budgets.get(tier)) is not None}
        return {
            tier: over
            for tier, budget in limits.items()
            if (over := self.bytes_on(tier) - budget) > 0
        }

    def _other_ways(self, tier: str) -> str:
        """Return the flags besides the budget that would still lower what this tier holds."""
        ways = []
        if self.shape.rows * self.shape.micro_batches > 1:
            ways.append("lower --gpu-batch-size or --num-gpu-batches")
        if any(b.tier == tier and b.name in ("weights", "cache", "hidden") for b in self.buffers):
            ways.append("move shares to another tier with --percent")
        if not self.shape.record and any(
            b.tier == tier and b.name == "cache" for b in self.buffers
        ):
            ways.append("keep fewer KV entries with --kv-budget, which may change answers")
        return "".join(f", or {way}" for way in ways)

    def check(self, budgets: dict[str, int | None]) -> None:
        """Raise DoesNotFitError with the numbers and the flags that would help."""
        over = self.overflow(budgets)
        if not over:
            return
        tier, excess = next(iter(over.items()))
        largest = sorted((b for b in self.buffers if b.tier == tier), key=lambda b: -b.nbytes)[:4]
        parts = ", ".join(f"{b.name} {format_bytes(b.nbytes)}" for b in largest)
        raise DoesNotFitError(
            f"the plan needs {format_bytes(self.bytes_on(tier))} on the {tier} tier ({parts}), "
            f"{format_bytes(excess)} more than its budget of {format_bytes(budgets[tier] or 0)}; "
            f"{advice(tier, budgets[tier], self.bytes_on(tier))}{self._other_ways(tier)}"
        )


def checkpoint_bytes(spec: ModelSpec, itemsize: int) -> int:
    """Return the bytes of all weights in the format of the checkpoint.

    Unquantised numbers have `itemsize` bytes.
    """
    if spec.quantization is None:
        return spec.num_weights * itemsize
    layouts = layouts_of(weight_format(spec, Policy(), itemsize), tuple(spec.tensors))
    return sum(layout.part_bytes(Part("disk", 0, layout.cut_shape[0])) for layout in layouts)


def hidden_home_bytes(tokens: int, shares: Shares, row_bytes: int) -> dict[str, int]:
    """Return the bytes that each tier sets aside for a micro-batch of at most `tokens` tokens.

    Each tier has room for one row more than its share: with fewer tokens, rounding may give it one
    row more.

    row_bytes: bytes of one token.
    """
    return {
        tier: round_up((math.ceil(tokens * share) + 1) * row_bytes, PAGE)
        for tier, share in zip(TIERS, shares, strict=True)
        if share > 0
    }


def hidden_is_streamed(shares: Shares, device_is_host: bool) -> bool:
    """Return whether hidden states must be brought to the device before a layer uses them."""
    return any(s > 0 and is_streamed(t, device_is_host) for t, s in zip(TIERS, shares, strict=True))


def kv_layout(
    spec: ModelSpec,
    policy: Policy,
    sequences: int,
    slots: int,
    record: RowRecord | None,
    itemsize: int,
    device_is_host: bool,
) -> UnitLayout:
    """Return the layout of the KV unit of a micro-batch under the policy's cache shares.

    record: None in a transformer block with a window (`record_in`), which records nothing and reads
        all KV entries that it holds.
    """
    shares = tier_shares(policy.cache_shares, device_is_host)
    on_host = attends_on_host(policy, device_is_host)
    streamed = any(
        share > 0 and is_streamed(tier, on_host) for tier, share in zip(TIERS, shares, strict=True)
    )
    return UnitLayout(
        sequences,
        spec.num_kv_heads,
        slots,
        spec.head_dim,
        itemsize,
        shares,
        NO_RECORD if record is None else record,
        streamed,
        packing_of(spec, policy),
        policy.cache_window,
    )


def record_in(spec: ModelSpec, block: int, record: RowRecord) -> RowRecord | None:
    """Return the `record` argument of `kv_layout` for a transformer block.

    record: what the eviction policy keeps in blocks without a window.
    """
    return record if spec.window(block) is None else None


def packing_of(spec: ModelSpec, policy: Policy) -> KVPacking | None:
    """Return how KV entries are compressed, or None if they are not."""
    return KVPacking.of(spec.head_dim, policy.cache_bits) if policy.compress_cache else None


def kv_sizes_of(
    spec: ModelSpec, policy: Policy, itemsize: int = DTYPE_BYTES["bfloat16"]
) -> KVSizes:
    """Return the sizes of KV entries.

    The default itemsize is bf16's, for eviction policies that count bytes.
    """
    return KVSizes(spec.head_dim, packing_of(spec, policy), policy.cache_window, itemsize)


def attends_on_host(policy: Policy, device_is_host: bool) -> bool:
    """Return whether attention runs on the host.

    It does if the device is host memory, or with --cpu-cache-compute.
    """
    return device_is_host or policy.cpu_cache_compute


def makes_graphs(spec: ModelSpec, policy: Policy, in_one_launch: bool) -> bool:
    """Return whether decode steps may become CUDA graphs (engine/graphs.py).

    Steps of as many sequences must launch the same kernels, and everything that they read and write
    must stay in place. So all weights, KV cache and hidden states are on the GPU. Routers rule
    graphs out, because they are asked in the middle of a step. So does a run without overlap,
    because each step is waited for.

    in_one_launch: as in Needs of the eviction policy.
    """
    shares = policy.weight_shares, policy.cache_shares, policy.hidden_shares
    stays = all(on_device == 1 for on_device, *_ in shares) and not attends_on_host(policy, False)
    alike = in_one_launch and policy.attn_sparsity == 1 and not spec.experts
    return stays and alike and policy.overlap


def head_rows(
    spec: ModelSpec,
    policy: Policy,
    shape: BlockShape,
    itemsize: int,
    device_is_host: bool,
    depth: Depth,
) -> int:
    """Return the rows of the head's table that form a weight unit; 0: all of them.

    See ModelSpec.head_rows. The ring has room for the largest units, and the head often is one. In
    parts it takes no more than other layers. But then the logits of all micro-batches of a block
    are held until the last part. So the head is cut only if that takes fewer bytes in all.
    """
    form = weight_format(spec, policy, itemsize)
    rows = 0 if shape.needs_all_logits else even_head_rows(spec, policy, form, device_is_host)
    if not rows:
        return 0
    models = (spec, with_head_rows(spec, rows))
    whole, cut = (
        sum(weight_bytes(model, policy, form, device_is_host, depth.weights)) for model in models
    )
    more_logits = (shape.micro_batches - 1) * shape.rows * spec.vocab_size * itemsize
    # The thread that reads rows of the table needs a staging buffer.
    more_staging = STAGING_BYTES if spec.shares_table else 0
    return rows if cut + more_logits + more_staging < whole else 0


def memory_plan(
    spec: ModelSpec,
    policy: Policy,
    shape: BlockShape,
    itemsize: int,
    device_is_host: bool,
    depth: Depth,
) -> MemoryPlan:
    """Return all buffers of a run.

    `itemsize`: bytes of the compute dtype, in which weights and KV are held.
    """
    spec = with_head_rows(spec, head_rows(spec, policy, shape, itemsize, device_is_host, depth))
    tokens = shape.most_tokens
    form = weight_format(spec, policy, itemsize)
    weights = weight_bytes(spec, policy, form, device_is_host, depth.weights)
    blocking = blocking_bytes(spec, form, device_is_host)
    workspace = workspace_sizes(spec, shape, itemsize)
    if form.in_int8:
        workspace |= int8_sizes(spec, shape.joined if spec.experts else tokens, form.requantises)
    # A stage of a pipeline exchanges the hidden states of a micro-batch with one or two neighbours.
    neighbours = (not spec.embedding) + (not spec.head)
    message = round_up(tokens * spec.hidden_size * itemsize, PAGE)
    row_threads = any(tensor.looked_up for tensor in spec.embedding)
    column_threads = policy.cache_shares[1] > 0 and not attends_on_host(policy, device_is_host)
    of_readers = READ_THREADS * (1 if device_is_host else STAGING_SLOTS)
    staging = of_readers + WRITE_THREADS + row_threads + column_threads
    common_prefix = round_up(shape.common * spec.kv_bytes_per_token(itemsize), ALIGN)
    buffers = [
        Buffer("weights", "device", weights.device),
        Buffer("weights", "host", weights.host),
        Buffer("weight ring", "device", weights.ring),
        Buffer("unpacked weights", "device", weights.unpacked),
        *_cache_buffers(spec, policy, shape, itemsize, device_is_host, depth.cache),
        Buffer("common prefix", "device", common_prefix),
        *_hidden_buffers(spec, policy, shape, itemsize, device_is_host, depth.hidden),
        Buffer("wire", "device", neighbours * WIRE_BUFFERS * message),
        Buffer("workspace", "device", sum(workspace.values())),
        Buffer(
            "temporaries", "device", max(temporary_bytes(spec, shape, itemsize, policy), blocking)
        ),
        Buffer(
            "temporaries",
            "device",
            unpacked_cache_bytes(spec, policy, shape, itemsize, device_is_host),
        ),
        Buffer(
            "temporaries",
            "host",
            prompt_to_pack_bytes(spec, policy, shape, itemsize, device_is_host),
        ),
        Buffer("staging", "host", staging * STAGING_BYTES),
    ]
    merged: Counter[tuple[str, str]] = Counter()
    for b in buffers:
        if b.nbytes:
            merged[b.name, "host" if device_is_host and b.tier == "device" else b.tier] += b.nbytes
    placed = tuple(Buffer(name, tier, nbytes) for (name, tier), nbytes in merged.items())
    return MemoryPlan(placed, tuple(workspace.items()), shape, depth, spec.head_rows)


def plan_within(
    spec: ModelSpec,
    policy: Policy,
    shape: BlockShape,
    itemsize: int,
    device_is_host: bool,
    budgets: dict[str, int | None],
) -> MemoryPlan:
    """Return the plan with the deepest look-ahead that fits the budgets.

    Raise DoesNotFitError if not even the shallowest one fits.
    """
    for depth in OVERLAPPED if policy.overlap else (SEQUENTIAL,):
        plan = memory_plan(spec, policy, shape, itemsize, device_is_host, depth)
        if not plan.overflow(budgets):
            return plan
    plan.check(budgets)
    return plan


def _cache_buffers(
    spec: ModelSpec,
    policy: Policy,
    shape: BlockShape,
    itemsize: int,
    device_is_host: bool,
    depth: int,
) -> list[Buffer]:
    shares = tier_shares(policy.cache_shares, device_is_host)
    on_host = attends_on_host(policy, device_is_host)
    attends_on = "host" if on_host else "device"
    found = []
    ring = 0
    records = [record_in(spec, block, shape.record) for block in range(len(shape.slots))]
    for (slots, record), blocks in Counter(zip(shape.slots, records, strict=True)).items():
        layout = kv_layout(spec, policy, shape.rows, slots, record, itemsize, device_is_host)
        units = blocks * shape.micro_batches
        streamed = 0
        for tier, share in zip(TIERS, shares, strict=True):
            part = Part(tier, 0, layout.most_part_rows(share))
            is_brought = is_streamed(tier, on_host)
            found.append(
                Buffer(
                    "cache",
                    tier,
                    round_up(units * layout.room_bytes(part), PAGE) if part.rows else 0,
                )
            )
            found.append(
                Buffer(
                    "cache record",
                    attends_on if is_brought else tier,
                    units * layout.metadata_bytes(part),
                )
            )
            if is_brought:
                streamed += round_up(layout.room_bytes(part), PAGE) if part.rows else 0
            if tier == "disk":
                found.append(Buffer("cache overlay", "host", units * layout.overlay_bytes(part)))
        ring = max(ring, streamed)
    return [*found, Buffer("cache ring", attends_on, depth * ring)]


def hidden_row_bytes(spec: ModelSpec, itemsize: int) -> tuple[int, ...]:
    """Return the bytes of a token in each field of the hidden states (models.Hidden)."""
    width = spec.hidden_size * itemsize
    return (
        (width, width, 4 * spec.experts.per_token, 4 * spec.experts.per_token)
        if spec.experts
        else (width,)
    )


def _hidden_buffers(
    spec: ModelSpec,
    policy: Policy,
    shape: BlockShape,
    itemsize: int,
    device_is_host: bool,
    depth: int,
) -> list[Buffer]:
    shares = tier_shares(policy.hidden_shares, device_is_host)
    tokens = shape.most_tokens
    rows = hidden_row_bytes(spec, itemsize)
    homes = [hidden_home_bytes(tokens, shares, row) for row in rows]
    found = [
        Buffer("hidden", tier, shape.micro_batches * nbytes)
        for home in homes
        for tier, nbytes in home.items()
    ]
    if hidden_is_streamed(shares, device_is_host):
        found.append(
            Buffer(
                "hidden ring", "device", depth * sum(round_up(tokens * row, PAGE) for row in rows)
            )
        )
    return found
