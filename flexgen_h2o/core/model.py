"""The shape of a model as frozen data: its tensors, its weight units and the layers of a sweep.

No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

# Elements in a group of experts: some tens of MB, so that a ring of a few groups is small.
GROUP_NUMEL = 40 * 10**6
# If a decode sweep is expected to use less than this share of the experts (or of groups, if their
# size is set), experts move one by one once the router has chosen them, and the others do not move.
# Above this share, loading as many groups ahead of the router is faster.
LOAD_AFTER_ROUTER_BELOW = 0.93

# A stage of a pipeline without an embedding begins with "receive". One without a head ends with
# "send".
LayerKind = Literal["embedding", "attention", "mlp", "block", "experts", "head", "receive", "send"]


def slice_key(name: str, index: int | None) -> str:
    """Return the key of a stored tensor, or of slice `index` of it."""
    return name if index is None else f"{name}[{index}]"


@dataclass(frozen=True)
class Stacked:
    """Some rows of one slice of a larger tensor.

    Some checkpoints store an expert's matrices like this.
    """

    names: tuple[str, ...]  # names that the larger tensor may have
    shape: tuple[int, int, int]  # of the larger tensor: (slices, rows of a slice, columns)
    index: int  # index of the slice along the first dimension
    first: int  # row of the slice that is the matrix's first


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a layer, as the model's family describes it."""

    role: str  # what the family's forward calls the tensor
    name: str  # name in the checkpoint
    shape: tuple[int, ...]
    # Other names that some checkpoints have for it.
    aliases: tuple[str, ...] = ()
    # No switch compresses the tensor (a router, for example).
    exact: bool = False
    # The tensor is this slice, along the first dimension, of the stored tensor of its name. An
    # expert can be such a slice of all experts of a block. `shape` is the slice's. A model has all
    # slices.
    index: int | None = None
    # Checkpoints with plain numbers store the matrix as (columns, rows), for x W. `shape` is that
    # of W^T, as for all matrices.
    transposed: bool = False
    # Rows of the tensor are looked up by token, and it is used for nothing else.
    looked_up: bool = False
    # The tensor is rows of that one, from its row `first` on. `rows` sets both.
    whole: TensorSpec | None = None
    first: int = 0
    # Where some checkpoints have the tensor, instead of under a name of its own.
    stacked: Stacked | None = None

    @property
    def key(self) -> str:
        """A name that no other tensor of the model has."""
        if self.whole is not None:
            return f"{self.whole.key}[{self.first}:{self.first + self.shape[0]}]"
        return slice_key(self.name, self.index)

    def rows(self, chosen: range) -> TensorSpec:
        """Return these rows of a matrix as a tensor in the same role."""
        return replace(self, shape=(len(chosen), *self.shape[1:]), whole=self, first=chosen.start)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class WeightUnit:
    """Tensors that move as one piece."""

    name: str
    tensors: tuple[TensorSpec, ...]

    @property
    def numel(self) -> int:
        return sum(t.numel for t in self.tensors)


@dataclass(frozen=True)
class Layer:
    """One step of a sweep."""

    kind: LayerKind
    block: int  # the transformer block that it belongs to; -1: embedding or head
    unit: int  # index in `LayerPlan.units`; embedding and head share one if the model ties them
    experts: range = range(0)  # experts of the block that a layer of kind "experts" computes
    rows: range = range(0)  # rows of the head's table whose logits a layer of kind "head" computes


@dataclass(frozen=True, eq=False)  # what is known of a plan is looked up by the object
class LayerPlan:
    """The layers of one sweep in order, and the weight units they read."""

    layers: tuple[Layer, ...]
    units: tuple[WeightUnit, ...]


@dataclass(frozen=True)
class Rotary:
    """Rotary position embeddings (Su et al. 2021, section 3.2.2) of queries and keys.

    The first 2 x len(frequencies) numbers of a head turn: the first half of them with the second
    half. Pair i turns by position x frequencies[i] radians.
    """

    frequencies: tuple[float, ...]
    scaling: float = 1.0  # factor of the cosines and sines (YaRN's attention factor)

    @property
    def width(self) -> int:
        """Number of a head's elements that turn."""
        return 2 * len(self.frequencies)


@dataclass(frozen=True)
class StepBuffer:
    """A step buffer that not every model needs. It serves a chunk of tokens at a time."""

    name: str
    width: int  # elements per token
    layer: Literal["attention", "mlp"]  # the layer that uses the buffer


