"""Jobs and single texts of tiny models, in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o import cli
from tests.text.tiny import write_bytes_tokenizer, write_llama


@dataclass(frozen=True)
class Job:
    """A command that has ended. rows: of its output, by custom_id, if it was a job."""

    code: int
    out: str
    err: str
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

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


@pytest.fixture(scope="session")
def bytes_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights and a tokenizer of single bytes."""
    folder = tmp_path_factory.mktemp("models") / "bytes"
    write_bytes_tokenizer(folder)
    write_llama(folder)
    return folder


@pytest.fixture
def call(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    plain_cpu: None,
) -> Callable[..., Job]:
    """`flexgen-h2o` with these words, in this process."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> Job:
        capfd.readouterr()
        code = cli.main([*map(str, words)])
        return Job(code, *capfd.readouterr())

    return run


@pytest.fixture
def run_job(tmp_path: Path, call: Callable[..., Job]) -> Callable[..., Job]:
    """`batch` with these lines."""

    def run(model: Path, *lines: Any, flags: str = "") -> Job:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (tmp_path / "in.jsonl").write_text("".join(text + "\n" for text in texts))
        for path in tmp_path.glob("out.jsonl*"):
            path.unlink()
        engine = ("--model", model, "--dtype", "float32", "--offload-dir", "offload")
        files = ("--input", "in.jsonl", "--output", "out.jsonl")
        job = call("batch", *engine, *files, *flags.split())
        output = tmp_path / "out.jsonl"
        found = output.read_text().split("\n")[:-1] if output.exists() else []
        rows = [json.loads(line) for line in found]
        return replace(job, rows={row["custom_id"]: row for row in rows})

    return run
