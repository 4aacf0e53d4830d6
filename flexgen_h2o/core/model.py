"""The shape of a model, as frozen data: its tensors, its weight units and the layers of a sweep. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal

GROUP_NUMEL = 40 * 10**6  # of a group of experts: some tens of MB, so that a ring of a few groups is small
# Where a decode sweep is expected to use less than this share of experts (of groups, where their size is given), they
# move one by one once the router has chosen, and the others do not; above it, as many groups ahead of it are faster.
WAITS_BELOW = 0.93

# receive, send: where a stage of a pipeline begins and ends that has no embedding, no head.
LayerKind = Literal["embedding", "attention", "mlp", "block", "experts", "head", "receive", "send"]


def slice_key(name: str, index: int | None) -> str:
    """Of a stored tensor, or of slice `index` of it."""
    return name if index is None else f"{name}[{index}]"


@dataclass(frozen=True)
class Stacked:
    """Rows of one slice of a larger tensor, as some checkpoints have an expert's matrices.

    `shape` is the larger tensor's: (slices, rows of a slice, columns).
    """

    names: tuple[str, ...]  # that the larger tensor may have
    shape: tuple[int, int, int]
    index: int  # of the slice, along the first dimension
    first: int  # row of the slice that is the matrix's first


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a layer: the `role` its forward asks for, its `name` in the checkpoint, its shape.

    aliases: names that some checkpoints have for it. exact: no switch compresses it (a router). index: it is this
    slice, along the first dimension, of what is stored under its name, as an expert is of all experts of a block;
    `shape` is the slice's. A model has all slices of such a tensor. transposed: checkpoints with plain numbers have the
    matrix as (columns, rows), for x W; `shape` is that of W^T, as of all matrices. looked_up: rows of it are looked up
    by token, and nothing else is done with it. whole: it is rows of that tensor, from its row `first` on (`rows`).
    stacked: where some checkpoints have it instead of under a name of its own.
    """

    role: str
    name: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()
    exact: bool = False
    index: int | None = None
    transposed: bool = False
    looked_up: bool = False
    whole: TensorSpec | None = None
    first: int = 0
    stacked: Stacked | None = None

    @property
    def key(self) -> str:
        """No other tensor of the model has it."""
        if self.whole is not None:
            return f"{self.whole.key}[{self.first}:{self.first + self.shape[0]}]"
        return slice_key(self.name, self.index)

    def rows(self, chosen: range) -> TensorSpec:
        """These rows of a matrix, in the same role."""
        return replace(self, shape=(len(chosen), *self.shape[1:]), whole=self, first=chosen.start)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class WeightUnit:
    """The tensors that move as one piece."""

    name: str
    tensors: tuple[TensorSpec, ...]

    @property
    def numel(self) -> int:
        return sum(t.numel for t in self.tensors)


@dataclass(frozen=True)
class Layer:
    """One step of a sweep. `block` is the transformer block it belongs to (-1: embedding or head).

    `unit` indexes `LayerPlan.units`; embedding and head share one when the model ties them. experts: those of the
    block that a layer of this kind computes. rows: of the head's table, those whose logits a layer of this kind gives.
    """

    kind: LayerKind
    block: int
    unit: int
    experts: range = range(0)
    rows: range = range(0)


@dataclass(frozen=True)
class LayerPlan:
    """The layers of one sweep in order, and the weight units they read."""

    layers: tuple[Layer, ...]
    units: tuple[WeightUnit, ...]


@dataclass(frozen=True)
class Rotary:
    """Rotary position embeddings (Su et al. 2021, section 3.2.2) of queries and keys.

    The first 2 x len(frequencies) numbers of a head turn: those of its first half with those of its second half, pair i
    by position x frequencies[i] radians. scaling: of the turned numbers' cosines and sines (YaRN's attention factor).
    """

    frequencies: tuple[float, ...]
    scaling: float = 1.0

    @property
    def width(self) -> int:
        """Numbers of a head that turn."""
        return 2 * len(self.frequencies)


@dataclass(frozen=True)
class StepBuffer:
    """A step buffer that not every model needs: `width` elements for each of a chunk of tokens, used in `layer`."""

    name: str
    width: int
    layer: Literal["attention", "mlp"]


