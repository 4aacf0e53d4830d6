"""Run a job as a Ray Data pipeline.

Windows of the input go to a pool of actors, which have an engine each, and rows come back one by
one. Output, sidecar and status stay with the driver.

When an actor dies, Ray runs its window again. Rows are identified by their place in the input, so
those that came back before are not written twice. When Ray gives up, new actors run what is
missing, as long as some rows come back each time.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from flexgen_h2o.cli_common import say
from flexgen_h2o.core import interrupts
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import DoesNotFitError, FlexgenError, UsageError
from flexgen_h2o.core.files import expanded
from flexgen_h2o.core.units import counted, format_bytes, less_margin
from flexgen_h2o.engine.workload import window_rows
from flexgen_h2o.flags import budget_of, open_llm, sampling_of
from flexgen_h2o.jobs.input import InputPart, Line, cut_input, read_part
from flexgen_h2o.jobs.requests import Request, RequestReader
from flexgen_h2o.jobs.runner import JobRun, JobWriter, Sink
from flexgen_h2o.jobs.sidecar import Status
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.llm import LLM
from flexgen_h2o.tiers.device import may_use_card

Tell = Callable[[Any], None]
LOCAL = "local"
_STORE_BYTES = 256 * 2**20  # shared memory of a Ray that the job starts: windows and rows are small
_TICK_S = 1.0
_KNOCK_S = 10.0
_AHEAD = 2  # windows per actor, including the one that it runs
_RETRIES = 3  # retries of a window by Ray: a row that kills every actor would be retried forever


@dataclass(frozen=True)
class EngineArguments:
    """All that a job, or an actor of it, needs to open its engine."""

    args: argparse.Namespace  # the command line's; actors get absolute paths and their own RAM
    policy: Policy  # from `flags.policy_of`
    is_auto: bool  # from `flags.policy_of`: a search chooses the placement
    eviction: Eviction
    # Digests of the driver's weights and tokenizer (`LLM.digests`), which an actor's must equal.
    digests: dict[str, str | None] | None = None

    def open(self) -> LLM:
        """Return an open LLM. Raise FlexgenError if this node has another model under the name."""
        llm = open_llm(self.args, self.policy, self.is_auto, self.eviction)
        llm.share_prefix = self.args.share_prefix
        expected = self.digests or {}
        found = llm.digests() if expected else {}
        if differing := [what for what in expected if found[what] != expected[what]]:
            raise FlexgenError(
                f"--ray: {' and '.join(differing)} of {llm.model.name} on {socket.gethostname()} "
                "are not those that "
                "the job was begun with; give every node the same model, and leave it alone while "
                "the job runs"
            )
        return llm


# ---- In the actors


def run_window(
    llm: LLM,
    reader: RequestReader,
    lines: Sequence[Line],
    window: int | None,
    refill: bool,
    has_run: bool = False,
) -> Iterator[Sequence[Request] | Status]:
    """Run a window in a thread.

    Yield its rows as they come, then a `Status` with the engine's counts. Raise its errors.
    """

    def work(tell: Tell) -> None:
        def send(done: Sequence[Request]) -> None:
            for one in done:
                one.penalties = None  # tensors, which no row needs
            tell(list(done))

        sink = Sink(send)
        JobRun(llm, reader, lines, sink, window, refill, has_run).run(len(lines))
        sink.status.add_engine(peak_bytes=llm.peak_bytes)
        tell(sink.status)

    return from_thread(work)


def from_thread(work: Callable[[Tell], None], tick_s: float | None = None) -> Iterator[Any]:
    """Yield what `work`, which runs in a thread of its own, passes to its argument.

    Raise its errors here. Yield None when nothing was passed for tick_s seconds.
    """
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    over = object()

    def run() -> None:
        try:
            work(said.put)
            said.put(over)
        except BaseException as error:
            said.put(error)

    interrupts.start(threading.Thread(target=run, daemon=True))
    while True:
        try:
            found = said.get(timeout=tick_s)
        except queue.Empty:
            found = None
        if found is over:
            return
        if isinstance(found, BaseException):
            raise found
        yield found


class EngineActor:
    """An actor: it takes a window and yields its rows as they finish.

    Errors of the engine go to the driver.
    """

    def __init__(self, opening: EngineArguments, cpus: int) -> None:
        import torch

        torch.set_num_threads(cpus)
        self._opening = opening
        self._llm: LLM | None = None
        self._has_run = False

    def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield `found`: pickled rows, a `Status`, or an error of the engine and its traceback.

        batch: `lines` holds a pickled window.

        Each result becomes a block of its own (`ray_at`), which the driver gets at once.
        """
        args = self._opening.args
        try:
            if self._llm is None:
                self._llm = self._opening.open()
            reader = RequestReader(
                self._llm.model, sampling_of(args), self._llm.eviction, args.chat, args.system
            )
            lines = pickle.loads(batch["lines"][0])
            for found in run_window(
                self._llm, reader, lines, args.window, args.refill, self._has_run
            ):
                yield _packed("found", found)
                if not isinstance(found, Status):
                    for one in found:
                        one.release()
            self._has_run = True
        except Exception as error:
            yield _packed("found", (error, traceback.format_exc()))


