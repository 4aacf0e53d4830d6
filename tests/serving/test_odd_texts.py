"""Requests and batches with every oddity of Unicode: an answer or an error for each, and the server
goes on."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx2
from hypothesis import HealthCheck, given, settings

from tests.serving.test_many_batches import batch_of, is_over, send
from tests.text.oddities import line_lists
from tests.text.tiny import chat_line

SIZE = 10
LIMITED = settings(
    suppress_health_check=[
        HealthCheck.function_scoped_fixture,
        HealthCheck.too_slow,
        HealthCheck.data_too_large,
    ],
)


def served(web: httpx2.Client, lines: list[dict[str, Any]]) -> dict[str, Any]:
    """What a batch of chats makes of lines: error codes of their rows by id, None for an answer."""
    content = "".join(json.dumps(line) + "\n" for line in lines).encode()
    batch_id = send(web, content, "/v1/chat/completions")
    while not is_over(web, batch_id):
        time.sleep(0.02)
    batch = batch_of(web, batch_id)
    assert batch["status"] == "completed", batch
    files = [
        batch[name] for name in ("output_file_id", "error_file_id") if batch.get(name) is not None
    ]
    texts = [web.get(f"/v1/files/{one}/content").content.decode() for one in files]
    rows = [json.loads(line) for text in texts for line in text.splitlines()]
    found = {row["custom_id"]: row["error"] and row["error"]["code"] for row in rows}
    assert len(found) == len(rows) == len(lines)
    return found


def test_half_a_character_ends_no_batch_and_no_server(web: httpx2.Client) -> None:
    half = "cut emoji \ud83e"
    parts = [{"type": "text", "text": "\ud83e"}, {"type": "text", "text": "\udd84"}]
    bad = {
        "content": chat_line("content", half),
        "parts": chat_line("parts", parts),
        "role": chat_line("role", "", messages=[{"role": "us\ud83eer", "content": "x"}]),
        "name": chat_line("name", "", messages=[{"role": "user", "content": "x", "name": half}]),
        "system": chat_line("system", "", messages=[{"role": "system", "content": half}]),
        "stop": chat_line("stop", "x", stop=["a", "\udd84"]),
    }
    good = [chat_line(name, "hello", max_tokens=1) for name in ("before", "after")]
    found = served(web, [good[0], *bad.values(), good[1]])
    assert found == {"before": None, **dict.fromkeys(bad, "invalid_request"), "after": None}
    assert web.get("/health").status_code == 200


@given(odd=line_lists(SIZE))
@settings(LIMITED, max_examples=5)
def test_odd_requests_end_no_server(web: httpx2.Client, odd: list[dict[str, Any]]) -> None:
    for line in odd:
        body = json.dumps(line["body"]).encode()
        answer = web.post(line["url"], content=body, headers={"content-type": "application/json"})
        if answer.status_code != 200:
            assert answer.status_code == 400, (answer.text, line)
            assert answer.json()["error"]["type"] == "invalid_request_error"
    assert web.get("/health").status_code == 200