@dataclass(frozen=True)
class Experts:
    """Mixtures of experts that transformer blocks have in the place of an MLP (Shazeer et al. 2017).

    count, per_token: experts of a block, and how many a router chooses for a token. ffn_size: of one. tensors: of each
    block's experts; () where the block has an MLP. inputs: of each block, vectors that every group of its experts
    needs (its norm).
    """

    count: int
    per_token: int
    ffn_size: int
    tensors: tuple[tuple[tuple[TensorSpec, ...], ...], ...]
    inputs: tuple[tuple[TensorSpec, ...], ...]

    def of_blocks(self, chosen: Sequence[int]) -> Experts:
        """Those of some blocks."""
        return replace(
            self, tensors=tuple(self.tensors[i] for i in chosen), inputs=tuple(self.inputs[i] for i in chosen)
        )

    def share_used(self, tokens: float, group: int = 1) -> float:
        """The expected share of groups of so many experts that some of `tokens` tokens need, if each chooses evenly:
        1 - (C(E - g, k) / C(E, k))^tokens of E experts, of which it takes k."""
        left, none = self.count - group, 1.0
        for i in range(self.per_token):
            none *= max(0.0, (left - i) / (self.count - i))
        return float(1.0 - none**tokens)

    def group_size(self, asked: int, rows: int) -> int:
        """Experts that move as one piece where so many rows decode together. asked: a number that is given, or 0."""
        if asked:
            return min(asked, self.count)
        if self.share_used(rows) < WAITS_BELOW:
            return 1
        return max(1, min(self.count, GROUP_NUMEL // self._largest))

    @cached_property
    def _largest(self) -> int:
        """Elements of the largest expert; 1 where a stage of a pipeline has none. A search asks thousands of times."""
        return max((sum(t.numel for t in expert) for block in self.tensors for expert in block), default=1)


@dataclass(frozen=True)
class ModelSpec:
    """The shape of a model, all that the planner and the engine need to know of it.

    family: key of `models.FAMILIES`, which knows names and forward. Widths are in elements.
    mlp: of a transformer block; empty where attention and MLP read the same hidden states (parallel residual): such a
    block is one layer, whose tensors are all in `attention`. Empty too where the block has `experts`: then `attention`
    has the router.
    rotary: None where positions are in the hidden states already.
    windows: of each transformer block how many of the newest columns a query sees, its own among them; None: all.
    Empty: none of them has a window.
    options: what only the family reads (activation, norm placement, ...), as sorted pairs.
    quantization: the checkpoint's `quantization_config` (checkpoint/formats).
    embedding, head: empty where this is a stage of a pipeline (`stage`) that another one feeds, that feeds another one.
    The head's last tensor is its table, which has a row for each token.
    head_rows: rows of that table in a unit; the head is then as many layers (`with_head_rows`). 0: all of them.
    prefix: what the names of all tensors but the head's begin with. Checkpoints of the bare model lack it.
    """

    name: str
    family: str
    num_blocks: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    vocab_size: int
    max_positions: int
    embedding: tuple[TensorSpec, ...]
    attention: tuple[tuple[TensorSpec, ...], ...]
    mlp: tuple[tuple[TensorSpec, ...], ...]
    head: tuple[TensorSpec, ...]
    tied: bool
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    options: tuple[tuple[str, Any], ...] = ()
    rotary: Rotary | None = None
    quantization: Mapping[str, Any] | None = None
    buffers: tuple[StepBuffer, ...] = ()
    experts: Experts | None = None
    windows: tuple[int | None, ...] = ()
    head_rows: int = 0
    prefix: str = "model"

    def __hash__(self) -> int:
        """Of a few fields: the planner looks models up thousands of times, and a model has thousands of tensors."""
        sizes = self.num_blocks, self.hidden_size, self.ffn_size, self.vocab_size, self.head_rows
        return hash((self.name, self.family, *sizes))

    def option(self, key: str) -> Any:
        return dict(self.options)[key]

    def of_blocks(self, chosen: Sequence[int]) -> ModelSpec:
        """The model with these transformer blocks alone."""
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
        """The part of the model with these transformer blocks: with the embedding if they are its first ones, and with
        the head if they are its last ones."""
        embedding, head = blocks.start == 0, blocks.stop == self.num_blocks
        return replace(
            self.of_blocks(blocks), embedding=self.embedding if embedding else (), head=self.head if head else ()
        )

    @property
    def shares_table(self) -> bool:
        """Are embedding and head one unit here? Of a tied model, where both are in one stage and the head is whole."""
        return self.tied and bool(self.embedding) and bool(self.head) and not self.head_rows

    @property
    def tensors(self) -> list[TensorSpec]:
        """All of them, those of a layer side by side, tied ones once."""
        units = replace(self, head_rows=0).layers(sep_layer=False).units
        return list({t.key: t for unit in units for t in unit.tensors}.values())

    @property
    def num_weights(self) -> int:
        """Elements of all weights, tied tensors counted once."""
        return sum(t.numel for t in self.tensors)

    @property
    def num_active(self) -> int:
        """Those of them that a token uses: of experts only the ones that it chooses."""
        if self.experts is None:
            return self.num_weights
        of_experts = sum(t.numel for block in self.experts.tensors for expert in block for t in expert)
        return self.num_weights - of_experts + of_experts * self.experts.per_token // self.experts.count

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V that one token adds over all blocks."""
        return 2 * self.num_blocks * self.num_kv_heads * self.head_dim * itemsize

    def kv_columns(self, tokens: int) -> int:
        """Columns of so many tokens over all blocks, a window's at most in those that have one."""
        return sum(min(tokens, self.window(block) or tokens) for block in range(self.num_blocks))

    def experts_of(self, block: int) -> tuple[tuple[TensorSpec, ...], ...]:
        """The tensors of each expert of a transformer block; () where it has none."""
        return self.experts.tensors[block] if self.experts else ()

    def layers(self, sep_layer: bool, expert_group: int = 0) -> LayerPlan:
        """The layers of a sweep. `sep_layer`: attention and MLP are two steps with a weight unit each, where the
        model allows it. expert_group: experts of a step and unit; 0: all of a block."""
        units: list[WeightUnit] = []
        layers: list[Layer] = []

        def add(kind: LayerKind, block: int, name: str, tensors: tuple[TensorSpec, ...], **own: range) -> None:
            units.append(WeightUnit(name, tensors))
            layers.append(Layer(kind, block, len(units) - 1, **own))

        def add_experts(block: int) -> None:
            assert self.experts is not None
            experts, size = self.experts.tensors[block], expert_group or self.experts.count
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


@lru_cache(maxsize=64)  # the same object for equal ones, by which plans look up what they know of a model
def with_head_rows(spec: ModelSpec, rows: int) -> ModelSpec:
    """The model with so many rows of the head's table in a unit; 0: all. A tied table is then two, as if it were not
    tied: one whose rows the embedding looks up, and one that is multiplied."""
    if rows == spec.head_rows:
        return spec
    table = spec.head[-1].key
    embedding = tuple(replace(t, looked_up=True) if t.key == table else t for t in spec.embedding)
    return replace(spec, head_rows=rows, embedding=embedding)
