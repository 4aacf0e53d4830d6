"""LLaMA (Touvron et al. 2023) and the model types that are the same network, as plain functions.

The network has RMS norms, rotary positions, grouped kv-heads and a gated MLP. Qwen3 also norms
queries and keys. The file serves LLaMA 1 to 3.x, Mistral, Qwen2 and Qwen3, with sliding windows if
they have them. Formulas follow transformers' modeling_llama and modeling_qwen3. `read_decoder`,
`attention_tensors` and the forward except `mlp` also serve networks with another MLP.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import ModelSpec, StepBuffer, TensorSpec
from flexgen_h2o.kernels.elementwise import rms_norm
from flexgen_h2o.kernels.linear import (
    add_linear,
    linear,
    linear_shared_input,
    lookup,
    optional_vector,
    vector,
)
from flexgen_h2o.kernels.workspace import Workspace
from flexgen_h2o.models import Attention, Queries, Weights
from flexgen_h2o.models.layers import (
    bias_of,
    check_activation,
    gated,
    linear_tensors,
    read_common,
    read_positive,
    read_rotary,
    read_sizes,
    read_windows,
    table_tensor,
    token_chunks,
)


def read_spec(name: str, config: Mapping[str, Any]) -> ModelSpec:
    """Return the ModelSpec of a config.

    config: transformers' field names, defaults filled in. Raises UsageError that names a bad field.
    """
    found = read_decoder(name, config)
    hidden, ffn, width = (found[n] for n in ("hidden_size", "ffn_size", "head_dim"))
    qkv_bias, out_bias, mlp_bias = _biases(config)
    qk_norms = (width, width) if config.get("model_type") == "qwen3" else ()

    blocks = range(found["num_blocks"])
    return ModelSpec(
        family="llama",
        attention=tuple(attention_tensors(i, found, qkv_bias, out_bias, qk_norms) for i in blocks),
        mlp=tuple(mlp_tensors(i, hidden, ffn, mlp_bias) for i in blocks),
        buffers=(StepBuffer("gate", ffn, "mlp"),),
        **found,
    )


def read_decoder(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ModelSpec, by name, that do not depend on a block's MLP.

    These are all except `family`, the blocks' tensors and `buffers`. config: as for `read_spec`.
    Raises UsageError that names a bad field.
    """
    common = read_common(config, name)
    hidden, heads, vocab = (common[n] for n in ("hidden_size", "num_heads", "vocab_size"))
    (kv_heads,) = read_sizes(config, ("num_key_value_heads",))
    (width,) = read_sizes({"head_dim": config.get("head_dim") or hidden // heads}, ("head_dim",))
    if heads % kv_heads:
        raise UsageError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        )
    if width % 2:
        raise UsageError(f"head_dim {width} is odd, but rotary embeddings turn pairs")
    rotary = read_rotary(config)
    if rotary.width != width:
        raise UsageError(
            f"rope_parameters: turn {rotary.width} numbers of a head of {width}; all or nothing "
            "here"
        )
    activation = check_activation("hidden_act", config.get("hidden_act"))
    eps = read_positive(config, "rms_norm_eps")
    tied = bool(config.get("tie_word_embeddings", False))
    head_table = TensorSpec("lm_head.weight", "lm_head.weight", (vocab, hidden))
    table = table_tensor(
        "embed_tokens", "model.embed_tokens.weight", (vocab, hidden), head_table if tied else None
    )
    if tied:
        head_table = table
    windows = read_windows(config, common["num_blocks"], common["max_positions"])
    own = {
        "num_kv_heads": kv_heads,
        "head_dim": width,
        "embedding": (table,),
        "head": (norm_tensor("norm", "norm", hidden), head_table),
        "tied": tied,
        "options": (("activation", activation), ("eps", eps), ("norms round once", False)),
        "rotary": rotary,
        "windows": windows,
    }
    return {**common, **own}


def norm_tensor(role: str, name: str, width: int) -> TensorSpec:
    return TensorSpec(f"{role}.weight", f"model.{name}.weight", (width,))


def mlp_norm_tensor(i: int, hidden: int) -> TensorSpec:
    """Return the weight of the norm in front of block i's MLP or experts."""
    return norm_tensor("mlp_norm", f"layers.{i}.post_attention_layernorm", hidden)


def attention_tensors(
    i: int, sizes: Mapping[str, Any], qkv_bias: bool, out_bias: bool, qk_norms: Sequence[int] = ()
) -> tuple[TensorSpec, ...]:
    """Return the tensors of block i's attention with its norm.

    sizes: from `read_decoder`. qk_norms: lengths of the weights of q's and k's norm, if they are
    normed. The length is head_dim for a norm of each head, and all heads' width for one norm of all
    heads.
    """
    hidden, width, kv_heads = (sizes[n] for n in ("hidden_size", "head_dim", "num_kv_heads"))
    q_width = sizes["num_heads"] * width
    kv_width = kv_heads * width
    found = [norm_tensor("input_norm", f"layers.{i}.input_layernorm", hidden)]
    for role, rows in (("q_proj", q_width), ("k_proj", kv_width), ("v_proj", kv_width)):
        found += linear_tensors(role, f"model.layers.{i}.self_attn.{role}", rows, hidden, qkv_bias)
    for role, norm in zip(("q_norm", "k_norm"), qk_norms, strict=False):
        found.append(norm_tensor(role, f"layers.{i}.self_attn.{role}", norm))
    found += linear_tensors(
        "o_proj", f"model.layers.{i}.self_attn.o_proj", hidden, q_width, out_bias
    )
    return tuple(found)


def mlp_tensors(i: int, hidden: int, ffn: int, bias: bool) -> tuple[TensorSpec, ...]:
    """Return the tensors of block i's MLP with its norm."""
    found = [mlp_norm_tensor(i, hidden)]
    for role, rows, columns in (
        ("gate_proj", ffn, hidden),
        ("up_proj", ffn, hidden),
        ("down_proj", hidden, ffn),
    ):
        found += linear_tensors(role, f"model.layers.{i}.mlp.{role}", rows, columns, bias)
    return tuple(found)


def _biases(config: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """Return whether q, k and v, the attention's output, and the MLP have biases.

    Some model types have config fields for them.
    """
    kind = config.get("model_type")
    if kind in ("qwen2", "mistral"):
        return kind == "qwen2", False, False
    bias = bool(config["attention_bias"])
    return bias, bias, kind == "llama" and bool(config["mlp_bias"])


def embed(
    spec: ModelSpec,
    w: Weights,
    ids: torch.Tensor,
    positions: torch.Tensor,
    x: torch.Tensor,
    ws: Workspace,
) -> None:
    """Compute x = E[ids]. ids, positions: (tokens,) int64; x: (tokens, hidden)."""
    for a, b in token_chunks(len(ids)):
        lookup(ids[a:b], w["embed_tokens.weight"], x[a:b])


def attention(spec: ModelSpec, w: Weights, x: torch.Tensor, ws: Workspace) -> Attention:
    """Compute x += o_proj(attended(q, k, v)) of the normed x. x: (tokens, hidden).

    q and k are normed and `sinks` are used if the model has them.
    """
    tokens = len(x)
    width = spec.head_dim
    heads = {"q": spec.num_heads, "k": spec.num_kv_heads, "v": spec.num_kv_heads}
    qkv = {name: ws.get(name, tokens, count * width) for name, count in heads.items()}
    for a, b in token_chunks(tokens):
        inputs = normed(spec, w, "input_norm", x[a:b], ws)
        linear_shared_input(
            inputs,
            [
                (w[f"{name}_proj.weight"], bias_of(w, f"{name}_proj"), out[a:b])
                for name, out in qkv.items()
            ],
        )
        for name in ("q", "k"):
            norm_heads(spec, w, f"{name}_norm", qkv[name][a:b])
    q, k, v = (out.view(tokens, heads[name], width) for name, out in qkv.items())
    attn_out = yield Queries(q, k, v, optional_vector(w, "sinks"))
    for a, b in token_chunks(tokens):
        add_linear(x[a:b], attn_out[a:b], w["o_proj.weight"], bias_of(w, "o_proj"))


def mlp(spec: ModelSpec, w: Weights, x: torch.Tensor, ws: Workspace) -> None:
    """Compute x += down_proj(activation(gate_proj(y)) * up_proj(y)) with y the normed x.

    x: (tokens, hidden).
    """
    # In a model with experts the width need not be spec.ffn_size.
    width = sum(map(len, w["gate_proj.weight"]))
    for a, b in token_chunks(len(x)):
        inputs = normed(spec, w, "mlp_norm", x[a:b], ws)
        gate, up = (ws.get(name, b - a, width) for name in ("gate", "ffn"))
        linear(inputs, w["gate_proj.weight"], bias_of(w, "gate_proj"), gate)
        linear(inputs, w["up_proj.weight"], bias_of(w, "up_proj"), up)
        inner = gated(spec.option("activation"), gate, up)
        add_linear(x[a:b], inner, w["down_proj.weight"], bias_of(w, "down_proj"))


def head(spec: ModelSpec, w: Weights, x: torch.Tensor, logits: torch.Tensor, ws: Workspace) -> None:
    """Compute logits = norm(x) E^T. x: (rows, hidden), not changed."""
    table = w["embed_tokens.weight" if spec.tied else "lm_head.weight"]
    linear(normed(spec, w, "norm", x, ws), table, None, logits)


def normed(spec: ModelSpec, w: Weights, name: str, x: torch.Tensor, ws: Workspace) -> torch.Tensor:
    """Return the RMS norm `name` of x (rows, hidden), in the buffer `normed`."""
    out = ws.get("normed", *x.shape)
    once = spec.option("norms round once")
    return rms_norm(x, vector(w[f"{name}.weight"]), spec.option("eps"), out, once)


def norm_heads(spec: ModelSpec, w: Weights, name: str, x: torch.Tensor) -> None:
    """Apply the RMS norm `name`, if the model has it, to x (tokens, heads x d) in place.

    Each run of as many elements as its weight has is normed.
    """
    weight = optional_vector(w, f"{name}.weight")
    if weight is not None:
        parts = x.view(len(x), -1, len(weight))
        rms_norm(parts, weight, spec.option("eps"), parts)
