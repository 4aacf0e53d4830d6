"""Requests with every oddity of Unicode: an answer or a 400 for each, and the server goes on."""

from __future__ import annotations

import json
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings

from tests.text.oddities import line_lists

SIZE = 10
UNLIMITED = settings(
    max_examples=200,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


def check(web: httpx2.Client, odd: list[dict[str, Any]]) -> None:
    for line in odd:
        body = json.dumps(line["body"]).encode()
        answer = web.post(line["url"], content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400), (answer.text, line)
        assert answer.status_code == 200 or answer.json()["error"]["type"] == "invalid_request_error"
    assert web.get("/health").status_code == 200


@given(odd=line_lists(SIZE))
@settings(UNLIMITED, max_examples=5)
def test_odd_requests_end_no_server(web: httpx2.Client, odd: list[dict[str, Any]]) -> None:
    check(web, odd)


@pytest.mark.slow
@given(odd=line_lists(SIZE))
@settings(UNLIMITED)
def test_two_thousand_odd_requests_end_no_server(web: httpx2.Client, odd: list[dict[str, Any]]) -> None:
    check(web, odd)
