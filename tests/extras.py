"""Skips tests whose extra of setup.py is not installed; the reason names the extra."""

from __future__ import annotations

import ast
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]


@cache
def extras() -> dict[str, list[str]]:
    """Return the literal EXTRAS of setup.py: the requirements of each extra."""
    for node in ast.parse((ROOT / "setup.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXTRAS":
            found: dict[str, list[str]] = ast.literal_eval(node.value)
            return found
    raise AssertionError("setup.py has no EXTRAS")


def is_installed(requirement: str) -> bool:
    """Tell whether a version of it is there. A package that is there and cannot be imported fails
    its tests."""
    try:
        return bool(version(Requirement(requirement).name))
    except PackageNotFoundError:
        return False


@cache
def why_not(extra: str) -> str:
    """Return why tests that need the extra cannot run; empty if they can."""
    missing = [Requirement(one).name for one in extras()[extra] if not is_installed(one)]
    return f"needs the extra {extra} (not installed: {', '.join(missing)})" if missing else ""


def needs(extra: str) -> pytest.MarkDecorator:
    """Mark a test, or a whole file with `pytestmark = needs(...)`, that uses packages of the
    extra."""
    return pytest.mark.skipif(bool(why_not(extra)), reason=why_not(extra))
