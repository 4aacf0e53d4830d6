"""OPT (Zhang et al. 2022): config, checkpoint names, and a layer's forward as plain functions.

The file serves every public OPT from 125m to 175b, the post-norm 350m with its narrow embedding,
OPT-IML, and Galactica (GELU, no biases). Formulas follow transformers' modeling_opt.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch

from flexgen_h2o.core.model import ModelSpec, TensorSpec
from flexgen_h2o.core.units import check_int
from flexgen_h2o.kernels.linear import add_linear, linear, linear_shared_input, lookup
from flexgen_h2o.kernels.workspace import Workspace
from flexgen_h2o.models import Attention, Queries, Weights
from flexgen_h2o.models.layers import (
    activated,
    bias_of,
    check_activation,
    check_heads,
    layer_norm,
    layer_norm_tensors,
    linear_tensors,
    read_common,
    table_tensor,
    token_chunks,
)

POSITION_OFFSET = 2  # learned positions start at row 2 of their table
LAYER_NORM_EPS = 1e-5


def read_spec(name: str, config: Mapping[str, Any]) -> ModelSpec:
    """Return the ModelSpec of an OPT config.

    config: transformers' field names, defaults filled in. Raises UsageError that names a bad field.
    """
    common = read_common(config, name, "ffn_dim")
    hidden, ffn, vocab, positions = (
        common[n] for n in ("hidden_size", "ffn_size", "vocab_size", "max_positions")
    )
    narrow = check_int(
        "word_embed_proj_dim", config.get("word_embed_proj_dim") or hidden, low=1, high=2**18
    )
    check_heads(hidden, common["num_heads"])
    activation = check_activation("activation_function", config["activation_function"])
    bias = bool(config["enable_bias"])
    affine = bool(config["layer_norm_elementwise_affine"])
    pre_norm = bool(config["do_layer_norm_before"])
    tied = bool(config.get("tie_word_embeddings", True))
    final_norm = pre_norm and not config.get("_remove_final_layer_norm", False)
    root = "model.decoder"

    def norm(role: str, prefix: str) -> tuple[TensorSpec, ...]:
        return layer_norm_tensors(role, f"{prefix}.{role}", hidden) if affine else ()

    def attention_tensors(block: str) -> tuple[TensorSpec, ...]:
        roles = ("q_proj", "k_proj", "v_proj", "out_proj")
        linears = (
            linear_tensors(role, f"{block}.self_attn.{role}", hidden, hidden, bias)
            for role in roles
        )
        return (*norm("self_attn_layer_norm", block), *chain.from_iterable(linears))

    def mlp_tensors(block: str) -> tuple[TensorSpec, ...]:
        fc1 = linear_tensors("fc1", f"{block}.fc1", ffn, hidden, bias)
        return (
            *fc1,
            *linear_tensors("fc2", f"{block}.fc2", hidden, ffn, bias),
            *norm("final_layer_norm", block),
        )

    def table(role: str, prefix: str, rows: int, width: int) -> TensorSpec:
        return TensorSpec(f"{role}.weight", f"{prefix}{role}.weight", (rows, width))

    head_table = table("lm_head", "", vocab, narrow)
    tokens = table_tensor(
        "embed_tokens", f"{root}.embed_tokens.weight", (vocab, narrow), head_table if tied else None
    )
    positional = table("embed_positions", f"{root}.", positions + POSITION_OFFSET, hidden)
    is_narrow = narrow != hidden
    project_in = (table("project_in", f"{root}.", hidden, narrow),) if is_narrow else ()
    project_out = (table("project_out", f"{root}.", narrow, hidden),) if is_narrow else ()
    blocks = [f"{root}.layers.{i}" for i in range(common["num_blocks"])]
    return ModelSpec(
        family="opt",
        embedding=(tokens, positional, *project_in),
        attention=tuple(map(attention_tensors, blocks)),
        mlp=tuple(map(mlp_tensors, blocks)),
        head=(
            *(norm("final_layer_norm", root) if final_norm else ()),
            *project_out,
            tokens if tied else head_table,
        ),
        tied=tied,
        options=(
            ("activation", activation),
            ("final_norm", final_norm),
            ("narrow", narrow),
            ("pre_norm", pre_norm),
        ),
        **common,
    )


def embed(
    spec: ModelSpec,
    w: Weights,
    ids: torch.Tensor,
    positions: torch.Tensor,
    x: torch.Tensor,
    ws: Workspace,
) -> None:
    """Compute x = E[ids] + P[positions + 2]. A narrow E[ids] is projected first.

    ids, positions: (tokens,) int64; x: (tokens, hidden).
    """
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


def attention(spec: ModelSpec, w: Weights, x: torch.Tensor, ws: Workspace) -> Attention:
    """Compute x += out_proj(attended(q, k, v)). x: (tokens, hidden).

    The norm comes before the projections, or after the sum (350m).
    """
    tokens = len(x)
    heads = spec.num_heads
    width = spec.head_dim
    pre_norm = spec.option("pre_norm")
    q, k, v = (ws.get(name, tokens, spec.hidden_size) for name in ("q", "k", "v"))
    for a, b in token_chunks(tokens):
        inputs = _norm(w, "self_attn_layer_norm", x[a:b]) if pre_norm else x[a:b]
        outs = ((q, "q_proj"), (k, "k_proj"), (v, "v_proj"))
        linear_shared_input(
            inputs, [(w[f"{name}.weight"], bias_of(w, name), out[a:b]) for out, name in outs]
        )
    attn_out = yield Queries(*(t.view(tokens, heads, width) for t in (q, k, v)))
    for a, b in token_chunks(tokens):
        add_linear(x[a:b], attn_out[a:b], w["out_proj.weight"], bias_of(w, "out_proj"))
        if not pre_norm:
            x[a:b] = _norm(w, "self_attn_layer_norm", x[a:b])


def mlp(spec: ModelSpec, w: Weights, x: torch.Tensor, ws: Workspace) -> None:
    """Compute x += fc2(activation(fc1(x))). x: (tokens, hidden).

    The norm comes before fc1, or after the sum, as in `attention`.
    """
    pre_norm = spec.option("pre_norm")
    activation = spec.option("activation")
    for a, b in token_chunks(len(x)):
        inputs = _norm(w, "final_layer_norm", x[a:b]) if pre_norm else x[a:b]
        wide = ws.get("ffn", b - a, spec.ffn_size)
        inner = activated(activation, inputs, w["fc1.weight"], bias_of(w, "fc1"), wide)
        add_linear(x[a:b], inner, w["fc2.weight"], bias_of(w, "fc2"))
        if not pre_norm:
            x[a:b] = _norm(w, "final_layer_norm", x[a:b])


def head(spec: ModelSpec, w: Weights, x: torch.Tensor, logits: torch.Tensor, ws: Workspace) -> None:
    """Compute logits = norm(x) E^T, with a projection in between if E is narrow.

    x: (rows, hidden), not changed.
    """
    if spec.option("final_norm"):
        x = _norm(w, "final_layer_norm", x)
    if "project_out.weight" in w:
        x = linear(
            x, w["project_out.weight"], None, ws.get("normed", len(x), spec.option("narrow"))
        )
    linear(x, w["embed_tokens.weight" if spec.tied else "lm_head.weight"], None, logits)


def _norm(w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return layer_norm(w, name, x, LAYER_NORM_EPS)
