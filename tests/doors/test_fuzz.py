"""Hostile command lines, drawn from each command's own parser, some with damaged files: exit codes
0, 2, 3 and 4 only, one line for what is wrong, bounded memory.

A line is drawn from its command and number alone, so that a failure is repeated by its name.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o import Policy
from flexgen_h2o.core.config import SavedPolicy, write_policy
from flexgen_h2o.planner.profile import write_profile
from tests.doors.conftest import parser_of
from tests.doors.measured import LOAD, RUN
from tests.forks import Forks, Process
from tests.unit.test_profile import PROFILE

# lines of a command in the default suite, and in the slow one
FEW = 3
MANY = 350
MAX_BEYOND = 300_000_000  # bytes of RAM beyond a plain run, in the same budget
ENGINE = "--model words --offload-dir offload --host-mem 64MiB"
LENGTHS = f"{ENGINE} --prompt-len 8 --gen-len 4"
FEW_ROWS = "--prompts prompts.txt --num-prompts 1 --resamples 9 --keep-mem 16MiB"
# A short run of each command, which the drawn flags change. `chat` reads an empty standard input.
BASE = {
    "flex-opt": LENGTHS,
    "plan": f"{LENGTHS} --num-prompts 8",
    "hardware": "--offload-dir offload",
    "batch": f"{ENGINE} --input in.jsonl --output new.jsonl --gen-len 4",
    "complete": f"{ENGINE} --prompts prompts.txt --gen-len 4",
    "chat": f"{ENGINE} --gen-len 4",
    "evaluate fidelity": f"{LENGTHS} {FEW_ROWS} --policies h2o --budgets 0.5",
    "evaluate attention": f"{ENGINE} {FEW_ROWS} --prompt-len 12 --gen-len 4 --remove 0.25 "
    "--sinks 1",
    "evaluate text": f"{ENGINE} --prompts prompts.txt --gen-len 4 --hh-size 2",
    "evaluate streaming": f"{ENGINE} --turns turns.jsonl --num-turns 1 --gen-len 4 "
    "--policies h2o --hh-size 4",
}
WARM = (
    "--hh-ratio 0.5 --prompts prompts.jsonl --percent 0 0 0 0 0 0",
    "--compress-weight --compress-cache --device-mem 32MiB --percent 30 30 30 30 30 30 --dtype "
    "bfloat16",
    "--int8-compute --eviction h2o-norm --hh-size 2 --policy auto",
)
GOOD = (
    "1 2 7 0.2 0.5 true auto cpu float32 bfloat16 64MiB 1KiB h2o full h2o-norm:sinks=0 words ids "
    "opt-tiny _DUMMY_ policy.json profile.json t4 prompts.jsonl prompts.txt in.jsonl turns.jsonl "
    "new.jsonl done.jsonl new.json new.md plot.svg"
)
HOSTILE_WORDS = (
    "-- - -1 0 nan inf 1e999 1e-320 1.5 65536 99999999 0x10 1_000 ² 12parsecs -1GiB 1e30GiB {} [] "
    "null h2o: h2o:a=b h2o-norm:sinks=nan %s%n {turn {turn.x} $HOME facebook/opt-none * _DUMMY_x "
    "é🦙 /no/such/file.json /dev/zero /dev/null /dev/zero/x.jsonl . .. offload policy.json/x "
    "folder.json folder.jsonl zero.jsonl zero.txt null.jsonl ~nobody-here/x a/b/c "
    "words/model.safetensors"
)
HOSTILE = [
    *HOSTILE_WORDS.split(),
    *("", " ", "a\nb", "a\tb\r", "\x1b[31m", "\udcff", "\udcff.jsonl", "\u202e.txt", "a\nb.jsonl"),
    *("9" * 30, "9" * 5000, "x" * 300, "x" * 5000 + ".jsonl"),
]
JSON_VALUES = (
    *(None, True, -1, 0, 1.5, math.nan, math.inf, 10**400, 2**63),
    *("", "x", "\ud800", "9" * 5000, [], [[]], {}, {"x": None}),
)
# The files that a flag reads, by the flag's field; each is damaged in some lines.
READ_BY = {
    "policy": ("--policy policy.json", ["policy.json"]),
    "hardware": ("--hardware profile.json", ["profile.json"]),
    "show": ("--show profile.json", ["profile.json"]),
    "prompts": ("--prompts prompts.jsonl", ["prompts.jsonl"]),
    "turns": ("--turns turns.jsonl", ["turns.jsonl"]),
    "model": ("--model damaged", [f"damaged/{n}.json" for n in ("config", "tokenizer")]),
    "force": (
        "--output done.jsonl",
        ["in.jsonl", "done.jsonl", "done.jsonl.job.json", "done.jsonl.status.json"],
    ),
}


def drawn(rng: random.Random, command: str) -> tuple[list[str], list[str]]:
    """The words of a line, and the files that are damaged before."""
    actions = parser_of(command)._actions
    actions = [a for a in actions if a.option_strings and not a.dest.endswith("_mem")]
    words = f"{command} {BASE[command]}".split()
    damaged: list[str] = []
    readable = sorted({a.dest for a in actions} & READ_BY.keys())
    if readable and rng.random() < 0.5:
        flags, damaged = READ_BY[rng.choice(readable)]
        words += flags.split()
    for action in rng.sample(actions, rng.randrange(not damaged, 4)):
        good = list(map(str, action.choices or GOOD.split()))
        count = {None: 1, "?": rng.randrange(2), "+": 2, "*": 2}.get(action.nargs, action.nargs)
        assert isinstance(count, int)
        given = [rng.choice(good if rng.random() < 0.6 else HOSTILE) for _ in range(count)]
        flag = rng.choice(action.option_strings)
        words += [f"{flag}={given[0]}"] if len(given) == 1 else [flag, *given]
    # Random weights would have whatever shape a damaged file says.
    return [w.replace("_DUMMY_", "DUMMY") if damaged else w for w in words], damaged


def damage(rng: random.Random, data: bytes, is_lines: bool) -> bytes:
    """Bytes of a file, cut, written over, or with another JSON value in place of one."""
    at = rng.randrange(len(data) + 1)
    how = rng.randrange(4)
    if how < 2:
        return (data[:at], data[:at] + rng.randbytes(4) + data[at + 4 :])[how]
    lines = data.split(b"\n") if is_lines else [data]
    number = rng.randrange(len(lines))
    with contextlib.suppress(ValueError):
        tree = json.loads(lines[number])
        holder, key = rng.choice([*places(tree)])
        holder[key] = rng.choice(JSON_VALUES)
        lines[number] = json.dumps(tree).encode()
    return b"\n".join(lines)


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from places(tree[key])


def problems(ended: Process, plain_rss: int) -> str:
    """What is wrong with how a line ended; empty where nothing is."""
    lines = [line for line in ended.err.splitlines() if line and not line.startswith("# ")]
    is_bad = ended.code not in (0, 2, 3, 4) or "Traceback" in ended.err
    if is_bad or (ended.code and len(lines) > 1):
        return f"exit code {ended.code}, {len(lines)} lines: {ended.err[-1500:]}"
    beyond = ended.peak_rss - plain_rss
    return f"{beyond / 1e6:.0f} MB beyond a plain run" if beyond > MAX_BEYOND else ""


@dataclass
class Fuzzed:
    """Runs lines, each in a working folder that is made new."""

    forks: Forks
    parent: Path  # the user's home too
    models: dict[str, Path]
    files: dict[str, bytes]
    plain_rss: int = 0  # peak of a plain run

    def folder(self) -> Path:
        """With good files of every kind. `zero.txt` and `null.jsonl` lead to devices."""
        folder = self.parent / "case"
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "damaged").mkdir(parents=True)
        for name, model in self.models.items():
            (folder / name).symlink_to(model)
        for path in self.models["words"].iterdir():
            (folder / "damaged" / path.name).symlink_to(path)
        for name in ("folder.json", "folder.jsonl"):
            (folder / name).mkdir()
        for name, device in (("zero.jsonl", "zero"), ("zero.txt", "zero"), ("null.jsonl", "null")):
            (folder / name).symlink_to(f"/dev/{device}")
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        return folder

    def run(self, folder: Path, words: list[str]) -> Process:
        return self.forks.run(folder, RUN, self.parent, *words)

    def __call__(self, command: str, number: int) -> None:
        rng = random.Random(f"{command} {number}")
        words, damaged = drawn(rng, command)
        folder = self.folder()
        if damaged:
            path = folder / rng.choice(damaged)
            data = damage(rng, path.read_bytes(), path.suffix == ".jsonl")
            path.unlink()
            path.write_bytes(data)
        ended = self.run(folder, words)
        found = problems(ended, self.plain_rss)
        assert not found, f"line {number}: {words} {found}"
        assert not list(folder.rglob("run-*")), f"line {number} left something behind: {words}"


@pytest.fixture(scope="module")
def fuzzed(
    forks: Forks, ids_model: Path, words_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Fuzzed:
    """Good files, and runs of each command that load what later ones need."""
    parent = tmp_path_factory.mktemp("fuzz")
    models = {"ids": ids_model, "words": words_model}
    maker = Fuzzed(forks, parent, models, good_files(parent))
    first = maker.folder()
    lines = ["hardware --offload-dir offload", f"batch {BASE['batch']} --output done.jsonl"]
    lines += [f"{name} {flags}" for name, flags in BASE.items()]
    for line in (*lines, *(f"flex-opt {LENGTHS} {flags}" for flags in WARM)):
        forks.load(LOAD, parent, first, *line.split())
    for name in ("done.jsonl", "done.jsonl.job.json", "done.jsonl.status.json"):
        maker.files[name] = (first / name).read_bytes()
    maker.plain_rss = maker.run(maker.folder(), f"flex-opt {LENGTHS}".split()).peak_rss
    return maker


def good_files(parent: Path) -> dict[str, bytes]:
    policy = Policy(2, 2, (50, 50, 50, 50, 50, 50))
    write_policy(parent / "policy.json", SavedPolicy(policy, "opt-words", None, None, None, None))
    write_profile(parent / "profile.json", PROFILE)
    texts = ["def f(x):\n    return x + 1\n" * 2, "import os, sys, json", "class A(B):\n    x = 0"]
    bodies = [{"prompt": text, "max_tokens": 3, "temperature": i} for i, text in enumerate(texts)]
    url = "/v1/completions"
    lines: dict[str, list[dict[str, Any]]] = {
        "prompts.jsonl": [*({"prompt": text} for text in texts), {"prompt_token_ids": [5, 6]}],
        "in.jsonl": [
            {"custom_id": f"r{i}", "url": url, "body": body} for i, body in enumerate(bodies)
        ],
        "turns.jsonl": [{"question_id": 1, "category": "code", "turns": texts}],
    }
    found = {name: (parent / name).read_bytes() for name in ("policy.json", "profile.json")}
    for name, rows in lines.items():
        found[name] = "".join(json.dumps(row) + "\n" for row in rows).encode()
    return {**found, "prompts.txt": "\n".join(text.replace("\n", " ") for text in texts).encode()}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("command", BASE)
def test_a_few_lines(command: str, fuzzed: Fuzzed) -> None:
    for number in range(FEW):
        fuzzed(command, number)


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("command", BASE)
def test_many_lines(command: str, fuzzed: Fuzzed) -> None:
    for number in range(FEW, MANY):
        fuzzed(command, number)
