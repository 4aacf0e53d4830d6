"""Rows: of held-out text, of prompt files, and recall rows in the words that the shipped model was
trained on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.evaluation.rows import (
    PAIRS,
    HeldOutText,
    held_out_rows,
    recall_rows,
    rows_of_file,
    text_of,
)
from flexgen_h2o.models.load import Model, find_model


@pytest.fixture(scope="module")
def model() -> Model:
    return find_model("opt-tiny", None)


@pytest.fixture(scope="module")
def text(model: Model) -> HeldOutText:
    return text_of(None, model, "")


def test_held_out_rows_begin_with_bos_do_not_overlap_and_follow_the_seed(text: HeldOutText) -> None:
    rows, again, other = (held_out_rows(text, 20, 160, 40, seed) for seed in (1, 1, 2))
    assert rows == again != other
    assert {(len(row.prompt), len(row.continuation), row.prompt[0]) for row in rows} == {
        (160, 40, 0)
    }
    assert len({row.prompt[1:] + row.continuation for row in rows}) == 20


def test_recall_rows_ask_for_what_they_state(model: Model, text: HeldOutText) -> None:
    rows = recall_rows(text, 10, 160, 96, 0)
    assert rows == recall_rows(text, 10, 160, 96, 0)
    for row in rows:
        assert len(row.prompt) == 160 and len(row.continuation) <= 96
        assert len(row.questions) == PAIRS
        whole = model.tokenizer.decode([*row.prompt, *row.continuation])
        asked = whole.splitlines()[-PAIRS:]
        assert all(
            line.startswith("ask ") and "let" + line.removeprefix("ask") in whole for line in asked
        )
        for line, found in zip(asked, row.questions, strict=True):
            answer = model.tokenizer.decode([row.continuation[step] for step in found])
            assert answer == line[-3:]


def test_rows_of_a_file_are_cut_and_short_ones_left_out(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt_token_ids": [5] * n}) + "\n" for n in (30, 9, 10, 12))
    )
    rows = rows_of_file(path, model, 6, 4, False, None)
    assert [(len(row.prompt), len(row.continuation)) for row in rows] == [(6, 4)] * 3
    assert len(rows_of_file(path, model, 6, 4, False, 2)) == 2
    greedy = rows_of_file(path, model, 11, 4, True, None)
    assert [(len(row.prompt), len(row.continuation)) for row in greedy] == [
        (11, 0),
        (9, 0),
        (10, 0),
        (11, 0),
    ]
    with pytest.raises(UsageError, match=r"no prompt has 60 tokens .* the longest has 30"):
        rows_of_file(path, model, 40, 20, False, None)
