"""Mixtures of experts instead of LLaMA's MLP: Qwen3-MoE, Mixtral, OLMoE.

The papers are Shazeer et al. 2017 and Jiang et al. 2024.

The softmax of a router over all experts gives a token its `per_token` likeliest experts and their
weights. Formulas follow transformers' modeling_qwen3_moe, modeling_mixtral and modeling_olmoe. The
attention is that of models/llama.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import Experts, ModelSpec, Stacked, StepBuffer, TensorSpec
from flexgen_h2o.core.units import check_int
from flexgen_h2o.kernels.linear import grouped_linear
from flexgen_h2o.kernels.workspace import Workspace
from flexgen_h2o.models import Hidden, Weights
from flexgen_h2o.models.layers import gated, mix_experts, read_sizes, route_tokens
from flexgen_h2o.models.llama import (
    attention,
    attention_tensors,
    embed,
    head,
    mlp,
    mlp_norm_tensor,
    mlp_tensors,
    normed,
    read_decoder,
)

__all__ = ["attention", "embed", "experts", "head", "mlp", "read_spec", "route"]

# most experts of a layer, and of all layers
MAX_EXPERTS = 2**12
MAX_IN_ALL = 2**17


def read_spec(name: str, config: Mapping[str, Any]) -> ModelSpec:
    """Return the ModelSpec of a config with experts.

    config: transformers' field names, defaults filled in. Raises UsageError that names a bad field.
    """
    found = read_decoder(name, config)
    kind = config["model_type"]
    if config.get("clip_qkv") is not None:
        raise UsageError(
            f"clip_qkv: {config['clip_qkv']!r:.40} is not supported; only models without it are"
        )
    hidden = found["hidden_size"]
    dense_ffn = found["ffn_size"]
    blocks = range(found["num_blocks"])
    count, per_token = read_counts(config)
    (ffn,) = read_sizes(config, ("moe_intermediate_size",)) if kind == "qwen3_moe" else (dense_ffn,)
    dense = _dense_blocks(config)
    if len(dense) == len(blocks):
        raise UsageError(
            "mlp_only_layers and decoder_sparse_step: leave no layer with experts; give a qwen3 "
            "model"
        )
    # Mixtral has no attention_bias, and transformers ignores it there.
    bias = kind != "mixtral" and bool(config.get("attention_bias", False))
    width = found["head_dim"]
    qk_norms = {
        "qwen3_moe": (width, width),
        "mixtral": (),
        "olmoe": (found["num_heads"] * width, found["num_kv_heads"] * width),
    }[kind]
    # Mixtral's files have another name for the MLP than transformers' model. Both are accepted.
    places = ("block_sparse_moe", "mlp") if kind == "mixtral" else ("mlp",)
    names = ("w1", "w3", "w2") if kind == "mixtral" else _PROJECTIONS

    # For each projection: the stack of all experts in which transformers keeps it, its first row
    # there, and the rows of a slice of the stack. Checkpoints may have the stacks.
    in_stacks = {
        "gate_proj": ("gate_up_proj", 0, 2 * ffn),
        "up_proj": ("gate_up_proj", ffn, 2 * ffn),
        "down_proj": ("down_proj", 0, hidden),
    }

    def attention_of(i: int) -> tuple[TensorSpec, ...]:
        tensors = attention_tensors(i, found, bias, bias, qk_norms)
        if i in dense:
            return tensors
        name, *aliases = (f"model.layers.{i}.{place}.gate.weight" for place in places)
        router = TensorSpec("router.weight", name, (count, hidden), tuple(aliases), exact=True)
        return (*tensors, mlp_norm_tensor(i, hidden), router)

    def expert_of(i: int, expert: int) -> tuple[TensorSpec, ...]:
        tensors = []
        for (role, (kind, first, rows_in_all)), own in zip(in_stacks.items(), names, strict=True):
            shape = (hidden, ffn) if kind == "down_proj" else (ffn, hidden)
            name, *aliases = (
                f"model.layers.{i}.{place}.experts.{expert}.{own}.weight" for place in places
            )
            stacks = tuple(f"model.layers.{i}.{place}.experts.{kind}" for place in places)
            stacked = Stacked(stacks, (count, rows_in_all, shape[1]), expert, first)
            tensors.append(
                TensorSpec(
                    f"experts.{expert}.{role}.weight", name, shape, tuple(aliases), stacked=stacked
                )
            )
        return tuple(tensors)

    mixtures = Experts(
        count,
        per_token,
        ffn,
        tuple(() if i in dense else tuple(expert_of(i, e) for e in range(count)) for i in blocks),
        tuple(() if i in dense else (mlp_norm_tensor(i, hidden),) for i in blocks),
    )
    largest = max(ffn, dense_ffn) if dense else ffn
    normalised = kind == "mixtral" or bool(config.get("norm_topk_prob"))
    options = {
        **dict(found["options"]),
        "normalised": normalised,
        "wide weights": kind == "mixtral",
    }
    own = {"ffn_size": largest, "options": tuple(options.items())}
    return ModelSpec(
        family=kind,
        attention=tuple(map(attention_of, blocks)),
        mlp=tuple(
            mlp_tensors(i, hidden, dense_ffn, bias=False) if i in dense else () for i in blocks
        ),
        buffers=(
            StepBuffer("gate", largest, "mlp"),
            StepBuffer("routed", hidden, "mlp"),
            StepBuffer("router", count, "attention"),
        ),
        experts=mixtures,
        **{**found, **own},
    )


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def read_counts(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the number of experts of a layer, and of a token.

    Raises UsageError if either number, or the number in all layers, is too large for a model.
    """
    # transformers gives the number under one of two names.
    num_experts = config.get("num_experts", config.get("num_local_experts"))
    count = check_int("num_experts or num_local_experts", num_experts, low=1, high=MAX_EXPERTS)
    if count * int(config["num_hidden_layers"]) > MAX_IN_ALL:
        raise UsageError(
            f"num_experts: {count} in each of {config['num_hidden_layers']} layers "
            "(num_hidden_layers) are more than"
            f" {MAX_IN_ALL} in all, which no known model has"
        )
    return count, check_int(
        "num_experts_per_tok", config.get("num_experts_per_tok"), low=1, high=count
    )


