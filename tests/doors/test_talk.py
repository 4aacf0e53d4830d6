"""`chat`: piped and typed, answers against transformers and `evaluate streaming`, and what may go
wrong."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from flexgen_h2o import chat as module
from flexgen_h2o.checkpoint.resolve import PACKAGED
from flexgen_h2o.core.files import MAX_LINE_BYTES
from tests.doors.conftest import POSITIONS, Answer, Door, read_json
from tests.forks import Forks
from tests.parity import reference

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if "
    "add_generation_prompt %}<me>{% endif %}"
)
SMALL = "--hh-size 5 --recent-size 4"
TURNS = ["import os", "class Shape:", "def area(self):"]


@pytest.fixture
def chat(command: Door, monkeypatch: pytest.MonkeyPatch) -> Door:
    """The command with lines on its standard input."""

    def run(flags: str, *lines: str | bytes) -> Answer:
        data = b"".join(
            (line.encode() if isinstance(line, str) else line) + b"\n" for line in lines
        )
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))
        return command(f"chat --offload-dir o --gpu-batch-size 4 --dtype float32 {flags}")

    return run


def saved(path: Path) -> list[dict[str, Any]]:
    return read_json(path)["turns"]


def tokens(path: Path) -> list[list[int]]:
    return [turn["token_ids"] for turn in saved(path)]


def greedy(
    folder: Path, pieces: Sequence[str], sizes: Sequence[int], special: bool
) -> list[list[int]]:
    """Answers of so many tokens by transformers, each to all that was said before it. special: the
    first piece begins with the tokenizer's special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).float()
    said: list[int] = []
    answers = []
    for i, (piece, size) in enumerate(zip(pieces, sizes, strict=True)):
        said += tokenizer(piece, add_special_tokens=special and i == 0)["input_ids"]
        answers.append(reference.greedy(model, said, size))
        said += answers[-1]
    return answers


# ---- Answers


def test_answers_are_those_of_transformers(chat: Door, tmp_path: Path) -> None:
    """To the whole conversation at once. Only new tokens are fed: each has one column, the newest
    none."""
    answer = chat("--model opt-tiny --gen-len 6 --ignore-eos", *TURNS, "/save a.json", "/memory")
    assert answer.code == 0, answer.err
    found = saved(tmp_path / "a.json")
    want = greedy(PACKAGED["opt-tiny"], [f"\n{turn}\n" for turn in TURNS], [6] * 3, True)
    assert [turn["token_ids"] for turn in found] == want
    assert answer.out == "".join(f"{turn['text']}\n" for turn in found)
    assert found[-1]["kv_columns"] == sum(turn["tokens"] + 6 for turn in found) - 1
    assert answer.err.count("[KV ") == 3 and "tokens in" in answer.err and "turns: 3" in answer.err


