"""Links between the pages, and the names on them: every file, section, class and function that they
name is there.

Rules are functions from text to problems.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import re
import shlex
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from bench.planner import which_model
from bench.sweep import page as results_page
from flexgen_h2o.cli import VERBS
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.engine.memory_plan import checkpoint_bytes, packed_bytes
from flexgen_h2o.models.load import find_spec
from flexgen_h2o.planner.parts import CARDS
from scripts import flag_tables

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BESIDE = tuple(sorted((ROOT / "bench").rglob("*.md")))  # pages that lie beside the data

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
OUTSIDE = re.compile(r"[a-z]+:")
MENTION = re.compile(r'((?:docs|bench/results/notes)/[\w/-]+\.md)(?:, "([^"]+)")?')


def broken_links(page: str, at: Path) -> Iterator[str]:
    """Relative links of a page at the path `at` to a file that does not exist. Sections are checked
    by `mkdocs build`."""
    for link in LINK.findall(CODE.sub("", FENCE.sub("", page))):
        name = link.partition("#")[0]
        if name and not OUTSIDE.match(link):
            target = (at.parent / name).resolve()
            if not (target.exists() and target.is_relative_to(ROOT)):
                yield f"{link}: no such file"


def broken_mentions(text: str) -> Iterator[str]:
    """Pages that a comment names, also with a section's title in quotes behind a comma, and that do
    not exist."""
    for name, title in MENTION.findall(text):
        if not (ROOT / name).exists():
            yield f"{name}: no such file"
        elif title and title not in HEADING.findall((ROOT / name).read_text()):
            yield f'{name}, "{title}": no such section'


FILE = re.compile(r"[\w./-]+\.(?:py|sh)|[\w/]+/")
NAME = re.compile(r"(?:(?P<folder>\w+(?:/\w+)*)/)?(?P<first>\w+)(?P<rest>(?:\.\w+)+)(?:\(.*\))?")


@cache
def defined() -> dict[str, set[str]]:
    """What each module, by its path and by its last part, and each class defines: `Name`,
    `Class.name`."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "flexgen_h2o").rglob("*.py")):
        module = (
            path.relative_to(ROOT / "flexgen_h2o")
            .with_suffix("")
            .as_posix()
            .removesuffix("/__init__")
        )
        body = ast.parse(path.read_text()).body
        names = set(_names(body))
        for node in body:
            if isinstance(node, ast.ClassDef):
                names |= {f"{node.name}.{name}" for name in _names(node.body)}
                found[node.name] |= set(_names(node.body))
        for key in (module, module.rpartition("/")[2]):
            found[key] |= names
    return found


def _names(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        if isinstance(node, ast.FunctionDef):  # attributes that a method sets
            yield from (
                n.attr
                for n in ast.walk(node)
                if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
            )
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (
                n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)
            )


def unknown_names(page: str) -> Iterator[str]:
    """Files, and names of modules and classes (`tiers/stream.Ring`, `Ring.take`), that the package
    does not have."""
    for span in (code.strip("`") for code in CODE.findall(FENCE.sub("", page))):
        if FILE.fullmatch(span):
            tops = [ROOT, ROOT / "flexgen_h2o", *(ROOT / "flexgen_h2o").glob("*/")]
            if not any((top / span).exists() for top in tops) and span.partition("/")[0] in {
                t.name for t in tops
            }:
                yield span
        elif (match := NAME.fullmatch(span)) and span.rpartition(".")[2] not in (
            "md",
            "json",
            "jsonl",
            "py",
            "sh",
        ):
            owner = "/".join(filter(None, (match["folder"], match["first"])))
            if owner in defined():
                if match["rest"][1:] not in defined()[owner]:
                    yield span
            elif match["folder"] and match["folder"].partition("/")[0] in defined() | {
                "core": set()
            }:
                yield span


BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:flexgen-h2o|python -m flexgen_h2o\.(?P<module>\w+)) +(?P<words>.*)")


