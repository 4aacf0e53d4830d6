"""Two tiny models, one with a tokenizer and one without, and a door that is called in process."""

from __future__ import annotations

import argparse
import importlib
import json
import shlex
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from flexgen_h2o import batch, cli, flex_opt
from flexgen_h2o.checkpoint.resolve import PACKAGED
from flexgen_h2o.parser import OneLineParser

POSITIONS = 64


@dataclass(frozen=True)
class Answer:
    """What a door said, and its exit code."""

    code: int
    out: str
    err: str


# A command in this process, given its words.
Door = Callable[..., Answer]


def words_of(given: Iterable[object]) -> list[object]:
    """Return the words of a command line. A text that begins with two hyphens is split."""
    found: list[object] = []
    for one in given:
        is_flags = isinstance(one, str) and one.startswith("--")
        found += shlex.split(one) if is_flags else [one]
    return found


def read_json(path: Path) -> Any:
    return json.loads(path.read_text())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


SHIPPED = PACKAGED["opt-tiny"]
VOCAB: int = read_json(SHIPPED / "config.json")["vocab_size"]


def tiny_model(
    folder: Path, config: PretrainedConfig, make: type[PreTrainedModel], has_words: bool
) -> Path:
    """A folder with a model of random weights; has_words: with the shipped model's tokenizer."""
    torch.manual_seed(0)
    model = make(config)
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(0, 0.3)
    model.save_pretrained(folder)
    for path in SHIPPED.glob("tokenizer*") if has_words else ():
        shutil.copy(path, folder)
    return folder


def tiny_opt(folder: Path, vocab: int, has_words: bool) -> Path:
    config = OPTConfig(
        vocab_size=vocab,
        hidden_size=32,
        word_embed_proj_dim=32,
        num_hidden_layers=2,
        ffn_dim=64,
        num_attention_heads=2,
        max_position_embeddings=POSITIONS,
        eos_token_id=None,
        bos_token_id=2,
    )
    return tiny_model(folder, config, OPTForCausalLM, has_words)


@pytest.fixture(scope="session")
def ids_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder without a tokenizer, vocabulary 120."""
    return tiny_opt(tmp_path_factory.mktemp("models") / "opt-ids", 120, False)


@pytest.fixture(scope="session")
def words_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shipped model's tokenizer."""
    return tiny_opt(tmp_path_factory.mktemp("models") / "opt-words", VOCAB, True)


@pytest.fixture(scope="session")
def rotary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA with two kv-heads, the shipped model's tokenizer, and few positions."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        eos_token_id=None,
        bos_token_id=0,
    )
    folder = tmp_path_factory.mktemp("models") / "llama-words"
    return tiny_model(folder, config, LlamaForCausalLM, True)


def parser_of(command: str) -> OneLineParser:
    """The parser of a verb, or of its sub-command: `evaluate text`."""
    verb, _, measure = command.partition(" ")
    parser: OneLineParser = importlib.import_module(cli.VERBS[verb][0])._parser()
    if not measure:
        return parser
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    found: OneLineParser = commands.choices[measure]
    return found


@pytest.fixture
def call(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    plain_cpu: None,
) -> Door:
    """The `main` of a command in this process, with the words of its line, in the working folder
    `tmp_path`."""
    monkeypatch.chdir(tmp_path)

    def run(main: Callable[[list[str]], int], *words: object) -> Answer:
        capfd.readouterr()
        code = main([*map(str, words)])
        return Answer(code, *capfd.readouterr())

    return run


@pytest.fixture
def door(call: Door, ids_model: Path) -> Door:
    """flex_opt; by default a short benchmark of the model without a tokenizer."""

    def run(*given: object, model: Path | str | None = None) -> Answer:
        flags = words_of(given)
        length = [] if "--prompts" in flags else ["--prompt-len", "8"]
        usual = ["--offload-dir", "offload", "--gen-len", "4", *length]
        return call(flex_opt.main, "--model", model or ids_model, *usual, *flags)

    return run


@pytest.fixture
def job(call: Door, ids_model: Path) -> Door:
    """batch, from in.jsonl to out.jsonl, in fp32."""

    def run(*given: object, model: Path = ids_model) -> Answer:
        flags = words_of(given)
        words = ["--model", model, "--dtype", "float32", "--offload-dir", "offload"]
        words += [] if "--input" in flags or "--status" in flags else ["--input", "in.jsonl"]
        words += [] if "--output" in flags else ["--output", "out.jsonl"]
        return call(batch.main, *words, *flags)

    return run


@pytest.fixture
def command(call: Door) -> Callable[[str], Answer]:
    """The console command, given as one text."""
    return lambda line: call(cli.main, *shlex.split(line))


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: Any, name: str = "prompts.jsonl") -> Path:
        path = tmp_path / name
        path.write_text(
            "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        )
        return path

    return write