def _packed(name: str, value: Any) -> dict[str, Any]:
    return {name: np.array([pickle.dumps(value)], dtype=object)}


# ---- In the driver


def run_on_ray(done: npt.NDArray[np.bool_], writer: JobWriter, opening: EngineArguments) -> None:
    """Run all rows that are left on the Ray that is open.

    done: (rows of the input,), which is kept up to date.

    Errors of an engine and of the writer are not caught. Raise FlexgenError if no row comes back,
    and DoesNotFitError as `find_pool` does.
    """
    args = opening.args
    actors, resources = find_pool(args.ray_actors, budget_of(args).host, args.device)
    cpus = resources["num_cpus"]
    say(
        "batch",
        f"{actors} engines on Ray, each with {counted(cpus, 'core')} and "
        f"{format_bytes(resources['memory'])} of RAM",
    )
    opening = replace(opening, args=_args_of_actors(args, resources["memory"]))
    block_size = 1 if opening.is_auto else opening.policy.block_size
    while left := int((~done).sum()):
        size = window_size(left, actors, block_size, args.window)
        cuts = list(cut_input(args.input, done, size))
        flow = partial(_run_flow, args.input, cuts, opening, actors, resources)
        why = "some came from no actor"
        for found in from_thread(flow, _TICK_S):
            if found is None:  # the output is synced meanwhile
                interrupts.check()
                writer.sweep(0)
            elif isinstance(found, str):
                why = found
            else:
                _take(found, done, writer)
        missing = int((~done).sum())
        if missing == left:
            raise FlexgenError(f"--ray: no answer came back from any actor ({why})")
        if missing:
            print(
                f"batch: --ray: {missing} rows are missing ({why}); they are run again",
                file=sys.stderr,
            )


def _args_of_actors(args: argparse.Namespace, host_bytes: int) -> argparse.Namespace:
    """Return the flags for other processes, which need absolute paths."""
    theirs = {**vars(args), "host_mem": host_bytes}
    for name in ("model", "path", "offload_dir", "hardware"):
        if theirs[name] is not None and (path := expanded(theirs[name]).absolute()).exists():
            theirs[name] = str(path)
    return argparse.Namespace(**theirs)


def _take(found: Any, done: npt.NDArray[np.bool_], writer: JobWriter) -> None:
    """Write what an actor has sent. Raise its engine's error."""
    if isinstance(found, tuple):
        error, trace = found
        raise error from RuntimeError(trace)
    if isinstance(found, Status):
        writer.status.add_engine(found.prompt_tokens, found.spared_tokens, found.peak_bytes)
        return
    new = [one for one in found if not done[one.row]]  # a retried window answers some rows again
    done[[one.row for one in new]] = True
    writer.sweep(sum(len(one.token_ids) for one in new))
    writer.write(new)


