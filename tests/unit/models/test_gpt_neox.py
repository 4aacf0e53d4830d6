"""GPT-NeoX configs: public shapes, what a parallel residual makes of a block, and what must be refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPTNeoXConfig
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXRotaryEmbedding

from flexgen_h2o.core.config import ModelSpec
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.models import built_in_names, built_in_spec, spec_from_folder

# hidden size, blocks, heads, vocabulary; parameters as in the table of the Pythia paper, embeddings counted twice
PUBLIC = {
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
RAW: dict[str, Any] = {
    "model_type": "gpt_neox", "vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 20,
    "max_position_embeddings": 64, "num_attention_heads": 2, "rotary_pct": 0.5,
}  # fmt: skip


def read(folder: Path, **changes: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps({**RAW, **changes}))
    return spec_from_folder("m", folder)[0]


def test_the_table_is_complete() -> None:
    ours = {name.removesuffix("-deduped") for name in built_in_names() if name.startswith("EleutherAI/")}
    assert ours == set(PUBLIC)


def test_public_shapes() -> None:
    for name in PUBLIC:
        found = built_in_spec(name)
        assert found is not None
        spec, config = found
        assert ((spec.hidden_size, spec.num_blocks, spec.num_heads, spec.vocab_size), spec.num_weights) == PUBLIC[name]
        assert (spec.max_positions, spec.ffn_size, spec.tied) == (2048, 4 * spec.hidden_size, False)
        assert spec.rotary is not None and spec.rotary.width == spec.head_dim // 4
        assert config["use_parallel_residual"]


@pytest.mark.parametrize("sep_layer", [True, False])
def test_a_parallel_block_is_one_layer(sep_layer: bool, tmp_path: Path) -> None:
    parallel, sequential = read(tmp_path), read(tmp_path, use_parallel_residual=False)
    assert [layer.kind for layer in parallel.layers(sep_layer).layers] == ["embedding", "block", "block", "head"]
    assert len(sequential.layers(sep_layer).layers) == (6 if sep_layer else 4)
    assert parallel.num_weights == sequential.num_weights


@pytest.mark.parametrize(
    "changes",
    [{}, {"rotary_pct": 1.0, "rotary_emb_base": 500}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}],
    ids=str,
)
def test_frequencies_are_those_of_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    spec, theirs = read(tmp_path, **changes), GPTNeoXRotaryEmbedding(GPTNeoXConfig.from_pretrained(tmp_path))
    assert spec.rotary is not None
    assert torch.equal(torch.tensor(spec.rotary.frequencies), theirs.inv_freq)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": -2}, "hidden_size"),
        ({"num_attention_heads": 5}, "hidden size is not divisible"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers: 1000000"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps: 0.0"),
        ({"hidden_act": "relu2"}, "hidden_act 'relu2' is not one of"),
        ({"rotary_pct": 0.0}, "rope_parameters"),
        ({"rotary_pct": 2.0}, "rope_parameters"),
        ({"rope_scaling": {"rope_type": "nonsense"}}, "rope_type 'nonsense' is not supported"),
    ],
)
def test_a_bad_config_is_refused_by_file_and_field(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        read(tmp_path, **changes)
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ") and "\n" not in str(caught.value)
