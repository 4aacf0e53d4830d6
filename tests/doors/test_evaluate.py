"""`evaluate` run to its end: fidelity with few rows, texts with and without eviction, and streams
past the cache."""

from __future__ import annotations

import json
import math
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from flexgen_h2o import H2O, LLM, Policy, SamplingParams
from flexgen_h2o.evaluate import MT_BENCH
from flexgen_h2o.evaluation.figures import held_kv
from tests.doors.conftest import POSITIONS, Answer
from tests.extras import needs
from tests.parity.reference import random_model

Door = Callable[..., Answer]
FEW_ROWS = (
    "--num-prompts 3 --recall-prompts 2 --depths 2 --prompt-len 128 --gen-len 12 --policies local "
    "h2o --budgets 0.2 "
    "--resamples 20 --mass-steps 2 --gpu-batch-size 4"
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


def chat_model(model: Path, folder: Path) -> Path:
    """A copy of the model with a chat template."""
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    shutil.copytree(model, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return folder


def figures(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


# ---- fidelity


def test_writes_json_and_tables(evaluate: Door, tmp_path: Path) -> None:
    out = evaluate(f"fidelity {FEW_ROWS} --free-run --offload-dir o --json r.json --markdown r.md")
    assert out.out.strip() == (tmp_path / "r.md").read_text().strip()
    result = figures(tmp_path / "r.json")
    assert [(cell["policy"], cell["columns"]) for cell in result["cells"]] == [
        ("local", 24),
        ("h2o", 24),
    ]
    for cell in result["cells"]:
        assert (
            cell["kl"]["n"] == 3
            and 0 < cell["kl"]["low"] <= cell["kl"]["value"] <= cell["kl"]["high"]
        )
        assert 0 < cell["evicted_mass"]["value"] < 1
    assert result["full"]["recall"]["inside"]["questions"] == 2
    assert result["settings"]["seed"] == 0
    assert (
        "evaluate: recall of the full cache: " in out.err
        and "evaluate: recall of h2o at 20%: " in out.err
    )
    evaluate(f"fidelity {FEW_ROWS} --offload-dir o --json again.json")
    for one, other in zip(result["cells"], figures(tmp_path / "again.json")["cells"], strict=True):
        assert one["kl"] == other["kl"] and one["recall"] == other["recall"]


@needs("plot")
@pytest.mark.parametrize(
    "flags", ["fidelity --policies h2o --budgets 0.2 --recall-prompts 0", "attention"]
)
def test_pictures(evaluate: Door, tmp_path: Path, flags: str) -> None:
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
        result = figures(tmp_path / "r.json")
        full = next(cell for cell in result["cells"] if cell["policy"] == "full")
        assert result["settings"]["compression"].startswith(flags)
        kl.append(full["kl"]["value"])
    assert 0 < kl[0] < kl[1] < kl[2] < 1


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (
            "--policies h2o-norm --budgets 0.3 --budgets-of bytes --compress-cache",
            ["full", "h2o-norm"],
        ),
        pytest.param(
            "--attn-sparsity 0.2", ["full"], marks=pytest.mark.slow
        ),  # its loops take seconds to compile
    ],
)
def test_a_whole_policy_in_one_line_with_its_speed(
    flags: str, names: list[str], evaluate: Door, tmp_path: Path
) -> None:
    """Shares of the bytes, as they are held; and a share of the columns that is read, which drops
    none."""
    small = FEW_ROWS.replace("--policies local h2o", "").replace(
        "--recall-prompts 2", "--recall-prompts 0"
    )
    small = small.replace("--budgets 0.2", "")
    out = evaluate(f"fidelity {small} --offload-dir o --json r.json {flags} --speed 1").out
    result = figures(tmp_path / "r.json")
    assert [cell["policy"] for cell in result["cells"]] == names
    last = result["cells"][-1]
    drops = last["policy"] != "full"
    assert last["kv_share"] <= 0.3 if drops else last["kv_share"] > 1
    assert (last["evicted_mass"]["value"] > 0) is drops
    assert (
        last["speed"]["tokens_per_s"] > 0 and last["speed"]["least"] == last["speed"]["largest"] > 0
    )
    assert last["kl"]["value"] > 0 and f"{last['speed']['tokens_per_s']:.1f}" in out
    assert drops or result["settings"]["compression"] == "--attn-sparsity 0.2"


def test_follows_the_model_s_own_tokens_after_a_prompt_file(
    evaluate: Door, tmp_path: Path, ids_model: Path
) -> None:
    rows = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (30, 12, 12)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = evaluate(
        f"fidelity --model {ids_model} --offload-dir o --prompts p.jsonl --continuation greedy "
        "--prompt-len 20 "
        "--gen-len 5 --policies h2o-norm:sinks=0 --budgets 0.5 --budgets-of sequence --mass-steps "
        "0 --json r.json"
    )
    result = figures(tmp_path / "r.json")
    assert result["recall"] is None and "evicted_mass" not in result["cells"][0]
    prompts = pytest.approx(44 / 3)
    sequences = pytest.approx(59 / 3)
    assert result["text"] == {
        "prompts": 3,
        "steps": 4,
        "mean_prompt_len": prompts,
        "mean_columns": sequences,
    }
    (cell,) = result["cells"]
    assert cell["eviction"]["sinks"] == 0 and cell["eviction"]["kv_budget"] == 0.5
    assert (cell["budget_of"], cell["columns"]) == ("sequence", pytest.approx((12 + 8 + 8) / 3))
    assert (
        result["settings"]["budgets_of"] == "sequence"
        and "### 50% of the sequence's columns" in out.out
    )


# ---- attention

SEEN = "attention --prompt-len 32 --gen-len 8 --offload-dir o --gpu-batch-size 4 --resamples 20"


def test_attention_writes_json_and_tables(evaluate: Door, tmp_path: Path) -> None:
    out = evaluate(f"{SEEN} --num-prompts 3 --remove 0.25 --json a.json --markdown a.md")
    assert out.out.strip() == (tmp_path / "a.md").read_text().strip()
    result = figures(tmp_path / "a.json")
    assert [block["block"] for block in result["blocks"]] == list(range(6)) and result["rows"] == 3
    for block in result["blocks"]:
        assert 0 < block["columns_needed"]["low"] <= block["columns_needed"]["value"] <= 1
        assert sum(block["score_by_rank"]) == pytest.approx(1)
        assert len(block["near_zero_by_head"]) == len(block["columns_needed_by_head"])
    needed = [block["columns_needed"]["value"] for block in result["blocks"]]
    assert result["mean"]["columns_needed"]["value"] == pytest.approx(sum(needed) / 6)
    assert result["mean"]["r2"] == pytest.approx(sum(block["r2"] for block in result["blocks"]) / 6)
    assert f"| mean | {sum(needed) / 6:.1%} [" in out.out
    assert [cell["columns"] for cell in result["removal"]["cells"]] == [24] * 3
    assert len(result["tokens"]["highest"]) == 20 and "|" in out.out


def test_attention_of_a_file_without_a_tokenizer_and_without_removals(
    evaluate: Door, ids_model: Path, tmp_path: Path
) -> None:
    rows = [{"prompt_token_ids": [5 + (i * j) % 100 for j in range(20 + 20 * i)]} for i in range(3)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = evaluate(f"{SEEN} --model {ids_model} --prompts p.jsonl --remove --json a.json")
    result = figures(tmp_path / "a.json")
    assert result["rows"] == 2, "the first is too short"
    assert "removal" not in result and result["tokens"]["highest"][0]["text"] is None
    assert "--gen-len has no effect: nothing is removed" in out.err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--mass 1", "--mass 1: is not between 0 and 1"),
        ("--near-zero nan", "--near-zero nan: is not between 0 and 1"),
        ("--remove 0.2 0.2", "--remove: 0.2 is given twice"),
        (
            "--remove 1.5",
            "--remove 1.5: must remove at least 1 of 32 KV entries and leave 4 (--sinks)",
        ),
        ("--remove 0.95", "--remove 0.95: must remove at least 1 of 32 KV entries"),
        ("--remove 0.01", "--remove 0.01: must remove at least 1 of 32 KV entries"),
        ("--prompt-len 3", "--prompt-len 3: "),
        (
            "--first-query 32",
            "--first-query 32: the last token of --prompt-len is 31; give that or less",
        ),
        ("--gen-len 1", "--gen-len 1: "),
        ("--prompts none.jsonl", "none.jsonl"),
        ("--json /none/a.json", "--json /none/a.json"),
        ("--plot a.doc", "--plot a.doc: "),
        ("--attn-sparsity 0.5", "--attn-sparsity: changes the attention"),
        ("--prompt-len 4000", "--prompt-len 4000 and --gen-len 8: opt-tiny has"),
        ("--num-prompts 10000000", "--num-prompts 10000000: "),
    ],
)
def test_attention_refuses_in_one_line(evaluate: Door, flags: str, says: str) -> None:
    out = evaluate(f"{SEEN} {flags}", code=2)
    assert says in out.err and out.err.count("\n") == 1 and not out.out


