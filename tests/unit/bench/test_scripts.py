"""Benchmarks run for real on the shipped tiny model, so that they follow the package they
measure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
    sweeps = result["read_bytes_per_sweep"]["values"]
    weights = result["weight_bytes_on_disk"]
    # A run may have read ahead when its first measured sweep begins, by less than two sweeps.
    assert (len(sweeps) - 2) * weights < sum(sweeps) < (len(sweeps) + 2) * weights
    assert result["ratio"]["median"] > 0
