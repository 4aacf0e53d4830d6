"""What families share: checked fields of a config, tensors, rotary frequencies, norms, activations, token chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import ModelSpec, Rotary, TensorSpec
from flexgen_h2o.core.units import TOKEN_CHUNK, check_int
from flexgen_h2o.kernels.elementwise import add_weighted, silu_gated
from flexgen_h2o.kernels.linear import RowParts, linear, linear_relu, optional_vector
from flexgen_h2o.kernels.workspace import Workspace
from flexgen_h2o.models import MOST_POSITIONS, Hidden, Weights, read_ends


def token_chunks(tokens: int) -> Iterator[tuple[int, int]]:
    """[start, end) runs of at most TOKEN_CHUNK tokens."""
    for start in range(0, tokens, TOKEN_CHUNK):
        yield start, min(start + TOKEN_CHUNK, tokens)


# Far beyond any model: a damaged config must not keep the reader busy for minutes.
MOST = {
    "hidden_size": 2**18, "num_hidden_layers": 2**12, "num_attention_heads": 2**12, "num_key_value_heads": 2**12,
    "head_dim": 2**16, "ffn_dim": 2**20, "intermediate_size": 2**20, "moe_intermediate_size": 2**20,
    "vocab_size": 2**24,
}  # fmt: skip


def read_sizes(config: Mapping[str, Any], names: Sequence[str]) -> list[int]:
    """Positive whole numbers by name, none beyond MOST; UsageError names the field."""
    return [check_int(n, config.get(n), low=1, high=MOST[n]) for n in names]


def read_positive(config: Mapping[str, Any], name: str) -> float:
    """A number above 0 that float32 holds; UsageError names the field."""
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= torch.finfo(torch.float32).max:
        raise UsageError(f"{name}: {value!r} is not a number above 0 that float32 holds")
    return float(value)


def read_common(config: Mapping[str, Any], name: str, ffn_field: str = "intermediate_size") -> dict[str, Any]:
    """The fields of ModelSpec that every family reads alike, by name; UsageError names a bad field of the config.

    As many kv-heads as query heads, which share the hidden size: a family in which they do not gives its own.
    """
    fields = ("num_hidden_layers", "hidden_size", "num_attention_heads", ffn_field, "vocab_size")
    blocks, hidden, heads, ffn, vocab = read_sizes(config, fields)
    return {
        "name": name, "num_blocks": blocks, "hidden_size": hidden, "num_heads": heads, "num_kv_heads": heads,
        "head_dim": hidden // heads, "ffn_size": ffn, "vocab_size": vocab,
        "max_positions": read_positions(config),
        "eos_token_ids": read_ends(config.get("eos_token_id")),
        "bos_token_id": config.get("bos_token_id"),
    }  # fmt: skip


def read_positions(config: Mapping[str, Any]) -> int:
    """The positions that a model has: max_position_embeddings, or more if its rotary embeddings are stretched.

    As vLLM counts them: rope_type "linear" has max_position_embeddings x factor, and "yarn"
    original_max_position_embeddings x factor. "dynamic" depends on the length of each sequence, and is not stretched.
    """
    positions = check_int("max_position_embeddings", config.get("max_position_embeddings"), low=1)
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping) or rope.get("rope_type") not in STRETCHED:
        return positions
    trained = positions
    if rope["rope_type"] == "yarn" and type(rope.get("original_max_position_embeddings")) is int:
        trained = rope["original_max_position_embeddings"]
    factor = rope.get("factor")
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= MOST_POSITIONS:
        return positions  # `read_rotary` refuses what is no factor
    return max(positions, min(int(trained * factor), MOST_POSITIONS))


def check_heads(hidden: int, heads: int) -> None:
    if hidden % heads:
        raise UsageError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")


def linear_tensors(
    role: str, name: str, rows: int, columns: int, bias: bool, exact: bool = False
) -> tuple[TensorSpec, ...]:
    """`role`.weight (rows, columns), and `role`.bias (rows,) where there is one; `name` as in the checkpoint."""
    weight = TensorSpec(f"{role}.weight", f"{name}.weight", (rows, columns), exact=exact)
    return (weight, TensorSpec(f"{role}.bias", f"{name}.bias", (rows,))) if bias else (weight,)


def table_tensor(role: str, name: str, shape: tuple[int, int], tied_head: TensorSpec | None) -> TensorSpec:
    """The embedding's table `role`.weight; `name` as in the checkpoint.

    tied_head: the head that is the same table, if the model ties them. A checkpoint may have it under either name.
    """
    if tied_head is None:
        return TensorSpec(f"{role}.weight", name, shape, looked_up=True)
    return TensorSpec(f"{role}.weight", name, shape, (tied_head.name, *tied_head.aliases))


def layer_norm_tensors(role: str, name: str, width: int) -> tuple[TensorSpec, ...]:
    """`role`.weight and `role`.bias, (width,) each; `name` as in the checkpoint."""
    return tuple(TensorSpec(f"{role}.{kind}", f"{name}.{kind}", (width,)) for kind in ("weight", "bias"))


def layer_norm(w: Weights, role: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    """A new tensor of x's shape; without weight or bias where the model has none."""
    return F.layer_norm(x, x.shape[-1:], optional_vector(w, f"{role}.weight"), bias_of(w, role), eps)