def test_attention_within_windows_is_not_measured(evaluate: Door, tmp_path: Path) -> None:
    model = random_model(model_type="mistral", sliding_window=8)
    model.save_pretrained(tmp_path / "m")
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt_token_ids": list(range(5, 45))}) + "\n")
    out = evaluate(f"{SEEN} --model m --prompts p.jsonl", code=2)
    assert (
        "--model m: has sliding windows, and full attention is measured; give another model"
        in out.err
    )


# ---- texts


def test_both_texts_are_the_engine_s(text: Door, tmp_path: Path) -> None:
    asked = " ".join(f"--prompt {shlex.quote(t)}" for t in TEXTS)
    sizes = "--hh-size 3 --recent-size 2 --dtype float32"
    out = text(f"{asked} --gen-len 10 {sizes} --json r.json")
    result = figures(tmp_path / "r.json")
    params = SamplingParams(max_tokens=10)
    for side, eviction in (("full", None), ("evicted", H2O(heavy_size=3, recent_size=2))):
        with LLM("opt-tiny", Policy(), eviction, dtype="float32", offload_dir="o") as llm:
            want = llm.generate(TEXTS, params)
            blocks = llm.model.spec.num_blocks
            column = llm.model.spec.kv_bytes_per_token(4)
        for row, completion in zip(result["rows"], want, strict=True):
            assert (
                row[side]["text"] == completion.text
                and row[side]["token_ids"] == completion.token_ids
            )
            columns = row["prompt_len"] + 9 if eviction is None else min(6, row["prompt_len"] + 9)
            assert (row[side]["columns"], row[side]["bytes"]) == (
                columns,
                columns * column,
            ) and blocks == 6
            assert completion.text in out.out
    assert result["eviction"]["name"] == "h2o" and result["rows"][0]["same_tokens"] < 10
    held = [sum(row[side]["bytes"] for row in result["rows"]) for side in ("evicted", "full")]
    assert out.out.splitlines()[-1].startswith(f"h2o: {held[0] / held[1]:.1%} of the full cache's")


