"""The benchmark of experts' products runs through: nothing else does, where kernels are moved."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from bench.kernels import grouped_products
from flexgen_h2o.kernels import products


@pytest.mark.skipif(
    not (products.has_loop(torch.bfloat16) and products.has_loop(torch.uint8)), reason="no loop is compiled here"
)
def test_experts_of_one_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_products, "SHAPES", {"small": (128, 64)})
    for name, value in (("POOL_BYTES", 2**18), ("LEAST_S", 0.0), ("PEAK_SIDE", 64)):
        monkeypatch.setattr(grouped_products, name, value)
    output, threads = tmp_path / "r.json", torch.get_num_threads()
    flags = f"--models small --rows 3 8 --repeats 2 --patience 0 --quiet-wait 0 --one-thread --output {output}"
    monkeypatch.setattr(sys, "argv", ["grouped_products.py", *flags.split()])
    try:
        grouped_products.main()
    finally:
        torch.set_num_threads(threads)
    found = json.loads(output.read_text())["products"]
    assert [one["rows"] for one in found] == [3, 8]
    forms = {"torch", "blocked", "in_order", "int8_blocked", "int8_in_order"}
    assert all(set(one["flops_per_s"]) == forms and one["of_roofline"]["blocked"]["median"] > 0 for one in found)
