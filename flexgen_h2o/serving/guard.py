"""Protect the routes from slow or too many connections, large bodies, missing keys and wrong
origins.

Nothing that a client sends is kept beyond these bounds.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, ClassVar

import h11
from starlette.datastructures import Headers
from starlette.responses import Response
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from flexgen_h2o.core.libraries import check_library
from flexgen_h2o.serving.answers import RequestRefused, internal_error, is_fault

MIN_RATE = 2**14  # bytes per second at which a body must arrive, once the patience is over
KEEP_ALIVE_S = 30  # for a client's next request
# Bytes under way in all requests together, as a multiple of the largest.
MAX_AT_ONCE = {"body": 16, "file": 4}
OPEN_TO_ALL = ("/health", "/", "/plan")  # open without a key, as is all below STATIC
STATIC = "/static/"
PORT = re.compile(r":\d*$")
LOCAL = ("localhost", "127.0.0.1", "[::1]", "::1")

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class Bounds:
    """Limits of the server, made of the flags of `serve`."""

    body: int  # most bytes of a request
    file: int  # most bytes of an upload
    connections: int  # most connections that are open at a time
    patience: float  # seconds for a client to send its next bytes, and to take the server's
    key: str | None  # API key; None for no key
    local_only: bool  # whether other host names than this machine's are refused


def json_response(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return JSON in ASCII: a client's JSON may hold half a surrogate pair, no part of UTF-8."""
    return Response(json.dumps(content), status, headers, "application/json")


def refusal(error: RequestRefused) -> Response:
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    return json_response(error.body, error.status, headers)


class Guard:
    """An application that wraps another one and checks its requests."""

    def __init__(self, app: App, bounds: Bounds) -> None:
        self._app = app
        self._bounds = bounds
        self._coming = dict.fromkeys(MAX_AT_ONCE, 0)  # bytes of requests that are not answered yet

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        has_begun = False

        async def sending(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        kind = "file" if scope["path"] == "/v1/files" else "body"
        size = 0
        most = self._bounds.file if kind == "file" else self._bounds.body

        async def receiving() -> Message:
            nonlocal size
            message = await receive()
            new = len(message.get("body", b""))
            size = size + new
            self._coming[kind] = self._coming[kind] + new
            if size > most:
                raise _too_large(most)
            if self._coming[kind] > MAX_AT_ONCE[kind] * most:
                raise RequestRefused(
                    "too much is on its way; try again later", "overloaded", 503, retry_after=5
                )
            return message

        try:
            self._check(Headers(scope=scope), scope["path"], most)
            await self._app(scope, receiving, sending)
        except RequestRefused as error:
            if not has_begun:
                await refusal(error)(scope, receive, send)
        except BaseException as error:
            # An internal error: the client gets a status, and the log a line.
            if not is_fault(error):
                raise
            told = internal_error(repr(scope["path"][:80]), error)
            if not has_begun:
                await refusal(told)(scope, receive, send)
        finally:
            self._coming[kind] -= size

    def _check(self, headers: Headers, path: str, most: int) -> None:
        # Host names are case-insensitive.
        bounds = self._bounds
        host = headers.get("host", "").lower()
        if bounds.local_only and PORT.sub("", host) not in LOCAL:
            raise RequestRefused(f"host: {host[:60]!r} is not this machine", "wrong_host", 403)
        origin = headers.get("origin")
        if origin is not None and origin.lower().partition("://")[2] != host:
            raise RequestRefused(
                "origin: pages of other servers may not ask here", "wrong_origin", 403
            )
        if bounds.key is not None and path not in OPEN_TO_ALL and not path.startswith(STATIC):
            kind, _, key = headers.get("authorization", "").partition(" ")
            if kind.lower() != "bearer" or not hmac.compare_digest(
                key.strip().encode(), bounds.key.encode()
            ):
                raise RequestRefused("authorization: no or a wrong API key", "invalid_api_key", 401)
        length = headers.get("content-length")
        if length is not None and (not length.isdecimal() or int(length) > most):
            raise _too_large(most)


def _too_large(most: int) -> RequestRefused:
    return RequestRefused(f"the body has more than {most} bytes", "too_large", 413)


class BoundedProtocol(H11Protocol):
    """Uvicorn's protocol with a limit of connections and deadlines for slow clients."""

    bounds: ClassVar[Bounds]
    _watch: asyncio.TimerHandle | None = None
    _deadline = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.bounds.connections:
            self._refuse(503, "too many connections are open")
            return
        self._expect(self.bounds.patience)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self.conn.their_state
        super().data_received(data)
        if self.conn.their_state is h11.SEND_BODY:
            if before is not h11.SEND_BODY:
                self._expect(self.bounds.patience)
            self._deadline += len(data) / MIN_RATE
        elif self.conn.their_state is h11.IDLE and self.timeout_keep_alive_task is None:
            if self._watch is None:  # a header has begun
                self._expect(self.bounds.patience)
        elif not self.flow.write_paused:
            self._forget()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect(self.bounds.patience)  # for the client to take what was sent

    def resume_writing(self) -> None:
        self._forget()
        super().resume_writing()

    def _expect(self, seconds: float) -> None:
        self._forget()
        self._deadline = self.loop.time() + seconds
        self._watch = self.loop.call_later(seconds, self._look)

    def _forget(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None

    def _look(self) -> None:
        left = self._deadline - self.loop.time()
        if left > 0:  # a body that arrives fast enough
            self._watch = self.loop.call_later(left, self._look)
            return
        self._watch = None
        if self.flow.write_paused:
            self.transport.abort()
        else:
            self._refuse(408, "the request did not come in time")

    def _refuse(self, status: int, message: str) -> None:
        body = json.dumps(RequestRefused(message, "refused", status).body).encode()
        head = (
            f"HTTP/1.1 {status} Refused\r\ncontent-type: application/json\r\ncontent-length: "
            f"{len(body)}\r\n"
        )
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()


def protocol_works() -> bool:
    """Return whether Uvicorn's protocol has all that `BoundedProtocol` uses."""
    config = Config("", interface="asgi3", lifespan="off", log_config=None)
    config.loaded = True  # there is no application to load
    config.loaded_app = config.ws_protocol_class = None
    loop = asyncio.new_event_loop()
    try:
        one = H11Protocol(config, ServerState(), {}, loop)
    finally:
        loop.close()
    used = {"conn", "connections", "flow", "loop", "timeout_keep_alive_task", "transport"}
    return used <= vars(one).keys()


def uvicorn_config(app: App, bounds: Bounds) -> Config:
    """Return Uvicorn's configuration, which logs nothing.

    The guard logs errors. The libraries would print a line for each client that has gone.

    Raise UsageError if Uvicorn is an untried version without what is used of its inside.
    """
    check_library("uvicorn", protocol_works)
    for name in ("asyncio", "python_multipart"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    protocol = type("Protocol", (BoundedProtocol,), {"bounds": bounds})
    return Config(
        app,
        http=protocol,
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        backlog=bounds.connections,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=5,
        proxy_headers=False,
    )