def test_texts_of_a_chat(text: Door, rotary: Path, tmp_path: Path) -> None:
    """Prompts are messages, and answers end where turns do."""
    folder = chat_model(rotary, tmp_path / "chat")
    text(f"--model {folder} --prompt one --chat --gen-len 6 --dtype float32 --json r.json")
    with LLM(str(folder), Policy(), dtype="float32", offload_dir="o") as llm:
        [want] = llm.generate(
            [llm.model.encode_plain("<user>one\n<assistant>")], SamplingParams(max_tokens=6)
        )
    result = figures(tmp_path / "r.json")
    (row,) = result["rows"]
    assert (result["chat"], row["prompt"], row["full"]["token_ids"]) == (
        True,
        "one",
        want.token_ids,
    )
    tokenizer = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    end = next(name for name, i in tokenizer.items() if i == want.token_ids[2])
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "eos_token": end}))
    text(f"--model {folder} --prompt one --chat --gen-len 6 --dtype float32 --json s.json")
    (row,) = figures(tmp_path / "s.json")["rows"]
    assert row["full"]["finish_reason"] == "stop" and row["full"]["token_ids"] == want.token_ids[:3]
    assert (
        "llama-words has no chat template"
        in text(f"--model {rotary} --prompt one --chat", code=2).err
    )


