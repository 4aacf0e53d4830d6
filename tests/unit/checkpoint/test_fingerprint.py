"""What tells two states of a file apart by their contents."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flexgen_h2o.checkpoint import atomic_folder as module
from flexgen_h2o.checkpoint import weight_files
from flexgen_h2o.checkpoint.atomic_folder import sample_digest
from flexgen_h2o.core.errors import UsageError


@pytest.mark.parametrize("whole", [2**20, 1000])
def test_a_copy_is_the_same_and_other_weights_are_not(
    whole: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large files by pieces: what changes a matrix changes some piece."""
    monkeypatch.setattr(module, "WHOLE_BYTES", whole)
    path = tmp_path / "model.safetensors"
    copy = tmp_path / "copy" / "model.safetensors"
    data = bytes(i * 7 % 251 for i in range(600_000))
    path.write_bytes(data)
    copy.parent.mkdir()
    shutil.copyfile(path, copy)
    first = sample_digest([path])
    assert first == sample_digest([copy]) and len(first) == 16
    for at in (0, 300_000, 580_000):
        path.write_bytes(data[:at] + bytes(20_000) + data[at + 20_000 :])
        assert sample_digest([path]) != first
    path.write_bytes(data + b"x")
    assert sample_digest([path]) != first


def test_the_files_with_the_weights(tmp_path: Path) -> None:
    assert weight_files(tmp_path) == []
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text('{"weight_map": {"b": "2.bin", "a": "1.bin", "c": "2.bin"}}')
    (tmp_path / "1.bin").touch()
    with pytest.raises(UsageError, match=r"2.bin: pytorch_model.bin.index.json lists this shard"):
        weight_files(tmp_path)
    (tmp_path / "2.bin").touch()
    assert weight_files(tmp_path) == [tmp_path / "1.bin", tmp_path / "2.bin"]
    (tmp_path / "model.safetensors").touch()
    assert weight_files(tmp_path) == [tmp_path / "model.safetensors"]
