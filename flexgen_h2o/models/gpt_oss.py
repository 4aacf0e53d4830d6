"""gpt-oss (OpenAI 2025): LLaMA's attention with learned sinks, and experts with clamped gates.

Alternate layers have sliding windows. The hub's checkpoints have experts in MXFP4
(checkpoint/formats/mxfp4.py); plain ones that transformers saves have them transposed. Formulas
follow transformers' modeling_gpt_oss. The attention is that of models/llama.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from flexgen_h2o.core.model import Experts, ModelSpec, StepBuffer, TensorSpec
from flexgen_h2o.kernels.elementwise import clamped_gate
from flexgen_h2o.kernels.linear import grouped_linear, vector
from flexgen_h2o.kernels.workspace import Workspace
from flexgen_h2o.models import Hidden, Weights
from flexgen_h2o.models.layers import linear_tensors, mix_experts, read_positive, route_tokens
from flexgen_h2o.models.llama import (
    attention,
    attention_tensors,
    embed,
    head,
    mlp,
    mlp_norm_tensor,
    normed,
    read_decoder,
)
from flexgen_h2o.models.moe import read_counts

__all__ = ["attention", "embed", "experts", "head", "mlp", "read_spec", "route"]


def read_spec(name: str, config: Mapping[str, Any]) -> ModelSpec:
    """Return the ModelSpec of a gpt-oss config.

    config: transformers' field names, defaults filled in. Raises UsageError that names a bad field.
    """
    found = read_decoder(name, config)
    hidden, ffn, heads = (found[size] for size in ("hidden_size", "ffn_size", "num_heads"))
    count, per_token = read_counts(config)
    bias = bool(config.get("attention_bias", True))
    blocks = range(found["num_blocks"])
    transposed = (config.get("quantization_config") or {}).get("quant_method") != "mxfp4"

    def attention_of(i: int) -> tuple[TensorSpec, ...]:
        router = linear_tensors(
            "router", f"model.layers.{i}.mlp.router", count, hidden, bias=True, exact=True
        )
        sinks = TensorSpec("sinks", f"model.layers.{i}.self_attn.sinks", (heads,))
        norm = mlp_norm_tensor(i, hidden)
        return (*attention_tensors(i, found, bias, bias), sinks, norm, *router)

    def expert_of(i: int, expert: int) -> tuple[TensorSpec, ...]:
        tensors = []
        for kind, shape in (("gate_up_proj", (2 * ffn, hidden)), ("down_proj", (hidden, ffn))):
            role = f"experts.{expert}.{kind}"
            stored = f"model.layers.{i}.mlp.experts.{kind}"
            tensors += [
                TensorSpec(f"{role}.weight", stored, shape, index=expert, transposed=transposed),
                TensorSpec(f"{role}.bias", f"{stored}_bias", shape[:1], index=expert),
            ]
        return tuple(tensors)

    mixtures = Experts(
        count,
        per_token,
        ffn,
        tuple(tuple(expert_of(i, e) for e in range(count)) for i in blocks),
        tuple((mlp_norm_tensor(i, hidden),) for i in blocks),
    )
    gate = {
        "alpha": read_positive(config, "swiglu_alpha"),
        "limit": read_positive(config, "swiglu_limit"),
    }
    options = {**dict(found["options"]), **gate, "norms round once": True}
    return ModelSpec(
        family="gpt_oss",
        attention=tuple(map(attention_of, blocks)),
        mlp=tuple(() for _ in blocks),
        buffers=(
            StepBuffer("gate_up", 2 * ffn, "mlp"),
            StepBuffer("routed", hidden, "mlp"),
            StepBuffer("router", count, "attention"),
        ),
        experts=mixtures,
        **{**found, "options": tuple(options.items())},
    )


def route(spec: ModelSpec, w: Weights, hidden: Hidden, ws: Workspace) -> None:
    """Choose for each token the experts with the largest router logits.

    Their weights are the softmax of these logits alone.
    """

    def choose(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert spec.experts is not None
        largest, chosen = logits.topk(spec.experts.per_token)
        return largest.softmax(-1), chosen

    route_tokens(spec, w, hidden, ws, lambda x: normed(spec, w, "mlp_norm", x, ws), choose)


def experts(spec: ModelSpec, w: Weights, group: range, hidden: Hidden, ws: Workspace) -> None:
    """Add the outputs of a group of experts to `hidden.mixed`.

    mixed += weight x down_proj(clamped gate of gate_up_proj(y)) for each expert, with y the normed
    x of the tokens that have chosen it.
    """
    assert spec.experts is not None
    width = spec.experts.ffn_size
    roles = [[f"experts.{i}.{kind}" for i in group] for kind in ("gate_up_proj", "down_proj")]
    firsts, lasts = ([w[f"{role}.weight"] for role in of_group] for of_group in roles)
    first_biases, last_biases = (
        [vector(w[f"{role}.bias"]) for role in of_group] for of_group in roles
    )

    def compute(counts: Sequence[int], inputs: torch.Tensor, out: torch.Tensor) -> None:
        gate_up = ws.get("gate_up", len(inputs), 2 * width)
        inner = ws.get("ffn", len(inputs), width)
        grouped_linear(inputs, counts, ((firsts, first_biases, gate_up),))
        clamped_gate(gate_up, spec.option("alpha"), spec.option("limit"), inner)
        grouped_linear(inner, counts, ((lasts, last_biases, out),))

    mix_experts(group, hidden, ws, lambda x: normed(spec, w, "mlp_norm", x, ws), compute)
