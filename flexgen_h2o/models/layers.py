"""Common parts of families: config fields, tensors, rotary frequencies, norms, activations."""

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
from flexgen_h2o.models import MAX_POSITIONS, Hidden, Weights, read_ends


def token_chunks(tokens: int) -> Iterator[tuple[int, int]]:
    """Yield [start, end) runs of at most TOKEN_CHUNK tokens."""
    for start in range(0, tokens, TOKEN_CHUNK):
        yield start, min(start + TOKEN_CHUNK, tokens)


# Limits far beyond any model: a damaged config must not keep the reader busy for minutes.
MOST = {
    "hidden_size": 2**18,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**16,
    "ffn_dim": 2**20,
    "intermediate_size": 2**20,
    "moe_intermediate_size": 2**20,
    "vocab_size": 2**24,
}


def read_sizes(config: Mapping[str, Any], names: Sequence[str]) -> list[int]:
    """Return positive whole numbers by name, none larger than MOST allows.

    UsageError names a bad field.
    """
    return [check_int(n, config.get(n), low=1, high=MOST[n]) for n in names]


def read_positive(config: Mapping[str, Any], name: str) -> float:
    """Return a number above 0 that float32 can represent. UsageError names a bad field."""
    value = config.get(name)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not 0 < value <= torch.finfo(torch.float32).max
    ):
        raise UsageError(f"{name}: {value!r} is not a number above 0 that float32 holds")
    return float(value)


def read_common(
    config: Mapping[str, Any], name: str, ffn_field: str = "intermediate_size"
) -> dict[str, Any]:
    """Return the fields of ModelSpec, by name, that every family reads alike.

    There are as many kv-heads as query heads, and the heads divide the hidden size. A family with
    other sizes replaces these fields. Raises UsageError that names a bad field of the config.
    """
    fields = ("num_hidden_layers", "hidden_size", "num_attention_heads", ffn_field, "vocab_size")
    blocks, hidden, heads, ffn, vocab = read_sizes(config, fields)
    return {
        "name": name,
        "num_blocks": blocks,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": hidden // heads,
        "ffn_size": ffn,
        "vocab_size": vocab,
        "max_positions": read_positions(config),
        "eos_token_ids": read_ends(config.get("eos_token_id")),
        "bos_token_id": config.get("bos_token_id"),
    }


def read_positions(config: Mapping[str, Any]) -> int:
    """Return the number of positions of a model.

    It is max_position_embeddings, or more if the rotary embeddings are stretched. As in vLLM,
    rope_type "linear" has max_position_embeddings x factor positions, and "yarn" has
    original_max_position_embeddings x factor. "dynamic" depends on the length of each sequence, and
    is not stretched.
    """
    positions = check_int("max_position_embeddings", config.get("max_position_embeddings"), low=1)
    rope = config.get("rope_parameters")
    if not isinstance(rope, Mapping) or rope.get("rope_type") not in STRETCHED:
        return positions
    trained = positions
    if rope["rope_type"] == "yarn" and type(rope.get("original_max_position_embeddings")) is int:
        trained = rope["original_max_position_embeddings"]
    factor = rope.get("factor")
    if (
        isinstance(factor, bool)
        or not isinstance(factor, int | float)
        or not 0 < factor <= MAX_POSITIONS
    ):
        return positions  # `read_rotary` refuses a bad factor
    return max(positions, min(int(trained * factor), MAX_POSITIONS))


def check_heads(hidden: int, heads: int) -> None:
    if hidden % heads:
        raise UsageError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")


def linear_tensors(
    role: str, name: str, rows: int, columns: int, bias: bool, exact: bool = False
) -> tuple[TensorSpec, ...]:
    """Return the tensors `role`.weight (rows, columns) and, with a bias, `role`.bias (rows,).

    name: the common part of their names in the checkpoint.
    """
    weight = TensorSpec(f"{role}.weight", f"{name}.weight", (rows, columns), exact=exact)
    return (weight, TensorSpec(f"{role}.bias", f"{name}.bias", (rows,))) if bias else (weight,)


def table_tensor(
    role: str, name: str, shape: tuple[int, int], tied_head: TensorSpec | None
) -> TensorSpec:
    """Return the embedding's table `role`.weight. `name` is its name in the checkpoint.

    tied_head: the head that is the same table, if the model ties them. A checkpoint may have it
    under either name.
    """
    if tied_head is None:
        return TensorSpec(f"{role}.weight", name, shape, looked_up=True)
    return TensorSpec(f"{role}.weight", name, shape, (tied_head.name, *tied_head.aliases))