def refused_commands(page: str) -> Iterator[str]:
    """Command lines of a page's shell blocks that their own parser does not take. `...` stands for
    more flags."""
    for language, body in BLOCK.findall(page):
        for line in body.replace("\\\n", " ").splitlines() if language in ("bash", "sh") else ():
            for found in map(COMMAND.search, re.split(r" \| | && |;", line)):
                if found and "..." not in found["words"]:
                    words = shlex.split(found["words"].partition(" > ")[0], comments=True)
                    if problem := _refused(found["module"] or "cli", words):
                        yield f"{found[0]}: {problem}"


def _refused(module: str, words: list[str]) -> str | None:
    if module == "cli":
        verb, *words = words
        if verb.startswith("--"):
            return None
        if verb not in VERBS:
            return f"no verb {verb}"
        module = VERBS[verb][0].rpartition(".")[2]
    try:
        parser_of(module).parse_args(words)
    except (UsageError, SystemExit) as error:
        return str(error)
    return None


@cache
def parser_of(module: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = importlib.import_module(f"flexgen_h2o.{module}")._parser()
    return parser


def program_files() -> Iterable[Path]:
    folders = [ROOT / name for name in ("flexgen_h2o", "tests", "bench", "scripts")]
    found = (
        path
        for folder in folders
        for pattern in ("*.py", "*.sh")
        for path in sorted(folder.rglob(pattern))
    )
    return (path for path in found if path != Path(__file__))


def test_links_lead_somewhere() -> None:
    pages = (*PAGES, *BESIDE)
    assert [
        f"{page}: {problem}" for page in pages for problem in broken_links(page.read_text(), page)
    ] == []


def test_comments_name_pages_and_sections_that_exist() -> None:
    broken = [
        f"{path}: {problem}"
        for path in program_files()
        for problem in broken_mentions(path.read_text())
    ]
    assert broken == []


def test_pages_name_what_the_package_has() -> None:
    pages = [page for page in PAGES if page.parent.name == "developers"]
    pages += [ROOT / "docs" / "reference" / f"{name}.md" for name in ("jobs", "eviction")]
    assert [
        f"{page.name}: {name}" for page in pages for name in unknown_names(page.read_text())
    ] == []


# `engine/executor.py`: `Executor.run_block`
PLACE = re.compile(r"`([\w/]+)\.py`:\s+`(\w+(?:\.\w+)*)`")
# From a number at the start of a line to the next one, or to an empty line.
STEP = re.compile(r"^\d+\. (.*?)(?=\n\d+\. |\n\n|\Z)", re.MULTILINE | re.DOTALL)
MOST_STEPS = 20


def test_the_life_of_a_prompt_is_three_short_lists_of_places_that_exist() -> None:
    page = (ROOT / "docs" / "developers" / "life-of-a-prompt.md").read_text()
    places = PLACE.findall(page)
    places = [(module.removesuffix("/__init__"), name) for module, name in places]
    assert [place for place in places if place[1] not in defined()[place[0]]] == []
    lists = [steps for section in page.split("\n## ") if (steps := STEP.findall(section))]
    assert len(lists) == 3 and max(map(len, lists)) <= MOST_STEPS
    assert [step for steps in lists for step in steps if not PLACE.search(step)] == []


def test_every_page_is_reached_from_another() -> None:
    linked = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in PAGES
        for link in LINK.findall(page.read_text())
        if not OUTSIDE.match(link)
    }
    assert [str(page) for page in PAGES[1:] if page not in linked] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_taken_by_their_parsers(page: Path) -> None:
    assert list(refused_commands(page.read_text())) == []


def test_python_of_the_pages_is_python() -> None:
    for page in PAGES:
        for language, body in BLOCK.findall(page.read_text()):
            if language == "python":
                ast.parse(textwrap.dedent(body), filename=str(page))


def test_readme_names_the_tests_that_hold_its_promises() -> None:
    text = (ROOT / "README.md").read_text()
    promises = (
        text.partition("## What you can rely on")[2].partition("\nMore: ")[0].split("\n- ")[1:]
    )
    assert len(promises) == 5
    for promise in promises:
        named = re.findall(r"`(tests/[\w/]+\.py)`", promise)
        assert named, promise
        for name in named:
            assert "def test_" in (ROOT / name).read_text(), name


