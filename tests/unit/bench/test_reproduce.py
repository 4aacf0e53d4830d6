"""Rows of the papers: one list, a page that has all of it, and a quick run that goes on when a row fails."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.common import ROOT
from bench.reproduce import __main__ as door
from bench.reproduce.rows import NOT_MEASURED, ROWS, Row, write_inputs
from flexgen_h2o.core.errors import UsageError


def row(name: str, quick: str, keep: str = r"^\|") -> Row:
    return Row(name, "a paper", "something", quick, "nothing", "nothing", keep=keep)


def quick(flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    page = tmp_path / "page.md"
    monkeypatch.setattr(sys, "argv", ["reproduce.py", *flags.split(), "--output", str(page)])
    return door.main(), page.read_text()


def test_the_page_has_every_row_as_the_list_has_it() -> None:
    page = (ROOT / "bench" / "reproduce" / "README.md").read_text()
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == [one.name for one in ROWS]
    for one in ROWS:
        assert f"\n# quick\n{one.quick}\n# full\n{one.full}\n" in page, f"{one.name}: write the page anew (--page)"
        assert f"{one.paper}: {one.shows}. Needs: {one.needs}." in page
        assert f"Measured with other models: {one.measured}." in page
        assert not one.plan or f"`policy_search {one.plan}`" in page
    assert NOT_MEASURED in page


def test_names_of_rows_are_distinct_and_commands_are_shell() -> None:
    assert len({one.name for one in ROWS}) == len(ROWS)
    for one in ROWS:
        for command in (one.quick, one.full):
            assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0, command


def test_inputs_are_what_the_formats_say(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    articles = [json.loads(line) for line in (tmp_path / "articles.jsonl").read_text().splitlines()]
    helm = [json.loads(line) for line in (tmp_path / "helm.jsonl").read_text().splitlines()]
    assert all(one["article"].startswith("###\nArticle: ") and one["summary_gt"] for one in articles)
    assert [one["request"]["prompt"] for one in helm] == [one["article"] for one in articles]
    lines = {
        (tmp_path / "Restaurant" / f"{name}.csv").read_text().splitlines()[0] for name in ("train", "valid", "test")
    }
    assert lines == {"name,addr,city,type"}


def test_a_quick_run_goes_on_and_says_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = (
        row("bad", "echo '| lost |'; echo reason >&2; exit 3"),
        row("good", "echo '| a | b |'; echo noise; python -c 'print(\"| c | d |\")'"),
        row("piped", "false | true"),
        row("inputs", "cat $WORK/articles.jsonl", "summary"),
    )
    monkeypatch.setattr(door, "ROWS", rows)
    code, page = quick("--quick", tmp_path, monkeypatch)
    assert code == 1 and "failed: bad, piped." in page
    assert "| [bad](#bad) | a paper | 3 |" in page and "```\nreason\n```" in page and page.count("| lost |") == 1
    assert "\n| a | b |\n| c | d |\n" in page and "noise\n```" not in page
    assert page.count('"summary_gt"') == 4
    assert quick("--quick --only good", tmp_path, monkeypatch)[0] == 0


def test_a_row_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "ROWS", (row("slow", "sleep 600"), row("next", "echo '| x |'")))
    code, page = quick("--quick --limit 0.2", tmp_path, monkeypatch)
    assert code == 1 and "none: too long" in page and "not done after 0 s" in page


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("", "--quick: give one of"),
        ("--quick --list", "--quick: give one of"),
        ("--quick --only nothing", "--only nothing: not one of attention"),
        ("--quick --limit 0", "--limit 0"),
        ("--quick --output /none/x.md", "--output /none/x.md"),
        ("--page /none/x.md", "--page /none/x.md"),
    ],
)
def test_wrong_use_is_said_before_anything_runs(flags: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["reproduce.py", *flags.split()])
    with pytest.raises(UsageError, match=re.escape(says)):
        door.main()
