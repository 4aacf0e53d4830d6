"""Wrong use ends with exit code 2 and one line on stderr that names the flag; nothing is run, nothing is left."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.doors.conftest import POSITIONS, Answer

EVICTION = [
    "--hh-ratio 0", "--hh-ratio 1.5", "--hh-ratio nan", "--hh-ratio -0.1", "--hh-ratio some", "--recent-ratio 0",
    "--hh-size 0", "--hh-size -1", "--hh-size 2.5", "--recent-size 0", "--hh-size 4 --hh-ratio 0.1",
    "--hh-all maybe", "--eviction nonsense", "--hh-ratio 0.1 --eviction full", "--attn-sparsity 0.5 --eviction h2o",
    "--attn-sparsity 0.5 --compress-cache", "--cache-bits 5", "--int8-compute --compress-weight --weight-bits 8",
    "--positions sideways", "--positions rolling", "--positions rolling --eviction full",
    "--kv-layer-schedule steps", "--kv-layer-schedule pyramid --eviction full",
]  # fmt: skip
WRONG = [
    "--percent 100 0 100 0 100",
    "--percent 100 0 100 0 100 half",
    "--percent 33.3 0 0 0 0 0",
    "--gpu-batch-size 0",
    "--gpu-batch-size nan",
    "--gpu-batch-size 1.5",
    "--num-gpu-batches -1",
    "--num-gpu-batches 0",
    "--prompt-len 0",
    f"--prompt-len {POSITIONS} --gen-len 2",
    "--gen-len -1",
    "--gen-len inf",
    "--cut-gen-len 0",
    "--cut-gen-len 1 --gen-len 8",
    "--cut-gen-len 9 --gen-len 8",
    "--cut-gen-len 3 --debug-mode breakdown",
    "--debug-mode slow",
    "--debug-mode breakdown --gen-len 1",
    "--device tpu",
    "--device cuda",
    "--dtype int8",
    "--dtype float16 --device cpu",
    "--host-mem plenty",
    "--host-mem 0",
    "--host-mem nan",
    "--host-mem -1GiB",
    "--device-mem -1",
    "--disk-mem 12parsecs",
    "--policy /no/such/policy.json",
    "--policy auto --percent 100 0 100 0 100 0",
    "--policy auto --gpu-batch-size 4",
    "--overlap maybe",
    "--sep-layer 2",
    "--pin-weight x",
    "--attn-sparsity most",
    "--temperature hot",
    "--top-k 1.5",
    "--seed x",
    "--verbose loud",
    "--output /no/folder/out.jsonl",
    "--output out.txt",
    "--json /no/folder/report.json",
    "--json /tmp",
    "--trace /no/folder/trace.json",
    "--log-file /no/folder/run.log",
    "--prompts /no/such/prompts.txt",
    "--no-such-flag",
    "--percent 60 60 0 0 0 0",
    "--percent 0 0 101 0 0 0",
    "--percent -5 0 0 0 0 0",
    "--num-gpu-batches 99999999",
    "--attn-sparsity 0",
    "--attn-sparsity nan",
    "--attn-sparsity 1.5",
    "--temperature -1",
    "--temperature nan",
    "--top-p 2",
    "--top-p nan",
    "--top-k -1",
    "--seed -1",
    "--weight-bits 8",
    "--weight-bits 5 --compress-weight",
    "--gpu-batch-size 1048576 --num-gpu-batches 1048576",
    f"--json {'j' * 300}",
    "--offload-dir ~nosuchuser-at-all/x",
    f"--model {'m' * 5000}",
    f"--output {'o' * 300}.jsonl",
]


def assert_refused(answer: Answer, *says: str) -> None:
    assert answer.code == 2, answer
    assert re.fullmatch(r"flex_opt: .+\n", answer.err), answer.err
    for text in says:
        assert text in answer.err
    assert not Path("offload").exists(), "refused only after something was written"
    assert not list(Path().glob("*.log"))


@pytest.mark.parametrize("flags", [*EVICTION, *WRONG])
def test_wrong_flag(flags: str, door: Callable[..., Answer]) -> None:
    assert_refused(door(*flags.split()), flags.split()[0])


def test_rolling_positions_are_refused_before_anything_is_said_of_the_run(door: Callable[..., Answer]) -> None:
    answer = door("--positions", "rolling", "--hh-size", 2)
    assert_refused(answer, "--positions rolling")
    assert answer.out == ""


def test_a_stray_word_and_a_missing_value(door: Callable[..., Answer]) -> None:
    assert_refused(door("stray"), "stray")
    assert_refused(door("--stop", ""), "--stop")
    assert_refused(door("--gen-len"), "--gen-len")


# ---- Prompt files

BAD_LINES = [
    ('{"prompt_token_ids": [4, 5', "not valid JSON"),
    ("[4, 5]", "JSON object"),
    ('{"text": "hello"}', "neither"),
    ('{"prompt": "a", "prompt_token_ids": [4]}', "not both"),
    ('{"prompt_token_ids": []}', "no tokens"),
    ('{"prompt_token_ids": [120]}', "vocabulary of 120"),
    ('{"prompt_token_ids": [-1]}', "vocabulary of 120"),
    ('{"prompt_token_ids": [4.5]}', "4.5"),
    ('{"prompt": 5}', "string"),
    ('{"prompt_token_ids": [4], "index": NaN}', "NaN is not JSON"),
    ('{"prompt": "text"}', "tokenizer"),
]


@pytest.mark.parametrize(("line", "says"), BAD_LINES, ids=[line for line, _ in BAD_LINES])
def test_bad_line_is_named(line: str, says: str, door: Callable[..., Answer], write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl({"prompt_token_ids": [4, 5]}, "", line)
    assert_refused(door("--prompts", path, "--output", "out.jsonl"), f"--prompts {path}:3: ", says)
    assert not Path("out.jsonl").exists()


def test_prompt_files_that_are_none(
    door: Callable[..., Answer], write_jsonl: Callable[..., Path], words_model: Path
) -> None:
    assert_refused(door("--prompts", write_jsonl("", " ", name="empty.txt")), "--prompts", "empty.txt")
    assert_refused(door("--prompts", write_jsonl("a,b", name="prompts.csv")), "--prompts", "prompts.csv")
    Path("latin.txt").write_bytes(b"plain\ncaf\xe9\n")
    assert_refused(door("--prompts", "latin.txt", model=words_model), "--prompts latin.txt:2", "UTF-8")


def test_a_prompt_longer_than_the_positions(door: Callable[..., Answer], write_jsonl: Callable[..., Path]) -> None:
    path = write_jsonl({"prompt_token_ids": [4]}, {"prompt_token_ids": [4] * (POSITIONS + 1)})
    assert_refused(door("--prompts", path), "--prompts[1]", f"{POSITIONS + 1} tokens", f"{POSITIONS} positions")


def test_benchmark_flags_do_not_go_with_a_prompt_file(
    door: Callable[..., Answer], write_jsonl: Callable[..., Path]
) -> None:
    path = write_jsonl({"prompt_token_ids": [4, 5]})
    assert_refused(door("--prompts", path, "--cut-gen-len", "4"), "--cut-gen-len", "--prompts")
    assert_refused(door("--prompts", path, "--debug-mode", "breakdown"), "--debug-mode", "--prompts")
    assert_refused(door("--prompts", path, "--stop", "end"), "--stop", "tokenizer")
