"""`complete`: one's own prompts from the command line, a file or standard input, each with what
follows on it."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flexgen_h2o import LLM, Policy, SamplingParams
from tests.doors.conftest import Answer

Door = Callable[..., Answer]
PROMPTS = ["import os", "class Shape:\n    def area(self):", "def main(argv):"]


@pytest.fixture
def complete(command: Door, words_model: Path) -> Door:
    flags = "--offload-dir o --gpu-batch-size 2 --dtype float32"
    return lambda line, model=words_model: command(f"complete --model {model} {flags} {line}")


def texts(model: Path, prompts: list[str], params: SamplingParams) -> list[str | None]:
    with LLM(str(model), Policy(), dtype="float32", offload_dir="o") as llm:
        return [one.text for one in llm.generate(prompts, params)]


@pytest.mark.parametrize(
    "flags", ["--gen-len 7", "--gen-len 7 --temperature 0.9 --seed 4", "--gen-len 500"]
)
def test_one_prompt_is_shown_as_it_comes(
    flags: str, complete: Door, words_model: Path, tmp_path: Path
) -> None:
    answer = complete(f"'{PROMPTS[0]}' {flags} --json r.json")
    assert answer.code == 0, answer.err
    drawn = {"temperature": 0.9, "seed": 4} if "seed" in flags else {}
    [want] = texts(
        words_model, PROMPTS[:1], SamplingParams(max_tokens=int(flags.split()[1]), **drawn)
    )
    [row] = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert answer.out == f"{PROMPTS[0]}{want}\n" and (row["text"], row["finish_reason"]) == (
        want,
        "length",
    )


def test_an_answer_ends_before_its_stop_string(
    complete: Door, words_model: Path, tmp_path: Path
) -> None:
    [whole] = texts(words_model, PROMPTS[:1], SamplingParams(max_tokens=9))
    assert whole is not None
    stop = whole[4:6]
    answer = complete(f"'{PROMPTS[0]}' --gen-len 9 --json r.json --stop '{stop}'")
    [row] = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert row["text"] == whole[: whole.index(stop)] and row["finish_reason"] == "stop"
    assert answer.out == f"{PROMPTS[0]}{row['text']}\n"


def test_several_prompts_are_shown_in_their_order(
    complete: Door, words_model: Path, tmp_path: Path
) -> None:
    want = texts(words_model, PROMPTS, SamplingParams(max_tokens=5))
    first, second, third = PROMPTS
    answer = complete(f"'{first}' --prompt '{second}' --prompt '{third}' --gen-len 5 --json r.json")
    assert answer.code == 0, answer.err
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert [(row["prompt"], row["text"]) for row in rows] == list(zip(PROMPTS, want, strict=True))
    at = [answer.out.index(f"{prompt}{text}\n") for prompt, text in zip(PROMPTS, want, strict=True)]
    assert at == sorted(at) and "prompt 2: " in answer.out


def test_standard_input_is_one_prompt(
    complete: Door, words_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(data: bytes) -> Answer:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))
        return complete("--gen-len 3")

    [want] = texts(words_model, [PROMPTS[1]], SamplingParams(max_tokens=3))
    assert given(PROMPTS[1].encode() + b"\n").out == f"{PROMPTS[1]}{want}\n"
    for data, says in (
        (b"", "standard input: is empty"),
        (b"caf\xe9", "standard input: is not UTF-8 text; convert it to UTF-8"),
    ):
        refused = given(data)
        assert refused.code == 2 and says in refused.err and refused.err.count("\n") == 1


def test_token_ids_need_no_tokenizer(
    complete: Door, ids_model: Path, write_jsonl: Callable[..., Path]
) -> None:
    asked = write_jsonl({"prompt_token_ids": [5, 6, 7]})
    answer = complete(f"--prompts {asked} --gen-len 2", model=ids_model)
    assert answer.code == 0 and answer.out.startswith("5 6 7 ") and len(answer.out.split()) == 5


REFUSED = [
    ("x --prompts p.txt", "--prompts and prompts on the command line: give one of them"),
    ("--prompts none.txt", "--prompts none.txt: No such file"),
    ("x --json none/r.json", "--json none/r.json: the folder"),
    ("x --chat", "has no chat template"),
    ("x --gen-len 0", "--gen-len"),
    (f"'{'value = ' * 60}'", "--prompt: 122 tokens, but "),
]


@pytest.mark.parametrize(("flags", "says"), REFUSED, ids=[flags[:30] for flags, _ in REFUSED])
def test_one_line_says_what_is_wrong(flags: str, says: str, complete: Door) -> None:
    answer = complete(flags)
    assert answer.code == 2 and answer.out == ""
    [line] = answer.err.splitlines()
    assert says in line, line
