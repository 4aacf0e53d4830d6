"""kvpress's layout: names of folders and files."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from flexgen_h2o.core.config import Policy
from flexgen_h2o.evaluation.kvpress import (
    PressRun,
    kept_share,
    write_press_run,
)
from flexgen_h2o.kvcache.eviction import H2O
from flexgen_h2o.models.load import find_spec

RUN = PressRun(
    "ruler",
    "meta-llama/Llama-3.2-1B",
    "h2o-norm:grace=8,sinks=0",
    0.8,
    "4096",
    settings={"seed": 3},
)
ROW = {
    "context": "left out",
    "question": 'a "q",\nb',
    "answer_prefix": "A:",
    "answer": ["x", "y"],
    "max_new_tokens": 5,
    "predicted_answer": "x y",
    "task": "niah_single_1",
}


def test_a_folder(tmp_path: Path) -> None:
    metrics = {"niah_single_1": {"string_match": 50.0}}
    folder = write_press_run(tmp_path / "results", RUN, [ROW, ROW], metrics)
    name = "ruler__4096__meta-llama--Llama-3.2-1B__h2o-norm-grace=8,sinks=0__0.80"
    assert folder == tmp_path / "results" / name
    with (folder / "predictions.csv").open(newline="") as file:
        written = list(csv.DictReader(file))
    kept = {name: str(value) for name, value in ROW.items() if name != "context"}
    assert written == [{**kept, "compression_ratio": "0.8"}] * 2
    assert json.loads((folder / "metrics.json").read_text()) == metrics
    assert yaml.safe_load((folder / "config.yaml").read_text()) == {
        "dataset": "ruler",
        "data_dir": "4096",
        "model": RUN.model,
        "press_name": RUN.press,
        "compression_ratio": 0.8,
        "fraction": 1.0,
        "seed": 3,
    }


def test_the_share_that_is_kept() -> None:
    """Layers with a window hold it with either; a share of bytes is counted in what the model's
    columns take."""
    spec = find_spec("facebook/opt-125m", None)
    row = [(60, 41)]
    half = H2O(kv_budget=0.5)
    windowed = replace(spec, windows=(10, None) * 6)
    assert kept_share(half, spec, Policy(), row) == pytest.approx(51 / 100)
    assert kept_share(half, windowed, Policy(), row) == pytest.approx((10 + 51) / (10 + 100))
    assert kept_share(H2O(kv_bytes=0.3), spec, Policy(), row) == pytest.approx(0.3, abs=0.01)
