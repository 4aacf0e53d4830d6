"""Prompts of data wrangling tasks: from small folders of each, as plain texts; examples;
metrics."""

from __future__ import annotations

import random
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import pytest

from flexgen_h2o.evaluation.data_wrangling import is_right, metrics
from flexgen_h2o.evaluation.wrangling_data import (
    Item,
    Task,
    drawn,
    find_task,
    read_items,
    shuffled,
)
from tests.extras import needs
from tests.unit.evaluation.wrangling import BEER, RESTAURANT, write_folder


def task_of(tmp_path: Path, name: str, files: Mapping[str, str], column: str | None = None) -> Task:
    return find_task(write_folder(tmp_path / name, files), column)


def test_pairs_of_two_tables(tmp_path: Path) -> None:
    """Dropped and renamed columns; a column with a gap has numbers with a point; the order is that
    of the pairs."""
    task = task_of(tmp_path, "Beer", BEER)
    assert task.kind == "entity_matching"
    first, second = read_items(task, "validation", ".", "nan")
    assert first.text == (
        "Product A is name: Red Ale. factory: Big, Brewing. year: 2003. Product B is name: Red "
        "ale. factory: nan. "
        "year: 2003.0. Are Product A and Product B the same? "
    )
    assert (first.label, second.label) == ("Yes", "No")
    assert second.text.startswith(
        "Product A is name: Stout. factory: Small. year: 7. Product B is name: Porter."
    )
    piped = read_items(task, "validation", "|", "")[0].text
    assert piped == (
        "Product A is name: Red Ale | factory: Big, Brewing | year: 2003. Product B is name: Red "
        "ale | factory:  | "
        "year: 2003.0. Are Product A and Product B the same? "
    )


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


def slow(kind: str, pairs: list[tuple[str, str]]) -> tuple[float, float, float, float]:
    """Precision, recall, F1 and accuracy, by counting rows one by one."""
    true = claimed = wanted = right = 0
    for said, label in pairs:
        ok = is_right(kind, said, label)
        right += ok
        wanted += label == "Yes"
        true += ok and label == "Yes"
        claimed += (label == "Yes" and ok) or (label == "No" and not ok)
    precision, recall = (true / n if n else 0 for n in (claimed, wanted))
    f1 = 0 if not true else 1 / ((1 / precision + 1 / recall) / 2)
    return precision, recall, f1, right / len(pairs)


def test_metrics_are_those_of_a_slow_count() -> None:
    rng = random.Random(3)
    for kind in ("entity_matching", "error_detection"):
        for size in (1, 2, 5, 40):
            said = ("Yes", " no\n", "Yes, because", "", "maybe")
            pairs = [(rng.choice(said), rng.choice(("Yes", "No"))) for _ in range(size)]
            found = metrics(kind, pairs)
            assert [found[name] for name in ("prec", "rec", "f1", "acc")] == pytest.approx(
                slow(kind, pairs)
            )
    assert is_right("error_detection", "Yes, because", "Yes") and not is_right(
        "entity_matching", "Yes, because", "Yes"
    )
    assert metrics("entity_matching", [("maybe", "No"), ("yes", "Yes")])["others"] == 1
    assert metrics("data_imputation", [("New York ", "new york"), ("x", "y")]) == {
        "acc": 0.5,
        "prec": None,
        "rec": None,
        "f1": None,
        "others": None,
    }
