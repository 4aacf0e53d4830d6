"""Prompts and labels of data wrangling tasks, from folders in the layout of fm_data_tasks.

Tasks, layout and texts are those of Narayan et al. 2022 (arXiv 2205.09911), whose code is
HazyResearch/fm_data_tasks. Entity matching has pairs of rows of two tables, error detection names
cells of one table, and imputation leaves a column out. Tables are read as pandas reads them,
because its numbers are in the prompts (`2003.0` in a column with gaps). Rows are drawn with numpy's
RandomState as pandas draws them, so the same seed draws the same examples.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import read_bounded

MAX_TABLE_BYTES = 2**28
WHERE = (
    "the data is in https://fm-data-tasks.s3.us-west-1.amazonaws.com/datasets.tar.gz: unpack it, "
    "and give a folder "
    "such as datasets/entity_matching/structured/Beer"
)
# Kind of task: the tables of its folder.
FILES = {
    "entity_matching": ("tableA.csv", "tableB.csv"),
    "error_detection": ("table.csv",),
    "data_imputation": (),
}
SPLITS = {"train": "train.csv", "validation": "valid.csv", "test": "test.csv"}
# Values that pandas reads as missing in a CSV file.
_GAPS = frozenset(
    {
        "",
        "#N/A",
        "#N/A N/A",
        "#NA",
        "-1.#IND",
        "-1.#QNAN",
        "-NaN",
        "-nan",
        "1.#IND",
        "1.#QNAN",
        "<NA>",
        "N/A",
        "NA",
        "NULL",
        "NaN",
        "None",
        "n/a",
        "nan",
        "null",
    }
)
_SHUFFLE_SEED = 42  # fm_data_tasks' seed of the order of training rows


@dataclass(frozen=True)
class Task:
    """A folder with a task's data, and the texts and columns particular to its data set."""

    # Name of the thing that a row describes.
    noun: str = "Product"
    # Question at the end of a row's text.
    question: str = " Are Product A and Product B the same?"
    # Instruction of the task, for --add-task-instruction.
    instruction: str = "Are Product A and Product B the same? Yes or No? "
    # Columns that are left out.
    dropped: tuple[str, ...] = ()
    # Name of a column in the table -> its name in the prompt; other columns keep their names.
    renamed: Mapping[str, str] | None = None
    # Column that is imputed.
    column: str | None = None
    # Column whose value selects one of several hand-written texts of examples.
    key: str | None = None
    # The folder, its name, and the kind of task, a key of FILES; set by `find_task`.
    folder: Path = Path()
    name: str = ""
    kind: str = ""


_SONGS = {
    "Song_Name": "name",
    "Artist_Name": "artist name",
    "Album_Name": "album name",
    "Genre": "genre",
    "Price": "price",
    "Time": "time",
    "Released": "released",
}
DATASETS = {
    "Amazon-Google": Task(key="manufacturer_A"),
    "Beer": Task(
        dropped=("Style", "ABV"), renamed={"Beer_Name": "name", "Brew_Factory_Name": "factory"}
    ),
    "DBLP-ACM": Task(key="venue_A"),
    "DBLP-GoogleScholar": Task(key="venue_A"),
    "Fodors-Zagats": Task(),
    "iTunes-Amazon": Task(
        "Song", " Same Song?", "Are Song A and Song B the same? Yes or No? ", ("CopyRight",), _SONGS
    ),
    "Walmart-Amazon": Task(
        question=" Are A and B the Same?", dropped=("category", "price", "brand")
    ),
    "Buy": Task(
        question=" Who is the manufacturer?",
        instruction="Who is the manufacturer? apple, sony, lg electronics? ",
        column="manufacturer",
    ),
    "Restaurant": Task(
        question=" What is the city?",
        instruction="What is the city? san fransisco, new york, denver? ",
        column="city",
    ),
    "Hospital": Task(
        question="?", instruction="Is there a x spelling error? Yes or No? ", key="col_name"
    ),
}


@dataclass(frozen=True)
class Item:
    """A row of a task; made by `read_items`, or read from the answers of an earlier run."""

    text: str  # the row and its question; the answer comes next
    label: str  # the right answer
    key: str = ""  # value of the column `Task.key`

    @property
    def example(self) -> str:
        """Text of the row with its answer, as an example."""
        return f"{self.text}{self.label}".strip()


