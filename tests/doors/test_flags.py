"""Flags of all commands: odd values, flags of other scripts, flags without effect, and what libraries say meanwhile."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from flexgen_h2o import batch, cli, evaluate, flex_opt, hardware, policy_search
from flexgen_h2o.checkpoint.resolve import PACKAGED
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.units import MIB, TIB
from tests.doors.conftest import Answer

Door = Callable[..., Answer]
COMMANDS = {
    "flex-opt": flex_opt, "plan": policy_search, "hardware": hardware, "batch": batch,
    "evaluate fidelity": evaluate, "evaluate text": evaluate, "evaluate streaming": evaluate,
}  # fmt: skip


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], plain_cpu: None
) -> Callable[[str], Answer]:
    """The console command in the working folder `tmp_path`."""
    monkeypatch.chdir(tmp_path)

    def call(line: str) -> Answer:
        capfd.readouterr()
        code = cli.main(shlex.split(line))
        return Answer(code, *capfd.readouterr())

    return call


def refused(answer: Answer, *says: str) -> None:
    assert answer.code == 2 and answer.out == "", answer
    assert len(answer.err.splitlines()) == 1 and "Traceback" not in answer.err, answer.err
    for text in says:
        assert text in answer.err


# ---- Odd values


def parser_of(name: str, module: ModuleType) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = module._parser()
    verbs = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    found: argparse.ArgumentParser = verbs[0].choices[name.split()[1]] if verbs else parser
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_two_dashes_are_a_value_like_any_other(name: str) -> None:
    """Of every flag: it is taken as a text, or refused by the flag's name. Python 3.11 makes an empty list of it."""
    parser = parser_of(name, COMMANDS[name])
    flags = [(a, option) for a in parser._actions for option in a.option_strings if a.nargs != 0 and option[:2] == "--"]
    assert len(flags) > 4
    for action, option in flags:
        try:
            value = getattr(parser.parse_args([f"{option}=--"]), action.dest)
        except UsageError as refusal:
            assert option in str(refusal)  # noqa: PT017 - a text is taken, a number is not
        else:
            assert "--" in str(value) or option == "--cache_dir", option  # a folder that is not there yet


