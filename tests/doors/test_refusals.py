"""Wrong use and unusable input: exit code 2 and one line on stderr that names flag or file; nothing
is run or left."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o import cli
from flexgen_h2o.core.config import Policy, SavedPolicy, write_policy
from flexgen_h2o.planner.profile import nominal_profile, write_profile
from tests.doors.conftest import POSITIONS, Door, read_json

# What stands behind a command's name; the flags of a case come after it, and win.
BASE = {
    "flex-opt": "--model ids --offload-dir offload --gen-len 4",
    "plan": "--model ids --offload-dir offload --hardware t4 --prompt-len 8 --gen-len 4",
    "batch": "--model ids --offload-dir offload --input in.jsonl --output out.jsonl",
    "generate": "ids --offload-dir offload",
    "hardware": "--offload-dir offload",
    "fidelity": "--model opt-tiny --offload-dir offload",
    "text": "--model opt-tiny --offload-dir offload",
    "streaming": "--model opt-tiny --offload-dir offload",
}
# Lines that are refused, by command. The message names the first word, without its value, and the
# words behind ` | `; or, instead of the first, those behind ` > `.
FLEX_OPT = (
    "--hh-size 0",
    "--hh-size 4 --hh-ratio 0.1",
    "--eviction nonsense",
    "--hh-ratio 0.1 --eviction full | --eviction",
    "--attn-sparsity 0.5 --eviction h2o | --eviction",
    "--positions rolling | rotary",
    "--kv-budget 0.2 --hh-ratio 0.1 | --hh-ratio",
    "--eviction tova:kv_budget=0.2 --recent-size 4 | --recent-size",
    "--gpu-batch-size 1048576 --num-gpu-batches 1048576 | num-gpu-batches",
    "--policy auto --percent 100 0 100 0 100 0 | --percent",
    "--policy /no/such/policy.json",
    "--policy damaged.json",
    "--policy good.json --percent 0 0 0 0 0 0 | --percent",
    "--policy good.json --overlap false | --overlap",
    "--int8-compute --compress-weight --weight-bits 8 | --weight-bits",
    "--weight-bits 8 --int8-compute > --weight-bits",
    "--hardware t4 --policy auto",
    f"--prompt-len {POSITIONS} --gen-len 2 | --gen-len {POSITIONS}",
    "--cut-gen-len 1 --gen-len 8 | --gen-len",
    "--cut-gen-len 3 --debug-mode breakdown | --debug-mode",
    "--cut-gen-len 4 --prompts in.jsonl | --prompts",
    "--debug-mode breakdown --gen-len 1 | --gen-len",
    "--device tpu",
    "--dtype 'a\rb'",
    "--device cuda",
    "--dtype float16 --device cpu",
    "--stop end --prompts in.jsonl | tokenizer",
    "--no-such-flag",
    "stray",
    "--gen-len",
    "--json /tmp",
    "--output out.txt",
    "--log-file /no/folder/run.log",
    "--json pipe.jsonl",
    "--prompts empty.txt",
    "--prompts array.jsonl | jq",
    "--eviction vase | h2o",
    "--prompts prompts.csv > 'COLUMN': 'prompt'",
    "--prompts latin.txt --model words | latin.txt:2",
    f"--prompts long.jsonl | [1] {POSITIONS + 1}",
    # Files that would be written over.
    "--output in.jsonl --prompts in.jsonl | --prompts",
    "--json link.json --prompts in.jsonl | --prompts",
    "--json hard.json --prompts in.jsonl | --prompts",
    "--json to-new.json --output new.jsonl | --output",
    "--trace words/model.safetensors --model words | --model",
    "--log-file to-config --model words | --model",
    # Models, and flags of other scripts.
    "--model empty | config.json",
    "--model nobody/no-such-model | cache",
    "--model nobody/no-such-model --path _DUMMY_ | built-in",
    "--model opt-tinny | opt-tiny?",
    "--model Qwen/Qwen3-30-A3B | Qwen/Qwen3-30B-A3B?",
    "--model google/gemma-3-4b-it > Gemma",
    "--model Qwen/Qwen3.5-35B-A3B > Qwen3.5",
    "--model nobody/unheard-of > family",
    "--model ggufs > GGUF",
    "--model ggufs/m.gguf > docs/reference/not-supported.md",
    "--embeddings > sentence-transformers",
    "--model words/model.safetensors > folder",
    "--model weights-alone > config.json",
    "--model no-weights | weights",
    "--model other-shapes > (80, 32)",
    "--model no-tokenizer --prompts short.txt > no-tokenizer",
    "--model odd-tokenizer --prompts short.txt > odd-tokenizer",
    "--model byte-order-mark --prompts short.txt > byte-order-mark/tokenizer.json",
    f"--model {'m' * 5000}",
    "--path _DUMY_ --model some/model",
    "--gbs 4 --num-gb 2 | --micro-batch",
    "--hh_ration 0.1 | --hh-ratio?",
    "--head-ip 1.2.3.4 | --pipeline",
)
FIDELITY = (
    "--policies nonsense",
    "--policies full",
    "--policies h2o:kv_budget=0.2 | --budgets",
    "--policies h2o:positions=rolling --budgets 0.5 --num-prompts 1 > --positions",
    "--eviction h2o",
    "--attn-sparsity 0.5 --policies h2o | --policies",
    "--budgets 0.3 --attn-sparsity 0.5 | --attn-sparsity",
    "--gen-len 1",
    "--prompt-len 1024 --gen-len 2 | --gen-len",
    "--prompt-len 30 | recall",
    "--num-prompts 99999",
    "--prompts short.txt | --prompt-len",
    "--plot p.doc",
    "--model facebook/opt-125m --path _DUMMY_ | --prompts",
    "--markdown new --json new | --json",
)
TEXT = (
    "--prompt a --gpu-mem 1GiB --device cpu > --gpu-mem",
    "--prompt a --prompts p.txt | --prompts",
    "--eviction full",
    "--heavy_ratio 0 > --heavy-ratio",
    "--fp16 --no_cuda > float16",
    "--model ids | --prompts",
    "--model_arch llama | opt-tiny",
    f"--prompt {'xyz-' * POSITIONS} --model words | {POSITIONS}",
)
STREAMING = (
    "--positions rolling | rotary",
    "--policies local:positions=rolling > --positions",
    "--policies h2o other | other",
    "--policies h2o h2o | twice",
    "--policies h2o:kv_budget=0.2 full",
    "--policies h2o:kv_budget=2 --text | kv_budget",
    "--hh-size 5 --policies full",
    "--hh-size 4 --text --policies full h2o:kv_budget=0.2 | --policies",
    "--hh-size 3 --num_window_length 64 | --num_window_length",
    "--num_heavy_hitter_tokens 64 --num_window_length 64",
    "--chat --text | --text",
    "--streams 3 | --text",
    "--windows 5 --text --stream-len 9",
    "--stream-len 2000 --text",
    "--text no.txt",
    "--text ''",
    "--chat | template",
    "--turns t.csv",
    "--turn-format {turn} --chat | --chat",
    "--turn-format x | {turn}",
    "--attn-sparsity 0.5",
    "--heavy_ratio 0.1 > --hh-ratio",
    "--kv-budget 0.2 | --policies",
    "--dtype float16 --device cpu --policies h2o --pin-weight",
    "--hardware t4 --policies h2o --top-p 0.2",
)
PLAN = (
    "--offload-dir=",
    "--gpus 1 | --help-all",
    "--trace new.json --output new.json | --output",
    "--hardware nowhere.json",
    "--hardware host.json --dtype float16 > float16",
    "--device cpu | --hardware",
    "--model no/such-model",
    f"--prompt-len {POSITIONS} --gen-len 10 | --gen-len",
    "--dtype int8",
    "--policy auto --percent 0 0 0 0 0 0 | --percent",
    "--output missing/p.json",
    "--kv-loss small --gpu-batch-size 2",
    "--gpu-mem 1GiB --hardware build-2core | build-2core has no GPU",
    "--kv-loss small --attn-sparsity 0.5 > --attn-sparsity",
)
BATCH = (
    "--ray ''",
    "--model_arch llama",
    "--output words/hard.jsonl --model words | --model",
    "--input .",
    "--input empty.jsonl",
    "--input twice.jsonl > custom_id",
    "--output no/out.jsonl",
    "--output in.jsonl | --input",
    "--output pipe.jsonl",
    "--input two.jsonl.job.json --output two.jsonl",
    "--output other.jsonl | other.jsonl.job.json",
    "--status | out.jsonl",
    "--device-mem 1GiB --device cpu",
)
GENERATE = (
    "--prompt a --input in.jsonl | --input",
    "--input none.txt",
    "--prompt a --force > --force",
    "--prompt a --output out.csv > --output",
    "--status > --output",
    "--prompt '' > tokenizer",
    "--prompt a more > MODEL",
    "--prompt a --model other > --model",
    "--prompt -x > --prompt=-x",
    "--prompt a --plan none.json > --plan",
    "--input prompts.csv > read_csv('prompts.csv').rename(columns={'COLUMN': 'text'})",
    "--input rows.parquet > docs/how-to/your-data.md",
    "--input rows.xlsx > read_excel",
    "--input array.json > jq",
    "--input array.jsonl > lines.jsonl",
    "--input pretty.json > jq",
    "--input packed.jsonl > gunzip",
    "--input rows.jsonl.zst > unzstd",
    "--input notes.md > .txt",
    "--input - > cat",
    "--input /dev/stdin > cat",
    "--input hf://datasets/squad > load_dataset",
    "--input hf:some/set > load_dataset",
    "--input rajpurkar/squad > load_dataset",
    "--input https://a.b/c.jsonl > download",
    "--lora x > merge_and_unload",
    "--adapter-path=x > merge_and_unload",
    "--json-schema x > supported",
    "--prompt a --no-thinking --chat-template-kwargs '{\"enable_thinking\": true}' > --no-thinking",
    "--prompt a --chat-template-kwargs '[1]' > JSON",
    "--prompt a --chat-template-kwargs '{\"tokenize\": true}' > tokenize",
    "--gpu-mem 1GiB --device cpu --prompt a > --hardware",
    "--hardware card.json --device cpu --dtype float32 --prompt a > GPU",
)
TABLE = {
    "flex-opt": FLEX_OPT,
    "plan": PLAN,
    "hardware": ("--show ''",),
    "batch": BATCH,
    "generate": GENERATE,
    "chat": ("--enable_small_cache | --eviction", "--gpu-mem 1GiB --device cpu --model opt-tiny"),
    "evaluate": ("perplexity", " | fidelity"),
    "evaluate fidelity": FIDELITY,
    "evaluate text": TEXT,
    "evaluate streaming": STREAMING,
}


@pytest.fixture(scope="module")
def place(ids_model: Path, words_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with files and the models `ids` and `words`, which no refused line may change."""
    place = tmp_path_factory.mktemp("place")
    rows = ({"prompt_token_ids": [4]}, {"prompt_token_ids": [4] * (POSITIONS + 1)})
    (place / "in.jsonl").write_text('{"prompt_token_ids": [4, 5]}\n')
    (place / "long.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (
        ("short.txt", b"import os\n"),
        ("empty.txt", b"\n \n"),
        ("empty.jsonl", b"\n \n"),
        ("prompts.csv", b"a,b"),
        ("rows.parquet", b"PAR1"),
        ("rows.xlsx", b"PK\x03\x04"),
        ("array.json", b'[{"prompt": "a"}]'),
        ("array.jsonl", b'[\n  {"prompt": "a"}\n]'),
        ("pretty.json", b'{\n  "prompt": "a"\n}\n'),
        ("packed.jsonl", b"\x1f\x8b\x08"),
        ("rows.jsonl.zst", b"x"),
        ("notes.md", b"Say hi.\n"),
        ("latin.txt", b"plain\ncaf\xe9\n"),
        ("twice.jsonl", b'{"custom_id": "a"}\n{}\n{"custom_id": "a"}\n'),
        ("two.jsonl.job.json", b'{"prompt": [5, 6]}\n'),
        ("other.jsonl", b'{"custom_id": "a", "response": null, "error": null}\n'),
    ):
        (place / name).write_bytes(text)
    write_profile(place / "host.json", nominal_profile(True))
    for name, file in (("ggufs", "m.gguf"), ("weights-alone", "model.safetensors")):
        (place / name).mkdir()
        (place / name / file).touch()
    write_profile(place / "card.json", nominal_profile(False))
    (place / "empty").mkdir()
    os.mkfifo(place / "pipe.jsonl")
    os.link(place / "in.jsonl", place / "hard.json")
    for name, model in (("ids", ids_model), ("words", words_model)):
        shutil.copytree(model, place / name)
    (place / "words/vocab.json").unlink(missing_ok=True)
    os.link(place / "words/model.safetensors", place / "words/hard.jsonl")
    write_policy(place / "good.json", SavedPolicy(Policy()))
    (place / "damaged.json").write_text('{"schema": 99}')
    shutil.copytree(ids_model, place / "no-weights", ignore=lambda *_: ["model.safetensors"])
    config = read_json(ids_model / "config.json") | {"ffn_dim": 80}
    for name, model, file, data in (
        ("other-shapes", ids_model, "config.json", json.dumps(config).encode()),
        ("no-tokenizer", words_model, "tokenizer.json", b"{"),
        ("odd-tokenizer", words_model, "tokenizer_config.json", b'{"model_max_length": "many"}'),
        ("byte-order-mark", words_model, "tokenizer.json", b"\xef\xbb\xbf{}"),
    ):
        (shutil.copytree(model, place / name) / file).write_bytes(data)
    for name, target in (
        ("link.json", "in.jsonl"),
        ("to-new.json", "new.jsonl"),
        ("to-config", "words/config.json"),
    ):
        (place / name).symlink_to(target)
    return place


