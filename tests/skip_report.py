"""Says at the end of a run what it skipped, and why: the last lines above pytest's own closing
line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from typing import Any

import pytest


class SkipReport:
    """A plugin of pytest, in the main process and in each worker of pytest-xdist."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._left_out = 0  # tests that -m or -k did not select

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        self._left_out += len(items)

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["left_out"] = self._left_out

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take over the count of a worker that has ended. Each worker collects all tests, so the
        counts are equal."""
        self._left_out = max(self._left_out, getattr(node, "workeroutput", {}).get("left_out", 0))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> Generator[None]:
        """Outermost, so that pytest's own summary, with the failures, comes before."""
        yield
        terminalreporter.write_sep("=", "skipped, and why")
        for line in self._lines(terminalreporter.stats.get("skipped", [])):
            terminalreporter.write_line(line)

    def _lines(self, reports: Sequence[Any]) -> list[str]:
        """Return the lines of the report, the most frequent reason first."""
        counts: Counter[tuple[str, str]] = Counter()
        for report in reports:
            # A file that cannot be imported without an extra is skipped before its tests are
            # counted.
            unit = "file" if isinstance(report, pytest.CollectReport) else "test"
            counts[unit, report.longrepr[2].removeprefix("Skipped: ")] += 1
        found = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        lines = [
            f"{count:5} {unit}{'' if count == 1 else 's'}: {reason}"
            for (unit, reason), count in found
        ]
        if not lines:
            lines = ["nothing was skipped"]
        if self._left_out:
            tests = "test is" if self._left_out == 1 else "tests are"
            lines.append(f"{self._left_out:5} {tests} not part of this run: {self._selection()}")
        return lines

    def _selection(self) -> str:
        """Return the flags that selected tests."""
        option = self._config.option
        flags = [
            f'{flag} "{text}"'
            for flag, text in (("-m", option.markexpr), ("-k", option.keyword))
            if text
        ]
        return " and ".join(flags)
