"""Two tiny models, one with a tokenizer and one without, and a door that is called in process."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import OPTConfig, OPTForCausalLM

from flexgen_h2o import batch, cli, flex_opt
from flexgen_h2o.checkpoint.resolve import PACKAGED

POSITIONS = 64


@dataclass(frozen=True)
class Answer:
    """What a door said, and its exit code."""

    code: int
    out: str
    err: str


def tiny_model(folder: Path, vocab: int) -> Path:
    config = OPTConfig(
        vocab_size=vocab, hidden_size=32, word_embed_proj_dim=32, num_hidden_layers=2, ffn_dim=64,
        num_attention_heads=2, max_position_embeddings=POSITIONS, eos_token_id=None, bos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = OPTForCausalLM(config)
    with torch.no_grad():
        for value in model.parameters():
            value.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def ids_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder without a tokenizer, vocabulary 120."""
    return tiny_model(tmp_path_factory.mktemp("models") / "opt-ids", 120)


@pytest.fixture(scope="session")
def words_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the shipped model's tokenizer."""
    shipped = PACKAGED["opt-tiny"]
    vocab = json.loads((shipped / "config.json").read_text())["vocab_size"]
    folder = tiny_model(tmp_path_factory.mktemp("models") / "opt-words", vocab)
    for path in shipped.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


@pytest.fixture
def door(
    tmp_path: Path, ids_model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """flex_opt in the working folder `tmp_path`; by default a short benchmark of the model without a tokenizer."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def call(*flags: object, model: Path | str | None = None) -> Answer:
        short = ["--offload-dir", "offload", "--gen-len", "4"]
        short += [] if "--prompts" in flags else ["--prompt-len", "8"]
        argv = ["--model", str(model or ids_model), *short, *map(str, flags)]
        capfd.readouterr()
        code = flex_opt.main(argv)
        return Answer(code, *capfd.readouterr())

    return call


@pytest.fixture
def job(
    tmp_path: Path, ids_model: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Answer]:
    """batch in the working folder `tmp_path`, from in.jsonl to out.jsonl, in fp32."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def call(*flags: object, model: Path = ids_model) -> Answer:
        given = [] if "--input" in flags or "--status" in flags else ["--input", "in.jsonl"]
        named = [] if "--output" in flags else ["--output", "out.jsonl"]
        common = ["--model", str(model), "--dtype", "float32", "--offload-dir", "offload"]
        argv = [*common, *given, *named, *map(str, flags)]
        capfd.readouterr()
        code = batch.main(argv)
        return Answer(code, *capfd.readouterr())

    return call


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], plain_cpu: None
) -> Callable[[str], Answer]:
    """The console command, given as one text, in the working folder `tmp_path`."""
    monkeypatch.chdir(tmp_path)

    def call(line: str) -> Answer:
        capfd.readouterr()
        code = cli.main(shlex.split(line))
        return Answer(code, *capfd.readouterr())

    return call


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., Path]:
    def write(*lines: Any, name: str = "prompts.jsonl") -> Path:
        path = tmp_path / name
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return path

    return write