@pytest.mark.slow
def test_budget_for_everything_writes_the_same(text: Door, tmp_path: Path) -> None:
    full = "--gen-len 6 --hh-ratio 1 --recent-ratio 1"
    out = text(
        f"--prompt {shlex.quote(TEXTS[0])} {full} --compress-cache --cache-bits 4 --json r.json"
    )
    result = figures(tmp_path / "r.json")
    (row,) = result["rows"]
    assert row["full"] == row["evicted"] and row["same_tokens"] == 6
    assert "1 of 1 texts the same" in out.out and "100.0%" in out.out
    assert result["compression"] == "--compress-cache --cache-bits 4"
    assert out.out.splitlines()[-1].endswith("; both with --compress-cache --cache-bits 4")


def test_flags_of_run_text_generation(text: Door, words_model: Path) -> None:
    """The same output as with our names; without any, its shares and a prompt of our own."""
    theirs = text(
        f"--model_arch opt --model_name {words_model} --cache_dir c --heavy_ratio 0.3 "
        "--recent_ratio 0.2 --length 8 "
        f"--seed 42 --no_cuda --prompt 'import os and more'"
    )
    ours = text(
        f"--model {words_model} --hh-ratio 0.3 --recent-ratio 0.2 --gen-len 8 --device cpu --seed "
        "1 "
        f"--prompt 'import os and more'"
    )
    assert theirs.out == ours.out
    given = text("--heavy_ratio 0.1 --recent_ratio 0.1 --length 3")
    assert "class Reader" in given.out
    assert text("--gen-len 3").out == given.out


