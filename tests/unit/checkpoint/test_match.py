"""A spec is held against the stored tensors: what is missing, of another shape, or not used.

tests/parity/test_layouts.py has names, prefixes, stacks and shards of all kinds.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flexgen_h2o.checkpoint import match, open_checkpoint, read_index, tied
from flexgen_h2o.checkpoint.tied import has_other_head
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.notes import say_once
from flexgen_h2o.models import spec_from_config

FC1 = "model.decoder.layers.1.fc1.weight"
TABLE = "model.decoder.embed_tokens.weight"
ONE = torch.zeros(1)


def opened(spec, tensors, folder: Path):
    save_file(tensors, folder / "model.safetensors")
    return match(spec, read_index(folder), folder)


def test_dtype_of_most_bytes(tmp_path: Path, spec, weights) -> None:
    mixed = {name: t.bfloat16() if t.dim() == 2 else t for name, t in weights.items()}
    assert opened(spec, mixed, tmp_path).dtype == "bfloat16"


BASE = FC1.removesuffix("weight")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({f"{BASE}other": ONE}, f"'{FC1}' is not in this checkpoint; give a folder whose weights"),
        ({FC1: torch.zeros(3, 5)}, f"model.safetensors: tensor '{FC1}' has shape (3, 5)"),
        ({FC1: torch.zeros(32, 16, dtype=torch.int8)}, f"tensor '{FC1}' is stored as I8"),
        ({f"{BASE}qweight": ONE}, "quantised (GPTQ or AWQ), and config.json has no"),
        ({FC1: ONE + 1, f"{FC1}.absmax": ONE}, f"'{FC1}' is quantised by bitsandbytes"),
        ({f"{BASE}lora_A.weight": ONE}, "holds a LoRA adapter, not a model; merge it"),
        ({f"language_model.{FC1}": ONE}, "rename the tensors, or save the language model"),
    ],
)
def test_what_does_not_belong_to_the_spec_comes_with_advice(
    tmp_path: Path, spec, weights, change: dict[str, torch.Tensor], says: str
) -> None:
    del weights[FC1]
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        opened(spec, weights | change, tmp_path)
    assert "\n" not in str(caught.value)


def test_a_tied_model_may_have_its_head_as_a_copy_only(
    tmp_path: Path, spec, weights, monkeypatch
) -> None:
    """transformers uses one that differs, whatever the config says."""
    monkeypatch.setattr(tied, "_PIECE_ROWS", 7)  # several pieces, and a last one
    name = "embed_out.weight"
    copy = weights[TABLE] = weights[TABLE].bfloat16()
    changed = copy.clone()
    changed[-1, -1] += 1
    heads = {
        False: (copy.clone(), copy.float(), copy.double()),  # in another dtype, too
        True: (changed, changed.double(), copy[1:].clone(), copy.to(torch.int32)),
    }
    for differs, some in heads.items():
        for head in some:
            save_file({**weights, name: head}, tmp_path / "model.safetensors")
            assert has_other_head(spec, tmp_path) is differs


def said_of(spec, tensors, folder: Path, capsys) -> list[str]:
    say_once.cache_clear()
    for _ in range(2):
        opened(spec, tensors, folder)
    return capsys.readouterr().err.splitlines()


def test_what_is_not_used_is_said_once(tmp_path: Path, spec, weights, capsys) -> None:
    """Not buffers of older versions, copies of a tied table, names of the metadata, or biases of
    zeros."""
    harmless = {
        "lm_head.weight": weights[TABLE].clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.0.attention.masked_bias": torch.ones(1),
        "model.decoder.layers.0.zero.bias": torch.zeros(8),
    }
    assert said_of(spec, {**weights, **harmless}, tmp_path, capsys) == []
    [line] = said_of(spec, {**weights, "extra.bias": torch.ones(2)}, tmp_path, capsys)
    assert "'extra.bias' in the checkpoint: not used" in line and str(tmp_path) in line
    [line] = said_of(
        spec,
        {**weights, "a": torch.ones(2), "b": torch.ones(2, dtype=torch.int8)},
        tmp_path,
        capsys,
    )
    assert "'a' and 1 more in the checkpoint: not used" in line


def test_advice_on_a_head_that_is_not_there(tmp_path: Path, config) -> None:
    untied = spec_from_config("tiny", {**config.to_dict(), "tie_word_embeddings": False}, "here")
    tensors = {t.name: torch.randn(t.shape) for t in untied.tensors if t.name != "lm_head.weight"}
    with pytest.raises(UsageError, match=r"set tie_word_embeddings to true in config\.json"):
        opened(untied, tensors, tmp_path)


def test_a_tensor_that_the_index_lists_and_no_file_has(tmp_path: Path, spec, weights) -> None:
    del weights[FC1]
    save_file(weights, tmp_path / "part.safetensors")
    weight_map = dict.fromkeys([*weights, FC1], "part.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(
        UsageError,
        match=rf"part.safetensors: model.safetensors.index.json says that tensor '{FC1}'",
    ):
        open_checkpoint(spec, tmp_path, tmp_path / "cache")


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ((), "no index of either)"),
        (
            ("gptq_model-4bit.safetensors",),
            "there is gptq_model-4bit.safetensors: if it is the whole model, name it model",
        ),
        (
            ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"),
            "but no index of its shards",
        ),
        (("model.Q4_K_M.gguf",), "there is model.Q4_K_M.gguf, which is not read"),
    ],
)
def test_open_without_weights(tmp_path: Path, spec, files: tuple[str, ...], says: str) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(UsageError, match=rf"{tmp_path}: no weights") as caught:
        open_checkpoint(spec, tmp_path, tmp_path / "cache")
    assert says in str(caught.value)
