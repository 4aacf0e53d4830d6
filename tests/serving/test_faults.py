"""Bugs of ours, and of the libraries below, while a client waits: a status in OpenAI's shape, and a
line in the log."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from flexgen_h2o.jobs.requests import RequestReader
from flexgen_h2o.serving import app
from flexgen_h2o.serving.app import HANDLERS, Server
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
