"""What a run is made of, as frozen data: model shape, policy, budgets. No torch, no I/O but JSON.

Values are checked where they enter: constructing one of these with a number out of range raises UsageError.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import read_object, write_result
from flexgen_h2o.core.settings import check_settings, setting
from flexgen_h2o.core.units import check_int, parse_bytes

DType = Literal["float32", "bfloat16", "float16"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}
TIERS = ("device", "host", "disk")
POLICY_SCHEMA = 3
# Fields by the schema that has them first; in a file of an older one they are at their defaults.
SINCE_SCHEMA = {"weight_bits": 2, "cache_bits": 2, "int8_compute": 2, "cache_window": 3}
BITS = (4, 8)  # of a compressed weight
CACHE_BITS = (2, 3, 4, 8)  # of a compressed KV value
# Fields that say how, and the switch that says whether.
COMPRESSION_OF = {"weight_bits": "compress_weight", "cache_bits": "compress_cache", "cache_window": "compress_cache"}
MOST_ROWS = 2**16  # of a block

# receive, send: where a stage of a pipeline begins and ends that has no embedding, no head.
LayerKind = Literal["embedding", "attention", "mlp", "block", "head", "receive", "send"]


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a layer: the `role` its forward asks for, its `name` in the checkpoint, its shape.

    aliases: names that some checkpoints have for it.
    """

    role: str
    name: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...] = ()

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

    `unit` indexes `LayerPlan.units`; embedding and head share one when the model ties them.
    """

    kind: LayerKind
    block: int
    unit: int


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
class ModelSpec:
    """The shape of a model, all that the planner and the engine need to know of it.

    family: key of `models.FAMILIES`, which knows names and forward. Widths are in elements.
    mlp: of a transformer block; empty where attention and MLP read the same hidden states (parallel residual): such a
    block is one layer, whose tensors are all in `attention`.
    rotary: None where positions are in the hidden states already.
    windows: of each transformer block how many of the newest columns a query sees, its own among them; None: all.
    Empty: none of them has a window.
    options: what only the family reads (activation, norm placement, ...), as sorted pairs.
    quantization: the checkpoint's `quantization_config` (checkpoint/formats).
    embedding, head: empty where this is a stage of a pipeline (`stage`) that another one feeds, that feeds another one.
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
    windows: tuple[int | None, ...] = ()

    def __hash__(self) -> int:
        """Of a few fields: the planner looks models up thousands of times, and a model has thousands of tensors."""
        return hash((self.name, self.family, self.num_blocks, self.hidden_size, self.ffn_size, self.vocab_size))

    def option(self, key: str) -> Any:
        return dict(self.options)[key]

    def window(self, block: int) -> int | None:
        return self.windows[block] if self.windows else None

    def stage(self, blocks: range) -> ModelSpec:
        """The part of the model with these transformer blocks: with the embedding if they are its first ones, and with
        the head if they are its last ones."""
        part = slice(blocks.start, blocks.stop)
        return replace(
            self,
            num_blocks=len(blocks),
            embedding=self.embedding if blocks.start == 0 else (),
            attention=self.attention[part],
            mlp=self.mlp[part],
            windows=self.windows[part],
            head=self.head if blocks.stop == self.num_blocks else (),
        )

    @property
    def shares_table(self) -> bool:
        """Are embedding and head one unit here? Of a tied model, where both are in one stage."""
        return self.tied and bool(self.embedding) and bool(self.head)

    @property
    def num_weights(self) -> int:
        """Elements of all weights, tied tensors counted once."""
        return sum(unit.numel for unit in self.layers(sep_layer=False).units)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V that one token adds over all blocks."""
        return 2 * self.num_blocks * self.num_kv_heads * self.head_dim * itemsize

    def kv_columns(self, tokens: int) -> int:
        """Columns of so many tokens over all blocks, a window's at most in those that have one."""
        return sum(min(tokens, self.window(block) or tokens) for block in range(self.num_blocks))

    def layers(self, sep_layer: bool) -> LayerPlan:
        """The layers of a sweep. `sep_layer`: attention and MLP are two steps with a weight unit each, where the
        model allows it."""
        units: list[WeightUnit] = []
        layers: list[Layer] = []

        def add(kind: LayerKind, block: int, name: str, tensors: tuple[TensorSpec, ...]) -> None:
            units.append(WeightUnit(name, tensors))
            layers.append(Layer(kind, block, len(units) - 1))

        names = {t.name for t in self.embedding}
        extra_head = tuple(t for t in self.head if t.name not in names) if self.shares_table else ()
        first: LayerKind = "embedding" if self.embedding else "receive"
        add(first, -1, first, self.embedding + extra_head)
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            if sep_layer and mlp:
                add("attention", i, f"block {i} attention", attention)
                add("mlp", i, f"block {i} mlp", mlp)
            else:
                add("block", i, f"block {i}", attention + mlp)
        last: LayerKind = "head" if self.head else "send"
        if self.shares_table:
            layers.append(Layer(last, -1, 0))
        else:
            add(last, -1, last, self.head)
        return LayerPlan(tuple(layers), tuple(units))


