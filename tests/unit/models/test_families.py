"""Reading configs: public shapes, rope types, biases, windows, folders of transformers, and what
must be refused."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, OPTConfig, OPTForCausalLM
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from flexgen_h2o.checkpoint.formats import weight_format
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.models import (
    built_in_spec,
    moe,
    spec_from_config,
    spec_from_folder,
)

SMALL: dict[str, dict[str, Any]] = {
    "opt": {
        "vocab_size": 40,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "ffn_dim": 24,
        "max_position_embeddings": 20,
        "num_attention_heads": 4,
        "word_embed_proj_dim": 16,
    },
    "llama": {
        "vocab_size": 40,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "intermediate_size": 20,
        "max_position_embeddings": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "gpt_neox": {
        "vocab_size": 40,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "intermediate_size": 20,
        "max_position_embeddings": 64,
        "num_attention_heads": 2,
        "rotary_pct": 0.5,
    },
    "gpt_oss": {
        "vocab_size": 40,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "intermediate_size": 20,
        "num_local_experts": 4,
        "max_position_embeddings": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "sliding_window": 8,
    },
    "qwen3_moe": {
        "vocab_size": 40,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "intermediate_size": 20,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 8,
        "max_position_embeddings": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
    },
}


def read(folder: Path, base: str = "opt", **changes: Any) -> ModelSpec:
    """The spec of a folder with the small config of a family, changed."""
    (folder / "config.json").write_text(json.dumps({"model_type": base, **SMALL[base], **changes}))
    return spec_from_folder("m", folder)[0]


# ---- the tables of public shapes

# hidden size, blocks, heads, ffn, word embedding width, vocabulary: the tables of the OPT and
# Galactica papers
OPT = {
    "facebook/opt-125m": (768, 12, 12, 3072, 768, 50272),
    "facebook/opt-350m": (1024, 24, 16, 4096, 512, 50272),
    "facebook/opt-1.3b": (2048, 24, 32, 8192, 2048, 50272),
    "facebook/opt-2.7b": (2560, 32, 32, 10240, 2560, 50272),
    "facebook/opt-6.7b": (4096, 32, 32, 16384, 4096, 50272),
    "facebook/opt-13b": (5120, 40, 40, 20480, 5120, 50272),
    "facebook/opt-30b": (7168, 48, 56, 28672, 7168, 50272),
    "facebook/opt-66b": (9216, 64, 72, 36864, 9216, 50272),
    "facebook/opt-175b": (12288, 96, 96, 49152, 12288, 50272),
    "facebook/opt-iml-1.3b": (2048, 24, 32, 8192, 2048, 50272),
    "facebook/opt-iml-max-1.3b": (2048, 24, 32, 8192, 2048, 50272),
    "facebook/opt-iml-30b": (7168, 48, 56, 28672, 7168, 50272),
    "facebook/opt-iml-max-30b": (7168, 48, 56, 28672, 7168, 50272),
    "facebook/galactica-125m": (768, 12, 12, 3072, 768, 50000),
    "facebook/galactica-1.3b": (2048, 24, 32, 8192, 2048, 50000),
    "facebook/galactica-6.7b": (4096, 32, 32, 16384, 4096, 50000),
    "facebook/galactica-30b": (7168, 48, 56, 28672, 7168, 50000),
    "facebook/galactica-120b": (10240, 96, 80, 40960, 10240, 50000),
}
# hidden size, blocks, heads, kv-heads, head width, MLP width, vocabulary, positions; parameters as
# published
LLAMA = {
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
    "mistralai/Mistral-7B-v0.1": ((4096, 32, 32, 8, 128, 14336, 32000, 32768), 7_241_732_096),
    "mistralai/Mistral-7B-v0.3": ((4096, 32, 32, 8, 128, 14336, 32768, 32768), 7_248_023_552),
    "Qwen/Qwen3-0.6B": ((1024, 28, 16, 8, 128, 3072, 151936, 40960), 596_049_920),
    "Qwen/Qwen3-1.7B": ((2048, 28, 16, 8, 128, 6144, 151936, 40960), 1_720_574_976),
    "Qwen/Qwen3-4B": ((2560, 36, 32, 8, 128, 9728, 151936, 40960), 4_022_468_096),
    "Qwen/Qwen3-4B-Instruct-2507": ((2560, 36, 32, 8, 128, 9728, 151936, 262144), 4_022_468_096),
    "Qwen/Qwen3-8B": ((4096, 36, 32, 8, 128, 12288, 151936, 40960), 8_190_735_360),
    "Qwen/Qwen3-14B": ((5120, 40, 40, 8, 128, 17408, 151936, 40960), 14_768_307_200),
    "Qwen/Qwen3-32B": ((5120, 64, 64, 8, 128, 25600, 151936, 40960), 32_762_123_264),
}
# hidden size, blocks, heads, kv-heads, head width, width of an expert, vocabulary, positions,
# experts, those of a token
EXPERTS = {
    "Qwen/Qwen3-30B-A3B": ((2048, 48, 32, 4, 128, 768, 151936, 40960, 128, 8), 30_532_122_624),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": (
        (2048, 48, 32, 4, 128, 768, 151936, 262144, 128, 8),
        30_532_122_624,
    ),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": (
        (2048, 48, 32, 4, 128, 768, 151936, 262144, 128, 8),
        30_532_122_624,
    ),
    "Qwen/Qwen3-235B-A22B": ((4096, 94, 64, 4, 128, 1536, 151936, 40960, 128, 8), 235_093_634_560),
    "mistralai/Mixtral-8x7B-v0.1": (
        (4096, 32, 32, 8, 128, 14336, 32000, 32768, 8, 2),
        46_702_792_704,
    ),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": (
        (4096, 32, 32, 8, 128, 14336, 32000, 32768, 8, 2),
        46_702_792_704,
    ),
    "mistralai/Mixtral-8x22B-v0.1": (
        (6144, 56, 48, 8, 128, 16384, 32768, 65536, 8, 2),
        140_630_071_296,
    ),
    "allenai/OLMoE-1B-7B-0924": ((2048, 16, 16, 16, 128, 1024, 50304, 4096, 64, 8), 6_919_161_856),
    "openai/gpt-oss-20b": ((2880, 24, 64, 8, 64, 2880, 201088, 131072, 32, 4), 20_914_757_184),
    "openai/gpt-oss-120b": ((2880, 36, 64, 8, 64, 2880, 201088, 131072, 128, 4), 116_829_156_672),
    "allenai/OLMoE-1B-7B-0924-Instruct": (
        (2048, 16, 16, 16, 128, 1024, 50304, 4096, 64, 8),
        6_919_161_856,
    ),
}
TIED = re.compile(r"Llama-3\.2|Qwen3-(0\.6|1\.7|4)B")
CHAT = {
    f"meta-llama/Llama-2-{size}-chat-hf": f"meta-llama/Llama-2-{size}-hf"
    for size in ("7b", "13b", "70b")
}
# hidden size, blocks, heads, vocabulary; parameters as in the table of the Pythia paper, embeddings
# counted twice
NEOX = {
    "EleutherAI/gpt-neox-20b": ((6144, 44, 64, 50432), 20_554_567_680),
    "EleutherAI/pythia-70m": ((512, 6, 8, 50304), 70_426_624),
    "EleutherAI/pythia-160m": ((768, 12, 12, 50304), 162_322_944),
    "EleutherAI/pythia-410m": ((1024, 24, 16, 50304), 405_334_016),
    "EleutherAI/pythia-1b": ((2048, 16, 8, 50304), 1_011_781_632),
    "EleutherAI/pythia-1.4b": ((2048, 24, 16, 50304), 1_414_647_808),
    "EleutherAI/pythia-2.8b": ((2560, 32, 32, 50304), 2_775_208_960),
    "EleutherAI/pythia-6.9b": ((4096, 32, 32, 50432), 6_857_302_016),
    "EleutherAI/pythia-12b": ((5120, 36, 40, 50688), 11_846_072_320),
}


def public(name: str) -> ModelSpec:
    found = built_in_spec(name)
    assert found is not None and found == built_in_spec(name.split("/")[1].upper())
    assert found[0].name == name and spec_from_config(name, found[1], "table") == found[0]
    return found[0]


def test_public_opt_shapes() -> None:
    for name, sizes in OPT.items():
        spec = public(name)
        narrow = spec.embedding[0].shape[1]
        found = (
            spec.hidden_size,
            spec.num_blocks,
            spec.num_heads,
            spec.ffn_size,
            narrow,
            spec.vocab_size,
        )
        assert found == sizes
        assert (spec.max_positions, spec.tied, spec.num_kv_heads) == (2048, True, spec.num_heads)
        assert spec.head_dim * spec.num_heads == spec.hidden_size
        has_bias = any(t.role.endswith("q_proj.bias") for t in spec.attention[0])
        assert (spec.option("activation"), has_bias) == (
            ("gelu", False) if "galactica" in name else ("relu", True)
        )
        assert spec.option("pre_norm") is not name.endswith("350m")


def test_public_shapes_with_experts() -> None:
    for name, (sizes, weights) in EXPERTS.items():
        spec = public(name)
        assert spec.experts is not None
        found = (
            spec.hidden_size,
            spec.num_blocks,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
        )
        experts = (spec.experts.count, spec.experts.per_token)
        assert (
            *found,
            spec.experts.ffn_size,
            spec.vocab_size,
            spec.max_positions,
            *experts,
        ) == sizes
        assert spec.num_weights == weights


def test_public_gpt_oss_shapes() -> None:
    for size, blocks in (("20b", 24), ("120b", 36)):
        spec = public(f"openai/gpt-oss-{size}")
        assert spec.windows == (128, None) * (blocks // 2) and spec.eos_token_ids == (200002,)
        assert spec.quantization is not None and spec.quantization["quant_method"] == "mxfp4"
        assert spec.rotary is not None and spec.rotary.scaling == pytest.approx(
            0.1 * math.log(32) + 1
        )
        form = weight_format(spec, Policy(), 2)
        matrices = [t for t in spec.experts_of(0)[0] if len(t.shape) == 2]
        stored = sum(
            part.row_bytes * t.shape[0] for t in matrices for part in form.layout(t).stored
        )
        assert (
            stored == sum(t.numel for t in matrices) * 17 // 32
        )  # 4 bits each, and 8 for 32 of them


def test_public_llama_shapes() -> None:
    for name, (sizes, weights) in LLAMA.items():
        spec = public(name)
        found = (
            spec.hidden_size,
            spec.num_blocks,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.ffn_size,
        )
        assert ((*found, spec.vocab_size, spec.max_positions), spec.num_weights) == (sizes, weights)
        assert (spec.tied, spec.option("eps")) == (
            bool(TIED.search(name)),
            1e-6 if "Qwen3" in name else 1e-5,
        )
    assert all(public(chat) == replace(public(plain), name=chat) for chat, plain in CHAT.items())


def test_public_gpt_neox_shapes() -> None:
    for name, (sizes, weights) in NEOX.items():
        spec = public(name)
        found = (spec.hidden_size, spec.num_blocks, spec.num_heads, spec.vocab_size)
        assert (found, spec.num_weights) == (sizes, weights)
        assert (spec.max_positions, spec.ffn_size, spec.tied) == (2048, 4 * spec.hidden_size, False)
        assert spec.rotary is not None and spec.rotary.width == spec.head_dim // 4
        assert spec.option("parallel") and not any(spec.mlp)


# ---- what a config says


def test_a_folder_saved_by_transformers_gives_the_spec_of_its_config(tmp_path: Path) -> None:
    config = OPTConfig(**SMALL["opt"], eos_token_id=7, bos_token_id=5, activation_function="gelu")
    OPTForCausalLM(config).save_pretrained(tmp_path)
    spec, found = spec_from_folder("mine", tmp_path)
    assert spec == spec_from_config("mine", config.to_dict(), "here")
    assert (spec.name, spec.eos_token_ids, spec.bos_token_id, spec.num_blocks) == (
        "mine",
        (7,),
        5,
        2,
    )
    assert spec.option("activation") == "gelu" == found["activation_function"]


def test_end_tokens_in_every_spelling(tmp_path: Path) -> None:
    for eos, ids in ((None, ()), (3, (3,)), ([3, 4], (3, 4)), (0, (0,))):
        assert read(tmp_path, eos_token_id=eos).eos_token_ids == ids


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ('{"eos_token_id": [2, 7]}', (2, 7)),
        ('{"eos_token_id": 0}', (0,)),
        ('{"eos_token_id": []}', ()),
        ('{"eos_token_id": null}', (3,)),
        ("{}", (3,)),
    ],
)
def test_end_tokens_of_a_generation_config_come_first(
    tmp_path: Path, text: str, ids: tuple[int, ...]
) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    spec = read(tmp_path, eos_token_id=3)
    again, config = spec_from_folder("m", tmp_path)
    assert spec is again and spec.eos_token_ids == ids
    assert config["eos_token_id"] == (
        3 if ids == (3,) else list(ids)
    )  # jobs know by it that rows would end elsewhere


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA_3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ("llama", {}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.5}}),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        ("llama", {"rope_scaling": LLAMA_3, "rope_theta": 500000.0}),
        ("llama", {"rope_scaling": YARN}),
        ("llama", {"rope_scaling": {**YARN, "attention_factor": 1.5, "beta_fast": 16.0}}),
        ("gpt_neox", {}),
        ("gpt_neox", {"rotary_pct": 1.0, "rotary_emb_base": 500}),
        ("gpt_neox", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ],
)
def test_frequencies_are_those_of_transformers(
    base: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    rotary = read(tmp_path, base, **changes).rotary
    config = AutoConfig.from_pretrained(tmp_path)
    theirs = (LlamaRotaryEmbedding if base == "llama" else GPTNeoXRotaryEmbedding)(config)
    assert rotary is not None and torch.equal(torch.tensor(rotary.frequencies), theirs.inv_freq)
    assert rotary.scaling == theirs.attention_scaling


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "llama", "sliding_window": 16}, ()),
        ({"model_type": "mistral", "sliding_window": None}, ()),
        ({"model_type": "mistral", "sliding_window": 64}, ()),  # of 64 positions: it hides none
        ({"model_type": "mistral", "sliding_window": 63}, (63, 63)),
        ({"model_type": "qwen2", "sliding_window": 16}, ()),
        ({"model_type": "qwen2", "sliding_window": 16, "use_sliding_window": True}, ()),
        (
            {
                "model_type": "qwen2",
                "sliding_window": 16,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (None, 16),
        ),
        ({"model_type": "qwen3", "sliding_window": 16}, ()),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 16,
                "use_sliding_window": True,
                "max_window_layers": 0,
            },
            (16, 16),
        ),
    ],
)
def test_windows_of_blocks(
    changes: dict[str, Any], windows: tuple[int | None, ...], tmp_path: Path
) -> None:
    spec = read(tmp_path, "llama", **changes)
    assert spec.windows == windows and spec.max_positions == 64
    assert spec.stage(range(1, 2)).windows == windows[1:]


@pytest.mark.parametrize("sep_layer", [True, False])
def test_a_parallel_block_is_one_layer(sep_layer: bool, tmp_path: Path) -> None:
    parallel, sequential = (
        read(tmp_path, "gpt_neox", use_parallel_residual=p) for p in (True, False)
    )
    assert [layer.kind for layer in parallel.layers(sep_layer).layers] == [
        "embedding",
        "block",
        "block",
        "head",
    ]
    assert len(sequential.layers(sep_layer).layers) == (6 if sep_layer else 4)
    assert parallel.num_weights == sequential.num_weights


@pytest.mark.timeout(20)  # each of 4,096 layers looked for in such a list would take a minute
def test_layers_without_experts(tmp_path: Path) -> None:
    spec = read(
        tmp_path, "qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[1, 9]
    )
    assert [bool(spec.experts_of(i)) for i in range(6)] == [False, False, False, True, False, True]
    config = {"num_hidden_layers": 4096, "mlp_only_layers": [*range(10**6, 2 * 10**6), 7]}
    assert moe._dense_blocks(config) == {7}


# ---- what is refused


@pytest.mark.parametrize(
    ("base", "changes", "says"),
    [
        ("opt", {"model_type": "bloom"}, "model_type 'bloom' is not supported .known: .*opt"),
        ("opt", {"model_type": ["opt"]}, "model_type"),
        ("opt", {"hidden_size": 0}, "hidden_size: 0"),
        ("opt", {"hidden_size": 18}, "hidden_size 18 is not a multiple of num_attention_heads 4"),
        (
            "opt",
            {"max_position_embeddings": 10**400},
            "max_position_embeddings: 10+ must be between",
        ),
        ("opt", {"activation_function": "swish"}, "activation_function 'swish' is not one of"),
        ("opt", {"eos_token_id": "x"}, "eos_token_id"),
        ("opt", {"eos_token_id": 10**30}, "eos_token_id: 10+ must be between"),
        ("opt", {"activation_function": "x" * 10**4, "hidden_size": "y" * 10**4}, "hidden_size"),
        ("llama", {"num_hidden_layers": 10**6}, "num_hidden_layers: 1000000"),
        (
            "llama",
            {"num_key_value_heads": 3},
            "num_attention_heads 4 is not a multiple of num_key_value_heads 3",
        ),
        ("llama", {"head_dim": 7}, "head_dim.*7"),
        ("llama", {"hidden_size": 22, "model_type": "qwen2"}, "head_dim 5 is odd"),
        ("llama", {"rms_norm_eps": 0.0}, "rms_norm_eps: 0.0"),
        ("llama", {"model_type": "mistral", "sliding_window": 0}, "sliding_window: 0"),
        (
            "llama",
            {"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]},
            "sliding_window: None, and layer_types has 'sliding_attention'",
        ),
        (
            "llama",
            {"model_type": "qwen3", "layer_types": ["full_attention", "linear_attention"]},
            "layer_types: 'linear_attention' is not full_attention or sliding_attention",
        ),
        (
            "llama",
            {"model_type": "mistral", "sliding_window": 3, "layer_types": ["full_attention"] * 2},
            "layer_types: mistral has sliding_attention in all 2 blocks",
        ),
        ("gpt_oss", {"num_experts_per_tok": 5}, "num_experts_per_tok: 5"),
        ("gpt_oss", {"num_local_experts": 0}, "num_local_experts: 0"),
        ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu_limit: 0"),
        ("gpt_oss", {"swiglu_alpha": "x"}, "swiglu_alpha"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window: None, and layer_types has"),
        (
            "llama",
            {"rope_scaling": {"rope_type": "nonsense"}},
            "rope_type 'nonsense' is not supported .known: default",
        ),
        (
            "llama",
            {"rope_scaling": {"rope_type": "linear", "factor": "x"}},
            "not usable with rope_type 'linear'",
        ),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "factor"),
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 100.0,
                    "partial_rotary_factor": 0.34,
                }
            },
            "turn 2 numbers of a head of 6",
        ),
        ("llama", {"rope_theta": -1.0}, "rope_type 'default' with these values"),
        ("gpt_neox", {"layer_norm_eps": 0.0}, "layer_norm_eps: 0.0"),
        ("gpt_neox", {"hidden_act": "relu2"}, "hidden_act 'relu2' is not one of"),
        ("gpt_neox", {"rotary_pct": 0.0}, "rope_parameters"),
        ("gpt_neox", {"rotary_pct": 2.0}, "rope_parameters"),
    ],
)
def test_a_bad_config_is_refused_by_file_and_field(
    tmp_path: Path, base: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        read(tmp_path, base, **changes)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ") and "\n" not in str(
        caught.value
    )
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize(
    "raw",
    [b"[]", b"\xff", b"[" * 100_000, b'{"model_type": "opt", "vocab_size": ' + b"9" * 5000 + b"}"],
    ids=len,
)
def test_no_json_object_that_python_can_hold_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(UsageError, match=r"config\.json: "):
        spec_from_folder("m", tmp_path)
