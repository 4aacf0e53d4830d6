"""What generation_config.json asks of answers: transformers' greedy tokens, or a line that says
what is not applied."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from flexgen_h2o import LLM, SamplingParams
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.engine.conversation import Conversation
from flexgen_h2o.engine.decoding import stop_criteria
from flexgen_h2o.engine.generation import Callbacks, Listener
from flexgen_h2o.engine.penalties import penalties_of
from flexgen_h2o.engine.sequence import Sequence as Answered
from flexgen_h2o.models.load import find_model
from tests.text.conftest import Job
from tests.text.tiny import chat_line, edit_json, text_line, write_llama

NEW = 12
PROMPTS = ([5, 6, 7, 8], [9], [*range(20, 50), 5, 6, 20, 21])
# Settings that change tokens; `FIRST` is the first token of the answer without them.
FIRST = -1
SETTINGS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 0.7},
    {"no_repeat_ngram_size": 2},
    {"encoder_repetition_penalty": 0.5},
    {"encoder_no_repeat_ngram_size": 1},
    {"suppress_tokens": [FIRST]},
    {"begin_suppress_tokens": [FIRST]},
    {"bad_words_ids": [[FIRST], [FIRST, 3]]},
    {"sequence_bias": [[[FIRST], -9.0], [[3], 0.5]]},
    {"min_new_tokens": 5},
    {"min_length": 9},
    {"exponential_decay_length_penalty": [2, 1.5]},
    {"forced_eos_token_id": 7},
    {"forced_bos_token_id": 11},
    {"repetition_penalty": 1.3, "min_new_tokens": 6, "suppress_tokens": [3, 60]},
)


def transformers_tokens(folder: Path, ids: Sequence[int], new: int = NEW) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    x = torch.tensor([list(ids)])
    found = model.generate(
        x, attention_mask=torch.ones_like(x), max_new_tokens=new, do_sample=False, pad_token_id=0
    )
    tokens: list[int] = found[0, len(ids) :].tolist()
    return tokens


def our_tokens(folder: Path, tmp_path: Path, **params: Any) -> list[list[int]]:
    with LLM(str(folder), dtype="float32", offload_dir=tmp_path / "offload") as llm:
        done = llm.generate(
            [list(ids) for ids in PROMPTS], SamplingParams(max_tokens=NEW, **params)
        )
    return [one.token_ids for one in done]


@pytest.fixture
def ids_model(tmp_path: Path) -> Path:
    """Random weights without a tokenizer that like to repeat tokens; one answer is only the end of
    a sequence."""
    folder = tmp_path / "model"
    write_llama(folder, tie_word_embeddings=True, initializer_range=0.05)
    edit_json(
        folder / "generation_config.json",
        eos_token_id=[*transformers_tokens(folder, PROMPTS[1], 1), 256],
    )
    return folder


def with_first(value: Any, first: int) -> Any:
    """Return a setting with the first token in the place of FIRST."""
    if isinstance(value, list):
        return [with_first(one, first) for one in value]
    return first if value == FIRST else value


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_tokens_are_those_of_transformers(
    settings: dict[str, Any], ids_model: Path, tmp_path: Path
) -> None:
    [first] = transformers_tokens(ids_model, PROMPTS[0], 1)
    before = our_tokens(ids_model, tmp_path)
    settings = {name: with_first(value, first) for name, value in settings.items()}
    edit_json(ids_model / "generation_config.json", **settings)
    expected = [transformers_tokens(ids_model, ids) for ids in PROMPTS]
    assert our_tokens(ids_model, tmp_path) == expected != before
    assert our_tokens(ids_model, tmp_path, stop_token_ids=[*range(320, 400)]) == expected


def test_settings_may_be_in_the_config(ids_model: Path, tmp_path: Path) -> None:
    """In a folder without the other file transformers looks into config.json."""
    file = ids_model / "generation_config.json"
    ends = json.loads(file.read_text())["eos_token_id"]
    file.unlink()
    edit_json(ids_model / "config.json", eos_token_id=ends, no_repeat_ngram_size=1)
    expected = [transformers_tokens(ids_model, ids) for ids in PROMPTS]
    assert our_tokens(ids_model, tmp_path) == expected


def test_a_request_may_have_its_own_penalty(
    run_job: Callable[..., Job], bytes_model: Path, tmp_path: Path
) -> None:
    """1 takes the model's off. Prompts that are echoed take no penalties, and their answers see
    them."""
    folder = shutil.copytree(bytes_model, tmp_path / "model")
    write_llama(folder, tie_word_embeddings=True, initializer_range=0.05)
    expected = dict[float | None, list[int]]()
    for penalty in (1.0, 1.5, None):
        edit_json(folder / "generation_config.json", repetition_penalty=penalty or 1.2)
        expected[penalty] = transformers_tokens(folder, PROMPTS[0])
    assert len(set(map(tuple, expected.values()))) == 3
    lines = [
        text_line(str(penalty), PROMPTS[0], repetition_penalty=penalty, max_tokens=NEW)
        for penalty in expected
    ]
    more = {"echo": True, "logprobs": 1, "max_tokens": NEW}
    job = run_job(
        folder,
        *lines,
        text_line("echo", PROMPTS[0], repetition_penalty=1.5, **more),
        text_line("zero", PROMPTS[0], repetition_penalty=0),
    )
    for penalty, tokens in expected.items():
        assert job.choice(str(penalty))["token_ids"] == tokens
    assert job.choice("echo")["token_ids"] == expected[1.5]
    code, message = job.error("zero")
    assert code == "invalid_request" and "repetition_penalty" in message


def test_a_conversation_counts_all_that_was_said(ids_model: Path, tmp_path: Path) -> None:
    """Each turn as transformers would answer the whole conversation up to there."""
    edit_json(
        ids_model / "generation_config.json",
        repetition_penalty=1.5,
        begin_suppress_tokens=[1, 2],
        eos_token_id=319,
    )
    turns = [PROMPTS[0], [60, 61, 62], [70]]
    said: list[int] = []

    class Listening:
        def given(self, token: int, logits: Any) -> None:
            pass

        def said(self, token: int, reason: str | None) -> None:
            said.append(token)

    with LLM(str(ids_model), dtype="float32", offload_dir=tmp_path / "offload") as llm:
        params = SamplingParams(max_tokens=5)
        ends = stop_criteria(llm.model, params)
        penalties = partial(penalties_of, llm.model, params)
        talk = Conversation(
            turns[0], iter(turns[1:]), params, ends, Listening(), 40, penalties=penalties
        )
        done: list[Answered] = []
        llm.run([talk.sequence], done.extend, Callbacks(listener=Listener()))
    ids: list[int] = []
    for i, turn in enumerate(turns):
        ids += turn
        answer = said[5 * i : 5 * i + 5]
        assert answer == transformers_tokens(ids_model, ids, 5)
        ids += answer


def test_what_is_not_applied_is_said(ids_model: Path) -> None:
    model = find_model(str(ids_model), None)
    assert model.notes == []
    others = {"num_beams": 4, "stop_strings": ["x"], "temperature": 0.6, "do_sample": True}
    edit_json(ids_model / "generation_config.json", **others)
    note, of_drawing = find_model(str(ids_model), None).notes
    assert note.endswith("applies and this package does not: num_beams, stop_strings")
    assert "do_sample True, temperature 0.6: answers are greedy unless" in of_drawing


def test_drawing_of_the_file_is_said(ids_model: Path) -> None:
    idle = {"do_sample": False, "temperature": 0.6, "top_k": 0, "top_p": 1.0, "min_p": None}
    edit_json(ids_model / "generation_config.json", **idle)
    assert find_model(str(ids_model), None).notes == []
    asked = {"do_sample": True, "top_k": 20, "top_p": 0.8, "min_p": 0.1}
    edit_json(ids_model / "generation_config.json", **asked)
    [note] = find_model(str(ids_model), None).notes
    for said in ("--temperature 0.6", "then use its top_k and top_p", "min_p never count"):
        assert said in note


# What a request gives for itself, and whether its tokens are then drawn from the likeliest alone.
DRAWN: tuple[tuple[dict[str, Any], dict[str, Any], bool], ...] = (
    ({"top_k": 1}, {}, True),
    ({"top_k": 1}, {"top_k": None}, True),
    ({"top_k": 1}, {"top_k": -1}, False),
    ({"top_k": 1}, {"top_k": 0, "top_p": 1e-9}, True),
    ({"top_k": 1, "top_p": 1.0}, {"top_p": 0.999}, True),
    ({"top_p": 1e-9}, {}, True),
    ({"top_p": 1e-9}, {"top_p": 1.0}, False),
    ({}, {}, False),
)


def test_answers_are_drawn_as_the_file_asks(
    run_job: Callable[..., Job], bytes_model: Path, tmp_path: Path
) -> None:
    """In jobs and in Python; what a request or a flag gives counts more."""
    folder = shutil.copytree(bytes_model, tmp_path / "model")
    draws = [{"seed": seed, "temperature": 1.0, "max_tokens": 4} for seed in range(3)]
    for asked, own, is_likeliest in DRAWN:
        (folder / "generation_config.json").write_text(json.dumps(asked))
        lines = [text_line(str(draw["seed"]), "Hello", **draw, **own) for draw in draws]
        job = run_job(folder, text_line("greedy", "Hello", max_tokens=4), *lines)
        answers = [tuple(job.choice(name)["token_ids"]) for name in ("greedy", "0", "1", "2")]
        assert (len(set(answers)) == 1) is is_likeliest, (asked, own)
    (folder / "generation_config.json").write_text(json.dumps({"top_k": 1}))
    lines = [text_line(str(draw["seed"]), "Hello", **draw) for draw in draws]
    by_flag = run_job(folder, *lines, flags="--top-k 0")
    assert len({tuple(by_flag.choice(name)["token_ids"]) for name in "012"}) > 1
    with LLM(str(folder), dtype="float32", offload_dir=tmp_path / "offload") as llm:
        done = llm.generate(["Hello"] * 3, [SamplingParams(**draw) for draw in draws])
    greedy = job.choice("greedy")["token_ids"]
    assert [one.token_ids for one in done] == [greedy] * 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", "often"),
        ("no_repeat_ngram_size", 1.5),
        ("bad_words_ids", []),
        ("sequence_bias", [[[9999], 1.0]]),
        ("min_new_tokens", -2),
        ("top_k", "many"),
        ("top_p", 1.5),
    ],
)
def test_a_wrong_value_is_named(name: str, value: Any, ids_model: Path) -> None:
    edit_json(ids_model / "generation_config.json", **{name: value})
    says = f"generation_config.json: {name}: .*; correct it, or take it"
    with pytest.raises(UsageError, match=says):
        find_model(str(ids_model), None)


def test_a_job_does_not_go_on_with_other_settings(
    run_job: Callable[..., Job], ids_model: Path
) -> None:
    for penalty, code in ((1.5, 0), (1.6, 2)):
        edit_json(ids_model / "generation_config.json", repetition_penalty=penalty)
        job = run_job(ids_model, {"prompt": [5, 6], "max_tokens": 2}, flags="--output again.jsonl")
        assert job.code == code
    assert "model.config was" in job.err


def test_penalties_leave_the_ends_of_a_turn_alone(
    run_job: Callable[..., Job], bytes_model: Path, tmp_path: Path
) -> None:
    """min_new_tokens forbids them all, the tokenizer's too, for a chat."""
    folder = shutil.copytree(bytes_model, tmp_path / "model")
    edit_json(folder / "generation_config.json", min_new_tokens=30, eos_token_id=3)
    job = run_job(
        folder,
        chat_line("a", "hello", seed=1, temperature=2.0),
        chat_line("b", "you", seed=2, temperature=2.0),
    )
    for name in "ab":
        assert (
            len(job.choice(name)["token_ids"]) >= 30
            and 256 not in job.choice(name)["token_ids"][:29]
        )
