"""Convert a Hugging Face folder without a tokenizer for llama.cpp: convert.py FOLDER TARGET.gguf
bf16|q8_0.

LLaMA, Qwen3-MoE and OLMoE with plain rotary embeddings and random weights: rows keep their order,
where llama.cpp's own converter turns those of q and k, which takes no time when they are used. That
converter refuses a folder without a tokenizer; GGUF has a vocabulary of none, to which token ids
are given as they are. Matrices keep their bf16 (or become 8-bit blocks of 32, as llama.cpp's own
Q8_0); vectors and routers become float32, as llama.cpp wants them. One tensor is in memory at a
time.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.append(str(Path(__file__).resolve().parents[1]))

from contract import StoredTensor, stored_tensors

Bits = np.ndarray[Any, np.dtype[np.uint16]]
# What goes into a file under a name: its shape, and what reads its bf16 values as bits.
Source = tuple[str, tuple[int, ...], Callable[[], Bits]]
LAYER = re.compile(r"layers\.(\d+)\.(.+)\.(weight|bias)$")
EXPERT = re.compile(r"mlp\.experts\.(\d+)\.(\w+)$")
_LLAMA = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_MIXTURE = {
    **_LLAMA,
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
}
NAMES: dict[str, dict[str, str]] = {
    "llama": _LLAMA,
    "qwen3_moe": _MIXTURE,
    "olmoe": _MIXTURE,
}


def main() -> int:
    source = Path(sys.argv[1])
    target = Path(sys.argv[2])
    kind = sys.argv[3]
    config = json.loads((source / "config.json").read_text())
    family = config["model_type"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind_of_rope = rope.get("rope_type", rope.get("type", "default"))
    if family not in NAMES or kind_of_rope != "default":
        print(
            f"llama.cpp: not converted here: model_type {family}, rope_type {kind_of_rope}",
            file=sys.stderr,
        )
        return 2
    from gguf import GGUFWriter

    half = target.with_suffix(".part")
    writer = GGUFWriter(half, family.replace("_", ""))
    _describe(writer, config)
    sources = list(_sources(stored_tensors(sorted(source.glob("*.safetensors"))), family))
    for name, shape, _ in sources:
        _announce(writer, name, shape, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape, read in sources:
        writer.write_tensor_data(_values(name, shape, read(), kind))
    writer.close()
    half.rename(target)
    return 0


def _describe(writer: Any, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    hidden = config["hidden_size"]
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
    experts = config.get("num_experts") or config.get("num_local_experts")
    if experts:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(
            config.get("moe_intermediate_size", config["intermediate_size"])
        )
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    writer.add_rope_freq_base(parameters.get("rope_theta") or config.get("rope_theta", 10000.0))
    writer.add_rope_dimension_count(width)


def _sources(tensors: Iterator[StoredTensor], family: str) -> Iterator[Source]:
    """Tensors by their names in GGUF; the experts of a layer as one."""
    experts: dict[str, dict[int, StoredTensor]] = {}
    for tensor in tensors:
        if tensor.end - tensor.start != 2 * int(np.prod(tensor.shape)):
            raise SystemExit(f"{tensor.path}: {tensor.name} is not in bf16")
        found = LAYER.search(tensor.name)
        if found is None:
            name, kind = tensor.name.rsplit(".", 1)
            yield f"{NAMES[family][name]}.{kind}", tuple(tensor.shape), partial(_bits, tensor)
            continue
        layer, role, kind = found.groups()
        expert = EXPERT.search(role)
        name = NAMES[family].get(expert[2] if expert else role, "")
        full = f"blk.{layer}.{name}.{kind}"
        if expert:
            experts.setdefault(full, {})[int(expert[1])] = tensor
        elif name:  # not buffers of older checkpoints
            yield full, tuple(tensor.shape), partial(_bits, tensor)
    for full, each in experts.items():
        ordered = [each[i] for i in range(len(each))]
        yield full, (len(each), *ordered[0].shape), partial(_stacked, ordered)


def _bits(tensor: StoredTensor) -> Bits:
    return np.memmap(tensor.path, np.uint16, "r", tensor.start, tuple(tensor.shape))


def _stacked(tensors: list[StoredTensor]) -> Bits:
    return np.stack([_bits(tensor) for tensor in tensors])


def _announce(writer: Any, name: str, shape: tuple[int, ...], kind: str) -> None:
    from gguf import GGMLQuantizationType
    from gguf.quants import quant_shape_to_byte_shape

    if _stays_float(name, shape):
        writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * int(np.prod(shape)))
        return
    dtype = GGMLQuantizationType.Q8_0 if kind == "q8_0" else GGMLQuantizationType.BF16
    stored = quant_shape_to_byte_shape(shape, dtype)
    writer.add_tensor_info(name, stored, np.dtype(np.uint8), int(np.prod(stored)), raw_dtype=dtype)


def _values(name: str, shape: tuple[int, ...], bits: Bits, kind: str) -> np.ndarray[Any, Any]:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    if _stays_float(name, shape):
        return _floats(bits)
    if kind == "q8_0":
        found: np.ndarray[Any, Any] = quantize(_floats(bits), GGMLQuantizationType.Q8_0)
        return found
    return np.ascontiguousarray(bits).view(np.uint8)


def _stays_float(name: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 1 or "ffn_gate_inp" in name


def _floats(bits: Bits) -> np.ndarray[Any, np.dtype[np.float32]]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


if __name__ == "__main__":
    sys.exit(main())
