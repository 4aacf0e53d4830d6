"""Many batches, and very long ones: nothing is lost, they keep their order, and nobody waits for
what takes long."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.serving.conftest import Running, Start

LONG_S = 30.0  # no machine is that slow


def send(web: httpx2.Client, content: bytes, **more: Any) -> str:
    """The id of a batch of these lines."""
    file = web.post(
        "/v1/files", files={"file": ("a.jsonl", content)}, data={"purpose": "batch"}
    ).json()
    body = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    return str(web.post("/v1/batches", json={**body, **more}).json()["id"])


def rows_of(name: int, count: int = 1) -> bytes:
    body = {"prompt": [5, 6, 7 + name % 50], "max_tokens": 1 + name % 3}
    found = [
        {"custom_id": f"{name}-{i}", "method": "POST", "url": "/v1/completions", "body": body}
        for i in range(count)
    ]
    return "".join(json.dumps(one) + "\n" for one in found).encode()


def batch_of(web: httpx2.Client, batch_id: str) -> dict[str, Any]:
    found: dict[str, Any] = web.get(f"/v1/batches/{batch_id}").json()
    return found


def wait_until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.02)


def is_over(web: httpx2.Client, batch_id: str) -> bool:
    return batch_of(web, batch_id)["status"] in ("completed", "failed", "cancelled")


@pytest.mark.parametrize(
    ("count", "limit"),
    [(70, 56), pytest.param(1000, 128, marks=pytest.mark.slow)],
    ids=["70", "1000"],
)
def test_more_batches_than_descriptors(
    start: Start, tmp_path: Path, count: int, limit: int
) -> None:
    """A server that is ended and started again in the middle loses none either."""
    first = start(tmp_path, descriptors=limit)
    with first.web as web:
        ids = [send(web, rows_of(i)) for i in range(count // 2)]
        wait_until(lambda: is_over(web, ids[2]))
        first.send(15)
    assert first.wait() == 143
    server = start(tmp_path, descriptors=limit)
    most = 0
    with server.web as web:
        ids += [send(web, rows_of(i)) for i in range(count // 2, count)]
        while not all(is_over(web, one) for one in ids[-3:]):
            most = max(most, len(os.listdir(f"/proc/{server.pid}/fd")))
        wait_until(lambda: all(is_over(web, one) for one in ids))
        found = [batch_of(web, one) for one in ids]
        assert {one["status"] for one in found} == {"completed"}
        begun = [one["in_progress_at"] for one in found]
        assert begun == sorted(begun)
        for i, one in enumerate(found):
            [row] = web.get(f"/v1/files/{one['output_file_id']}/content").text.splitlines()
            assert json.loads(row)["custom_id"] == f"{i}-0"
    assert most < limit
    assert (
        server.err.startswith(f"serve: ulimit -n is {limit}: at most ")
        and server.err.count("\n") == 1
    )


def test_a_batch_with_which_the_server_dies_twice_fails(start: Start, tmp_path: Path) -> None:
    """It is killed before any row of the batch is done; the batch behind it is done by the third
    server."""
    body = {"prompt": [5, 6], "max_tokens": 250, "ignore_eos": True}
    long = [{"custom_id": f"r{i}", "url": "/v1/completions", "body": body} for i in range(40)]
    content = "".join(json.dumps(one) + "\n" for one in long).encode()
    ids: list[str] = []
    for _ in range(2):
        server = start(tmp_path)
        with server.web as web:
            ids = ids or [send(web, content), send(web, rows_of(1))]
            wait_until(lambda web=web: web.get("/status").json()["block"]["batches"] > 0)  # type: ignore[misc]
            server.send(9)
        server.wait()
    third: Running = start(tmp_path)
    with third.web as web:
        wait_until(lambda: all(is_over(web, one) for one in ids))
        failed, done = (batch_of(web, one) for one in ids)
    assert failed["status"] == "failed" and failed["errors"]["data"][0]["code"] == "server_died"
    assert done["status"] == "completed"
