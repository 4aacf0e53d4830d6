"""Every flag of every verb refuses values that its own rules exclude.

The values come from the rules of the settings (`low`, `high`, `share`, `choices`) and from the
types of the other flags: exit code 2, one line on stderr that names the flag, and nothing written.
"""

from __future__ import annotations

import argparse
import importlib
import re
import shutil
from dataclasses import Field, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from flexgen_h2o import cli
from flexgen_h2o.cli_common import boolean, count, file_name, flag_of, not_empty, number, positive
from flexgen_h2o.cli_common import share as a_share
from flexgen_h2o.core.config import MemoryBudget, Policy
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.settings import EvictionSettings, SamplingParams
from flexgen_h2o.flags import _arguments_of
from tests.doors.conftest import Door, parser_of
from tests.doors.test_refusals import everything
from tests.extras import needs

# A line of each verb that runs, but for the bad value behind it.
ENGINE = "--offload-dir offload"
LINES = {
    "generate": f"ids -i in.jsonl -o out.jsonl {ENGINE}",
    "batch": f"ids -i in.jsonl -o out.jsonl {ENGINE}",
    "complete": f"-m words -p a {ENGINE}",
    "bench": f"ids --prompt-len 8 --gen-len 4 {ENGINE}",
    "chat": f"words {ENGINE}",
    "serve": f"words --port 0 --dry-run {ENGINE}",
    "plan": f"ids --prompt-len 8 --max-tokens 4 --hardware t4 {ENGINE}",
    "hardware": ENGINE,
    "cache": ENGINE,
    "evaluate fidelity": f"opt-tiny {ENGINE}",
    "evaluate text": f"opt-tiny {ENGINE}",
    "evaluate streaming": f"opt-tiny {ENGINE}",
    "evaluate attention": f"opt-tiny {ENGINE}",
    "evaluate frontier": f"opt-tiny --prompts prompts.txt --json new.json {ENGINE}",
    "evaluate summarize": f"opt-tiny --input articles.jsonl --output new.jsonl {ENGINE}",
}
EXTRA_OF = {"serve": "serve", "evaluate summarize": "eval"}
OF_TYPE: dict[Any, tuple[str, ...]] = {
    int: ("", "x", "1.5", "nan"),
    float: ("", "x", "nan", "-1"),
    number: ("", "x", "nan", "inf", "-1", "12.5%"),
    a_share: ("", "x", "nan", "inf", "-1", "0", "1.5"),
    positive: ("", "x", "nan", "0", "-1", "1.5"),
    count: ("", "x", "nan", "-1", "1.5"),
    boolean: ("", "maybe"),
    file_name: ("", "in.jsonl/x.jsonl", "n" * 300 + ".jsonl", "~nosuchuser-at-all/x.jsonl"),
    not_empty: ("",),
}
SIZES = ("", "plenty", "0", "-1GiB", "nan", "12parsecs", "1e999", "²", "{}", "GiB")
# Settings whose rules are not in their metadata.
OWN_RULES = {
    "percent": (
        "100 0 100 0 100",
        "100 0 100 0 100 half",
        "33.3 0 0 0 0 0",
        "60 60 0 0 0 0",
        "0 0 101 0 0 0",
        "-5 0 0 0 0 0",
    ),
    "cache_bits": ("", "2", "5", "4/5", "4/2", "x"),
    "protect": ("", "half", "0", "-1", "1.5"),
    "cache_window": ("6",),
    "stop": ("",),
}
# A setting that is refused without another flag for that reason alone.
NEEDED = {"cache_window": ("--kv-bits", "4")}


# The settings, by the name of their flag.
SETTINGS = {
    f.metadata.get("flag", flag_of(f.name)): f
    for kind in (Policy, EvictionSettings, SamplingParams)
    for f in fields(kind)
}
BUDGETS = [f"{f.name}_mem" for f in fields(MemoryBudget)]


