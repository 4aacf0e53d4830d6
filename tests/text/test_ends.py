"""Where answers end: ends of turns by all of a model's files, special tokens as stop strings, stop
tokens."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from flexgen_h2o import LLM
from flexgen_h2o.engine.channels import ChatText
from flexgen_h2o.engine.conversation import AnswerText
from flexgen_h2o.engine.sampling import SamplingParams, TokenLogprobs
from flexgen_h2o.jobs.responses import choice_of
from flexgen_h2o.models import FAMILIES
from flexgen_h2o.models.load import find_model
from tests.parity.reference import BASES, greedy, random_model
from tests.text.conftest import Job
from tests.text.tiny import (
    chat_line,
    edit_json,
    streamed,
    text_line,
    write_bytes_tokenizer,
    write_script,
)

Run = Callable[..., Job]
END = "<|im_end|>"
TEXT_END = "<|endoftext|>"
SCRIPT = (*b">Hi", END, *b"\nuser: wat", TEXT_END, *b"k")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers "Hi", the end of its turn, and then a user's turn that nobody asked for. Only the
    tokenizer names the turn's end."""
    folder = tmp_path_factory.mktemp("models") / "chatty"
    ids = write_bytes_tokenizer(folder, (END, TEXT_END))
    write_script(folder, (ids.get(one, one) for one in SCRIPT), eos_token_id=ids[TEXT_END])
    (folder / "generation_config.json").unlink()
    return folder


HI = {"content": "Hi", "role": "assistant"}


def test_a_chat_ends_where_the_turn_does(run_job: Run, chatty: Path) -> None:
    """A text goes on to the end of a sequence, as transformers' `generate` does."""
    job = run_job(
        chatty,
        chat_line("chat", "Say hi"),
        text_line("text", "x>"),
        chat_line("on", "Say hi", ignore_eos=True),
        chat_line("given", "Say hi", stop_token_ids=[105]),
    )
    choice = job.choice("chat")
    assert (choice["message"], choice["finish_reason"]) == (HI, "stop")
    assert choice["token_ids"] == [*b"Hi", 256]
    assert (
        job.choice("text")["text"] == "Hi\nuser: wat"
        and job.choice("text")["finish_reason"] == "stop"
    )
    assert len(job.choice("on")["token_ids"]) == 40
    assert job.choice("given")["token_ids"] == [*b"Hi"]


