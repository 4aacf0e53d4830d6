"""Prompts of data wrangling tasks from small folders of each; metrics."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import pytest

from flexgen_h2o.evaluation.data_wrangling import metrics
from flexgen_h2o.evaluation.wrangling_data import (
    Item,
    Task,
    drawn,
    find_task,
    read_items,
    shuffled,
)
from tests.extras import needs
from tests.unit.evaluation.wrangling import RESTAURANT, write_folder


def task_of(tmp_path: Path, name: str, files: Mapping[str, str], column: str | None = None) -> Task:
    return find_task(write_folder(tmp_path / name, files), column)


@needs("eval")
def test_tables_and_draws_are_as_pandas_has_them(tmp_path: Path) -> None:
    """The same texts and examples as fm_data_tasks' steps give."""
    pandas = import_module("pandas")  # comes with lm-eval
    rows = [f'{i},"n, {i}",{["", "1.50", "2"][i % 3]},{i % 4 == 1:d}' for i in range(23)]
    files = {**RESTAURANT, "train.csv": "id,name,city,label\n" + "\n".join(rows) + "\n"}
    task = task_of(tmp_path, "Restaurant", files)
    items = read_items(task, "train", ".", "nan")
    frame = pandas.read_csv(tmp_path / "Restaurant/train.csv")
    assert [item.label for item in items] == [f"{value}" for value in frame["city"]]
    frame["at"] = range(len(frame))
    whole = frame.sample(frac=1, random_state=42).reset_index(drop=True)
    assert [items.index(one) for one in shuffled(items, "data_imputation", True)] == list(
        whole["at"]
    )
    some = whole.sample(5, random_state=1234)
    assert [items.index(one) for one in drawn(shuffled(items, task.kind, False), 5, 1234)] == list(
        some["at"]
    )
    labelled = [Item(str(i), "Yes" if label else "No") for i, label in enumerate(frame["label"])]
    least = frame.groupby("label").count().min()["at"]
    groups = [group.sample(least, random_state=42) for _, group in frame.groupby("label")]
    want = pandas.concat(groups).sample(frac=1, random_state=42)
    assert [int(one.text) for one in shuffled(labelled, "entity_matching", True)] == list(
        want["at"]
    )


def test_metrics() -> None:
    said = ["Yes", "Yes, because", " no\n", "", "Yes", "yes"]
    labels = ["Yes", "Yes", "No", "Yes", "No", "Yes"]
    pairs = list(zip(said, labels, strict=True))
    # Of 4 positive ones 2 are found, and one that is none is claimed.
    found = metrics("entity_matching", pairs)
    assert found == {"acc": 0.5, "prec": 2 / 3, "rec": 0.5, "f1": pytest.approx(4 / 7), "others": 2}
    # An answer need only begin with the label.
    found = metrics("error_detection", pairs)
    assert (found["prec"], found["rec"], found["acc"]) == (3 / 4, 3 / 4, 4 / 6)
    assert metrics("entity_matching", [("no", "Yes")])["f1"] == 0
    assert metrics("data_imputation", [("New York ", "new york"), ("x", "y")]) == {
        "acc": 0.5,
        "prec": None,
        "rec": None,
        "f1": None,
        "others": None,
    }
