"""Links between the pages, and the names on them: every file, section, class and function that they name is there.

Rules are functions from text to problems, so that one test runs them on the tree and another on bad snippets.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))

FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
HEADING = re.compile(r"^#{1,6} +(.+?)\s*$", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
OUTSIDE = re.compile(r"[a-z]+:")
MENTION = re.compile(r'(docs/[\w/-]+\.md)(?:, "([^"]+)")?')


def sections(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them: lower case, no punctuation, spaces as hyphens."""
    found: dict[str, int] = {}
    anchors = set()
    for title in HEADING.findall(FENCE.sub("", page)):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        slug = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        anchors.add(f"{slug}-{found[slug]}" if slug in found else slug)
        found[slug] = found.get(slug, 0) + 1
    return anchors


def broken_links(page: str, at: Path) -> Iterator[str]:
    """Relative links of a page at the path `at` to a file or a section that does not exist."""
    for link in LINK.findall(CODE.sub("", FENCE.sub("", page))):
        if OUTSIDE.match(link):
            continue
        name, _, anchor = link.partition("#")
        target = (at.parent / name).resolve() if name else at
        if name and not (target.exists() and target.is_relative_to(ROOT)):
            yield f"{link}: no such file"
        elif anchor and (
            target.suffix != ".md" or anchor not in sections(page if target == at else target.read_text())
        ):
            yield f"{link}: no such section"


def broken_mentions(text: str) -> Iterator[str]:
    """Pages that a comment names, also with a section's title in quotes behind a comma, and that do not exist."""
    for name, title in MENTION.findall(text):
        if not (ROOT / name).exists():
            yield f"{name}: no such file"
        elif title and title not in HEADING.findall((ROOT / name).read_text()):
            yield f'{name}, "{title}": no such section'


FILE = re.compile(r"[\w./-]+\.(?:py|sh)|[\w/]+/")
NAME = re.compile(r"(?:(?P<folder>\w+(?:/\w+)*)/)?(?P<first>\w+)(?P<rest>(?:\.\w+)+)(?:\(.*\))?")


@cache
def defined() -> dict[str, set[str]]:
    """What each module, by its path and by its last part, and each class defines: `Name`, `Class.name`."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in sorted((ROOT / "flexgen_h2o").rglob("*.py")):
        module = path.relative_to(ROOT / "flexgen_h2o").with_suffix("").as_posix().removesuffix("/__init__")
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
            yield from (n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name))


def unknown_names(page: str) -> Iterator[str]:
    """Files, and names of modules and classes (`tiers/stream.Ring`, `Ring.take`), that the package does not have."""
    for span in (code.strip("`") for code in CODE.findall(FENCE.sub("", page))):
        if FILE.fullmatch(span):
            tops = [ROOT, ROOT / "flexgen_h2o", *(ROOT / "flexgen_h2o").glob("*/")]
            if not any((top / span).exists() for top in tops) and span.partition("/")[0] in {t.name for t in tops}:
                yield span
        elif (match := NAME.fullmatch(span)) and span.rpartition(".")[2] not in ("md", "json", "jsonl", "py", "sh"):
            owner = "/".join(filter(None, (match["folder"], match["first"])))
            if owner in defined():
                if match["rest"][1:] not in defined()[owner]:
                    yield span
            elif match["folder"] and match["folder"].partition("/")[0] in defined() | {"core": set()}:
                yield span


def program_files() -> Iterable[Path]:
    listed = subprocess.run(["git", "ls-files", "*.py", "*.sh"], cwd=ROOT, capture_output=True, text=True, check=True)
    return (ROOT / name for name in listed.stdout.split() if name != f"tests/unit/{Path(__file__).name}")


def test_links_lead_somewhere() -> None:
    assert [f"{page}: {problem}" for page in PAGES for problem in broken_links(page.read_text(), page)] == []


def test_comments_name_pages_and_sections_that_exist() -> None:
    broken = [f"{path}: {problem}" for path in program_files() for problem in broken_mentions(path.read_text())]
    assert broken == []


def test_pages_name_what_the_package_has() -> None:
    names = ("architecture", "internals", "planner", "adding-a-format", "adding-a-model")
    pages = [ROOT / "docs" / "developers" / f"{name}.md" for name in names]
    pages += [ROOT / "docs" / "reference" / f"{name}.md" for name in ("jobs", "eviction")]
    assert [f"{page.name}: {name}" for page in pages for name in unknown_names(page.read_text())] == []


def test_a_name_that_is_gone_is_found() -> None:
    good = "`engine/loop.Walk`, `Walk.run`, `zigzag`, `engine/loop.zigzag`, `tiers/stream.py`, `engine/`, `extra.ranks`"
    assert list(unknown_names(good)) == []
    for gone in ("engine/loop.Wolk", "Walk.ran", "tiers/none.py", "engine/none.Walk", "loop.zagzig"):
        assert list(unknown_names(f"a `{gone}` b")) == [gone]


def test_every_page_is_reached_from_another() -> None:
    linked = {
        (page.parent / link.partition("#")[0]).resolve()
        for page in PAGES
        for link in LINK.findall(page.read_text())
        if not OUTSIDE.match(link)
    }
    assert [str(page) for page in PAGES[1:] if page not in linked] == []


def test_broken_links_are_found_and_good_ones_are_not() -> None:
    page = ROOT / "docs" / "reference" / "page.md"
    for text, problem in (
        ("[a](nowhere.md)", "nowhere.md: no such file"),
        ("[a](jobs.md#nowhere)", "jobs.md#nowhere: no such section"),
        ("# A\n[a](#b)", "#b: no such section"),
        ("[a](../../../outside.md)", "../../../outside.md: no such file"),
        ("```\n# B\n```\n[a](#b)", "#b: no such section"),
    ):
        assert list(broken_links(text, page)) == [problem]
    for text in ("# A `b`, c?\n[a](#a-b-c)", "# A\n# A\n[a](#a-1)", "[a](jobs.md) [b](https://x.y/z.md)", "`[a](b)`"):
        assert list(broken_links(text, page)) == []


def test_a_broken_mention_is_found() -> None:
    assert list(
        broken_mentions('(docs/nowhere.md) (docs/reference/jobs.md, "Nowhere") (docs/reference/jobs.md, "On Ray")')
    ) == [
        "docs/nowhere.md: no such file",
        'docs/reference/jobs.md, "Nowhere": no such section',
    ]