def test_texts_of_token_ids_need_no_tokenizer(text: Door, tmp_path: Path, ids_model: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt_token_ids": [5, 6, 7, 8, 9, 10, 11, 12]}\n')
    out = text(
        f"--model {ids_model} --prompts p.jsonl --gen-len 4 --eviction tova --kv-budget 0.5 --json "
        "r.json"
    )
    (row,) = figures(tmp_path / "r.json")["rows"]
    assert row["evicted"]["columns"] == 6 + 1  # of 8 + 4, and the newcomer
    assert (
        row["full"]["text"] is None
        and str(row["full"]["token_ids"]) in out.out
        and "tova: " in out.out
    )


def test_a_share_of_bytes_with_rolling_positions(text: Door, rotary: Path) -> None:
    flags = "--prompt 'import os' --gen-len 4 --eviction h2o --kv-bytes 0.6 --positions rolling"
    assert "h2o: " in text(f"--model {rotary} {flags}").out


# ---- turns


def test_turns_share_one_cache(
    streaming: Door, rotary: Path, tmp_path: Path, write_jsonl: Callable[..., Path]
) -> None:
    """The answers to MT-bench's turns are those to all that was said before them as one prompt."""
    asked = write_jsonl(*QUESTIONS, name="question.jsonl")
    out = streaming(f"--model {rotary} --turns {asked} --gen-len 6 {SMALL} --json r.json")
    result = figures(tmp_path / "r.json")
    full, h2o = result["policies"]
    assert [turn.get("question_id") for turn in full["turns"]] == [81, 81, 82]
    assert full["turns"][2]["category"] == "coding" and full["answered"] == 3
    with LLM(str(rotary), Policy(), dtype="float32", offload_dir="o") as llm:
        encode = llm.model.encode_plain
        said = llm.model.encode("\nimport os\n")
        for turn in full["turns"]:
            said += [] if turn["turn"] == 0 else encode(f"\n{turn['prompt']}\n")
            (want,) = llm.generate([said], SamplingParams(max_tokens=6))
            assert (turn["token_ids"], turn["text"]) == (want.token_ids, want.text) and turn[
                "text"
            ] in out.out
            said += want.token_ids
        column = llm.model.spec.kv_bytes_per_token(4)
    assert full["tokens"] == h2o["tokens"] == len(said)
    assert full["kv_bytes"] == (len(said) - 1) * column and h2o["kv_bytes"] == 10 * column
    assert [turn["kv_columns"] for turn in h2o["turns"]][1:] == [10, 10]
    assert "| `h2o` | original | 3 of 3 |" in out.out and "5 heavy + 4 recent KV entries" in out.out


def test_the_perplexity_is_that_of_the_turns(
    streaming: Door, rotary: Path, tmp_path: Path, write_jsonl: Callable[..., Path]
) -> None:
    """By transformers, over the whole conversation at once."""
    turns = [[5, 6, 7, 8], [9, 10, 11], [12, 13]]
    asked = write_jsonl({"turns": turns[:2]}, {"prompt_token_ids": turns[2]})
    streaming(f"--model {rotary} --turns {asked} --gen-len 3 --policies full --json r.json")
    (full,) = figures(tmp_path / "r.json")["policies"]
    said = list(turns[0])
    given = []
    for turn, answer in zip([*turns[1:], []], full["turns"], strict=True):
        said += answer["token_ids"]
        given += range(len(said), len(said) + len(turn))
        said += turn
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(rotary)(torch.tensor([said])).logits[0]
    nats = -logits.double().log_softmax(-1)[[i - 1 for i in given], [said[i] for i in given]]
    assert full["measured_tokens"] == len(given) == 5
    assert full["nll"] == pytest.approx(float(nats.mean()), abs=1e-4)
    assert full["perplexity"] == pytest.approx(math.exp(full["nll"]))


def test_rolling_positions_go_on_where_others_end(
    streaming: Door, rotary: Path, tmp_path: Path
) -> None:
    """64 positions: the full cache and plain h2o break off, as much as fits being shown; memory
    stays what it is."""
    out = streaming(
        f"--model {rotary} --gen-len 9 {SMALL} --policies full h2o h2o:positions=rolling --json "
        "r.json"
    )
    full, original, rolling = figures(tmp_path / "r.json")["policies"]
    assert full["tokens"] == original["tokens"] == POSITIONS + 1 and full["answered"] < 8
    assert rolling["answered"] == 8 and rolling["tokens"] > 2 * POSITIONS
    assert out.out.count(f"the {POSITIONS} positions of") == 2
    all_of_them = min(full["answered"], original["answered"])
    assert 0 < all_of_them < 8
    assert f"over the first {all_of_them} turns, which all policies answered." in out.out
    for one, name in ((full, "full"), (rolling, "h2o:positions=rolling")):
        turns = one["turns"][:all_of_them]
        tokens = sum(turn["tokens"] + len(turn["token_ids"]) for turn in turns)
        nats = sum(turn["nll"] * turn["tokens"] for turn in turns[1:])
        expected = math.exp(nats / sum(turn["tokens"] for turn in turns[1:]))
        assert one["compared"]["perplexity"] == pytest.approx(expected)
        row = next(line for line in out.out.splitlines() if line.startswith(f"| `{name}` |"))
        assert f" {one['answered']} of 8 | {tokens} | {expected:.2f} |" in row
    streaming(
        f"--model {rotary} --gen-len 9 {SMALL} --policies h2o --positions rolling --num-turns 2 "
        "--json s.json"
    )
    (two,) = figures(tmp_path / "s.json")["policies"]
    assert [t["token_ids"] for t in two["turns"]] == [t["token_ids"] for t in rolling["turns"][:2]]
    assert two["peak_bytes"] == rolling["peak_bytes"] and two["kv_bytes"] == rolling["kv_bytes"]


def test_chat(
    streaming: Door, rotary: Path, tmp_path: Path, write_jsonl: Callable[..., Path]
) -> None:
    """Each turn is what the template puts between two answers."""
    folder = chat_model(rotary, tmp_path / "chat")
    asked = write_jsonl({"turns": ["one", "two"]})
    streaming(f"--model {folder} --turns {asked} --chat --gen-len 4 --policies full --json a.json")
    with LLM(str(folder), Policy(), dtype="float32", offload_dir="o") as llm:
        ids = [
            llm.model.encode_plain(t)
            for t in ("<user>one\n<assistant>", "\n<user>two\n<assistant>")
        ]
    plain = write_jsonl({"turns": ids}, name="plain.jsonl")
    streaming(f"--model {rotary} --turns {plain} --gen-len 4 --policies full --json b.json")
    answers = [
        [t["token_ids"] for t in figures(tmp_path / f)["policies"][0]["turns"]]
        for f in ("a.json", "b.json")
    ]
    assert answers[0] == answers[1]


def test_flags_of_others(
    streaming: Door, rotary: Path, tmp_path: Path, write_jsonl: Callable[..., Path]
) -> None:
    """llama-recipes' run_streaming.py and h2o_hf's streaming script."""
    write_jsonl(*QUESTIONS, name=MT_BENCH)
    ours = (
        f"--model {rotary} --turns {MT_BENCH} --gen-len 4 --policies h2o --hh-size 6 "
        "--recent-size 10"
    )
    streaming(f"{ours} --positions rolling --json a.json")
    streaming(
        f"--model-name {rotary} --input-path {MT_BENCH} --gen-len 4 --enable_h2o_generation --seed "
        "42 "
        "--num_heavy_hitter_tokens 6 --num_window_length 16 --enable_position_rolling --output "
        "b.json"
    )
    first, second = (figures(tmp_path / name)["policies"][0] for name in ("a.json", "b.json"))
    assert first["eviction"] == second["eviction"]
    assert [t["token_ids"] for t in first["turns"]] == [t["token_ids"] for t in second["turns"]]
    streaming(
        f"--model_name_or_path {rotary} --data_root . --gen-len 4 --enable_streaming_with_H2O "
        "--start_size 4 "
        "--heavy_hitter_size 6 --recent_size 10 --json c.json"
    )
    (third,) = figures(tmp_path / "c.json")["policies"]
    assert {**first["eviction"], "positions": None} == {**third["eviction"], "positions": None}
    half = streaming(
        f"--model {rotary} --num_heavy_hitter_tokens -1 --num_window_length 12 --num-turns 1 "
        "--json d.json"
    )
    assert "6 heavy + 6 recent" in half.out


# ---- texts


def test_a_long_text_by_window(streaming: Door, rotary: Path, tmp_path: Path) -> None:
    """NLL as transformers has it; the full cache grows, the others do not."""
    text = " ".join(f"def f{i}(x): return x + {i}" for i in range(40))
    (tmp_path / "text.txt").write_text(text)
    flags = (
        "--text text.txt --stream-len 33 --streams 3 --policies full h2o "
        "local:positions=rolling h2o:kv_budget=0.25"
    )
    out = streaming(f"--model {rotary} {flags} {SMALL} --json r.json")
    full, h2o, local, share = figures(tmp_path / "r.json")["policies"]
    with LLM(str(rotary), Policy(), dtype="float32", offload_dir="o") as llm:
        start = llm.model.encode("")
        ids = llm.model.encode_plain(text)
        column = llm.model.spec.kv_bytes_per_token(4)
    streams = torch.tensor(
        [[*start, *ids[at : at + 32]] for at in (i * len(ids) // 3 for i in range(3))]
    )
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(rotary)(streams).logits
    nats = -logits[:, :-1].double().log_softmax(-1).gather(-1, streams[:, 1:, None])[..., 0]
    windows = full["windows"]
    assert [(w["first"], w["last"]) for w in windows] == [(1, 8), (9, 16), (17, 24), (25, 33)]
    for window in windows:
        part = nats[:, max(0, window["first"] - 2) : window["last"] - 1]
        assert window["nll"]["value"] == pytest.approx(float(part.mean()), abs=1e-4)
        assert window["kv_bytes"] == (window["last"] - 1) * column
    assert (
        [w["kv_bytes"] for w in h2o["windows"]][1:]
        == [10 * column] * 3
        == [w["kv_bytes"] for w in local["windows"]][1:]
    )
    assert h2o["nll"]["value"] != full["nll"]["value"]
    # int(0.25 x 33) columns and the newcomer, as soon as there are so many
    assert [w["kv_bytes"] for w in share["windows"]] == [7 * column, *[9 * column] * 3]
    assert "h2o:kv_budget=0.25: 4 heavy + 4 recent KV entries per sequence" in out.err
    assert "| `local:positions=rolling` | rolling |" in out.out


def test_what_is_said_to_be_held_is_what_the_engine_held(rotary: Path, tmp_path: Path) -> None:
    for eviction in (None, H2O(heavy_size=5, recent_size=4), H2O(kv_budget=0.4)):
        with LLM(str(rotary), Policy(), eviction, dtype="float32", offload_dir=tmp_path) as llm:
            llm.follow([[3, 4]], [list(range(5, 30))], lambda rows, logits: None)
            held = llm.times[0].held
            assert held == [held_kv(llm, (2, len(held)), new)[0] for new in range(1, len(held) + 1)]


# ---- both


@pytest.mark.parametrize(
    ("asked", "compression"),
    [
        ("--num-turns 1 --gen-len 3", "--compress-cache --cache-bits 8"),
        ("--text t.txt --stream-len 9 --streams 1 --windows 2", "--compress-cache --cache-bits 8"),
        ("--num-turns 1 --gen-len 3", ""),
    ],
)
def test_what_is_compressed_is_said(
    asked: str, compression: str, streaming: Door, rotary: Path, tmp_path: Path
) -> None:
    """Above each policy, with the table, and in the JSON."""
    (tmp_path / "t.txt").write_text("import os\n" * 9)
    out = streaming(f"--model {rotary} {asked} {SMALL} {compression} --json r.json")
    assert figures(tmp_path / "r.json")["compression"] == (
        compression and f"{compression} --cache-window 16"
    )
    said = out.out + out.err
    assert said.count("--compress-cache --cache-bits 8") == (3 if compression else 0)
    assert ("all with" in said.lower()) == bool(compression)


def test_a_template_that_forgets(
    streaming: Door, rotary: Path, tmp_path: Path, write_jsonl: Callable[..., Path]
) -> None:
    folder = shutil.copytree(rotary, tmp_path / "chat")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    forgets = "{{ messages[-1].content }}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": forgets}))
    out = streaming(f"--model {folder} --chat --turns {write_jsonl({'turns': ['one', 'two']})}", 2)
    assert "leaves out answers that came before" in out.err
    ids = streaming(f"--model {folder} --chat --turns {write_jsonl({'turns': [[5, 6]]})}", 2)
    assert "leave --chat out" in ids.err
    plain = streaming(f"--model {rotary} --chat --turns {write_jsonl({'turns': ['one']})}", 2)
    assert "has no chat template" in plain.err


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
    cells = {cell["name"]: cell for cell in figures(tmp_path / "r.json")["cells"]}
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
    evaluate(
        f"{same} --policies h2o --budgets 0.3 --budgets-of sequence --json f.json --mass-steps 0"
    )
    ours = figures(tmp_path / "r.json")["cells"][1]
    theirs = figures(tmp_path / "f.json")["cells"][0]
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
    cells = figures(tmp_path / "r.json")["cells"]
    assert [cell["policy"] for cell in cells] == ["full", "local", "h2o"]
    assert all(0 <= cell["tasks"]["niah"]["value"] <= 1 for cell in cells)


