"""Rows of the papers: one list, a page that has all of it, runs that go on when a row fails, and
claims."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.common import ROOT
from bench.reproduce import __main__ as door
from bench.reproduce import claims
from bench.reproduce.rows import NOT_MEASURED, ROWS, Row


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
        assert f"\n# quick\n{one.quick}\n# full\n{one.full}\n" in page, (
            f"{one.name}: write the page anew (--page)"
        )
        assert not one.real or f"\n# small real model\n{one.real}\n" in page
        assert f"{one.paper}: {one.shows}. Needs: {one.needs}." in page
        assert f"Measured with other models: {one.measured}." in page
        assert not one.plan or f"`policy_search {one.plan}`" in page
    assert NOT_MEASURED in page


def test_a_quick_run_goes_on_and_says_what_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (
        row("bad", "echo '| lost |'; echo reason >&2; exit 3"),
        row("good", "echo '| a | b |'; echo noise; python -c 'print(\"| c | d |\")'"),
        row("piped", "false | true"),
        row("inputs", "cat $WORK/articles.jsonl", "summary"),
    )
    monkeypatch.setattr(door, "ROWS", rows)
    code, page = quick("--quick", tmp_path, monkeypatch)
    assert code == 1 and "failed: bad, piped." in page
    assert (
        "| [bad](#bad) | a paper | 3 |" in page
        and "```\nreason\n```" in page
        and page.count("| lost |") == 1
    )
    assert "\n| a | b |\n| c | d |\n" in page and "noise\n```" not in page
    assert page.count('"summary_gt"') == 4
    assert quick("--quick --only good", tmp_path, monkeypatch)[0] == 0


def test_the_page_of_claims_is_that_of_the_committed_results() -> None:
    page = (ROOT / "docs" / "lab" / "papers.md").read_text()
    (folder,) = [path for path in door.RESULTS.iterdir() if path.is_dir()]
    command = f"python -m bench.reproduce --model {folder.name} --page docs/lab/papers.md"
    assert page == claims.claims_page(folder), f"write it again: {command}"
    assert {claim.row for claim in claims.CLAIMS} == {one.name for one in ROWS if one.real}
    assert set(claims.TABLES) <= {one.name for one in ROWS if one.real}


SCRIPTS = (
    "scripts/reproduce.sh",
    "scripts/quickstart.sh",
    "scripts/gpu_suite.sh",
    "scripts/test.sh",
    "scripts/slow_tests.sh",
    "scripts/nightly.sh",
    "bench/throughput_sweep.sh",
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_installs_nothing(script: str, tmp_path: Path) -> None:
    environment = {**os.environ, "FLEXGEN_VENV": str(tmp_path / "venv"), "PYTHON": ""}
    done = subprocess.run(
        ["bash", str(ROOT / script), "--help"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"  bash {script}" in done.stdout and "#" not in done.stdout
    assert not (tmp_path / "venv").exists()
