"""Tensors that are slices of one stored tensor, as a block's experts are: written, checked, packed.

tests/parity runs such models (gpt_oss).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from flexgen_h2o.checkpoint import (
    open_checkpoint,
    pack_checkpoint,
    pack_random,
    write_random_checkpoint,
    writing,
)
from flexgen_h2o.checkpoint.formats.groupwise import Groupwise
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.models import spec_from_config
from tests.parity.cases import BASES

EXPERTS = "model.layers.1.mlp.experts.down_proj"  # stored for x W
CONFIG = AutoConfig.for_model(**BASES["gpt_oss"]).to_dict()
SPEC = spec_from_config("tiny", CONFIG, "here")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """A checkpoint with random weights."""
    monkeypatch.setattr(writing, "TABLE_VALUES", 5009)
    return write_random_checkpoint(SPEC, CONFIG, tmp_path / "m", "float32")


def test_slices_are_stored_together(folder: Path, read) -> None:
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == {t.name for t in SPEC.tensors}
    assert stored[EXPERTS].shape == (6, 32, 48)
    opened = open_checkpoint(SPEC, folder, folder).tensors
    ones = [read(opened[f"{EXPERTS}[{i}]"]) for i in range(6)]
    assert torch.equal(torch.stack(ones), stored[EXPERTS])
    assert len(torch.stack(ones).flatten(1).unique(dim=0)) == 6
    assert read(opened[f"{EXPERTS}_bias[2]"]).abs().max() < 0.05


def test_another_number_of_slices_is_refused(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    more = {**stored, EXPERTS: torch.zeros(7, 32, 48)}
    save_file(more, folder / "model.safetensors")
    says = rf"{EXPERTS}' has shape \(7, 32, 48\), config.json .* \(6, 32, 48\)"
    with pytest.raises(UsageError, match=says):
        open_checkpoint(SPEC, folder, folder)


def test_packed_at_once_they_are_what_is_packed_from_the_files(
    folder: Path, tmp_path: Path
) -> None:
    form = Groupwise(4, 8)
    source = open_checkpoint(SPEC, folder, folder)
    from_file = pack_checkpoint(SPEC, source, tmp_path / "cache", form)
    at_once = pack_random(SPEC, CONFIG, tmp_path / "p", "float32", 0, form)
    assert from_file.tensors.keys() == at_once.tensors.keys() == {t.key for t in SPEC.tensors}
    for key, one in from_file.tensors.items():
        other = at_once.tensors[key]
        assert one.shape == other.shape and bytes_of(one) == bytes_of(other)


def bytes_of(stored) -> bytes:
    return stored.path.read_bytes()[stored.offset : stored.offset + stored.nbytes]
