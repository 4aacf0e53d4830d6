"""Lists of every buffer of a run by tier, and the shapes from which they are made.

The engine allocates exactly such a list, so what fits there runs. `memory.MemoryPlanner` makes it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flexgen_h2o.checkpoint.formats import Codec, layouts_of, weight_format
from flexgen_h2o.core.config import DTYPE_BYTES, TIERS, Policy
from flexgen_h2o.core.errors import DoesNotFitError
from flexgen_h2o.core.model import LayerKind, ModelSpec
from flexgen_h2o.core.packing import KVPacking, KVSizes
from flexgen_h2o.core.units import (
    JOINED_TOKENS,
    PAGE,
    SCORED_CHUNK,
    advice,
    format_bytes,
    round_up,
)
from flexgen_h2o.tiers.stream import Part, Shares, is_streamed

# Fields of a BlockShape of which buffers for two blocks need the most.
SIZES = ("rows", "micro_batches", "tokens", "sharing", "common", "scores")


def most_of(one: object, other: object, names: Iterable[str]) -> dict[str, Any]:
    """Return the larger value of each field; of a tuple, of each place in it."""
    pairs = {name: (getattr(one, name), getattr(other, name)) for name in names}
    return {
        name: tuple(map(max, *pair)) if isinstance(pair[0], tuple) else max(pair)
        for name, pair in pairs.items()
    }


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
    record: tuple[str, ...] = ()
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
    # Bytes of RAM for a job's rows that run and wait (workload.JobWindow); 0 outside of jobs.
    held_bytes: int = 0

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
        names = ("most_attending", *SIZES)
        return (
            self.record == other.record
            and self.has_slots(other.slots)
            and all(getattr(self, name) >= getattr(other, name) for name in names)
        )

    def union(self, other: BlockShape) -> BlockShape:
        """Return the smallest shape that covers both.

        They must be of one eviction policy and model.
        """
        max_attending_tokens = max(self.most_attending, other.most_attending)
        most = most_of(self, other, ("slots", "needs_all_logits", "held_bytes", *SIZES))
        return replace(self, max_attending_tokens=max_attending_tokens, **most)


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
    """All buffers of a run and the shapes for which they were sized. `MemoryPlanner` makes it."""

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

    def overflow(self, budgets: Mapping[str, int | None]) -> dict[str, int]:
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
            ways.append("lower --micro-batch or --micro-batches")
        if any(b.tier == tier and b.name in ("weights", "cache", "hidden") for b in self.buffers):
            ways.append("move shares to another tier with --percent")
        if not self.shape.record and any(
            b.tier == tier and b.name == "cache" for b in self.buffers
        ):
            ways.append("keep fewer KV entries with --kv-budget, which may change answers")
        return "".join(f", or {way}" for way in ways)

    def check(self, budgets: Mapping[str, int | None]) -> None:
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
    return _stored_bytes(spec, weight_format(spec, Policy(), itemsize))


def packed_bytes(spec: ModelSpec, policy: Policy, itemsize: int) -> int:
    """Return the bytes of the converted copy of all weights that a run needs on disk.

    The result is 0 if the checkpoint is read as it is. itemsize: bytes of one number of the compute
    dtype.
    """
    form = weight_format(spec, policy, itemsize)
    return _stored_bytes(spec, form) if form.converted_by else 0


def _stored_bytes(spec: ModelSpec, form: Codec) -> int:
    layouts = layouts_of(form, tuple(spec.tensors))
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
