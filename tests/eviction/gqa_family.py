"""A family for the tests only, simple enough to write twice: pre-norm, RMS norms, learned positions, grouped kv-heads.

The functions under the `Family` protocol are what the engine runs; `PlainGQA` is the same model in plain torch, written
apart from them. Query heads and hidden states differ in width on purpose.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoConfig, PretrainedConfig

from flexgen_h2o.core.config import ModelSpec, TensorSpec
from flexgen_h2o.kernels.linear import add_linear, linear, lookup, vector
from flexgen_h2o.kernels.workspace import Workspace
from flexgen_h2o.models import FAMILIES, Attend, Weights

MODEL_TYPE = "tests-gqa"
EPS = 1e-5
CONFIG: dict[str, Any] = {
    "model_type": MODEL_TYPE, "hidden_size": 40, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 72, "vocab_size": 120, "max_position_embeddings": 64,
}  # fmt: skip

# ---- what the engine calls

BUILT_IN: dict[str, dict[str, Any]] = {}


def read_spec(name: str, config: Mapping[str, Any]) -> ModelSpec:
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads, d = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    blocks, positions = config["num_hidden_layers"], config["max_position_embeddings"]

    def tensors(prefix: str, **shapes: tuple[int, ...]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(role, f"{prefix}{role}", shape) for role, shape in shapes.items())

    words = TensorSpec("words", "words", (vocab, hidden))
    return ModelSpec(
        name=name, family=MODEL_TYPE, num_blocks=blocks, hidden_size=hidden, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=d, ffn_size=ffn, vocab_size=vocab, max_positions=positions,
        embedding=(words, *tensors("", places=(positions, hidden))),
        attention=tuple(
            tensors(
                f"{i}.", norm_1=(hidden,), q=(heads * d, hidden), k=(kv_heads * d, hidden), v=(kv_heads * d, hidden),
                o=(hidden, heads * d),
            )
            for i in range(blocks)
        ),
        mlp=tuple(tensors(f"{i}.", norm_2=(hidden,), up=(ffn, hidden), down=(hidden, ffn)) for i in range(blocks)),
        head=(*tensors("", norm_3=(hidden,)), words), tied=True,
    )  # fmt: skip


def embed(
    spec: ModelSpec, w: Weights, ids: torch.Tensor, positions: torch.Tensor, x: torch.Tensor, ws: Workspace
) -> None:
    lookup(ids, w["words"], x)
    x.add_(lookup(positions, w["places"], torch.empty_like(x)))


def attention(spec: ModelSpec, w: Weights, x: torch.Tensor, attend: Attend, ws: Workspace) -> None:
    inputs = _normed(x, vector(w["norm_1"]))
    columns = []
    for name, heads in (("q", spec.num_heads), ("k", spec.num_kv_heads), ("v", spec.num_kv_heads)):
        out = ws.get(name, len(x), heads * spec.head_dim)
        columns.append(linear(inputs, w[name], None, out).view(len(x), heads, spec.head_dim))
    add_linear(x, attend(*columns), w["o"], None)


def mlp(spec: ModelSpec, w: Weights, x: torch.Tensor, ws: Workspace) -> None:
    inner = linear(_normed(x, vector(w["norm_2"])), w["up"], None, ws.get("ffn", len(x), spec.ffn_size))
    add_linear(x, torch.relu_(inner), w["down"], None)


def head(spec: ModelSpec, w: Weights, x: torch.Tensor, ws: Workspace) -> torch.Tensor:
    return linear(_normed(x, vector(w["norm_3"])), w["words"], None, ws.get("logits", len(x), spec.vocab_size))


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


# ---- the same in plain torch


class PlainGQA:
    """`PlainModel` of a checkpoint's tensors by name. Query head h belongs to kv-head h // g."""

    def __init__(self, weights: Mapping[str, torch.Tensor], dtype: torch.dtype = torch.float32) -> None:
        self._w = {name: value.to(dtype) for name, value in weights.items()}
        self._d = CONFIG["head_dim"]
        self.num_layers, self.kv_heads = CONFIG["num_hidden_layers"], CONFIG["num_key_value_heads"]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._w["words"][ids] + self._w["places"][: len(ids)]

    def project(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        inputs = self._rms(f"{layer}.norm_1", x)
        q, k, v = ((inputs @ self._w[f"{layer}.{name}"].T).view(len(x), -1, self._d).transpose(0, 1) for name in "qkv")
        return q, k, v

    def finish(self, layer: int, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        x = x + mixed @ self._w[f"{layer}.o"].T
        inner = (self._rms(f"{layer}.norm_2", x) @ self._w[f"{layer}.up"].T).clamp(min=0)
        return x + inner @ self._w[f"{layer}.down"].T

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._rms("norm_3", x) @ self._w["words"].T

    def _rms(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * self._w[name]


# ---- checkpoints


class _Config(PretrainedConfig):
    """transformers must know the type before it fills in a config's defaults."""

    model_type = MODEL_TYPE


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the engine know this family, until the test ends."""
    AutoConfig.register(MODEL_TYPE, _Config, exist_ok=True)
    monkeypatch.setitem(FAMILIES, MODEL_TYPE, "tests.eviction.gqa_family")


def random_weights(seed: int = 0, std: float = 0.2) -> dict[str, torch.Tensor]:
    """fp32 tensors by name, large enough that greedy does not repeat one token."""
    generator = torch.Generator().manual_seed(seed)
    units = read_spec("gqa", CONFIG).layers(sep_layer=False).units
    weights = {t.name: std * torch.randn(t.shape, generator=generator) for unit in units for t in unit.tensors}
    return {name: value + 1 if "norm" in name else value for name, value in weights.items()}


def save(weights: Mapping[str, torch.Tensor], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(weights), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
