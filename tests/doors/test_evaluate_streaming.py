"""`evaluate streaming`: turns and long texts past the cache; others' flags mean the same; wrong use is one line."""

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
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from flexgen_h2o import H2O, LLM, Policy, SamplingParams, cli
from flexgen_h2o.checkpoint.resolve import PACKAGED
from flexgen_h2o.evaluation.streaming import MT_BENCH
from tests.doors.conftest import POSITIONS, Answer

Door = Callable[..., Answer]
PLACED = "--offload-dir o --gpu-batch-size 4 --dtype float32"
SMALL = "--hh-size 5 --recent-size 4"
QUESTIONS = [
    {"question_id": 81, "category": "writing", "turns": ["import os", "class Shape:"]},
    {"question_id": 82, "category": "coding", "turns": ["def area(self):"], "reference": ["ignored"]},
]


@pytest.fixture(scope="module")
def rotary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA with two kv-heads, the shipped model's tokenizer, and few positions."""
    shipped = PACKAGED["opt-tiny"]
    config = LlamaConfig(
        vocab_size=json.loads((shipped / "config.json").read_text())["vocab_size"], hidden_size=32,
        intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=POSITIONS, eos_token_id=None, bos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(0, 0.3)
    folder = tmp_path_factory.mktemp("models") / "llama-words"
    model.save_pretrained(folder)
    for path in shipped.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture
def streaming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], plain_cpu: None
) -> Door:
    """The console command, in the working folder `tmp_path`."""
    monkeypatch.chdir(tmp_path)

    def call(flags: str, placed: str = PLACED) -> Answer:
        capfd.readouterr()
        code = cli.main(["evaluate", "streaming", *shlex.split(f"{flags} {placed}")])
        return Answer(code, *capfd.readouterr())

    return call


def figures(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text()))


# ---- turns