def _dense_blocks(config: Mapping[str, Any]) -> set[int]:
    """Return the blocks that have an MLP instead of experts. Only Qwen3-MoE has fields for them."""
    step = check_int("decoder_sparse_step", config.get("decoder_sparse_step", 1), low=1)
    chosen = set(config.get("mlp_only_layers") or ())
    return {i for i in range(config["num_hidden_layers"]) if i in chosen or (i + 1) % step}


def route(spec: ModelSpec, w: Weights, hidden: Hidden, ws: Workspace) -> None:
    """Choose for each token the likeliest experts and their weights.

    They come from the softmax, in fp32, of the router's logits.
    """

    def choose(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert spec.experts is not None
        weights, chosen = logits.softmax(-1, dtype=torch.float32).topk(spec.experts.per_token)
        if spec.option("normalised"):
            weights /= weights.sum(-1, keepdim=True)
        return weights if spec.option("wide weights") else weights.to(logits.dtype), chosen

    route_tokens(spec, w, hidden, ws, lambda x: normed(spec, w, "mlp_norm", x, ws), choose)


def experts(spec: ModelSpec, w: Weights, group: range, hidden: Hidden, ws: Workspace) -> None:
    """Add the outputs of a group of experts to `hidden.mixed`.

    mixed += weight x down_proj(activation(gate_proj(y)) * up_proj(y)) for each expert, with y the
    normed x of the tokens that have chosen it.
    """
    assert spec.experts is not None
    ffn = spec.experts.ffn_size
    gates, ups, downs = ([w[f"experts.{i}.{role}.weight"] for i in group] for role in _PROJECTIONS)

    def compute(counts: Sequence[int], inputs: torch.Tensor, out: torch.Tensor) -> None:
        gate, up = (ws.get(name, len(inputs), ffn) for name in ("gate", "ffn"))
        grouped_linear(inputs, counts, ((gates, None, gate), (ups, None, up)))
        grouped_linear(gated(spec.option("activation"), gate, up), counts, ((downs, None, out),))

    mix_experts(group, hidden, ws, lambda x: normed(spec, w, "mlp_norm", x, ws), compute)
