"""Reading configs: the table of public shapes, folders of transformers, and clear ends for what is not supported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import OPTConfig, OPTForCausalLM

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.models import built_in_names, built_in_spec, spec_from_config, spec_from_folder

RAW: dict[str, Any] = {
    "model_type": "opt", "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "ffn_dim": 24,
    "max_position_embeddings": 20, "num_attention_heads": 4, "word_embed_proj_dim": 16,
}  # fmt: skip

# hidden size, blocks, heads, ffn, word embedding width, vocabulary: the tables of the OPT and Galactica papers
PUBLIC = {
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


def write(folder: Path, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**RAW, **changes}))
    return folder


# ---- the table of public shapes


def test_the_table_is_complete() -> None:
    assert sorted(name for name in built_in_names() if name.startswith("facebook/")) == sorted(PUBLIC)
    assert len({name.split("/")[1].lower() for name in built_in_names()}) == len(built_in_names())


def test_public_shapes() -> None:
    for name in PUBLIC:
        found = built_in_spec(name)
        assert found is not None and found == built_in_spec(name.split("/")[1].upper())
        spec, config = found
        narrow = spec.embedding[0].shape[1]
        assert (spec.hidden_size, spec.num_blocks, spec.num_heads, spec.ffn_size, narrow, spec.vocab_size) == PUBLIC[
            name
        ]
        assert (spec.name, spec.max_positions, spec.tied, spec.num_kv_heads) == (name, 2048, True, spec.num_heads)
        assert spec.head_dim * spec.num_heads == spec.hidden_size
        galactica, post_norm = "galactica" in name, name.endswith("350m")
        has_bias = any(t.role.endswith("q_proj.bias") for t in spec.attention[0])
        assert (spec.option("activation"), has_bias) == (("gelu", False) if galactica else ("relu", True))
        assert spec.option("pre_norm") is not post_norm
        assert spec_from_config(name, config, "table") == spec


@pytest.mark.parametrize("name", ["opt-9b", "someone/opt-125m"])
def test_what_is_not_in_the_table_is_none(name: str) -> None:
    assert built_in_spec(name) is None


# ---- folders


def test_a_folder_saved_by_transformers_gives_the_spec_of_its_config(tmp_path: Path) -> None:
    config = OPTConfig(**RAW, eos_token_id=7, bos_token_id=5, activation_function="gelu")
    OPTForCausalLM(config).save_pretrained(tmp_path)
    spec, read = spec_from_folder("mine", tmp_path)
    assert spec == spec_from_config("mine", config.to_dict(), "here")
    assert (spec.name, spec.eos_token_ids, spec.bos_token_id, spec.num_blocks) == ("mine", (7,), 5, 2)
    assert spec.option("activation") == "gelu" == read["activation_function"]


@pytest.mark.parametrize(("eos", "ids"), [(None, ()), (3, (3,)), ([3, 4], (3, 4)), (0, (0,))])
def test_end_tokens_in_every_spelling(tmp_path: Path, eos: object, ids: tuple[int, ...]) -> None:
    assert spec_from_folder("m", write(tmp_path, eos_token_id=eos))[0].eos_token_ids == ids


def test_labels_of_a_classifier_do_not_count(tmp_path: Path) -> None:
    """A damaged number of them would keep transformers busy for minutes."""
    labels = {str(i): "x" for i in range(50)}
    spec, config = spec_from_folder("m", write(tmp_path, num_labels=5000, id2label=labels, label2id={}))
    assert spec == spec_from_folder("m", write(tmp_path))[0]
    assert len(config.get("id2label") or {}) < 50


def test_defaults_are_transformers_own(tmp_path: Path) -> None:
    spec, config = spec_from_folder("m", write(tmp_path))
    theirs = OPTConfig()
    assert (config["activation_function"], config["enable_bias"]) == (theirs.activation_function, theirs.enable_bias)
    assert spec.tied and spec.option("pre_norm") and spec.option("final_norm")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "bloom"}, "model_type 'bloom' is not supported .known: .*opt"),
        ({"hidden_size": 0}, "hidden_size: 0"),
        ({"hidden_size": 18}, "hidden_size 18 is not a multiple of num_attention_heads 4"),
        ({"num_hidden_layers": -1}, "num_hidden_layers: -1"),
        ({"max_position_embeddings": 10**400}, "max_position_embeddings: 10+ must be between"),
        ({"activation_function": "swish"}, "activation_function 'swish' is not one of"),
        ({"eos_token_id": "x"}, "eos_token_id"),
    ],
)
def test_a_bad_config_is_refused_by_file_and_field(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        spec_from_folder("m", write(tmp_path, **changes))
    assert str(caught.value).startswith(f"{tmp_path / 'config.json'}: ")


def test_a_model_type_that_is_no_string_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        spec_from_folder("m", write(tmp_path, model_type=["opt"]))


@pytest.mark.parametrize("raw", [b"[]", b"\xff"])
def test_no_json_object_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "config.json").write_bytes(raw)
    with pytest.raises(UsageError, match=r"config\.json: "):
        spec_from_folder("m", tmp_path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"model_type": "opt", "vocab_size": ' + "9" * 5000 + "}"])
def test_json_that_python_cannot_hold_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UsageError, match=r"config\.json"):
        spec_from_folder("m", tmp_path)
