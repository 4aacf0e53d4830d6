"""A spec is held against the stored tensors: names with and without the prefix, shapes, dtypes."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flexgen_h2o.checkpoint import match, open_checkpoint, read_index
from flexgen_h2o.core.config import TensorSpec
from flexgen_h2o.core.errors import UsageError

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


def test_names_of_the_bare_model(tmp_path: Path, spec, weights) -> None:
    bare = {name.removeprefix("model."): tensor for name, tensor in weights.items()}
    assert opened(spec, bare, tmp_path).tensors.keys() == weights.keys()


def test_names_with_the_prefix_added(tmp_path: Path, spec) -> None:
    only = TensorSpec("tokens", "decoder.embed_tokens.weight", (4, 2))
    small = dataclasses.replace(spec, num_blocks=0, embedding=(only,), attention=(), mlp=(), head=(only,))
    checkpoint = opened(small, {"model.decoder.embed_tokens.weight": torch.zeros(4, 2)}, tmp_path)
    assert list(checkpoint.tensors) == ["decoder.embed_tokens.weight"]


def test_dtype_of_most_bytes(tmp_path: Path, spec, weights) -> None:
    mixed = {name: t.bfloat16() if t.dim() == 2 else t for name, t in weights.items()}
    assert opened(spec, mixed, tmp_path).dtype == "bfloat16"


def test_missing_tensor(tmp_path: Path, spec, weights) -> None:
    del weights[FC1]
    with pytest.raises(UsageError, match=rf"{tmp_path}: tensor '{FC1}'"):
        opened(spec, weights, tmp_path)


def test_wrong_shape(tmp_path: Path, spec, weights) -> None:
    weights[FC1] = torch.zeros(3, 5)
    with pytest.raises(UsageError, match=rf"model.safetensors: tensor '{FC1}' .*\(3, 5\).*\(32, 16\)"):
        opened(spec, weights, tmp_path)


@pytest.mark.parametrize(("dtype", "says"), [(torch.int8, "I8"), (torch.float64, "F64")])
def test_wrong_dtype(tmp_path: Path, spec, weights, dtype: torch.dtype, says: str) -> None:
    weights[FC1] = weights[FC1].to(dtype)
    with pytest.raises(UsageError, match=rf"model.safetensors: tensor '{FC1}' is stored as {says}"):
        opened(spec, weights, tmp_path)


def test_open_reads_safetensors_in_place(tmp_path: Path, spec, model) -> None:
    model.save_pretrained(tmp_path / "m")
    checkpoint = open_checkpoint(spec, tmp_path / "m", tmp_path / "cache")
    assert checkpoint.folder == tmp_path / "m"
    assert not (tmp_path / "cache").exists()


def test_open_imports_bin_files(tmp_path: Path, spec, model, read) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    checkpoint = open_checkpoint(spec, folder, tmp_path / "cache")
    assert all(torch.equal(read(t), model.state_dict()[name]) for name, t in checkpoint.tensors.items())


def test_open_without_weights(tmp_path: Path, spec) -> None:
    with pytest.raises(UsageError, match=rf"{tmp_path}: no weights"):
        open_checkpoint(spec, tmp_path, tmp_path / "cache")
