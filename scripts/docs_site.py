"""Change what `mkdocs build` (mkdocs.yml) shows of docs/: links that leave the folder.

A picture outside docs/ comes along; another link there becomes the path of what it names, since a
site has no tree.
"""

from __future__ import annotations

import os
import re
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\((\.\./[^)\s#]+)[^)\s]*\)")
PICTURES = (".png", ".svg")
CHOICES = re.compile(
    r"`([^`\n]*\\\|[^`\n]*)`"
)  # `a\|b` in a table: GitHub drops the backslash, mkdocs shows it


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
    """The page without links out of docs/."""
    markdown = CHOICES.sub(
        lambda found: f"<code>{escape(found[1]).replace(chr(92) + '|', '&#124;')}</code>", markdown
    )
    return LINK.sub(lambda found: _inside(page.file.src_uri, found), markdown)


def outside(page: str, link: str) -> str | None:
    """The path from the root of what a page's link names, None where that is in docs/."""
    path = os.path.normpath(os.path.join("docs", os.path.dirname(page), link))
    return None if path.startswith("docs/") else path


def _inside(page: str, found: re.Match[str]) -> str:
    mark = found[1]
    text = found[2]
    link = found[3]
    path = outside(page, link)
    if path is None:
        return found[0]
    if mark and path.endswith(PICTURES):
        return f"![{text}]({os.path.relpath(path, os.path.dirname(page) or '.')})"
    return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"
