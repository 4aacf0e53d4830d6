"""Lines with every oddity of Unicode through jobs: none ends more than itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.text.conftest import Job
from tests.text.oddities import line_lists
from tests.text.tiny import text_line

SIZE = 20  # lines of a job
CODES = {"invalid_request", "context_length_exceeded", "unsupported"}


@pytest.mark.parametrize("jobs", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_odd_lines_end_no_job(jobs: int, run_job: Callable[..., Job], bytes_model: Path) -> None:
    """Every line has one row. Good ones around them are answered, and no error is one that nobody
    foresaw."""
    first, last = (text_line(name, "a", max_tokens=1) for name in ("first", "last"))

    @given(odd=line_lists(SIZE))
    @settings(
        max_examples=jobs,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    def check(odd: list[dict[str, Any]]) -> None:
        job = run_job(bytes_model, first, *odd, last)
        assert job.code == 0, job.err
        assert len(job.rows) == len(odd) + 2
        assert job.rows["first"]["error"] is job.rows["last"]["error"] is None
        for row in job.rows.values():
            assert row["error"] is None or row["error"]["code"] in CODES, row
            assert len(json.dumps(row, ensure_ascii=True).splitlines()) == 1

    check()
