"""Tensors are found by byte range, and every damaged file is refused by name before a tensor is
read."""

from __future__ import annotations

import copy
import json
import random
import re
import struct
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file, save_model

from flexgen_h2o.checkpoint.safetensors import read_index
from flexgen_h2o.core.errors import UsageError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
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


def test_byte_ranges_of_a_single_file(tmp_path: Path, read) -> None:
    tensors = {
        "a": torch.randn(7, 5),
        "b": torch.randn(3),
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(2.5),
    }
    tensors |= {"half": torch.randn(3, 2).bfloat16(), "codes": torch.zeros(5, dtype=torch.int8)}
    save_file(tensors, tmp_path / SINGLE)
    stored = read_index(tmp_path)
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        assert stored[name].dtype == ("I8" if dtype == "int8" else dtype)
        assert stored[name].nbytes == tensor.nbytes
        if tensor.numel() and dtype != "int8":
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


def test_unknown_dtypes_are_kept_without_a_size_check(tmp_path: Path) -> None:
    write_raw(
        tmp_path / SINGLE, {"x": {"dtype": "F3_NEW", "shape": [8], "data_offsets": [0, 3]}}, b"abc"
    )
    assert read_index(tmp_path)["x"].dtype == "F3_NEW"


def test_shards_that_do_not_belong_to_the_index(sharded: Path) -> None:
    path = sharded / SHARDS[1]
    data = path.read_bytes()
    path.write_bytes(data[:-13])
    with pytest.raises(
        UsageError,
        match=rf"{path.name}: is truncated: {len(data) - 13} bytes, {len(data)} expected",
    ):
        read_index(sharded)
    path.unlink()
    with pytest.raises(UsageError, match=rf"{path.name}.*missing"):
        read_index(sharded)


def test_an_index_says_only_which_files_there_are(sharded: Path, read) -> None:
    """As in transformers: a tensor may be in another file, not listed, or nowhere; the last file
    with a name counts."""
    first = torch.randn(2)
    last = torch.randn(5)
    (sharded / "deeper").mkdir()
    save_file({"b": first, "not listed": first.clone()}, sharded / SHARDS[0])
    save_file({"b": last}, sharded / SHARDS[1])
    save_file({"c": first}, sharded / "deeper" / "model.safetensors")
    weight_map = {"a": SHARDS[0], "b": SHARDS[0], "d": SHARDS[1], "c": "deeper/model.safetensors"}
    (sharded / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    stored = read_index(sharded)
    assert stored.keys() == {"b", "c", "not listed"}
    assert torch.equal(read(stored["b"]), last) and torch.equal(read(stored["c"]), first)


@pytest.mark.parametrize(
    "body",
    [
        "{",
        "[]",
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "../up.safetensors"}}',
        '{"weight_map": {"a": "/up.safetensors"}}',
        '{"weight_map": {"a": "deeper/../../up.safetensors"}}',
    ],
)
def test_bad_index(tmp_path: Path, body: str) -> None:
    (tmp_path / INDEX).write_text(body)
    with pytest.raises(UsageError, match=INDEX):
        read_index(tmp_path)


def test_what_is_no_safetensors_file(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    )
    with pytest.raises(UsageError, match=r"model.safetensors: .*git-lfs"):
        read_index(tmp_path)
    write_raw(tmp_path / SINGLE, {"t": 3})
    with pytest.raises(
        UsageError, match=r"model.safetensors: the header entry of tensor 't' is damaged"
    ):
        read_index(tmp_path)


@pytest.mark.timeout(5)  # the product of these sizes has 13 million bits
def test_a_shape_of_very_many_sizes(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [2**64 - 1] * 200_000, "data_offsets": [0, 8]}
    write_raw(tmp_path / SINGLE, {"t": entry}, bytes(8))
    with pytest.raises(
        UsageError, match=r"model.safetensors: the header entry of tensor 't' is damaged"
    ):
        read_index(tmp_path)


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


# ---- the verdicts of the safetensors library


TWICE = [
    b'{"t":%s,"t":%s}' % ((json.dumps(ENTRY).encode(),) * 2),
    b'{"t":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    b'{"__metadata__":{},"__metadata__":{},"t":%s}' % json.dumps(ENTRY).encode(),
    b'{"__metadata__":{"a":"b","a":"c"},"t":%s}' % json.dumps(ENTRY).encode(),
]


