"""The store of compressed weights: made once, whole or not at all, anew for a changed source."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flexgen_h2o.checkpoint import (
    open_checkpoint,
    pack_checkpoint,
    pack_random,
    packed_store,
    write_random_checkpoint,
)
from flexgen_h2o.checkpoint.formats.groupwise import FORMAT, Groupwise
from flexgen_h2o.checkpoint.formats.int8 import Int8
from flexgen_h2o.checkpoint.safetensors import Checkpoint
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.kernels.int8 import pack_int8_rows
from flexgen_h2o.kernels.packed import pack_rows

FC1 = "model.decoder.layers.1.fc1.weight"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "offload"


@pytest.fixture
def source(spec, weights, tmp_path: Path):
    """Opens a safetensors checkpoint of the weights, changed by `more`."""

    def opened(dtype: torch.dtype = torch.float32, **more: torch.Tensor) -> Checkpoint:
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        save_file(
            {name: value.to(dtype) for name, value in {**weights, **more}.items()},
            folder / "model.safetensors",
        )
        return open_checkpoint(spec, folder, tmp_path / "none")

    return opened


def bytes_of(stored) -> bytes:
    with stored.path.open("rb") as file:
        file.seek(stored.offset)
        return file.read(stored.nbytes)


@pytest.mark.parametrize(("bits", "dtype"), [(4, torch.float32), (8, torch.bfloat16)])
def test_every_tensor(
    spec, source, weights, cache: Path, monkeypatch, bits: int, dtype: torch.dtype
) -> None:
    """Some rows at a time; matrices packed at multiples of 4 bytes, vectors as they are."""
    monkeypatch.setattr(packed_store, "PACK_CHUNK", 100)
    found = pack_checkpoint(spec, source(dtype), cache, Groupwise(2, bits))
    assert set(found.tensors) == set(weights)
    for name, stored in found.tensors.items():
        want = weights[name].to(dtype)
        if want.dim() == 2:
            want = pack_rows(want, bits)
            assert stored.offset % 4 == 0 and stored.dtype == "uint8"
        assert bytes_of(stored) == bytes(want.view(-1).view(torch.uint8).tolist())


def test_int8(spec, source, weights, cache: Path, monkeypatch) -> None:
    """Beside the store in groups of 8 bits; the record says that a row has one scale."""
    monkeypatch.setattr(packed_store, "PACK_CHUNK", 100)
    grouped = pack_checkpoint(spec, source(), cache, Groupwise(2, 8))
    found = pack_checkpoint(spec, source_as_it_is(spec, grouped, cache), cache, Int8(2))
    assert found.folder != grouped.folder
    for name, stored in found.tensors.items():
        want = pack_int8_rows(weights[name]) if weights[name].dim() == 2 else weights[name]
        assert bytes_of(stored) == bytes(want.view(-1).view(torch.uint8).tolist())
    record = json.loads((found.folder / packed_store.RECORD_NAME).read_text())
    assert (record["bits"], record["group"]) == (8, None)


def test_it_is_a_safetensors_folder_that_says_what_it_holds(spec, source, cache: Path) -> None:
    found = pack_checkpoint(spec, source(), cache, Groupwise(2, 4))
    with safe_open(found.folder / "model.safetensors", "pt") as file:
        assert file.metadata()["packed"] == "4bit"
        assert file.get_tensor(FC1).dtype == torch.uint8
    record = json.loads((found.folder / packed_store.RECORD_NAME).read_text())
    assert (record["bits"], record["group"]) == (4, 64)


def test_found_again_and_made_anew_for_a_changed_source(
    spec, source, cache: Path, monkeypatch
) -> None:
    first = pack_checkpoint(spec, source(), cache, Groupwise(2, 4))
    with monkeypatch.context() as patch:
        patch.setattr(packed_store, "write_shards", None)
        assert (
            pack_checkpoint(spec, source_as_it_is(spec, first, cache), cache, Groupwise(2, 4))
            == first
        )
    eight = pack_checkpoint(spec, source_as_it_is(spec, first, cache), cache, Groupwise(2, 8))
    assert eight.folder != first.folder
    changed = pack_checkpoint(spec, source(**{FC1: torch.zeros(32, 16)}), cache, Groupwise(2, 4))
    assert changed.folder != first.folder
    assert bytes_of(changed.tensors[FC1]) != bytes_of(first.tensors[FC1])


def test_another_model_of_the_same_name_size_and_time_has_its_own_store(
    spec, source, weights, cache: Path, tmp_path: Path
) -> None:
    first = pack_checkpoint(spec, source(), cache, Groupwise(2, 4))
    file = tmp_path / "model" / "model.safetensors"
    other = tmp_path / "b" / "model"
    shutil.copytree(file.parent, other)
    save_file({**weights, FC1: -weights[FC1]}, other / file.name)
    set_time(other / file.name, file.stat().st_mtime_ns)
    file.parent.rename(tmp_path / "c")
    (tmp_path / "c").rename(file.parent)
    assert (
        pack_checkpoint(spec, source_as_it_is(spec, first, cache), cache, Groupwise(2, 4)) == first
    )  # moved
    copied = pack_checkpoint(
        spec, open_checkpoint(spec, other, cache / "none"), cache, Groupwise(2, 4)
    )
    assert copied.folder != first.folder
    time = file.stat().st_mtime_ns
    save_file({**weights, FC1: -weights[FC1]}, file)
    set_time(file, time)
    changed = pack_checkpoint(spec, source_as_it_is(spec, first, cache), cache, Groupwise(2, 4))
    assert (
        bytes_of(changed.tensors[FC1])
        == bytes_of(copied.tensors[FC1])
        != bytes_of(first.tensors[FC1])
    )


def set_time(path: Path, ns: int) -> None:
    os.utime(path, ns=(ns, ns))
    assert path.stat().st_mtime_ns == ns


def source_as_it_is(spec, found: Checkpoint, cache: Path) -> Checkpoint:
    return open_checkpoint(spec, cache.parent / "model", cache / "none")


@pytest.mark.parametrize(
    ("bad", "form"), [(float("nan"), Int8(2)), (float("inf"), Groupwise(2, 4))]
)
def test_a_value_that_is_not_finite(
    spec, source, weights, cache: Path, names_in, bad: float, form
) -> None:
    value = weights[FC1].clone()
    value[3, 5] = bad
    with pytest.raises(
        UsageError, match=rf"model.safetensors: tensor '{FC1}' .*not finite.*leave {form.flag} out"
    ):
        pack_checkpoint(spec, source(**{FC1: value}), cache, form)
    assert names_in(cache) == []


def test_a_header_with_a_byte_changed_is_named_or_says_the_same(spec, source, cache: Path) -> None:
    """Of names, dtypes, shapes and places nothing can change unseen; of padding and notes it
    may."""
    checkpoint = source()
    found = pack_checkpoint(spec, checkpoint, cache, Groupwise(2, 4))
    path = found.folder / "model.safetensors"
    text = path.read_bytes()[8:].partition(b"   ")[0]
    refused = []
    with path.open("r+b", buffering=0) as file:
        for at, byte in [*enumerate(file.read(8)), *list(enumerate(text, 8))[::5]]:
            os.pwrite(file.fileno(), bytes([byte ^ 1]), at)
            try:
                assert (
                    pack_checkpoint(spec, checkpoint, cache, Groupwise(2, 4)).tensors
                    == found.tensors
                )
            except UsageError as error:
                refused.append(str(error))
            os.pwrite(file.fileno(), bytes([byte]), at)
    assert len(refused) > len(text) / 5 * 0.9
    os.truncate(path, path.stat().st_size - 1)
    with pytest.raises(UsageError, match="truncated") as cut:
        pack_checkpoint(spec, checkpoint, cache, Groupwise(2, 4))
    refused.append(str(cut.value))
    assert not any("download" in line for line in refused)
    says = re.escape(f"{found.folder}: packed weights ") + ".*remove this folder"
    assert all(re.match(says, line) for line in refused)


@pytest.mark.parametrize(
    ("name", "was", "becomes"),
    [(FC1, "U8", "I8"), ("model.decoder.final_layer_norm.weight", "BF16", "F16")],
)
def test_a_store_with_another_dtype_is_named(
    spec, source, cache: Path, name: str, was: str, becomes: str
) -> None:
    checkpoint = source(torch.bfloat16)
    path = pack_checkpoint(spec, checkpoint, cache, Groupwise(2, 4)).folder / "model.safetensors"
    data = path.read_bytes()
    old = f'"{name}":{{"dtype":"{was}"'.encode()
    new = f'"{name}":{{"dtype":"{becomes}"'.encode()
    size = int.from_bytes(data[:8], "little") + len(new) - len(old)
    assert old in data
    path.write_bytes(size.to_bytes(8, "little") + data[8:].replace(old, new))
    with pytest.raises(
        UsageError, match=rf"lack tensor '{name}', {was} of shape .*remove this folder"
    ):
        pack_checkpoint(spec, checkpoint, cache, Groupwise(2, 4))


@pytest.mark.parametrize("text", ["", f'{{"format": {FORMAT - 1}, "bits": 4, "group": 64}}', None])
def test_a_store_without_its_record_is_named(spec, source, cache: Path, text: str | None) -> None:
    checkpoint = source()
    record = (
        pack_checkpoint(spec, checkpoint, cache, Groupwise(2, 4)).folder / packed_store.RECORD_NAME
    )
    if text is None:
        record.unlink()
    else:
        record.write_text(text)
    with pytest.raises(UsageError, match=rf"{record}: .*remove this folder"):
        pack_checkpoint(spec, checkpoint, cache, Groupwise(2, 4))


def test_random_weights_are_packed_as_their_checkpoint_would_be(
    spec, config_json, cache: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr("flexgen_h2o.checkpoint.writing.TABLE_VALUES", 509)
    monkeypatch.setattr(packed_store, "PACK_CHUNK", 100)
    folder = write_random_checkpoint(spec, config_json, tmp_path / "random", "bfloat16", seed=3)
    whole = pack_checkpoint(spec, open_checkpoint(spec, folder, cache), cache, Groupwise(2, 4))
    found = pack_random(
        spec, config_json, cache / "packed" / "random", "bfloat16", 3, Groupwise(2, 4)
    )
    assert {name: bytes_of(s) for name, s in found.tensors.items()} == {
        name: bytes_of(s) for name, s in whole.tensors.items()
    }
    assert (
        pack_random(
            spec, config_json, cache / "packed" / "random", "bfloat16", 4, Groupwise(2, 4)
        ).folder
        != found.folder
    )