@dataclass(frozen=True)
class Policy:
    """The whole offloading plan. `percent`: weights, KV cache and hidden states on device and host; the rest is disk.

    gpu_batch_size rows make a micro-batch, num_gpu_batches micro-batches a block. Field names are FlexGen's.
    compress_weight, compress_cache: held and moved in weight_bits (4 or 8), cache_bits (2, 3, 4 or 8) a value, in
    groups; of a compressed cache the newest cache_window columns of a row stay whole, at most half of its slots.
    int8_compute: weights in int8, one scale an output channel, and products computed in int8; with compress_weight in 4
    bits they are held and moved so, and become int8 once a block.
    """

    gpu_batch_size: int = setting(4, "rows of a micro-batch", low=1, high=2**20)
    num_gpu_batches: int = setting(1, "micro-batches of a block", low=1, high=2**20)
    percent: tuple[int, int, int, int, int, int] = setting(
        (100, 0, 100, 0, 100, 0),
        "weights, KV cache, hidden states on device and host; the rest is on disk",
        nargs=6,
        metavar=("WG", "WC", "CG", "CC", "HG", "HC"),
    )
    compress_weight: bool = setting(False, "hold weights in --weight-bits; a search may then do so")
    compress_cache: bool = setting(False, "hold the KV cache in --cache-bits; a search may then do so")
    weight_bits: int = setting(4, "of a compressed weight", low=4, choices=BITS)
    cache_bits: int = setting(4, "of a compressed KV value", low=2, choices=CACHE_BITS)
    cache_window: int = setting(
        16, "newest columns of a row that a compressed KV cache holds whole, a multiple of 4", low=0, high=2**20
    )
    int8_compute: bool = setting(
        False, "products in int8, of weights held in int8 or, with --compress-weight, in 4 bits"
    )
    cpu_cache_compute: bool = setting(False, "attend on the host to KV that lives there")
    overlap: bool = setting(True, "move and compute at the same time")
    sep_layer: bool = setting(True, "attention and MLP are two schedule steps")
    pin_weight: bool = setting(True, "pin what the host holds, with a card")
    attn_sparsity: float = setting(
        1.0,
        "share of a row's columns that a decode step reads, chosen by its query and keys in 2 bits; the others count "
        "through sums. For KV where attention runs: from another tier it moves whole all the same",
        share=True,
    )

    def __post_init__(self) -> None:
        check_settings(self)
        check_int("gpu_batch_size x num_gpu_batches", self.block_size, low=1, high=MOST_ROWS)
        object.__setattr__(self, "percent", check_percent(self.percent))
        if self.int8_compute and self.compress_weight and self.weight_bits == 8:
            raise UsageError(
                "int8_compute: holds weights in 8 bits already; leave compress_weight off, or weight_bits at 4"
            )
        if self.cache_window % 4:
            raise UsageError(f"cache_window: {self.cache_window} is not a multiple of 4")

    @property
    def weight_shares(self) -> tuple[float, float, float]:
        """Shares of weights on device, host and disk; their sum is 1."""
        return _shares(self.percent[0], self.percent[1])

    @property
    def cache_shares(self) -> tuple[float, float, float]:
        """Shares of the KV cache on device, host and disk."""
        return _shares(self.percent[2], self.percent[3])

    @property
    def hidden_shares(self) -> tuple[float, float, float]:
        """Shares of the hidden states on device, host and disk."""
        return _shares(self.percent[4], self.percent[5])

    @property
    def block_size(self) -> int:
        """Rows of a full block."""
        return self.gpu_batch_size * self.num_gpu_batches

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "percent": list(self.percent)}


def without_unused_bits(policy: Policy) -> Policy:
    """The policy, with bits of what it does not compress at their defaults."""
    return replace(policy, **{bits: getattr(Policy, bits) for bits in _unused_bits(policy)})


