"""Convert a Hugging Face folder without a tokenizer for llama.cpp: convert.py FOLDER TARGET.gguf bf16|q8_0.

LLaMA and GPT-NeoX with plain rotary embeddings. llama.cpp's own converter refuses a folder without a tokenizer; GGUF
has a vocabulary of none, to which token ids are given as they are. Matrices keep their bf16 (or become 8-bit blocks of
32, as llama.cpp's own Q8_0); vectors become float32, as llama.cpp wants them.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from contract import StoredTensor, stored_tensors

LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)$")
NAMES: dict[str, dict[str, str]] = {
    "llama": {
        "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    },
    "gpt_neox": {
        "input_layernorm": "attn_norm", "attention.query_key_value": "attn_qkv", "attention.dense": "attn_output",
        "post_attention_layernorm": "ffn_norm", "mlp.dense_h_to_4h": "ffn_up", "mlp.dense_4h_to_h": "ffn_down",
        "gpt_neox.embed_in": "token_embd", "gpt_neox.final_layer_norm": "output_norm", "embed_out": "output",
    },
}  # fmt: skip


def main() -> int:
    source, target, kind = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    config = json.loads((source / "config.json").read_text())
    family = config["model_type"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind_of_rope = rope.get("rope_type", rope.get("type", "default"))
    if family not in NAMES or kind_of_rope != "default":
        print(f"llama.cpp: not converted here: model_type {family}, rope_type {kind_of_rope}", file=sys.stderr)
        return 2
    from gguf import GGUFWriter

    half = target.with_suffix(".part")
    writer = GGUFWriter(half, family.replace("_", ""))
    _describe(writer, config)
    for tensor in stored_tensors(sorted(source.glob("*.safetensors"))):
        for name, values in _converted(tensor, family, config):
            _add(writer, name, values, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    half.rename(target)
    return 0


def _describe(writer: Any, config: dict[str, Any]) -> None:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    width = config.get("head_dim") or hidden // heads
    writer.add_name("random weights")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    parameters = config.get("rope_parameters") or {}
    if config["model_type"] == "llama":
        writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
        writer.add_key_length(width)
        writer.add_value_length(width)
        writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
        writer.add_rope_freq_base(parameters.get("rope_theta") or config.get("rope_theta", 10000.0))
        writer.add_rope_dimension_count(width)
    else:
        writer.add_layer_norm_eps(config.get("layer_norm_eps", 1e-5))
        writer.add_parallel_residual(config.get("use_parallel_residual", True))
        share = parameters.get("partial_rotary_factor") or config.get("rotary_pct", 0.25)
        writer.add_rope_dimension_count(int(share * width))


def _converted(
    tensor: StoredTensor, family: str, config: dict[str, Any]
) -> Iterator[tuple[str, np.ndarray[Any, np.dtype[np.uint16]]]]:
    """The tensor's name in GGUF and its bf16 values as bits, in the order that llama.cpp expects."""
    count = (tensor.end - tensor.start) // 2
    if count != int(np.prod(tensor.shape)):
        raise SystemExit(f"{tensor.path}: {tensor.name} is not in bf16")
    bits = np.memmap(tensor.path, np.uint16, "r", tensor.start, tuple(tensor.shape))
    found = LAYER.search(tensor.name)
    if found is None:
        name, kind = tensor.name.rsplit(".", 1)
        yield f"{NAMES[family][name]}.{kind}", bits
        return
    layer, role, kind = found.groups()
    name = NAMES[family].get(role)
    if name is None:  # buffers of older checkpoints
        return
    heads = config["num_attention_heads"]
    if name == "attn_k":
        heads = config.get("num_key_value_heads") or heads
    if name in ("attn_q", "attn_k"):  # llama.cpp turns neighbours, transformers halves
        bits = bits.reshape(heads, 2, len(bits) // heads // 2, -1).swapaxes(1, 2).reshape(bits.shape)
    elif name == "attn_qkv":  # a head's q, k and v side by side; llama.cpp wants all q first
        bits = bits.reshape(heads, 3, len(bits) // heads // 3, -1).swapaxes(0, 1).reshape(bits.shape)
    yield f"blk.{layer}.{name}.{kind}", bits


def _add(writer: Any, name: str, bits: np.ndarray[Any, np.dtype[np.uint16]], kind: str) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    if bits.ndim == 1:
        writer.add_tensor(name, _floats(bits))
    elif kind == "q8_0":
        writer.add_tensor(name, quantize(_floats(bits), GGMLQuantizationType.Q8_0), raw_dtype=GGMLQuantizationType.Q8_0)
    else:
        writer.add_tensor(name, bits.view(np.uint8), raw_dtype=GGMLQuantizationType.BF16)


def _floats(bits: np.ndarray[Any, np.dtype[np.uint16]]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


if __name__ == "__main__":
    sys.exit(main())
