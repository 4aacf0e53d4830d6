"""`complete`: an older name of `generate -p`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flexgen_h2o import LLM, Policy, SamplingParams
from tests.doors.conftest import Door

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
