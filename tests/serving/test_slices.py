"""What takes long in one request or one batch delays no other for long. No engine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from flexgen_h2o.jobs import runner
from flexgen_h2o.jobs.input import Line
from flexgen_h2o.jobs.requests import RowError
from flexgen_h2o.jobs.runner import Sink, read_requests
from flexgen_h2o.serving import app
from flexgen_h2o.serving.answers import RequestRefused
from flexgen_h2o.serving.app import SHORT_BODY, Server
from flexgen_h2o.serving.clerk import Clerk


def test_a_long_request_that_is_read_delays_no_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    should_continue = threading.Event()

    def read(reader: object, path: str, body: dict[str, Any], *most: int) -> None:
        if len(body["prompt"]) > SHORT_BODY:
            assert should_continue.wait(60)
        raise RequestRefused(400, "prompt: is read")

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


def test_bad_lines_that_take_long_are_read_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of 8 MiB takes as long as a thousand short ones."""
    monkeypatch.setattr(runner, "MAX_BAD_S", 0.01)

    def read(line: Line) -> Any:
        time.sleep(0.004)
        if line.number % 10:
            raise RowError("invalid_json", "bad")
        return SimpleNamespace(asked_model=None, params=SimpleNamespace(max_tokens=1))

    reader: Any = SimpleNamespace(read=read)
    lines = [Line(i, b"{}") for i in range(1, 31)]
    found = list(read_requests(reader, lines, Sink(lambda done: None)))
    assert sum(one is not None for one in found) == 3 and found.count(None) >= 6


def steps(said: list[str], name: str, count: int) -> Iterator[None]:
    for _ in range(count):
        time.sleep(0.01)
        yield
    said.append(name)


def test_work_waits_for_what_is_about_as_large_only() -> None:
    said: list[str] = []
    clerk = Clerk()
    for name, nbytes, count in (
        ("huge", 2**30, 60),
        ("large", 2**25, 30),
        ("late", 2**25, 1),
        ("small", 5, 1),
    ):
        clerk.add(lambda name=name, count=count: steps(said, name, count), nbytes)  # type: ignore[misc]
    clerk.add(lambda: said.append("no steps"))
    assert clerk.turn() and said == ["small", "no steps"]
    assert len(clerk._under_way) == 2
    while clerk.turn():
        pass
    assert said == ["small", "no steps", "large", "late", "huge"]


def test_work_that_fails_does_not_end_the_clerk(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> Iterator[None]:
        yield
        raise KeyError("x")

    said: list[str] = []
    clerk = Clerk()
    clerk.add(fail)
    clerk.add(lambda: steps(said, "next", 1))
    clerk.start()
    while not said:
        time.sleep(0.01)
    clerk.close()
    assert capsys.readouterr().err == "serve: batches: internal error: KeyError: 'x'\n"