def out_of_range(f: Field[Any]) -> list[str]:
    """Values that the rules of a setting exclude."""
    rules = f.metadata
    found = [str(rules[name] + step) for name, step in (("low", -1), ("high", 1)) if name in rules]
    if str(f.type).startswith("float"):
        found += OF_TYPE[a_share if rules.get("share") else number]
    return [*found, *OWN_RULES.get(f.name, ())]


def bad_values(action: argparse.Action) -> list[str]:
    """Values that a flag must refuse."""
    if action.nargs == 0:
        return ["yes"]
    if action.dest in BUDGETS:
        return list(SIZES)
    found = [*OF_TYPE.get(action.type, ()), *(["nonsense"] if action.choices else [])]
    setting = SETTINGS.get(flag_of(action.dest))
    # A command may have a flag of its own under a setting's name, with another type.
    if setting is not None and _arguments_of(setting).get("type") == action.type:
        found += out_of_range(setting)
    return list(dict.fromkeys(found))


@pytest.fixture(autouse=True)
def _parsers_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Making them would take most of the time."""
    for name, _ in cli.VERBS.values():
        module = importlib.import_module(name)
        monkeypatch.setattr(module, "_parser", cache(module._parser))


@pytest.fixture(scope="module")
def folder(ids_model: Path, words_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a file of prompts, and models with and without a tokenizer."""
    folder = tmp_path_factory.mktemp("bad-values")
    (folder / "in.jsonl").write_text('{"prompt_token_ids": [4, 5]}\n')
    (folder / "prompts.txt").write_text("import os\n")
    (folder / "articles.jsonl").write_text('{"article": "import os", "summary_gt": "os"}\n')
    shutil.copytree(ids_model, folder / "ids")
    shutil.copytree(words_model, folder / "words")
    return folder


@pytest.mark.parametrize(
    "verb",
    [pytest.param(v, marks=needs(EXTRA_OF[v])) if v in EXTRA_OF else v for v in LINES],
)
def test_a_bad_value_is_refused_by_its_flags_name(
    verb: str, folder: Path, call: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    before = everything(folder)
    actions = [a for a in parser_of(verb)._actions if a.option_strings]
    wrong = []
    for action in actions:
        flag = next(name for name in action.option_strings if name.startswith("--"))
        # An older script's name may have become the flag's own.
        names = {name for a in actions if a.dest == action.dest for name in a.option_strings}
        for value in bad_values(action):
            bad = [flag, *value.split()] if action.nargs == 6 else [f"{flag}={value}"]
            needed = NEEDED.get(action.dest, ())
            answer = call(cli.main, *verb.split(), *LINES[verb].split(), *needed, *bad)
            found = names.intersection(re.findall(r"--[\w-]+", answer.err))
            one_line = answer.err.count("\n") == 1 and answer.out == ""
            if answer.code != 2 or not one_line or not found or everything(folder) != before:
                wrong.append(f"{bad} {answer}")
                before = everything(folder)
    assert len(actions) > 3 and not wrong, "\n".join(wrong)


@pytest.mark.parametrize("verb", [verb for verb in LINES if verb != "cache"])
def test_words_that_look_like_flags_are_values(verb: str) -> None:
    """`--` is taken as a text, or refused by the flag's name; Python 3.11 makes a list of it.

    A minus with a digit begins a wrong value. It is not a flag, without which the one before it
    would have no value.
    """
    parser = parser_of(verb)
    for action in parser._actions:
        for option in action.option_strings:
            if action.nargs == 0 or option[:2] != "--":
                continue
            value, said = parsed(parser, action, f"{option}=--")
            # The folder of --cache-dir is not taken before it exists.
            assert option in said or "--" in str(value) or action.dest == "path", option
            if action.nargs is None:
                _, said = parsed(parser, action, option, "-5GiB")
                assert not said or (option in said and "expected" not in said)


def parsed(
    parser: argparse.ArgumentParser, action: argparse.Action, *words: str
) -> tuple[object, str]:
    """A flag's value, and what is said if it is refused."""
    try:
        return getattr(parser.parse_args(words), action.dest), ""
    except UsageError as refusal:
        return None, str(refusal)
