"""Define the routes: OpenAI's, and `/health`, `/metrics` and `/status`."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from flexgen_h2o.core.errors import FlexgenError
from flexgen_h2o.engine.sequence import CODE_INTERNAL
from flexgen_h2o.jobs.requests import ClientRequest, RequestReader
from flexgen_h2o.serving.answers import (
    RequestRefused,
    StreamEvents,
    body_of,
    error_event,
    internal_error,
    is_fault,
    json_of,
    read_asked,
)
from flexgen_h2o.serving.batches import Batches
from flexgen_h2o.serving.block import Service, Ticket
from flexgen_h2o.serving.guard import json_response, refusal
from flexgen_h2o.serving.state import memory_of, metrics_text, status_of

MAX_LISTED = 10_000  # most entries of a page
LISTED = {"files": 10_000, "batches": 20}  # entries by default, as OpenAI has it
EXPIRY_FIELDS = (
    "expires_after[anchor]",
    "expires_after[seconds]",
)
FORM_FIELDS = ("file", "purpose", *EXPIRY_FIELDS)
# The bounds of OpenAI's API.
MIN_EXPIRY_S = 3600
MAX_EXPIRY_S = 2_592_000
SHORT_BODY = 2**16  # bytes
Reply = Callable[[Request], Awaitable[Response]]


class Server:
    """State that the routes share."""

    def __init__(self, service: Service, batches: Batches, reader: RequestReader) -> None:
        self.service = service
        self.batches = batches
        self.reader = reader
        self.created = int(time.time())
        self.other: Server | None = None  # a server with another eviction policy, for comparisons
        # Prompts are tokenised beside the engine. One short request and one long one are read at a
        # time.
        self._reading_short = asyncio.Semaphore(1)
        self._reading_long = asyncio.Semaphore(1)

    def app(self, more: Sequence[Route] = ()) -> Starlette:
        routes = [
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            Route("/status", self.status),
            _route("/v1/models", self.models),
            _route("/v1/models/{name:path}", self.model),
            _route("/v1/completions", self.complete, "POST"),
            _route("/v1/chat/completions", self.complete, "POST"),
            _route("/v1/files", self.add_file, "POST"),
            _route("/v1/files", self.list_files, "GET", "after", "limit", "order", "purpose"),
            _route("/v1/files/{file_id}", self.delete_file, "DELETE"),
            _route("/v1/files/{file_id}", self.file),
            _route("/v1/files/{file_id}/content", self.content),
            _route("/v1/batches", self.add_batch, "POST"),
            _route("/v1/batches", self.list_batches, "GET", "after", "limit"),
            _route("/v1/batches/{batch_id}", self.batch),
            _route("/v1/batches/{batch_id}/cancel", self.cancel_batch, "POST"),
            _route("/v1/batches/{batch_id}/resume", self.resume_batch, "POST"),
        ]
        if self.other is not None:
            for path in ("/v1/completions", "/v1/chat/completions"):
                routes.append(_route(f"/compare{path}", self.other.complete, "POST"))
        return Starlette(routes=[*routes, *more], exception_handlers=HANDLERS)

    # The server

    async def health(self, request: Request) -> Response:
        is_open = self.service.is_open
        return json_response(
            {"status": "ok" if is_open else "shutting down"}, 200 if is_open else 503
        )

    async def metrics(self, request: Request) -> Response:
        return PlainTextResponse(
            metrics_text(self.service, self.batches), media_type="text/plain; version=0.0.4"
        )

    async def status(self, request: Request) -> Response:
        found = status_of(self.service, self.batches)
        other = self.other
        compare = None
        if other is not None:
            compare = {
                "eviction": other.service.llm.eviction.to_json(),
                "memory": memory_of(other.service),
            }
        return json_response({**found, "compare": compare})

    async def models(self, request: Request) -> Response:
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        if request.path_params["name"] != self.reader.model.name:
            raise RequestRefused(
                f"no model {request.path_params['name'][:60]!r}", "model_not_found", 404
            )
        return json_response(self._model())

    def _model(self) -> dict[str, Any]:
        name = self.reader.model.name
        length = self.service.length
        return {
            "id": name,
            "object": "model",
            "created": self.created,
            "owned_by": "flexgen-h2o",
            "max_model_len": length,
        }

    # Completions

    async def complete(self, request: Request) -> Response:
        data = await json_body(request)
        async with self._reading_short if len(data) <= SHORT_BODY else self._reading_long:
            body = await run_in_threadpool(json_of, data)
            path = request.url.path.removeprefix("/compare")
            service = self.service
            most = service.most_queued, service.length
            asked = await run_in_threadpool(read_asked, self.reader, path, body, *most)
        events: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(event: tuple[object, ...]) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(events.put_nowait, event)

        ticket = Ticket(deque(asked.requests), tell, asked.stream)
        self.service.submit(ticket)
        if asked.stream:
            return StreamingResponse(
                self._stream(asked, ticket, events), media_type="text/event-stream"
            )
        try:
            await _unless_gone(request, _gather(asked, events))
        finally:
            self.service.give_up(ticket)
        return json_response(await run_in_threadpool(body_of, asked, self.reader.model))

    async def _stream(
        self, asked: ClientRequest, ticket: Ticket, events: asyncio.Queue[tuple[Any, ...]]
    ) -> AsyncIterator[bytes]:
        pieces = StreamEvents(asked, self.reader.model)
        left = len(asked.requests)
        try:
            for piece in pieces.first():
                yield piece
            while left:
                kind, *event = await events.get()
                if kind == "error":
                    yield error_event(event[0])
                    return
                if kind == "token":
                    for piece in pieces.token(*event):
                        yield piece
                else:
                    left -= 1
                    yield pieces.end(event[0].index)
            for piece in pieces.last():
                yield piece
        except BaseException as error:
            if not is_fault(error):
                raise
            yield error_event(internal_error("a stream", error))
        finally:
            self.service.give_up(ticket)

    # Files

    async def add_file(self, request: Request) -> Response:
        if not request.headers.get("content-type", "").startswith("multipart/form-data"):
            raise RequestRefused(
                "content-type: multipart/form-data is expected", "wrong_content_type", 415
            )
        try:
            form = await request.form(max_files=1, max_fields=8, max_part_size=2**16)
        except (MultiPartException, HTTPException) as error:
            what = getattr(error, "detail", None) or getattr(error, "message", "")
            raise RequestRefused(f"file: not a form of fields and one file ({what})") from error
        except OSError as error:  # error of the temporary file that a large upload is written to
            raise RequestRefused(
                f"file: {error.strerror or error}", "storage_failed", 500
            ) from error
        try:
            _check_form([name for name, _ in form.multi_items()])
            file = form.get("file")
            purpose = form.get("purpose")
            if purpose != "batch":
                raise RequestRefused(f"purpose: {purpose!r:.60} is not batch")
            if file is None or isinstance(file, str):
                raise RequestRefused("file: is missing")
            name = file.filename or "upload.jsonl"
            record = await run_in_threadpool(
                self.batches.store.add_file, file.file, name, _expiry_of(form)
            )
        finally:
            await form.close()
        return json_response(record)

    async def list_files(self, request: Request) -> Response:
        purpose = request.query_params.get("purpose")
        found = [
            one
            for one in list(self.batches.store.files.values())
            if purpose in (None, one["purpose"])
        ]
        order = request.query_params.get("order", "desc")
        if order not in ("asc", "desc"):
            raise RequestRefused(f"order: {order[:60]!r} is neither asc nor desc")
        return _page(request, found if order == "asc" else found[::-1], LISTED["files"])

    async def file(self, request: Request) -> Response:
        return json_response(self.batches.store.file(request.path_params["file_id"]))

    async def content(self, request: Request) -> Response:
        path = self.batches.store.path(request.path_params["file_id"])
        return FileResponse(path, media_type="application/jsonl")

    async def delete_file(self, request: Request) -> Response:
        file_id = request.path_params["file_id"]
        await run_in_threadpool(self.batches.store.delete_file, file_id)
        return json_response({"id": file_id, "object": "file", "deleted": True})

    # Batches

    async def add_batch(self, request: Request) -> Response:
        body = json_of(await json_body(request))
        return json_response(await run_in_threadpool(self.batches.create, body))

    async def list_batches(self, request: Request) -> Response:
        found = list(self.batches.store.batches.values())[::-1]
        return _page(request, found, LISTED["batches"], self.batches.shown)

    async def batch(self, request: Request) -> Response:
        return json_response(
            self.batches.shown(self.batches.store.batch(request.path_params["batch_id"]))
        )

    async def cancel_batch(self, request: Request) -> Response:
        found = await run_in_threadpool(self.batches.cancel, request.path_params["batch_id"])
        return json_response(self.batches.shown(found))

    async def resume_batch(self, request: Request) -> Response:
        found = await run_in_threadpool(self.batches.resume, request.path_params["batch_id"])
        return json_response(self.batches.shown(found))


async def json_body(request: Request) -> bytes:
    if (
        request.headers.get("content-type", "").partition(";")[0].strip().lower()
        != "application/json"
    ):
        raise RequestRefused(
            "content-type: application/json is expected", "wrong_content_type", 415
        )
    return await request.body()


async def _gather(asked: ClientRequest, events: asyncio.Queue[tuple[Any, ...]]) -> None:
    """Wait until all sequences are done. Raise RequestRefused if one cannot be run."""
    left = len(asked.requests)
    while left:
        kind, *event = await events.get()
        if kind == "error":
            raise event[0]
        left -= 1


async def _unless_gone(request: Request, coroutine: Any) -> Any:
    """Return the result of the coroutine. Raise ClientDisconnect if the client leaves before."""
    work = asyncio.ensure_future(coroutine)
    gone = asyncio.ensure_future(request.receive())
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        for one in (work, gone):
            one.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


def _route(path: str, reply: Reply, method: str = "GET", *names: str) -> Route:
    """Return one of OpenAI's routes.

    names: query fields that it accepts. Others are refused, because they would change nothing.
    """

    async def checked(request: Request) -> Response:
        given = [name for name, _ in request.query_params.multi_items()]
        for name in given:
            if name not in names:
                raise RequestRefused(
                    f"{name[:60]}: is not supported in the query of {method} {path}", "unsupported"
                )
        if len(set(given)) < len(given):
            raise RequestRefused("a query field is given twice")
        return await reply(request)

    return Route(path, checked, methods=[method])


def _check_form(names: Sequence[str]) -> None:
    """Raise RequestRefused if an upload has a field that would change nothing."""
    for name in names:
        if name not in FORM_FIELDS:
            raise RequestRefused(
                f"{name[:60]}: is not supported in a form with a file", "unsupported"
            )
    if len(set(names)) < len(names):
        raise RequestRefused("a field of the form is given twice")


def _expiry_of(form: FormData) -> int | None:
    """Return the seconds that a file is to be kept, or None if the form does not say."""
    anchor, seconds = (form.get(name) for name in EXPIRY_FIELDS)
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise RequestRefused("expires_after: its anchor must be created_at")
    is_number = isinstance(seconds, str) and seconds.isdecimal() and len(seconds) < 10
    if not is_number or not MIN_EXPIRY_S <= int(seconds) <= MAX_EXPIRY_S:  # type: ignore[arg-type]
        told = (
            f"expires_after: its seconds must be a whole number from {MIN_EXPIRY_S} to "
            f"{MAX_EXPIRY_S}"
        )
        raise RequestRefused(told)
    return int(seconds)  # type: ignore[arg-type]


def _page(
    request: Request,
    found: list[dict[str, Any]],
    listed: int,
    shown: Callable[[dict[str, Any]], dict[str, Any]] = lambda one: one,
) -> Response:
    """Return a page of a list in OpenAI's form. The query's `after` is the id before the page.

    listed: entries by default.
    """
    limit = request.query_params.get("limit", str(listed))
    after = request.query_params.get("after")
    if not limit.isdecimal() or len(limit) > 9 or not 1 <= int(limit) <= MAX_LISTED:
        raise RequestRefused(f"limit: {limit[:60]!r} is not a whole number from 1 to {MAX_LISTED}")
    if after is not None:
        places = [i for i, one in enumerate(found) if one["id"] == after]
        if not places:
            raise RequestRefused(f"after: {after[:60]!r} is not in the list", "not_found", 404)
        found = found[places[0] + 1 :]
    page = [shown(one) for one in found[: int(limit)]]
    ends = {
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
    }
    return json_response(
        {"object": "list", "data": page, **ends, "has_more": len(found) > len(page)}
    )


async def _told(request: Request, error: Exception) -> Response:
    """Return the answer to a request that raised an error. The guard logs an unforeseen one."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        where = f"{request.method} {request.url.path[:80]}"
        told = RequestRefused(f"{where}: {error.detail}", "not_found", error.status_code)
        response = refusal(told)
        response.headers.update(error.headers or {})
        return response
    if isinstance(error, RecursionError):
        error = RequestRefused("the body is nested too deeply", "invalid_json")
    elif isinstance(error, FlexgenError):
        error = RequestRefused(str(error), "storage_failed", 500)
    elif not isinstance(error, RequestRefused):
        error = RequestRefused("internal error", CODE_INTERNAL, 500)
    return refusal(error)


HANDLERS: Any = dict.fromkeys(
    (RequestRefused, HTTPException, ClientDisconnect, RecursionError, FlexgenError, Exception),
    _told,
)
