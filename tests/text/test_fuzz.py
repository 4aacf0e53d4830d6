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
UNLIMITED = settings(
    max_examples=100,
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)


def check(run_job: Callable[..., Job], model: Path, odd: list[dict[str, Any]]) -> None:
    """Every line has one row. Good ones around them are answered, and no error is one that nobody
    foresaw."""
    job = run_job(
        model, text_line("first", "a", max_tokens=1), *odd, text_line("last", "b", max_tokens=1)
    )
    assert job.code == 0, job.err
    assert len(job.rows) == len(odd) + 2
    assert job.rows["first"]["error"] is job.rows["last"]["error"] is None
    for row in job.rows.values():
        assert row["error"] is None or row["error"]["code"] in CODES, row
        assert len(json.dumps(row, ensure_ascii=True).splitlines()) == 1


@given(odd=line_lists(SIZE))
@settings(UNLIMITED, max_examples=5)
def test_odd_lines_end_no_job(
    run_job: Callable[..., Job], bytes_model: Path, odd: list[dict[str, Any]]
) -> None:
    check(run_job, bytes_model, odd)


@pytest.mark.slow
@given(odd=line_lists(SIZE))
@settings(UNLIMITED)
def test_two_thousand_odd_lines_end_no_job(
    run_job: Callable[..., Job], bytes_model: Path, odd: list[dict[str, Any]]
) -> None:
    check(run_job, bytes_model, odd)
