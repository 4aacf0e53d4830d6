"""The store of compressed weights: made once, whole or not at all, anew for a changed source."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flexgen_h2o.checkpoint import open_checkpoint, pack_checkpoint, packed_store
from flexgen_h2o.checkpoint.formats import Codec
from flexgen_h2o.checkpoint.formats.groupwise import FORMAT, Groupwise
from flexgen_h2o.checkpoint.formats.int8 import Int8
from flexgen_h2o.checkpoint.safetensors import Checkpoint
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.kernels.int8 import pack_int8_rows
from flexgen_h2o.kernels.packed import pack_rows

FC1 = "model.decoder.layers.1.fc1.weight"
FOUR = Groupwise(2, 4)
Pack = Callable[..., Checkpoint]


@pytest.fixture
def file(weights, tmp_path: Path) -> Path:
    """The weights of a safetensors checkpoint."""
    path = tmp_path / "model" / "model.safetensors"
    path.parent.mkdir()
    save_file(weights, path)
    return path


@pytest.fixture
def pack(spec, file: Path, tmp_path: Path) -> Pack:
    """Packs the checkpoint as it is now."""

    def packed(form: Codec = FOUR, folder: Path = file.parent) -> Checkpoint:
        source = open_checkpoint(spec, folder, tmp_path / "none")
        return pack_checkpoint(spec, source, tmp_path / "cache", form)

    return packed


def bytes_of(stored) -> bytes:
    return stored.path.read_bytes()[stored.offset :][: stored.nbytes]


@pytest.mark.parametrize(
    ("form", "encode", "group"),
    [
        (FOUR, lambda rows: pack_rows(rows, 4), 64),
        (Groupwise(2, 8), lambda rows: pack_rows(rows.bfloat16(), 8), 64),
        (Int8(2), pack_int8_rows, None),
    ],
    ids=["4", "8", "int8"],
)
def test_every_tensor(
    weights, file: Path, pack: Pack, monkeypatch, form: Groupwise | Int8, encode, group: int | None
) -> None:
    """Some rows at a time; matrices packed at multiples of 4 bytes, vectors as they are. The folder
    says what it holds."""
    monkeypatch.setattr(packed_store, "PACK_CHUNK", 100)
    if form.name == "8bit":
        weights = {name: value.bfloat16() for name, value in weights.items()}
        save_file(weights, file)
    found = pack(form)
    assert set(found.tensors) == set(weights)
    for name, stored in found.tensors.items():
        want = weights[name]
        if want.dim() == 2:
            want = encode(want)
            assert stored.offset % 4 == 0 and stored.dtype == "uint8"
        assert bytes_of(stored) == bytes(want.view(-1).view(torch.uint8).tolist())
    record = json.loads((found.folder / packed_store.RECORD_NAME).read_text())
    assert (record["bits"], record["group"]) == (getattr(form, "bits", 8), group)
    with safe_open(found.folder / "model.safetensors", "pt") as made:
        assert made.metadata()["packed"] == form.name


def test_found_again_and_made_anew_for_a_changed_source(
    weights, file: Path, pack: Pack, tmp_path: Path, monkeypatch
) -> None:
    """Another model of the same name, size and time has its own store; a folder may be moved."""
    first = pack()
    with monkeypatch.context() as patch:
        patch.setattr(packed_store, "write_shards", None)
        file.parent.rename(tmp_path / "moved")
        (tmp_path / "moved").rename(file.parent)
        assert pack() == first
    assert pack(Groupwise(2, 8)).folder != first.folder
    time = file.stat().st_mtime_ns
    other = tmp_path / "b" / "model"
    shutil.copytree(file.parent, other)
    for folder in (other, file.parent):
        save_file({**weights, FC1: -weights[FC1]}, folder / file.name)
        os.utime(folder / file.name, ns=(time, time))
        changed = pack(folder=folder)
        assert changed.folder != first.folder
        assert bytes_of(changed.tensors[FC1]) != bytes_of(first.tensors[FC1])


@pytest.mark.parametrize(("bad", "form"), [(float("nan"), Int8(2)), (float("inf"), FOUR)])
def test_a_value_that_is_not_finite(
    weights, file: Path, pack: Pack, tmp_path: Path, names_in, bad: float, form: Codec
) -> None:
    weights[FC1][3, 5] = bad
    save_file(weights, file)
    says = rf"{file.parent}: tensor '{FC1}' .*not finite.*leave {form.converted_by} out"
    with pytest.raises(UsageError, match=says):
        pack(form)
    assert names_in(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("was", "becomes", "says"),
    [
        (b'"dtype":"U8"', b'"dtype":"I8"', "lack tensor 'model.*', U8 of shape"),
        (b'"dtype":"F32"', b'"dtype":"I32"', "lack tensor 'model.*', F32 of shape"),
        (b"1.fc1.weight", b"1.fc2.weight", "are damaged"),
        (b'"shape":[', b'"shape":[2,', "are damaged"),
    ],
)
def test_a_damaged_store_is_named(pack: Pack, was: bytes, becomes: bytes, says: str) -> None:
    path = pack().folder / "model.safetensors"
    data = path.read_bytes()
    head, rest = data[8:].split(b"   ", 1)
    new = head.replace(was, becomes)
    assert new != head
    size = int.from_bytes(data[:8], "little") + len(new) - len(head)
    path.write_bytes(size.to_bytes(8, "little") + new + b"   " + rest)
    says = re.escape(f"{path.parent}: packed weights ") + f"{says}.*remove this folder"
    with pytest.raises(UsageError, match=says) as error:
        pack()
    assert "download" not in str(error.value)


@pytest.mark.parametrize("text", ["", f'{{"format": {FORMAT - 1}, "bits": 4, "group": 64}}', None])
def test_a_store_without_its_record_is_named(pack: Pack, text: str | None) -> None:
    record = pack().folder / packed_store.RECORD_NAME
    if text is None:
        record.unlink()
    else:
        record.write_text(text)
    with pytest.raises(UsageError, match=rf"{record}: .*remove this folder"):
        pack()
