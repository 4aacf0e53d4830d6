"""Answer OpenAI's clients, and run their batches. Requests of clients come first; batches survive a
kill."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from flexgen_h2o.cli_common import count, file_name, own_name, positive, run_cli, say
from flexgen_h2o.core import interrupts
from flexgen_h2o.core.descriptors import (
    descriptor_limits,
    descriptors_in_use,
    raise_descriptor_limit,
)
from flexgen_h2o.core.errors import EXIT_DONE, DoesNotFitError, UsageError
from flexgen_h2o.core.files import DEFAULT_OFFLOAD_DIR, check_folder, usable_path
from flexgen_h2o.core.settings import NEW_TOKENS
from flexgen_h2o.core.units import check_number, parse_bytes
from flexgen_h2o.flags import (
    SHOWN_OF_ENGINE,
    add_engine_flags,
    add_eviction_flags,
    add_max_tokens_flag,
    add_sampling_flags,
    add_template_flags,
    budget_of,
    check_gpu,
    eviction_of,
    naming_flags,
    open_llm,
    policy_of,
    sampling_of,
    say_notes,
)
from flexgen_h2o.parser import OneLineParser

if TYPE_CHECKING:
    from flexgen_h2o.core.config import Policy
    from flexgen_h2o.serving.app import Server
    from flexgen_h2o.serving.block import Service
    from flexgen_h2o.serving.guard import App, Bounds
    from flexgen_h2o.serving.pages import PageRoutes

KEY_VARIABLE = "FLEXGEN_H2O_API_KEY"
ROWS = 64  # rows of a block that `auto` plans
MAX_LENGTH = 2048  # tokens of a sequence, without --max-len
NEEDED = {"starlette": "starlette", "uvicorn": "uvicorn", "python_multipart": "python-multipart"}
STATE_DIR = "~/flexgen_h2o_server"
PLANNED = "facebook/opt-30b"  # model that the planner's page begins with, if none is named
# Descriptors for batches and what libraries open; and for a connection, which may wait to be
# accepted, and its upload.
SPARE_DESCRIPTORS = 24
FOR_A_CONNECTION = 3
# places and queue of the engine for comparisons
COMPARED_ROWS = 2
COMPARED_QUEUE = 16
SHOWN = (
    *SHOWN_OF_ENGINE,
    "--max-tokens",
    "--no-thinking",
    "--chat-template-kwargs",
    "--host",
    "--port",
    "--api-key",
    "--state-dir",
    "--rows",
    "--max-len",
    "--plan-only",
)
EXAMPLES = (
    "flexgen-h2o serve smollm2-135m",
    "flexgen-h2o serve Qwen/Qwen3-8B --ram 8GiB --rows 32 --max-len 1024",
    "flexgen-h2o serve --plan-only",
)
# Flags that are allowed with --plan-only.
OF_PLAN_ONLY = (
    "plan_only",
    "host",
    "port",
    "api_key",
    "max_body",
    "max_connections",
    "timeout",
    "model",
    "path",
    "revision",
    "offload_dir",
)


def main(argv: list[str] | None = None) -> int:
    """Run the command line: serve until a signal ends it. Return the exit code."""
    return run_cli("serve", _run, argv)


def _parser() -> OneLineParser:
    prog = f"flexgen-h2o {own_name('serve')}"
    parser = OneLineParser(
        prog=prog, synopsis="MODEL [flags]", description=__doc__, shown=SHOWN, examples=EXAMPLES
    )
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen at (127.0.0.1: this machine only)")
    add("--port", type=count, default=8000, help="0 takes a free one (8000)")
    add(
        "--api-key",
        metavar="KEY",
        help=f"that clients must send (default: of {KEY_VARIABLE}; none on this machine)",
    )
    add(
        "--state-dir",
        type=file_name,
        default=Path(STATE_DIR),
        help=f"files and batches ({STATE_DIR})",
    )
    add(
        "--rows",
        type=positive,
        help=f"requests that are computed together (the plan's batch; {ROWS} with auto)",
    )
    length = (
        "most tokens of a request, prompt and answer (the model's positions or "
        f"{MAX_LENGTH}, whichever is less)"
    )
    add("--max-len", type=positive, metavar="TOKENS", help=length)
    share = "share of --rows that is kept for batches while any wait (0.25)"
    add("--batch-share", type=float, default=0.25, metavar="SHARE", help=share)
    add(
        "--max-queue",
        type=positive,
        default=1000,
        metavar="ROWS",
        help="most requests of clients that wait (1000)",
    )
    add("--max-body", default="8MiB", metavar="BYTES", help="of a request (8MiB)")
    add("--max-file", default="200MiB", metavar="BYTES", help="of a file that is sent (200MiB)")
    add(
        "--max-stored",
        default="20GiB",
        metavar="BYTES",
        help="of all files that were sent and error rows (20GiB)",
    )
    add("--max-rows", type=positive, default=50_000, metavar="ROWS", help="of a batch (50000)")
    add("--max-connections", type=positive, default=512, metavar="N", help="open at a time (512)")
    add(
        "--timeout",
        type=positive,
        default=30,
        metavar="SECONDS",
        help="for a client that sends or takes nothing (30)",
    )
    add(
        "--compare",
        metavar="NAME",
        help="eviction policy of a second, small engine for comparisons",
    )
    add(
        "--compare-share",
        type=float,
        default=0.25,
        metavar="SHARE",
        help="of the memory budgets, for it (0.25)",
    )
    add("--plan-only", action="store_true", help="the planner's page alone: no model is loaded")
    add_max_tokens_flag(
        parser, NEW_TOKENS, "most new tokens of a request that does not say how many"
    )
    add_sampling_flags(parser)
    add_template_flags(parser)
    add_engine_flags(parser)
    add_eviction_flags(parser)
    return parser


def _run(argv: list[str] | None) -> int:
    args = _parser().parse_args(argv)
    missing = [package for module, package in NEEDED.items() if find_spec(module) is None]
    if missing:
        raise UsageError(f"needs {', '.join(missing)}; pip install -e '.[serve]' in a clone")
    bounds = _bounds(args)
    if args.plan_only:
        return _plan_only(args, bounds)
    with naming_flags():
        check_number("batch_share", args.batch_share, 1.0)
        check_number("compare_share", args.compare_share, 0.9)
    if not args.compare_share:
        raise UsageError(
            "--compare-share 0: leaves the second engine nothing; give a share above 0"
        )
    args.state_dir = check_folder(args.state_dir, "--state-dir")
    policy, is_auto = policy_of(args)
    defaults = sampling_of(args)
    eviction = eviction_of(args, policy)
    from flexgen_h2o.jobs.job import settings_of
    from flexgen_h2o.jobs.requests import RequestReader
    from flexgen_h2o.serving.app import Server
    from flexgen_h2o.serving.batches import Batches
    from flexgen_h2o.serving.block import Service
    from flexgen_h2o.serving.store import Store

    args, beside = _shares(args)
    raise_descriptor_limit(SPARE_DESCRIPTORS + FOR_A_CONNECTION * args.max_connections)
    with _listening(args) as listener, open_llm(args, policy, is_auto, eviction) as llm:
        llm.share_prefix = "off"  # sequences that come later begin differently
        llm.check_plan()
        say_notes("serve", args, llm)
        length = _length(args, llm.model.spec.max_positions)
        rows = args.rows or (ROWS if is_auto else policy.block_size)
        service = Service(llm, rows, length, args.max_queue, args.batch_share)
        service.open()
        reader = RequestReader(llm.model, defaults, llm.eviction, most_tokens=length)
        settings = settings_of(llm, policy, is_auto, defaults)
        with (
            contextlib.closing(
                Store(args.state_dir, parse_bytes(args.max_stored, "--max-stored"))
            ) as store,
            _compared(beside, policy, is_auto, length) as other,
        ):
            pages = _pages(args, has_engine=True)
            bounds = _within_descriptors(bounds)
            batches = Batches(store, service, reader, settings, args.max_rows)
            server = Server(service, batches, reader)
            if other is not None:
                others = RequestReader(
                    other.llm.model, defaults, other.llm.eviction, most_tokens=length
                )
                server.other = Server(other, batches, others)
            with _serving(server, pages, bounds, listener):
                print(f"{llm.model.name} at {_address(listener)}/v1", flush=True)
                service.run()
    return EXIT_DONE


def _plan_only(args: argparse.Namespace, bounds: Bounds) -> int:
    """Serve the planner's page until a signal ends it."""
    for field, flag in args.given.items():
        if field not in OF_PLAN_ONLY:
            raise UsageError(f"{flag}: is for an engine, and --plan-only has none; leave it out")
    pages = _pages(args, has_engine=False)
    with (
        _listening(args) as listener,
        _answering(pages.app(), bounds, listener, pages.close),
    ):
        print(f"planner at {_address(listener)}/plan", flush=True)
        interrupts.wait_for(threading.Event())
    return EXIT_DONE


