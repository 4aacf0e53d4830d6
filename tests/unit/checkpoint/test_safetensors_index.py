"""Tensors are found by byte range, and every damaged file is refused by name before a tensor is
read."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file, save_model

from flexgen_h2o.checkpoint.safetensors import read_index
from flexgen_h2o.core.errors import UsageError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def test_byte_ranges_of_a_single_file(tmp_path: Path, read) -> None:
    tensors = {
        "a": torch.randn(7, 5),
        "b": torch.randn(3),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
    }
    tensors |= {
        "half": torch.randn(3, 2).bfloat16(),
        "f16": torch.randn(2).half(),
        "codes": torch.zeros(5, dtype=torch.int8),
    }
    save_file(tensors, tmp_path / SINGLE)
    stored = read_index(tmp_path)
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        assert stored[name].dtype == ("I8" if dtype == "int8" else dtype)
        assert stored[name].nbytes == tensor.nbytes
        if tensor.numel() and dtype != "int8":
            assert torch.equal(read(stored[name]), tensor)


def test_tied_names_in_the_metadata_point_at_the_same_bytes(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"first": torch.nn.Linear(3, 3), "second": torch.nn.Linear(3, 3)})
    model["second"].weight = model["first"].weight
    save_model(model, str(tmp_path / SINGLE))
    stored = read_index(tmp_path)
    assert stored["first.weight"] == stored["second.weight"]


def test_a_shard_that_is_cut_or_missing(tmp_path: Path) -> None:
    path = tmp_path / "model-00001-of-00001.safetensors"
    save_file({"a": torch.randn(4, 3)}, path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": path.name}}))
    path.write_bytes(path.read_bytes()[:-13])
    with pytest.raises(UsageError, match=rf"{path.name}: truncated"):
        read_index(tmp_path)
    path.unlink()
    with pytest.raises(UsageError, match=rf"{path.name}.*missing"):
        read_index(tmp_path)


@pytest.mark.parametrize(
    "body",
    [
        "{",
        "[]",
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "/up.safetensors"}}',
        '{"weight_map": {"a": "deeper/../../up.safetensors"}}',
    ],
)
def test_bad_index(tmp_path: Path, body: str) -> None:
    (tmp_path / INDEX).write_text(body)
    with pytest.raises(UsageError, match=INDEX):
        read_index(tmp_path)


ENTRY = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'


@pytest.mark.parametrize(
    ("head", "nbytes"),
    [
        (None, 0),  # a git-lfs pointer
        ('{"t":3}', 0),
        (f'{{"t":{ENTRY}}}', 7),
        (f'{{"t":{ENTRY}}}', 9),
        (f'{{"t":{ENTRY},"u":{ENTRY}}}', 8),
        (f'{{"t":{ENTRY},"t":{ENTRY}}}', 8),
        (f'{{"t":{ENTRY},"__metadata__":{{"a":"b","a":"c"}}}}', 8),
        (f'{{"t":{ENTRY},"__metadata__":{{"a":1}}}}', 8),
        (f'{{"t":{ENTRY.replace("2", str([2**64 - 1] * 9)[1:-1])}}}', 8),
        ("{\xff}", 0),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, head: str | None, nbytes: int) -> None:
    """The library's verdict, and names that are there twice: nobody knows which one is meant."""
    text = b"" if head is None else head.encode("latin-1")
    start = b"version https://git" if head is None else struct.pack("<Q", len(text))
    (tmp_path / SINGLE).write_bytes(start + text + bytes(nbytes))
    with pytest.raises(UsageError, match=f"{SINGLE}: .*; download it again"):
        read_index(tmp_path)
