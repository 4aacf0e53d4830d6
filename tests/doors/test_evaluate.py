"""`evaluate` run to its end: fidelity with few rows, texts with and without eviction, and streams
past the cache."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from flexgen_h2o import H2O, LLM, Policy, SamplingParams
from flexgen_h2o.evaluate import MT_BENCH
from tests.doors.conftest import POSITIONS, Answer, Door, read_json
from tests.extras import needs

FEW_ROWS = (
    "--num-prompts 3 --recall-prompts 2 --prompt-len 128 --gen-len 12 --policies local "
    "h2o --budgets 0.2 "
    "--resamples 20 --gpu-batch-size 4"
)
TEXTS = ["def read(self, path):\n        with open(path", "import os"]
SMALL = "--hh-size 5 --recent-size 4"
QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["import os", "class Shape:"]},
    {
        "question_id": 82,
        "category": "coding",
        "turns": ["def area(self):"],
        "reference": ["ignored"],
    },
]


@pytest.fixture
def evaluate(command: Door) -> Door:
    """The command with its flags, which ends with `code`."""

    def run(flags: str, code: int = 0) -> Answer:
        named = flags if "--model" in flags else f"{flags} --model opt-tiny"
        out = command(f"evaluate {named}")
        assert out.code == code, out.err
        return out

    return run


@pytest.fixture
def text(evaluate: Door) -> Door:
    return lambda flags, code=0: evaluate(f"text --offload-dir o --gpu-batch-size 4 {flags}", code)


@pytest.fixture
def streaming(evaluate: Door) -> Door:
    return lambda flags, code=0: evaluate(
        f"streaming --offload-dir o --gpu-batch-size 4 --dtype float32 {flags}", code
    )


# ---- fidelity


def test_writes_json_and_tables(evaluate: Door, tmp_path: Path) -> None:
    out = evaluate(f"fidelity {FEW_ROWS} --offload-dir o --json r.json --markdown r.md")
    assert out.out.strip() == (tmp_path / "r.md").read_text().strip()
    result = read_json(tmp_path / "r.json")
    assert [cell["policy"] for cell in result["cells"]] == ["local", "h2o"]
    for cell in result["cells"]:
        assert (
            cell["kl"]["n"] == 3
            and 0 < cell["kl"]["low"] <= cell["kl"]["value"] <= cell["kl"]["high"]
        )
    assert result["full"]["recall"]["inside"]["questions"] == 2
    assert result["settings"]["seed"] == 0
    assert (
        "evaluate: recall of the full cache: " in out.err
        and "evaluate: recall of h2o at 20%: " in out.err
    )
    evaluate(f"fidelity {FEW_ROWS} --offload-dir o --json again.json")
    for one, other in zip(
        result["cells"], read_json(tmp_path / "again.json")["cells"], strict=True
    ):
        assert one["kl"] == other["kl"] and one["recall"] == other["recall"]


@needs("plot")
def test_a_picture(evaluate: Door, tmp_path: Path) -> None:
    flags = "fidelity --policies h2o --budgets 0.2 --recall-prompts 0"
    evaluate(
        f"{flags} --num-prompts 2 --prompt-len 32 --gen-len 4 --offload-dir o --resamples 20 "
        "--plot r.png"
    )
    assert (tmp_path / "r.png").stat().st_size > 10_000


def test_fewer_bits_of_weights_are_further_from_the_model(evaluate: Door, tmp_path: Path) -> None:
    """The runs that are compared have what the flags say, the reference has not; products in int8
    lie between."""
    small = FEW_ROWS.replace("local h2o", "local").replace(
        "--recall-prompts 2", "--recall-prompts 0"
    )
    kl = []
    for flags in ("--compress-weight --weight-bits 8", "--int8-compute", "--compress-weight"):
        evaluate(f"fidelity {small} --offload-dir o --json r.json {flags}")
        result = read_json(tmp_path / "r.json")
        full = next(cell for cell in result["cells"] if cell["policy"] == "full")
        assert result["settings"]["compression"].startswith(flags)
        kl.append(full["kl"]["value"])
    assert 0 < kl[0] < kl[1] < kl[2] < 1


# ---- attention

SEEN = "attention --prompt-len 32 --gen-len 8 --offload-dir o --gpu-batch-size 4 --resamples 20"


def test_attention_writes_json_and_tables(evaluate: Door, tmp_path: Path) -> None:
    out = evaluate(f"{SEEN} --num-prompts 3 --remove 0.25 --json a.json --markdown a.md")
    assert out.out.strip() == (tmp_path / "a.md").read_text().strip()
    result = read_json(tmp_path / "a.json")
    blocks = result["blocks"]
    assert [block["block"] for block in blocks] == list(range(6)) and result["rows"] == 3
    for block in blocks:
        assert 0 < block["columns_needed"]["low"] <= block["columns_needed"]["value"] <= 1
        assert sum(block["score_by_rank"]) == pytest.approx(1)
    needed = sum(block["columns_needed"]["value"] for block in blocks) / 6
    assert result["mean"]["columns_needed"]["value"] == pytest.approx(needed)
    assert [cell["budget"] for cell in result["removal"]["cells"]] == [0.75] * 3


# ---- texts


def test_both_texts_are_the_engine_s(text: Door, tmp_path: Path) -> None:
    asked = " ".join(f"--prompt {shlex.quote(t)}" for t in TEXTS)
    text(f"{asked} --gen-len 10 --hh-size 3 --recent-size 2 --dtype float32 --json r.json")
    rows = read_json(tmp_path / "r.json")["rows"]
    for side, eviction in (("full", None), ("evicted", H2O(heavy_size=3, recent_size=2))):
        with LLM("opt-tiny", Policy(), eviction, dtype="float32", offload_dir="o") as llm:
            want = llm.generate(TEXTS, SamplingParams(max_tokens=10))
            column = llm.model.spec.kv_bytes_per_token(4)
        for row, completion in zip(rows, want, strict=True):
            found = row[side]
            assert (found["text"], found["token_ids"]) == (completion.text, completion.token_ids)
            columns = row["prompt_len"] + 9 if eviction is None else min(6, row["prompt_len"] + 9)
            assert (found["columns"], found["bytes"]) == (columns, columns * column)
    assert rows[0]["same_tokens"] < 10


def test_flags_of_run_text_generation(text: Door, words_model: Path) -> None:
    theirs = text(
        f"--model_arch opt --model_name {words_model} --cache_dir c --heavy_ratio 0.3 "
        "--recent_ratio 0.2 --length 8 --seed 42 --no_cuda --prompt 'import os and more'"
    )
    ours = text(
        f"--model {words_model} --hh-ratio 0.3 --recent-ratio 0.2 --gen-len 8 --device cpu "
        "--prompt 'import os and more'"
    )
    assert theirs.out == ours.out


# ---- turns


def test_rolling_positions_go_on_where_others_end(
    streaming: Door, rotary: Path, tmp_path: Path
) -> None:
    """64 positions: the full cache and plain h2o break off, as much as fits being shown."""
    policies = "--policies full h2o h2o:positions=rolling"
    out = streaming(f"--model {rotary} --gen-len 9 {SMALL} {policies} --json r.json")
    full, original, rolling = read_json(tmp_path / "r.json")["policies"]
    assert full["tokens"] == original["tokens"] == POSITIONS + 1
    assert rolling["answered"] == 8 and rolling["tokens"] > 2 * POSITIONS
    answered = min(full["answered"], original["answered"])
    assert 0 < answered < 8 and f"over the first {answered} turns" in out.out
    for one in (full, rolling):
        turns = one["turns"][1:answered]
        nats = sum(turn["nll"] * turn["tokens"] for turn in turns)
        expected = math.exp(nats / sum(turn["tokens"] for turn in turns))
        assert one["compared"]["perplexity"] == pytest.approx(expected)


def test_flags_of_others(
    streaming: Door, rotary: Path, tmp_path: Path, write_jsonl: Callable[..., Path]
) -> None:
    """llama-recipes' run_streaming.py and h2o_hf's streaming script."""
    write_jsonl(*QUESTIONS, name=MT_BENCH)
    ours = f"--turns {MT_BENCH} --policies h2o --hh-size 6 --recent-size 10 --positions rolling"
    theirs = (
        f"--input-path {MT_BENCH} --enable_h2o_generation --seed 42 "
        "--num_heavy_hitter_tokens 6 --num_window_length 16 --enable_position_rolling"
    )
    streaming(f"--model {rotary} --gen-len 4 {ours} --json a.json")
    streaming(f"--model-name {rotary} --gen-len 4 {theirs} --output b.json")
    first, second = (read_json(tmp_path / name)["policies"][0] for name in ("a.json", "b.json"))
    assert first["eviction"] == second["eviction"]
    assert [t["token_ids"] for t in first["turns"]] == [t["token_ids"] for t in second["turns"]]


# ---- texts


def test_a_long_text_by_window(streaming: Door, rotary: Path, tmp_path: Path) -> None:
    """NLL as transformers has it; the full cache grows, the others do not."""
    text = " ".join(f"def f{i}(x): return x + {i}" for i in range(40))
    (tmp_path / "text.txt").write_text(text)
    flags = f"--text text.txt --stream-len 33 --streams 3 {SMALL} --json r.json"
    streaming(f"--model {rotary} {flags} --policies full h2o h2o:kv_budget=0.25")
    full, h2o, share = (one["windows"] for one in read_json(tmp_path / "r.json")["policies"])
    with LLM(str(rotary), Policy(), dtype="float32", offload_dir="o") as llm:
        start = llm.model.encode("")
        ids = llm.model.encode_plain(text)
        column = llm.model.spec.kv_bytes_per_token(4)
    starts = [i * len(ids) // 3 for i in range(3)]
    streams = torch.tensor([[*start, *ids[at : at + 32]] for at in starts])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(rotary)(streams).logits
    nats = -logits[:, :-1].double().log_softmax(-1).gather(-1, streams[:, 1:, None])[..., 0]
    assert [(w["first"], w["last"]) for w in full] == [(1, 8), (9, 16), (17, 24), (25, 33)]
    for window in full:
        part = nats[:, max(0, window["first"] - 2) : window["last"] - 1]
        assert window["nll"]["value"] == pytest.approx(float(part.mean()), abs=1e-4)
        assert window["kv_bytes"] == (window["last"] - 1) * column
    assert [w["kv_bytes"] for w in h2o][1:] == [10 * column] * 3
    # int(0.25 x 33) columns and the newcomer, as soon as there are so many
    assert [w["kv_bytes"] for w in share] == [7 * column, *[9 * column] * 3]


# ---- frontier


def write_prompts(folder: Path, count: int = 5) -> Path:
    path = folder / "prompts.jsonl"
    text = "def read(self, path):\n    with open(path) as file:\n        return file.read()\n"
    path.write_text(
        "".join(json.dumps({"prompt": f"# {i}\n" + text * 4}) + "\n" for i in range(count))
    )
    return path


FRONTIER = (
    "frontier --prompts prompts.jsonl --prompt-len 48 --gen-len 8 --offload-dir o "
    "--gpu-batch-size 4"
)


def test_frontier_says_what_each_setting_loses_and_saves(evaluate: Door, tmp_path: Path) -> None:
    write_prompts(tmp_path)
    grid = "--policies full h2o --kv-budget 1.0 0.2 --kv-bits 16 8 --kv-bytes 0.2 --weight-bits 8"
    out = evaluate(f"{FRONTIER} {grid} --json r.json --markdown r.md --resamples 20")
    assert out.out.strip() == (tmp_path / "r.md").read_text().strip()
    cells = {cell["name"]: cell for cell in read_json(tmp_path / "r.json")["cells"]}
    for cell in cells.values():
        assert cell["kl"]["low"] <= cell["kl"]["value"] <= cell["kl"]["high"]
        assert 0 <= cell["changed"]["value"] <= 1
        assert cell["tokens_per_s"] > 0
    full = cells["full"]
    assert (
        full["kl"]["value"],
        full["changed"]["value"],
        full["kv_share"],
        full["read_share"],
    ) == (0, 0, 1, 1)
    everything = cells["h2o, 1 of the entries"]
    some = cells["h2o, 0.2 of the entries"]
    assert everything["kl"]["value"] == 0 < some["kl"]["value"]
    assert (some["policy"], some["kv_budget"], some["kv_bits"]) == ("h2o", 0.2, 16)
    assert 0.15 < some["kv_share"] < 0.25
    packed = cells["full, KV in 8 bits"]
    assert 0 < packed["kl"]["value"] < some["kl"]["value"] and 0.5 < packed["kv_share"] < 0.9
    (chosen,) = (cell for name, cell in cells.items() if name.startswith("--kv-size 0.2: "))
    assert chosen["kv_bytes"] == 0.2 and chosen["kv_share"] <= 0.21
    assert cells["full, weights in 8 bits"]["kl"]["value"] > 0


def test_frontier_is_what_fidelity_finds(evaluate: Door, tmp_path: Path) -> None:
    write_prompts(tmp_path)
    evaluate(
        f"{FRONTIER} --policies h2o --kv-budget 0.3 --no-answers --json r.json --keep-mem 1KiB"
    )
    same = FRONTIER.replace("frontier", "fidelity")
    evaluate(f"{same} --policies h2o --budgets 0.3 --budgets-of sequence --json f.json")
    ours = read_json(tmp_path / "r.json")["cells"][1]
    theirs = read_json(tmp_path / "f.json")["cells"][0]
    assert ours["kl"]["value"] == pytest.approx(theirs["kl"]["value"], rel=1e-3)
    assert ours["changed"]["value"] == theirs["flips"]["value"]
    assert ours["kv_share"] == theirs["kv_share"]
    assert ours["tokens_per_s"] is None


def test_frontier_goes_on_where_it_was_and_adds_settings(evaluate: Door, tmp_path: Path) -> None:
    write_prompts(tmp_path)
    kept = tmp_path / "r.json.rows.jsonl"
    longer = FRONTIER.replace(
        "--prompt-len 48", "--prompt-len 160 --join --tasks niah --num-questions 2"
    )
    evaluate(f"{longer} --policies h2o --kv-budget 0.3 --json r.json")
    before = kept.read_bytes()
    out = evaluate(f"{longer} --policies local --kv-budget 0.3 --json r.json")
    assert kept.read_bytes().startswith(before)
    assert (
        "h2o, 0.3 of the entries: prompts" not in out.err
        and "local, 0.3 of the entries: prompts" in out.err
    )
    cells = read_json(tmp_path / "r.json")["cells"]
    assert [cell["policy"] for cell in cells] == ["full", "local", "h2o"]
    assert all(0 <= cell["tasks"]["niah"]["value"] <= 1 for cell in cells)


def test_frontier_learns_what_kv_size_should_choose(evaluate: Door, tmp_path: Path) -> None:
    write_prompts(tmp_path, 2)
    grid = "--policies h2o local --kv-bits 8 4 --kv-bytes 0.2 --no-answers"
    out = evaluate(f"{FRONTIER} {grid} --json r.json --learn")
    path = tmp_path / "o" / "kv-size" / "opt-tiny.json"
    assert f"chooses by {Path('o/kv-size/opt-tiny.json')}" in out.err
    (mix,) = read_json(path)["mixes"]
    fitting = [
        cell for cell in read_json(tmp_path / "r.json")["cells"] if cell["kv_share"] <= 0.204
    ]
    assert mix["kl"] == min((cell["kl"] for cell in fitting), key=lambda kl: kl["value"])
    chosen = read_json(tmp_path / "r.json")
    evaluate(f"{FRONTIER} --kv-bytes 0.2 --no-answers --json again.json")
    (_, again) = read_json(tmp_path / "again.json")["cells"]
    assert (again["policy"], again["kv_bits"]) == (mix["eviction"], mix["cache_bits"])
    assert again["kl"]["value"] in [cell["kl"]["value"] for cell in chosen["cells"]]


@pytest.mark.parametrize(
    ("flags", "wrong"),
    [
        (
            "--prompts prompts.jsonl --prompt-len 4000 --gen-len 8",
            "--prompt-len 4000 and --gen-len 8",
        ),
        (
            "--prompts prompts.jsonl --prompt-len 400 --gen-len 8",
            "--prompts prompts.jsonl: no prompt has 408 tokens",
        ),
        ("--prompts prompts.jsonl --learn", "--learn: "),
        (
            "--prompts prompts.jsonl --prompt-len 40 --gen-len 8 --learn --kv-bytes 0.2 "
            "--policies full --kv-bits 8",
            "--learn: the smallest setting needs",
        ),
        (
            "--prompts prompts.jsonl --prompt-len 40 --gen-len 8 --learn --kv-bytes 0.9 "
            "--policies full --kv-bits 4 --kv-rotation",
            "--learn: the smallest setting needs",
        ),
    ],
)
def test_frontier_refuses_in_one_line(
    evaluate: Door, tmp_path: Path, flags: str, wrong: str
) -> None:
    write_prompts(tmp_path)
    out = evaluate(f"frontier {flags} --json r.json", code=2)
    assert out.err.count("\n") == 1 and wrong in out.err
    assert not (tmp_path / "r.json").exists()
