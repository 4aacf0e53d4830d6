"""Tensors that are slices of one stored tensor, as a block's experts are: checked, written, packed.

tests/parity runs such models (gpt_oss)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from flexgen_h2o.checkpoint import (
    match,
    open_checkpoint,
    pack_checkpoint,
    pack_random,
    read_index,
    write_random_checkpoint,
    writing,
)
from flexgen_h2o.checkpoint.formats.groupwise import Groupwise
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.model import ModelSpec, TensorSpec

EXPERTS = ("model.experts.w1", "model.experts.w2", "model.experts.w1_bias")


@pytest.fixture
def sliced(spec: ModelSpec) -> ModelSpec:
    """Three experts in each block: one in the MLP's unit, two in that of the attention. One matrix
    of each is stored transposed."""

    def experts(block: int, numbers: range) -> tuple[TensorSpec, ...]:
        shapes = ((48, 16), (16, 48), (48,))
        return tuple(
            TensorSpec(
                f"{name}.{i}",
                name.replace("experts", f"layers.{block}.experts"),
                shape,
                index=i,
                transposed=name.endswith("w2"),
            )
            for i in numbers
            for name, shape in zip(EXPERTS, shapes, strict=True)
        )

    return replace(
        spec,
        attention=tuple(own + experts(i, range(1, 3)) for i, own in enumerate(spec.attention)),
        mlp=tuple(own + experts(i, range(1)) for i, own in enumerate(spec.mlp)),
    )


@pytest.fixture
def stacked(sliced: ModelSpec) -> dict[str, torch.Tensor]:
    """What a checkpoint of that model stores."""
    tensors = sliced.tensors
    shapes = {t.name: t.shape[::-1] if t.transposed else t.shape for t in tensors}
    whole = {
        t.name: torch.randn(shapes[t.name] if t.index is None else (3, *shapes[t.name]))
        for t in tensors
    }
    assert len(whole) == len(tensors) - 2 * 2 * len(EXPERTS)
    return whole


def test_another_number_of_slices_is_refused(tmp_path: Path, sliced, stacked) -> None:
    stacked["model.layers.1.experts.w1"] = torch.zeros(4, 48, 16)
    save_file(stacked, tmp_path / "model.safetensors")
    says = r"1.experts.w1' has shape \(4, 48, 16\), config.json .* \(3, 48, 16\)"
    with pytest.raises(UsageError, match=says):
        match(sliced, read_index(tmp_path), tmp_path)


def test_random_weights_store_slices_together(
    tmp_path: Path, sliced, config_json, read, monkeypatch
) -> None:
    """Packed at once they are the same numbers as packed from the files."""
    monkeypatch.setattr(writing, "TABLE_VALUES", 5009)
    folder = write_random_checkpoint(sliced, config_json, tmp_path / "m", "float32")
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert set(file.keys()) == {t.name for t in sliced.tensors}
        assert file.get_slice("model.layers.0.experts.w1").get_shape() == [3, 48, 16]
    source = open_checkpoint(sliced, folder, tmp_path / "none")
    form = Groupwise(4, 8)
    ones = [read(source.tensors[f"model.layers.0.experts.w1[{i}]"]) for i in range(3)]
    assert not torch.equal(ones[0], ones[1]) and not torch.equal(ones[1], ones[2])
    assert read(source.tensors["model.layers.0.experts.w1_bias[2]"]).abs().max() < 0.05
    from_file = pack_checkpoint(sliced, source, tmp_path / "cache", form)
    at_once = pack_random(sliced, config_json, tmp_path / "p", "float32", 0, form)
    raw = [
        [stored.tensors[key] for key in sorted(stored.tensors)] for stored in (from_file, at_once)
    ]
    for one, other in zip(*raw, strict=True):
        assert one.shape == other.shape and bytes_of(one) == bytes_of(other)


def bytes_of(stored) -> bytes:
    return stored.path.read_bytes()[stored.offset : stored.offset + stored.nbytes]
