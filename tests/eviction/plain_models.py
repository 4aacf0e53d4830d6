"""transformers' models in the pieces between which eviction happens: `reference.PlainModel` of each family."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from transformers import PreTrainedModel
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.llama import modeling_llama

from tests.eviction.reference import PlainModel, PlainOPT


class PlainLlama:
    """LLaMA and the model types that are the same network. Keys are rotated by position, once, unless `rolling`."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype = torch.float32, rolling: bool = False) -> None:
        self._rolling = rolling
        self._model = copy.deepcopy(model).eval().to(dtype=dtype)
        self._decoder = self._model.model
        self.num_layers = len(self._decoder.layers)
        self.kv_heads = model.config.num_key_value_heads

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._decoder.embed_tokens(ids)

    def project(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        block = self._decoder.layers[layer]
        own, inputs = block.self_attn, block.input_layernorm(x)
        q, k, v = (
            f(inputs).view(1, len(x), -1, own.head_dim).transpose(1, 2) for f in (own.q_proj, own.k_proj, own.v_proj)
        )
        if self._rolling:
            return q[0], k[0], v[0]
        return self.turn(q[0], torch.arange(len(x))), self.turn(k[0], torch.arange(len(x))), v[0]

    def turn(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(heads, n, d) at positions (n,)."""
        angles = self._decoder.rotary_emb(heads, positions[None])
        return modeling_llama.apply_rotary_pos_emb(heads[None], heads[None], *angles)[0][0]

    def finish(self, layer: int, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        block = self._decoder.layers[layer]
        x = x + block.self_attn.o_proj(mixed)
        return x + block.mlp(block.post_attention_layernorm(x))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._model.lm_head(self._decoder.norm(x))


class PlainNeoX:
    """GPT-NeoX, with a parallel residual and with a sequential one. `rolling`: as in PlainLlama."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype = torch.float32, rolling: bool = False) -> None:
        self._rolling = rolling
        self._model = copy.deepcopy(model).eval().to(dtype=dtype)
        self._decoder = self._model.gpt_neox
        self._parallel = model.config.use_parallel_residual
        self.num_layers = len(self._decoder.layers)
        self.kv_heads = model.config.num_attention_heads

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._decoder.embed_in(ids)

    def project(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        block = self._decoder.layers[layer]
        fused = block.attention.query_key_value(block.input_layernorm(x)).view(1, len(x), self.kv_heads, -1)
        q, k, v = fused.transpose(1, 2).chunk(3, dim=-1)
        if self._rolling:
            return q[0], k[0], v[0]
        return self.turn(q[0], torch.arange(len(x))), self.turn(k[0], torch.arange(len(x))), v[0]

    def turn(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(heads, n, d) at positions (n,)."""
        angles = self._decoder.rotary_emb(heads, positions[None])
        return modeling_gpt_neox.apply_rotary_pos_emb(heads[None], heads[None], *angles)[0][0]

    def finish(self, layer: int, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        block = self._decoder.layers[layer]
        y = x + block.attention.dense(mixed)
        return y + block.mlp(block.post_attention_layernorm(x if self._parallel else y))

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._model.lm_head(self._decoder.final_layer_norm(x))


PLAIN: dict[str, Callable[[PreTrainedModel], PlainModel]] = {
    "opt": PlainOPT, "llama": PlainLlama, "mistral": PlainLlama, "qwen2": PlainLlama,
    "gpt_neox": PlainNeoX,
}  # fmt: skip


def plain_model(model: PreTrainedModel) -> PlainModel:
    return PLAIN[model.config.model_type](model)
