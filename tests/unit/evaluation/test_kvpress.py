"""kvpress's layout: names of folders and files, and what is never written over."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from flexgen_h2o.core.config import Policy
from flexgen_h2o.evaluation.kvpress import (
    PressRun,
    dropped_share,
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
ROWS: list[dict[str, Any]] = [
    {
        "context": "left out",
        "question": 'a "q",\nb',
        "answer_prefix": "",
        "answer": ["x", "y"],
        "max_new_tokens": 5,
        "predicted_answer": "x y",
        "task": "niah_single_1",
    },
    {
        "context": "left out",
        "question": "c",
        "answer_prefix": "A:",
        "answer": "z",
        "max_new_tokens": 5,
        "predicted_answer": "",
        "task": "niah_single_1",
    },
]


def predictions(folder: Path) -> list[dict[str, str]]:
    with (folder / "predictions.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_folder(tmp_path: Path) -> None:
    folder = write_press_run(
        tmp_path / "results", RUN, ROWS, {"niah_single_1": {"string_match": 50.0}}
    )
    name = "ruler__4096__meta-llama--Llama-3.2-1B__h2o-norm-grace=8,sinks=0__0.80"
    assert folder == tmp_path / "results" / name
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.yaml",
        "metrics.json",
        "predictions.csv",
    ]
    one, two = predictions(folder)
    assert list(one) == [
        "question",
        "answer_prefix",
        "answer",
        "max_new_tokens",
        "predicted_answer",
        "task",
        "compression_ratio",
    ]
    assert (one["question"], one["answer"], one["compression_ratio"]) == (
        'a "q",\nb',
        "['x', 'y']",
        "0.8",
    )
    assert (two["answer_prefix"], two["predicted_answer"]) == ("A:", "")
    assert json.loads((folder / "metrics.json").read_text()) == {
        "niah_single_1": {"string_match": 50.0}
    }
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert (
        config["press_name"] == RUN.press
        and config["compression_ratio"] == 0.8
        and config["seed"] == 3
    )
    assert (config["dataset"], config["data_dir"], config["fraction"]) == ("ruler", "4096", 1.0)


def test_the_share_that_is_dropped() -> None:
    """Layers with a window hold it with either; a share of bytes is counted in what the model's
    columns take."""
    spec = find_spec("facebook/opt-125m", None)
    row = [(60, 41)]
    half = H2O(kv_budget=0.5)
    windowed = replace(spec, windows=(10, None) * 6)
    assert dropped_share(half, spec, Policy(), row) == pytest.approx(1 - 51 / 100)
    assert dropped_share(half, windowed, Policy(), row) == pytest.approx(
        1 - (10 + 51) / (10 + 100), abs=1e-6
    )
    assert dropped_share(H2O(kv_bytes=0.3), spec, Policy(), row) == pytest.approx(0.7, abs=0.01)
