"""Benchmarks answer wrong use as the package's command lines do: one line, exit code 2.

Two run for real on small models, so that they follow the package they measure.
"""

from __future__ import annotations

import json
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.kernels import products
from flexgen_h2o.kernels import products as kernels
from flexgen_h2o.planner.measure.bench import FASTER, MLP

BENCH = Path(__file__).resolve().parents[3] / "bench"
OTHERS = ("__init__", "reader")  # modules that are no commands
FOLDERS = ("kernels", "engine", "planner")
MODULES = {
    path.stem: f"bench.{folder}.{path.stem}"
    for folder in FOLDERS
    for path in sorted((BENCH / folder).glob("*.py"))
    if path.stem not in OTHERS
}
SCRIPTS = sorted(MODULES)


def run(name: str, flags: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *flags])
    monkeypatch.delitem(
        sys.modules, MODULES[name], raising=False
    )  # or runpy warns that another has imported it
    with pytest.raises(SystemExit) as stop:
        runpy.run_module(MODULES[name], run_name="__main__", alter_sys=True)
    return stop.value.code


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("io_bandwidth", ["--repeats", "0"]),
        ("io_bandwidth", ["--model", "nobody/none"]),
        ("roofline", ["--gen-len", "1"]),
        ("products", ["--hidden", "x"]),
        ("planner_accuracy", ["--quiet-wait", "nan"]),
        *((name, ["--nonsense"]) for name in SCRIPTS),
    ],
)
def test_a_value_that_cannot_be(
    name: str, flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(name, flags, monkeypatch) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith(f"{name}: ") and flags[0] in said


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_result_that_could_not_be_written_is_refused_before_anything_is_measured(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("bench.common.wait_for_quiet", pytest.fail)
    for path in (tmp_path / "none" / "r.json", tmp_path):
        assert run(name, ["--output", str(path)], monkeypatch) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and f"--output {path}: " in said
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(
    not (kernels.has_loop(torch.bfloat16) and kernels.has_loop(torch.uint8)),
    reason="no loop is compiled here",
)
def test_products_of_a_small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(products.HOST, weight_bytes=2**20, longest_s=0.01)
    monkeypatch.setattr(products, "HOST", small)
    output = tmp_path / "r.json"
    flags = f"--hidden 128 --rows 8 3 --figure-s 0 --quiet-wait 0 --output {output}"
    monkeypatch.setattr(sys, "argv", ["products.py", *flags.split()])
    assert products.main() == 0
    found = json.loads(output.read_text())["products"]
    assert [(one["outer"], one["rows"]) for one in found] == [
        (outer, rows) for outer in (128, MLP * 128, 128) for rows in (3, 8)
    ]
    assert all(set(one["gain"]) == set(FASTER) and min(one["gain"].values()) > 0 for one in found)


def test_io_bandwidth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = "--model opt-tiny --sweeps 4 --repeats 1 --prompt-len 8 --quiet-wait 0 --offload-dir"
    code = run("io_bandwidth", [*flags.split(), str(tmp_path)], monkeypatch)
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
