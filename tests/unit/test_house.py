"""The rules of the house: who may import whom, where names may be compared, how large a tracked
file may be.

A rule is a function from sources to problems. It is run on the tree, and most are run on snippets
that they must find or let pass.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "flexgen_h2o"

# The rooms (files and folders of the package), each below the rooms that it may import from.
EDGES = {
    room: frozenset(others.split())
    for room, others in {
        "synonyms": "",
        "core": "",
        "kernels": "core",
        "tiers": "core",
        "checkpoint": "core kernels tiers",
        "models": "core kernels checkpoint",
        "kvcache": "core kernels tiers",
        "engine": "core kernels tiers checkpoint models kvcache",
        "planner": "core kernels tiers checkpoint models kvcache engine synonyms",
        "llm": "core kernels tiers checkpoint models kvcache engine planner",
        "integrations": "core kvcache",
        "parser": "core synonyms",
        "cli_common": "core checkpoint parser",
        "flags": "core tiers checkpoint models kvcache engine planner llm cli_common parser "
        "synonyms",
        "opening": "core engine planner",
        "jobs": "core tiers models kvcache engine llm cli_common parser flags opening",
        "evaluation": "core models kvcache engine llm cli_common parser flags jobs",
        "serving": "core engine models llm cli_common jobs",
        "flex_opt": "core kvcache engine cli_common parser flags",
        "generate": "core kvcache engine cli_common parser flags opening jobs",
        "complete": "core engine cli_common parser flags generate",
        "chat": "core kvcache engine cli_common parser flags evaluation",
        "policy_search": "core tiers checkpoint models kvcache engine planner cli_common parser "
        "flags",
        "hardware": "core planner cli_common parser flags",
        "doctor": "core kernels tiers engine planner cli_common parser",
        "batch": "core cli_common parser flags generate",
        "serve": "core tiers kvcache planner cli_common parser flags policy_search jobs serving",
        "evaluate": "core kvcache cli_common parser flags evaluation",
        "cache": "core tiers checkpoint models cli_common parser",
        "cli": "core synonyms cli_common",
    }.items()
}
# What of the planner needs torch: it measures, and plans for the rows and the processes of a run.
WITH_TORCH = (f"{PACKAGE}.planner.measure", f"{PACKAGE}.planner.plans")
# What else must be imported without torch, so that the planner can use it.
WITHOUT_TORCH = tuple(
    f"{PACKAGE}.{name}"
    for name in (
        "engine.loop",
        "engine.memory",
        "engine.memory_plan",
        "engine.report",
        "tiers.stream",
        "checkpoint.formats",
    )
)

MAX_TRACKED_BYTES = 15_000_000

FAMILY = re.compile(r"(opt|llama|gpt_?neox|neox|mistral|qwen\d?|galactica)", re.IGNORECASE)
FAMILY_FIELDS = {"model_type", "family"}
DEVICE = re.compile(r"(cuda|cpu|mps)(:\d+)?")


@dataclass(frozen=True)
class Source:
    """One Python file. path: from the repository root."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def room(self) -> str | None:
        """None for the package's own `__init__.py` and outside the package."""
        parts = self.module.split(".")
        return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else None

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        """Lines and names (`flexgen_h2o.llm.LLM`) of imports, except those for type checkers."""
        return list(self._imports(self.tree))

    def _imports(self, node: ast.AST) -> Iterator[tuple[int, str]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from ((child.lineno, alias.name) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert not child.level, f"{self.path}:{child.lineno}: a relative import"
                yield from ((child.lineno, f"{child.module}.{one.name}") for one in child.names)
            elif not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
                yield from self._imports(child)

    @property
    def rooms(self) -> Iterator[tuple[int, str, str]]:
        """The imports that lead into another room, each with it."""
        for line, name in self.imports:
            parts = name.split(".")
            if parts[0] == PACKAGE and len(parts) > 1 and parts[1] != self.room:
                yield line, name, parts[1]


@cache
def python_files(*folders: str) -> list[Source]:
    paths = (path for folder in folders for path in sorted((ROOT / folder).rglob("*.py")))
    return [
        Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        for path in paths
    ]


# ---- Rules of the package


def unplaced_rooms(sources: Iterable[Source]) -> list[str]:
    rooms = {source.room for source in sources} - {None, *EDGES}
    return sorted(f"{PACKAGE}/{room}: a new room; place it in EDGES" for room in rooms)


def forbidden_edges(sources: Iterable[Source]) -> list[str]:
    found = []
    for source in sources:
        for line, name, room in source.rooms if source.room in EDGES else ():
            where = f"{source.path}:{line}"
            if room not in EDGES:
                found.append(
                    f"{where}: {name} is not a room; import the name from the room that has it"
                )
            elif room not in EDGES[source.room]:
                found.append(f"{where}: {source.room} must not know {room}")
    return list(dict.fromkeys(found))


def unused_edges(sources: Iterable[Source]) -> list[str]:
    used: dict[str | None, set[str]] = {}
    for source in sources:
        used.setdefault(source.room, set()).update(room for *_, room in source.rooms)
    return sorted(
        f"{room} may import {other} and does not: take the edge out of EDGES"
        for room, others in EDGES.items()
        for other in others - used.get(room, others)
    )


def compared(
    sources: Iterable[Source], text: re.Pattern[str], names: set[str], advice: str
) -> list[str]:
    """`==`, `in`, `match`, `startswith` and `endswith` with a string that is `text`, or with an
    attribute or a key that is one of `names`."""
    found = []
    for source in sources:
        for node in ast.walk(source.tree):
            method = node.func if isinstance(node, ast.Call) else None
            if not isinstance(node, ast.Compare | ast.MatchValue) and (
                getattr(method, "attr", "") not in ("startswith", "endswith")
            ):
                continue
            for part in ast.walk(node):
                value = getattr(part, "value", None)
                is_text = isinstance(value, str) and (value in names or text.fullmatch(value))
                if is_text or getattr(part, "attr", "") in names:
                    line = getattr(node, "lineno", 0)
                    found.append(f"{source.path}:{line}: compares {ast.unparse(part)}; {advice}")
    return found


def family_comparisons(sources: Iterable[Source]) -> list[str]:
    outside = [source for source in sources if source.room not in {"models", "integrations"}]
    return compared(
        outside,
        FAMILY,
        FAMILY_FIELDS,
        "ask the family's object, only models/ knows families by name",
    )


def device_comparisons(sources: Iterable[Source]) -> list[str]:
    outside = [source for source in sources if source.room not in {"tiers", "kernels"}]
    return compared(
        outside, DEVICE, set(), "give the tier or kernel a method, only they know devices by name"
    )


def stray_launches(sources: Iterable[Source]) -> list[str]:
    """Triton's kernels that are reached beside kernels.triton.launch, which the fake card counts
    and replaces."""
    room = f"{PACKAGE}.kernels.triton"
    found = list[str]()
    for source in sources:
        if source.module == room:
            continue
        if source.module.startswith(f"{room}."):
            lines = [
                n.lineno
                for n in ast.walk(source.tree)
                if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript)
            ]
        else:
            inside = (f"{room}.", "triton.")
            targets = ((line, f"{name}.") for line, name in source.imports)
            lines = [
                line
                for line, target in targets
                if target.startswith(inside) and target != f"{room}."
            ]
        found += [
            f"{source.path}:{line}: kernels are launched by kernels.triton.launch alone"
            for line in lines
        ]
    return found


def folders_without_init(sources: Iterable[Source]) -> list[str]:
    paths = {source.path for source in sources}
    missing = {f"{path.rpartition('/')[0]}/__init__.py" for path in paths} - paths
    return [f"{path} is missing: setup.py would not install its folder" for path in sorted(missing)]


def repeated_class_names(sources: Iterable[Source]) -> list[str]:
    """Return the classes that share a name with another class of the package."""
    places: dict[str, list[str]] = {}
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{source.path}:{node.lineno}")
    return [
        f"{', '.join(found)}: two classes are called {name}; rename one"
        for name, found in places.items()
        if len(found) > 1
    ]


def packed_assignments(sources: Iterable[Source]) -> list[str]:
    """Return assignments of several values in one statement. A swap is allowed."""
    return [
        f"{source.path}:{node.lineno}: assign each value in a statement of its own"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Assign) and _is_packed(node)
    ]


