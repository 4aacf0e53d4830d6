"""Jobs and single texts of tiny models, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o import batch, cli
from tests.text.tiny import write_bytes_tokenizer, write_llama


@dataclass(frozen=True)
class Job:
    """A job that has ended. rows: of its output, by custom_id."""

    code: int
    out: str
    err: str
    rows: dict[str, dict[str, Any]]

    def choice(self, name: str) -> dict[str, Any]:
        """The answer of a row."""
        row = self.rows[name]
        assert row["error"] is None, row
        found: dict[str, Any] = row["response"]["body"]["choices"][0]
        return found

    def error(self, name: str) -> tuple[str, str]:
        """Code and message of an error row."""
        error = self.rows[name]["error"]
        return error["code"], error["message"]


@dataclass(frozen=True)
class Said:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str


@pytest.fixture
def call(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    plain_cpu: None,
) -> Callable[..., Said]:
    """`flexgen-h2o` with these words, in this process."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> Said:
        capfd.readouterr()
        code = cli.main([*map(str, words)])
        return Said(code, *capfd.readouterr())

    return run


@pytest.fixture(scope="session")
def bytes_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights and a tokenizer of single bytes."""
    folder = tmp_path_factory.mktemp("models") / "bytes"
    write_bytes_tokenizer(folder)
    write_llama(folder)
    return folder


@pytest.fixture
def run_job(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    plain_cpu: None,
) -> Callable[..., Job]:
    """`batch` with these lines."""
    monkeypatch.chdir(tmp_path)

    def run(model: Path, *lines: Any, flags: str = "") -> Job:
        source = tmp_path / "in.jsonl"
        source.write_text(
            "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        )
        output = tmp_path / "out.jsonl"
        for path in tmp_path.glob("out.jsonl*"):
            path.unlink()
        capfd.readouterr()
        words = [
            "--model",
            model,
            "--dtype",
            "float32",
            "--offload-dir",
            "offload",
            "--input",
            source,
        ]
        code = batch.main([*map(str, words), "--output", str(output), *flags.split()])
        said = capfd.readouterr()
        rows = (
            [json.loads(line) for line in output.read_text().split("\n")[:-1]]
            if output.exists()
            else []
        )
        return Job(code, said.out, said.err, {row["custom_id"]: row for row in rows})

    return run
