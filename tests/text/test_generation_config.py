"""What generation_config.json asks of answers: transformers' greedy tokens, or a line that says
what is not applied."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from flexgen_h2o import LLM, SamplingParams, flex_opt
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.engine.conversation import Conversation
from flexgen_h2o.engine.decoding import stop_criteria
from flexgen_h2o.engine.generation import Callbacks, Silent
from flexgen_h2o.engine.penalties import penalties_maker
from flexgen_h2o.engine.sequence import Sequence as Answered
from flexgen_h2o.models.load import find_model
from tests.text.conftest import Job
from tests.text.tiny import chat_line, edit_json, text_line, write_llama

NEW = 12
PROMPTS = ([5, 6, 7, 8], [9], [*range(20, 50), 5, 6, 20, 21])
SETTINGS: dict[str, Any] = {
    "repetition_penalty": 1.5,
    "repetition_penalty below 1": 0.7,
    "no_repeat_ngram_size": 1,
    "no_repeat_ngram_size of two": 2,
    "encoder_repetition_penalty": 0.5,
    "encoder_no_repeat_ngram_size": 1,
    "suppress_tokens": "first",
    "begin_suppress_tokens": "first",
    "bad_words_ids": "first",
    "sequence_bias": "first",
    "min_new_tokens": 5,
    "min_length": 9,
    "exponential_decay_length_penalty": [2, 1.5],
    "forced_eos_token_id": 7,
    "forced_bos_token_id": 11,
    "remove_invalid_values": True,
}


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


def value_of(name: str, folder: Path) -> Any:
    first = transformers_tokens(folder, PROMPTS[0], 2)
    shapes = {
        "bad_words_ids": [[first[0]], first],
        "sequence_bias": [[[first[0]], -9.0], [[first[1]], 0.5]],
    }
    return shapes.get(name, [first[0]]) if SETTINGS[name] == "first" else SETTINGS[name]


@pytest.mark.parametrize("where", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("name", SETTINGS)
def test_tokens_are_those_of_transformers(
    name: str, where: str, ids_model: Path, tmp_path: Path
) -> None:
    """Also of a folder without the file: then transformers looks into config.json."""
    before = our_tokens(ids_model, tmp_path)
    if where == "config.json":
        ends = json_of(ids_model / "generation_config.json")["eos_token_id"]
        (ids_model / "generation_config.json").unlink()
        edit_json(ids_model / "config.json", eos_token_id=ends)
    edit_json(ids_model / where, **{name.split()[0]: value_of(name, ids_model)})
    found = our_tokens(ids_model, tmp_path)
    assert found == [transformers_tokens(ids_model, ids) for ids in PROMPTS]
    assert found != before or name == "remove_invalid_values"


def json_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_settings_together_and_in_batches(ids_model: Path, tmp_path: Path) -> None:
    settings = {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 6,
        "suppress_tokens": [3, 60],
    }
    edit_json(ids_model / "generation_config.json", **settings)
    expected = [transformers_tokens(ids_model, ids) for ids in PROMPTS]
    assert our_tokens(ids_model, tmp_path) == expected
    assert our_tokens(ids_model, tmp_path, stop_token_ids=[*range(320, 400)]) == expected
    assert our_tokens(ids_model, tmp_path, repetition_penalty=1.0) != expected


def test_a_request_may_have_its_own_penalty(
    run_job: Callable[..., Job], bytes_model: Path, tmp_path: Path
) -> None:
    """1 takes the model's off. Prompts that are echoed take no penalties, and their answers see
    them."""
    folder = shutil.copytree(bytes_model, tmp_path / "model")
    write_llama(folder, tie_word_embeddings=True, initializer_range=0.05)
    plain = transformers_tokens(folder, PROMPTS[0])
    edit_json(folder / "generation_config.json", repetition_penalty=1.5)
    strict = transformers_tokens(folder, PROMPTS[0])
    edit_json(folder / "generation_config.json", repetition_penalty=1.2)
    asked = {"max_tokens": NEW}
    job = run_job(
        folder,
        text_line("model's", PROMPTS[0], **asked),
        text_line("off", PROMPTS[0], repetition_penalty=1, **asked),
        text_line("null", PROMPTS[0], repetition_penalty=None, **asked),
        text_line("own", PROMPTS[0], repetition_penalty=1.5, **asked),
        text_line("echo", PROMPTS[0], repetition_penalty=1.5, echo=True, logprobs=1, **asked),
        text_line("zero", PROMPTS[0], repetition_penalty=0, **asked),
    )
    expected = transformers_tokens(folder, PROMPTS[0])
    assert len({tuple(plain), tuple(strict), tuple(expected)}) == 3
    tokens = {name: job.choice(name)["token_ids"] for name in job.rows if name != "zero"}
    assert tokens == {
        "model's": expected,
        "off": plain,
        "null": expected,
        "own": strict,
        "echo": strict,
    }
    assert (
        job.error("zero")[0] == "invalid_request" and "repetition_penalty" in job.error("zero")[1]
    )


def test_a_conversation_counts_all_that_was_said(ids_model: Path, tmp_path: Path) -> None:
    """Each turn as transformers would answer the whole conversation up to there."""
    edit_json(
        ids_model / "generation_config.json",
        repetition_penalty=1.5,
        begin_suppress_tokens=[1, 2],
        eos_token_id=319,
    )
    turns = [PROMPTS[0], [60, 61, 62], [70]]
    said: list[list[int]] = []

    class Listening:
        def given(self, token: int, logits: Any) -> None:
            pass

        def said(self, token: int, reason: str | None) -> None:
            if len(said) == 0 or len(said[-1]) == 5:
                said.append([])
            said[-1].append(token)

    with LLM(str(ids_model), dtype="float32", offload_dir=tmp_path / "offload") as llm:
        params = SamplingParams(max_tokens=5)
        ends = stop_criteria(llm.model, params)
        penalties = penalties_maker(llm.model, params)
        talk = Conversation(
            turns[0], iter(turns[1:]), params, ends, Listening(), 40, penalties=penalties
        )
        done: list[Answered] = []
        llm.run([talk.sequence], done.extend, Callbacks(listener=Silent()))
    ids: list[int] = []
    for turn, answer in zip(turns, said, strict=True):
        ids += turn
        assert answer == transformers_tokens(ids_model, ids, 5)
        ids += answer


def test_what_is_not_applied_is_said(
    ids_model: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    words = [
        "--no-log",
        "--model",
        str(ids_model),
        "--offload-dir",
        "offload",
        "--prompt-len",
        "4",
        "--gen-len",
        "2",
    ]
    assert flex_opt.main(words) == 0
    assert "generation_config" not in capfd.readouterr().err
    settings = {
        "num_beams": 4,
        "stop_strings": ["x"],
        "temperature": 0.6,
        "do_sample": True,
        "top_k": 20,
    }
    edit_json(ids_model / "generation_config.json", **settings)
    assert flex_opt.main(words) == 0
    [line] = [line for line in capfd.readouterr().err.splitlines() if "generation_config" in line]
    assert line.endswith("applies and this package does not: num_beams, stop_strings")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", "often"),
        ("repetition_penalty", -1),
        ("no_repeat_ngram_size", 1.5),
        ("bad_words_ids", []),
        ("suppress_tokens", "abc"),
        ("sequence_bias", [[[9999], 1.0]]),
        ("min_new_tokens", -2),
    ],
)
def test_a_wrong_value_is_named(name: str, value: Any, ids_model: Path) -> None:
    edit_json(ids_model / "generation_config.json", **{name: value})
    with pytest.raises(
        UsageError,
        match=f"generation_config.json: {name}: .* is of no use .*; correct it, or take it",
    ):
        find_model(str(ids_model), None)


def test_a_job_does_not_go_on_with_other_settings(
    run_job: Callable[..., Job], ids_model: Path, tmp_path: Path
) -> None:
    source = [{"prompt": [5, 6], "max_tokens": 2}]
    assert run_job(ids_model, *source).code == 0
    edit_json(ids_model / "generation_config.json", repetition_penalty=1.5)
    job = run_job(ids_model, *source, flags="--output again.jsonl")
    assert job.code == 0
    edit_json(ids_model / "generation_config.json", repetition_penalty=1.6)
    job = run_job(ids_model, *source, flags="--output again.jsonl")
    assert job.code == 2 and "model.config was" in job.err


def test_penalties_leave_the_ends_of_a_turn_alone(
    run_job: Callable[..., Job], bytes_model: Path, tmp_path: Path
) -> None:
    """min_new_tokens forbids them all, the tokenizer's too, for a chat."""
    folder = shutil.copytree(bytes_model, tmp_path / "model")
    edit_json(folder / "generation_config.json", min_new_tokens=30, eos_token_id=3)
    job = run_job(
        folder,
        chat_line("a", "hello", seed=1, temperature=3.0),
        chat_line("b", "you", seed=2, temperature=3.0),
    )
    for name in "ab":
        assert (
            len(job.choice(name)["token_ids"]) >= 30
            and 256 not in job.choice(name)["token_ids"][:29]
        )
