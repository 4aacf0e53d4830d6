"""Every command line by its own parser: exit codes 0, 2, 3 and 4 only, one line for what is wrong,
bounded memory."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from flexgen_h2o import Policy
from flexgen_h2o.core.config import SavedPolicy, write_policy
from flexgen_h2o.planner.profile import write_profile
from tests.doors.fuzz import BASE, Case, cases, parsers, problems, verbs
from tests.doors.measured import Measured
from tests.forks import Forks
from tests.unit.test_profile import PROFILE

PARSERS = parsers()
del PARSERS["evaluate lm-eval"]  # each line would read lm-eval's 10,000 task files
# cases of the default suite, and of the slow one
FEW = 40
MANY = 5_000
COMMANDS = [*PARSERS, "verbs"]


@dataclass
class Fuzzed:
    """Runs cases, each in a working folder that is made new."""

    run: Measured
    parent: Path
    models: dict[str, Path]
    files: dict[str, bytes]
    count: int = 0

    def folder(self) -> Path:
        """With good files of every kind. `zero.txt` and `null.jsonl` lead to devices."""
        self.count += 1
        folder = self.parent / f"case{self.count}"
        folder.mkdir()
        for name, model in self.models.items():
            (folder / name).symlink_to(model)
        (folder / "damaged").mkdir()
        for path in self.models["words"].iterdir():
            (folder / "damaged" / path.name).symlink_to(path)
        for name in ("folder.json", "folder.jsonl"):
            (folder / name).mkdir()
        for name, device in (("zero.jsonl", "zero"), ("zero.txt", "zero"), ("null.jsonl", "null")):
            (folder / name).symlink_to(f"/dev/{device}")
        for name, data in self.files.items():
            (folder / name).write_bytes(data)
        return folder

    def __call__(self, case: Case) -> list[str]:
        """What is wrong with how the case ended."""
        folder = self.folder()
        try:
            for damage in case.damages:
                path = folder / damage.file
                data = damage.apply(path.read_bytes())
                path.unlink()
                path.write_bytes(data)
            ended = self.run(folder, case.argv)
            left = [str(path.relative_to(folder)) for path in folder.rglob("run-*")]
            return problems(case, ended) + ([f"left behind: {left}"] if left else [])
        finally:
            shutil.rmtree(folder)


@pytest.fixture(scope="module")
def fuzzed(
    forks: Forks, ids_model: Path, words_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Fuzzed:
    """Good files, and runs of each command that load what later ones need."""
    parent = tmp_path_factory.mktemp("fuzz")
    home = parent / "home"
    home.mkdir()
    maker = Fuzzed(
        Measured(forks, home), parent, {"ids": ids_model, "words": words_model}, good_files(parent)
    )
    first = maker.folder()
    lines = [["hardware", *BASE["hardware"]], ["batch", *BASE["batch"], "--output", "done.jsonl"]]
    lines += [[*name.split(), *flags] for name, flags in BASE.items()]
    lines += [["flex-opt", *BASE["flex-opt"], *flags.split()] for flags in WARM]
    for line in lines:
        maker.run.load(first, line)
    for name in ("done.jsonl", "done.jsonl.job.json", "done.jsonl.status.json"):
        maker.files[name] = (first / name).read_bytes()
    return maker


WARM = (
    "--hh-ratio 0.5 --prompts prompts.jsonl --percent 0 0 0 0 0 0",
    "--compress-weight --compress-cache --device-mem 32MiB --percent 30 30 30 30 30 30 --dtype "
    "bfloat16",
    "--int8-compute --eviction h2o-norm --hh-size 2 --policy auto",
)


def good_files(parent: Path) -> dict[str, bytes]:
    policy = Policy(2, 2, (50, 50, 50, 50, 50, 50))
    write_policy(parent / "policy.json", SavedPolicy(policy, "opt-words", None, None, None, None))
    write_profile(parent / "profile.json", PROFILE)
    texts = [
        "def f(x):\n    return x + 1\n" * 2,
        "import os, sys, json, random, shutil, typing",
        "class A(B):\n    x: int = 0",
    ]
    plain = [{"prompt": text} for text in texts] + [{"prompt_token_ids": [5, 6, 7]}]
    asked = [
        {
            "custom_id": f"r{i}",
            "url": "/v1/completions",
            "body": {"prompt": text, "max_tokens": 3, "temperature": i},
        }
        for i, text in enumerate(texts)
    ]
    turns = [{"question_id": 1, "category": "code", "turns": texts}]
    found = {name: (parent / name).read_bytes() for name in ("policy.json", "profile.json")}
    for name, lines in (("prompts.jsonl", plain), ("in.jsonl", asked), ("turns.jsonl", turns)):
        found[name] = "".join(json.dumps(line) + "\n" for line in lines).encode()
    return {**found, "prompts.txt": "\n".join(text.replace("\n", " ") for text in texts).encode()}


def search(command: str, fuzzed: Fuzzed, examples: int, repeatable: bool) -> None:
    """Draw cases until one is wrong, and say the shortest such."""
    drawn = verbs() if command == "verbs" else cases(command, PARSERS[command])

    @settings(
        max_examples=examples,
        derandomize=repeatable,
        database=None,
        print_blob=True,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(drawn)
    def check(case: Case) -> None:
        found = fuzzed(case)
        assert not found, "\n".join(found)

    check()


@pytest.mark.timeout(
    900
)  # seconds where all is well; the shortest line that is wrong takes a minute to find
@pytest.mark.parametrize("command", COMMANDS)
def test_a_few_lines(command: str, fuzzed: Fuzzed) -> None:
    search(command, fuzzed, FEW // len(COMMANDS), True)


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("command", COMMANDS)
def test_many_lines(command: str, fuzzed: Fuzzed) -> None:
    search(command, fuzzed, MANY // len(COMMANDS), False)
