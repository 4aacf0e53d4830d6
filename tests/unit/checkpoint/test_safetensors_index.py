"""Tensors are found by byte range, and every damaged file is refused by name before a tensor is read."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file, save_model

from flexgen_h2o.checkpoint.safetensors_index import has_safetensors, read_index
from flexgen_h2o.errors import UsageError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_raw(path: Path, head: object, data: bytes = b"") -> Path:
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    save_file({"a": torch.randn(4, 3)}, tmp_path / SHARDS[0])
    save_file({"b": torch.randn(5)}, tmp_path / SHARDS[1])
    body = {"metadata": {}, "weight_map": {"a": SHARDS[0], "b": SHARDS[1]}}
    (tmp_path / INDEX).write_text(json.dumps(body))
    return tmp_path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_byte_ranges_of_a_single_file(tmp_path: Path, read, dtype: str) -> None:
    tensors = {"a": torch.randn(7, 5), "b": torch.randn(3), "empty": torch.zeros(0, 4), "scalar": torch.tensor(2.5)}
    tensors = {name: t.to(getattr(torch, dtype)) for name, t in tensors.items()}
    save_file(tensors, tmp_path / SINGLE)
    stored = read_index(tmp_path)
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert stored[name].dtype == dtype
        assert stored[name].nbytes == tensor.nbytes
        if tensor.numel():
            assert torch.equal(read(stored[name]), tensor)


@pytest.mark.parametrize("shard_size", ["5GB", "4KB"])
def test_what_transformers_saves(tmp_path: Path, read, model, shard_size: str) -> None:
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (tmp_path / INDEX).exists() == (shard_size == "4KB")
    stored = read_index(tmp_path)
    state = model.state_dict()
    assert set(state) - set(stored) <= {"lm_head.weight"}
    assert all(torch.equal(read(tensor), state[name]) for name, tensor in stored.items())


def test_tied_names_in_the_metadata_point_at_the_same_bytes(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"first": torch.nn.Linear(3, 3), "second": torch.nn.Linear(3, 3)})
    model["second"].weight = model["first"].weight
    save_model(model, str(tmp_path / SINGLE))
    stored = read_index(tmp_path)
    assert stored["first.weight"] == stored["second.weight"]


def test_other_dtypes_are_kept_under_their_own_name(tmp_path: Path) -> None:
    save_file({"q": torch.zeros(4, dtype=torch.int8), "m": torch.ones(2, dtype=torch.bool)}, tmp_path / SINGLE)
    assert {name: t.dtype for name, t in read_index(tmp_path).items()} == {"q": "I8", "m": "BOOL"}


def test_unknown_dtypes_are_kept_without_a_size_check(tmp_path: Path) -> None:
    write_raw(tmp_path / SINGLE, {"x": {"dtype": "F3_NEW", "shape": [8], "data_offsets": [0, 3]}}, b"abc")
    assert read_index(tmp_path)["x"].dtype == "F3_NEW"


def test_single_file_comes_before_the_index(sharded: Path) -> None:
    save_file({"single": torch.zeros(1)}, sharded / SINGLE)
    assert list(read_index(sharded)) == ["single"]


@pytest.mark.parametrize("cut", [1, 13])
def test_truncated_shard(sharded: Path, cut: int) -> None:
    path = sharded / SHARDS[1]
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(UsageError, match=rf"{SHARDS[1]}: is truncated: {size - cut} bytes, {size} expected"):
        read_index(sharded)


@pytest.mark.parametrize("left", [0, 5, 20])
def test_truncated_in_the_header(sharded: Path, left: int) -> None:
    path = sharded / SHARDS[0]
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(UsageError, match=rf"{SHARDS[0]}: truncated or not a safetensors file.* of {left} bytes"):
        read_index(sharded)


def test_trailing_bytes(sharded: Path) -> None:
    with (sharded / SHARDS[0]).open("ab") as file:
        file.write(b"x")
    with pytest.raises(UsageError, match=rf"{SHARDS[0]}: has bytes that belong to no tensor"):
        read_index(sharded)


def test_missing_shard(sharded: Path) -> None:
    (sharded / SHARDS[1]).unlink()
    with pytest.raises(UsageError, match=rf"{SHARDS[1]}.*missing"):
        read_index(sharded)


def test_shard_without_a_tensor_of_the_index(sharded: Path) -> None:
    save_file({"other": torch.randn(5)}, sharded / SHARDS[1])
    with pytest.raises(UsageError, match=rf"{SHARDS[1]}: .*'b'"):
        read_index(sharded)


@pytest.mark.parametrize(
    "body",
    ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}', '{"weight_map": {"a": "../up.safetensors"}}'],
)
def test_bad_index(tmp_path: Path, body: str) -> None:
    (tmp_path / INDEX).write_text(body)
    with pytest.raises(UsageError, match=INDEX):
        read_index(tmp_path)


def test_huge_header_length(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(UsageError, match=r"model.safetensors: .*git-lfs"):
        read_index(tmp_path)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "head",
    [
        b"{not json}",
        b"\xff\xfe{}",
        b"[1, 2]",
        {"t": 3},
        {"t": {}},
        {"t": {**ENTRY, "shape": [-2]}},
        {"t": {**ENTRY, "shape": [3]}},
        {"t": {**ENTRY, "dtype": "F16"}},
        {"t": {**ENTRY, "dtype": None}},
        {"t": {**ENTRY, "data_offsets": [8, 0]}},
        {"t": {**ENTRY, "data_offsets": [-8, 0]}},
        {"t": {**ENTRY, "data_offsets": [0]}},
        {"t": {**ENTRY, "data_offsets": [8, 16]}},
    ],
    ids=str,
)
def test_corrupt_header(tmp_path: Path, head: object) -> None:
    write_raw(tmp_path / SINGLE, head, bytes(8))
    with pytest.raises(UsageError, match=SINGLE) as caught:
        read_index(tmp_path)
    assert "\n" not in str(caught.value)


def test_nothing_there(tmp_path: Path) -> None:
    assert not has_safetensors(tmp_path)
    with pytest.raises(UsageError, match=str(tmp_path)):
        read_index(tmp_path)
