"""What takes long in one request or one batch delays no other for long. No engine."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest

from flexgen_h2o.serving import app
from flexgen_h2o.serving.answers import RequestRefused
from flexgen_h2o.serving.app import SHORT_BODY, Server
from flexgen_h2o.serving.clerk import Clerk


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


def test_work_that_fails_does_not_end_the_clerk(capsys: pytest.CaptureFixture[str]) -> None:
    done = threading.Event()
    clerk = Clerk(lambda: None)
    clerk.add(lambda: {}["x"])
    clerk.add(done.set)
    clerk.start()
    assert done.wait(60)
    clerk.close()
    assert capsys.readouterr().err == "serve: batches: internal error: KeyError: 'x'\n"
