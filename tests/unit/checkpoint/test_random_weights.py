"""Random weights are a real checkpoint: seeded, at the true shape, opened by us and by
transformers."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from flexgen_h2o.checkpoint import open_checkpoint, write_random_checkpoint, writing
from flexgen_h2o.core.errors import DoesNotFitError, UsageError


@pytest.fixture(autouse=True)
def _small_table(monkeypatch) -> None:
    # Smaller than a matrix of the tiny model, so that tensors wrap around it.
    monkeypatch.setattr(writing, "TABLE_VALUES", 509)


@pytest.fixture
def write(spec, config_json, tmp_path: Path):
    def write_to(name: str, dtype: str = "float32", **options) -> Path:
        return write_random_checkpoint(spec, config_json, tmp_path / name, dtype, **options)

    return write_to


def values(spec, folder: Path, read) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(spec, folder, folder.parent / "cache")
    return {name: read(tensor) for name, tensor in checkpoint.tensors.items()}


@pytest.mark.parametrize(("dtype", "shard_bytes"), [("float32", 4000), ("bfloat16", 2**30)])
def test_transformers_opens_it(
    write, spec, read, monkeypatch, dtype: str, shard_bytes: int
) -> None:
    monkeypatch.setattr(writing, "SHARD_BYTES", shard_bytes)
    folder = write("m", dtype)
    assert (len(list(folder.glob("model-*.safetensors"))) > 3) == (shard_bytes == 4000)
    ours = values(spec, folder, read)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").state_dict()
    assert theirs["model.decoder.embed_tokens.weight"].dtype == getattr(torch, dtype)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


def test_seeded(write, spec, read, monkeypatch, capfd) -> None:
    """A folder is found again, and not used for another seed."""
    first, second, other = (
        values(spec, write(n, seed=s, progress=n == "a"), read)
        for n, s in (("a", 1), ("b", 1), ("c", 2))
    )
    err = capfd.readouterr().err
    assert "random weights a" in err and "random weights b" not in err
    with monkeypatch.context() as patch:
        patch.setattr(writing, "write_shards", None)
        folder = write("a", seed=1)
    with pytest.raises(UsageError, match=rf"{folder}: holds something else"):
        write("a", seed=5)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)
    q, k = (first[f"model.decoder.layers.0.self_attn.{x}_proj.weight"] for x in "qk")
    assert not torch.equal(q, k)


def test_distributions(write, spec, read, monkeypatch) -> None:
    monkeypatch.setattr(writing, "TABLE_VALUES", 65_521)
    samples: dict[tuple[float, float], list[torch.Tensor]] = {}
    for name, tensor in values(spec, write("m"), read).items():
        vector = (1, 0.02) if name.endswith("norm.weight") else (0, 0.01)
        samples.setdefault((0, 0.02) if tensor.dim() == 2 else vector, []).append(tensor.flatten())
    assert len(samples) == 3
    for (mean, std), found in samples.items():
        assert torch.cat(found).mean().item() == pytest.approx(mean, abs=0.005)
        assert torch.cat(found).std().item() == pytest.approx(std, rel=0.3)


@pytest.mark.parametrize("call", ["posix_fallocate", "write"])
def test_full_disk(write, tmp_path: Path, names_in, monkeypatch, call: str) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(DoesNotFitError, match=r"--offload-dir .* needs .* are free"):
        write("m")
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("direct", [True, False])
def test_writer_keeps_every_byte(tmp_path: Path, monkeypatch, direct: bool) -> None:
    monkeypatch.setattr(writing, "BUFFER_BYTES", 8192)
    if not direct:
        real = os.open

        def refuse(path, flags, *rest):
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "Invalid argument")
            return real(path, flags, *rest)

        monkeypatch.setattr(os, "open", refuse)
    pieces = [os.urandom(n) for n in (5, 8192, 20_000, 0, 1)]
    writing.reserve(tmp_path / "f", sum(map(len, pieces)))
    writing.write_file(tmp_path / "f", pieces)
    assert (tmp_path / "f").read_bytes() == b"".join(pieces)