def _pages(args: argparse.Namespace, has_engine: bool) -> PageRoutes:
    from flexgen_h2o.planner.profile import profile_from_json
    from flexgen_h2o.policy_search import ask, machines, nearest_machine
    from flexgen_h2o.serving.pages import PageRoutes

    given = [
        f"--{name}={value}"
        for name in ("path", "revision")
        if (value := getattr(args, name)) is not None
    ]
    known = machines(args.offload_dir)
    model = [args.model or PLANNED, *given]
    return PageRoutes(known, profile_from_json, ask, model, has_engine, nearest_machine(known))


def _shares(args: argparse.Namespace) -> tuple[argparse.Namespace, argparse.Namespace | None]:
    """Return the flags of the engine, and of the one for comparisons.

    The budgets are divided between them.
    """
    if args.compare is None:
        return args, None
    from flexgen_h2o.tiers.device import open_device, resolve_budgets

    asked = budget_of(args)
    folder = usable_path(args.offload_dir or DEFAULT_OFFLOAD_DIR, "--offload-dir")
    check_gpu(args)
    device = open_device(args.device, separate_budget=False)
    budgets = {
        t: n
        for t, n in resolve_budgets(asked, device, folder).items()
        if t != "device" or not device.is_host
    }

    def part(share: float) -> argparse.Namespace:
        cut = {
            f"{t}_mem": None if nbytes is None else max(1, int(share * nbytes))
            for t, nbytes in budgets.items()
        }
        return argparse.Namespace(**{**vars(args), **cut})

    return part(1 - args.compare_share), part(args.compare_share)


