"""Reading configs: published sizes, rope types, windows, folders of transformers, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import ModelSpec
from flexgen_h2o.models import (
    built_in_spec,
    spec_from_config,
    spec_from_folder,
)
from flexgen_h2o.models.load import find_spec
from tests.parity.cases import BASES


def read(folder: Path, base: str = "opt", **changes: Any) -> ModelSpec:
    """The spec of a folder with the small config of a family, changed."""
    (folder / "config.json").write_text(json.dumps({**BASES[base], **changes}))
    return spec_from_folder("m", folder)[0]


# ---- the tables of public shapes

# Parameters as published, or by the published sizes (OPT, Galactica). Those of Pythia count
# embeddings twice.
PUBLISHED = {
    "facebook/opt-125m": 125_239_296,
    "facebook/opt-350m": 331_196_416,
    "facebook/opt-1.3b": 1_315_758_080,
    "facebook/opt-2.7b": 2_651_596_800,
    "facebook/opt-6.7b": 6_658_473_984,
    "facebook/opt-13b": 12_853_473_280,
    "facebook/opt-30b": 29_974_540_288,
    "facebook/opt-66b": 65_719_701_504,
    "facebook/opt-175b": 174_604_468_224,
    "facebook/opt-iml-1.3b": 1_315_758_080,
    "facebook/opt-iml-max-1.3b": 1_315_758_080,
    "facebook/opt-iml-30b": 29_974_540_288,
    "facebook/opt-iml-max-30b": 29_974_540_288,
    "facebook/galactica-125m": 124_947_456,
    "facebook/galactica-1.3b": 1_314_758_656,
    "facebook/galactica-6.7b": 6_656_180_224,
    "facebook/galactica-30b": 29_969_494_016,
    "facebook/galactica-120b": 121_332_899_840,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Meta-Llama-3-8B": 8_030_261_248,
    "meta-llama/Meta-Llama-3-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-1.7B": 1_720_574_976,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": 30_532_122_624,
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": 46_702_792_704,
    "mistralai/Mixtral-8x22B-v0.1": 140_630_071_296,
    "allenai/OLMoE-1B-7B-0924": 6_919_161_856,
    "openai/gpt-oss-20b": 20_914_757_184,
    "openai/gpt-oss-120b": 116_829_156_672,
    "allenai/OLMoE-1B-7B-0924-Instruct": 6_919_161_856,
    "EleutherAI/gpt-neox-20b": 20_554_567_680,
    "EleutherAI/pythia-70m": 70_426_624,
    "EleutherAI/pythia-160m": 162_322_944,
    "EleutherAI/pythia-410m": 405_334_016,
    "EleutherAI/pythia-1b": 1_011_781_632,
    "EleutherAI/pythia-1.4b": 1_414_647_808,
    "EleutherAI/pythia-2.8b": 2_775_208_960,
    "EleutherAI/pythia-6.9b": 6_857_302_016,
    "EleutherAI/pythia-12b": 11_846_072_320,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_public_models_have_their_published_size(name: str) -> None:
    found = built_in_spec(name)
    assert found is not None and found[0].name == name
    assert found[0].num_weights == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "positions", "kv_heads", "head_dim", "tied"),
    [
        ("meta-llama/Llama-3.2-1B", 131072, 8, 64, True),
        ("openai/gpt-oss-20b", 131072, 8, 64, False),
        ("EleutherAI/pythia-1b", 2048, 8, 256, False),
    ],
)
def test_public_models_have_their_published_shape(
    name: str, positions: int, kv_heads: int, head_dim: int, tied: bool
) -> None:
    built_in = built_in_spec(name)
    assert built_in is not None and built_in == built_in_spec(name.split("/")[1].upper())
    spec, config = built_in
    assert spec == spec_from_config(name, config, "table")
    found = (spec.max_positions, spec.num_kv_heads, spec.head_dim, spec.tied)
    assert found == (positions, kv_heads, head_dim, tied)


# ---- what a config says


def test_a_folder_saved_by_transformers_gives_the_spec_of_its_config(tmp_path: Path) -> None:
    about = {**BASES["opt"], "eos_token_id": 7, "bos_token_id": 5, "activation_function": "gelu"}
    config = AutoConfig.for_model(**about)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    spec, found = spec_from_folder("mine", tmp_path)
    assert spec == spec_from_config("mine", config.to_dict(), "here")
    assert (spec.name, spec.eos_token_ids, spec.bos_token_id) == ("mine", (7,), 5)
    assert spec.num_blocks == 2 and spec.option("activation") == "gelu"
    assert found["activation_function"] == "gelu"


@pytest.mark.parametrize("more", [0, 1])
def test_a_head_with_other_numbers_than_the_table_is_used(tmp_path: Path, more: int) -> None:
    """As in transformers, whatever the config ties."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**BASES["opt"]))
    model.save_pretrained(tmp_path)
    head = model.get_input_embeddings().weight.detach() + more
    stored = {**load_file(tmp_path / "model.safetensors"), "lm_head.weight": head}
    save_file(stored, tmp_path / "model.safetensors")
    assert find_spec(str(tmp_path), None).tied is not bool(more)


