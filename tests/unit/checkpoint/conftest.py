"""A tiny OPT, as a spec, as tensors and as a model of transformers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from flexgen_h2o.checkpoint import StoredTensor
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.models import spec_from_config


@pytest.fixture
def config() -> OPTConfig:
    return OPTConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=2,
        ffn_dim=32,
        max_position_embeddings=24,
        num_attention_heads=2,
        word_embed_proj_dim=16,
    )


@pytest.fixture
def spec(config: OPTConfig) -> ModelSpec:
    return spec_from_config("tiny", config.to_dict(), "here")


@pytest.fixture
def model(config: OPTConfig) -> OPTForCausalLM:
    return OPTForCausalLM(config)


@pytest.fixture
def weights(spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Random float32 tensors for every name of `spec`."""
    return {
        t.name: torch.randn(t.shape)
        for unit in spec.layers(sep_layer=False).units
        for t in unit.tensors
    }


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
        return sorted(
            str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()
        )

    return names


@pytest.fixture
def config_json(config: OPTConfig) -> dict[str, Any]:
    return {**config.to_dict(), "architectures": ["OPTForCausalLM"]}
