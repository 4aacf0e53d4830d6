"""GPT-NeoX (Black et al. 2022) and Pythia, as plain functions.

Positions are partly rotary, and one fused matrix gives q, k and v. Attention and MLP share the
residual (parallel) or read it one after the other. Formulas follow transformers' modeling_gpt_neox.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import ModelSpec, StepBuffer, TensorSpec
from flexgen_h2o.kernels.linear import add_linear, linear, lookup
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
    read_positive,
    read_rotary,
    table_tensor,
    token_chunks,
)


def read_spec(name: str, config: Mapping[str, Any]) -> ModelSpec:
    """Return the ModelSpec of a GPT-NeoX config.

    config: transformers' field names, defaults filled in. Raises UsageError that names a bad field.
    """
    common = read_common(config, name)
    hidden, ffn, vocab, width = (
        common[n] for n in ("hidden_size", "ffn_size", "vocab_size", "head_dim")
    )
    check_heads(hidden, common["num_heads"])
    activation = check_activation("hidden_act", config.get("hidden_act"))
    eps = read_positive(config, "layer_norm_eps")
    bias = bool(config["attention_bias"])
    parallel = bool(config["use_parallel_residual"])
    rotary = read_rotary(config)
    if rotary.width > width:
        raise UsageError(
            f"rope_parameters: {rotary.width} numbers of a head of {width} cannot turn"
        )

    def attention_tensors(block: str) -> tuple[TensorSpec, ...]:
        return (
            *layer_norm_tensors("input_norm", f"{block}.input_layernorm", hidden),
            *linear_tensors(
                "query_key_value", f"{block}.attention.query_key_value", 3 * hidden, hidden, bias
            ),
            *linear_tensors("dense", f"{block}.attention.dense", hidden, hidden, bias),
        )

    def mlp_tensors(block: str) -> tuple[TensorSpec, ...]:
        return (
            *layer_norm_tensors("mlp_norm", f"{block}.post_attention_layernorm", hidden),
            *linear_tensors("dense_h_to_4h", f"{block}.mlp.dense_h_to_4h", ffn, hidden, True),
            *linear_tensors("dense_4h_to_h", f"{block}.mlp.dense_4h_to_h", hidden, ffn, True),
        )

    blocks = [f"gpt_neox.layers.{i}" for i in range(common["num_blocks"])]
    attention = tuple(map(attention_tensors, blocks))
    mlp = tuple(map(mlp_tensors, blocks))
    if parallel:
        attention = tuple(a + b for a, b in zip(attention, mlp, strict=True))
        mlp = ((),) * len(blocks)
    tied = bool(config.get("tie_word_embeddings", False))
    head_table = TensorSpec(
        "embed_out.weight", "embed_out.weight", (vocab, hidden), ("lm_head.weight",)
    )
    table = table_tensor(
        "embed_in", "gpt_neox.embed_in.weight", (vocab, hidden), head_table if tied else None
    )
    final_norm = layer_norm_tensors("final_layer_norm", "gpt_neox.final_layer_norm", hidden)
    return ModelSpec(
        family="gpt_neox",
        embedding=(table,),
        attention=attention,
        mlp=mlp,
        head=(*final_norm, table if tied else head_table),
        tied=tied,
        options=(("activation", activation), ("eps", eps), ("parallel", parallel)),
        rotary=rotary,
        buffers=(StepBuffer("qkv", 3 * hidden, "attention"),),
        prefix="gpt_neox",
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
    """Compute x = E[ids]. ids, positions: (tokens,) int64; x: (tokens, hidden)."""
    for a, b in token_chunks(len(ids)):
        lookup(ids[a:b], w["embed_in.weight"], x[a:b])


def attention(spec: ModelSpec, w: Weights, x: torch.Tensor, ws: Workspace) -> Attention:
    """Compute x += dense(attended(q, k, v)) of the normed x. x: (tokens, hidden).

    With a parallel residual, the MLP of the original x is added, too. Rows of the fused matrix are
    (heads, 3, d): q, k and v of a head are side by side.
    """
    tokens = len(x)
    heads = spec.num_heads
    width = spec.head_dim
    qkv = tuple(ws.get(name, tokens, heads, width) for name in ("q", "k", "v"))
    for a, b in token_chunks(tokens):
        fused = ws.get("qkv", b - a, 3 * spec.hidden_size)
        linear(
            _norm(spec, w, "input_norm", x[a:b]),
            w["query_key_value.weight"],
            bias_of(w, "query_key_value"),
            fused,
        )
        for out, part in zip(qkv, fused.view(b - a, heads, 3, width).unbind(2), strict=True):
            out[a:b] = part
    attn_out = yield Queries(*qkv)
    for a, b in token_chunks(tokens):
        before = _norm(spec, w, "mlp_norm", x[a:b]) if spec.option("parallel") else None
        add_linear(x[a:b], attn_out[a:b], w["dense.weight"], bias_of(w, "dense"))
        if before is not None:
            _add_mlp(spec, w, x[a:b], before, ws)


def mlp(spec: ModelSpec, w: Weights, x: torch.Tensor, ws: Workspace) -> None:
    """Add the MLP of the normed x to x if the residual is sequential. x: (tokens, hidden)."""
    for a, b in token_chunks(len(x)):
        _add_mlp(spec, w, x[a:b], _norm(spec, w, "mlp_norm", x[a:b]), ws)


def head(spec: ModelSpec, w: Weights, x: torch.Tensor, logits: torch.Tensor, ws: Workspace) -> None:
    """Compute logits = norm(x) E^T. x: (rows, hidden), not changed."""
    table = w["embed_in.weight" if spec.tied else "embed_out.weight"]
    linear(_norm(spec, w, "final_layer_norm", x), table, None, logits)


def _add_mlp(
    spec: ModelSpec, w: Weights, x: torch.Tensor, inputs: torch.Tensor, ws: Workspace
) -> None:
    """Compute x += dense_4h_to_h(activation(dense_h_to_4h(inputs))).

    x, inputs: (tokens of a chunk, hidden).
    """
    wide = ws.get("ffn", len(x), spec.ffn_size)
    activation = spec.option("activation")
    inner = activated(
        activation, inputs, w["dense_h_to_4h.weight"], bias_of(w, "dense_h_to_4h"), wide
    )
    add_linear(x, inner, w["dense_4h_to_h.weight"], bias_of(w, "dense_4h_to_h"))


def _norm(spec: ModelSpec, w: Weights, name: str, x: torch.Tensor) -> torch.Tensor:
    return layer_norm(w, name, x, spec.option("eps"))