def find_task(folder: Path, column: str | None) -> Task:
    """Return the task in a folder. Its tables tell the kind, its name tells the data set.

    column: column to impute, for folders whose name tells none. Raise UsageError saying which file
    is missing and where the data can be fetched.
    """
    have = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if "train.csv" not in have:
        missing = "there is no train.csv in it" if folder.is_dir() else "there is no such folder"
        raise UsageError(f"--data-dir {folder}: {missing}; {WHERE}")
    one, other = FILES["entity_matching"]
    if (one in have) != (other in have):
        raise UsageError(
            f"--data-dir {folder}: there is no {other if one in have else one} in it; {WHERE}"
        )
    kind = next(kind for kind, tables in FILES.items() if have.issuperset(tables))
    name = folder.resolve().name
    task = DATASETS.get(name) or (DATASETS["Hospital"] if kind == "error_detection" else Task())
    if column is not None and kind != "data_imputation":
        raise UsageError(
            f"--column {column}: {folder} is of {kind.replace('_', ' ')}, where nothing is imputed"
        )
    wanted = column or task.column
    if kind == "data_imputation" and wanted is None:
        raise UsageError(
            f"--data-dir {folder}: say which column is to be imputed, with --column NAME"
        )
    if wanted != task.column:
        task = Task(
            question=f" What is the {wanted}?", instruction=f"What is the {wanted}? ", column=wanted
        )
    return replace(task, folder=folder, kind=kind, name=name)


def read_items(task: Task, split: str, sep: str, gap: str) -> list[Item]:
    """Return the rows of a split.

    sep: text between the columns of a row. gap: text in place of a missing value.
    """
    read = {"entity_matching": _pairs, "error_detection": _cells, "data_imputation": _rows}[
        task.kind
    ]
    path = task.folder / SPLITS[split]
    if not path.is_file():
        raise UsageError(f"--data-dir {task.folder}: there is no {path.name} in it; {WHERE}")
    as_text = partial(_as_text, sep=sep, gap=gap)
    items = read(
        task, WranglingTable.read(path), as_text, f" {sep}" if sep not in ("", ".") else sep
    )
    if not items:
        raise UsageError(f"--data-dir: {path} has no rows")
    return items


@dataclass(frozen=True)
class WranglingTable:
    """A CSV file."""

    path: Path
    columns: dict[str, list[str | None]]  # values by name of the column; None: missing

    @classmethod
    def read(cls, path: Path) -> WranglingTable:
        """Read a CSV file. Raise UsageError naming the file and the line."""
        try:
            text = read_bounded(path, MAX_TABLE_BYTES).decode("utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            reason = (
                "not UTF-8 text"
                if isinstance(error, UnicodeDecodeError)
                else error.strerror or error
            )
            raise UsageError(f"--data-dir: {path}: {reason}") from error
        lines = csv.reader(io.StringIO(text, newline=""), strict=True)
        try:
            names = next(lines, [])
            rows = []
            for row in lines:
                if len(row) > len(names):
                    raise UsageError(
                        f"--data-dir: {path}:{lines.line_num}: {len(row)} values, and {len(names)} "
                        "names"
                    )
                if row:
                    rows.append([*row, *[""] * (len(names) - len(row))])
        except csv.Error as error:
            raise UsageError(f"--data-dir: {path}:{lines.line_num}: {error}") from error
        return cls(
            path, {name: _as_pandas([row[i] for row in rows]) for i, name in enumerate(names)}
        )

    def column(self, name: str) -> list[str | None]:
        """Return the values of a column. Raise UsageError if the table has no such column."""
        if name not in self.columns:
            raise UsageError(
                f"--data-dir: {self.path}: has no column {name}, only "
                f"{', '.join(self.columns)[:200]}"
            )
        return self.columns[name]

    def numbers(self, name: str) -> list[int]:
        """Return a column of whole numbers. Raise UsageError for another value."""
        values = self.column(name)
        try:
            return [int(float(value or "")) for value in values]
        except (ValueError, OverflowError) as error:
            raise UsageError(
                f"--data-dir: {self.path}: {name} has a value that is no whole number"
            ) from error

    def rows(self, task: Task, without: Sequence[str]) -> list[dict[str, str | None]]:
        """Return each row as a dict of the columns that are used, under their names in prompts.

        without: columns that are left out, beside those that `task` drops.
        """
        names = {
            n: (task.renamed or {}).get(n, n)
            for n in self.columns
            if n not in (*task.dropped, *without)
        }
        count = len(next(iter(self.columns.values()), []))
        return [{new: self.columns[old][i] for old, new in names.items()} for i in range(count)]


