"""Write the tables of flags into the pages of docs/reference, from the commands' own parsers (no
torch is imported).

    python -m scripts.flag_tables           write them
    python -m scripts.flag_tables --check   write nothing; exit code 1 if a page differs from what would be written

A page has `<!-- flags: VERB -->` (or `VERB SUBCOMMAND`), the table, and `<!-- end of flags -->`. A
flag that many commands have alike stands once, in the table of `<!-- flags: shared -->`, and a
command's table links to it.
"""  # noqa: E501

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from flexgen_h2o.cli import VERBS

ROOT = Path(__file__).resolve().parents[1]
REFERENCE = ROOT / "docs" / "reference"
MARKS = re.compile(
    r"^<!-- flags: ([\w -]+) -->\n(.*?)^<!-- end of flags -->$", re.MULTILINE | re.DOTALL
)
COMMAND = "python -m scripts.flag_tables"
# Verbs without a page: commands/index.md says which newer one each of them stands for.
OLDER = frozenset({"batch", "run-batch", "complete", "flex-opt"})
SHARED = "shared"
SHARED_PAGE = REFERENCE / "cli.md"
SHARED_SECTION = "shared-flags"
MIN_VERBS = 3  # a flag that so many verbs have alike is shared
USUAL_GROUPS = ("positional arguments", "options")  # argparse's own names, which say nothing


@dataclass(frozen=True)
class Flag:
    """A row of a table. group: title of the parser's group. names: its spellings; of a positional
    argument one.

    value: what is typed behind the name, empty for a switch. meaning: its help, as Markdown.
    """

    group: str
    names: tuple[str, ...]
    value: str
    meaning: str

    @property
    def shown(self) -> str:
        return f"`{next((name for name in self.names if name.startswith('--')), self.names[0])}`"

    @property
    def row(self) -> str:
        *others, last = self.names
        spans = ", ".join(f"`{name}`" for name in (*others, f"{last} {self.value}".strip()))
        return f"| {_escape_bars(spans)} | {self.meaning} |"