def test_frontier_of_other_prompts_does_not_touch_the_file(evaluate: Door, tmp_path: Path) -> None:
    write_prompts(tmp_path)
    evaluate(f"{FRONTIER} --policies h2o --kv-budget 0.3 --json r.json --no-answers")
    before = (tmp_path / "r.json.rows.jsonl").read_bytes()
    out = evaluate(
        f"{FRONTIER} --policies h2o --kv-budget 0.3 --json r.json --no-answers --num-prompts 2",
        code=2,
    )
    assert "--json: " in out.err and "remove it, or name another" in out.err
    assert (tmp_path / "r.json.rows.jsonl").read_bytes() == before


def test_frontier_learns_what_kv_size_should_choose(evaluate: Door, tmp_path: Path) -> None:
    write_prompts(tmp_path, 2)
    grid = "--policies h2o local --kv-bits 8 4 --kv-bytes 0.2 --no-answers"
    out = evaluate(f"{FRONTIER} {grid} --json r.json --learn")
    path = tmp_path / "o" / "kv-size" / "opt-tiny.json"
    assert f"chooses by {Path('o/kv-size/opt-tiny.json')}" in out.err
    (mix,) = figures(path)["mixes"]
    fitting = [cell for cell in figures(tmp_path / "r.json")["cells"] if cell["kv_share"] <= 0.204]
    assert mix["kl"] == min((cell["kl"] for cell in fitting), key=lambda kl: kl["value"])
    chosen = figures(tmp_path / "r.json")
    evaluate(f"{FRONTIER} --kv-bytes 0.2 --no-answers --json again.json")
    (_, again) = figures(tmp_path / "again.json")["cells"]
    assert (again["policy"], again["kv_bits"]) == (mix["eviction"], mix["cache_bits"])
    assert again["kl"]["value"] in [cell["kl"]["value"] for cell in chosen["cells"]]