def test_every_command_has_its_flags_on_a_page() -> None:
    shown = [
        command for page in PAGES for command, _ in flag_tables.MARKS.findall(page.read_text())
    ]
    assert len(shown) == len(set(shown))
    assert {flag_tables.SHARED, *flag_tables.documented()} <= set(shown)


def test_tables_of_flags_are_those_of_the_parsers() -> None:
    old = [
        page.name
        for page in flag_tables.pages()
        if flag_tables.filled(page.read_text(), page) != page.read_text()
    ]
    assert not old, (
        f"flags have changed; write the tables of {', '.join(old)} again: {flag_tables.COMMAND}"
    )


def test_pages_name_flags_that_exist() -> None:
    """Of the lab notes, flags are those of the benchmarks too. A parser takes `_` for `-`."""
    taken = {flag for parser in flag_tables.parsers().values() for flag in parser.spellings}
    known = taken | {flag.replace("-", "_").replace("__", "--", 1) for flag in taken}
    pages = [page for page in PAGES if page.parent.name != "lab"]
    named = {
        flag for page in pages for flag in re.findall(r"`(--[\w-]+)[^`\n]*`", page.read_text())
    }
    assert named <= known, sorted(named - known)


def test_figures_of_the_pages_are_of_the_stored_lines() -> None:
    """Of README, Results, and the pages beside the lines. `python -m bench.sweep.page` makes them
    anew."""
    of_pages, beside = results_page.made(results_page.RESULTS)
    for name in results_page.PAGES:
        text = (ROOT / name).read_text()
        assert results_page.replaced(text, of_pages) == text, name
    for name, text in beside.items():
        assert (results_page.RESULTS / name).read_text() == text, name


def test_prompts_per_night_are_of_the_stored_lines() -> None:
    """The tables of Start's page on models, of `python -m bench.planner.which_model --cells`, and
    with `--owned`."""

    def lines(name: str) -> Iterator[dict[str, Any]]:
        yield from map(json.loads, (results_page.RESULTS / name).read_text().splitlines())

    nights: dict[tuple[object, ...], int] = {}
    for line in lines("which_model.jsonl"):
        asked = line["asked"]
        nights[asked["model"].rpartition("/")[2], asked["ram"], asked["card"]] = line["night"]
    for line in lines("which_model_owned.jsonl"):
        words = shlex.split(line["asked"])
        nights[words[1].rpartition("/")[2], words[words.index("--hardware") + 1]] = line["night"]
    page = (ROOT / "docs" / "start" / "which-model.md").read_text()
    owned, by_ram = page.split("## How much RAM helps")
    owned_places = [(hardware,) for hardware in which_model.OWNED.values()]
    for text, places in (
        (owned, owned_places),
        (by_ram, [(8, 0), (16, 0), (32, 0), (32, 16)]),
    ):
        rows = re.findall(r"^\| ([\w.-]+) \|([\d ,|]+)\|$", text, re.MULTILINE)
        assert len(rows) >= 4
        for model, figures in rows:
            shown = [int(figure.replace(",", "")) for figure in figures.split("|")]
            assert shown == [nights[(model, *place)] for place in places], model
    for hardware in which_model.OWNED.values():
        assert f"`{hardware}`" in owned
    sizes = re.findall(r"^\| ([\w.-]+) \| ([\d.]+) GB \| ([\d.]+) GB \|$", by_ram, re.MULTILINE)
    organisations = {name.rpartition("/")[2]: name for name in which_model.MODELS}
    assert {model for model, _, _ in sizes} == set(re.findall(r"^\| ([\w.]+-[\w.-]+) ", page, re.M))
    for model, download, copy in sizes:
        spec = find_spec(organisations[model], None)
        packed = packed_bytes(spec, Policy(compress_weight=True), 2)
        assert [download, copy] == [f"{checkpoint_bytes(spec, 2) / 1e9:.1f}", f"{packed / 1e9:.1f}"]


def test_the_page_on_plans_has_the_memory_of_each_gpu() -> None:
    page = (ROOT / "docs" / "reference" / "commands" / "plan.md").read_text()
    assert ", ".join(f"`{name}` {card.gib:g}" for name, card in CARDS.items()) + ";" in page
