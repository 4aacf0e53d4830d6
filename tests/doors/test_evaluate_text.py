"""`evaluate text`: both runs are the engine's own; run_text_generation's flags mean the same; wrong use is one line."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from flexgen_h2o import H2O, LLM, Policy, SamplingParams, cli
from tests.doors.conftest import POSITIONS, Answer

Door = Callable[..., Answer]
TEXTS = ["def read(self, path):\n        with open(path", "import os"]
PLACED = "--offload-dir o --gpu-batch-size 4"


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], plain_cpu: None) -> Door:
    """The console command, in the working folder `tmp_path`."""
    monkeypatch.chdir(tmp_path)

    def call(flags: str) -> Answer:
        capfd.readouterr()
        code = cli.main(["evaluate", "text", *shlex.split(flags)])
        return Answer(code, *capfd.readouterr())

    return call


def test_both_texts_are_the_engine_s(text: Door, tmp_path: Path) -> None:
    asked = " ".join(f"--prompt {shlex.quote(t)}" for t in TEXTS)
    sizes = "--hh-size 3 --recent-size 2 --dtype float32"
    out = text(f"{asked} --gen-len 10 {sizes} {PLACED} --json r.json")
    assert out.code == 0, out.err
    result = json.loads((tmp_path / "r.json").read_text())
    params = SamplingParams(max_tokens=10)
    for side, eviction in (("full", None), ("evicted", H2O(heavy_size=3, recent_size=2))):
        with LLM("opt-tiny", Policy(), eviction, dtype="float32", offload_dir="o") as llm:
            want = llm.generate(TEXTS, params)
            blocks, column = llm.model.spec.num_blocks, llm.model.spec.kv_bytes_per_token(4)
        for row, completion in zip(result["rows"], want, strict=True):
            assert row[side]["text"] == completion.text and row[side]["token_ids"] == completion.token_ids
            columns = row["prompt_len"] + 9 if eviction is None else min(6, row["prompt_len"] + 9)
            assert (row[side]["columns"], row[side]["bytes"]) == (columns, columns * column) and blocks == 6
            assert completion.text in out.out
    assert result["eviction"]["name"] == "h2o" and result["rows"][0]["same_tokens"] < 10
    held = [sum(row[side]["bytes"] for row in result["rows"]) for side in ("evicted", "full")]
    assert out.out.splitlines()[-1].startswith(f"h2o: {held[0] / held[1]:.1%} of the full cache's")


def test_budget_for_everything_writes_the_same(text: Door, tmp_path: Path) -> None:
    out = text(f"--prompt {shlex.quote(TEXTS[0])} --gen-len 6 --hh-ratio 1 --recent-ratio 1 {PLACED} --json r.json")
    assert out.code == 0, out.err
    (row,) = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert row["full"] == row["evicted"] and row["same_tokens"] == 6
    assert "1 of 1 texts the same" in out.out and "100.0%" in out.out


@pytest.mark.parametrize("compression", ["", "--compress-cache --cache-bits 4"])
def test_what_is_compressed_is_said(compression: str, text: Door, tmp_path: Path) -> None:
    out = text(f"--prompt {shlex.quote(TEXTS[0])} --gen-len 2 {compression} {PLACED} --json r.json")
    assert out.code == 0, out.err
    assert json.loads((tmp_path / "r.json").read_text())["compression"] == compression
    assert out.out.splitlines()[-1].endswith(f"; both with {compression}" if compression else "texts the same")


def test_flags_of_run_text_generation(text: Door, words_model: Path) -> None:
    """The same output as with our names; without any, its shares and a prompt of our own."""
    theirs = text(
        f"--model_arch opt --model_name {words_model} --cache_dir c --heavy_ratio 0.3 --recent_ratio 0.2 --length 8 "
        f"--seed 42 --no_cuda {PLACED} --prompt 'import os and more'"
    )
    ours = text(
        f"--model {words_model} --hh-ratio 0.3 --recent-ratio 0.2 --gen-len 8 --device cpu --seed 1 "
        f"{PLACED} --prompt 'import os and more'"
    )
    assert theirs.code == 0 and theirs.out == ours.out, theirs.err
    given = text(f"--heavy_ratio 0.1 --recent_ratio 0.1 --length 3 {PLACED}")
    assert given.code == 0 and "class Reader" in given.out
    assert text(f"--gen-len 3 {PLACED}").out == given.out
    other = text(f"--model_arch llama --length 3 {PLACED}")
    assert other.code == 2 and "--model_arch llama: opt-tiny is opt" in other.err


def test_token_ids_need_no_tokenizer(text: Door, tmp_path: Path, ids_model: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt_token_ids": [5, 6, 7, 8, 9, 10, 11, 12]}\n')
    out = text(f"--model {ids_model} --prompts p.jsonl --gen-len 4 --eviction tova {PLACED} --json r.json")
    assert out.code == 0, out.err
    (row,) = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert row["full"]["text"] is None and str(row["full"]["token_ids"]) in out.out and "tova: " in out.out


WRONG = [
    ("--prompt a --prompts p.txt", "--prompt and --prompts"),
    ("--prompts none.txt", "--prompts none.txt"),
    ("--eviction full", "--eviction full"),
    ("--eviction nonsense", "--eviction nonsense"),
    ("--hh-ratio 2", "--hh-ratio"),
    ("--heavy_ratio 0", "--hh-ratio"),
    ("--heavy_ratio some", "--heavy_ratio"),
    ("--length 0", "--length"),
    ("--gen-len no", "--gen-len"),
    ("--temperature -1", "--temperature"),
    ("--attn-sparsity 0.5", "--attn-sparsity"),
    ("--json /no/folder/r.json", "--json /no/folder"),
    ("--model /no/such/model", "/no/such/model"),
    ("--fp16 --no_cuda", "float16"),
]


@pytest.mark.parametrize(("flags", "names"), WRONG, ids=[flags for flags, _ in WRONG])
def test_wrong_use_is_one_line_and_exit_code_2(flags: str, names: str, text: Door) -> None:
    out = text(f"{flags} --offload-dir o")
    assert out.code == 2, out
    assert out.out == ""
    assert names in out.err and len(out.err.strip().splitlines()) == 1 and "Traceback" not in out.err


def test_models_that_cannot_take_the_prompts(text: Door, ids_model: Path, words_model: Path) -> None:
    out = text(f"--model {ids_model} --offload-dir o")
    assert out.code == 2 and "has no tokenizer; give --prompts FILE.jsonl" in out.err
    out = text(f"--model {words_model} --prompt {'xyz-' * POSITIONS} --offload-dir o")
    assert out.code == 2 and f"{POSITIONS} positions" in out.err