def window_size(left: int, actors: int, block_size: int, asked: int | None) -> int:
    """Return the rows of a window, in whole blocks: as asked, or so that all actors get about as
    many.
    """
    if asked is None:
        windows = actors * -(-left // (actors * window_rows(block_size, None)))
        asked = -(-left // windows)
    return window_rows(block_size, asked)


def _run_flow(
    source: Path,
    cuts: list[InputPart],
    opening: EngineArguments,
    actors: int,
    resources: dict[str, int],
    tell: Tell,
) -> None:
    """Run the pipeline in a thread of its own, so that signals reach the driver's main thread.

    actors, resources: as `find_pool` returns them.

    tell: gets what the actors yield, or why Ray has given up, as text.
    """
    import pyarrow
    import ray

    def lines_of(batch: dict[str, Any]) -> dict[str, Any]:
        return _packed("lines", list(read_part(source, pickle.loads(batch["cut"][0]))))

    # The input is read on this node, a window at a time, and only as the actors ask for them.
    here = {"ray.io/node-id": ray.get_runtime_context().get_node_id()}
    try:
        blocks = [pyarrow.table({"cut": [pickle.dumps(cut)]}) for cut in cuts]
        windows = ray.data.from_blocks(blocks).map_batches(
            lines_of,
            batch_size=1,
            batch_format="numpy",
            num_cpus=0,
            label_selector=here,
            # Ray starts a process per task for tasks without a core
            compute=ray.data.TaskPoolStrategy(size=1),
        )
        answers = windows.map_batches(
            EngineActor,
            batch_size=1,
            batch_format="numpy",
            **resources,
            fn_constructor_args=(opening, resources["num_cpus"]),
            compute=ray.data.ActorPoolStrategy(size=actors, max_tasks_in_flight_per_actor=_AHEAD),
            max_task_retries=_RETRIES,
        )
        for batch in answers.iter_batches(
            batch_size=None, batch_format="numpy", prefetch_batches=0
        ):
            for found in batch["found"]:
                tell(pickle.loads(found))
    except BaseException as error:
        tell(_last_line(error))


@contextlib.contextmanager
def ray_at(address: str | None) -> Iterator[None]:
    """Connect to the Ray at an address. None: start a local Ray that ends with the job."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # errors come as exceptions
    # Without this, the thread of an ended flow would start another Ray, whose signal handlers end
    # the process at once.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    import ray

    before = signal.getsignal(signal.SIGTERM)
    own: dict[str, Any] = (
        {"include_dashboard": False, "object_store_memory": _STORE_BYTES} if address is None else {}
    )
    try:
        _knock(address)
        ray.init(address or LOCAL, logging_level=logging.ERROR, log_to_driver=False, **own)
    except (RuntimeError, ValueError, OSError, OverflowError) as error:
        raise UsageError(f"--ray {address or ''}: no Ray there ({_last_line(error)})") from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, before)  # Ray has replaced the handler
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    # In bytes: each result of an actor becomes a block, which is sent at once.
    context.target_max_block_size = 1
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    # Until at least Ray 2.64 there is no other way to set max_task_retries. setup.py allows only
    # older versions.
    warnings.filterwarnings(
        "ignore", message="`ray_remote_args` is deprecated", category=DeprecationWarning
    )
    try:
        yield
    finally:
        with interrupts.held():
            ray.shutdown()


def _knock(address: str | None) -> None:
    """Raise OSError if nothing listens at HOST:PORT. Ray would try for more than a minute."""
    host, colon, port = (address or "").rpartition(":")
    if colon and port.isdecimal() and "/" not in host:
        with socket.create_connection((host, int(port)), timeout=_KNOCK_S):
            pass


def find_pool(
    actors: int | None, host_bytes: int | None, device: str
) -> tuple[int, dict[str, int]]:
    """Return the number of actors for the nodes of the open Ray, and what each gets.

    What it gets is named as Ray names it. By default there is one actor per GPU, or one per node.

    host_bytes: RAM of each actor. None: an even share of its node's RAM.

    Each actor gets as many cores as all can have. Raise DoesNotFitError if the nodes lack the
    resources.
    """
    import ray

    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cores, gpus, memory = (
        [int(node.get(name, 0)) for node in nodes] for name in ("CPU", "GPU", "memory")
    )
    cards = sum(gpus) if may_use_card(device) else 0
    number = actors or cards or len(nodes)
    for cpus in range(max(1, sum(cores) // number), 0, -1):
        places = [
            min(c // cpus, g if cards else number, number) for c, g in zip(cores, gpus, strict=True)
        ]
        share = host_bytes
        if share is None:
            share = min(
                (less_margin(m // n) for m, n in zip(memory, places, strict=True) if n), default=0
            )
        fitting = sum(
            min(n, m // share) if share else 0 for m, n in zip(memory, places, strict=True)
        )
        if fitting >= number:
            return number, {"num_cpus": cpus, "num_gpus": 1 if cards else 0, "memory": share}
    raise DoesNotFitError(
        f"--ray-actors {number}: the nodes of this Ray have {sum(cores)} cores, {cards} GPUs and "
        f"{format_bytes(sum(memory))} of RAM for actors"
        + (
            f", and each takes {format_bytes(host_bytes)} (--host-mem); lower one of them"
            if host_bytes
            else "; fewer"
        )
    )


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
