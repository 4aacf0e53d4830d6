"""Serve pages for people: the server's at `/`, the planner's at `/plan`, and the planner's
requests.

The files are in static/, and each is read once. They need no key; what they show comes from routes
that do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from flexgen_h2o.cli_common import flag_of
from flexgen_h2o.core import interrupts
from flexgen_h2o.core.config import TIERS
from flexgen_h2o.core.errors import FlexgenError, UsageError
from flexgen_h2o.models import built_in_names, built_in_spec
from flexgen_h2o.serving.answers import RequestRefused, json_of, shutting_down
from flexgen_h2o.serving.app import HANDLERS, json_body
from flexgen_h2o.serving.guard import json_response

STATIC = Path(__file__).parent / "static"
KINDS = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
# Nothing is loaded from other servers, nothing is inline, and no frame may hold a page.
HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
# searches at a time, and seconds per search
MAX_SEARCHES = 2
MAX_SEARCH_S = 120.0
SWITCHES = ("compress_weight", "compress_cache")
VALUES = (
    "num_prompts",
    "prompt_len",
    "gen_len",
    *(f"{tier}_mem" for tier in TIERS),
    "eviction",
    "hh_ratio",
    "kv_budget",
    "kv_loss",
)
MAX_CHARACTERS = 100  # most characters of a value


class PageRoutes:
    """Routes of the pages.

    machines: profiles by name.
    read: makes a profile of an object.
    ask: returns the answer as an object. Its arguments are words of the command line, a profile, a
    function called between candidates, and a model's shape.
    model: the model that the page begins with, and the words that say where it is. Of other models
    only shapes that come with the package are known: no folder that a client names is read.
    has_engine: without an engine `/` leads to the planner's page.
    machine: name of the machine that is chosen at first.

    `read` and `ask` are functions of flexgen_h2o.policy_search.
    """

    def __init__(
        self,
        machines: Mapping[str, Any],
        read: Callable[[object], Any],
        ask: Callable[[Sequence[str], Any, Callable[[], None], Any], dict[str, Any]],
        model: Sequence[str],
        has_engine: bool,
        machine: str | None = None,
    ) -> None:
        self._machine = machine
        self._machines = machines
        self._read = read
        self._ask = ask
        self._model = model
        self._has_engine = has_engine
        self._files = {
            path.name: path.read_bytes() for path in STATIC.iterdir() if path.suffix in KINDS
        }
        self._running = 0  # searches that run
        self._is_open = True

    def routes(self) -> list[Route]:
        return [
            Route("/", self.first),
            Route("/plan", self.plan_page),
            Route("/static/{name}", self.static),
            Route("/api/plan", self.choices),
            Route("/api/plan", self.plan, methods=["POST"]),
        ]

    def app(self) -> Starlette:
        """Return the application of a server without an engine."""
        routes = [*self.routes(), Route("/health", _health)]
        return Starlette(routes=routes, exception_handlers=HANDLERS)

    def close(self) -> None:
        """Have the searches end that run."""
        self._is_open = False

    async def first(self, request: Request) -> Response:
        return self._file("index.html") if self._has_engine else RedirectResponse("/plan")

    async def plan_page(self, request: Request) -> Response:
        return self._file("plan.html")

    async def static(self, request: Request) -> Response:
        return self._file(request.path_params["name"])

    def _file(self, name: str) -> Response:
        if name not in self._files:
            raise HTTPException(404, "Not Found")
        kind = KINDS[Path(name).suffix]
        return Response(self._files[name], media_type=kind, headers=HEADERS)

    async def choices(self, request: Request) -> Response:
        """Return what the planner's page offers."""
        machines = [
            {
                "name": name,
                "description": one.description,
                "date": one.date[:10],
                "device_is_host": one.device_is_host,
                "memory": {tier: getattr(one, f"{tier}_mem_bytes") for tier in TIERS},
            }
            for name, one in self._machines.items()
        ]
        models = list(dict.fromkeys([self._model[0], *built_in_names()]))
        return json_response(
            {
                "models": models,
                "machines": machines,
                "machine": self._machine,
                "has_engine": self._has_engine,
            }
        )

    async def plan(self, request: Request) -> Response:
        """Return the answer to {model, machine or profile, SWITCHES, VALUES}, as policy_search.ask
        does.
        """
        question = self._question(json_of(await json_body(request)))
        if not self._is_open or self._running == MAX_SEARCHES:
            raise RequestRefused(
                f"{self._running} searches run already; try again in a moment",
                "busy",
                429,
                retry_after=5,
            )
        self._running += 1
        try:
            return json_response(await run_in_threadpool(self._search, *question))
        finally:
            self._running -= 1

    def _search(self, words: Sequence[str], profile: Any, spec: Any) -> dict[str, Any]:
        ends = time.monotonic() + MAX_SEARCH_S

        def check() -> None:
            interrupts.check()
            if not self._is_open:
                raise shutting_down()
            if time.monotonic() > ends:
                raise RequestRefused(
                    f"the search took more than {MAX_SEARCH_S:.0f} s; ask at a terminal",
                    "too_long",
                    503,
                )

        try:
            return self._ask(words, profile, check, spec)
        except FlexgenError as error:
            raise RequestRefused(str(error), "cannot_plan") from error
        except interrupts.Interrupted as error:
            raise shutting_down() from error

    def _question(self, body: Mapping[str, Any]) -> tuple[list[str], Any, Any]:
        """Return words of the command line, the profile, and the model's shape.

        The shape is None if the words say where the model is. Raise RequestRefused, naming the
        field, if one is wrong.
        """
        words = list[str]()
        for name, value in body.items():
            if name in SWITCHES and isinstance(value, bool):
                words += [flag_of(name)] * value
            elif (
                name in VALUES
                and isinstance(value, str | int | float)
                and len(str(value)) <= MAX_CHARACTERS
            ):
                words.append(f"{flag_of(name)}={value}")
            elif name not in ("model", "machine", "profile"):
                known = ", ".join(("model", "machine", "profile", *SWITCHES, *VALUES))
                raise RequestRefused(
                    f"{name[:60]}: is no field with such a value; fields are {known}"
                )
        model = body.get("model", self._model[0])
        if model == self._model[0]:
            return [f"--model={model}", *self._model[1:], *words], self._profile(body), None
        shape = (
            built_in_spec(model)
            if isinstance(model, str) and len(model) <= MAX_CHARACTERS
            else None
        )
        # A folder or the hub's cache may be read only by a person with a terminal on this machine.
        if shape is None:
            known = "GET /api/plan lists those that come with this package"
            raise RequestRefused(
                f"model: {str(model)[:60]!r} is not a hub id whose shape is known here; {known}"
            )
        return [f"--model={shape[0].name}", *words], self._profile(body), shape[0]

    def _profile(self, body: Mapping[str, Any]) -> Any:
        machines = self._machines
        name = body.get("machine")
        if (name is None) is ("profile" not in body):
            raise RequestRefused("machine: give it, or the object of a profile as `profile`")
        if name is None:
            try:
                return self._read(body["profile"])
            except UsageError as error:
                raise RequestRefused(f"profile: {error}") from error
        if not isinstance(name, str) or name not in machines:
            raise RequestRefused(f"machine: {str(name)[:60]!r} is none of {', '.join(machines)}")
        return machines[name]


async def _health(request: Request) -> Response:
    return json_response({"status": "ok"})
