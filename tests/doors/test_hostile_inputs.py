"""Inputs that would fill the memory or lead out of a folder: one line that names flag or file, exit
code 2.

Every command runs under an address space that is little larger than what the tests have already.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o import batch, evaluate, flex_opt, policy_search
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.models.load import find_model
from tests.doors.conftest import Door, read_lines

DOORS = {"flex_opt": flex_opt, "batch": batch, "evaluate": evaluate, "policy_search": policy_search}
ROOM = 3 * 2**29  # bytes of address space that a command may take
pytestmark = pytest.mark.timeout(120)  # a pipe that is waited for would never end


@contextmanager
def little_room() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture
def refusal(call: Door) -> Callable[..., str]:
    """The one line that a command ends with, and its exit code is 2."""

    def run(door: str, *flags: object) -> str:
        named = () if {"--model", "--status"} & set(flags) else ("--model", "opt-tiny")
        with little_room():
            answer = call(DOORS[door].main, *flags, *named)
        [line] = answer.err.splitlines()
        assert answer.code == 2, line
        assert line.startswith(f"{door}: "), line
        return line

    return run


# ---- devices, pipes, files of any size


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def large(path: Path) -> None:
    """Larger than any settings file, and without an end of line."""
    with path.open("wb") as file:
        file.write(b"[")
        file.truncate(2**31)


READERS = [
    ("flex_opt", "--policy", "a.json"),
    ("flex_opt", "--prompts", "a.jsonl"),
    ("policy_search", "--hardware", "a.json"),
    ("evaluate", "streaming", "--turns", "a.jsonl"),
    ("batch", "--input", "in.jsonl", "--policy", "a.json", "--output", "out.jsonl"),
]
MADE = [(made, command) for made in (device, pipe, large) for command in READERS]


@pytest.mark.parametrize(
    ("made", "command"), MADE, ids=lambda one: one.__name__ if callable(one) else " ".join(one[:3])
)
def test_what_a_flag_names_is_a_regular_file_of_bounded_size(
    command: tuple[str, ...],
    made: Callable[[Path], None],
    refusal: Callable[..., str],
    tmp_path: Path,
) -> None:
    name = next(word for word in command if word.startswith("a."))
    made(tmp_path / name)
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    line = refusal(*command)
    assert f"{command[command.index(name) - 1]} {name}" in line
    assert any(
        text in line
        for text in ("is no regular file", "is larger than", "is longer than", "no such file")
    )


@pytest.mark.parametrize("made", [pipe, large], ids=lambda made: made.__name__)
def test_a_jobs_own_files_are_regular_ones(
    made: Callable[[Path], None], refusal: Callable[..., str], tmp_path: Path
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    for name in ("job", "status"):
        made(tmp_path / f"out.jsonl.{name}.json")
    assert "out.jsonl.status.json: is " in refusal("batch", "--output", "out.jsonl", "--status")
    assert "out.jsonl.job.json: is " in refusal(
        "batch", "--input", "in.jsonl", "--output", "out.jsonl"
    )


# ---- long lines and texts

LONG_TEXT = "def f(x): return x\n" * 250_000  # 5 MB; tokenised, it takes 1.5 GB


TEXTS = {
    "sources": "".join(
        path.read_text() for path in sorted(Path(os.__file__).parent.glob("*.py"))[:11]
    ),
    "one word": "a" * 300_000,
    "few tokens": "-" * 600_000,
    "other scripts": "\u00e9\u4e2d\U0001f600e\u0301" * 20_000,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_text_that_fits_is_never_refused(text: str) -> None:
    """Positions for just its tokens are enough; with a fourth of them it is refused unseen."""
    shipped = find_model("opt-tiny", None)
    ids = shipped.encode_plain(text)
    fits, far_too_few = (
        replace(shipped, spec=replace(shipped.spec, max_positions=n))
        for n in (len(ids), len(ids) // 4)
    )
    assert fits.encode(text)[-len(ids) :] == ids
    with pytest.raises(
        UsageError, match=f"{len(text)} characters, too many for the {len(ids) // 4} positions"
    ):
        far_too_few.encode(text)


# ---- requests of a job


# What a template may not do: reach Python's inside, change what it is given, or load files.
ESCAPES = {
    "a frame": "{{ raise_exception.__globals__['os'] }}",
    "a changed list": "{{ messages.append(1) }}",
    "an include": "{% include '/etc/passwd' %}",
}


@pytest.mark.parametrize("template", ESCAPES.values(), ids=ESCAPES)
def test_a_chat_template_runs_no_code_and_opens_no_files(
    template: str, words_model: Path, tmp_path: Path
) -> None:
    """It may be slow or wrong; its rows are errors then, and others go on."""
    folder = shutil.copytree(words_model, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template)
    body = {"messages": [{"role": "user", "content": "x"}]}
    rows = rows_of_job(
        tmp_path, folder, {"custom_id": "a", "url": "/v1/chat/completions", "body": body}, [5, 6]
    )
    assert rows["a"]["error"]["code"] == "invalid_request" and rows["line-2"]["error"] is None
    assert "messages: the chat template does not take them" in rows["a"]["error"]["message"]


def run_job(tmp_path: Path, model: Path) -> None:
    """From in.jsonl to out.jsonl."""
    files = (
        f"--input {tmp_path}/in.jsonl --output {tmp_path}/out.jsonl --offload-dir {tmp_path}/off"
    )
    line = f"--model {model} --device cpu --gen-len 2 {files}"
    assert batch.main(line.split()) == 0


def rows_of_job(tmp_path: Path, model: Path, *lines: object) -> dict[str, dict[str, Any]]:
    """What a job answers, in little room. A list is a plain prompt of token ids."""
    asked = [{"prompt": line} if isinstance(line, list) else line for line in lines]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
    with little_room():
        run_job(tmp_path, model)
    found = read_lines(tmp_path / "out.jsonl")
    assert len({row["custom_id"] for row in found}) == len(found) == len(lines)
    return {row["custom_id"]: row for row in found}


LONG = "x" * 100_000
LONGER = LONG_TEXT[:100_000]


def test_fields_of_any_length_are_error_rows(
    words_model: Path, tmp_path: Path, plain_cpu: None, capfd: pytest.CaptureFixture[str]
) -> None:
    said: dict[str, tuple[object, str, str]] = {
        "prompt": ({"prompt": LONG_TEXT}, "context_length_exceeded", "4750000 characters"),
        "article": ({"article": LONGER}, "context_length_exceeded", "100000 characters"),
        "ids": ({"prompt_token_ids": [5] * 1_000_000}, "context_length_exceeded", "1000000 tokens"),
        "line": ({"prompt": LONG_TEXT * 2}, "invalid_json", "longer than 8 MiB"),
        "stop": ({"prompt": "a", "stop": [LONG]}, "invalid_request", "stop: "),
        "record": (
            {"article": "a", "data": LONG},
            "invalid_request",
            "more than 16 KiB beside its prompt",
        ),
        "url": ({"url": LONG, "body": {}}, "unknown_url", "url: "),
    }
    lines = [{"custom_id": name, **line} for name, (line, _, _) in said.items()]  # type: ignore[dict-item]
    long_id = {"custom_id": LONG, "prompt": "a"}
    late_id = {"prompt": LONG_TEXT * 2, "custom_id": "behind what is not read"}
    rows = rows_of_job(tmp_path, words_model, [5, 6], *lines, long_id, late_id, [7])
    for name, (_, code, says) in said.items():
        error = rows[name]["error"]
        assert error["code"] == code and says in error["message"] and len(error["message"]) < 600
    at = len(lines) + 2
    assert (
        rows[f"line-{at}"]["error"]["message"]
        == f"line {at}: custom_id: is longer than 1024 characters"
    )
    assert "longer than 8 MiB" in rows[f"line-{at + 1}"]["error"]["message"]
    assert rows["line-1"]["error"] is None and rows[f"line-{at + 2}"]["error"] is None
    before = (tmp_path / "out.jsonl").read_bytes()
    capfd.readouterr()
    run_job(tmp_path, words_model)
    assert (
        "nothing was left to do" in capfd.readouterr().out
        and (tmp_path / "out.jsonl").read_bytes() == before
    )


def test_a_shard_name_that_no_file_can_have(
    refusal: Callable[..., str], words_model: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(words_model, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    for name in ("x" * 300, "a\0b", "", "\ud800.safetensors"):
        for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
            (folder / index).write_text(json.dumps({"weight_map": {"a": name}}))
            line = refusal("flex_opt", "--model", folder, "--prompt-len", 4, "--gen-len", 2)
            assert str(folder) in line and "download it again" in line and len(line) < 400
            (folder / index).unlink()
