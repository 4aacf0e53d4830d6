"""A .bin checkpoint becomes a full safetensors folder once; damaged and malicious files are refused
by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from flexgen_h2o.checkpoint import bin_import, import_bin, read_index
from flexgen_h2o.core.errors import DoesNotFitError, UsageError
from flexgen_h2o.core.files import MARK

BIN = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
SHARDS = ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def save_sharded(state: dict[str, torch.Tensor], folder: Path) -> None:
    names = list(state)
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    for file, half in zip(SHARDS, halves, strict=True):
        torch.save({name: state[name] for name in half}, folder / file)
    weight_map = {name: file for file, half in zip(SHARDS, halves, strict=True) for name in half}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def same(folder: Path, state: dict[str, torch.Tensor], read) -> bool:
    stored = read_index(folder)
    return stored.keys() == state.keys() and all(
        torch.equal(read(stored[n]), t) for n, t in state.items()
    )


@pytest.mark.parametrize("zipped", [True, False])
def test_single_file(source: Path, cache: Path, weights, read, zipped: bool) -> None:
    torch.save(weights, source / BIN, _use_new_zipfile_serialization=zipped)
    assert same(import_bin(source, cache), weights, read)


def test_sharded(source: Path, cache: Path, weights, read) -> None:
    save_sharded(weights, source)
    made = import_bin(source, cache)
    assert same(made, weights, read)
    assert len(list(made.glob("*.safetensors"))) == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool])
def test_dtypes_are_kept(source: Path, cache: Path, dtype: torch.dtype) -> None:
    tensor = torch.randn(5, 3).to(dtype)
    torch.save(
        {"t": tensor, "scalar": tensor[0, 0].clone(), "empty": tensor[:0].clone()}, source / BIN
    )
    stored = read_index(import_bin(source, cache))
    data = stored["t"].path.read_bytes()[stored["t"].offset :][: stored["t"].nbytes]
    assert data == bytes(tensor.view(torch.uint8).numpy().data)
    assert stored["scalar"].shape == ()


def test_views_become_tensors_of_their_own(source: Path, cache: Path, read) -> None:
    base = torch.randn(6, 4)
    state = {"whole": base, "t": base.t(), "part": base[2:4], "strided": base[:, 1]}
    torch.save(state, source / BIN)
    assert same(import_bin(source, cache), state, read)


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")])
def test_tied_tensors_are_written_once_and_found_by_both_names(
    source: Path, cache: Path, read, order
) -> None:
    tied = torch.randn(64, 64)
    torch.save({order[0]: tied, order[1]: tied, "copy": tied.clone()}, source / BIN)
    made = import_bin(source, cache)
    stored = read_index(made)
    assert stored["first"] == stored["second"]
    assert torch.equal(read(stored["copy"]), tied)
    assert sum(f.stat().st_size for f in made.glob("*.safetensors")) < 3 * tied.nbytes


def test_a_full_folder_that_transformers_opens(source: Path, cache: Path, model, names_in) -> None:
    model.config.save_pretrained(source)
    (source / "tokenizer.json").write_text("{}")
    (source / "flax_model.msgpack").write_bytes(b"x")
    (source / ".gitattributes").write_text("")
    torch.save(model.state_dict(), source / BIN)
    made = import_bin(source, cache)
    assert names_in(made) == [
        MARK,
        "config.json",
        "model-00001-of-00001.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
    ]
    again = AutoModelForCausalLM.from_pretrained(made)
    assert all(
        torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items()
    )


def test_second_call_returns_at_once_and_a_change_is_seen(
    source: Path, cache: Path, weights, monkeypatch
) -> None:
    torch.save(weights, source / BIN)
    made = import_bin(source, cache)
    with monkeypatch.context() as patch:
        patch.setattr(bin_import, "_convert", lambda *_: pytest.fail("converted twice"))
        assert import_bin(source, cache) == made
    os.utime(source / BIN, ns=(1, 1))
    assert import_bin(source, cache) != made


def test_files_that_are_not_the_models_do_not_count(
    source: Path, cache: Path, weights, names_in
) -> None:
    torch.save(weights, source / BIN)
    (source / "generation_config.json").write_text("{}")
    made = import_bin(source, cache)
    for name in ("notes.txt", "README.md", "results.jsonl", "training_args.json"):
        (source / name).write_text("new")
    assert import_bin(source, cache) == made and "generation_config.json" in names_in(made)


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (
            torch.zeros(1).expand(2**34),
            f"tensor 't' of shape .* takes {2**36} bytes, and the file has 4 of it",
        ),
        (
            torch.zeros(8).as_strided((2**20, 8), (0, 1)),
            "tensor 't' of shape .* and the file has 32 of it",
        ),
        (
            torch.empty(2**40, device="meta"),
            "tensor 't' is torch.float32 .*meta.* cannot be imported",
        ),
    ],
    ids=["expanded", "overlapping", "meta"],
)
def test_more_bytes_than_the_file_has(
    source: Path, cache: Path, names_in, tensor: torch.Tensor, says: str
) -> None:
    torch.save({"t": tensor}, source / BIN)
    assert (source / BIN).stat().st_size < 4096
    with pytest.raises(UsageError, match=f"{BIN}: {says}"):
        import_bin(source, cache)
    assert names_in(cache) == []


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
def test_tensors_that_are_not_plain(source: Path, cache: Path) -> None:
    eye = torch.eye(3)
    for tensor in (
        eye.to_sparse(),
        eye.to_sparse_csr(),
        torch.nested.nested_tensor([eye, eye[:1]]),
    ):
        torch.save({"t": tensor}, source / BIN)
        with pytest.raises(UsageError, match=f"{BIN}: tensor 't' is .* cannot be imported"):
            import_bin(source, cache)


def test_mapped_pages_are_dropped_without_losing_values(source: Path, weights) -> None:
    torch.save({"big": torch.arange(100_000)}, source / BIN)
    tensors, mapped = bin_import.load_tensors(source / BIN)
    assert mapped
    bin_import._forget(tensors["big"])
    assert torch.equal(tensors["big"], torch.arange(100_000))


class Malicious:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("zipped", [True, False])
def test_malicious_pickle_is_not_run(
    source: Path, cache: Path, tmp_path: Path, names_in, zipped: bool
) -> None:
    torch.save(
        {"t": Malicious(tmp_path / "owned")}, source / BIN, _use_new_zipfile_serialization=zipped
    )
    with pytest.raises(UsageError, match=rf"{BIN}: .*pickled code is never run"):
        import_bin(source, cache)
    assert not (tmp_path / "owned").exists()
    assert names_in(cache) == []


@pytest.mark.parametrize(
    ("keep", "zipped"), [(0.0, True), (0.02, False), (0.5, True), (0.99, False)]
)
def test_truncated_file(
    source: Path, cache: Path, weights, names_in, keep: float, zipped: bool
) -> None:
    torch.save(weights, source / BIN, _use_new_zipfile_serialization=zipped)
    data = (source / BIN).read_bytes()
    (source / BIN).write_bytes(data[: int(keep * len(data))])
    with pytest.raises(UsageError, match=rf"{BIN}: .*damaged") as caught:
        import_bin(source, cache)
    assert "\n" not in str(caught.value)
    assert names_in(cache) == []


def test_shards_that_do_not_belong_to_the_index(
    source: Path, cache: Path, weights, names_in
) -> None:
    """An index that is wrong about where a tensor lies is no reason to refuse it; a shard that is
    not there is."""
    save_sharded(weights, source)
    torch.save({"other": torch.zeros(1)}, source / SHARDS[1])
    assert read_index(import_bin(source, cache)).keys() == torch.load(source / SHARDS[0]).keys() | {
        "other"
    }
    (source / SHARDS[1]).unlink()
    with pytest.raises(UsageError, match=rf"{SHARDS[1]}.*missing"):
        import_bin(source, cache)


@pytest.mark.parametrize("state", [[torch.zeros(2)], {"model": {"t": torch.zeros(2)}}], ids=str)
def test_not_a_state_dict(source: Path, cache: Path, state: object) -> None:
    torch.save(state, source / BIN)
    with pytest.raises(UsageError, match=rf"{BIN}: it holds no named tensors"):
        import_bin(source, cache)


@pytest.mark.parametrize("call", ["posix_fallocate", "write"])
def test_full_disk(source: Path, cache: Path, weights, names_in, full_disk, call: str) -> None:
    save_sharded(weights, source)
    full_disk(call)
    with pytest.raises(DoesNotFitError, match="--offload-dir"):
        import_bin(source, cache)
    assert names_in(cache) == []
