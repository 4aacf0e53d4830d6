"""`complete`: an older name of `generate -p`."""

from __future__ import annotations

from pathlib import Path

from flexgen_h2o import LLM, Policy, SamplingParams
from tests.doors.conftest import Door, read_json


def test_one_prompt_is_shown_as_it_comes(command: Door, words_model: Path, tmp_path: Path) -> None:
    flags = "--offload-dir o --dtype float32 --gen-len 7 --temperature 0.9 --seed 4 --json r.json"
    answer = command(f"complete --model {words_model} 'import os' {flags}")
    assert answer.code == 0, answer.err
    with LLM(str(words_model), Policy(), dtype="float32", offload_dir="o") as llm:
        [want] = llm.generate(["import os"], SamplingParams(7, temperature=0.9, seed=4))
    [row] = read_json(tmp_path / "r.json")["rows"]
    assert answer.out == f"import os{want.text}\n"
    assert (row["text"], row["finish_reason"]) == (want.text, "length")
