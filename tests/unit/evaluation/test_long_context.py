"""Questions of RULER's kinds: as long as asked for, answered in their text, the same for the same
seed."""

from __future__ import annotations

import pytest

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.evaluation.long_context import TASKS, TaskQuestion, questions
from flexgen_h2o.models.load import Model, find_model


@pytest.fixture(scope="module")
def model() -> Model:
    return find_model("opt-tiny", None)


@pytest.mark.parametrize("task", TASKS)
def test_questions_fill_their_length_and_hold_their_answers(model: Model, task: str) -> None:
    found = questions(task, model, 480, 3, seed=1)
    assert found == questions(task, model, 480, 3, seed=1) != questions(task, model, 480, 3, seed=2)
    for one in found:
        assert 400 < len(one.prompt) <= 480
        text = model.tokenizer.decode(one.prompt)
        assert all(answer in text for answer in one.answers)
        assert one.score(f"They are {', '.join(one.answers)}.") == 1 and one.score("") == 0


def test_a_score_is_the_share_of_the_wanted_strings() -> None:
    assert TaskQuestion((1,), ("tiger", "lion"), 8).score("A LION and a mouse") == 0.5


def test_too_short_a_prompt_is_refused(model: Model) -> None:
    with pytest.raises(UsageError, match=r"^--prompt-len 20: too short for a question of vt"):
        questions("vt", model, 20, 1, seed=0)
