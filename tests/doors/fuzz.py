"""Hostile command lines, drawn from each command's own parser, with damaged files; and what must
hold for all."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from flexgen_h2o import cli
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.units import parse_bytes
from tests.doors.measured import BUG, DIED, Ended

BUDGET = 64 << 20
MAX_BEYOND = 300_000_000
LENGTHS = ["--prompt-len", "8", "--gen-len", "4"]
ENGINE = ["--model", "words", "--offload-dir", "offload", "--host-mem", "64MiB"]
# A short run of each command, which the drawn flags change.
BASE: dict[str, list[str]] = {
    "flex-opt": [*ENGINE, *LENGTHS],
    "plan": [*ENGINE, *LENGTHS, "--num-prompts", "8"],
    "hardware": ["--offload-dir", "offload"],
    "batch": [*ENGINE, "--input", "in.jsonl", "--output", "new.jsonl", "--gen-len", "4"],
    "complete": [*ENGINE, "--prompts", "prompts.txt", "--gen-len", "4"],
    "chat": [*ENGINE, "--gen-len", "4"],  # nothing is said: standard input is empty
    "evaluate fidelity": [
        *ENGINE,
        *LENGTHS,
        "--prompts",
        "prompts.txt",
        "--num-prompts",
        "1",
        "--policies",
        "h2o",
        "--budgets",
        "0.5",
        "--resamples",
        "9",
        "--keep-mem",
        "16MiB",
    ],
    "evaluate attention": [
        *ENGINE,
        "--prompts",
        "prompts.txt",
        "--num-prompts",
        "1",
        "--prompt-len",
        "12",
        "--gen-len",
        "4",
        "--remove",
        "0.25",
        "--sinks",
        "1",
        "--resamples",
        "9",
        "--keep-mem",
        "16MiB",
    ],
    "evaluate text": [*ENGINE, "--prompts", "prompts.txt", "--gen-len", "4", "--hh-size", "2"],
    "evaluate streaming": [
        *ENGINE,
        "--turns",
        "turns.jsonl",
        "--num-turns",
        "1",
        "--gen-len",
        "4",
        "--policies",
        "h2o",
        "--hh-size",
        "4",
    ],
}
# Good values of flags that take a text or a file, by the flag's name in the parsed arguments.
GOOD: dict[str, tuple[str, ...]] = {
    "model": ("words", "ids", "damaged", "opt-tiny"),
    "path": ("_DUMMY_", "."),
    "offload_dir": ("offload", "a/b"),
    "device": ("auto", "cpu", "cuda"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    **dict.fromkeys(
        ("device_mem", "host_mem", "disk_mem", "keep_mem"), ("64MiB", "32MB", "256MiB", "1KiB")
    ),
    "policy": ("auto", "policy.json"),
    "hardware": ("profile.json", "t4"),
    "show": ("profile.json", "t4"),
    "eviction": (
        "full",
        "local",
        "h2o",
        "h2o-norm",
        "tova",
        "snapkv",
        "h2o-v",
        "random",
        "h2o-norm:sinks=0",
    ),
    "policies": ("full", "h2o", "local", "h2o:positions=rolling"),
    "prompts": ("prompts.jsonl", "prompts.txt"),
    "input": ("in.jsonl", "prompts.jsonl"),
    "text": ("prompts.txt",),
    "turns": ("turns.jsonl", "prompts.txt"),
    "output": ("new.jsonl", "done.jsonl", "new.json"),
    "json": ("new.json",),
    "trace": ("trace.json",),
    "plot": ("plot.svg", "plot.png"),
    "markdown": ("new.md",),
    "log_file": ("auto", "log"),
    "percent": ("0", "30", "50", "100"),
    "turn_format": (r"\n{turn}",),
    "sinks": ("0", "2"),
}
NUMBERS = {
    "int": ("0", "1", "2", "5", "8"),
    "float": ("0.2", "0.5", "1", "0.9"),
    "boolean": ("true", "no", "0"),
}
WHOLE = ("1", "2", "3", "7", "16")
HOSTILE_NUMBERS = (
    "",
    "--",
    "-1",
    "0",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "1e-320",
    "1.5",
    "9" * 30,
    "9" * 5000,
    "65536",
    "99999999",
    "0x10",
    "1_000",
    "٣",
    "²",
    "12parsecs",
    "-1GiB",
    "1e30GiB",
    "true",
    "NaN",
)
HOSTILE_WORDS = (
    "",
    "--",
    " ",
    "-",
    "{}",
    "[]",
    "null",
    "h2o:",
    "h2o:a=b",
    "h2o:,=",
    "h2o-norm:sinks=nan",
    "a\nb",
    "a\tb\r",
    "x" * 300,
    "%s%n",
    "{turn",
    "{0}",
    "{turn.x}",
    "$HOME",
    "facebook/opt-none",
    "*",
    "\x1b[31m",
    "_DUMMY_x",
    "auto",
    "none",
    "é🦙",
    "\udcff",
)
HOSTILE_PATHS = (
    "",
    "--",
    "/no/such/file.json",
    "/no/such.jsonl",
    "/dev/zero",
    "/dev/null",
    "/dev/zero/x.jsonl",
    ".",
    "..",
    "offload",
    "policy.json",
    "policy.json/x",
    "folder.json",
    "folder.jsonl",
    "zero.jsonl",
    "zero.txt",
    "null.jsonl",
    "in.jsonl",
    "new.jsonl",
    "~nobody-here/x",
    "x" * 300,
    "x" * 5000 + ".jsonl",
    "a/b/c",
    "\udcff.jsonl",
    "é🦙.json",
    "\u202e.txt",
    "a\nb.jsonl",
    "words/model.safetensors",
)
HOSTILE = (*HOSTILE_NUMBERS, *HOSTILE_WORDS, *HOSTILE_PATHS)
# Flags that name files and folders, by their name in the parsed arguments.
PATHS = {
    "model",
    "path",
    "offload_dir",
    "policy",
    "hardware",
    "show",
    "prompts",
    "input",
    "turns",
    "text",
    "output",
    "json",
    "trace",
    "plot",
    "markdown",
    "log_file",
}
DAMAGED_MODEL = ("damaged/config.json", "damaged/tokenizer_config.json", "damaged/tokenizer.json")
SIDE_FILES = ("done.jsonl.job.json", "done.jsonl.status.json")
JSON_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1.5,
    math.nan,
    math.inf,
    10**400,
    2**63,
    "",
    "x",
    "\ud800",
    "9" * 5000,
    [],
    [[]],
    {},
    {"x": None},
)


@dataclass(frozen=True)
class Damage:
    """What is done to a file. where: a share of it. what: bytes, or a JSON value instead of one
    that is there."""

    file: str
    how: str
    where: float
    what: Any

    def apply(self, data: bytes) -> bytes:
        at = int(self.where * len(data))
        match self.how:
            case "overwrite":
                return data[:at] + self.what + data[at + len(self.what) :]
            case "insert":
                return data[:at] + self.what + data[at:]
            case "cut":
                return data[:at]
            case "empty":
                return b""
        lines = data.split(b"\n") if self.file.endswith("jsonl") else [data]
        index = min(at * len(lines) // max(1, len(data)), len(lines) - 1)
        with contextlib.suppress(ValueError):
            lines[index] = json.dumps(
                _with_value(json.loads(lines[index]), self.where, self.what)
            ).encode()
        return b"\n".join(lines)


def _with_value(tree: Any, where: float, value: Any) -> Any:
    """The tree with one of its values, objects and lists among them, replaced."""
    places = list(_places(tree))
    if not places:
        return value
    holder, key = places[int(where * 997 * len(places)) % len(places)]
    holder[key] = value
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(tree, dict | list):
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield tree, key
            yield from _places(tree[key])


@dataclass(frozen=True)
class Case:
    """A command line as `flexgen-h2o` takes it, and what is damaged before."""

    argv: tuple[str, ...]
    damages: tuple[Damage, ...] = ()


# ---- Parsers

ENDING = [
    verb for verb in cli.VERBS if verb != "serve"
]  # a signal ends that, and tests/serving its wrong flags


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of every verb that ends by itself, and of every measure of a verb that has
    several."""
    found: dict[str, argparse.ArgumentParser] = {}
    for verb in ENDING:
        seen: list[argparse.ArgumentParser] = []

        def stop(
            parser: argparse.ArgumentParser, *args: Any, seen: list[Any] = seen, **how: Any
        ) -> Any:
            seen.append(parser)
            raise SystemExit(0)

        with (
            mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            cli.main([verb, "--help"])
        [parser] = seen
        below = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        found |= {f"{verb} {name}": p for a in below for name, p in a.choices.items()} or {
            verb: parser
        }
    return found


# ---- Strategies

# No "/", "~" or ".": a drawn name stays in the working folder.
TEXTS = st.text(st.characters(exclude_characters="/~.\0", exclude_categories=["Cs"]), max_size=20)


def good_values(action: argparse.Action) -> tuple[str, ...]:
    if action.choices is not None:
        return tuple(map(str, action.choices))
    if action.dest in GOOD:
        return GOOD[action.dest]
    kind = getattr(action.type, "__name__", "")
    return NUMBERS.get(kind, WHOLE if action.type is not None else ("x", "a text"))


def values(action: argparse.Action) -> st.SearchStrategy[list[str]]:
    """The words after a flag: mostly as many as it takes, and mostly such as it takes."""
    good = st.sampled_from(good_values(action))
    own = (
        HOSTILE_PATHS
        if action.dest in PATHS
        else HOSTILE_NUMBERS
        if action.type is not None
        else HOSTILE_WORDS
    )
    one = st.one_of(
        good, good, st.sampled_from(own), st.sampled_from(own), st.sampled_from(HOSTILE), TEXTS
    )
    most = {None: 1, "?": 1, "+": 3, "*": 3}.get(action.nargs, action.nargs)
    assert isinstance(most, int)
    least = {"?": 0, "*": 0, "+": 1}.get(str(action.nargs), most)
    right = st.lists(one, min_size=least, max_size=most)
    allowed = st.lists(good, min_size=least, max_size=most)
    return st.integers(0, 19).flatmap(
        lambda n: st.lists(one, max_size=most + 1) if n == 0 else allowed if n < 13 else right
    )


@st.composite
def flag_with_values(draw: st.DrawFn, action: argparse.Action) -> list[str]:
    flag = draw(st.sampled_from(action.option_strings))
    words = draw(values(action))
    if len(words) == 1 and draw(st.booleans()):
        return [f"{flag}={words[0]}"]
    return [flag, *words]


def damages(files: Sequence[str]) -> st.SearchStrategy[Damage]:
    where = st.floats(0, 1, exclude_max=True)
    named = st.sampled_from(files)
    raw = st.builds(
        Damage,
        named,
        st.sampled_from(["overwrite", "insert"]),
        where,
        st.binary(min_size=1, max_size=8),
    )
    cut = st.builds(Damage, named, st.sampled_from(["cut", "empty"]), where, st.none())
    value = st.builds(Damage, named, st.just("value"), where, st.sampled_from(JSON_VALUES))
    return st.one_of(raw, cut, value, value)


# The flags that read a damaged file, with good names, by a flag that a command must have.
READ_BY: dict[str, dict[str, str]] = {
    "policy": {"--policy": "policy.json"},
    "hardware": {"--hardware": "profile.json"},
    "show": {"--show": "profile.json"},
    "prompts": {"--prompts": "prompts.jsonl"},
    "input": {"--input": "in.jsonl"},
    "turns": {"--turns": "turns.jsonl"},
    "model": {"--model": "damaged"},
    "force": {"--output": "done.jsonl"},
    "status": {"--output": "done.jsonl", "--status": ""},
}


@st.composite
def damaged_file(draw: st.DrawFn, dests: set[str]) -> tuple[list[str], list[Damage]]:
    """Flags that read a file which is damaged, once or twice."""
    read = READ_BY[draw(st.sampled_from(sorted(dests & READ_BY.keys())))]
    words = [word for pair in read.items() for word in pair if word]
    names = [name for name in read.values() if name]
    job = (*names, *SIDE_FILES, *SIDE_FILES) if "done.jsonl" in names else names
    files = DAMAGED_MODEL if "damaged" in names else job
    return words, draw(st.lists(damages(files), min_size=1, max_size=2))


@st.composite
def cases(draw: st.DrawFn, command: str, parser: argparse.ArgumentParser) -> Case:
    """A short run with some of its flags changed; every other one reads a damaged file."""
    actions = [a for a in parser._actions if a.option_strings]
    words = []
    damaged = []
    if {a.dest for a in actions} & READ_BY.keys() and draw(st.booleans()):
        words, damaged = draw(damaged_file({a.dest for a in actions}))
    files = [a for a in actions if a.dest in PATHS]
    one = st.sampled_from(actions) | st.sampled_from(files) if files else st.sampled_from(actions)
    chosen = draw(st.lists(one, min_size=0 if damaged else 1, max_size=4))
    for action in chosen:
        words += draw(flag_with_values(action))
    if draw(st.integers(0, 29)) == 0:
        words.insert(
            draw(st.integers(0, len(words))), draw(st.one_of(st.sampled_from(HOSTILE), TEXTS))
        )
    if damaged and any(
        "_DUMMY_" in word for word in words
    ):  # weights of whatever shape the damaged file says
        words = [word.replace("_DUMMY_", "DUMMY") for word in words]
    return Case((*command.split(), *BASE.get(command, ()), *words), tuple(damaged))


def verbs() -> st.SearchStrategy[Case]:
    """Lines of the console command itself."""
    words = st.one_of(
        st.sampled_from([*ENDING, "--version", "-h", "--help"]), st.sampled_from(HOSTILE), TEXTS
    )
    hostile = st.one_of(st.sampled_from(HOSTILE), TEXTS)
    lines = st.tuples(words, hostile)
    return lines.filter(lambda line: line[0] != "hardware" or line[1]).map(Case)


# ---- Verdict


def budget_of(argv: Sequence[str]) -> int:
    """Bytes of RAM that a line allows, at most."""
    total = 0
    for flag, usual in (("--host-mem", BUDGET), ("--device-mem", 0), ("--keep-mem", 0)):
        given = [b for a, b in zip(argv, [*argv[1:], ""], strict=True) if a == flag]
        given += [word.partition("=")[2] for word in argv if word.startswith(f"{flag}=")]
        found = [usual]
        for text in given:
            with contextlib.suppress(UsageError, ValueError, OverflowError):
                found.append(parse_bytes(text, flag))
        total += max(found)
    return total


def problems(case: Case, ended: Ended) -> list[str]:
    """What is wrong with how a line ended, in words; empty where nothing is."""
    lines = ended.err.split("\n")[:-1] if ended.err.endswith("\n") else ended.err.split("\n")
    # weights that will stay were announced
    found = []
    lines = [line for line in lines if not line.startswith("# ")]
    if ended.code >= BUG or "Traceback" in ended.err:
        return [f"traceback: {ended.err[-1500:]}"]
    if ended.code >= DIED:
        return [f"ended by signal {ended.code - DIED}: {ended.err[-1500:]}"]
    if ended.code not in (0, 2, 3, 4):
        found.append(f"exit code {ended.code}: {ended.err[-600:]}")
    if ended.code in (2, 3) and len(lines) != 1 and len(case.argv) > 0:
        found.append(
            f"exit code {ended.code} with {len(lines)} lines on stderr:\n{ended.err[-1500:]}"
        )
    if ended.code == 4 and len([line for line in lines if line]) > 1:
        found.append(f"exit code 4 with {len(lines)} lines on stderr:\n{ended.err[-1500:]}")
    beyond = ended.nbytes - budget_of(case.argv)
    if beyond > MAX_BEYOND:
        found.append(f"{beyond / 1e6:.0f} MB above the budget")
    return found
