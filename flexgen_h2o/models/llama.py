"""LLaMA (Touvron et al. 2023) and the model types that are the same network, as plain functions.

RMS norms, rotary positions, grouped kv-heads, a gated MLP. Covers LLaMA 1 to 3.x, Mistral and Qwen2, with sliding
windows where they have them. Formulas follow transformers' modeling_llama.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flexgen_h2o.core.config import ModelSpec, StepBuffer, TensorSpec
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.kernels.elementwise import rms_norm
from flexgen_h2o.kernels.linear import add_linear, linear, linear_each, lookup, vector
from flexgen_h2o.kernels.workspace import Workspace
from flexgen_h2o.models import Attend, Weights
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
    token_chunks,
)


def _shape(hidden: int, blocks: int, heads: int, kv_heads: int, ffn: int, **other: Any) -> dict[str, Any]:
    return {
        "model_type": "llama", "hidden_size": hidden, "num_hidden_layers": blocks, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": ffn, "rms_norm_eps": 1e-5, **other,
    }  # fmt: skip


_LLAMA_2: dict[str, Any] = {"vocab_size": 32000, "max_position_embeddings": 4096, "rope_theta": 10000.0}
_LLAMA_3: dict[str, Any] = {
    "vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0, "bos_token_id": 128000,
    "eos_token_id": 128001,
}  # fmt: skip
_LLAMA_3_1: dict[str, Any] = {
    **_LLAMA_3, "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
_LLAMA_3_2: dict[str, Any] = {
    **_LLAMA_3_1, "rope_scaling": {**_LLAMA_3_1["rope_scaling"], "factor": 32.0}, "tie_word_embeddings": True,
}  # fmt: skip
_MISTRAL: dict[str, Any] = {"model_type": "mistral", "vocab_size": 32000, "max_position_embeddings": 32768}

_8B, _70B = (4096, 32, 32, 8, 14336), (8192, 80, 64, 8, 28672)  # Mistral 7B is of the size of LLaMA 3 8B
_2_7B = _shape(4096, 32, 32, 32, 11008, **_LLAMA_2)
_2_13B = _shape(5120, 40, 40, 40, 13824, **_LLAMA_2)
_2_70B = _shape(*_70B, **_LLAMA_2)

BUILT_IN: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-2-7b-hf": _2_7B,
    "meta-llama/Llama-2-13b-hf": _2_13B,
    "meta-llama/Llama-2-70b-hf": _2_70B,
    "meta-llama/Llama-2-7b-chat-hf": _2_7B,
    "meta-llama/Llama-2-13b-chat-hf": _2_13B,
    "meta-llama/Llama-2-70b-chat-hf": _2_70B,
    "meta-llama/Meta-Llama-3-8B": _shape(*_8B, **_LLAMA_3),
    "meta-llama/Meta-Llama-3-70B": _shape(*_70B, **_LLAMA_3),
    "meta-llama/Llama-3.1-8B": _shape(*_8B, **_LLAMA_3_1),
    "meta-llama/Llama-3.1-70B": _shape(*_70B, **_LLAMA_3_1),
    "meta-llama/Llama-3.2-1B": _shape(2048, 16, 32, 8, 8192, head_dim=64, **_LLAMA_3_2),
    "meta-llama/Llama-3.2-3B": _shape(3072, 28, 24, 8, 8192, head_dim=128, **_LLAMA_3_2),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _shape(
        2048, 22, 32, 4, 5632, **{**_LLAMA_2, "max_position_embeddings": 2048}
    ),
    "mistralai/Mistral-7B-v0.1": _shape(*_8B, **{**_MISTRAL, "rope_theta": 10000.0, "sliding_window": 4096}),
    "mistralai/Mistral-7B-v0.3": _shape(
        *_8B, **{**_MISTRAL, "vocab_size": 32768, "rope_theta": 1000000.0, "sliding_window": None}
    ),
}


def read_spec(name: str, config: Mapping[str, Any]) -> ModelSpec:
    """ModelSpec of a config (transformers' field names, defaults filled in). UsageError names a bad field."""
    common = read_common(config, name)
    hidden, heads, ffn, vocab = (common[n] for n in ("hidden_size", "num_heads", "ffn_size", "vocab_size"))
    (kv_heads,) = read_sizes(config, ("num_key_value_heads",))
    (width,) = read_sizes({"head_dim": config.get("head_dim") or hidden // heads}, ("head_dim",))
    if heads % kv_heads:
        raise UsageError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if width % 2:
        raise UsageError(f"head_dim {width} is odd, but rotary embeddings turn pairs")
    rotary = read_rotary(config)
    if rotary.width != width:
        raise UsageError(f"rope_parameters: turn {rotary.width} numbers of a head of {width}; all or nothing here")
    activation, eps = check_activation("hidden_act", config.get("hidden_act")), read_positive(config, "rms_norm_eps")
    qkv_bias, out_bias, mlp_bias = _biases(config)
    tied = bool(config.get("tie_word_embeddings", False))

    def norm(role: str, name: str) -> TensorSpec:
        return TensorSpec(f"{role}.weight", f"model.{name}.weight", (hidden,))

    def attention_tensors(i: int) -> tuple[TensorSpec, ...]:
        found = [norm("input_norm", f"layers.{i}.input_layernorm")]
        for role, rows in (("q_proj", heads * width), ("k_proj", kv_heads * width), ("v_proj", kv_heads * width)):
            found += linear_tensors(role, f"model.layers.{i}.self_attn.{role}", rows, hidden, qkv_bias)
        found += linear_tensors("o_proj", f"model.layers.{i}.self_attn.o_proj", hidden, heads * width, out_bias)
        return tuple(found)

    def mlp_tensors(i: int) -> tuple[TensorSpec, ...]:
        found = [norm("mlp_norm", f"layers.{i}.post_attention_layernorm")]
        for role, rows, columns in (("gate_proj", ffn, hidden), ("up_proj", ffn, hidden), ("down_proj", hidden, ffn)):
            found += linear_tensors(role, f"model.layers.{i}.mlp.{role}", rows, columns, mlp_bias)
        return tuple(found)

    table = TensorSpec("embed_tokens.weight", "model.embed_tokens.weight", (vocab, hidden))
    head_table = table if tied else TensorSpec("lm_head.weight", "lm_head.weight", (vocab, hidden))
    blocks = range(common["num_blocks"])
    windows = () if config.get("model_type") == "llama" else read_windows(config, len(blocks), common["max_positions"])
    return ModelSpec(
        family="llama",
        embedding=(table,),
        attention=tuple(map(attention_tensors, blocks)),
        mlp=tuple(map(mlp_tensors, blocks)),
        head=(norm("norm", "norm"), head_table),
        tied=tied,
        options=(("activation", activation), ("eps", eps)),
        rotary=rotary,
        buffers=(StepBuffer("gate", ffn, "mlp"),),
        windows=windows,
        **{**common, "num_kv_heads": kv_heads, "head_dim": width},
    )


def _biases(config: Mapping[str, Any]) -> tuple[bool, bool, bool]:
    """Of q, k and v, of attention's output, and of the MLP; types other than llama have no fields for them."""
    kind = config.get("model_type")
    if kind == "qwen2":
        return True, False, False
    if kind == "mistral":
        return False, False, False
    return bool(config["attention_bias"]), bool(config["attention_bias"]), bool(config["mlp_bias"])


def embed(
    spec: ModelSpec, w: Weights, ids: torch.Tensor, positions: torch.Tensor, x: torch.Tensor, ws: Workspace
) -> None:
    """x = E[ids]. ids, positions: (tokens,) int64; x: (tokens, hidden)."""
    lookup(ids, w["embed_tokens.weight"], x)


def attention(spec: ModelSpec, w: Weights, x: torch.Tensor, attend: Attend, ws: Workspace) -> None:
    """x += o_proj(attend(q, k, v)) of the normed x. x: (tokens, hidden)."""
    tokens, width = len(x), spec.head_dim
    heads = {"q": spec.num_heads, "k": spec.num_kv_heads, "v": spec.num_kv_heads}
    qkv = {name: ws.get(name, tokens, count * width) for name, count in heads.items()}
    for a, b in token_chunks(tokens):
        inputs = _norm(spec, w, "input_norm", x[a:b], ws)
        linear_each(
            inputs, [(w[f"{name}_proj.weight"], bias_of(w, f"{name}_proj"), out[a:b]) for name, out in qkv.items()]
        )
    attn_out = attend(*(out.view(tokens, heads[name], width) for name, out in qkv.items()))
    for a, b in token_chunks(tokens):
        add_linear(x[a:b], attn_out[a:b], w["o_proj.weight"], bias_of(w, "o_proj"))


def mlp(spec: ModelSpec, w: Weights, x: torch.Tensor, ws: Workspace) -> None:
    """x += down_proj(activation(gate_proj(y)) * up_proj(y)) with y the normed x. x: (tokens, hidden)."""
    for a, b in token_chunks(len(x)):
        inputs = _norm(spec, w, "mlp_norm", x[a:b], ws)
        gate, up = (ws.get(name, b - a, spec.ffn_size) for name in ("gate", "ffn"))
        linear(inputs, w["gate_proj.weight"], bias_of(w, "gate_proj"), gate)
        linear(inputs, w["up_proj.weight"], bias_of(w, "up_proj"), up)
        inner = gated(spec.option("activation"), gate, up)
        add_linear(x[a:b], inner, w["down_proj.weight"], bias_of(w, "down_proj"))


def head(spec: ModelSpec, w: Weights, x: torch.Tensor, ws: Workspace) -> torch.Tensor:
    """Logits of the given positions. x: (rows, hidden), left as it is. Returns (rows, vocab) in x's dtype."""
    table = w["embed_tokens.weight" if spec.tied else "lm_head.weight"]
    return linear(_norm(spec, w, "norm", x, ws), table, None, ws.get("logits", len(x), spec.vocab_size))


def _norm(spec: ModelSpec, w: Weights, name: str, x: torch.Tensor, ws: Workspace) -> torch.Tensor:
    return rms_norm(x, vector(w[f"{name}.weight"]), spec.option("eps"), ws.get("normed", *x.shape))
