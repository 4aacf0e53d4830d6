"""The benchmark of products runs through: nothing else does when kernels are moved."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.kernels import products
from flexgen_h2o.kernels import products as kernels
from flexgen_h2o.planner.measure.bench import FASTER, MLP


@pytest.mark.skipif(
    not (kernels.has_loop(torch.bfloat16) and kernels.has_loop(torch.uint8)),
    reason="no loop is compiled here",
)
def test_products_of_a_small_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(products.HOST, weight_bytes=2**20, longest_s=0.01)
    monkeypatch.setattr(products, "HOST", small)
    output = tmp_path / "r.json"
    flags = [
        "--hidden",
        "128",
        "--rows",
        "8",
        "3",
        "--figure-s",
        "0",
        "--quiet-wait",
        "0",
        "--output",
        str(output),
    ]
    monkeypatch.setattr(sys, "argv", ["products.py", *flags])
    assert products.main() == 0
    found = json.loads(output.read_text())["products"]
    assert [(one["outer"], one["rows"]) for one in found] == [
        (outer, rows) for outer in (128, MLP * 128, 128) for rows in (3, 8)
    ]
    assert all(set(one["gain"]) == set(FASTER) and min(one["gain"].values()) > 0 for one in found)