def test_turns_share_one_cache(streaming: Door, rotary: Path, tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    """The answers to MT-bench's turns are those to all that was said before them as one prompt."""
    asked = write_jsonl(*QUESTIONS, name="question.jsonl")
    out = streaming(f"--model {rotary} --turns {asked} --gen-len 6 {SMALL} --json r.json")
    assert out.code == 0, out.err
    result = figures(tmp_path / "r.json")
    full, h2o = result["policies"]
    assert [turn.get("question_id") for turn in full["turns"]] == [81, 81, 82]
    assert full["turns"][2]["category"] == "coding" and full["answered"] == 3
    with LLM(str(rotary), Policy(), dtype="float32", offload_dir="o") as llm:
        encode, said = llm.model.encode_more, llm.model.encode("\nimport os\n")
        for turn in full["turns"]:
            said += [] if turn["turn"] == 0 else encode(f"\n{turn['prompt']}\n")
            (want,) = llm.generate([said], SamplingParams(max_tokens=6))
            assert (turn["token_ids"], turn["text"]) == (want.token_ids, want.text) and turn["text"] in out.out
            said += want.token_ids
        column = llm.model.spec.kv_bytes_per_token(4)
    assert full["tokens"] == h2o["tokens"] == len(said)
    assert full["kv_bytes"] == (len(said) - 1) * column and h2o["kv_bytes"] == 10 * column
    assert [turn["kv_columns"] for turn in h2o["turns"]][1:] == [10, 10]
    assert "| `h2o` | original | 3 of 3 |" in out.out and "5 heavy + 4 recent KV columns" in out.out


def test_the_perplexity_is_that_of_the_turns(
    streaming: Door, rotary: Path, tmp_path: Path, write_jsonl: Callable[..., Path]
) -> None:
    """By transformers, over the whole conversation at once."""
    turns = [[5, 6, 7, 8], [9, 10, 11], [12, 13]]
    asked = write_jsonl({"turns": turns[:2]}, {"prompt_token_ids": turns[2]})
    out = streaming(f"--model {rotary} --turns {asked} --gen-len 3 --policies full --json r.json")
    assert out.code == 0, out.err
    (full,) = figures(tmp_path / "r.json")["policies"]
    said, given = list(turns[0]), []
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


def test_rolling_positions_go_on_where_others_end(streaming: Door, rotary: Path, tmp_path: Path) -> None:
    """64 positions: the full cache and plain h2o break off, as much as fits being shown; memory stays what it is."""
    out = streaming(f"--model {rotary} --gen-len 9 {SMALL} --policies full h2o h2o:positions=rolling --json r.json")
    assert out.code == 0, out.err
    full, original, rolling = figures(tmp_path / "r.json")["policies"]
    assert full["tokens"] == original["tokens"] == POSITIONS + 1 and full["answered"] < 8
    assert rolling["answered"] == 8 and rolling["tokens"] > 2 * POSITIONS
    assert out.out.count(f"the {POSITIONS} positions of") == 2
    short = streaming(
        f"--model {rotary} --gen-len 9 {SMALL} --policies h2o --positions rolling --num-turns 2 --json s.json"
    )
    assert short.code == 0, short.err
    (two,) = figures(tmp_path / "s.json")["policies"]
    assert [t["token_ids"] for t in two["turns"]] == [t["token_ids"] for t in rolling["turns"][:2]]
    assert two["peak_bytes"] == rolling["peak_bytes"] and two["kv_bytes"] == rolling["kv_bytes"]


def test_chat(streaming: Door, rotary: Path, tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    """Each turn is what the template puts between two answers."""
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    folder = shutil.copytree(rotary, tmp_path / "chat")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    asked = write_jsonl({"turns": ["one", "two"]})
    out = streaming(f"--model {folder} --turns {asked} --chat --gen-len 4 --policies full --json a.json")
    assert out.code == 0, out.err
    with LLM(str(folder), Policy(), dtype="float32", offload_dir="o") as llm:
        ids = [llm.model.encode_more(t) for t in ("<user>one\n<assistant>", "\n<user>two\n<assistant>")]
    plain = write_jsonl({"turns": ids}, name="plain.jsonl")
    assert streaming(f"--model {rotary} --turns {plain} --gen-len 4 --policies full --json b.json").code == 0
    answers = [[t["token_ids"] for t in figures(tmp_path / f)["policies"][0]["turns"]] for f in ("a.json", "b.json")]
    assert answers[0] == answers[1]


def test_flags_of_others(streaming: Door, rotary: Path, tmp_path: Path, write_jsonl: Callable[..., Path]) -> None:
    """llama-recipes' run_streaming.py and h2o_hf's streaming script."""
    write_jsonl(*QUESTIONS, name=MT_BENCH)
    ours = f"--model {rotary} --turns {MT_BENCH} --gen-len 4 --policies h2o --hh-size 6 --recent-size 10"
    wanted = streaming(f"{ours} --positions rolling --json a.json")
    theirs = streaming(
        f"--model-name {rotary} --input-path {MT_BENCH} --gen-len 4 --enable_h2o_generation --seed 42 "
        "--num_heavy_hitter_tokens 6 --num_window_length 16 --enable_position_rolling --output b.json"
    )
    assert theirs.code == wanted.code == 0, theirs.err
    first, second = (figures(tmp_path / name)["policies"][0] for name in ("a.json", "b.json"))
    assert first["eviction"] == second["eviction"]
    assert [t["token_ids"] for t in first["turns"]] == [t["token_ids"] for t in second["turns"]]
    other = streaming(
        f"--model_name_or_path {rotary} --data_root . --gen-len 4 --enable_streaming_with_H2O --start_size 4 "
        "--heavy_hitter_size 6 --recent_size 10 --json c.json"
    )
    assert other.code == 0, other.err
    (third,) = figures(tmp_path / "c.json")["policies"]
    assert {**first["eviction"], "positions": None} == {**third["eviction"], "positions": None}
    half = streaming(
        f"--model {rotary} --num_heavy_hitter_tokens -1 --num_window_length 12 --num-turns 1 --json d.json"
    )
    assert half.code == 0 and "6 heavy + 6 recent" in half.out, half.err


# ---- texts


def test_a_long_text_by_window(streaming: Door, rotary: Path, tmp_path: Path) -> None:
    """NLL as transformers has it; the full cache grows, the others do not."""
    text = " ".join(f"def f{i}(x): return x + {i}" for i in range(40))
    (tmp_path / "text.txt").write_text(text)
    flags = "--text text.txt --stream-len 33 --streams 3 --policies full h2o local:positions=rolling"
    out = streaming(f"--model {rotary} {flags} {SMALL} --json r.json")
    assert out.code == 0, out.err
    full, h2o, local = figures(tmp_path / "r.json")["policies"]
    with LLM(str(rotary), Policy(), dtype="float32", offload_dir="o") as llm:
        start, ids = llm.model.encode(""), llm.model.encode_more(text)
        column = llm.model.spec.kv_bytes_per_token(4)
    streams = torch.tensor([[*start, *ids[at : at + 32]] for at in (i * len(ids) // 3 for i in range(3))])
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
    assert "| `local:positions=rolling` | rolling |" in out.out


def test_what_is_said_to_be_held_is_what_the_engine_held(rotary: Path, tmp_path: Path) -> None:
    from flexgen_h2o.evaluation.metrics import held_columns

    for eviction in (None, H2O(heavy_size=5, recent_size=4)):
        with LLM(str(rotary), Policy(), eviction, dtype="float32", offload_dir=tmp_path) as llm:
            llm.follow([[3, 4]], [list(range(5, 30))], lambda rows, logits: None)
            held = llm.kv_use[0].held
            assert held == [held_columns(llm.eviction, 2, new, 2) for new in range(1, len(held) + 1)]


def test_rolling_texts_outgrow_the_positions(streaming: Door, rotary: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("import os\n" * 90)
    out = streaming(f"--model {rotary} --text text.txt --policies h2o --positions rolling {SMALL} --json r.json")
    assert out.code == 0, out.err
    result = figures(tmp_path / "r.json")
    assert result["settings"]["stream_len"] > 2 * POSITIONS
    assert len({w["kv_bytes"] for w in result["policies"][0]["windows"]}) == 1


# ---- both


@pytest.mark.parametrize("asked", ["--num-turns 1 --gen-len 3", "--text t.txt --stream-len 9 --streams 1 --windows 2"])
@pytest.mark.parametrize("compression", ["", "--compress-cache --cache-bits 8"])
def test_what_is_compressed_is_said(
    asked: str, compression: str, streaming: Door, rotary: Path, tmp_path: Path
) -> None:
    """Above each policy, with the table, and in the JSON."""
    (tmp_path / "t.txt").write_text("import os\n" * 9)
    out = streaming(f"--model {rotary} {asked} {SMALL} {compression} --json r.json")
    assert out.code == 0, out.err
    assert figures(tmp_path / "r.json")["compression"] == compression
    said = out.out + out.err
    assert said.count("--compress-cache --cache-bits 8") == (3 if compression else 0)
    assert ("all with" in said.lower()) == bool(compression)


# ---- wrong use


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--positions rolling", "--positions rolling: needs rotary embeddings, and opt-tiny has learned positions"),
        ("--policies local:positions=rolling", "--positions rolling: needs rotary embeddings"),
        ("--policies h2o other", "--policies other: other is not one of"),
        ("--policies h2o h2o", "--policies: h2o is given twice"),
        ("--policies full --hh-size 5", "--hh-size: says nothing of the full cache"),
        ("--policies full --positions rolling", "--positions: says nothing of the full cache"),
        ("--positions rolling --policies h2o:positions=rolling", "positions is given twice"),
        ("--text --turns t.jsonl", "--turns and --text: give one of them"),
        ("--text --chat", "--chat and --text: give one of them"),
        ("--text --temperature 1", "--temperature and --text: give one of them"),
        ("--text --top-p 0.5", "--top-p and --text: give one of them"),
        ("--streams 3", "--streams: goes with --text"),
        ("--text --windows 9 --stream-len 9", "--windows 9: a stream has 9 tokens"),
        ("--text --stream-len 2000", "--stream-len 2000: opt-tiny has 1024 positions; lower it, or leave full out"),
        ("--text --stream-len 1", "--stream-len 1, --streams 8: the text has"),
        ("--text --streams 9000", "--streams 9000: the text has"),
        ("--text no.txt", "--text no.txt: No such file"),
        ("--chat", "--chat: opt-tiny has no chat template"),
        ("--chat --turn-format x", "--turn-format and --chat: give one of them"),
        ("--turn-format x", "has no {turn} in it"),
        ("--turns no.jsonl", "--turns no.jsonl: No such file"),
        ("--turns t.csv", "--turns t.csv: the file name must end in .txt"),
        ("--json no/r.json", "--json no/r.json"),
        ("--num_window_length 64 --hh-size 3", "--hh-size: is said by --num_window_length"),
        ("--num_window_length 64 --num_heavy_hitter_tokens 64", "--num_heavy_hitter_tokens 64: must be from 0 to less"),
        ("--attn-sparsity 0.5", "--attn-sparsity: is for the full cache"),
        ("--hh-size -3", "--hh-size"),
    ],
)
def test_one_line_says_what_is_wrong(flags: str, says: str, streaming: Door) -> None:
    out = streaming(flags)
    assert out.code == 2 and out.err.count("\n") == 1
    assert says in out.err, out.err


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not valid JSON"),
        ("[1]", "a JSON object is expected"),
        ({"turns": []}, "turns must be a list of at least one"),
        ({"turns": "hello"}, "turns must be a list"),
        ({"turns": [3]}, "a turn is a text or a list of token ids, not int"),
        ({"turns": [[5, -1]]}, "token id -1 is outside"),
        ({"turns": [[]]}, "has no tokens"),
        ({"question_id": 3}, "give either prompt or prompt_token_ids, neither is there"),
        ({"turns": [[5] * 2000]}, "2000 tokens, but opt-tiny has 1024 positions"),
    ],
)
def test_bad_lines_are_named(line: object, says: str, streaming: Door, write_jsonl: Callable[..., Path]) -> None:
    good = [] if "2000" in says else [{"prompt": "import os"}]
    out = streaming(f"--turns {write_jsonl(*good, line, name='t.jsonl')}")
    assert out.code == 2 and out.err.count("\n") == 1
    assert f"t.jsonl:{len(good) + 1}: " in out.err and says in out.err, out.err


def test_a_template_that_forgets(
    streaming: Door, rotary: Path, tmp_path: Path, write_jsonl: Callable[..., Path]
) -> None:
    folder = shutil.copytree(rotary, tmp_path / "chat")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    forgets = "{{ messages[-1].content }}"
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": forgets}))
    out = streaming(f"--model {folder} --chat --turns {write_jsonl({'turns': ['one', 'two']})}")
    assert out.code == 2 and "leaves out answers that came before" in out.err
    ids = streaming(f"--model {folder} --chat --turns {write_jsonl({'turns': [[5, 6]]})}")
    assert ids.code == 2 and "leave --chat out" in ids.err
    plain = streaming(f"--model {rotary} --chat --turns {write_jsonl({'turns': ['one']})}")
    assert plain.code == 2 and "has no chat template" in plain.err
