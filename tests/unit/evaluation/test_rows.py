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
    is_held_out,
    recall_rows,
    rows_of_file,
    stdlib_files,
    text_of,
)
from flexgen_h2o.models.load import Model, find_model


@pytest.fixture(scope="module")
def model() -> Model:
    return find_model("opt-tiny", None)


@pytest.fixture(scope="module")
def text(model: Model) -> HeldOutText:
    return text_of(None, model, "")


def test_one_file_in_forty_is_held_out() -> None:
    files = stdlib_files()
    share = sum(map(is_held_out, files)) / len(files)
    assert 1 / 80 < share < 1 / 20
    assert not any("site-packages" in path.parts for path in files)


def test_held_out_rows_begin_with_bos_do_not_overlap_and_follow_the_seed(text: HeldOutText) -> None:
    rows, again, other = (held_out_rows(text, 20, 160, 40, seed) for seed in (1, 1, 2))
    assert rows == again != other
    assert {(len(row.prompt), len(row.continuation), row.prompt[0]) for row in rows} == {
        (160, 40, 0)
    }
    assert len({row.prompt[1:] + row.continuation for row in rows}) == 20


def test_more_rows_than_there_is_text_are_refused(text: HeldOutText) -> None:
    with pytest.raises(
        UsageError, match=r"--num-prompts 100000: .* held-out prompts of 200 tokens"
    ):
        held_out_rows(text, 100_000, 160, 40, 0)


def test_recall_rows_ask_for_what_they_state(model: Model, text: HeldOutText) -> None:
    rows = recall_rows(text, 10, 160, 96, 5, 0)
    assert rows == recall_rows(text, 10, 160, 96, 5, 0)
    assert [row.depth for row in rows] == [0, 1, 2, 3, 4] * 2
    for row in rows:
        assert len(row.prompt) == 160 and len(row.continuation) <= 96
        assert len(row.questions) == PAIRS and [q.inside for q in row.questions] == [True] + [
            False
        ] * (PAIRS - 1)
        whole = model.tokenizer.decode([*row.prompt, *row.continuation])
        asked = whole.splitlines()[-PAIRS:]
        assert all(
            line.startswith("ask ") and "let" + line.removeprefix("ask") in whole for line in asked
        )
        for line, found in zip(asked, row.questions, strict=True):
            answer = model.tokenizer.decode([row.continuation[step] for step in found.answer])
            assert answer == line[-3:]
            stated = [*row.prompt][: round(found.at * 160)]
            assert model.tokenizer.decode(stated).endswith("let" + line.removeprefix("ask") + "\n")


def test_questions_that_do_not_fit_are_left_out_and_prompts_must_hold_the_pairs(
    text: HeldOutText,
) -> None:
    [row] = recall_rows(text, 1, 160, 6, 5, 0)
    assert len(row.questions) == 1 and len(row.continuation) == 6
    with pytest.raises(UsageError, match=r"--prompt-len 40: too short for recall prompts"):
        recall_rows(text, 1, 40, 40, 5, 0)
    with pytest.raises(
        UsageError,
        match=r"--gen-len 3: too short for the answer of a recall prompt; give more, or --re",
    ):
        recall_rows(text, 1, 160, 3, 5, 0)
    assert recall_rows(text, 0, 160, 3, 5, 0) == []


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


def test_recall_rows_that_are_longer_than_the_text_are_refused() -> None:
    encode = find_model("opt-tiny", None).tokenizer.encode
    with pytest.raises(UsageError, match=r"--prompt-len: .* held-out text, which has 50"):
        recall_rows(HeldOutText(encode, (), list(range(50))), 1, 300, 20, 5, 0)