def check_bits_used(policy: Policy) -> Policy:
    """`policy`; UsageError where it has bits, other than the default, of what it does not compress: of a policy that
    is to run they mean nothing (of one that a search begins with, they are those that it may use)."""
    for bits in _unused_bits(policy):
        if getattr(policy, bits) != getattr(Policy, bits):
            raise UsageError(
                f"{bits}: {getattr(policy, bits)} goes with {COMPRESSION_OF[bits]}, which is off; give both"
            )
    return policy


def _unused_bits(policy: Policy) -> list[str]:
    return [bits for bits, switch in COMPRESSION_OF.items() if not getattr(policy, switch)]


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes each tier may hold; `16GiB` and whole numbers are taken. None: what is free, less a margin.

    On a CPU, `device` left out means that the device *is* host memory (two tiers); given, a device tier of
    ordinary memory with that budget stands in for a card (three tiers).
    """

    device: int | None = setting(
        None, "budget of the device tier, for example 15GiB; on a CPU it makes a device tier of RAM"
    )
    host: int | None = setting(None, "budget of RAM, for example 12GiB (default: what is free, less a margin)")
    disk: int | None = setting(None, "budget of the offload dir (default: what is free, less a margin)")

    def __init__(
        self, device: str | int | None = None, host: str | int | None = None, disk: str | int | None = None
    ) -> None:
        for tier, size in (("device", device), ("host", host), ("disk", disk)):
            object.__setattr__(self, tier, None if size is None else parse_bytes(size, f"--{tier}-mem"))


@dataclass(frozen=True)
class SavedPolicy:
    """A policy file: the policy, what it was found for, and the command that found it (free-form, kept as they are)."""

    policy: Policy
    model: str | None = None
    workload: dict[str, Any] | None = None
    profile: str | None = None
    predicted: dict[str, Any] | None = None
    command: str | None = None


ABOUT = tuple(f.name for f in fields(SavedPolicy) if f.name != "policy")


def _shares(first: int, second: int) -> tuple[float, float, float]:
    return first / 100, second / 100, (100 - first - second) / 100


def check_percent(values: object) -> tuple[int, int, int, int, int, int]:
    """Six whole numbers WG WC CG CC HG HC: each pair is at most 100 together, the remainder is disk."""
    if not isinstance(values, tuple | list) or len(values) != 6:
        raise UsageError(f"percent: six whole numbers WG WC CG CC HG HC are needed, not {values!r:.60}")
    six = tuple(check_int("percent", v, 0, 100) for v in values)
    for what, first, second in zip(("weights", "cache", "hidden"), six[::2], six[1::2], strict=True):
        if first + second > 100:
            raise UsageError(f"percent: {what} on device and host are {first} + {second} > 100")
    return six  # type: ignore[return-value]


def write_policy(path: Path, saved: SavedPolicy) -> None:
    """Write a policy file (JSON, DESIGN 3.3), whole or not at all. FlexgenError names --output and the file."""
    about = {name: getattr(saved, name) for name in ABOUT}
    write_result(path, {"schema": POLICY_SCHEMA, **saved.policy.to_json(), **about}, "--output")


def read_policy(path: Path) -> SavedPolicy:
    """Read and validate a policy file; UsageError names the file and the unknown, missing or bad field."""
    body = read_object(path, f"--policy {path}")
    schema = body.get("schema")
    if type(schema) is not int or not 1 <= schema <= POLICY_SCHEMA:
        raise UsageError(f"--policy {path}: schema is {schema!r}, this version reads 1 to {POLICY_SCHEMA}")
    names = [f.name for f in fields(Policy) if SINCE_SCHEMA.get(f.name, 1) <= schema]
    unknown = sorted(set(body) - {*names, *ABOUT, "schema"})
    missing = sorted(set(names) - set(body))
    if unknown or missing:
        problem = f"unknown field {unknown[0]!r}" if unknown else f"field {missing[0]!r} is missing"
        raise UsageError(f"--policy {path}: {problem}")
    try:
        policy = check_bits_used(Policy(**{name: body[name] for name in names}))
    except UsageError as error:
        raise UsageError(f"--policy {path}: {error}") from error
    for key in ABOUT:
        kind, name = (dict, "an object") if key in ("workload", "predicted") else (str, "a text")
        if not isinstance(body.get(key), kind | None):
            raise UsageError(f"--policy {path}: {key} is {body[key]!r:.60}, and must be {name} or null")
    return SavedPolicy(policy, **{key: body.get(key) for key in ABOUT})
