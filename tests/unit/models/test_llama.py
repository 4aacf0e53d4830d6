"""LLaMA configs: public shapes, the frequencies of every rope type, biases, windows, and what must be refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from flexgen_h2o.core.config import ModelSpec
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.engine.memory_plan import BlockShape, workspace_sizes
from flexgen_h2o.models import built_in_names, built_in_spec, spec_from_config, spec_from_folder
from flexgen_h2o.models.layers import ROPE_TYPES

# hidden size, blocks, heads, kv-heads, head width, MLP width, vocabulary, positions; parameters as published
PUBLIC = {
    "meta-llama/Llama-2-7b-hf": ((4096, 32, 32, 32, 128, 11008, 32000, 4096), 6_738_415_616),
    "meta-llama/Llama-2-13b-hf": ((5120, 40, 40, 40, 128, 13824, 32000, 4096), 13_015_864_320),
    "meta-llama/Llama-2-70b-hf": ((8192, 80, 64, 8, 128, 28672, 32000, 4096), 68_976_648_192),
    "meta-llama/Meta-Llama-3-8B": ((4096, 32, 32, 8, 128, 14336, 128256, 8192), 8_030_261_248),
    "meta-llama/Meta-Llama-3-70B": ((8192, 80, 64, 8, 128, 28672, 128256, 8192), 70_553_706_496),
    "meta-llama/Llama-3.1-8B": ((4096, 32, 32, 8, 128, 14336, 128256, 131072), 8_030_261_248),
    "meta-llama/Llama-3.1-70B": ((8192, 80, 64, 8, 128, 28672, 128256, 131072), 70_553_706_496),
    "meta-llama/Llama-3.2-1B": ((2048, 16, 32, 8, 64, 8192, 128256, 131072), 1_235_814_400),
    "meta-llama/Llama-3.2-3B": ((3072, 28, 24, 8, 128, 8192, 128256, 131072), 3_212_749_824),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": ((2048, 22, 32, 4, 64, 5632, 32000, 2048), 1_100_048_384),
    "mistralai/Mistral-7B-v0.1": ((4096, 32, 32, 8, 128, 14336, 32000, 4096), 7_241_732_096),
    "mistralai/Mistral-7B-v0.3": ((4096, 32, 32, 8, 128, 14336, 32768, 32768), 7_248_023_552),
}
CHAT = {f"meta-llama/Llama-2-{size}-chat-hf": f"meta-llama/Llama-2-{size}-hf" for size in ("7b", "13b", "70b")}

RAW: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 20,
    "max_position_embeddings": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "linear in older words": {"rope_scaling": {"type": "linear", "factor": 2.5}},
    "dynamic": {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
    "llama3": {"rope_scaling": LLAMA_3, "rope_theta": 500000.0},
    "yarn": {"rope_scaling": YARN},
    "yarn with its own scaling": {"rope_scaling": {**YARN, "attention_factor": 1.5, "beta_fast": 16.0}},
}


def read(folder: Path, **changes: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps({**RAW, **changes}))
    return spec_from_folder("m", folder)[0]


def test_the_table_is_complete() -> None:
    ours = {name for name in built_in_names() if name.split("/")[0] in ("meta-llama", "mistralai", "TinyLlama")}
    assert ours == {*PUBLIC, *CHAT}


def test_public_shapes() -> None:
    for name in PUBLIC:
        found = built_in_spec(name.lower())
        assert found is not None and found == built_in_spec(name.split("/")[1])
        spec, config = found
        sizes = (spec.hidden_size, spec.num_blocks, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.ffn_size)
        assert ((*sizes, spec.vocab_size, spec.max_positions), spec.num_weights) == PUBLIC[name]
        assert (spec.name, spec.tied, spec.option("eps")) == (name, "3.2" in name, 1e-5)
        assert spec_from_config(name, config, "table") == spec


def test_chat_models_have_the_shape_of_the_others() -> None:
    for name in CHAT:
        (chat, _), (plain, _) = (built_in_spec(n) or pytest.fail(n) for n in (name, CHAT[name]))
        assert chat == plain.__class__(**{**vars(plain), "name": name})


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    spec = read(tmp_path, **ROPES[kind])
    theirs = LlamaRotaryEmbedding(LlamaConfig.from_pretrained(tmp_path))
    assert spec.rotary is not None and spec.rotary.width == spec.head_dim
    assert torch.equal(torch.tensor(spec.rotary.frequencies), theirs.inv_freq)
    assert spec.rotary.scaling == theirs.attention_scaling
    assert (spec.rotary == read(tmp_path).rotary) is (kind in ("default", "dynamic"))
    assert theirs.rope_type in ROPE_TYPES


def test_biases(tmp_path: Path) -> None:
    def biased(**changes: Any) -> set[str]:
        spec = read(tmp_path, **changes)
        return {t.role.split(".")[0][0] for t in spec.attention[1] + spec.mlp[0] if t.role.endswith("bias")}

    assert biased() == set() == biased(model_type="mistral")
    assert biased(attention_bias=True) == set("qkvo")
    assert biased(mlp_bias=True) == set("gud")
    assert biased(model_type="qwen2") == set("qkv")


@pytest.mark.parametrize(
    ("changes", "positions"),
    [
        ({"model_type": "mistral", "sliding_window": None}, 64),
        ({"model_type": "mistral", "sliding_window": 100}, 64),
        ({"model_type": "mistral", "sliding_window": 16}, 16),
        ({"model_type": "qwen2", "sliding_window": 16}, 64),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True}, 16),
    ],
)
def test_positions_end_with_the_sliding_window(changes: dict[str, Any], positions: int, tmp_path: Path) -> None:
    assert read(tmp_path, **changes).max_positions == positions


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_hidden_layers": 10**6}, "num_hidden_layers: 1000000"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim.*7"),
        ({"hidden_size": 22, "model_type": "qwen2"}, "head_dim 5 is odd"),
        ({"hidden_size": 26}, "hidden size .26. is not a multiple"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps: 0.0"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window: 0"),
        ({"rope_scaling": {"rope_type": "nonsense"}}, "rope_type 'nonsense' is not supported .known: default"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, "not usable with rope_type 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "factor"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.34}},
            "turn 2 numbers of a head of 6",
        ),
        ({"rope_theta": -1.0}, "rope_type 'default' with these values"),
    ],
)
def test_a_bad_config_is_refused_by_file_and_field(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        read(tmp_path, **changes)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ") and "\n" not in str(caught.value)


def test_a_gated_mlp_has_two_wide_buffers(tmp_path: Path) -> None:
    spec, shape = read(tmp_path), BlockShape(rows=2, micro_batches=1, tokens=9, slots=(9, 9))
    sizes = workspace_sizes(spec, shape, 4)
    assert sizes["gate"] >= 9 * spec.ffn_size * 4 and sizes["k"] == sizes["v"] < sizes["q"]
