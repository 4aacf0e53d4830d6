"""What `mkdocs build` (mkdocs.yml) adds to docs/: the flags of each command, and links that leave the folder.

A line `<!-- flags: VERB -->` of a page becomes a table of the verb's flags, from its own parser (no torch is imported).
A picture outside docs/ comes along; another link there becomes the path of what it names, since a site has no tree.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
from collections.abc import Iterator
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from flexgen_h2o.cli import VERBS

ROOT = Path(__file__).resolve().parents[1]
FLAGS = re.compile(r"^<!-- flags: ([\w -]+) -->$", re.MULTILINE)
LINK = re.compile(r"(!?)\[([^\]]*)\]\((\.\./[^)\s#]+)[^)\s]*\)")
PICTURES = (".png", ".svg")
CHOICES = re.compile(r"`([^`\n]*\\\|[^`\n]*)`")  # `a\|b` in a table: GitHub drops the backslash, mkdocs shows it


def on_config(config: Any) -> Any:
    """Anchors as GitHub makes them, so that links are the same in the tree and on the site."""
    from pymdownx.slugs import slugify

    config["mdx_configs"].setdefault("toc", {})["slugify"] = slugify(case="lower")
    return config


def on_files(files: Any, config: Any) -> Any:
    """Pictures outside docs/ that a page shows."""
    from mkdocs.structure.files import File

    for page in list(files.documentation_pages()):
        for is_picture, _, link in LINK.findall(page.content_string):
            path = outside(page.src_uri, link)
            if is_picture and path is not None and files.get_file_from_path(path) is None:
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The page with its flags and without links out of docs/."""
    markdown = FLAGS.sub(lambda found: "\n".join(flags_of(found[1])), markdown)
    markdown = CHOICES.sub(lambda found: f"<code>{escape(found[1]).replace(chr(92) + '|', '&#124;')}</code>", markdown)
    return LINK.sub(lambda found: _inside(page.file.src_uri, found), markdown)


def outside(page: str, link: str) -> str | None:
    """The path from the root of what a page's link names, None where that is in docs/."""
    path = os.path.normpath(os.path.join("docs", os.path.dirname(page), link))
    return None if path.startswith("docs/") else path


def _inside(page: str, found: re.Match[str]) -> str:
    mark, text, link = found[1], found[2], found[3]
    path = outside(page, link)
    if path is None:
        return found[0]
    if mark and path.endswith(PICTURES):
        return f"![{text}]({os.path.relpath(path, os.path.dirname(page) or '.')})"
    return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"


def flags_of(command: str) -> Iterator[str]:
    """Markdown: the flags of a verb, or of a sub-command of it: `evaluate fidelity`. KeyError where there is none."""
    parser = parsers()[command]
    yield from ("| flag | meaning |", "|---|---|")
    for action in parser._actions:
        is_shown = action.help is not argparse.SUPPRESS
        if is_shown and not isinstance(action, argparse._SubParsersAction | argparse._HelpAction):
            yield f"| {_call(action)} | {_escape(_help(parser, action))} |"


@cache
def parsers() -> dict[str, argparse.ArgumentParser]:
    """Of every verb and sub-command that has flags, by its name. A second verb of a module is another name of it."""
    found = {}
    verbs = {module: verb for verb, (module, _) in reversed(VERBS.items())}
    waiting = [(verb, importlib.import_module(module)._parser()) for module, verb in verbs.items()]
    for name, parser in waiting:
        subs = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        waiting += [(f"{name} {verb}", inner) for action in subs for verb, inner in action.choices.items()]
        if len(parser._actions) > 1 + len(subs):  # more than --help
            found[name] = parser
    return found


def _call(action: argparse.Action) -> str:
    """`--flag VALUE` with its other spellings, as the parser takes it."""
    if not action.option_strings:
        return f"`{action.metavar or action.dest} ...`"
    value = "" if action.nargs == 0 else argparse.HelpFormatter("")._format_args(action, action.dest.upper())
    names = ", ".join(f"`{name}`" for name in action.option_strings)
    return f"{names} `{value}`".replace("|", r"\|") if value else names


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return (action.help or "") % {**vars(action), "prog": parser.prog} if action.help else ""


def _escape(text: str) -> str:
    return re.sub(r"([\\`*_<|\[])", r"\\\1", text)
