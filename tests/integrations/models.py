"""Tiny random models that transformers generates with, and the same in the pieces that the slow
reference runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.eviction.plain_models import plain_model
from tests.eviction.reference import PlainModel
from tests.parity.cases import BASE, SHAPES
from tests.parity.reference import random_model

PAD = BASE["pad_token_id"]


@dataclass(frozen=True)
class Known:
    model: PreTrainedModel
    plain: PlainModel


_LLAMA: dict[str, Any] = {"model_type": "llama", "seed": 1, "intermediate_size": 96}
_NEOX: dict[str, Any] = {"model_type": "gpt_neox", "num_attention_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "opt": SHAPES["normal"],
    "opt, post-norm": SHAPES["post-norm, narrow embedding (350m)"],
    "llama, grouped": {**_LLAMA, "head_dim": 8},
    "mistral": {
        "model_type": "mistral",
        "num_attention_heads": 4,
        "head_dim": 12,
        "intermediate_size": 96,
    },
    "qwen3": {
        "model_type": "qwen3",
        "head_dim": 16,
        "intermediate_size": 96,
        "tie_word_embeddings": True,
    },
    "olmoe": {"model_type": "olmoe", "num_attention_heads": 4, "intermediate_size": 16},
    "neox": {**_NEOX, "rotary_pct": 0.5},
    "neox, sequential": {**_NEOX, "rotary_pct": 1.0, "use_parallel_residual": False},
    "qwen3_moe": {"model_type": "qwen3_moe", "seed": 7, "head_dim": 16, "num_experts": 6},
    "mixtral": {"model_type": "mixtral", "intermediate_size": 32, "tie_word_embeddings": True},
}


def known_model(name: str) -> Known:
    model = random_model(**MODELS[name])
    return Known(model, plain_model(model))


def padded(prompts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """(prompts, longest) ids and mask, padded on the left."""
    longest = max(map(len, prompts))
    ids = [[PAD] * (longest - len(p)) + list(p) for p in prompts]
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def generated(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int, **settings: Any
) -> Any:
    """What `model.generate` gives for one padded batch: its output with sequences and cache."""
    return model.generate(
        **padded(prompts),
        max_new_tokens=new_tokens,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        **{"do_sample": False, **settings},
    )


def new_tokens_of(output: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    return output.sequences[:, max(map(len, prompts)) :].tolist()