@contextlib.contextmanager
def _compared(
    args: argparse.Namespace | None, policy: Policy, is_auto: bool, length: int
) -> Iterator[Service | None]:
    """Open the engine for comparisons, and run its block in a thread of its own."""
    if args is None:
        yield None
        return
    from flexgen_h2o.kvcache.eviction import Full, make_eviction
    from flexgen_h2o.serving.block import Service

    with naming_flags(eviction="--compare"):
        eviction = Full() if args.compare == "full" else make_eviction(args.compare)
    policy = replace(policy, gpu_batch_size=COMPARED_ROWS, num_gpu_batches=1)
    with (
        open_llm(args, policy, is_auto, eviction) as llm,
        naming_flags(kv_budget=f"--compare {args.compare}"),
    ):
        llm.share_prefix = "off"
        service = Service(llm, COMPARED_ROWS, length, COMPARED_QUEUE, 0.0)
        try:
            service.open()
        except DoesNotFitError as error:
            raise DoesNotFitError(
                f"--compare {args.compare}: {error}; --compare-share is what it gets"
            ) from error
        thread = threading.Thread(
            target=_run_until_closed, args=(service,), name="compare", daemon=True
        )
        interrupts.start(thread)
        try:
            yield service
        finally:
            with interrupts.held():
                service.close()
                service.wake()
                thread.join()