def bias_of(w: Weights, role: str) -> torch.Tensor | None:
    return optional_vector(w, f"{role}.bias")


# The others depend on the length of a sequence, so that keys would have to be rotated anew, or on the layer. dynamic
# does too, but not up to max_position_embeddings, and nothing goes beyond it.
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
STRETCHED = ("linear", "yarn")


def read_rotary(config: Mapping[str, Any]) -> Rotary:
    """The rotary embeddings of a config whose sizes are checked; UsageError names the field.

    config: with its model_type and transformers' defaults filled in.
    """
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, Mapping):
        raise UsageError(f"rope_parameters: {parameters!r} is not an object")
    kind = parameters.get("rope_type")
    if kind not in ROPE_TYPES:
        raise UsageError(f"rope_parameters: rope_type {kind!r} is not supported (known: {', '.join(ROPE_TYPES)})")
    try:
        frequencies, scaling = _default(config) if kind == "default" else _scaled(config, kind)
    except Exception as error:  # transformers raises many kinds for a missing or bad value
        raise UsageError(f"rope_parameters: not usable with rope_type {kind!r} ({error!r})") from error
    if not (len(frequencies) and bool((frequencies.isfinite() & (frequencies > 0)).all()) and 0 < scaling < 1e6):
        raise UsageError(f"rope_parameters: rope_type {kind!r} with these values gives no usable frequencies")
    return Rotary(tuple(frequencies.tolist()), scaling)


