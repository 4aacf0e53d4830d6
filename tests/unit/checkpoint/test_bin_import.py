"""A .bin checkpoint becomes a full safetensors folder once; damaged and malicious files are refused
by name.

tests/parity/test_layouts.py has shards of all kinds.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from flexgen_h2o.checkpoint import bin_import, import_bin, read_index
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import MARK

BIN = "pytorch_model.bin"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    folder.mkdir()
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.mark.parametrize("zipped", [True, False])
def test_single_file(source: Path, cache: Path, read, zipped: bool) -> None:
    """Views become tensors of their own; dtypes, scalars and empty tensors stay."""
    base = torch.randn(6, 4)
    state = {"whole": base, "t": base.t(), "part": base[2:4], "strided": base[:, 1]}
    state |= {"half": base.bfloat16(), "scalar": base[0, 0].clone(), "bool": base > 0}
    torch.save(
        state | {"empty": base[:0].clone()}, source / BIN, _use_new_zipfile_serialization=zipped
    )
    stored = read_index(made := import_bin(source, cache))
    assert stored.pop("empty").shape == (0, 4) and stored.pop("bool").dtype == "BOOL"
    assert all(torch.equal(read(one), state[name]) for name, one in stored.items())
    assert len(stored) == 6 and len(list(made.glob("*.safetensors"))) == 1


def test_tied_tensors_are_written_once_and_found_by_both_names(
    source: Path, cache: Path, read
) -> None:
    tied = torch.randn(64, 64)
    torch.save({"second": tied, "first": tied, "copy": tied.clone()}, source / BIN)
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
    """Files that do not belong to the model do not count."""
    torch.save(weights, source / BIN)
    (source / "generation_config.json").write_text("{}")
    made = import_bin(source, cache)
    (source / "notes.txt").write_text("new")
    (source / "training_args.json").write_text("new")
    with monkeypatch.context() as patch:
        patch.setattr(bin_import, "_convert", lambda *_: pytest.fail("converted twice"))
        assert import_bin(source, cache) == made
    for changed in ("generation_config.json", BIN):
        os.utime(source / changed, ns=(1, 1))
        before = made
        made = import_bin(source, cache)
        assert made != before


EYE = torch.eye(3)


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: torch.zeros(1).expand(2**34), f"takes {2**36} bytes, and the file has 4 of it"),
        (lambda: torch.zeros(8).as_strided((2**20, 8), (0, 1)), "and the file has 32 of it"),
        (lambda: torch.empty(2**40, device="meta"), "is torch.float32 .*meta.* cannot be imported"),
        (lambda: EYE.to_sparse(), "tensor 't' .*cannot be imported"),
        (lambda: EYE.to_sparse_csr(), "cannot be imported"),
        (lambda: torch.nested.nested_tensor([EYE, EYE[:1]]), "cannot be imported"),
        (lambda: {"t": EYE}, "it holds no named tensors"),
    ],
)
def test_what_is_no_state_dict_of_plain_tensors(
    source: Path, cache: Path, names_in, made, says: str
) -> None:
    """Nor tensors that take more bytes than the file has."""
    torch.save({"t": made()}, source / BIN)
    with pytest.raises(UsageError, match=f"{BIN}: .*{says}"):
        import_bin(source, cache)
    assert names_in(cache) == []


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


@pytest.mark.parametrize(("keep", "zipped"), [(0.0, True), (0.02, False), (0.99, True)])
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
