"""No output flag writes what another flag reads or writes, by whatever name."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flexgen_h2o import batch, evaluate, flex_opt, policy_search
from tests.doors.conftest import Answer

LINE = '{"prompt_token_ids": [4, 5]}\n'
# (flags of flex_opt, the two that clash, first the one that is to change)
CLASHES = [
    ("--prompts in.jsonl --output in.jsonl", "--output", "--prompts"),
    ("--prompts in.jsonl --json in.jsonl", "--json", "--prompts"),
    ("--prompts in.jsonl --log-file in.jsonl", "--log-file", "--prompts"),
    ("--prompts in.jsonl --trace sub/../in.jsonl", "--trace", "--prompts"),
    ("--prompts in.jsonl --json link.json", "--json", "--prompts"),
    ("--prompts in.jsonl --json hard.json", "--json", "--prompts"),
    ("--output new.jsonl --json new.jsonl", "--json", "--output"),
    ("--output new.jsonl --json to-new.json", "--json", "--output"),
    ("--json new.json --trace new.json", "--trace", "--json"),
    ("--policy in.jsonl --json in.jsonl", "--json", "--policy"),
    ("--hardware in.jsonl --log-file in.jsonl", "--log-file", "--hardware"),
]  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """in.jsonl with two other names, and a link to a file that is not there yet."""
    (tmp_path / "in.jsonl").write_text(LINE)
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.json").symlink_to("in.jsonl")
    os.link(tmp_path / "in.jsonl", tmp_path / "hard.json")
    (tmp_path / "to-new.json").symlink_to("new.jsonl")
    return tmp_path / "in.jsonl"


@pytest.mark.parametrize(("flags", "flag", "other"), CLASHES)
def test_flex_opt(flags: str, flag: str, other: str, door: Callable[..., Answer], files: Path) -> None:
    answer = door(*flags.split())
    assert answer.code == 2, answer.err
    assert answer.err.startswith(f"flex_opt: {flag} ") and f"is the file of {other} too" in answer.err
    assert files.read_text() == LINE


@pytest.mark.parametrize(
    ("main", "flags", "flag", "other"),
    [
        (policy_search.main, "--output new.json --trace new.json", "--trace", "--output"),
        (policy_search.main, "--hardware in.jsonl --output in.jsonl", "--output", "--hardware"),
        (policy_search.main, "--policy in.jsonl --output in.jsonl", "--output", "--policy"),
        (evaluate.main, "fidelity --prompts in.jsonl --json in.jsonl", "--json", "--prompts"),
        (evaluate.main, "fidelity --json new --markdown new", "--markdown", "--json"),
    ],
)
def test_other_doors(
    main: Callable[[list[str]], int], flags: str, flag: str, other: str, files: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(files.parent)
    assert main(flags.split()) == 2
    assert f": {flag} " in (err := capfd.readouterr().err) and f"is the file of {other} too" in err
    assert files.read_text() == LINE


OUTPUTS_IN_MODEL = [
    (flex_opt.main, "--trace", "model.safetensors"),
    (flex_opt.main, "--json", "config.json"),
    (flex_opt.main, "--log-file", "link"),
    (flex_opt.main, "--output", "hard.jsonl"),
    (flex_opt.main, "--json", "generation_config.json"),  # not there yet
    (flex_opt.main, "--json", "to-new"),
    (batch.main, "--input in.jsonl --output", "hard.jsonl"),
    (policy_search.main, "--output", "config.json"),
    (evaluate.main, "fidelity --json", "tokenizer.json"),
    (evaluate.main, "text --json", "tokenizer.json"),
    (evaluate.main, "streaming --json", "model.safetensors"),
]


@pytest.mark.parametrize(("main", "flags", "name"), OUTPUTS_IN_MODEL)
def test_no_output_takes_the_place_of_the_models_files(
    main: Callable[[list[str]], int], flags: str, name: str, files: Path, words_model: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(files.parent)
    model = files.parent / "model"
    shutil.copytree(words_model, model)
    (model / "generation_config.json").unlink(missing_ok=True)
    (model / "link").symlink_to("config.json")
    (model / "to-new").symlink_to("vocab.json")
    os.link(model / "model.safetensors", model / "hard.jsonl")
    before = {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()}
    assert main([*flags.split(), f"model/{name}", "--model", "model"]) == 2
    [line] = capfd.readouterr().err.splitlines()
    assert f": {flags.split()[-1]} model/{name}: is the name of a file of --model model" in line
    assert {path.name: path.read_bytes() for path in model.iterdir() if path.is_file()} == before


def test_an_output_beside_the_models_files(door: Callable[..., Answer], words_model: Path, tmp_path: Path) -> None:
    """Also one that is there already."""
    shutil.copytree(words_model, tmp_path / "model")
    for _ in range(2):
        answer = door("--model", tmp_path / "model", "--json", tmp_path / "model" / "report.json", "--no-log")
        assert answer.code == 0, answer.err


@pytest.mark.timeout(120)
@pytest.mark.parametrize("flag", ["--log-file", "--json", "--trace"])
def test_a_pipe_that_nobody_reads_is_not_waited_for(flag: str, door: Callable[..., Answer], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    answer = door(flag, tmp_path / "pipe")
    assert answer.code == 2
    assert answer.err == f"flex_opt: {flag} {tmp_path}/pipe: is no regular file; name one\n"


def test_what_may_be_the_same(door: Callable[..., Answer], files: Path) -> None:
    """Nowhere, a file that is not written, and a shipped profile's name."""
    flags = "--json /dev/null --trace /dev/null --prompts in.jsonl --log-file in.jsonl --no-log --verbose 0"
    answer = door(*flags.split(), "--percent", 100, 0, 100, 0, 100, 0)
    assert answer.code == 0, answer.err
    assert not Path("/dev/null").is_file()


def test_a_switch_in_a_message_is_its_flag(door: Callable[..., Answer]) -> None:
    assert (
        "leave --compress-weight off, or --weight-bits at 4"
        in door("--int8-compute", "--compress-weight", "--weight-bits", 8).err
    )


def test_a_profile_that_cannot_plan_is_refused_before_anything_is_said(door: Callable[..., Answer]) -> None:
    answer = door("--policy", "auto", "--hardware", "t4")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err.startswith("flex_opt: --hardware t4: ")


@pytest.mark.parametrize("flag", ["--output", "--json", "--trace", "--prompts"])
def test_an_empty_name(flag: str, door: Callable[..., Answer]) -> None:
    answer = door(flag, "")
    assert answer.code == 2
    assert flag in answer.err and "'' is not a file name" in answer.err
