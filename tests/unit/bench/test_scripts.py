"""Benchmarks run for real on the shipped tiny model, so that they follow the package they
measure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexgen_h2o.models.load import find_model
from tests.unit.bench.test_doors import run


def test_io_bandwidth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--model",
        "opt-tiny",
        "--sweeps",
        "4",
        "--repeats",
        "1",
        "--prompt-len",
        "8",
        "--quiet-wait",
        "0",
    ]
    code = run("io_bandwidth", [*flags, "--offload-dir", str(tmp_path)], monkeypatch)
    said = capsys.readouterr()
    if "is on no disk" in said.err:
        pytest.skip("temporary files are in RAM here")
    assert code == 0, said.err
    result = json.loads(said.out.splitlines()[-1])
    # The ring is how far a run may have read ahead when its first measured sweep begins.
    sweeps = result["read_bytes_per_sweep"]["values"]
    assert (
        sum(sweeps) + result["ring_bytes"]
        >= len(sweeps) * result["weight_bytes_on_disk"]
        > result["ring_bytes"]
        > 0
    )
    assert result["ratio"]["median"] > 0


def test_cut_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", "facebook/opt-125m", "--layers", "3", "--output"]
    assert run("cut_model", [*flags, str(tmp_path / "cut")], monkeypatch) == 0
    folder = capsys.readouterr().out.strip()
    assert folder == str(tmp_path / "cut")
    spec = find_model(folder, "_DUMMY_").spec
    whole = find_model("facebook/opt-125m", "_DUMMY_").spec
    assert (spec.num_blocks, spec.hidden_size, spec.vocab_size) == (
        3,
        whole.hidden_size,
        whole.vocab_size,
    )
    (tmp_path / "file").touch()
    assert run("cut_model", [*flags, str(tmp_path / "file")], monkeypatch) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "--output" in said
