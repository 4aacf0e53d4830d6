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
from tests.doors.conftest import POSITIONS, Answer

# What stands behind a command's name; the flags of a case come after it, and win.
BASE = {
    "flex-opt": "--model ids --offload-dir offload --gen-len 4",
    "plan": "--model ids --offload-dir offload --hardware t4",
    "batch": "--model ids --offload-dir offload --input in.jsonl --output out.jsonl",
    "hardware": "--offload-dir offload",
    "fidelity": "--model opt-tiny --offload-dir offload",
    "text": "--model opt-tiny --offload-dir offload",
    "streaming": "--model opt-tiny --offload-dir offload",
}
# A command's flags, and what the line says after the command's name; alone, flags are named by
# their first word.
Cases = list[str | tuple[str, str]]
EVICTION: Cases = [
    "--hh-ratio 0",
    "--hh-ratio 1.5",
    "--hh-ratio nan",
    "--hh-ratio some",
    "--recent-ratio 0",
    "--hh-size 0",
    "--hh-size -1",
    "--hh-size 2.5",
    "--recent-size 0",
    "--hh-size 4 --hh-ratio 0.1",
    "--hh-all maybe",
    "--eviction nonsense",
    "--hh-ratio 0.1 --eviction full",
    "--attn-sparsity 0.5 --eviction h2o",
    "--positions sideways",
    "--positions rolling",
    "--positions rolling --eviction full",
    "--kv-budget 0",
    "--kv-budget 1.5",
    "--kv-budget nan",
    "--kv-budget half",
    ("--kv-budget 0.2 --eviction full", "--kv-budget and --eviction full: give one of them"),
    (
        "--kv-budget 0.2 --hh-ratio 0.1",
        "--kv-budget: says how many KV entries stay, and so does --hh-ratio; leave one",
    ),
    (
        "--eviction tova:kv_budget=0.2 --recent-size 4",
        "--eviction tova:kv_budget=0.2: kv_budget: says how many KV entries stay, and so does "
        "--recent",
    ),
    ("--eviction h2o:kv_budget=0.2 --kv-budget 0.3", "--eviction: --kv-budget is given twice"),
]
POLICY: Cases = [
    "--percent 100 0 100 0 100",
    "--percent 100 0 100 0 100 half",
    "--percent 33.3 0 0 0 0 0",
    "--percent 60 60 0 0 0 0",
    "--percent 0 0 101 0 0 0",
    "--percent -5 0 0 0 0 0",
    "--gpu-batch-size 0",
    "--gpu-batch-size nan",
    "--gpu-batch-size 1048576 --num-gpu-batches 1048576",
    "--num-gpu-batches -1",
    "--num-gpu-batches 99999999",
    "--policy /no/such/policy.json",
    "--policy auto --percent 100 0 100 0 100 0",
    "--policy auto --gpu-batch-size 4",
    "--overlap maybe",
    "--sep-layer 2",
    "--pin-weight x",
    "--attn-sparsity most",
    "--attn-sparsity 0",
    "--attn-sparsity nan",
    "--attn-sparsity 1.5",
    "--weight-bits 3",
    "--weight-bits 5 --compress-weight",
    "--cache-bits 5 --compress-cache",
    "--cache-bits 4/5 --compress-cache",
    (
        "--kv-bits 2",
        "--kv-bits: '2' is not one of 8, 4, 3, nor two of them for keys and values, as 4/3",
    ),
    ("--kv-bits 4/2", "--kv-bits: '4/2' is not one of 8, 4, 3, nor two of them"),
    (
        "--int8-compute --compress-weight --weight-bits 8",
        "leave --compress-weight off, or --weight-bits at 4",
    ),
    ("--policy auto --hardware t4", "--hardware t4: "),
]
RUN: Cases = [
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
    "--host-mem -1GiB",
    "--device-mem -1",
    "--disk-mem 12parsecs",
    "--temperature hot",
    "--temperature -1",
    "--temperature nan",
    "--top-p 2",
    "--top-p nan",
    "--top-k -1",
    "--top-k 1.5",
    "--seed -1",
    "--seed x",
    "--stop ''",
    "--verbose loud",
    "--no-such-flag",
    "stray",
    "--gen-len",
    "--json /no/folder/report.json",
    "--json /tmp",
    "--trace /no/folder/trace.json",
    "--output out.txt",
    "--output /no/folder/out.jsonl",
    "--log-file /no/folder/run.log",
    "--prompts /no/such/prompts.txt",
    f"--json {'j' * 300}",
    f"--output {'o' * 300}.jsonl",
    "--offload-dir ~nosuchuser-at-all/x",
    *(
        f"{flag} ''"
        for flag in (
            "--output",
            "--json",
            "--trace",
            "--prompts",
            "--offload-dir",
            "--path",
            "--revision",
        )
    ),
    *(f"{flag} pipe" for flag in ("--log-file", "--json", "--trace")),
    "--prompts empty.txt",
    "--prompts prompts.csv",
    ("--prompts latin.txt --model words", "latin.txt:2"),
    (
        "--prompts in.jsonl --cut-gen-len 4",
        "--cut-gen-len: works in the benchmark only; leave --prompts out",
    ),
    ("--prompts in.jsonl --debug-mode breakdown", "--debug-mode: works in the benchmark"),
    ("--prompts in.jsonl --stop end", "--stop: "),
    ("--prompts long.jsonl", f"--prompts[1]: {POSITIONS + 1} tokens, but"),
    ("--top-p 12.5%", "--top-p: '12.5%' is not a number; write 0.125"),
]
CLASHES: Cases = [
    ("--prompts in.jsonl --output in.jsonl", "--output in.jsonl: is the file of --prompts too"),
    ("--prompts in.jsonl --log-file in.jsonl", "--log-file in.jsonl: is the file of --prompts too"),
    (
        "--prompts in.jsonl --trace sub/../in.jsonl",
        "--trace sub/../in.jsonl: is the file of --prompts too",
    ),
    ("--prompts in.jsonl --json link.json", "--json link.json: is the file of --prompts too"),
    ("--prompts in.jsonl --json hard.json", "--json hard.json: is the file of --prompts too"),
    ("--output new.jsonl --json to-new.json", "--json to-new.json: is the file of --output too"),
    ("--json new.json --trace new.json", "--trace new.json: is the file of --json too"),
    ("--policy in.jsonl --json in.jsonl", "--json in.jsonl: is the file of --policy too"),
    (
        "--hardware in.jsonl --log-file in.jsonl",
        "--log-file in.jsonl: is the file of --hardware too",
    ),
    *(
        (f"{output} --model words", f"{output}: is the name of a file of --model words")
        for output in (
            "--trace words/model.safetensors",
            "--json words/vocab.json",
            "--output words/hard.jsonl",
        )
    ),
    (
        "--log-file to-config --model words",
        "--log-file to-config: is the name of a file of --model words",
    ),
]
MODELS: Cases = [
    ("--model empty", "--model empty: there is no config.json"),
    ("--model /no/such/folder", "--model /no/such/folder: "),
    (
        "--model nobody/no-such-model",
        "--model nobody/no-such-model: not complete in the local cache",
    ),
    (
        "--model nobody/no-such-model --path _DUMMY_",
        "need a built-in shape (docs/reference/models.md lists them)",
    ),
    ("--model opt-tinny", "did you mean opt-tiny?"),
    (f"--model {'m' * 5000}", "--model "),
    ("--path no/such", "--path no/such: there is no such folder"),
    ("--model some/model --path _DUMY_", "--path _DUMY_: there is no such folder"),
]
OTHER_SCRIPTS: Cases = [
    ("--hh-long-seq=true", "--hh-long-seq=true: is not a flag here; prompts of any length"),
    ("--gbs 4 --num-gb 2", "--gbs: is not a flag here; give --gpu-batch-size"),
    ("--hh_ration 0.1", "did you mean --hh-ratio?"),
    ("--promt-len 5", "did you mean --prompt-len?"),
    ("--head-ip 1.2.3.4", "--pipeline"),
]
FIDELITY: Cases = [
    "--policies nonsense",
    "--policies full",
    "--policies h2o:decay=1",
    "--budgets 0",
    "--budgets 50",
    "--budgets nan",
    "--budgets half",
    "--eviction h2o",
    "--hh-ratio 0.1",
    "--attn-sparsity 0.5 --policies h2o",
    ("--attn-sparsity 0.5 --budgets 0.3", "--budgets: say what policies keep"),
    "--gen-len 1",
    "--prompt-len 1024 --gen-len 2",
    "--prompt-len 1 --recall-prompts 0",
    ("--prompt-len 30", "--prompt-len 30: too short for recall prompts"),
    "--num-prompts 0",
    "--num-prompts 99999",
    "--mass-steps -1",
    "--keep-mem lots",
    "--seed x",
    "--prompts none.jsonl",
    ("--prompts short.txt", "--prompts short.txt: no prompt has 352 tokens"),
    "--json /no/folder/r.json",
    "--markdown /tmp",
    "--plot /no/folder/p.png",
    ("--plot p.doc", "--plot p.doc: the file name must end in"),
    "--hardware no-such-machine",
    ("--model facebook/opt-125m --path _DUMMY_", "has no tokenizer; give --prompts"),
    (
        "--policies h2o:positions=rolling --budgets 0.5 --num-prompts 1",
        "--positions rolling: needs rotary",
    ),
    "--budgets-of row",
    ("--policies h2o:kv_budget=0.2", "--policies h2o:kv_budget=0.2: --budgets sets the size"),
    ("--prompts in.jsonl --json in.jsonl", "--json in.jsonl: is the file of --prompts too"),
    ("--json new --markdown new", "--markdown new: is the file of --json too"),
    (
        "--model words --json words/tokenizer.json",
        "--json words/tokenizer.json: is the name of a file of --model",
    ),
]
TEXT: Cases = [
    ("--prompt a --prompts p.txt", "--prompt and --prompts"),
    "--prompts none.txt",
    "--eviction full",
    "--eviction nonsense",
    ("--heavy_ratio 0", "--hh-ratio"),
    "--heavy_ratio some",
    "--length 0",
    "--attn-sparsity 0.5",
    "--json /no/folder/r.json",
    ("--fp16 --no_cuda", "float16"),
    ("--model ids", "has no tokenizer; give --prompts FILE.jsonl"),
    ("--model_arch llama", "--model_arch llama: opt-tiny"),
    (f"--model words --prompt {'xyz-' * POSITIONS}", f"{POSITIONS} positions"),
    (
        "--model words --json words/tokenizer.json",
        "--json words/tokenizer.json: is the name of a file of --model",
    ),
]
STREAMING: Cases = [
    (
        "--positions rolling",
        "--positions rolling: needs rotary embeddings, and opt-tiny has learned positions",
    ),
    ("--policies local:positions=rolling", "--positions rolling: needs rotary embeddings"),
    ("--policies h2o other", "--policies other: other is not one of"),
    ("--policies h2o h2o", "h2o is given twice"),
    ("--policies full --hh-size 5", "--hh-size: has no effect on the full cache"),
    ("--positions rolling --policies h2o:positions=rolling", "positions is given twice"),
    ("--text --turns t.jsonl", "--turns and --text: give one of them"),
    ("--text --chat", "--chat and --text: give one of them"),
    ("--text --top-p 0.5", "--top-p and --text: give one of them"),
    ("--streams 3", "--streams: goes with --text"),
    ("--text --windows 5 --stream-len 9", "--windows 5: a stream has 9 tokens; ask for 4 or fewer"),
    (
        "--text --stream-len 2000",
        "--stream-len 2000: opt-tiny has 1024 positions; lower it, or leave full out",
    ),
    ("--text --stream-len 1", "--stream-len 1, --streams 8: the text has"),
    ("--text no.txt", "--text no.txt: No such"),
    ("--text ''", "--text"),
    ("--chat", "--chat: opt-tiny has no chat template"),
    "--turns no.jsonl",
    "--turns t.csv",
    ("--chat --turn-format x", "--turn-format and --chat"),
    ("--turn-format x", "has no {turn} in it"),
    "--json no/r.json",
    ("--num_window_length 64 --hh-size 3", "--hh-size: is also set by --num_window_length"),
    (
        "--num_window_length 64 --num_heavy_hitter_tokens 64",
        "--num_heavy_hitter_tokens 64: must be from 0 to less",
    ),
    "--attn-sparsity 0.5",
    "--hh-size -3",
    ("--heavy_ratio 0.1", "--hh-ratio"),
    (
        "--kv-budget 0.2",
        "--kv-budget: is said in --policies, of stretches of a --text: h2o:kv_budget=0.2",
    ),
    (
        "--policies full h2o:kv_budget=0.2",
        "--policies h2o:kv_budget=0.2: the length of a conversation is not known",
    ),
    (
        "--text --policies h2o:kv_budget=2",
        "--policies h2o:kv_budget=2: kv_budget: 2 is not in (0, 1]",
    ),
    (
        "--text --policies full h2o:kv_budget=0.2 --hh-size 4",
        "--hh-size: each of --policies has a budget",
    ),
    (
        "--policies h2o --pin-weight --dtype float16 --device cpu",
        "--dtype float16: far too slow on a CPU",
    ),
    ("--policies h2o --top-p 0.2 --hardware t4", "--hardware t4: has compute rates of float16"),
]
OTHERS: list[tuple[str, Cases]] = [
    (
        "plan",
        [
            "--revision ''",
            ("--offload-dir=", "--offload-dir"),
            ("--gpus 1", "see --help-all"),
            ("--output new.json --trace new.json", "--trace new.json: is the file of --output too"),
            (
                "--policy in.jsonl --output in.jsonl",
                "--output in.jsonl: is the file of --policy too",
            ),
            ("--model words --output words/config.json", "is the name of a file of --model words"),
        ],
    ),
    ("hardware", ["--offload-dir ''", "--machine ''", "--show ''"]),
    (
        "batch",
        [
            "--ray ''",
            ("--model_arch llama", "--model-arch llama: ids is opt"),
            ("--heavy_ratio 0", "--heavy-ratio"),
            ("--model words --output words/hard.jsonl", "is the name of a file of --model words"),
        ],
    ),
    ("chat", [("--enable_small_cache", "--eviction h2o")]),
    ("evaluate", [("perplexity", "perplexity"), ("", "fidelity")]),
]
MEASURES = (("fidelity", FIDELITY), ("text", TEXT), ("streaming", STREAMING))
TABLE = [("flex-opt", c) for c in (*EVICTION, *POLICY, *RUN, *CLASHES, *MODELS, *OTHER_SCRIPTS)]
TABLE += [(f"evaluate {name}", c) for name, cs in MEASURES for c in cs]
TABLE += [(command, c) for command, cs in OTHERS for c in cs]


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
        ("prompts.csv", b"a,b"),
    ):
        (place / name).write_bytes(text)
    (place / "latin.txt").write_bytes(b"plain\ncaf\xe9\n")
    for name in ("sub", "empty"):
        (place / name).mkdir()
    os.mkfifo(place / "pipe")
    os.link(place / "in.jsonl", place / "hard.json")
    for name, model in (("ids", ids_model), ("words", words_model)):
        shutil.copytree(model, place / name)
    (place / "words/vocab.json").unlink(missing_ok=True)
    os.link(place / "words/model.safetensors", place / "words/hard.jsonl")
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
def refuse(
    place: Path, call: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
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
        for text in says or (flags.split()[0].partition("=")[0],):
            assert text in line
        assert everything(place) == before, "refused only after something was written"

    return run


@pytest.mark.parametrize(
    ("command", "case"), TABLE, ids=lambda one: (one if isinstance(one, str) else one[0])[:80]
)
def test_one_line_says_what_is_wrong(
    command: str, case: str | tuple[str, str], refuse: Callable[..., None]
) -> None:
    refuse(command, *((case,) if isinstance(case, str) else case))


@pytest.mark.parametrize(
    ("word", "verb"), [("policy_search", "plan"), ("plna", "plan"), ("run_batch", "run-batch")]
)
def test_a_verb_that_is_not_one(word: str, verb: str, call: Callable[..., Answer]) -> None:
    answer = call(cli.main, word)
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith(
        f"flexgen-h2o: unknown verb '{word}'; did you mean {verb}? known: "
    )
    assert "did you mean" not in call(cli.main, "xyz").err


PROMPT_LINES = [
    ('{"prompt_token_ids": [4, 5', "not valid JSON"),
    ("[4, 5]", "JSON object"),
    ('{"text": "hello"}', "neither"),
    ('{"prompt": "a", "prompt_token_ids": [4]}', "not both"),
    ('{"prompt_token_ids": []}', "no tokens"),
    ('{"prompt_token_ids": [120]}', "vocabulary of 120"),
    ('{"prompt_token_ids": [4.5]}', "4.5"),
    ('{"prompt": 5}', "string"),
    ('{"prompt_token_ids": [4], "index": NaN}', "NaN is not JSON"),
    ('{"prompt": "text"}', "tokenizer"),
]
TURN_LINES = [
    ("{", "not valid JSON"),
    ("[1]", "a JSON object is expected"),
    ('{"turns": []}', "turns must be a list of at least one"),
    ('{"turns": "hello"}', "turns must be a list"),
    ('{"turns": [3]}', "a turn is a text or a list of token ids, not int"),
    ('{"turns": [[5, -1]]}', "token id -1 is outside"),
    ('{"turns": [[]]}', "has no tokens"),
    ('{"question_id": 3}', "give either prompt or prompt_token_ids, neither is there"),
]
BAD_LINES = [("flex-opt", "--prompts", *one) for one in PROMPT_LINES]
BAD_LINES += [("evaluate streaming", "--turns", *one) for one in TURN_LINES]


@pytest.mark.parametrize(("command", "flag", "line", "says"), BAD_LINES, ids=lambda text: text[:60])
def test_a_bad_line_is_named(
    command: str, flag: str, line: str, says: str, refuse: Callable[..., None], tmp_path: Path
) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt_token_ids": [4, 5]}\n\n' + line + "\n")
    refuse(command, f"{flag} {path}", f"{flag} {path}:3: ", says)


CONFIGS: list[tuple[Any, str]] = [
    ("", ""),
    ("{", ""),
    ("[]", "a JSON object is expected"),
    ("{}", "model_type"),
    ({"model_type": 5}, "model_type"),
    ({"model_type": "bert"}, "'bert' is not supported (known: gpt_neox"),
    ({"num_attention_heads": 5}, "num_attention_heads"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"),
    ({"activation_function": "swish"}, "activation_function"),
    ({"vocab_size": "many"}, "vocab_size"),
    ({"ffn_dim": 80}, "(80, 32)"),
    ({}, "no weights"),
]


@pytest.mark.parametrize(("config", "says"), CONFIGS, ids=str)
def test_a_model_that_cannot_be_used(
    config: Any, says: str, refuse: Callable[..., None], tmp_path: Path
) -> None:
    """A file's text, or what is changed in a good one."""
    if isinstance(config, dict) and "model_type" not in config:
        config = {**json.loads(Path("ids/config.json").read_text()), **config}
    if says.startswith("("):
        shutil.copy("ids/model.safetensors", tmp_path)
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    refuse("flex-opt", f"--model {tmp_path}", str(tmp_path), says)


TOKENIZERS = [("tokenizer.json", "{"), ("tokenizer_config.json", '{"model_max_length": "many"}')]


@pytest.mark.parametrize(("name", "text"), TOKENIZERS)
def test_a_tokenizer_that_cannot_be_read(
    name: str, text: str, refuse: Callable[..., None], tmp_path: Path
) -> None:
    folder = shutil.copytree("words", tmp_path / "model")
    (folder / name).write_text(text)
    refuse("flex-opt", f"--model {folder} --prompts short.txt", "tokenizer")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_byte_order_mark(name: str, refuse: Callable[..., None], tmp_path: Path) -> None:
    folder = shutil.copytree("words", tmp_path / "model")
    (folder / name).write_text((folder / name).read_text(), encoding="utf-8-sig")
    refuse(
        "flex-opt",
        f"--model {folder} --prompts short.txt",
        f"{folder / name}: begins with a byte order mark",
    )


POLICIES: list[tuple[Any, str]] = [
    ({"colour": "red"}, "unknown field 'colour'"),
    ({"overlap": None}, "field 'overlap' is missing"),
    ({"schema": 99}, "schema is 99"),
    ({"schema": None}, "schema is None"),
    ({"percent": [60, 60, 0, 0, 0, 0]}, "60 + 60"),
    ({"percent": [1, 2]}, "percent: "),
    ({"gpu_batch_size": 0}, "gpu_batch_size: "),
    ({"gpu_batch_size": "4"}, "gpu_batch"),
    ({"overlap": "yes"}, "overlap: "),
    ({"attn_sparsity": 0}, "attn_sparsity: "),
    ({"int8_compute": True, "compress_weight": True, "weight_bits": 8}, "int8_compute: holds"),
    ("", "not a JSON file"),
    ("[]", "a JSON object is expected"),
    ("{", "not a JSON file"),
    ("\xff", "not a JSON file"),
]


@pytest.mark.parametrize(("changes", "says"), POLICIES, ids=str)
def test_a_bad_policy_file(
    changes: Any, says: str, refuse: Callable[..., None], tmp_path: Path
) -> None:
    """A file's text, or the fields of a good one that are changed; None takes a field out."""
    path = tmp_path / "policy.json"
    write_policy(path, SavedPolicy(Policy()))
    if isinstance(changes, dict):
        body = {**json.loads(path.read_text()), **changes}
        changes = json.dumps({key: value for key, value in body.items() if value is not None})
    path.write_text(changes, encoding="latin-1")
    refuse("flex-opt", f"--policy {path}", f"--policy {path}: ", says)


@pytest.mark.parametrize(
    "flags", ["--percent 0 0 0 0 0 0", "--gpu-batch-size 2", "--overlap false"]
)
def test_a_policy_file_stands_alone(
    flags: str, refuse: Callable[..., None], tmp_path: Path
) -> None:
    write_policy(tmp_path / "policy.json", SavedPolicy(Policy()))
    refuse(
        "flex-opt",
        f"--policy {tmp_path / 'policy.json'} {flags}",
        f"and {flags.split()[0]}: give one of them",
    )


def test_a_picture_without_matplotlib_names_the_extra(
    refuse: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flexgen_h2o.cli_common.find_spec", lambda name: None)
    refuse("evaluate fidelity", "--plot p.png", ".[plot]")
