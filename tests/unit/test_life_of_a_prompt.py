"""docs/developers/life-of-a-prompt.md names modules, functions and classes that exist.

No wording is tested: only that three numbered lists are short, and that each step names a place in
the code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "flexgen_h2o"
PAGE = ROOT / "docs" / "developers" / "life-of-a-prompt.md"
MOST_STEPS = 20
# `engine/executor.py`: `Executor.run_block`
PLACE = re.compile(r"`([\w/]+\.py)`:\s+`(\w+(?:\.\w+)*)`")
# From a number at the start of a line to the next one, or to an empty line.
STEP = re.compile(r"^\d+\. (.*?)(?=\n\d+\. |\n\n|\Z)", re.MULTILINE | re.DOTALL)


def lists(page: str) -> list[list[str]]:
    """Return the steps of each section that has numbered steps."""
    sections = re.split(r"^## ", page, flags=re.MULTILINE)
    return [steps for section in sections if (steps := STEP.findall(section))]


def missing(page: str) -> Iterator[str]:
    """Yield the places of a page that the package does not have."""
    for module, name in PLACE.findall(page):
        path = PACKAGE / module
        if not path.is_file() or not has_name(ast.parse(path.read_text()).body, name):
            yield f"{module}: {name}"


def has_name(body: list[ast.stmt], name: str) -> bool:
    """Return whether a module's or a class's body defines `Name` or `Class.method`."""
    first, _, rest = name.partition(".")
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == first:
            return not rest or (isinstance(node, ast.ClassDef) and has_name(node.body, rest))
    return False


def test_places_of_the_page_exist() -> None:
    assert list(missing(PAGE.read_text())) == []


def test_three_short_lists_name_a_place_in_each_step() -> None:
    found = lists(PAGE.read_text())
    assert len(found) == 3
    for steps in found:
        assert len(steps) <= MOST_STEPS
        assert [step for step in steps if not PLACE.search(step)] == []
