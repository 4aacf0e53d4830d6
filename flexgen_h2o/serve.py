"""`flexgen-h2o serve`: OpenAI's API over one running block. Clients' rows come first; batches survive a kill."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from flexgen_h2o.cli_common import OneLineParser, count, file_name, note, positive, run_cli
from flexgen_h2o.core import interrupts
from flexgen_h2o.core.errors import EXIT_DONE, UsageError
from flexgen_h2o.core.files import check_folder
from flexgen_h2o.core.units import check_number, parse_bytes
from flexgen_h2o.flags import (
    add_engine_flags,
    add_eviction_flags,
    add_sampling_flags,
    eviction_of,
    naming_flags,
    open_llm,
    place_of,
    policy_of,
    sampling_of,
    say_idle_flags,
)

if TYPE_CHECKING:
    from flexgen_h2o.serving.app import Server
    from flexgen_h2o.serving.guard import Bounds

KEY_VARIABLE = "FLEXGEN_H2O_API_KEY"
ROWS = 64  # of a block that `auto` plans
MOST_LENGTH = 2048  # tokens of a row, without --max-len
NEEDED = {"starlette": "starlette", "uvicorn": "uvicorn", "python_multipart": "python-multipart"}
STATE_DIR = "~/flexgen_h2o_server"


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code: it serves until a signal ends it."""
    return run_cli("serve", _run, argv)


def _parser() -> OneLineParser:
    parser = OneLineParser(prog="serve", description=__doc__)
    add = parser.add_argument
    add("--host", default="127.0.0.1", help="address to listen at (127.0.0.1: this machine only)")
    add("--port", type=count, default=8000, help="0 takes a free one (8000)")
    add("--api-key", metavar="KEY", help=f"that clients must send (default: of {KEY_VARIABLE}; none on this machine)")
    add("--state-dir", type=file_name, default=Path(STATE_DIR), help=f"files and batches ({STATE_DIR})")
    add("--rows", type=positive, help=f"rows that are computed together (the policy's block; {ROWS} with auto)")
    length = f"most tokens of a row, prompt and answer (the model's positions, at most {MOST_LENGTH})"
    add("--max-len", type=positive, metavar="TOKENS", help=length)
    add("--batch-share", type=float, default=0.25, metavar="SHARE", help="of the rows, for batches that wait (0.25)")
    add("--max-queue", type=positive, default=1000, metavar="ROWS", help="rows of clients that wait at most (1000)")
    add("--max-body", default="8MiB", metavar="BYTES", help="of a request (8MiB)")
    add("--max-file", default="200MiB", metavar="BYTES", help="of a file that is sent (200MiB)")
    add("--max-stored", default="20GiB", metavar="BYTES", help="of all files that were sent (20GiB)")
    add("--max-connections", type=positive, default=512, metavar="N", help="open at a time (512)")
    add("--timeout", type=positive, default=30, metavar="SECONDS", help="for a client that sends or takes nothing (30)")
    add("--gen-len", type=positive, default=32, help="most new tokens of a row that does not say (32)")
    add_sampling_flags(parser)
    add_engine_flags(parser)
    add_eviction_flags(parser)
    return parser


def _run(argv: list[str] | None) -> int:
    args = _parser().parse_args(argv)
    missing = [package for module, package in NEEDED.items() if find_spec(module) is None]
    if missing:
        raise UsageError(f"needs {', '.join(missing)}; pip install -e '.[serve]' in a clone")
    bounds = _bounds(args)
    with naming_flags():
        check_number("batch_share", args.batch_share, 1.0)
    args.state_dir = check_folder(args.state_dir, "--state-dir")
    policy, is_auto = policy_of(args)
    defaults, eviction = sampling_of(args), eviction_of(args, policy)
    from flexgen_h2o.jobs.job import settings_of
    from flexgen_h2o.jobs.requests import RequestReader
    from flexgen_h2o.serving.answers import Limits
    from flexgen_h2o.serving.app import Server
    from flexgen_h2o.serving.batches import Batches, Store
    from flexgen_h2o.serving.block import Service

    with _listening(args) as listener, open_llm(args, policy, is_auto, eviction) as llm:
        llm.share_prefix = "off"  # rows that come later begin otherwise
        llm.check_plan()
        if llm.precision_note:
            note("serve", llm.precision_note)
        say_idle_flags("serve", args, place_of(args, llm))
        length = _length(args, llm.model.spec.max_positions)
        rows = args.rows or (ROWS if is_auto else policy.block_size)
        service = Service(llm, rows, length, args.max_queue, args.batch_share)
        service.open()
        reader = RequestReader(llm.model, defaults)
        settings = settings_of(llm, policy, is_auto, defaults, llm.digests())
        with contextlib.closing(Store(args.state_dir, parse_bytes(args.max_stored, "--max-stored"))) as store:
            batches = Batches(store, service, reader, settings)
            limits = Limits(args.max_queue, length, llm.model.spec.max_positions)
            with _serving(Server(service, batches, reader, limits), bounds, listener):
                host, port = listener.getsockname()[:2]
                print(f"{llm.model.name} at http://{f'[{host}]' if ':' in host else host}:{port}/v1", flush=True)
                service.run()
    return EXIT_DONE


def _bounds(args: argparse.Namespace) -> Bounds:
    from flexgen_h2o.serving.guard import LOCAL, Bounds

    key = args.api_key if args.api_key is not None else os.environ.get(KEY_VARIABLE)
    if key is not None and not (key and key.isascii() and key.isprintable() and " " not in key):
        where = "--api-key" if args.api_key is not None else KEY_VARIABLE
        raise UsageError(f"{where}: is empty, or has spaces or other than ASCII characters")
    is_local = args.host in LOCAL
    if key is None and not is_local:
        raise UsageError(f"--host {args.host}: others reach it there; give --api-key, or set {KEY_VARIABLE}")
    sizes = (parse_bytes(args.max_body, "--max-body"), parse_bytes(args.max_file, "--max-file"))
    return Bounds(*sizes, args.max_connections, args.timeout, key, is_local)


def _length(args: argparse.Namespace, positions: int) -> int:
    if args.max_len is not None and args.max_len > positions:
        raise UsageError(f"--max-len {args.max_len}: {args.model} has {positions} positions; lower it")
    return args.max_len or min(positions, MOST_LENGTH)


@contextlib.contextmanager
def _listening(args: argparse.Namespace) -> Iterator[socket.socket]:
    if args.port > 65535:
        raise UsageError(f"--port {args.port}: is above 65535")
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    try:
        listener = socket.create_server((args.host, args.port), family=family, backlog=args.max_connections)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"--host {args.host[:60]} --port {args.port}: cannot listen there ({reason})") from error
    with listener:
        yield listener


@contextlib.contextmanager
def _serving(server: Server, bounds: Bounds, listener: socket.socket) -> Iterator[None]:
    """Answer clients in a thread of its own. At the end what runs is given up; batches are left to the next start."""
    import asyncio

    import uvicorn

    from flexgen_h2o.serving.guard import Guard, uvicorn_config

    web = uvicorn.Server(uvicorn_config(Guard(server.app(), bounds), bounds))
    thread = threading.Thread(target=lambda: asyncio.run(web.serve(sockets=[listener])), name="http", daemon=True)
    server.batches.go_on()
    interrupts.start(thread)
    try:
        yield
    finally:
        with interrupts.held():
            server.service.close()
            web.should_exit = True
            thread.join()
            server.batches.close(interrupts.arrived() or RuntimeError("the server has failed"))


if __name__ == "__main__":
    sys.exit(main())
