"""Prompts of data wrangling tasks: from small folders of each, as plain texts; examples;
metrics."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

import pytest

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.evaluation.data_wrangling import is_right, metrics
from flexgen_h2o.evaluation.wrangling_data import (
    Item,
    Task,
    drawn,
    find_task,
    near_misses,
    read_items,
    shuffled,
)
from tests.extras import needs
from tests.unit.evaluation.wrangling import BEER, HOSPITAL, RESTAURANT, write_folder

Folder = Callable[[Mapping[str, str], str], Path]


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


def test_a_song_and_a_paper_are_asked_for_as_they_are(tmp_path: Path) -> None:
    songs = {
        **BEER,
        "tableA.csv": "id,Song_Name,CopyRight\n0,A,x\n1,B,y\n",
        "tableB.csv": "id,Song_Name\n0,A\n1,C\n",
    }
    task = task_of(tmp_path, "iTunes-Amazon", songs)
    assert (
        read_items(task, "test", ".", "nan")[0].text
        == "Song A is name: A. Song B is name: C. Same Song? "
    )
    papers = {**BEER, "tableA.csv": "id,venue\n0,vldb\n1,\n", "tableB.csv": "id,venue\n0,v\n1,w\n"}
    task = task_of(tmp_path, "DBLP-ACM", papers)
    assert [item.key for item in read_items(task, "validation", ".", "nan")] == ["vldb", "nan"]


def test_cells_of_a_table(tmp_path: Path) -> None:
    task = task_of(tmp_path, "Hospital", HOSPITAL)
    assert task.kind == "error_detection"
    items = read_items(task, "test", ".", "nan")
    assert [(item.text, item.label, item.key) for item in items] == [
        ("Is there a x spelling error in City: birmxngham? ", "Yes", "City"),
        ("Is there a x spelling error in Phone: 2053258100? ", "No", "Phone"),
    ]


def test_a_column_that_is_left_out(tmp_path: Path) -> None:
    task = task_of(tmp_path, "Restaurant", RESTAURANT)
    assert task.kind == "data_imputation"
    [item] = read_items(task, "validation", ".", "nan")
    assert (item.text, item.label) == (
        "name: ritz. addr: 160 e. 64th st.. type: nan. What is the city? ",
        "new york",
    )
    assert (
        read_items(task, "validation", "", "nan")[0].text
        == "name: ritz addr: 160 e. 64th st. type: nan What is the city? "
    )
    other = task_of(tmp_path, "Own", RESTAURANT, "type")
    assert (
        read_items(other, "train", ".", "?")[0].text
        == "name: a. addr: b. city: denver. What is the type? "
    )
    with pytest.raises(
        UsageError, match=r"--data-dir .*Own: say which column is to be imputed, with --column NAME"
    ):
        find_task(tmp_path / "Own", None)


BAD = [
    (
        "Beer",
        {**BEER, "tableA.csv": "id,x\n0,1\n"},
        r"valid.csv: names the id 1, which tableA.csv does not have",
    ),
    ("Beer", {**BEER, "tableB.csv": "x\n0\n"}, r"tableB.csv: has no column id, only x"),
    (
        "Beer",
        {**BEER, "valid.csv": "ltable_id,rtable_id,label\n0,0,maybe\n"},
        r"valid.csv: label has a value that is no",
    ),
    ("Beer", {**BEER, "valid.csv": "ltable_id,rtable_id,label\n"}, r"valid.csv has no rows"),
    (
        "Beer",
        {**BEER, "valid.csv": "ltable_id,rtable_id,label\n0,0,1,9\n"},
        r"valid.csv:2: 4 values, and 3 names",
    ),
    (
        "Hospital",
        {**HOSPITAL, "valid.csv": "row_id,col_name,is_clean\n9,City,1\n"},
        r"names City of row 9, which table",
    ),
    (
        "Hospital",
        {**HOSPITAL, "valid.csv": "row_id,col_name,is_clean\n0,Town,1\n"},
        r"names Town of row 0, which table",
    ),
    ("Restaurant", {**RESTAURANT, "valid.csv": "name\nx\n"}, r"valid.csv: has no column city"),
    (
        "Restaurant",
        {k: v for k, v in RESTAURANT.items() if k != "valid.csv"},
        r"no valid.csv in it; the data is in https",
    ),
    ("Beer", {"train.csv": "a", "tableA.csv": "a"}, r"no tableB.csv in it; the data is in https"),
    (
        "Beer",
        {},
        r"no train.csv in it; the data is in https.*datasets.tar.gz: unpack it, and give a folder",
    ),
]


@pytest.mark.parametrize(("name", "files", "says"), BAD, ids=[case[2][:40] for case in BAD])
def test_a_folder_that_is_not_right(
    name: str, files: dict[str, str], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=says):
        read_items(task_of(tmp_path, name, files), "validation", ".", "nan")


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


def test_balanced_examples_have_as_many_of_each(tmp_path: Path) -> None:
    items = [Item(f"{i}", "Yes" if i < 3 else "No") for i in range(20)]
    for kind in ("entity_matching", "error_detection"):
        chosen = shuffled(items, kind, True)
        assert sorted(one.label for one in chosen) == ["No"] * 3 + ["Yes"] * 3
    assert len(shuffled(items, "data_imputation", True)) == 20


def test_near_misses_are_alike_and_answered_otherwise() -> None:
    texts = [
        "red ale of big brewing",
        "red ale of big brewery",
        "a stout",
        "the stout",
        "lager",
        "pilsner and weizen",
    ]
    items = [
        Item(text, label)
        for text, label in zip(texts, ("Yes", "No", "Yes", "No", "No", "No"), strict=True)
    ]
    wrong = [False, True, False, False, False, False]
    assert [one.text for one in near_misses(items, wrong, 2)] == texts[:2]
    assert near_misses(items, [False] * 6, 2) == []


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