def _as_pandas(values: list[str]) -> list[str | None]:
    """Return the values of a column as pandas would print them.

    Numbers lose leading and trailing zeros. Whole numbers get `.0` if the column has gaps or
    fractions.
    """
    found = [None if value in _GAPS else value for value in values]
    given = [value for value in found if value is not None]
    for kind in (int, float):
        try:
            read = [None if value is None else kind(value) for value in found]
        except ValueError:
            continue
        if any("_" in value for value in given):  # a number to Python, but not to pandas
            break
        return [
            None if n is None else str(n if len(given) == len(found) else float(n)) for n in read
        ]
    return found


# ---- Rows as texts


AsText = Callable[[Mapping[str, str | None]], str]


def _as_text(row: Mapping[str, str | None], sep: str, gap: str) -> str:
    """Return a row as text: `name: value. other: value`."""
    cells = [
        f"{name}: {gap if value is None else value.strip()}".lstrip() for name, value in row.items()
    ]
    return (f" {sep} " if sep not in ("", ".") else f"{sep} ").join(cells)


def _pairs(task: Task, labels: WranglingTable, as_text: AsText, sep: str) -> list[Item]:
    noun = task.noun
    sides = []
    for side, name in (("A", "ltable_id"), ("B", "rtable_id")):
        table = WranglingTable.read(task.folder / f"table{side}.csv")
        rows = dict(zip(table.column("id"), table.rows(task, ["id"]), strict=True))
        sides.append([_found(rows, one, table, labels) for one in labels.column(name)])
    found = []
    for a, b, label in zip(*sides, labels.numbers("label"), strict=True):
        text = f"{noun} A is {as_text(a)}. {noun} B is {as_text(b)}.{task.question} "
        key = a.get((task.key or "").removesuffix("_A"))
        found.append(Item(text, "Yes" if label == 1 else "No", "nan" if key is None else key))
    return found


def _found(
    rows: Mapping[str | None, dict[str, str | None]],
    one: str | None,
    table: WranglingTable,
    labels: WranglingTable,
) -> dict[str, str | None]:
    if one not in rows:
        raise UsageError(
            f"--data-dir: {labels.path}: names the id {one}, which {table.path.name} does not have"
        )
    return rows[one]


def _cells(task: Task, labels: WranglingTable, as_text: AsText, sep: str) -> list[Item]:
    rows = WranglingTable.read(task.folder / "table.csv").rows(task, ())
    found = []
    cells = zip(
        labels.numbers("row_id"), labels.column("col_name"), labels.numbers("is_clean"), strict=True
    )
    for number, name, is_clean in cells:
        if not 0 <= number < len(rows) or name is None or name not in rows[number]:
            raise UsageError(
                f"--data-dir: {labels.path}: names {name} of row {number}, which table.csv does "
                "not have"
            )
        cell = as_text({name: rows[number][name]})
        text = f"Is there a x spelling error in {cell}{task.question} "
        found.append(Item(text, "No" if is_clean == 1 else "Yes", name))
    return found


def _rows(task: Task, table: WranglingTable, as_text: AsText, sep: str) -> list[Item]:
    wanted = task.column
    assert wanted is not None
    labels = table.column(wanted)
    return [
        Item(f"{as_text(row)}{sep}{task.question} ", "nan" if label is None else label)
        for row, label in zip(table.rows(task, ["id", wanted]), labels, strict=True)
    ]


# ---- Examples


def shuffled(items: Sequence[Item], kind: str, balanced: bool) -> list[Item]:
    """Return the training rows in the order that examples are drawn from.

    balanced: keep as many rows of each answer. Imputation ignores it.
    """
    if balanced and kind != "data_imputation":
        # The labels are in the order of their numbers: `label` 1 is Yes, `is_clean` 1 is No.
        labels = sorted({item.label for item in items}, reverse=kind == "error_detection")
        groups = [[item for item in items if item.label == label] for label in labels]
        least = min(map(len, groups))
        items = [one for group in groups for one in drawn(group, least, _SHUFFLE_SEED)]
    return drawn(items, len(items), _SHUFFLE_SEED)


def drawn(items: Sequence[Item], count: int, seed: int) -> list[Item]:
    """Return `count` different items, in the order drawn."""
    return [
        items[i] for i in np.random.RandomState(seed).choice(len(items), size=count, replace=False)
    ]
