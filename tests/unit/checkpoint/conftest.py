"""A tiny model of OPT-like names, as a spec, as tensors and as a real transformers model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from flexgen_h2o.checkpoint import StoredTensor
from flexgen_h2o.core.config import ModelSpec, TensorSpec

HIDDEN, HEADS, FFN, VOCAB, POSITIONS, BLOCKS = 16, 2, 32, 40, 24, 2


def _linear(block: str, name: str, out: int, into: int) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec(f"{name}.weight", f"{block}.{name}.weight", (out, into)),
        TensorSpec(f"{name}.bias", f"{block}.{name}.bias", (out,)),
    )


def _norm(block: str, name: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(f"{name}.{part}", f"{block}.{name}.{part}", (HIDDEN,)) for part in ("weight", "bias"))


@pytest.fixture
def spec() -> ModelSpec:
    blocks = [f"model.decoder.layers.{i}" for i in range(BLOCKS)]
    projections = [f"self_attn.{x}_proj" for x in ("q", "k", "v", "out")]
    decoder = "model.decoder"
    return ModelSpec(
        name="tiny",
        family="opt",
        num_blocks=BLOCKS,
        hidden_size=HIDDEN,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=HIDDEN // HEADS,
        ffn_size=FFN,
        vocab_size=VOCAB,
        max_positions=POSITIONS,
        embedding=(
            TensorSpec("tokens", f"{decoder}.embed_tokens.weight", (VOCAB, HIDDEN)),
            TensorSpec("positions", f"{decoder}.embed_positions.weight", (POSITIONS + 2, HIDDEN)),
        ),
        attention=tuple(
            _norm(b, "self_attn_layer_norm") + sum((_linear(b, p, HIDDEN, HIDDEN) for p in projections), ())
            for b in blocks
        ),
        mlp=tuple(
            _norm(b, "final_layer_norm") + _linear(b, "fc1", FFN, HIDDEN) + _linear(b, "fc2", HIDDEN, FFN)
            for b in blocks
        ),
        head=(
            *_norm(decoder, "final_layer_norm"),
            TensorSpec("tokens", f"{decoder}.embed_tokens.weight", (VOCAB, HIDDEN)),
        ),
        tied=True,
    )


@pytest.fixture
def config() -> OPTConfig:
    return OPTConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=BLOCKS,
        ffn_dim=FFN,
        max_position_embeddings=POSITIONS,
        num_attention_heads=HEADS,
        word_embed_proj_dim=HIDDEN,
    )


@pytest.fixture
def model(config: OPTConfig) -> OPTForCausalLM:
    return OPTForCausalLM(config)


@pytest.fixture
def weights(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Random float32 tensors for every name of `spec`."""
    return {t.name: torch.randn(t.shape) for unit in spec.layers(sep_layer=False).units for t in unit.tensors}


@pytest.fixture
def read() -> Callable[[StoredTensor], torch.Tensor]:
    """Reads a tensor the way the tiers will: by byte range."""

    def read_range(stored: StoredTensor) -> torch.Tensor:
        with stored.path.open("rb") as file:
            file.seek(stored.offset)
            data = bytearray(file.read(stored.nbytes))
        return torch.frombuffer(data, dtype=getattr(torch, stored.dtype)).view(stored.shape)

    return read_range


@pytest.fixture
def names_in() -> Callable[[Path], list[str]]:
    """Everything below a folder, hidden files too: what a failure must leave empty."""

    def names(folder: Path) -> list[str]:
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())

    return names


@pytest.fixture
def config_json(config: OPTConfig) -> dict[str, Any]:
    return {**config.to_dict(), "architectures": ["OPTForCausalLM"]}
