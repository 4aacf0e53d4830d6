"""The last lines of a run of the tests: what it skipped, and why (tests/skip_report.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.forks import environment

CONFTEST = """
from tests.skip_report import SkipReport
def pytest_configure(config): config.pluginmanager.register(SkipReport(config))
"""
FILE = """
import pytest
def test_done(): pass
@pytest.mark.skip(reason="too hot")
@pytest.mark.parametrize("n", [1, 2])
def test_hot(n): pass
def test_cold(): pytest.skip("too cold")
def test_other(): pass
"""


def last_lines(folder: Path, *flags: str) -> list[str]:
    """Return what pytest prints after the heading of the report."""
    (folder / "conftest.py").write_text(CONFTEST)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(folder),
        str(folder),
        *flags,
    ]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    assert done.stdout.count("skipped, and why") == 1, done.stdout + done.stderr
    return done.stdout.partition("skipped, and why")[2].splitlines()[1:]


def test_reasons_are_grouped_and_the_closing_line_stays_last(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text(FILE)
    (tmp_path / "test_b.py").write_text(
        'import pytest\npytest.skip("no extra", allow_module_level=True)\n'
    )
    *lines, closing = last_lines(tmp_path, "-n", "2", "-k", "not other")
    assert lines == [
        "    2 tests: too hot",
        "    1 file: no extra",
        "    1 test: too cold",
        '    1 test is not part of this run: -k "not other"',
    ]
    assert "1 passed, 4 skipped" in closing and " in " in closing
