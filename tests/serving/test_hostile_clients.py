"""Clients that are wrong, slow, gone or many: a clear status, and nothing that stays."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings

from tests.serving.conftest import KEY, Running
from tests.text.oddities import line_lists

JSON = {"content-type": "application/json"}


def connect(server: Running) -> socket.socket:
    where = urlsplit(server.base)
    return socket.create_connection((where.hostname or "", where.port or 0), timeout=60)


def head(path: str, *fields: str, method: str = "POST") -> bytes:
    key = f"Authorization: Bearer {KEY}"
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", key, *fields]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()


def send(connection: socket.socket, body: str) -> None:
    fields = f"Content-Length: {len(body)}", "Content-Type: application/json"
    connection.sendall(head("/v1/completions", *fields) + body.encode())


def status_of(connection: socket.socket) -> int:
    """0: it was closed without one."""
    data = b""
    while b"\r\n" not in data and (more := connection.recv(4096)):
        data += more
    return int(data.split()[1]) if data else 0


COMPLETIONS = "/v1/completions"
FILES = "/v1/files"
UPLOAD = {"file": ("a.jsonl", b"{}")}
BATCH = {"purpose": "batch"}
MULTIPART = {"content-type": "multipart/form-data; boundary=x"}


def form(name: str) -> list[Any]:
    """An upload with one more field."""
    return [("purpose", (None, b"batch")), (name, (None, b"batch")), ("file", ("a.jsonl", b"{}"))]


@pytest.mark.parametrize(
    ("method", "path", "sent", "status"),
    [
        ("POST", COMPLETIONS, {"content": b"{bad", "headers": JSON}, 400),
        ("POST", COMPLETIONS, {"content": b"\xff\xfe", "headers": JSON}, 400),
        ("POST", COMPLETIONS, {"content": b"[" * 100_000, "headers": JSON}, 400),
        ("POST", COMPLETIONS, {"json": {"prompt": "a" * 300_000}}, 413),
        ("POST", COMPLETIONS, {"json": {"prompt": "a", "temperature": 5}}, 400),
        ("POST", COMPLETIONS, {"content": b'{"prompt": "a"}'}, 415),
        ("PUT", "/v1/models", {}, 405),
        ("GET", "/v1/models?x=1", {}, 400),
        ("GET", f"{FILES}?order=up", {}, 400),
        ("GET", f"{FILES}?limit={'9' * 5000}", {}, 400),
        ("GET", f"{FILES}?limit=1&limit=2", {}, 400),
        ("GET", "/v1/batches?order=asc", {}, 400),
        ("DELETE", f"{FILES}/file-{'0' * 24}?force=true", {}, 400),
        ("POST", FILES, {"files": form("expires_after[seconds]")}, 400),
        ("POST", FILES, {"files": form("metadata")}, 400),
        ("POST", FILES, {"files": form("purpose")}, 400),
        ("POST", FILES, {"files": {"file": ("a.jsonl", b"a" * 2**21)}, "data": BATCH}, 413),
        ("POST", FILES, {"files": UPLOAD, "data": {"purpose": "vision"}}, 400),
        ("POST", FILES, {"data": BATCH}, 415),
        ("POST", FILES, {"files": {"other": ("a", b"a")}, "data": BATCH}, 400),
        ("POST", FILES, {"content": b"nothing of a form", "headers": MULTIPART}, 400),
    ],
    ids=lambda value: str(value)[:30],
)
def test_bad_requests(
    web: httpx2.Client, method: str, path: str, sent: dict[str, Any], status: int
) -> None:
    """They are refused in OpenAI's shape, and leave no file."""
    before = len(web.get(FILES).json()["data"])
    answer = web.request(method, path, **sent)
    assert answer.status_code == status and answer.json()["error"]["code"]
    assert len(web.get(FILES).json()["data"]) == before