def _run_until_closed(service: Service) -> None:
    try:
        with contextlib.suppress(interrupts.Interrupted):
            service.run()
    finally:
        service.close()  # no client may wait for an engine that has failed


def _bounds(args: argparse.Namespace) -> Bounds:
    from flexgen_h2o.serving.guard import LOCAL, Bounds

    key = args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE)
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        where = "--api-key" if args.api_key is not None else KEY_VARIABLE
        raise UsageError(f"{where}: is empty, or has spaces or other than ASCII characters")
    is_local = args.host.lower() in LOCAL
    if key is None and not is_local:
        raise UsageError(
            f"--host {args.host}: others reach it there; give --api-key, or set {KEY_VARIABLE}"
        )
    sizes = (parse_bytes(args.max_body, "--max-body"), parse_bytes(args.max_file, "--max-file"))
    return Bounds(*sizes, args.max_connections, args.timeout, key, is_local)


def _within_descriptors(bounds: Bounds) -> Bounds:
    """Return bounds with as many connections as `ulimit -n` leaves room for, once the engine has
    its files.

    Raise UsageError if there is room for none.
    """
    limit, _ = descriptor_limits()
    room = (limit - descriptors_in_use() - SPARE_DESCRIPTORS) // FOR_A_CONNECTION
    if room < 1:
        needed = descriptors_in_use() + SPARE_DESCRIPTORS + FOR_A_CONNECTION
        raise UsageError(f"ulimit -n is {limit}, and a server needs at least {needed}; raise it")
    if room < bounds.connections:
        say(
            "serve",
            f"ulimit -n is {limit}: at most {room} connections at a time, not "
            f"{bounds.connections}; raise it",
        )
        return replace(bounds, connections=room)
    return bounds


def _length(args: argparse.Namespace, positions: int) -> int:
    if args.max_len is not None and args.max_len > positions:
        raise UsageError(
            f"--max-len {args.max_len}: {args.model} has {positions} positions; lower it"
        )
    return args.max_len or min(positions, MAX_LENGTH)


@contextlib.contextmanager
def _listening(args: argparse.Namespace) -> Iterator[socket.socket]:
    if args.port > 65535:
        raise UsageError(f"--port {args.port}: is above 65535")
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    # Another server, such as the one planned anew, may use the port.
    port = 0 if args.dry_run else args.port
    try:
        listener = socket.create_server(
            (args.host, port), family=family, backlog=args.max_connections
        )
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"--host {args.host[:60]} --port {args.port}: cannot listen there ({reason})"
        ) from error
    with listener:
        # Accepted connections inherit this. An answer's head and body are two writes, and the
        # second one would wait 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


@contextlib.contextmanager
def _serving(
    server: Server, pages: PageRoutes, bounds: Bounds, listener: socket.socket
) -> Iterator[None]:
    """Answer clients. At the end drop what runs, and leave batches to the next start."""

    def close() -> None:
        pages.close()
        for one in filter(None, (server, server.other)):
            one.service.close()

    server.batches.go_on()
    try:
        with _answering(server.app(pages.routes()), bounds, listener, close):
            yield
    finally:
        with interrupts.held():
            server.batches.close(interrupts.arrived() or RuntimeError("the server has failed"))


@contextlib.contextmanager
def _answering(
    app: App, bounds: Bounds, listener: socket.socket, close: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Run an application in a thread of its own.

    close: called before its clients are told to go.
    """
    import asyncio

    import uvicorn

    from flexgen_h2o.serving.guard import Guard, uvicorn_config

    web = uvicorn.Server(uvicorn_config(Guard(app, bounds), bounds))
    thread = threading.Thread(
        target=lambda: asyncio.run(web.serve(sockets=[listener])), name="http", daemon=True
    )
    interrupts.start(thread)
    try:
        yield
    finally:
        with interrupts.held():
            close()
            web.should_exit = True
            thread.join()


if __name__ == "__main__":
    sys.exit(main())