def with_template(folder: Path, to: Path, template: str = TEMPLATE) -> Path:
    shutil.copytree(folder, to)
    config = read_json(to / "tokenizer_config.json")
    (to / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return to


def test_a_chat_template_and_a_system_prompt(chat: Door, rotary: Path, tmp_path: Path) -> None:
    folder = with_template(rotary, tmp_path / "with-template")
    flags = f"--model {folder} --gen-len 5 --system 'be brief'"
    assert chat(flags, "one", "two", "/save a.json").code == 0
    pieces = ["<system>be brief\n<user>one\n<me>", "\n<user>two\n<me>"]
    assert tokens(tmp_path / "a.json") == greedy(folder, pieces, [5, 5], False)
    assert chat(f"{flags} --turn-format 'Q: {{turn}}\\nA:'", "one", "two", "/save b.json").code == 0
    plain = greedy(folder, ["be brief\nQ: one\nA:", "Q: two\nA:"], [5, 5], True)
    assert tokens(tmp_path / "b.json") == plain


@pytest.mark.parametrize("flags", [f"{SMALL} --positions rolling", f"--eviction tova {SMALL}"])
def test_answers_are_those_of_evaluate_streaming(
    flags: str, chat: Door, command: Door, rotary: Path, tmp_path: Path
) -> None:
    """With columns dropped, and past the model's positions with rolling ones; /save gives a file
    for --turns."""
    turns = TURNS if "rolling" not in flags else [*TURNS, *TURNS, *TURNS, *TURNS]
    assert (
        chat(
            f"--model {rotary} --gen-len 5 {flags}", *turns, "/save a.json", "/save turns.jsonl"
        ).code
        == 0
    )
    found = saved(tmp_path / "a.json")
    policy = "tova" if "tova" in flags else "h2o"
    rest = flags.replace("--eviction tova ", "")
    line = (
        f"evaluate streaming --model {rotary} --offload-dir o --gpu-batch-size 4 --dtype "
        f"float32 --gen-len 5 {rest}"
    )
    assert command(f"{line} --policies {policy} --turns turns.jsonl --json b.json").code == 0
    [policy_found] = read_json(tmp_path / "b.json")["policies"]
    assert [t["token_ids"] for t in found] == [t["token_ids"] for t in policy_found["turns"]]
    assert [t["kv_bytes"] for t in found] == [t["kv_bytes"] for t in policy_found["turns"]]
    assert found[-1]["kv_columns"] == 10
    if "rolling" in flags:
        assert sum(t["tokens"] + 5 for t in found) > POSITIONS


# ---- Limits


def test_a_full_cache_that_is_used_up(chat: Door, rotary: Path, tmp_path: Path) -> None:
    """One line says what to do, what was said can be saved, and /reset begins anew as at first."""
    answer = chat(
        f"--model {rotary} --gen-len 30",
        *TURNS,
        "more",
        "/save a.json",
        "/reset",
        TURNS[0],
        "/save b.json",
    )
    assert answer.code == 2
    used = (
        f"the {POSITIONS} positions of {rotary} are used up: /reset begins anew, /save FILE "
        "keeps what was said; "
    )
    lines = [line for line in answer.err.splitlines() if "used up" in line]
    assert lines[0] == f"chat: {used}a chat with --positions rolling goes on"
    assert len(lines) == 3 and lines[1].startswith(
        "chat: line 3 of standard input: the 64 positions"
    )
    found = saved(tmp_path / "a.json")
    again = saved(tmp_path / "b.json")
    assert sum(t["tokens"] + len(t["token_ids"]) for t in found) == POSITIONS + 1
    assert found[-1]["finish_reason"] is None and answer.out.count(found[-1]["text"]) >= 1
    assert [t["token_ids"] for t in again] == [found[0]["token_ids"]]


# ---- Lines


def test_odd_lines_are_skipped_or_refused_and_change_nothing(
    chat: Door, words_model: Path, tmp_path: Path
) -> None:
    flags = f"--model {words_model} --gen-len 3"
    plain = chat(flags, "a", "//b", "/save a.json")
    assert plain.code == 0
    odd = chat(
        flags,
        "",
        "a",
        "   ",
        b"caf\xe9",
        "/nothing",
        b"x" * (MAX_LINE_BYTES + 9),
        "//b",
        "/save b.json",
    )
    assert odd.code == 2 and odd.out == plain.out
    lines = [line for line in odd.err.splitlines() if line.startswith("chat: ")]
    assert lines[0] == "chat: line 4 of standard input: is not UTF-8 text; write it in UTF-8"
    assert (
        lines[1]
        == "chat: line 5 of standard input: /nothing: is not a command; /help lists the commands"
    )
    assert lines[2] == "chat: line 6 of standard input: is longer than 8 MiB"
    assert tokens(tmp_path / "a.json") == [t["token_ids"] for t in saved(tmp_path / "b.json")]
    assert saved(tmp_path / "b.json")[1]["prompt"] == "/b"


# ---- Signals and terminals


def interrupt(monkeypatch: pytest.MonkeyPatch, after: int, times: int) -> None:
    """SIGINT comes with the `after`-th piece of the first answer."""
    written = module._write
    left = [after]

    def write(text: str) -> None:
        written(text)
        left[0] -= 1
        if not left[0]:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(module, "_write", write)


def test_an_interrupted_answer_ends_and_the_conversation_goes_on(
    chat: Door, rotary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, 3, 1)
    answer = chat(f"--model {rotary} --gen-len 9", *TURNS[:2], "/save a.json")
    first, second = saved(tmp_path / "a.json")
    assert (
        answer.code == 0
        and first["finish_reason"] == "interrupted"
        and 3 <= len(first["token_ids"]) <= 4
    )
    sizes = [len(first["token_ids"]), 9]
    pieces = [f"\n{turn}\n" for turn in TURNS[:2]]
    assert [first["token_ids"], second["token_ids"]] == greedy(rotary, pieces, sizes, True)


def test_a_second_signal_ends_the_chat(
    chat: Door, rotary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(monkeypatch, 3, 2)
    answer = chat(f"--model {rotary} --gen-len 9", *TURNS)
    assert answer.code == 130 and answer.err.splitlines()[-1] == "chat: ended by SIGINT"


# In the dtype whose loops the server has loaded.
IN_A_PROCESS = "--model opt-tiny --offload-dir o --device cpu --dtype float32"
ON_TERMINAL = """
import os, sys
os.setsid()
terminal = os.open(sys.argv[1], os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(terminal, fd)
from flexgen_h2o import cli
sys.exit(cli.main(sys.argv[2:]))
"""


def test_on_a_terminal(forks: Forks, tmp_path: Path) -> None:
    """Typed turns; Ctrl-C ends an answer, or drops a line; Ctrl-D ends the chat."""
    master, slave = pty.openpty()
    line = f"chat {IN_A_PROCESS} --gen-len 900 --ignore-eos --gpu-batch-size 1"
    process = forks.start(tmp_path, ON_TERMINAL, os.ttyname(slave), *line.split())
    shown = b""

    def wait_for(text: bytes) -> bytes:
        nonlocal shown
        while text not in shown:
            shown += os.read(master, 4096)
        before, _, shown = shown.partition(text)
        return before

    greeting = wait_for(b"> ")
    os.close(slave)  # from here on the end of the process ends what is read
    assert b"opt-tiny, full: every KV entry; /help lists" in greeting
    os.write(master, b"import os\n")
    wait_for(b"import os\r\n")
    while not re.sub(
        rb"\x1b(\[[?0-9;]*([a-zA-Z]|$)|$)|\s", b"", shown
    ):  # readline's own, before the answer
        shown += os.read(master, 4096)
    os.write(master, b"\x03")
    assert wait_for(b"; interrupted]")
    wait_for(b"> ")
    os.write(master, b"half a li")
    wait_for(b"half a li")
    os.write(master, b"\x03")
    while not select.select([master], [], [], 5)[
        0
    ]:  # CPython misses one that comes just before it waits for a key
        os.write(master, b"\x03")
    wait_for(b"> ")
    os.write(master, b"/memory\n")
    wait_for(b"turns: 1, of")
    wait_for(b"> ")
    os.write(master, b"\x04")
    assert process.wait() == 0
    os.close(master)