@dataclass(frozen=True)
class Experts:
    """Mixtures of experts that replace the MLP of transformer blocks (Shazeer et al. 2017)."""

    count: int  # experts of a block
    per_token: int  # experts that a router chooses for a token
    ffn_size: int  # of one expert
    # Per block, per expert: its tensors. () for a block that has an MLP.
    tensors: tuple[tuple[tuple[TensorSpec, ...], ...], ...]
    # Per block: vectors that every group of its experts needs (the norm).
    inputs: tuple[tuple[TensorSpec, ...], ...]

    def of_blocks(self, chosen: Sequence[int]) -> Experts:
        """Return the experts of the chosen transformer blocks."""
        return replace(
            self,
            tensors=tuple(self.tensors[i] for i in chosen),
            inputs=tuple(self.inputs[i] for i in chosen),
        )

    def share_used(self, tokens: float, group: int = 1) -> float:
        """Return the expected share of groups of experts that some of `tokens` tokens need.

        Each token is assumed to choose evenly. With E experts, k per token and groups of g, the
        share is 1 - (C(E - g, k) / C(E, k))^tokens.
        """
        num_left = self.count - group
        share_unused = 1.0
        for i in range(self.per_token):
            share_unused *= max(0.0, (num_left - i) / (self.count - i))
        return float(1.0 - share_unused**tokens)

    def group_size(self, asked: int, rows: int) -> int:
        """Return how many experts move as one piece if `rows` sequences decode together.

        asked: the number that the user set, or 0.
        """
        if asked:
            return min(asked, self.count)
        if self.share_used(rows) < LOAD_AFTER_ROUTER_BELOW:
            return 1
        return max(1, min(self.count, GROUP_NUMEL // self._largest))

    @cached_property
    def _largest(self) -> int:
        """Elements of the largest expert; 1 if a stage of a pipeline has no experts.

        It is cached because a search asks for it thousands of times.
        """
        return max(
            (sum(t.numel for t in expert) for block in self.tensors for expert in block), default=1
        )


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a model: all that the planner and the engine need to know of it.

    Widths are in elements.
    """

    name: str
    family: str  # key of `models.FAMILIES`, which knows names of tensors and the forward
    num_blocks: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    # Tensors of the embedding. () if this is a stage of a pipeline that another stage feeds
    # (`stage`).
    embedding: tuple[TensorSpec, ...]
    # Per transformer block: tensors of the attention, with the router if the block has `experts`.
    attention: tuple[tuple[TensorSpec, ...], ...]
    # Per transformer block: tensors of the MLP. () if attention and MLP read the same hidden states
    # (parallel residual): such a block is one layer, whose tensors are all in `attention`.
    # () too if the block has `experts`.
    mlp: tuple[tuple[TensorSpec, ...], ...]
    # Tensors of the head. The last is its table, with one row per token of the vocabulary.
    # () if this is a stage of a pipeline that feeds another stage (`stage`).
    head: tuple[TensorSpec, ...]
    tied: bool
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    # Sorted pairs that only the family reads (activation, norm placement, ...).
    options: tuple[tuple[str, Any], ...] = ()
    # Rotary embeddings of queries and keys. None if positions are in the hidden states already.
    rotary: Rotary | None = None
    # The checkpoint's `quantization_config` (checkpoint/formats).
    quantization: Mapping[str, Any] | None = None
    buffers: tuple[StepBuffer, ...] = ()
    experts: Experts | None = None
    # Per transformer block: how many of the newest KV entries a query sees, its own included. None:
    # all. (): no block has a window.
    windows: tuple[int | None, ...] = ()
    # Rows of the head's table in a unit. The head is then as many layers as it has such units
    # (`with_head_rows`). 0: all rows.
    head_rows: int = 0
    # First part of the names of all tensors except the head's. Checkpoints of the bare model lack
    # it.
    prefix: str = "model"

    def __hash__(self) -> int:
        """Return a hash of a few fields.

        The planner looks models up thousands of times, and a model has thousands of tensors.
        """
        sizes = self.num_blocks, self.hidden_size, self.ffn_size, self.vocab_size, self.head_rows
        return hash((self.name, self.family, *sizes))

    def option(self, key: str) -> Any:
        return dict(self.options)[key]

    def of_blocks(self, chosen: Sequence[int]) -> ModelSpec:
        """Return the model with only the chosen transformer blocks."""
        return replace(
            self,
            num_blocks=len(chosen),
            attention=tuple(self.attention[i] for i in chosen),
            mlp=tuple(self.mlp[i] for i in chosen),
            experts=self.experts and self.experts.of_blocks(chosen),
            windows=tuple(self.windows[i] for i in chosen) if self.windows else (),
        )

    def window(self, block: int) -> int | None:
        return self.windows[block] if self.windows else None

    def stage(self, blocks: range) -> ModelSpec:
        """Return the part of the model with these transformer blocks.

        It has the embedding if the first block is among them, and the head if the last one is.
        """
        embedding = blocks.start == 0
        head = blocks.stop == self.num_blocks
        return replace(
            self.of_blocks(blocks),
            embedding=self.embedding if embedding else (),
            head=self.head if head else (),
        )

    @property
    def shares_table(self) -> bool:
        """Whether embedding and head are one unit here.

        They are in a tied model if both are in one stage and the head is whole.
        """
        return self.tied and bool(self.embedding) and bool(self.head) and not self.head_rows

    @property
    def tensors(self) -> list[TensorSpec]:
        """All tensors; those of a layer are side by side, and tied ones appear once."""
        units = replace(self, head_rows=0).layers(sep_layer=False).units
        return list({t.key: t for unit in units for t in unit.tensors}.values())

    @property
    def num_weights(self) -> int:
        """Elements of all weights. Tied tensors are counted once."""
        return sum(t.numel for t in self.tensors)

    @property
    def num_active(self) -> int:
        """Elements of the weights that one token uses: all, but only the chosen experts."""
        if self.experts is None:
            return self.num_weights
        of_experts = sum(
            t.numel for block in self.experts.tensors for expert in block for t in expert
        )
        return (
            self.num_weights
            - of_experts
            + of_experts * self.experts.per_token // self.experts.count
        )

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Return the bytes of K and V that one token adds over all blocks."""
        return 2 * self.num_blocks * self.num_kv_heads * self.head_dim * itemsize

    def kv_columns(self, tokens: int) -> int:
        """Return the KV entries of `tokens` tokens over all blocks.

        A block with a window has at most as many as its window.
        """
        return sum(min(tokens, self.window(block) or tokens) for block in range(self.num_blocks))

    def experts_of(self, block: int) -> tuple[tuple[TensorSpec, ...], ...]:
        """Return the tensors of each expert of a transformer block; () if it has none."""
        return self.experts.tensors[block] if self.experts else ()

    def layers(self, sep_layer: bool, expert_group: int = 0) -> LayerPlan:
        """Return the layers of a sweep.

        sep_layer: attention and MLP are two steps with one weight unit each, if the model allows
        it. expert_group: experts of a step and unit; 0: all of a block.
        """
        units: list[WeightUnit] = []
        layers: list[Layer] = []

        def add(
            kind: LayerKind, block: int, name: str, tensors: tuple[TensorSpec, ...], **own: range
        ) -> None:
            units.append(WeightUnit(name, tensors))
            layers.append(Layer(kind, block, len(units) - 1, **own))

        def add_experts(block: int) -> None:
            assert self.experts is not None
            experts = self.experts.tensors[block]
            size = expert_group or self.experts.count
            for first in range(0, len(experts), size):
                group = range(first, min(first + size, len(experts)))
                tensors = tuple(t for i in group for t in experts[i])
                name = f"block {block} experts {group.start} to {group[-1]}"
                add("experts", block, name, self.experts.inputs[block] + tensors, experts=group)

        def add_head() -> None:
            for first in range(0, self.vocab_size, self.head_rows):
                rows = range(first, min(first + self.head_rows, self.vocab_size))
                tensors = (*self.head[:-1], self.head[-1].rows(rows))
                add("head", -1, f"head rows {rows.start} to {rows[-1]}", tensors, rows=rows)

        keys = {t.key for t in self.embedding}
        extra_head = tuple(t for t in self.head if t.key not in keys) if self.shares_table else ()
        first: LayerKind = "embedding" if self.embedding else "receive"
        add(first, -1, first, self.embedding + extra_head)
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            if self.experts_of(i):
                add("attention", i, f"block {i} attention", attention)
                add_experts(i)
            elif sep_layer and mlp:
                add("attention", i, f"block {i} attention", attention)
                add("mlp", i, f"block {i} mlp", mlp)
            else:
                add("block", i, f"block {i}", attention + mlp)
        if self.shares_table:
            layers.append(Layer("head", -1, 0, rows=range(self.vocab_size)))
        elif self.head and self.head_rows:
            add_head()
        elif self.head:
            add("head", -1, "head", self.head, rows=range(self.vocab_size))
        else:
            add("send", -1, "send", ())
        return LayerPlan(tuple(layers), tuple(units))


@lru_cache(maxsize=64)  # equal models give the same object, by which plans look up what they know
def with_head_rows(spec: ModelSpec, rows: int) -> ModelSpec:
    """Return the model with `rows` rows of the head's table in a unit; 0: all.

    A tied table then becomes two, as if it were not tied. The embedding looks up rows of the first.
    The second is multiplied.
    """
    if rows == spec.head_rows:
        return spec
    table = spec.head[-1].key
    embedding = tuple(replace(t, looked_up=True) if t.key == table else t for t in spec.embedding)
    return replace(spec, head_rows=rows, embedding=embedding)
