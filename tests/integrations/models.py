"""Tiny random models that transformers generates with, and the same in the pieces that the slow reference runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from tests.eviction.plain_models import plain_model
from tests.eviction.reference import PlainModel
from tests.parity.cases import BASE, SHAPES
from tests.parity.reference import random_model

PAD = BASE["pad_token_id"]
_OPT_ONLY = ("model_type", "word_embed_proj_dim", "ffn_dim", "num_attention_heads")
SIZES: dict[str, Any] = {name: BASE[name] for name in BASE if name not in _OPT_ONLY} | {"intermediate_size": 96}


@dataclass(frozen=True)
class Known:
    model: PreTrainedModel
    plain: PlainModel


def _filled(model: PreTrainedModel, seed: int = 0, std: float = 0.2) -> PreTrainedModel:
    """Values as those of `random_model`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(0, std, generator=generator)
            if name.endswith(("norm.weight", "layernorm.weight")):
                value.add_(1)
    return model.eval()


def _known(model: PreTrainedModel) -> Known:
    return Known(model, plain_model(model))


def _opt(shape: str) -> Known:
    return _known(random_model(**SHAPES[shape]))


def _llama(**config: Any) -> Known:
    return _known(_filled(LlamaForCausalLM(LlamaConfig(**SIZES, **config)), seed=1))


def _mistral() -> Known:
    config = MistralConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, sliding_window=None)
    return _known(_filled(MistralForCausalLM(config)))


def _neox(**config: Any) -> Known:
    return _known(_filled(GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, num_attention_heads=4, **config))))


MODELS: dict[str, Callable[[], Known]] = {
    "opt": lambda: _opt("normal"),
    "opt, odd sizes": lambda: _opt("odd sizes"),
    "opt, post-norm": lambda: _opt("post-norm, narrow embedding (350m)"),
    "llama, grouped": lambda: _llama(num_attention_heads=6, num_key_value_heads=2, head_dim=8),
    "llama, one kv-head": lambda: _llama(num_attention_heads=4, num_key_value_heads=1, tie_word_embeddings=True),
    "llama, own heads": lambda: _llama(num_attention_heads=3, num_key_value_heads=3),
    "mistral": _mistral,
    "neox": lambda: _neox(rotary_pct=0.5),
    "neox, sequential": lambda: _neox(rotary_pct=1.0, use_parallel_residual=False),
}


def padded(prompts: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """(prompts, longest) ids and mask, padded on the left."""
    longest = max(map(len, prompts))
    ids = [[PAD] * (longest - len(p)) + list(p) for p in prompts]
    mask = [[0] * (longest - len(p)) + [1] * len(p) for p in prompts]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def generated(model: PreTrainedModel, prompts: Sequence[Sequence[int]], new_tokens: int, **settings: Any) -> Any:
    """What `model.generate` gives for one padded batch: its output with sequences and cache."""
    return model.generate(
        **padded(prompts), max_new_tokens=new_tokens, pad_token_id=PAD, return_dict_in_generate=True,
        **{"do_sample": False, **settings},
    )  # fmt: skip


def new_tokens_of(output: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    return output.sequences[:, max(map(len, prompts)) :].tolist()
