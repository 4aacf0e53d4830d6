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


# ---- A server that is killed


def long_rows(count: int, name: str = "r") -> bytes:
    """Each takes as long as some status requests."""
    body = {"prompt": [5, 6], "max_tokens": 80, "ignore_eos": True}
    found = [
        {"custom_id": f"{name}{i}", "url": "/v1/completions", "body": body} for i in range(count)
    ]
    return "".join(json.dumps(line) + "\n" for line in found).encode()


OVER = ("completed", "failed", "cancelled")


def is_running(web: httpx2.Client) -> bool:
    return bool(web.get("/status").json()["block"]["batches"])


@pytest.mark.parametrize("kills", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_kills_fail_no_batch_and_counts_never_go_back(
    start: Start, tmp_path: Path, kills: int
) -> None:
    """The server is killed twice before any request is done, and then after some are."""
    ids: list[str] = []
    counts: dict[str, list[int]] = {}

    def look(web: httpx2.Client) -> list[dict[str, Any]]:
        found = [batch_of(web, one) for one in ids]
        for one in found:
            now = [one["request_counts"][name] for name in ("total", "completed", "failed")]
            before = counts.setdefault(one["id"], now)
            assert all(a <= b for a, b in zip(before, now, strict=True))
            counts[one["id"]] = now
        return found

    for kill in range(kills):
        server = start(tmp_path)
        with server.web as web:
            ids = ids or [*(send(web, long_rows(4)) for _ in range(2)), send(web, rows_of(1))]
            while not all(one["status"] in OVER for one in look(web)):  # on a busy machine
                if is_running(web) if kill < 2 else sum(map(sum, counts.values())) > 7 + kill:
                    break
            server.send(9)
        server.wait()
    last: Running = start(tmp_path)
    with last.web as web:
        wait_until(lambda: all(one["status"] == "completed" for one in look(web)))
    assert [counts[one] for one in ids] == [[4, 4, 0], [4, 4, 0], [1, 1, 0]]


POISON = """
import os, signal
from flexgen_h2o.serving import block
goes_on = block.Service._goes_on
def check(self, sequence):
    if sequence.custom_id.startswith("poison") and len(sequence.token_ids) > 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return goes_on(self, sequence)
block.Service._goes_on = check
"""


@pytest.mark.slow
def test_a_batch_that_kills_the_server_is_given_up_and_no_other(
    start: Start, tmp_path: Path
) -> None:
    """By the fifth start that it has for itself; and it can be resumed when the cause is gone."""
    server = start(tmp_path, patch=POISON)
    with server.web as web:
        contents = (rows_of(1), long_rows(9), long_rows(2, "poison"))
        ids = [send(web, one) for one in contents]
    for _ in range(12):
        with server.web as web:
            try:
                wait_until(lambda web=web: all(is_over(web, one) for one in ids))  # type: ignore[misc]
                break
            except httpx2.TransportError:
                assert server.wait() == -9
        server = start(tmp_path, patch=POISON)
    with server.web as web:
        found = [batch_of(web, one) for one in ids]
        assert [one["status"] for one in found] == ["completed", "completed", "failed"]
        assert found[2]["errors"]["data"][0]["code"] == "server_died"
    server.send(15)
    assert server.wait() == 143
    mended: Running = start(tmp_path)
    with mended.web as web:
        assert web.post(f"/v1/batches/{ids[0]}/resume").status_code == 400
        assert web.post(f"/v1/batches/{ids[2]}/resume").json()["status"] == "in_progress"
        wait_until(lambda: is_over(web, ids[2]))
        assert batch_of(web, ids[2])["request_counts"]["completed"] == 2