@pytest.mark.parametrize("levels", [900, 940])
def test_nesting_that_can_just_be_parsed(web: httpx2.Client, levels: int) -> None:
    deep = b"[" * levels + b"]" * levels
    for path, field in (("completions", b"seed"), ("completions", b"n"), ("batches", b"endpoint")):
        answer = web.post(
            f"/v1/{path}", content=b'{"prompt": "a", "%s": %s}' % (field, deep), headers=JSON
        )
        assert (
            answer.status_code == 400 and answer.json()["error"]["type"] == "invalid_request_error"
        )


def test_a_body_without_a_length_is_bounded_too(web: httpx2.Client) -> None:
    pieces = (b"a" * 2**16 for _ in range(100))
    try:
        assert web.post("/v1/completions", content=pieces, headers=JSON).status_code == 413
    except httpx2.WriteError:
        pass  # it was closed while we wrote


@pytest.mark.parametrize("key", ["", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer \xe9"])
def test_wrong_keys(server: Running, key: str) -> None:
    with httpx2.Client(base_url=server.base) as anybody:
        for path in ("/v1/models", "/status", "/metrics", "/v1/files", "/api/plan", "/nowhere"):
            assert (
                anybody.get(path, headers={"authorization": key.encode("latin-1")}).status_code
                == 401
            )
        assert anybody.get("/health").json() == {"status": "ok"}


@pytest.mark.parametrize("name", ["..%2f..%2flock", "../lock", "%00", "file-" + "0" * 24])
def test_names_of_files_and_batches_lead_nowhere_else(server: Running, name: str) -> None:
    for path in (f"/v1/files/{name}", f"/v1/files/{name}/content", f"/v1/batches/{name}"):
        with connect(server) as connection:
            connection.sendall(head(path, "Connection: close", method="GET"))
            assert status_of(connection) == 404


def test_half_of_a_surrogate_pair_breaks_no_list(web: httpx2.Client) -> None:
    file = web.post(FILES, files=UPLOAD, data=BATCH).json()
    batch = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    named = json.dumps({**batch, "metadata": {"name": "\ud800"}}).encode()
    made = web.post("/v1/batches", content=named, headers=JSON)
    assert made.json()["metadata"] == {"name": "\ud800"}
    wrong = json.dumps({**batch, "endpoint": "\ud800"}).encode()
    assert web.post("/v1/batches", content=wrong, headers=JSON).status_code == 400
    for path in ("/v1/batches", "/v1/files", "/status"):
        assert web.get(path).is_success


@given(odd=line_lists(10))
@settings(suppress_health_check=list(HealthCheck), max_examples=5)
def test_odd_requests_end_no_server(web: httpx2.Client, odd: list[dict[str, Any]]) -> None:
    """They have every oddity of Unicode."""
    for line in odd:
        body = json.dumps(line["body"]).encode()
        answer = web.post(line["url"], content=body, headers=JSON)
        if answer.status_code != 200:
            assert answer.status_code == 400, (answer.text, line)
            assert answer.json()["error"]["type"] == "invalid_request_error"
    assert web.get("/health").status_code == 200


def test_pages_of_others_and_other_hosts_are_refused(web: httpx2.Client) -> None:
    assert web.get("/v1/models", headers={"origin": "http://evil.example"}).status_code == 403
    assert web.get("/v1/models", headers={"host": "evil.example"}).status_code == 403
    for host in ("localhost:8000", "LocalHost:1", "127.0.0.1", "[::1]:8000", "[::1]"):
        assert web.get("/v1/models", headers={"host": host, "origin": f"http://{host}"}).is_success
        assert web.get(
            "/v1/models", headers={"host": host, "origin": f"HTTP://{host.lower()}"}
        ).is_success


def test_slow_writers_lose_their_connection(server: Running) -> None:
    begun = head("/v1/completions", "Content-Length: 100", "Content-Type: application/json")
    slow = [connect(server) for _ in range(4)]
    for connection, sent in zip(
        slow, (b"", b"POST /v1/comp", begun, begun + b'{"prompt"'), strict=True
    ):
        connection.sendall(sent)
    with connect(server) as connection:  # the second request of a connection
        connection.sendall(head("/v1/models", method="GET"))
        assert status_of(connection) == 200
        connection.sendall(b"POST /v1")
        data = b" "
        while data:
            data = connection.recv(65536)
    for connection in slow:
        with connection:
            assert status_of(connection) == 408


@pytest.mark.slow
def test_a_client_that_reads_nothing_frees_its_row(server: Running, web: httpx2.Client) -> None:
    body = json.dumps(
        {
            "prompt": ["a"] * 60,
            "max_tokens": 200,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 20,
        }
    )
    with connect(server) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        send(connection, body)
        wait_until(lambda: web.get("/status").json()["block"]["clients"] > 0)
        wait_until(lambda: is_idle(web))


def test_clients_that_go_away_free_their_rows(server: Running, web: httpx2.Client) -> None:
    before = web.get("/status").json()["totals"]["given_up"]
    for stream in (True, False):
        body = json.dumps(
            {"prompt": ["a"] * 30, "max_tokens": 200, "ignore_eos": True, "stream": stream}
        )
        with connect(server) as connection:
            send(connection, body)
            wait_until(lambda: web.get("/status").json()["block"]["clients"] > 0)
        wait_until(lambda: is_idle(web))
    assert web.get("/status").json()["totals"]["given_up"] >= before + 40


def test_a_full_queue_says_when_to_come_back(server: Running, web: httpx2.Client) -> None:
    body = json.dumps({"prompt": ["a"] * 64, "max_tokens": 200, "ignore_eos": True, "stream": True})
    with connect(server) as connection:
        send(connection, body)
        wait_until(lambda: web.get("/status").json()["queue"]["rows"] > 0)
        refused = web.post("/v1/completions", json={"prompt": ["a"] * 64})
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
    wait_until(lambda: is_idle(web))


def test_too_many_connections_are_refused(server: Running, web: httpx2.Client) -> None:
    opened = [connect(server) for _ in range(60)]
    try:
        refused = [status_of(one) for one in opened]
        assert refused.count(503) >= 20 and set(refused) <= {0, 408, 503}
    finally:
        for one in opened:
            one.close()
    assert web.get("/health").is_success
    assert server.err == ""


def is_idle(web: httpx2.Client) -> bool:
    found = web.get("/status").json()
    return found["block"]["running"] == found["queue"]["rows"] == 0


def wait_until(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.01)


def test_bodies_on_their_way_are_bounded_together(server: Running, web: httpx2.Client) -> None:
    """Each has not sent its end, and all together are more than the server holds."""
    begun = head("/v1/completions", "Content-Length: 262000", "Content-Type: application/json")
    opened = [connect(server) for _ in range(30)]
    try:
        for one in opened:
            one.sendall(begun + b" " * 200_000)
        wait_until(lambda: len(select.select(opened, [], [], 0)[0]) >= 5)
        assert {status_of(one) for one in select.select(opened, [], [], 0)[0]} == {503}
    finally:
        for one in opened:
            one.close()
    assert web.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).is_success


def test_metrics_and_status_say_what_was_done(web: httpx2.Client) -> None:
    before = web.get("/status").json()["totals"]
    body = {"prompt": ["def f(x):", "b"], "max_tokens": 6, "ignore_eos": True}
    assert web.post(COMPLETIONS, json=body).is_success
    found = web.get("/status").json()
    assert found["totals"]["tokens"] == before["tokens"] + 12
    assert found["totals"]["rows"] == before["rows"] + 2
    assert found["block"]["rows"] == 8 and found["predicted_tokens_per_s"] > 0
    assert {span["row"] for span in found["timeline"]} >= {"compute"}
    lines = web.get("/metrics").text.splitlines()
    samples = dict(line.rsplit(" ", 1) for line in lines if line[0] != "#")
    assert int(samples["flexgen_tokens_total"]) == found["totals"]["tokens"]
    count = samples["flexgen_request_seconds_count"]
    assert samples['flexgen_request_seconds_bucket{le="+Inf"}'] == count
    used = float(samples['flexgen_memory_used_bytes{tier="host"}'])
    assert used == found["memory"]["host"]["used"] > 2**20