@pytest.mark.parametrize("eos", [None, 3, [3, 4], 0])
def test_end_tokens_in_every_spelling(eos: Any, tmp_path: Path) -> None:
    """Those of a generation_config.json alone count, if there is one, and jobs know by the config
    that rows would end elsewhere."""
    ids = tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,)
    assert read(tmp_path, eos_token_id=eos).eos_token_ids == ids
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    spec = read(tmp_path, eos_token_id=7)
    again, config = spec_from_folder("m", tmp_path)
    assert spec is again and spec.eos_token_ids == ids
    assert config["eos_token_id"] == list(ids)


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
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.5}}),
        ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}),
        ("llama", {"rope_scaling": LLAMA_3, "rope_theta": 500000.0}),
        ("llama", {"rope_scaling": {**YARN, "attention_factor": 1.5, "beta_fast": 16.0}}),
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


WINDOW = {"sliding_window": 16, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "llama", "sliding_window": 16}, ()),
        ({"model_type": "mistral", "sliding_window": 64}, ()),  # of 64 positions: it hides none
        ({"model_type": "mistral", "sliding_window": 63}, (63, 63)),
        ({"model_type": "qwen2", **WINDOW}, ()),
        ({"model_type": "qwen2", **WINDOW, "max_window_layers": 1}, (None, 16)),
        ({"model_type": "qwen3", "sliding_window": 16}, ()),
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
    kinds = [layer.kind for layer in parallel.layers(sep_layer).layers]
    assert kinds == ["embedding", "block", "block", "head"]
    assert len(sequential.layers(sep_layer).layers) == (6 if sep_layer else 4)
    assert parallel.num_weights == sequential.num_weights


def test_layers_without_experts(tmp_path: Path) -> None:
    spec = read(
        tmp_path, "qwen3_moe", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[1, 9]
    )
    assert [bool(spec.experts_of(i)) for i in range(6)] == [False, False, False, True, False, True]


# ---- what is refused


@pytest.mark.parametrize(
    ("base", "changes", "says"),
    [
        ("opt", {"model_type": "bloom"}, "model_type 'bloom' is not supported .known: .*opt"),
        ("opt", {"hidden_size": 18}, "hidden_size 18 is not a multiple of num_attention_heads 4"),
        ("opt", {"max_position_embeddings": 10**400}, "max_position_embeddings: 10+ must be"),
        ("opt", {"activation_function": "x" * 10**4, "hidden_size": "y" * 10**4}, "hidden_size"),
        ("llama", {"num_key_value_heads": 4}, "6 is not a multiple of num_key_value_heads 4"),
        ("llama", {"rms_norm_eps": 0.0}, "rms_norm_eps: 0.0"),
        ("llama", {"model_type": "mistral", "sliding_window": 0}, "sliding_window: 0"),
        ("llama", {"rope_scaling": {"rope_type": "nonsense"}}, "'nonsense' is not supported"),
        ("gpt_oss", {"num_experts_per_tok": 7}, "num_experts_per_tok: 7"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window: None"),
        ("gpt_neox", {"rotary_pct": 2.0}, "rope_parameters"),
    ],
)
def test_a_bad_config_is_refused_by_file_and_field(
    tmp_path: Path, base: str, changes: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        read(tmp_path, base, **changes)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'config.json'}: ")
    assert "\n" not in message and len(message) < 700


@pytest.mark.parametrize(
    "raw",
    [b"[]", b"\xff", b"[" * 100_000, b'{"model_type": "opt", "vocab_size": ' + b"9" * 5000 + b"}"],
    ids=len,
)
def test_no_json_object_that_python_can_hold_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(UsageError, match=r"config\.json: "):
        spec_from_folder("m", tmp_path)