def layer_norm_tensors(role: str, name: str, width: int) -> tuple[TensorSpec, ...]:
    """Return the tensors `role`.weight and `role`.bias, (width,) each.

    name: as for `linear_tensors`.
    """
    return tuple(
        TensorSpec(f"{role}.{kind}", f"{name}.{kind}", (width,)) for kind in ("weight", "bias")
    )


def layer_norm(w: Weights, role: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the layer norm of x as a new tensor.

    Weight and bias are used if the model has them.
    """
    return F.layer_norm(
        x, x.shape[-1:], optional_vector(w, f"{role}.weight"), bias_of(w, role), eps
    )


def bias_of(w: Weights, role: str) -> torch.Tensor | None:
    return optional_vector(w, f"{role}.bias")


# Other types depend on the layer, or on the length of a sequence, so that keys would have to be
# rotated anew. "dynamic" depends on the length too, but not up to max_position_embeddings, and no
# sequence is longer.
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")
STRETCHED = ("linear", "yarn")


def read_rotary(config: Mapping[str, Any]) -> Rotary:
    """Return the rotary embeddings of a config whose sizes have been checked.

    UsageError names a bad field.

    config: with its model_type, and with transformers' defaults filled in.
    """
    parameters = config.get("rope_parameters")
    if not isinstance(parameters, Mapping):
        raise UsageError(f"rope_parameters: {parameters!r} is not an object")
    kind = parameters.get("rope_type")
    if kind not in ROPE_TYPES:
        raise UsageError(
            f"rope_parameters: rope_type {kind!r} is not supported (known: {', '.join(ROPE_TYPES)})"
        )
    try:
        frequencies, scaling = _default(config) if kind == "default" else _scaled(config, kind)
    except Exception as error:  # transformers raises many kinds for a missing or bad value
        raise UsageError(
            f"rope_parameters: not usable with rope_type {kind!r} ({error!r})"
        ) from error
    if not (
        len(frequencies)
        and bool((frequencies.isfinite() & (frequencies > 0)).all())
        and 0 < scaling < 1e6
    ):
        raise UsageError(
            f"rope_parameters: rope_type {kind!r} with these values gives no usable frequencies"
        )
    return Rotary(tuple(frequencies.tolist()), scaling)


def _default(config: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """Return theta^(-2i/d) for each pair i, and scaling 1 (Su et al. 2021, section 3.2.2).

    d: elements of a head that turn.
    """
    parameters = config["rope_parameters"]
    width = int(_head_dim(config) * parameters.get("partial_rotary_factor", 1.0))
    return 1.0 / (
        parameters["rope_theta"]
        ** (torch.arange(0, width, 2, dtype=torch.float, device="cpu") / width)
    ), 1.0


def _scaled(config: Mapping[str, Any], kind: str) -> tuple[torch.Tensor, float]:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    known = AutoConfig.for_model(**deepcopy(dict(config)))
    with torch.device("cpu"):  # some of the function's tensors use the caller's default device
        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](known, torch.device("cpu"))
    return frequencies.float(), float(scaling)


def _head_dim(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def route_tokens(
    spec: ModelSpec,
    w: Weights,
    hidden: Hidden,
    ws: Workspace,
    normed: Callable[[torch.Tensor], torch.Tensor],
    choose: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Choose the experts of each token: fill `hidden.weights` and `hidden.chosen`.

    choose: returns both for router logits (tokens, experts). normed: the norm before the router.
    """
    assert hidden.chosen is not None and hidden.weights is not None and spec.experts is not None
    for a, b in token_chunks(len(hidden.x)):
        logits = ws.get("router", b - a, spec.experts.count)
        linear(normed(hidden.x[a:b]), w["router.weight"], bias_of(w, "router"), logits)
        hidden.weights[a:b], hidden.chosen[a:b] = choose(logits)


def count_choices(chosen: torch.Tensor, tokens: Sequence[int], experts: int) -> Iterator[list[int]]:
    """Yield `Hidden.counts` of consecutive runs of tokens.

    chosen: of all runs. tokens: the length of each run. The card is waited for only once.
    """
    for some in chosen.cpu().split(list(tokens)):
        yield some.flatten().bincount(minlength=experts).tolist()


def sort_choices(hidden: Hidden) -> None:
    """Sort the choices of tokens by expert, and those of one expert by token.

    `weights` is reordered. `chosen` becomes, for each sorted choice, its place in `chosen` before.
    """
    assert hidden.chosen is not None and hidden.weights is not None
    chosen = hidden.chosen.view(-1)
    weights = hidden.weights.view(-1)
    places = chosen.sort(stable=True).indices
    chosen.copy_(places)
    weights.copy_(weights[places])


# Called with (number of inputs of each expert of a group, these inputs (n, hidden) in order, output
# tensor).
GroupProduct = Callable[[Sequence[int], torch.Tensor, torch.Tensor], None]


def mix_experts(
    group: range,
    hidden: Hidden,
    ws: Workspace,
    normed: Callable[[torch.Tensor], torch.Tensor],
    compute: GroupProduct,
) -> None:
    """Add the weighted outputs of a group of experts to `hidden.mixed`.

    `sort_choices` must have run. Each expert computes the tokens that have chosen it. A token's
    experts are added one after another, in the order of their numbers. The sum is rounded each
    time, as in transformers, so it depends neither on groups nor on the other tokens.
    """
    mixed = hidden.mixed
    places = hidden.chosen
    weights = hidden.weights
    assert mixed is not None and places is not None and weights is not None
    start = sum(hidden.counts[: group.start])
    per_token = places.shape[1]
    ends = list(accumulate((hidden.counts[expert] for expert in group), initial=start))
    for first, end in token_chunks(ends[-1] - start):
        first = start + first
        end = start + end
        tokens = places.view(-1)[first:end] // per_token
        x = ws.get("routed", end - first, mixed.shape[1])
        inputs = normed(torch.index_select(hidden.x, 0, tokens, out=x))
        compute([max(0, min(b, end) - max(a, first)) for a, b in pairwise(ends)], inputs, x)
        add_weighted(x, tokens, weights.view(-1)[first:end], mixed)


# Families in which transformers gives all blocks the same window, and families that ignore the
# config's window.
_ALIKE = ("mistral", "mixtral", "qwen3_moe")
_WITHOUT_WINDOWS = ("llama", "olmoe")


def read_windows(config: Mapping[str, Any], blocks: int, positions: int) -> tuple[int | None, ...]:
    """Return `ModelSpec.windows` of a config, by its `layer_types`, or for all blocks without them.

    A window of all positions hides nothing, and counts as none. UsageError names a bad field.
    """
    family = config.get("model_type")
    kinds = config.get("layer_types")
    window = config.get("sliding_window")
    if family in _WITHOUT_WINDOWS:
        return ()
    kind = "full_attention" if window is None else "sliding_attention"
    if family in _ALIKE and kinds is not None and kinds != [kind] * blocks:
        raise UsageError(
            f"layer_types: {family} has {kind} in all {blocks} blocks, as its sliding_window says; "
            "remove it"
        )
    if window is None and "sliding_attention" in (kinds or ()):
        raise UsageError("sliding_window: None, and layer_types has 'sliding_attention'")
    kinds = ["sliding_attention"] * blocks if kinds is None else kinds
    if not isinstance(kinds, list) or len(kinds) != blocks:
        raise UsageError(f"layer_types: {kinds!r:.60} is not a list of {blocks} kinds of attention")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UsageError(f"layer_types: {kind!r} is not full_attention or sliding_attention")
    if (
        window is None
        or "sliding_attention" not in kinds
        or check_int("sliding_window", window, low=1) >= positions
    ):
        return ()
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


Activation = Callable[[torch.Tensor], torch.Tensor]

_TANH_GELU = partial(F.gelu, approximate="tanh")
# They may change their argument in place. gelu_new and gelu_fast are the same tanh formula, written
# differently.
ACTIVATIONS: dict[str, Activation] = {
    "relu": torch.relu_,
    "gelu": F.gelu,
    "gelu_new": _TANH_GELU,
    "gelu_fast": _TANH_GELU,
    "gelu_pytorch_tanh": _TANH_GELU,
    "silu": partial(F.silu, inplace=True),
}


def activated(
    name: str, x: torch.Tensor, weight: RowParts, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    """Return activation(x W^T + bias), (rows, sum out_i), in `out` or elsewhere.

    Shapes are as in kernels.linear.linear.
    """
    if name == "relu":
        return linear_relu(x, weight, bias, out)
    return ACTIVATIONS[name](linear(x, weight, bias, out))


def gated(name: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return activation(gate) x up, in the memory of `gate`.

    gate, up: (rows, width), contiguous.
    """
    return silu_gated(gate, up) if name == "silu" else ACTIVATIONS[name](gate).mul_(up)


def check_activation(field: str, name: object) -> str:
    """Return `name` if it is a known activation.

    Raises UsageError that names the field otherwise.
    """
    if name not in ACTIVATIONS:
        raise UsageError(f"{field} {name!r} is not one of {sorted(ACTIVATIONS)}")
    return str(name)