@pytest.mark.parametrize("flag", ["--gen-len", "--model", "--overlap", "--policy", "--percent", "--seed", "--hardware"])
@pytest.mark.parametrize("verb", ["flex-opt", "batch --input in.jsonl --output out.jsonl"])
def test_two_dashes_at_the_door(verb: str, flag: str, command: Callable[[str], Answer], tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    refused(command(f"{verb} {flag}=-- --offload-dir o"), flag)


EMPTY = [
    "flex-opt --offload-dir ''", "flex-opt --path ''", "flex-opt --revision ''", "plan --revision ''",
    "plan --offload-dir=", "hardware --offload-dir ''", "hardware --machine ''", "hardware --show ''",
    "batch --output o.jsonl --ray ''", "evaluate streaming --text ''",
]  # fmt: skip


@pytest.mark.parametrize("line", EMPTY)
def test_an_empty_value_is_a_variable_that_is_not_set(line: str, command: Callable[[str], Answer]) -> None:
    refused(command(line), next(word for word in line.split()[::-1] if word.startswith("--")).rstrip("="), "empty")


# ---- Flags of other scripts, and mistyped ones

REPLACED = [
    ("flex-opt --hh-long-seq", "leave it out"),
    ("flex-opt --hh-long-seq=true", "leave it out"),
    ("flex-opt --gbs 4 --num-gb 2", "--gpu-batch-size"),
    ("flex-opt --hh_ratio 0.1", "did you mean --hh-ratio?"),
    ("flex-opt --promt-len 5", "did you mean --prompt-len?"),
    ("flex-opt --head-ip 1.2.3.4", "--pipeline"),
    ("batch --enable_small_cache", "--eviction h2o"),
    ("plan --gpu-mem 15", "--device-mem"),
    ("evaluate streaming --heavy_ratio 0.1", "--hh-ratio"),
]


@pytest.mark.parametrize(("line", "says"), REPLACED)
def test_a_flag_of_another_script_says_what_replaces_it(line: str, says: str, command: Callable[[str], Answer]) -> None:
    refused(command(line), line.split(" --")[1].split()[0].partition("=")[0], says)


def test_a_path_that_is_not_there(command: Callable[[str], Answer]) -> None:
    refused(command("flex-opt --path no/such"), "--path no/such", "no such folder")
    refused(command("flex-opt --model some/model --path _DUMY_"), "--path _DUMY_", "_DUMMY_")
    refused(command("--version now"), "--version")


# ---- Flags without effect


def idle(answer: Answer) -> set[str]:
    """The flags that stderr says have none; it says nothing else, but what is kept for later runs (`# `)."""
    assert answer.code == 0, answer
    lines = [line for line in answer.err.splitlines() if not line.startswith("# ")]
    assert all(" no effect: " in line for line in lines), answer.err
    return {flag for line in lines for flag in line.partition(": ")[2].partition(" ha")[0].split(", ")}


NO_EFFECT = [
    ("--top-p 0.5 --top-k 3 --seed 7", {"--top-p", "--top-k", "--seed"}),
    ("--top-p 0.5 --top-k 3 --seed 7 --temperature 0.5", set()),
    ("--top-p 1 --top-k 0", set()),
    ("--revision main --path .", {"--revision", "--path"}),
    ("--log-file x.log", {"--log-file"}),
    ("--ignore-eos", {"--ignore-eos"}),
    ("--debug-mode breakdown --overlap true", {"--overlap"}),
    ("--debug-mode breakdown --overlap false", set()),
    ("--cpu-cache-compute --pin-weight 0", {"--cpu-cache-compute", "--pin-weight"}),
    ("--cpu-cache-compute --device-mem 64MiB", set()),
    ("--path _DUMMY_ --revision main", {"--revision"}),
    ("--sep-layer 1", set()),
]


@pytest.mark.parametrize(("flags", "said"), NO_EFFECT)
def test_a_flag_without_effect_is_said(flags: str, said: set[str], door: Door) -> None:
    assert idle(door("--no-log", "--gpu-batch-size", 1, *flags.split())) == said


def test_lengths_of_prompts_in_a_file_are_their_own(door: Door, write_jsonl: Callable[..., Path]) -> None:
    path, one = write_jsonl({"prompt_token_ids": [4, 5]}), ("--no-log", "--gpu-batch-size", 1)
    assert idle(door("--prompts", path, "--prompt-len", 8, *one)) == {"--prompt-len"}
    assert idle(door("--prompts", path, "--ignore-eos", *one)) == set()


def test_other_commands_say_so_too(command: Callable[[str], Answer], tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a", "max_tokens": 1}\n')
    done = "batch --input in.jsonl --output out.jsonl --offload-dir o --gpu-batch-size 1"
    assert idle(command(f"{done} --path . --seed 3")) == {"--path"}  # rows may draw
    assert idle(command(f"{done} --status")) == {"--input", "--offload-dir", "--gpu-batch-size"}
    assert idle(command("batch --output out.jsonl --status")) == set()
    assert idle(command("hardware --show t4 --device cpu")) == {"--device"}
    asked = "plan --model facebook/opt-125m --num-prompts 16 --prompt-len 32 --gen-len 8 --hardware t4"
    assert idle(command(f"{asked} --path models --revision main")) == {"--path", "--revision"}
    text = "evaluate text --prompt x --gen-len 2 --offload-dir o --gpu-batch-size 1 --device cpu --dtype float32"
    assert idle(command(f"{text} --seed 3")) == {"--seed"}


# ---- One line


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"rope_scaling": {"rope_type": "nonsense", "factor": 2}}, "rope_type 'nonsense'"),
        ({"rope_scaling": {"type": "yarn", "factor": -1, "bogus": 3}}, "yarn"),
        ({"pad_token_id": -5}, None),
    ],
)
def test_what_transformers_warns_of_does_not_stand_beside_the_error(
    changed: dict[str, object], says: str | None, tmp_path: Path
) -> None:
    """Nor does it say a thing twice; where the model is taken, its warning is kept."""
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
    flags = f"--model {tmp_path} --path _DUMMY_ --offload-dir o --prompt-len 4 --gen-len 2 --no-log --verbose 0"
    done = subprocess.run(
        [sys.executable, "-m", "flexgen_h2o.flex_opt", *flags.split()], cwd=tmp_path, text=True, capture_output=True,
        env={**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[1])}, check=False,
    )  # fmt: skip
    (line,) = [line for line in done.stderr.splitlines() if not line.startswith("# ")]
    assert done.returncode == (0 if says is None else 2), line
    assert ("pad_token_id" if says is None else says) in line and line.startswith("flex_opt") == (says is not None)


@pytest.mark.parametrize(("free", "budget"), [(24 * MIB, None), (24 * MIB, "1GiB"), (24 * MIB, "1MiB"), (TIB, "1MiB")])
def test_a_full_disk_is_no_small_budget(
    free: int, budget: str | None, door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": free})())
    asked = () if budget is None else ("--disk-mem", budget)
    answer = door(
        "--percent", *"000000", "--gpu-batch-size", 512, "--num-gpu-batches", 64, *asked, model=PACKAGED["opt-tiny"]
    )
    assert answer.code == 3 and len(answer.err.splitlines()) == 1, answer.err
    assert ("free space, or give another --offload-dir" in answer.err) == (free < TIB), answer.err
    assert ("raise --disk-mem" in answer.err) == (free == TIB)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (
            "fidelity --num-prompts 1 --policies h2o:positions=rolling --budgets 0.5",
            "--positions rolling: needs rotary",
        ),
        ("streaming --policies h2o --pin-weight --dtype float16", "--dtype float16: far too slow on a CPU"),
        ("streaming --policies h2o --top-p 0.2 --hardware t4", "--hardware t4: has compute rates of float16"),
    ],
)
def test_what_is_refused_is_one_line_that_names_the_flag_once(
    command: str, says: str, words_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Before progress and notes."""
    monkeypatch.chdir(tmp_path)
    Path("prompts.txt").write_text("import os\nfrom pathlib import Path\n")
    texts = ["--prompts" if command.startswith("fidelity") else "--turns", "prompts.txt", "--gen-len", "4"]
    flags = ["--model", str(words_model), "--device", "cpu", "--offload-dir", "offload", *texts]
    assert cli.main(["evaluate", *command.split(), *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"evaluate: {says}")
