"""OPT (Zhang et al. 2022): config, checkpoint names, and the forward of one layer as plain functions.

Covers every public OPT from 125m to 175b, the post-norm 350m with its narrow embedding, OPT-IML, and Galactica (GELU,
no biases). Formulas follow transformers' modeling_opt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from flexgen_h2o.core.config import ModelSpec, TensorSpec
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.units import check_int
from flexgen_h2o.kernels.linear import add_linear, linear, linear_each, lookup, optional_vector
from flexgen_h2o.kernels.workspace import Workspace
from flexgen_h2o.models import Attend, Weights
from flexgen_h2o.models.layers import activated, check_activation, end_tokens, read_sizes, token_chunks

POSITION_OFFSET = 2  # learned positions start at row 2 of their table
LAYER_NORM_EPS = 1e-5


def _shape(hidden: int, blocks: int, heads: int, **other: Any) -> dict[str, Any]:
    return {
        "model_type": "opt", "hidden_size": hidden, "num_hidden_layers": blocks, "num_attention_heads": heads,
        "ffn_dim": 4 * hidden, "vocab_size": 50272, "max_position_embeddings": 2048, "word_embed_proj_dim": hidden,
        **other,
    }  # fmt: skip


_GALACTICA = {"vocab_size": 50000, "activation_function": "gelu", "enable_bias": False, "bos_token_id": 0}
_1B3, _30B = _shape(2048, 24, 32), _shape(7168, 48, 56)

BUILT_IN: dict[str, dict[str, Any]] = {
    "facebook/opt-125m": _shape(768, 12, 12),
    "facebook/opt-350m": _shape(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "facebook/opt-1.3b": _1B3,
    "facebook/opt-2.7b": _shape(2560, 32, 32),
    "facebook/opt-6.7b": _shape(4096, 32, 32),
    "facebook/opt-13b": _shape(5120, 40, 40),
    "facebook/opt-30b": _30B,
    "facebook/opt-66b": _shape(9216, 64, 72),
    "facebook/opt-175b": _shape(12288, 96, 96),
    "facebook/opt-iml-1.3b": _1B3,
    "facebook/opt-iml-max-1.3b": _1B3,
    "facebook/opt-iml-30b": _30B,
    "facebook/opt-iml-max-30b": _30B,
    "facebook/galactica-125m": _shape(768, 12, 12, **_GALACTICA),
    "facebook/galactica-1.3b": _shape(2048, 24, 32, **_GALACTICA),
    "facebook/galactica-6.7b": _shape(4096, 32, 32, **_GALACTICA),
    "facebook/galactica-30b": _shape(7168, 48, 56, **_GALACTICA),
    "facebook/galactica-120b": _shape(10240, 96, 80, **_GALACTICA),
}


def read_spec(name: str, config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of an OPT config (transformers' field names, defaults filled in). UsageError names a bad field."""
    names = ("hidden_size", "num_hidden_layers", "num_attention_heads", "ffn_dim", "vocab_size")
    hidden, blocks, heads, ffn, vocab = read_sizes(config, names)
    positions = check_int("max_position_embeddings", config.get("max_position_embeddings"), low=1)
    narrow = check_int("word_embed_proj_dim", config.get("word_embed_proj_dim") or hidden, low=1, high=2**18)
    if hidden % heads:
        raise UsageError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")
    activation = check_activation("activation_function", config["activation_function"])
    bias, affine = bool(config["enable_bias"]), bool(config["layer_norm_elementwise_affine"])
    pre_norm = bool(config["do_layer_norm_before"])
    tied = bool(config.get("tie_word_embeddings", True))
    final_norm = pre_norm and not config.get("_remove_final_layer_norm", False)
    root = "model.decoder."

    def matrix(role: str, prefix: str, rows: int, columns: int, with_bias: bool = bias) -> list[TensorSpec]:
        found = [TensorSpec(f"{role}.weight", f"{prefix}{role}.weight", (rows, columns))]
        return found + ([TensorSpec(f"{role}.bias", f"{prefix}{role}.bias", (rows,))] if with_bias else [])

    def norm(role: str, prefix: str) -> list[TensorSpec]:
        kinds = ("weight", "bias") if affine else ()
        return [TensorSpec(f"{role}.{k}", f"{prefix}{role}.{k}", (hidden,)) for k in kinds]

    def attention_tensors(prefix: str) -> tuple[TensorSpec, ...]:
        found = norm("self_attn_layer_norm", prefix)
        for role in ("q_proj", "k_proj", "v_proj", "out_proj"):
            found += matrix(role, f"{prefix}self_attn.", hidden, hidden)
        return tuple(found)

    def mlp_tensors(prefix: str) -> tuple[TensorSpec, ...]:
        found = [*matrix("fc1", prefix, ffn, hidden), *matrix("fc2", prefix, hidden, ffn)]
        return (*found, *norm("final_layer_norm", prefix))

    token_table = TensorSpec("embed_tokens.weight", f"{root}embed_tokens.weight", (vocab, narrow))
    head_table = token_table if tied else TensorSpec("lm_head.weight", "lm_head.weight", (vocab, narrow))
    position_table = TensorSpec(
        "embed_positions.weight", f"{root}embed_positions.weight", (positions + POSITION_OFFSET, hidden)
    )
    project_in = matrix("project_in", root, hidden, narrow, with_bias=False) if narrow != hidden else []
    project_out = matrix("project_out", root, narrow, hidden, with_bias=False) if narrow != hidden else []
    return ModelSpec(
        name=name, family="opt", num_blocks=blocks, hidden_size=hidden, num_heads=heads, num_kv_heads=heads,
        head_dim=hidden // heads, ffn_size=ffn, vocab_size=vocab, max_positions=positions,
        embedding=(token_table, position_table, *project_in),
        attention=tuple(attention_tensors(f"{root}layers.{i}.") for i in range(blocks)),
        mlp=tuple(mlp_tensors(f"{root}layers.{i}.") for i in range(blocks)),
        head=(*(norm("final_layer_norm", root) if final_norm else ()), *project_out, head_table),
        tied=tied,
        eos_token_ids=end_tokens(config),
        bos_token_id=config.get("bos_token_id"),
        options=(
            ("activation", activation), ("final_norm", final_norm), ("narrow", narrow),
            ("pre_norm", pre_norm),
        ),
    )  # fmt: skip


