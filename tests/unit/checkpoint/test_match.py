"""A spec is held against the stored tensors: names with and without the prefix, shapes, dtypes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flexgen_h2o.checkpoint import match, open_checkpoint, read_index
from flexgen_h2o.checkpoint.safetensors import read_file
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import TensorSpec

FC1 = "model.decoder.layers.1.fc1.weight"


def opened(spec, tensors, folder: Path):
    save_file(tensors, folder / "model.safetensors")
    return match(spec, read_index(folder), folder)


def test_all_tensors_by_their_spec_name(tmp_path: Path, spec, weights, read) -> None:
    checkpoint = opened(spec, {**weights, "unused": torch.zeros(3, dtype=torch.int8)}, tmp_path)
    assert checkpoint.tensors.keys() == weights.keys()
    assert all(torch.equal(read(checkpoint.tensors[name]), weights[name]) for name in weights)
    assert checkpoint.nbytes == spec.num_weights * 4
    assert checkpoint.folder == tmp_path


def test_names_without_and_with_the_prefix(tmp_path: Path, spec, weights) -> None:
    bare = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    assert opened(spec, bare, tmp_path).tensors.keys() == weights.keys()
    only = TensorSpec("tokens", "decoder.embed_tokens.weight", (4, 2))
    small = dataclasses.replace(spec, num_blocks=0, embedding=(only,), attention=(), mlp=(), head=(only,))
    checkpoint = opened(small, {"model.decoder.embed_tokens.weight": torch.zeros(4, 2)}, tmp_path)
    assert list(checkpoint.tensors) == ["decoder.embed_tokens.weight"]


def test_dtype_of_most_bytes(tmp_path: Path, spec, weights) -> None:
    mixed = {name: t.bfloat16() if t.dim() == 2 else t for name, t in weights.items()}
    assert opened(spec, mixed, tmp_path).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, r"tensor '{}' is not in this checkpoint"),
        (torch.zeros(3, 5), r"model.safetensors: tensor '{}' .*\(3, 5\).*\(32, 16\)"),
        (torch.zeros(32, 16, dtype=torch.int8), r"model.safetensors: tensor '{}' is stored as I8"),
        (torch.zeros(32, 16, dtype=torch.float64), r"model.safetensors: tensor '{}' is stored as F64"),
    ],
)  # fmt: skip
def test_what_does_not_belong_to_the_spec(tmp_path: Path, spec, weights, value: torch.Tensor | None, says: str) -> None:
    del weights[FC1]
    with pytest.raises(UsageError, match=says.format(FC1)):
        opened(spec, weights | ({} if value is None else {FC1: value}), tmp_path)


@pytest.mark.parametrize("name", ["lm_head.weight", "embed_out.weight"])
def test_a_tied_model_may_have_its_head_as_a_copy_only(tmp_path: Path, spec, weights, monkeypatch, name: str) -> None:
    """transformers uses one that differs, whatever the config says."""
    monkeypatch.setitem(match.__globals__, "MIB", 1000)  # several pieces, and a last one
    table = weights["model.decoder.embed_tokens.weight"]
    copy, changed = table.clone(), table.clone()
    changed[-1, -1] += 1
    assert opened(spec, {**weights, name: copy}, tmp_path).tensors.keys() == weights.keys()
    says = rf"model.safetensors: '{name}' differs from 'model.decoder.embed_tokens.weight'.*set tie_word_embeddings"
    for head in (changed, copy.bfloat16(), copy[1:].clone()):
        with pytest.raises(UsageError, match=says):
            opened(spec, {**weights, name: head}, tmp_path)
    save_file(weights, tmp_path / "model-1.safetensors")
    save_file({name: copy}, tmp_path / "model-2.safetensors")
    assert match(spec, {**read_file(tmp_path / "model-2.safetensors"), **read_file(tmp_path / "model-1.safetensors")},
                 tmp_path).nbytes == spec.num_weights * 4  # fmt: skip


def test_open_without_weights(tmp_path: Path, spec) -> None:
    with pytest.raises(UsageError, match=rf"{tmp_path}: no weights"):
        open_checkpoint(spec, tmp_path, tmp_path / "cache")
