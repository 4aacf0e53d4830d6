"""Bugs of ours and of libraries below: a status in OpenAI's shape, and a line in the log.

No engine.
"""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from flexgen_h2o.jobs.requests import RequestReader
from flexgen_h2o.serving import app
from flexgen_h2o.serving.answers import RequestRefused
from flexgen_h2o.serving.app import HANDLERS, SHORT_BODY, Server
from flexgen_h2o.serving.clerk import Clerk
from flexgen_h2o.serving.guard import Bounds, Guard
from tests.serving.conftest import Panic

BOUNDS = Bounds(2**20, 2**20, 10, 30, None, False)


FAULTS = [Panic("Rust: \ud83e"), KeyError("\ud83e")]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_whatever_a_route_raises_is_a_500(
    fault: BaseException, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail(request: Request) -> Response:
        raise fault

    routes = Starlette(routes=[Route("/v1/models", fail)], exception_handlers=HANDLERS)
    answer = TestClient(Guard(routes, BOUNDS)).get("/v1/models")  # type: ignore[arg-type]
    assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
    assert answer.json()["error"]["code"] == "internal_error"
    said = capsys.readouterr().err
    said.encode()
    assert said.count("\n") == 1 and f"internal error: {type(fault).__name__}" in said


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_whatever_reading_a_request_raises_is_a_500(
    fault: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised in another thread than the route's."""

    def fail(*args: Any) -> None:
        raise fault

    monkeypatch.setattr(RequestReader, "request", fail)
    model = SimpleNamespace(name="m", spec=SimpleNamespace(max_positions=64))
    service: Any = SimpleNamespace(most_queued=10, length=64)
    server = Server(service, SimpleNamespace(), RequestReader(model, None))  # type: ignore[arg-type]
    web = TestClient(Guard(server.app(), BOUNDS))  # type: ignore[arg-type]
    answer = web.post("/v1/completions", json={"prompt": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: type(fault).__name__)
def test_a_stream_ends_with_the_error(
    fault: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken:
        def __init__(self, *args: Any) -> None: ...

        def first(self) -> list[bytes]:
            raise fault

    monkeypatch.setattr(app, "StreamEvents", Broken)
    given_up: list[object] = []
    service: Any = SimpleNamespace(give_up=given_up.append)
    server = Server(service, SimpleNamespace(), SimpleNamespace(model=None))  # type: ignore[arg-type]

    async def read() -> list[bytes]:
        asked: Any = SimpleNamespace(requests=[1])
        return [piece async for piece in server._stream(asked, "ticket", asyncio.Queue())]  # type: ignore[arg-type]

    [event] = asyncio.run(read())
    assert json.loads(event.removeprefix(b"data: "))["error"][
        "code"
    ] == "internal_error" and given_up == ["ticket"]


def test_work_that_fails_does_not_end_the_clerk(capsys: pytest.CaptureFixture[str]) -> None:
    done = threading.Event()
    clerk = Clerk(lambda: None)
    clerk.add(lambda: {}["x"])
    clerk.add(done.set)
    clerk.start()
    assert done.wait(60)
    clerk.close()
    assert capsys.readouterr().err == "serve: batches: internal error: KeyError: 'x'\n"


def test_a_long_request_that_is_read_delays_no_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    should_continue = threading.Event()

    def read(reader: object, path: str, body: dict[str, Any], *most: int) -> None:
        if len(body["prompt"]) > SHORT_BODY:
            assert should_continue.wait(60)
        raise RequestRefused("prompt: is read")

    async def post(web: httpx2.AsyncClient, prompt: str) -> int:
        return int((await web.post("/v1/completions", json={"prompt": prompt})).status_code)

    async def both() -> None:
        service: Any = SimpleNamespace(most_queued=1, length=1)
        served = Server(service, SimpleNamespace(), SimpleNamespace()).app()  # type: ignore[arg-type]
        transport = httpx2.ASGITransport(served)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as web:
            long = [asyncio.create_task(post(web, "a" * (SHORT_BODY + 1))) for _ in range(2)]
            await asyncio.sleep(0.05)
            assert await post(web, "a") == 400 and not any(one.done() for one in long)
            should_continue.set()
            assert await asyncio.gather(*long) == [400, 400]

    monkeypatch.setattr(app, "read_asked", read)
    asyncio.run(both())