def _default(config: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """theta^(-2i/d) for the pairs of the share of a head that turns (Su et al. 2021, section 3.2.2)."""
    parameters = config["rope_parameters"]
    width = int(_head_dim(config) * parameters.get("partial_rotary_factor", 1.0))
    return 1.0 / (parameters["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float, device="cpu") / width)), 1.0


def _scaled(config: Mapping[str, Any], kind: str) -> tuple[torch.Tensor, float]:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    known = AutoConfig.for_model(**deepcopy(dict(config)))
    with torch.device("cpu"):  # whatever the caller's default is: some of its tensors say no device
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](known, torch.device("cpu"))
    return frequencies.float(), float(scaling)


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def route_tokens(
    spec: ModelSpec, w: Weights, hidden: Hidden, ws: Workspace, normed: Callable[[torch.Tensor], torch.Tensor],
    choose: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> None:  # fmt: skip
    """Fill `hidden.weights` and `hidden.chosen` with what `choose` makes of a router's logits (tokens, experts)."""
    assert hidden.chosen is not None and hidden.weights is not None and spec.experts is not None
    for a, b in token_chunks(len(hidden.x)):
        logits = ws.get("router", b - a, spec.experts.count)
        linear(normed(hidden.x[a:b]), w["router.weight"], bias_of(w, "router"), logits)
        hidden.weights[a:b], hidden.chosen[a:b] = choose(logits)


def count_choices(chosen: torch.Tensor, tokens: Sequence[int], experts: int) -> Iterator[list[int]]:
    """`Hidden.counts` of so many tokens each, one after another. chosen: of all. A card is waited for once."""
    for some in chosen.cpu().split(list(tokens)):
        yield some.flatten().bincount(minlength=experts).tolist()


def sort_choices(hidden: Hidden) -> None:
    """Bring what tokens have chosen in the order of the experts, those of one expert in that of their tokens: `weights`
    and, in the place of its number, where each expert was in `chosen`."""
    assert hidden.chosen is not None and hidden.weights is not None
    chosen, weights = hidden.chosen.view(-1), hidden.weights.view(-1)
    places = chosen.sort(stable=True).indices
    chosen.copy_(places)
    weights.copy_(weights[places])


# (inputs of each expert of a group, these (n, hidden) one after another, where outputs go)
GroupProduct = Callable[[Sequence[int], torch.Tensor, torch.Tensor], None]


def mix_experts(
    group: range, hidden: Hidden, ws: Workspace, normed: Callable[[torch.Tensor], torch.Tensor], compute: GroupProduct
) -> None:
    """Add to `hidden.mixed` what each expert of the group gives for the tokens that have chosen it, times its weight,
    once `sort_choices` has ordered them.

    A token's experts are added one after another, in the order of their numbers: the sum, rounded each time as
    transformers does, depends neither on groups nor on the other tokens.
    """
    mixed, places, weights = hidden.mixed, hidden.chosen, hidden.weights
    assert mixed is not None and places is not None and weights is not None
    start, per_token = sum(hidden.counts[: group.start]), places.shape[1]
    ends = list(accumulate((hidden.counts[expert] for expert in group), initial=start))
    for first, end in token_chunks(ends[-1] - start):
        first, end = start + first, start + end
        tokens = places.view(-1)[first:end] // per_token
        x = ws.get("routed", end - first, mixed.shape[1])
        inputs = normed(torch.index_select(hidden.x, 0, tokens, out=x))
        compute([max(0, min(b, end) - max(a, first)) for a, b in pairwise(ends)], inputs, x)
        add_weighted(x, tokens, weights.view(-1)[first:end], mixed)


# Whose window, if any, is one of all blocks in transformers, and whose config's window has no meaning there.
_ALIKE, _WITHOUT_WINDOWS = ("mistral", "mixtral", "qwen3_moe"), ("llama", "olmoe")


def read_windows(config: Mapping[str, Any], blocks: int, positions: int) -> tuple[int | None, ...]:
    """`ModelSpec.windows` of a config: those of its `layer_types`, or without them of all blocks. A window of all
    positions hides nothing, and is none. UsageError names the field."""
    family, kinds, window = config.get("model_type"), config.get("layer_types"), config.get("sliding_window")
    if family in _WITHOUT_WINDOWS:
        return ()
    kind = "full_attention" if window is None else "sliding_attention"
    if family in _ALIKE and kinds is not None and kinds != [kind] * blocks:
        raise UsageError(
            f"layer_types: {family} has {kind} in all {blocks} blocks, as its sliding_window says; remove it"
        )
    if window is None and "sliding_attention" in (kinds or ()):
        raise UsageError("sliding_window: None, and layer_types has 'sliding_attention'")
    kinds = ["sliding_attention"] * blocks if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != blocks:
        raise UsageError(f"layer_types: {kinds!r:.60} is not a list of {blocks} kinds of attention")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UsageError(f"layer_types: {kind!r} is not full_attention or sliding_attention")
    if window is None or "sliding_attention" not in kinds or check_int("sliding_window", window, low=1) >= positions:
        return ()
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


Activation = Callable[[torch.Tensor], torch.Tensor]

_TANH_GELU = partial(F.gelu, approximate="tanh")
# They may change their argument in place. gelu_new and gelu_fast write the same tanh formula in other words.
ACTIVATIONS: dict[str, Activation] = {
    "relu": torch.relu_, "gelu": F.gelu, "gelu_new": _TANH_GELU, "gelu_fast": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU, "silu": partial(F.silu, inplace=True),
}  # fmt: skip


def activated(
    name: str, x: torch.Tensor, weight: RowParts, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """activation(x W^T + bias), (rows, sum out_i), in `out` or elsewhere; the shapes as of kernels.linear.linear."""
    if name == "relu":
        return linear_relu(x, weight, bias, out)
    return ACTIVATIONS[name](linear(x, weight, bias, out))


def gated(name: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """activation(gate) x up, in the memory of `gate`. gate, up: (rows, width), contiguous."""
    return silu_gated(gate, up) if name == "silu" else ACTIVATIONS[name](gate).mul_(up)


def check_activation(field: str, name: object) -> str:
    """`name` if it is known; UsageError names the field."""
    if name not in ACTIVATIONS:
        raise UsageError(f"{field} {name!r} is not one of {sorted(ACTIVATIONS)}")
    return str(name)