def embed(
    spec: ModelSpec, w: Weights, ids: torch.Tensor, positions: torch.Tensor, x: torch.Tensor, ws: Workspace
) -> None:
    """x = E[ids] (projected where narrow) + P[positions + 2]. ids, positions: (tokens,) int64; x: (tokens, hidden)."""
    narrow = spec.option("narrow")
    for a, b in token_chunks(len(ids)):
        added = ws.get("normed", b - a, spec.hidden_size)
        lookup(positions[a:b] + POSITION_OFFSET, w["embed_positions.weight"], added)
        if narrow == spec.hidden_size:
            lookup(ids[a:b], w["embed_tokens.weight"], x[a:b])
        else:
            words = lookup(ids[a:b], w["embed_tokens.weight"], ws.get("ffn", b - a, narrow))
            linear(words, w["project_in.weight"], None, x[a:b])
        x[a:b].add_(added)


def attention(spec: ModelSpec, w: Weights, x: torch.Tensor, attend: Attend, ws: Workspace) -> None:
    """x += out_proj(attend(q, k, v)); the norm stands before it, or after the sum (350m). x: (tokens, hidden)."""
    tokens, heads, width = len(x), spec.num_heads, spec.head_dim
    pre_norm = spec.option("pre_norm")
    q, k, v = (ws.get(name, tokens, spec.hidden_size) for name in ("q", "k", "v"))
    for a, b in token_chunks(tokens):
        inputs = _norm(w, "self_attn_layer_norm", x[a:b]) if pre_norm else x[a:b]
        outs = ((q, "q_proj"), (k, "k_proj"), (v, "v_proj"))
        linear_each(inputs, [(w[f"{name}.weight"], _bias(w, name), out[a:b]) for out, name in outs])
    attn_out = attend(*(t.view(tokens, heads, width) for t in (q, k, v)))
    for a, b in token_chunks(tokens):
        add_linear(x[a:b], attn_out[a:b], w["out_proj.weight"], _bias(w, "out_proj"))
        if not pre_norm:
            x[a:b] = _norm(w, "self_attn_layer_norm", x[a:b])


def mlp(spec: ModelSpec, w: Weights, x: torch.Tensor, ws: Workspace) -> None:
    """x += fc2(activation(fc1(x))), the norm before or after as in `attention`. x: (tokens, hidden)."""
    pre_norm, activation = spec.option("pre_norm"), spec.option("activation")
    for a, b in token_chunks(len(x)):
        inputs = _norm(w, "final_layer_norm", x[a:b]) if pre_norm else x[a:b]
        wide = ws.get("ffn", b - a, spec.ffn_size)
        inner = activated(activation, inputs, w["fc1.weight"], _bias(w, "fc1"), wide)
        add_linear(x[a:b], inner, w["fc2.weight"], _bias(w, "fc2"))
        if not pre_norm:
            x[a:b] = _norm(w, "final_layer_norm", x[a:b])


def head(spec: ModelSpec, w: Weights, x: torch.Tensor, ws: Workspace) -> torch.Tensor:
    """Logits of the given positions. x: (rows, hidden), left as it is. Returns (rows, vocab) in x's dtype."""
    rows = len(x)
    if spec.option("final_norm"):
        x = _norm(w, "final_layer_norm", x)
    if "project_out.weight" in w:
        x = linear(x, w["project_out.weight"], None, ws.get("normed", rows, spec.option("narrow")))
    table = w["embed_tokens.weight" if spec.tied else "lm_head.weight"]
    return linear(x, table, None, ws.get("logits", rows, spec.vocab_size))


def _norm(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (x.shape[-1],), optional_vector(w, f"{name}.weight"), _bias(w, name), LAYER_NORM_EPS)


def _bias(w: Weights, name: str) -> torch.Tensor | None:
    return optional_vector(w, f"{name}.bias")