@cache
def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of every verb and sub-command that has flags, by its name.

    Verbs of one module are names of one command: a newer name stands for the older ones.
    """
    verbs: dict[str, str] = {}
    for verb, (module, _) in VERBS.items():
        if module not in verbs or (verbs[module] in OLDER and verb not in OLDER):
            verbs[module] = verb
    found = {}
    waiting = [(verb, importlib.import_module(module)._parser()) for module, verb in verbs.items()]
    for name, parser in waiting:
        subs = [
            action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
        ]
        waiting += [
            (f"{name} {verb}", inner) for action in subs for verb, inner in action.choices.items()
        ]
        if len(parser._actions) > 1 + len(subs):  # more than --help
            found[name] = parser
    return found


def documented() -> list[str]:
    """Return the commands that need a table on a page."""
    return [command for command in parsers() if command not in OLDER]


def flags_of(command: str) -> list[Flag]:
    """Return the flags of a command, group by group, without those for help. KeyError for an
    unknown command."""
    parser = parsers()[command]
    return [
        Flag(group.title or "", _names(action), _value(action), _escape(_help(parser, action)))
        for group in parser._action_groups
        for action in group._group_actions
        if action.help is not argparse.SUPPRESS
        and not isinstance(action, argparse._SubParsersAction)
        and not any(name.startswith("--help") for name in action.option_strings)
    ]


def shared_flags() -> tuple[Flag, ...]:
    """Return the flags that at least MIN_VERBS verbs have in the same words, in the order of the
    parsers."""
    verbs: dict[Flag, set[str]] = defaultdict(set)
    for command in documented():
        for flag in flags_of(command):
            verbs[flag].add(command.partition(" ")[0])
    return tuple(flag for flag, found in verbs.items() if len(found) >= MIN_VERBS)


def table(command: str, page: Path) -> str:
    """Return the Markdown between the marks; nothing for a command that does not exist (yet)."""
    if command == SHARED:
        return _text(_tables(shared_flags()))
    if command not in parsers():
        return ""
    flags = flags_of(command)
    shared = shared_flags()
    own = [flag for flag in flags if flag not in shared]
    tables = list(_tables(own))
    link = _link(flags, shared, page)
    return _text([*tables, *([""] if tables and link else []), *link])


def _text(lines: Iterable[str]) -> str:
    body = "\n".join(lines)
    return f"\n{body}\n\n" if body else ""


def _tables(flags: Iterable[Flag]) -> Iterator[str]:
    """Yield a table for each group, below its title."""
    groups: dict[str, list[Flag]] = defaultdict(list)
    for flag in flags:
        groups["" if flag.group in USUAL_GROUPS else flag.group].append(flag)
    for place, (title, some) in enumerate(groups.items()):
        yield from [""] if place else []
        yield from [f"**{title}**", ""] if title else []
        yield from ("| flag | meaning |", "|---|---|")
        yield from (flag.row for flag in some)


def _link(flags: list[Flag], shared: Iterable[Flag], page: Path) -> list[str]:
    """Return a line that says which shared flags a command has; its exceptions by name. Nothing if
    it has none."""
    groups: dict[str, list[Flag]] = defaultdict(list)
    for flag in shared:
        groups[flag.group].append(flag)
    parts = []
    for title, some in groups.items():
        lacking = [flag.shown for flag in some if flag not in flags]
        having = [flag.shown for flag in some if flag in flags]
        if having and len(lacking) <= len(having):
            name = "all" if title in USUAL_GROUPS else title
            parts.append(name + (f" (not {', '.join(lacking)})" if lacking else ""))
        else:
            parts += having
    where = f"{os.path.relpath(SHARED_PAGE, page.parent)}#{SHARED_SECTION}"
    return [f"[Shared flags]({where}): {'; '.join(parts)}."] if parts else []


def _names(action: argparse.Action) -> tuple[str, ...]:
    """Return a flag's spellings, each with hyphens once; of a positional argument its name."""
    if not action.option_strings:
        return (action.metavar if isinstance(action.metavar, str) else action.dest,)
    return tuple(
        dict.fromkeys(name[:2] + name[2:].replace("_", "-") for name in action.option_strings)
    )


def _value(action: argparse.Action) -> str:
    """Return what is typed behind a flag's name."""
    if not action.option_strings:
        return "..." if action.nargs in ("*", "+") else ""
    return (
        ""
        if action.nargs == 0
        else argparse.HelpFormatter("")._format_args(action, action.dest.upper())
    )


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return action.help % {**vars(action), "prog": parser.prog} if action.help else ""


def _escape_bars(code: str) -> str:
    return code.replace("|", r"\|")


def _escape(text: str) -> str:
    return re.sub(r"([\\`*_<|\[])", r"\\\1", text)


def filled(text: str, page: Path) -> str:
    """Return the text of a page with its tables as they should be."""
    return MARKS.sub(
        lambda found: f"<!-- flags: {found[1]} -->\n{table(found[1], page)}<!-- end of flags -->",
        text,
    )


def pages() -> list[Path]:
    """Return the pages that have marks."""
    return [page for page in sorted(REFERENCE.rglob("*.md")) if MARKS.search(page.read_text())]


def main(argv: list[str] | None = None) -> int:
    """Write the tables, or with --check name the pages that differ; return the exit code."""
    parser = argparse.ArgumentParser(
        prog=COMMAND, description="Write the tables of flags into docs/reference."
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if a page would change"
    )
    args = parser.parse_args(argv)
    changed = [page for page in pages() if filled(page.read_text(), page) != page.read_text()]
    for page in changed:
        print(f"{'differs' if args.check else 'written'}: {page.relative_to(ROOT)}")
        if not args.check:
            page.write_text(filled(page.read_text(), page))
    return 1 if args.check and changed else 0


if __name__ == "__main__":
    sys.exit(main())