@pytest.mark.parametrize("head", TWICE, ids=str)
def test_a_name_that_is_there_twice(tmp_path: Path, head: bytes) -> None:
    """The format forbids it; the library takes the last where it is a tensor's, and which one is
    meant nobody knows."""
    write_raw(tmp_path / SINGLE, head, bytes(8))
    with pytest.raises(
        UsageError, match=f"{SINGLE}: the safetensors header is damaged .*is there twice"
    ):
        read_index(tmp_path)


DTYPES = {"F32": 4, "F16": 2, "BF16": 2, "U8": 1, "I64": 8, "BOOL": 1}


def sound(rng: random.Random) -> tuple[dict[str, Any], bytes]:
    """A header and data without a flaw, the tensors in any order, empty ones and scalars among
    them."""
    head: dict[str, Any] = {}
    end = 0
    for i in range(rng.randint(1, 5)):
        dtype = rng.choice(list(DTYPES))
        shape = [rng.randint(0, 3) for _ in range(rng.randint(0, 3))]
        begin = end
        end = end + prod(shape) * DTYPES[dtype]
        head[f"t{i}"] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    names = rng.sample(list(head), len(head))
    metadata = rng.choice([{}, {"__metadata__": {"format": "pt"}}, {"__metadata__": None}])
    return {**metadata, **{name: head[name] for name in names}}, bytes(end)


NUMBERS = (-1, 0, 1, 4, 8, 2**31, 2**63, 2**64, 1.0, True, None, "1")
VALUES = (None, [], {}, [0, 0], [0, 8], [8, 0], [2**63, 4, 0], "F32", "f32", 3)


def damage(rng: random.Random, head: dict[str, Any]) -> None:
    """One flaw in a header, which may do no harm, or mend another one."""
    name = rng.choice([name for name in head if name != "__metadata__"])
    entry = head[name]
    field = rng.choice(["shape", "data_offsets"])
    match rng.randrange(6):
        case 0 if type(entry.get("data_offsets")) is list:  # holes, overlaps, another size
            entry["data_offsets"] = [
                (n if type(n) is int else 0) + rng.choice((-8, -4, 0, 4))
                for n in entry["data_offsets"]
            ]
        case 1 if type(entry.get(field)) is list:
            entry[field] = [*entry[field][1:], rng.choice(NUMBERS)]
        case 2:
            head[f"{name}-too"] = copy.deepcopy(entry)
        case 3 if len(head) > 2:
            del head[name]
        case 4:
            head["__metadata__"] = rng.choice([{"a": "b"}, {"a": 1}, [], "x", {"a": None}, {}])
        case _:
            entry[rng.choice(["dtype", "shape", "data_offsets", "more"])] = rng.choice(VALUES)


def damaged(rng: random.Random) -> tuple[bytes, bytes]:
    """The header and the data of a sound file with up to two flaws."""
    head, data = sound(rng)
    for _ in range(rng.randint(0, 2)):
        damage(rng, head)
    if rng.random() < 0.2:
        data = data + bytes(rng.randint(1, 9)) if rng.random() < 0.5 else data[: -rng.randint(1, 9)]
    text = json.dumps(head).encode()
    if rng.random() < 0.15:
        at = rng.randrange(len(text))
        text = (
            text[:at] + rng.choice((b"", b",", b"0", b"-", b"\xff", b" ", b"NaN")) + text[at + 1 :]
        )
    before = rng.choice((b"", b"", b"", b" ", b"\xef\xbb\xbf"))
    behind = rng.choice((b"", b"", b"", b" ", b"\0"))
    return before + text + behind, data


def library_takes(path: Path) -> bool:
    try:
        with safe_open(path, "pt") as file:
            file.keys()
    except SafetensorError:
        return False
    return True


def we_take(path: Path) -> bool:
    try:
        read_index(path.parent)
    except UsageError as error:
        return not str(error).startswith(
            f"{path}: "
        )  # another file's fault would be a wrong answer
    return True


def test_damaged_headers_are_refused_as_by_the_library(tmp_path: Path) -> None:
    """600 files, the same verdict on each. A dtype that the library does not know yet is read: it
    may be of a tensor that is not needed."""
    rng = random.Random(7)
    verdicts = Counter[bool]()
    different = []
    for _ in range(600):
        text, data = damaged(rng)
        path = write_raw(tmp_path / SINGLE, text, data)
        taken = library_takes(path)
        verdicts[taken] += 1
        is_unknown = any(
            name.decode(errors="replace") not in DTYPES
            for name in re.findall(rb'"dtype": "(.*?)"', text)
        )
        if we_take(path) != taken and (taken or not is_unknown):
            different.append((taken, text, len(data)))
    assert min(verdicts.values()) > 100, verdicts
    assert not different