@pytest.mark.parametrize(
    "place", ["config.json", "generation_config.json", "both", "special_tokens_map.json"]
)
def test_every_file_may_name_the_end_of_a_turn(
    place: str, run_job: Run, chatty: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(chatty, tmp_path / "model")
    edit_json(folder / "tokenizer_config.json", eos_token=TEXT_END)
    if place == "special_tokens_map.json":
        edit_json(folder / "tokenizer_config.json", eos_token=None)
        edit_json(folder / place, eos_token=END)
    elif place == "both":  # a file's own ends do not take those of config.json away
        edit_json(folder / "config.json", eos_token_id=256)
        edit_json(folder / "generation_config.json", eos_token_id=[257])
    else:
        edit_json(folder / "config.json", eos_token_id=257)
        edit_json(folder / place, eos_token_id=[256, 257])
    choice = run_job(folder, chat_line("chat", "Say hi")).choice("chat")
    assert (choice["message"], choice["finish_reason"], len(choice["token_ids"])) == (HI, "stop", 3)


# What a request asks for, its text and the number of its tokens.
STOPS: tuple[tuple[dict[str, Any], str, int], ...] = (
    ({"stop": [END]}, "Hi", 3),
    ({"stop": [f"i{END}"]}, "H", 3),  # text in front of a special token
    ({"stop": [f"{END}!"]}, "Hi\nuser: wat", 14),  # it does not come
    ({"stop": [f"{END}\nu", "\n"]}, "Hi", 4),  # the earlier of two
    ({"stop": ["i\nu"]}, "H", 5),  # text over a special token
    ({"stop": ["ser", "user"]}, "Hi\n", 8),  # the earlier of two that end together
    ({"stop_token_ids": [256]}, "Hi", 3),
    ({"stop_token_ids": [999_999, 10]}, "Hi", 4),
)


def test_stop_strings_and_stop_tokens(run_job: Run, chatty: Path) -> None:
    """Of texts, and where the end of a sequence is ignored; streams show the same."""
    more = {"ignore_eos": True, "max_tokens": 14}
    texts = [text_line(f"text {i}", "x>", **body) for i, (body, _, _) in enumerate(STOPS)]
    ignoring = [text_line(f"on {i}", "x>", **body, **more) for i, (body, _, _) in enumerate(STOPS)]
    job = run_job(chatty, *texts, *ignoring)
    for i, (body, text, count) in enumerate(STOPS):
        for row in (f"text {i}", f"on {i}"):
            choice = job.choice(row)
            assert (choice["text"], len(choice["token_ids"])) == (text, count), (body, row)
        ids = job.choice(f"text {i}")["token_ids"]
        params = SamplingParams(**{name: tuple(value) for name, value in body.items()})
        assert "".join(pieces(chatty, ids, params)) == text


def pieces(folder: Path, ids: Sequence[int], params: SamplingParams) -> Iterator[str]:
    """A text as it comes, token by token; a piece that was shown is never taken back."""
    tokenizer = find_model(str(folder), None).tokenizer
    shown = AnswerText(tokenizer, params.stop, b"x>", params.stop_token_ids)
    for i in range(1, len(ids) + 1):
        yield shown.more(ids[:i], i == len(ids))


def test_a_special_stop_string_makes_text_wait(chatty: Path) -> None:
    """`i` may be the beginning of what the answer is cut at."""
    params = SamplingParams(stop=(f"i{END}\nu",))
    ids = [*b"Hi", 256, *b"\nx"]
    assert [*pieces(chatty, ids, params)] == ["H", "", "", "", "i\nx"]
    assert [*pieces(chatty, [*b"Hi", 256, *b"\nu"], params)] == ["H", "", "", "", ""]


def test_stop_tokens_need_no_tokenizer(run_job: Run, chatty: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(chatty, tmp_path / "model")
    for path in folder.glob("*token*"):
        path.unlink()
    job = run_job(
        folder, text_line("a", [*b"x>"], stop_token_ids=[256]), text_line("b", [*b"x>"], stop=["H"])
    )
    assert job.choice("a")["token_ids"] == [*b"Hi", 256]
    assert job.error("b") == (
        "unsupported",
        "line 2: stop: needs a tokenizer, and the model's folder has none; leave it out",
    )


# ---- channels

MARKS = ("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>")
ANALYSIS = ("<|channel|>", *b"analysis", "<|message|>", *b"Think!", "<|end|>")
FINAL = (
    "<|start|>",
    *b"assistant",
    "<|channel|>",
    *b"final",
    "<|message|>",
    *b"42 \xf0\x9f\xa6\x84",
)
CALL = ("<|start|>", *b"assistant to=f", "<|channel|>", *b"commentary json", "<|message|>", *b"{}")
TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor "
    "%}<|start|>assistant"
)


HEADER = ("<|start|>", *b"assistant")
UNICORN = "42 \U0001f984"
# By name: tokens that the prompt ends with, the answer, its content and its reasoning.
Tokens = Sequence[int | str]
CHANNELS: dict[str, tuple[Tokens, Tokens, str, str]] = {
    "both": (HEADER, (*ANALYSIS, *FINAL, "<|return|>"), UNICORN, "Think!"),
    "within a message": (
        (*HEADER, *ANALYSIS[:10]),
        (*ANALYSIS[10:], *FINAL, "<|return|>"),
        UNICORN,
        "Think!",
    ),
    "within a name": ((*HEADER, *ANALYSIS[:4]), (*ANALYSIS[4:], *FINAL), UNICORN, "Think!"),
    "a prompt without marks": (b"6*7>", (*ANALYSIS, *FINAL, "<|return|>"), UNICORN, "Think!"),
    "cut in its thoughts": (HEADER, ANALYSIS[:12], "", "Th"),
    "cut in a header": (HEADER, (*ANALYSIS, *FINAL[:14]), "", "Think!"),
    "no marks": (HEADER, (*b"plain text", "<|return|>"), "plain text", ""),
    "no marks, cut": (HEADER, b"plain te", "plain te", ""),
    "no marks at all": (b"6*7>", b"plain te", "plain te", ""),
    "thoughts twice": (
        HEADER,
        (*ANALYSIS, *HEADER, *ANALYSIS, *FINAL),
        UNICORN,
        "Think!\nThink!",
    ),
    "a tool is called": (HEADER, (*ANALYSIS, *CALL, "<|call|>"), "", "Think!\n{}"),
    "an empty channel": (HEADER, (*ANALYSIS[:10], "<|end|>", *FINAL), UNICORN, ""),
    "a header alone": (HEADER, (*ANALYSIS, "<|start|>", *b"42", "<|return|>"), "42", "Think!"),
    "nothing behind": (HEADER, (*ANALYSIS, *HEADER, "<|return|>"), "", "Think!"),
}


@pytest.fixture(scope="module")
def harmonic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "harmonic"
    ids = write_bytes_tokenizer(folder, MARKS, TEMPLATE)
    thoughts = ("<|channel|>", *b"wonder", "<|message|>", *b"THINK", "<|end|>")
    script = (*b"t", *thoughts, "<|start|>", *b"42", "<|return|>")
    write_script(folder, (ids.get(one, one) for one in script), eos_token_id=ids["<|return|>"])
    return folder


@pytest.mark.parametrize("name", CHANNELS)
def test_channels(name: str, harmonic: Path) -> None:
    """Whole and token by token; the prompt may end within a message."""
    at = {text: 256 + i for i, text in enumerate(MARKS)}
    before, ids = ([at.get(one, one) for one in part] for part in CHANNELS[name][:2])  # type: ignore[call-overload]
    expected = CHANNELS[name][2:]
    tokenizer = find_model(str(harmonic), None).tokenizer
    assert ChatText(tokenizer, SamplingParams(), before).more(ids, True) == expected
    text = ChatText(tokenizer, SamplingParams(), before)
    found = [text.more(ids[:i], i == len(ids)) for i in range(1, len(ids) + 1)]
    assert tuple(map("".join, zip(*found, strict=True))) == expected
    assert all("\ufffd" not in one for one, _ in found)


def test_channels_of_a_job(run_job: Run, harmonic: Path) -> None:
    """An answer that is cut in its thoughts has an empty content, not null. Stop strings end the
    content alone, also those that name a mark."""
    asked: dict[str, tuple[dict[str, Any], str, str]] = {
        "whole": ({}, "42", "THINK"),
        "cut": ({"max_tokens": 10}, "", "TH"),
        "stop in thoughts": ({"stop": ["N", "wonder"]}, "42", "THINK"),
        "stop in content": ({"stop": ["2", "H"]}, "4", "THINK"),
        "special": ({"stop": ["<|end|>"]}, "42", "THINK"),
        "token": ({"stop_token_ids": [78]}, "", "THI"),
    }
    job = run_job(harmonic, *(chat_line(name, "6*7", **one[0]) for name, one in asked.items()))
    assert len(job.choice("stop in thoughts")["token_ids"]) == 18
    for name, (_, content, reasoning) in asked.items():
        expected = {"role": "assistant", "content": content, "reasoning_content": reasoning}
        assert job.choice(name)["message"] == expected, name


ENGINE = ("--dtype", "float32", "--offload-dir", "offload", "--max-tokens", 40)


@pytest.mark.parametrize(
    ("model", "prompt", "shown", "text"),
    [
        ("harmonic", "6*7", "(thinking) THINK\n\n42\n", "42"),
        ("chatty", "Say hi", "Hi\n", "Hi"),
    ],
)
def test_a_chat_on_a_terminal(
    model: str,
    prompt: str,
    shown: str,
    text: str,
    request: pytest.FixtureRequest,
    call: Run,
    tmp_path: Path,
) -> None:
    """One prompt that is streamed, several, and older names: thoughts in front, no marks; files
    have the content. All end where the turn does."""
    folder = request.getfixturevalue(model)
    assert call("generate", folder, "-p", prompt, *ENGINE).out == shown
    two = call("generate", folder, "-p", prompt, "-p", prompt, *ENGINE)
    assert two.out.count(f"-\n{shown}") == 2
    one = call("complete", "-m", folder, prompt, "--chat", "--report", "r.json", *ENGINE)
    assert one.out == f"{prompt}\n\n{shown}"
    assert json.loads((tmp_path / "r.json").read_text())["rows"][0]["text"] == text
    (tmp_path / "p.txt").write_text(f"{prompt}\n")
    prompts = ("-m", folder, "--prompts", "p.txt", "--chat", "--gen-len", 40, *ENGINE[:4])
    assert f"\n0: {prompt}{text}\n" in call("flex-opt", *prompts, "--output", "o.jsonl").out
    assert json.loads((tmp_path / "o.jsonl").read_text())["text"] == text
    call("evaluate", "text", *prompts, "--hh-size", 20, "--json", "t.json")
    [row] = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert row["full"]["text"] == shown.strip()


def test_channels_of_a_stream(harmonic: Path) -> None:
    """Each piece is of the channel that it belongs to, and has its tokens."""
    model = find_model(str(harmonic), None)
    line = chat_line("a", "6*7", logprobs=True)
    ids = [260, *b"wonder", 259, *b"THINK", 258, 257, *b"42", 256]
    _, choices = streamed(model, line, ids, [TokenLogprobs(-1.0, ())] * len(ids))
    deltas = [choice["delta"] for choice in choices]
    assert [delta for delta in deltas[1:] if delta] == [
        *({"reasoning_content": letter} for letter in "THINK"),
        {"content": "42"},
    ]
    assert [token for choice in choices[1:] for token in choice["token_ids"]] == ids
    scored = [one["token"] for choice in choices[1:] for one in choice["logprobs"]["content"]]
    assert scored == ["4", "2"]
    whole, choices = streamed(
        model,
        chat_line("a", "6*7", logprobs=True, stop="2"),
        ids,
        [TokenLogprobs(-1.0, ())] * len(ids),
    )
    scored = [one["token"] for choice in choices[1:] for one in choice["logprobs"]["content"]]
    assert scored == ["4"]
    found = choice_of(whole, model)
    assert [one["token"] for one in found["logprobs"]["content"]] == ["4"]
    assert found["message"]["content"] == "4"


def test_a_stop_string_of_a_final_message_ends_the_run(run_job: Run, tmp_path: Path) -> None:
    """Thoughts may mention it. All tokens are counted."""
    ids = write_bytes_tokenizer(tmp_path / "model", MARKS, TEMPLATE)
    script = (*b"t", "<|channel|>", *b"wonder", "<|message|>", *b"THINK", "<|end|>", *b"42!xyz")
    write_script(tmp_path / "model", (ids.get(one, one) for one in script), eos_token_id=256)
    job = run_job(tmp_path / "model", chat_line("a", "6*7", stop=["!", "THI"]))
    assert job.choice("a")["message"]["content"] == "42"
    assert job.choice("a")["token_ids"][-1] == ord("!")
    assert job.choice("a")["finish_reason"] == "stop"
    assert job.rows["a"]["response"]["body"]["usage"]["completion_tokens"] == 17


ABSENT = "absent"


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_texts_end_where_transformers_ends_them(kind: str, tmp_path: Path) -> None:
    """With ends in config.json, in generation_config.json, in both and in neither."""
    config = AutoConfig.for_model(**BASES[kind])
    config.save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    for in_config, in_file in product([ABSENT, None, 7, [7, 9]], ["no file", ABSENT, None, 5, [5]]):
        body = json.loads((tmp_path / "config.json").read_text())
        body.pop("eos_token_id", None)
        ends = {} if in_config == ABSENT else {"eos_token_id": in_config}
        (tmp_path / "config.json").write_text(json.dumps(body | ends))
        file.unlink(missing_ok=True)
        if in_file != "no file":
            file.write_text(json.dumps({} if in_file == ABSENT else {"eos_token_id": in_file}))
        read = GenerationConfig.from_pretrained  # as PreTrainedModel.from_pretrained calls it
        if file.exists():
            expected = read(tmp_path).eos_token_id
        else:
            name = {"config_file_name": "config.json", "_from_model_config": True}
            expected = read(tmp_path, **name).eos_token_id
        found = find_model(str(tmp_path), None).spec.eos_token_ids
        whole = expected if isinstance(expected, list) else [expected]
        assert found == tuple(one for one in whole if one is not None), (in_config, in_file)


def test_the_ends_of_a_loaded_model(tmp_path: Path) -> None:
    """Token for token: of two files that name an end, generation_config.json counts."""
    model = random_model(model_type="llama", num_hidden_layers=1, eos_token_id=None)
    model.save_pretrained(tmp_path)
    prompt = [5, 6, 7]
    end = greedy(model, prompt, 9)[2]
    for place, count in (("config.json", 9), ("generation_config.json", 3)):
        edit_json(tmp_path / place, eos_token_id=end)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        told = loaded.generate(ids, attention_mask=mask, max_new_tokens=9, do_sample=False)
        with LLM(str(tmp_path), dtype="float32", offload_dir=tmp_path / "offload") as llm:
            [done] = llm.generate([prompt], SamplingParams(max_tokens=9))
        assert done.token_ids == told[0, 3:].tolist()
        assert len(done.token_ids) == count