@needs("eval")
def test_frontier_scores_summaries_and_follows_the_models_own_answers(
    evaluate: Door, tmp_path: Path
) -> None:
    article = "def area(self):\n    return self.width * self.height\n" * 3 + "\n\nclass Shape:"
    line = json.dumps({"article": article, "summary_gt": "def area self width"}) + "\n"
    (tmp_path / "prompts.jsonl").write_text(line * 3)
    evaluate(f"{FRONTIER} --continuation greedy --policies h2o --kv-budget 0.3 --json r.json")
    full, h2o = figures(tmp_path / "r.json")["cells"]
    assert 0 <= h2o["rouge"]["rouge2"]["value"] <= 1 and full["rouge"]["rougeL"]["n"] == 3
    assert figures(tmp_path / "r.json")["continuation"] == "the model's own"


@pytest.mark.parametrize(
    ("flags", "wrong"),
    [
        ("--prompts nowhere.jsonl", "--prompts nowhere.jsonl"),
        (
            "--prompts prompts.jsonl --prompt-len 4000 --gen-len 8",
            "--prompt-len 4000 and --gen-len 8",
        ),
        (
            "--prompts prompts.jsonl --prompt-len 400 --gen-len 8",
            "--prompts prompts.jsonl: no prompt has 408 tokens",
        ),
        ("--prompts prompts.jsonl --gen-len 1", "--gen-len 1"),
        ("--prompts prompts.jsonl --tasks riddle", "--tasks riddle"),
        ("--prompts prompts.jsonl --learn", "--learn: "),
        (
            "--prompts prompts.jsonl --prompt-len 40 --gen-len 8 --learn --kv-bytes 0.2 "
            "--policies full --kv-bits 8",
            "--learn: the smallest setting needs",
        ),
        ("--prompts prompts.jsonl --kv-budget 0.2 0.2", "--kv-budget: 0.2 is given twice"),
        ("--prompts prompts.jsonl --policies h2o:kv_budget=0.2", "--policies h2o:kv_budget=0.2"),
        ("", "--prompts: is missing"),
    ],
)
def test_frontier_refuses_in_one_line(
    evaluate: Door, tmp_path: Path, flags: str, wrong: str
) -> None:
    write_prompts(tmp_path)
    out = evaluate(f"frontier {flags} --json r.json", code=2)
    assert out.err.count("\n") == 1 and wrong in out.err
    assert not (tmp_path / "r.json").exists()