def _is_packed(node: ast.Assign) -> bool:
    target = node.targets[0]
    if not isinstance(target, ast.Tuple) or not isinstance(node.value, ast.Tuple):
        return False
    written = [ast.unparse(one) for one in target.elts]
    return not any(name in ast.unparse(value) for name in written for value in node.value.elts)


def unformatted_lines(sources: Iterable[Source]) -> list[str]:
    """Return the lines that the formatter is told to leave alone."""
    return [
        f"{source.path}:{number}: let the formatter write it"
        for source in sources
        for number, line in enumerate(source.text.splitlines(), 1)
        if "# fmt:" in line
    ]


RULES = (
    unplaced_rooms,
    forbidden_edges,
    unused_edges,
    family_comparisons,
    device_comparisons,
    stray_launches,
    folders_without_init,
    repeated_class_names,
    packed_assignments,
    unformatted_lines,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree(rule) -> None:
    problems = rule(python_files(PACKAGE))
    assert not problems, "\n" + "\n".join(problems)


def test_the_planner_is_imported_without_torch() -> None:
    planner = (source.module for source in python_files(f"{PACKAGE}/planner"))
    modules = [*(name for name in planner if not name.startswith(WITH_TORCH)), *WITHOUT_TORCH]
    code = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_rooms_import_from_rooms_above_them() -> None:
    order = list(EDGES)
    for room, others in EDGES.items():
        assert all(order.index(other) < order.index(room) for other in others), room


def test_tracked_files_are_small() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert not [
        path for path in paths if path.is_file() and path.stat().st_size > MAX_TRACKED_BYTES
    ]


# (rule, path of a snippet, the snippet, what the problem says; None: the snippet is allowed)
LAZY = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from flexgen_h2o.llm import LLM"
SNIPPETS = [
    (
        forbidden_edges,
        "tiers/disk.py",
        "from flexgen_h2o.engine.executor import run",
        "must not know engine",
    ),
    (forbidden_edges, "tiers/disk.py", LAZY, None),
    (unused_edges, "tiers/disk.py", "import flexgen_h2o.kernels", "may import core and does not"),
    (family_comparisons, "llm.py", "x = m.lower() in ('gpt2', 'llama')", "compares 'llama'"),
    (device_comparisons, "llm.py", "if str(device).startswith('cuda'): ...", "compares 'cuda'"),
    (
        stray_launches,
        "kernels/packed.py",
        "from flexgen_h2o.kernels.triton.rows import unpack",
        "packed.py:1: kernels",
    ),
    (
        stray_launches,
        "kernels/triton/rows.py",
        "def f(n):\n    unpack[(n,)]()",
        "rows.py:2: kernels",
    ),
    (packed_assignments, "llm.py", "a, b = 1, 2", "llm.py:1: assign"),
    (packed_assignments, "llm.py", "a, b = b, a\nc, d = f()", None),
]


@pytest.mark.parametrize(("rule", "path", "text", "says"), SNIPPETS)
def test_what_a_rule_finds(rule, path: str, text: str, says: str | None) -> None:
    others = [Source(f"{PACKAGE}/core/files.py", "")] if says else []
    problems = rule([Source(f"{PACKAGE}/{path}", text), *others])
    assert any(says in problem for problem in problems) if says else not problems, problems
