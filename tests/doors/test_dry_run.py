"""--dry-run of every command that runs a model: the plan, its exit codes, and nothing read or left
behind."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from flexgen_h2o.checkpoint import safetensors
from flexgen_h2o.engine import resources
from tests.doors.conftest import Door, read_json

PLANNED = ("plan, ", "memory ", "disk ", "bound: ", "throughput: ", "time for all prompts: ")
COMMANDS = {
    "flex-opt": "flex-opt --prompt-len 8 --gen-len 4",
    "complete": "complete import",
    "chat": "chat --gen-len 4",
    "batch": "batch --input in.jsonl --output out.jsonl",
    "run-batch": "run-batch -i in.jsonl",
    "text": "evaluate text --prompt import --gen-len 4",
    "streaming": "evaluate streaming --turns in.jsonl --gen-len 4",
    "fidelity": "evaluate fidelity --num-prompts 2 --recall-prompts 0 --prompt-len 16 --gen-len 4",
    "attention": "evaluate attention --num-prompts 2 --prompt-len 32 --gen-len 4 --remove 0.25",
}


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine is opened, and so no weights are read."""

    def opened(*args: object) -> None:
        raise AssertionError("an engine was opened")

    monkeypatch.setattr(resources.Engine, "__init__", opened)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_prints_the_plan_and_leaves_nothing(
    name: str, command: Door, words_model: Path, write_jsonl: Callable[..., Path], tmp_path: Path
) -> None:
    write_jsonl(
        {"prompt": "import os", "max_tokens": 4},
        {"prompt": "def f(x):", "max_tokens": 2},
        name="in.jsonl",
    )
    said = command(f"{COMMANDS[name]} --model {words_model} --offload-dir o --dry-run")
    assert said.code == 0, said.err
    for begin in PLANNED:
        assert any(line.startswith(begin) for line in said.out.splitlines()), (begin, said.out)
    assert "run it:" not in said.out
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("name", ["flex-opt", "batch"])
def test_what_does_not_fit_ends_with_3(
    name: str, command: Door, words_model: Path, write_jsonl: Callable[..., Path]
) -> None:
    write_jsonl({"prompt": "import os", "max_tokens": 4}, name="in.jsonl")
    said = command(
        f"{COMMANDS[name]} --model {words_model} --offload-dir o --host-mem 1MiB --dry-run"
    )
    assert (said.code, said.out) == (3, "")
    assert "--host-mem" in said.err


def test_lengths_of_requests_and_bad_ones_are_told(
    command: Door, words_model: Path, write_jsonl: Callable[..., Path]
) -> None:
    write_jsonl(
        {"prompt": "import os", "max_tokens": 4},
        {"prompt": "x", "max_tokens": 6},
        {"prompt": 7},
        name="in.jsonl",
    )
    said = command(
        f"run-batch -i in.jsonl --model {words_model} --offload-dir o --dry-run --percent 0 50 0 "
        "100 100 0"
    )
    assert "2 prompts of at most" in said.out and "at most 6 new tokens each" in said.out
    assert "plan, as given:" in said.out and "--percent 0 50 0 100 100 0" in said.out
    assert "run-batch: 1 of 3 prompts will be an error line: " in said.err
    assert "; the first: line 3: prompt" in said.err
    write_jsonl({"prompt": 7}, name="in.jsonl")
    said = command(f"run-batch -i in.jsonl --model {words_model} --dry-run")
    assert (
        said.code == 2
        and "--input in.jsonl: no request in it that can be run (line 1: prompt" in said.err
    )


def test_weights_need_not_be_there_nor_are_they_imported(
    command: Door, ids_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a folder without weights, as the hub's config alone is; and of a .bin checkpoint, by its
    config's dtype."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = read_json(ids_model / "config.json")
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    line = f"flex-opt --model {folder} --prompt-len 8 --gen-len 4 --offload-dir o --dry-run"
    assert "in bfloat16: " in command(line).out
    (folder / safetensors.BIN[0]).write_bytes(b"no weights at all")
    assert "in bfloat16: " in command(line).out
    assert not (tmp_path / "o").exists()
    shutil.copy(ids_model / "model.safetensors", folder)
    assert "in bfloat16: " in command(line).out  # as config.json says, whatever is stored
    (folder / "config.json").write_text(json.dumps({**config, "dtype": None}))
    assert "in float32: " in command(line).out  # as stored
