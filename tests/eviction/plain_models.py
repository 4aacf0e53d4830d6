"""transformers' models in the pieces between which eviction happens: `reference.PlainModel` of each
family."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from transformers import OPTForCausalLM, PreTrainedModel
from transformers.models.gpt_neox import modeling_gpt_neox
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

from tests.eviction.reference import QKV, PlainModel


class PlainOPT(PlainModel):
    """transformers' OPT of any kind: pre- or post-norm, narrow embedding, with or without biases,
    any activation."""

    def __init__(self, model: OPTForCausalLM) -> None:
        super().__init__(model)
        self._decoder = self._model.model.decoder
        self._pre_norm = bool(model.config.do_layer_norm_before)
        self.num_layers = len(self._decoder.layers)
        self.kv_heads = model.config.num_attention_heads
        self.windows = [None] * self.num_layers

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        words = self._decoder.embed_tokens(ids)
        if self._decoder.project_in is not None:
            words = self._decoder.project_in(words)
        return words + self._decoder.embed_positions.weight[2 : 2 + len(ids)]

    def project(self, layer: int, x: torch.Tensor) -> QKV:
        block = self._decoder.layers[layer]
        own = block.self_attn
        inputs = block.self_attn_layer_norm(x) if self._pre_norm else x
        q, k, v = (
            f(inputs).view(len(x), self.kv_heads, -1) for f in (own.q_proj, own.k_proj, own.v_proj)
        )
        return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)

    def finish(self, layer: int, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        block = self._decoder.layers[layer]
        x = x + block.self_attn.out_proj(mixed)
        if not self._pre_norm:
            x = block.self_attn_layer_norm(x)
        inputs = block.final_layer_norm(x) if self._pre_norm else x
        x = x + block.fc2(block.activation_fn(block.fc1(inputs)))
        return x if self._pre_norm else block.final_layer_norm(x)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        for last in (self._decoder.final_layer_norm, self._decoder.project_out):
            x = x if last is None else last(x)
        return self._model.lm_head(x)


class PlainRotary(PlainModel):
    """A network with rotary embeddings. Keys are rotated by position, once, unless `rolling`.

    `_heads` of a kind gives q, k and v of a block before that.
    """

    apply = staticmethod(modeling_llama.apply_rotary_pos_emb)

    def __init__(self, model: PreTrainedModel, rolling: bool = False) -> None:
        super().__init__(model)
        self._rolling = rolling
        self._decoder = self._model.base_model
        self.num_layers = len(self._decoder.layers)
        self.kv_heads = getattr(
            model.config, "num_key_value_heads", model.config.num_attention_heads
        )
        window = getattr(model.config, "sliding_window", None)
        kinds = (
            getattr(model.config, "layer_types", None) or ["sliding_attention"] * self.num_layers
        )
        self.windows = [window if kind == "sliding_attention" else None for kind in kinds]

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self._model.get_input_embeddings()(ids)

    def project(self, layer: int, x: torch.Tensor) -> QKV:
        q, k, v = self._heads(self._decoder.layers[layer], x)
        if self._rolling:
            return q, k, v
        return self.turn(q, torch.arange(len(x))), self.turn(k, torch.arange(len(x))), v

    def turn(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """(heads, n, d) at positions (n,)."""
        angles = self._decoder.rotary_emb(heads, positions[None])
        return self.apply(heads[None], heads[None], *angles)[0][0]


class PlainLlama(PlainRotary):
    """LLaMA and the model types that are the same network, or have experts in the place of its MLP.

    Qwen3 norms q and k of each head besides, OLMoE those of all heads together.
    """

    def _heads(self, block: nn.Module, x: torch.Tensor) -> QKV:
        own = block.self_attn
        inputs = block.input_layernorm(x)
        q, k, v = (f(inputs) for f in (own.q_proj, own.k_proj, own.v_proj))
        if hasattr(own, "q_norm"):
            q, k = (
                n(y.view(len(x), -1, len(n.weight))) for n, y in ((own.q_norm, q), (own.k_norm, k))
            )
        q, k, v = (y.reshape(len(x), -1, own.head_dim) for y in (q, k, v))
        return q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)

    def finish(self, layer: int, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        block = self._decoder.layers[layer]
        x = x + block.self_attn.o_proj(mixed)
        # An MLP's output, or, of gpt-oss, a pair of it and the router's.
        out = block.mlp(block.post_attention_layernorm(x)[None])
        return x + (out[0] if isinstance(out, tuple) else out)[0]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._model.lm_head(self._decoder.norm(x))


class PlainGptOss(PlainLlama):
    apply = staticmethod(modeling_gpt_oss.apply_rotary_pos_emb)

    def sinks(self, layer: int) -> torch.Tensor:
        return self._decoder.layers[layer].self_attn.sinks.view(self.kv_heads, -1)


class PlainNeoX(PlainRotary):
    """GPT-NeoX, with a parallel residual and with a sequential one."""

    apply = staticmethod(modeling_gpt_neox.apply_rotary_pos_emb)

    def _heads(self, block: nn.Module, x: torch.Tensor) -> QKV:
        fused = block.attention.query_key_value(block.input_layernorm(x)).view(
            len(x), self.kv_heads, -1
        )
        q, k, v = fused.transpose(0, 1).chunk(3, dim=-1)
        return q, k, v

    def finish(self, layer: int, x: torch.Tensor, mixed: torch.Tensor) -> torch.Tensor:
        block = self._decoder.layers[layer]
        y = x + block.attention.dense(mixed)
        return y + block.mlp(
            block.post_attention_layernorm(x if self._model.config.use_parallel_residual else y)
        )

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self._model.lm_head(self._decoder.final_layer_norm(x))


LLAMAS = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "olmoe")
PLAIN: dict[str, Callable[[PreTrainedModel], PlainModel]] = {
    **dict.fromkeys(LLAMAS, PlainLlama),
    "opt": PlainOPT,
    "gpt_neox": PlainNeoX,
    "gpt_oss": PlainGptOss,
}


def plain_model(model: PreTrainedModel) -> PlainModel:
    return PLAIN[model.config.model_type](model)
