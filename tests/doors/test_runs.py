"""flex_opt run to its end: prompts in, completions out, chosen policies, random weights."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, OPTForCausalLM

from tests.doors.conftest import POSITIONS, Answer, Door, read_json, read_lines
from tests.parity.reference import greedy

FIELDS = ["index", "prompt", "text", "token_ids", "finish_reason"]
TEXTS = ["import os", "  def f(x):", "a", "for line in open(path):", "return [x for x in y]"]


def reference_model(folder: Path) -> OPTForCausalLM:
    return OPTForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def assert_done(answer: Answer, *idle: str) -> None:
    """idle: flags without effect, of which stderr says so, and nothing else but what is kept for
    later runs (`# `)."""
    assert answer.code == 0, answer
    lines = [line for line in answer.err.splitlines() if not line.startswith("# ")]
    said = [re.fullmatch(r"flex_opt: (--.+) ha(?:s|ve) no effect: .+", line) for line in lines]
    assert sorted(", ".join(found[1] if found else "?" for found in said).split(", ")) == sorted(
        idle or [""]
    ), answer
    assert not list(Path("offload").glob("run-*"))


def test_text_prompts_in_text_completions_out(door: Door, words_model: Path) -> None:
    Path("prompts.txt").write_text("\n".join([*TEXTS[:2], "", *TEXTS[2:]]) + "\n", encoding="utf-8")
    flags = "--dtype float32 --gpu-batch-size 2 --num-gpu-batches 2"
    assert_done(door("--prompts prompts.txt --output out.jsonl", flags, model=words_model))
    rows = read_lines(Path("out.jsonl"))
    tokenizer = AutoTokenizer.from_pretrained(words_model)
    model = reference_model(words_model)
    assert [list(row) for row in rows] == [FIELDS] * len(TEXTS)
    assert [(row["index"], row["prompt"]) for row in rows] == list(enumerate(TEXTS))
    for row in rows:
        assert row["token_ids"] == greedy(model, tokenizer(row["prompt"])["input_ids"], 4)
        assert row["text"] == tokenizer.decode(row["token_ids"], skip_special_tokens=True)
        assert row["finish_reason"] == "length"


@pytest.mark.parametrize("flags", ["", "--policy auto", "--overlap false --cpu-cache-compute"])
def test_auto_is_the_default_without_a_placement_flag(flags: str, door: Door) -> None:
    assert_done(
        door(*flags.split(), "--json report.json"), *re.findall("--cpu-cache-compute", flags)
    )
    policy = read_json(Path("report.json"))["policy"]
    assert policy["gpu_batch_size"] * policy["num_gpu_batches"] == 32
    assert policy["overlap"] is (not flags.startswith("--overlap"))


def test_random_weights_for_a_folder_that_has_none(
    door: Door, ids_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "config.json").write_text((ids_model / "config.json").read_text())
    flags = "--path _DUMMY_ --percent 0 0 100 0 100 0 --json report.json"
    first = door(flags, model=folder)
    assert first.code == 0 and first.err.startswith("# ") and first.err.count("\n") == 1
    [written] = Path("offload").rglob("*.safetensors")
    made = written.stat().st_mtime_ns
    assert_done(door(flags, model=folder))
    assert written.stat().st_mtime_ns == made, "the random weights must be written once"
    assert read_json(Path("report.json"))["io_bytes"]["disk_read"] > 0


def test_the_output_is_replaced_and_nothing_else_left(
    door: Door, write_jsonl: Callable[..., Path], ids_model: Path, tmp_path: Path
) -> None:
    """Reports may stand in the model's folder, and go nowhere twice."""
    prompts = write_jsonl({"prompt_token_ids": [4, 5]})
    Path("out.jsonl").write_text("old\n" * 99)
    flags = (
        "--prompts",
        prompts,
        "--log-file",
        prompts,
        "--no-log --verbose 0 --output out.jsonl",
    )
    answer = door(*flags, "--json /dev/null --trace /dev/null")
    assert_done(answer, "--log-file") if answer.err else assert_done(answer)
    model = shutil.copytree(ids_model, tmp_path / "offload/model")
    for _ in range(2):
        assert_done(door("--no-log --json", model / "report.json", model=model))
    shutil.rmtree("offload/model")
    assert len(read_lines(Path("out.jsonl"))) == 1
    assert {p.name for p in tmp_path.iterdir()} - {"offload"} == {"out.jsonl", "prompts.jsonl"}
    assert not Path("offload").exists() or not list(Path("offload").iterdir())


def test_a_full_context_is_used_up(door: Door, write_jsonl: Callable[..., Path]) -> None:
    prompts = write_jsonl(
        {"prompt_token_ids": [4] * POSITIONS}, {"prompt_token_ids": [4] * (POSITIONS - 2)}
    )
    assert_done(door("--prompts", prompts, "--output out.jsonl"))
    assert [len(row["token_ids"]) for row in read_lines(Path("out.jsonl"))] == [1, 3]
