"""Tiny random models that transformers generates with, and the same in the pieces that the slow reference runs.

`PlainLlama` and `PlainNeoX` take transformers' linear maps, norms and rotary tables, never its attention or its cache.
"""

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

from tests.eviction.reference import PlainModel, PlainOPT
from tests.parity.cases import BASE, SHAPES
from tests.parity.reference import random_model

PAD = BASE["pad_token_id"]
SIZES: dict[str, Any] = {
    name: BASE[name] for name in BASE if name not in ("word_embed_proj_dim", "ffn_dim", "num_attention_heads")
} | {"intermediate_size": 96}  # fmt: skip


@dataclass(frozen=True)
class Known:
    model: PreTrainedModel
    plain: PlainModel


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """(heads, n, d) with its first cos.shape[-1] numbers rotated, each by its position."""
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    left, right = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-right, left], dim=-1) * sin, rest], dim=-1)


class PlainLlama:
    """`PlainModel` of a LLaMA; query head h belongs to kv-head h // g."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self._model, self._decoder = model, model.model
        self.num_layers, self.kv_heads = model.config.num_hidden_layers, model.config.num_key_value_heads

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._decoder.embed_tokens(ids)

    def project(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        block = self._decoder.layers[layer]
        own, inputs = block.self_attn, block.input_layernorm(x)
        q, k, v = (
            f(inputs).view(len(x), -1, own.head_dim).transpose(0, 1) for f in (own.q_proj, own.k_proj, own.v_proj)
        )
        cos, sin = self._decoder.rotary_emb(x[None], torch.arange(len(x))[None])
        return rotated(q, cos, sin), rotated(k, cos, sin), v

    def finish(self, layer: int, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        block = self._decoder.layers[layer]
        x = x + block.self_attn.o_proj(mixed)
        return x + block.mlp(block.post_attention_layernorm(x))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._model.lm_head(self._decoder.norm(x))


class PlainNeoX:
    """`PlainModel` of a GPT-NeoX, with parallel or sequential residual."""

    def __init__(self, model: GPTNeoXForCausalLM) -> None:
        self._model, self._decoder = model, model.gpt_neox
        self.num_layers, self.kv_heads = model.config.num_hidden_layers, model.config.num_attention_heads

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._decoder.embed_in(ids)

    def project(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        block = self._decoder.layers[layer]
        qkv = block.attention.query_key_value(block.input_layernorm(x)).view(len(x), self.kv_heads, -1)
        q, k, v = qkv.transpose(0, 1).chunk(3, dim=-1)
        cos, sin = self._decoder.rotary_emb(x[None], torch.arange(len(x))[None])
        return rotated(q, cos, sin), rotated(k, cos, sin), v

    def finish(self, layer: int, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        block = self._decoder.layers[layer]
        attended = x + block.attention.dense(mixed)
        inner = x if self._model.config.use_parallel_residual else attended
        return attended + block.mlp(block.post_attention_layernorm(inner))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._model.get_output_embeddings()(self._decoder.final_layer_norm(x))


def _filled(model: PreTrainedModel, seed: int = 0, std: float = 0.2) -> PreTrainedModel:
    """Values as those of `random_model`."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, value in model.named_parameters():
            value.normal_(0, std, generator=generator)
            if name.endswith(("norm.weight", "layernorm.weight")):
                value.add_(1)
    return model.eval()


def _opt(shape: str) -> Known:
    model = random_model(**SHAPES[shape])
    return Known(model, PlainOPT(model))


def _llama(**config: Any) -> Known:
    model = _filled(LlamaForCausalLM(LlamaConfig(**SIZES, **config)), seed=1)
    return Known(model, PlainLlama(model))


def _mistral() -> Known:
    config = MistralConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2, sliding_window=None)
    model = _filled(MistralForCausalLM(config))
    return Known(model, PlainLlama(model))


def _neox(**config: Any) -> Known:
    model = _filled(GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, num_attention_heads=4, **config)))
    return Known(model, PlainNeoX(model))


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