def everything(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of each file and folder."""
    states = ((path, path.lstat()) for path in folder.rglob("*"))
    return {str(path): (state.st_size, state.st_mtime_ns) for path, state in states}


@pytest.fixture
def refuse(place: Path, call: Door, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a line in `place` and checks how it is refused: `says` stands in the one line on
    stderr."""
    monkeypatch.chdir(place)

    def run(command: str, flags: str, *says: str) -> None:
        before = everything(place)
        usual = BASE.get(command.split()[-1], "").split()
        words = shlex.split(flags)
        if "--model" in words and usual[:1] == ["--model"]:
            del usual[:2]
        answer = call(cli.main, *command.split(), *usual, *words)
        assert answer.code == 2 and answer.out == "", answer
        [line] = answer.err.splitlines()
        assert line.startswith(f"{command.split()[0]}: "), line
        for text in says:
            # Messages have hyphens where older scripts' flags have underscores.
            assert text in line or text.replace("_", "-") in line, line
        assert everything(place) == before, "refused only after something was written"

    return run


@pytest.mark.parametrize("command", TABLE)
def test_one_line_names_what_is_wrong(command: str, refuse: Callable[..., None]) -> None:
    for case in TABLE[command]:
        flags, _, instead = case.partition(" > ")
        flags, _, also = flags.partition(" | ")
        first = instead or flags.partition(" ")[0].partition("=")[0]
        refuse(command, flags, first, *also.split())


@pytest.mark.parametrize(
    ("word", "verb"), [("policy_search", "plan"), ("plna", "plan"), ("run_batch", "run-batch")]
)
def test_a_verb_that_is_not_one(word: str, verb: str, call: Door) -> None:
    answer = call(cli.main, word)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(
        f"flexgen-h2o: unknown verb '{word}'; did you mean {verb}? known: "
    )
    assert "did you mean" not in call(cli.main, "xyz").err


PROMPT_LINES = (
    "[4, 5]",
    '{"prompt_token_ids": [120]} | vocabulary',
    '{"prompt": "text"} | tokenizer',
)
TURN_LINES = (
    "{",
    '{"turns": []}',
    '{"turns": "hello"}',
    '{"turns": [3]}',
    '{"turns": [[5, -1]]}',
    '{"question_id": 3}',
)


@pytest.mark.parametrize(
    ("command", "flag", "lines"),
    [("flex-opt", "--prompts", PROMPT_LINES), ("evaluate streaming", "--turns", TURN_LINES)],
)
def test_a_bad_line_is_named(
    command: str, flag: str, lines: tuple[str, ...], refuse: Callable[..., None], tmp_path: Path
) -> None:
    path = tmp_path / "in.jsonl"
    for case in lines:
        line, _, says = case.partition(" | ")
        path.write_text('{"prompt_token_ids": [4, 5]}\n\n' + line + "\n")
        refuse(command, f"{flag} {path}", f"{flag} {path}:3: ", says)


# A file's text, or what is changed in a good one.
CONFIGS: tuple[str | dict[str, Any], ...] = (
    "{",
    "{}",
    {"model_type": "bert"},
    {"num_hidden_layers": 0},
    {"activation_function": "swish"},
    {"vocab_size": "many"},
)


def test_a_model_that_cannot_be_used(refuse: Callable[..., None], tmp_path: Path) -> None:
    good = read_json(Path("ids/config.json"))
    path = tmp_path / "config.json"
    for config in CONFIGS:
        changed = config if isinstance(config, str) else json.dumps({**good, **config})
        path.write_text(changed)
        named = () if isinstance(config, str) else tuple(config)
        refuse("flex-opt", f"--model {tmp_path}", str(tmp_path), *named)


def test_a_picture_without_matplotlib_names_the_extra(
    refuse: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexgen_h2o.cli_common.find_spec", lambda name: None)
    refuse("evaluate fidelity", "--plot p.png", ".[plot]")
