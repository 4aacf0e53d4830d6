"""Shared by the benchmarks: flags, quiet cores, peak memory, tables, child processes,
the JSON line."""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch

from flexgen_h2o.cli_common import run_cli
from flexgen_h2o.core.config import MemoryBudget
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.files import check_writable, usable_path, write_whole
from flexgen_h2o.engine.prompts import benchmark_prompts
from flexgen_h2o.engine.sequence import Sequence
from flexgen_h2o.kvcache.eviction import Eviction
from flexgen_h2o.llm import LLM
from flexgen_h2o.parser import OneLineParser
from flexgen_h2o.planner.measure.run import cpu_name

ROOT = Path(__file__).resolve().parent.parent
MB = 10**6
GB = 10**9
ON_DISK = (0, 0, 0, 100, 0, 100)  # a placement: weights on disk, KV and hidden states in RAM
DIRTY = "-dirty"
NOT_CODE = (":(exclude)bench/results", ":(exclude)docs", ":(exclude)*.md")
TCMALLOC = ("libtcmalloc_minimal.so.4", "libtcmalloc.so.4")
LIBRARIES = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib")
KEEPING = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
BUSY = ("user", "nice", "system", "irq", "softirq", "steal")  # of psutil.cpu_times
QUIET_BELOW = 0.10  # busy share of all cores
QUIET_SAMPLE_S = 2.0
Graces = abc.Sequence[
    tuple[int, float]
]  # signals, each with the seconds that a process then has to end


def own_parser(doc: str | None) -> OneLineParser:
    """A parser that shows a module's docstring as it is, with the flags that every benchmark
    takes."""
    parser = OneLineParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--quiet-wait",
        type=seconds,
        default=120.0,
        metavar="S",
        help="most seconds to wait for quiet cores (120)",
    )
    add("--output", action=ResultFile, help="also write the JSON object here")
    return parser


def weights_parser(doc: str | None) -> OneLineParser:
    """Return the parser of a benchmark that names the models it runs itself."""
    parser = own_parser(doc)
    add = parser.add_argument
    add(
        "--path",
        default="_DUMMY_",
        help="where checkpoints are (_DUMMY_: random weights at the true shape)",
    )
    add(
        "--offload-dir",
        type=Path,
        default=Path("~/flexgen_h2o_offload_dir").expanduser(),
        help="weights, disk tier",
    )
    return parser


def model_parser(doc: str | None, model: str | None, host_mem: str | None = None) -> OneLineParser:
    """Return the parser of a benchmark that runs any model, the claim's setting as default (model
    None: it has several)."""
    parser = weights_parser(doc)
    add = parser.add_argument
    add(
        "--model",
        default=model,
        help=f"hub id of a built-in shape, or a folder ({model or 'those of the claim'})",
    )
    add(
        "--host-mem",
        default=host_mem,
        help=f"budget of RAM ({host_mem or 'what is free, less a margin'})",
    )
    return parser


def open_llm(
    args: argparse.Namespace, policy: Any, eviction: Eviction | None = None, **other: Any
) -> LLM:
    """The model of the flags on the CPU, in bf16 where there is no --dtype. other: of `LLM`,
    instead of the flags'."""
    given = {"dtype": "bfloat16", "model": None, "host_mem": None} | vars(args)
    setting = {
        "device": "cpu",
        "dtype": given["dtype"],
        "path": args.path,
        "offload_dir": args.offload_dir,
        "budget": MemoryBudget(host=given["host_mem"]),
    }
    return LLM(other.pop("model", given["model"]), policy, eviction, **(setting | other))


class ResultFile(argparse.Action):
    """A file that is written when all is measured. UsageError before, where it could not be."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        args: argparse.Namespace,
        value: Any,
        given: str | None = None,
    ) -> None:
        flag = self.option_strings[0]  # in full: `given` may be cut short
        path = usable_path(value, flag)
        check_writable(path, flag)
        setattr(args, self.dest, path)


@contextmanager
def writing(flag: str, path: Path, advice: str) -> Iterator[None]:
    """UsageError naming the flag where `path`, or what is in it, cannot be written. advice: what to
    do then."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"{flag} {path}: cannot be written to ({error.strerror or error}); {advice}"
        ) from error


def seconds(text: str) -> float:
    """A number of seconds, at least 0, that ends."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, at least 0")
    return value


def decoded(text: str) -> int:
    """--gen-len of a benchmark that divides by what decoding takes: the first new token comes from
    the prefill."""
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a whole number of at least 2, since decoding is measured"
        )
    return int(text)


def door(main: Callable[[], int | None]) -> int:
    """`main` as a command line: what is wrong in one line, and the package's exit codes."""
    return run_cli(Path(sys.argv[0]).stem, lambda _: main() or 0, None)


def finish(result: dict[str, Any], output: Path | None) -> None:
    """Print the result as the last line of stdout, then write it where --output says. UsageError:
    it cannot be written.

    Spreads in it become JSON. Printed first: minutes of measuring shall not be lost to a full disk.
    """
    whole = {
        **result,
        "machine": machine_facts(),
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
    }
    print(json.dumps(whole, default=Spread.to_json), flush=True)
    if output is not None:
        with writing("--output", output, "the result is printed"):
            write_whole(output, json.dumps(whole, default=Spread.to_json, indent=2) + "\n")


def machine_facts() -> dict[str, Any]:
    """Return what a figure depends on besides the code, and the code's commit."""
    huge = ""
    with suppress(OSError):
        huge = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    return {
        "date": date(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "ram_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "huge_pages": huge[huge.find("[") + 1 : huge.find("]")],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
    }


def date() -> str:
    """Now, in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def commit() -> str | None:
    """Return the commit of the code, with `-dirty` where files that git knows have changes, results
    and pages aside, which a sweep itself writes. None where git or its folder is missing: a machine
    that was sent the tree alone."""

    def git(*words: str) -> str:
        with suppress(OSError):
            return subprocess.run(
                ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
            ).stdout.strip()
        return ""

    name = git("describe", "--always")
    changed = name and git("status", "--porcelain", "--untracked-files=no", "--", ".", *NOT_CODE)
    return f"{name}{DIRTY}" if changed else name or None


def table(title: str, rows: abc.Sequence[tuple[str, str]]) -> None:
    """Print lines of a name and a value."""
    print(f"\n{title}")
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")
    sys.stdout.flush()


@dataclass(frozen=True)
class Spread:
    """Repeats of one figure."""

    values: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def show(self, unit: str, digits: int = 2, scale: float = 1.0) -> str:
        low = min(self.values) / scale
        high = max(self.values) / scale
        return f"{self.median / scale:.{digits}f} {unit} ({low:.{digits}f} - {high:.{digits}f})"

    def to_json(self) -> dict[str, Any]:
        return {
            "median": self.median,
            "min": min(self.values),
            "max": max(self.values),
            "values": self.values,
        }


def wait_for_quiet(limit_s: float) -> float:
    """Wait until other processes leave the cores alone, at most `limit_s`. Returns the last busy
    share, and prints it.

    Call it while this process itself is idle.
    """
    start = time.monotonic()
    while True:
        busy = _busy_share(min(QUIET_SAMPLE_S, max(0.1, limit_s)))
        waited = time.monotonic() - start
        if busy < QUIET_BELOW or waited >= limit_s:
            state = "quiet" if busy < QUIET_BELOW else "NOT QUIET, measured anyway"
            print(f"# cores {busy:.0%} busy after waiting {waited:.0f} s: {state}", flush=True)
            return busy


class BackgroundLoad:
    """Load by others while a `with` block ran: shares of all cores. 0.0 each on a
    quiet machine."""

    def __enter__(self) -> BackgroundLoad:
        self._start = (psutil.cpu_times(), sum(os.times()[:4]), time.monotonic())
        return self

    def __exit__(self, *exc: object) -> None:
        before, own, start = self._start
        now = psutil.cpu_times()
        cores = (time.monotonic() - start) * (os.cpu_count() or 1)
        busy = sum(getattr(now, name) - getattr(before, name) for name in BUSY)
        self.others = max(0.0, busy - (sum(os.times()[:4]) - own)) / cores
        self.stolen = (now.steal - before.steal) / cores


def _busy_share(seconds: float) -> float:
    with BackgroundLoad() as watched:
        time.sleep(seconds)
    return watched.others


def storage_read_bytes() -> int:
    """Bytes that this process made the kernel fetch from storage: page cache hits do not count."""
    return int(psutil.Process().io_counters().read_bytes)


def benchmark_rows(llm: LLM, rows: int, prompt_len: int) -> list[Sequence]:
    """The benchmark's prompts as token ids. They are all equal, and `llm` is told to compute each,
    as FlexGen does."""
    llm.share_prefix = "off"
    return benchmark_prompts(rows, prompt_len, None, llm.model.spec.vocab_size)


def peer_malloc(has_tcmalloc: bool = True) -> tuple[dict[str, str], str]:
    """Variables for a malloc that keeps pages, and its name: without one, peers that allocate in
    every step lose up to three quarters of their speed. has_tcmalloc: take it where it is
    installed."""
    found = (Path(folder) / name for folder in LIBRARIES for name in TCMALLOC if has_tcmalloc)
    library = next((path for path in found if path.exists()), None)
    return (
        (KEEPING, "glibc, keeping pages")
        if library is None
        else ({"LD_PRELOAD": str(library)}, "tcmalloc")
    )


def environment() -> dict[str, str]:
    """Return the environment of a child process that runs a module of `bench`, wherever this one
    was started."""
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    }


def ratio_of(values: abc.Sequence[float], others: abc.Sequence[float]) -> Spread:
    """Return the ratios of the pairs of each round."""
    return Spread([a / b for a, b in zip(values, others, strict=True)])


PR_SET_PDEATHSIG = 1  # of prctl(2)


def run_limited(
    command: abc.Sequence[str],
    environment: dict[str, str],
    limit_s: float,
    graces: Graces = (),
    show: bool = False,
) -> tuple[int | None, str, str]:
    """(exit code, stdout, stderr); code None when the limit ended it, with all that it had started.

    graces: before SIGKILL, in turn, while it has not ended. show: stdout goes where this process's
    goes. It ends with the thread that called this, also where that is killed.
    """
    prctl = ctypes.CDLL(None).prctl  # found before the fork
    with subprocess.Popen(
        command,
        env=environment,
        stdout=None if show else subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
    ) as process:
        try:
            out, said = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            _end(process, graces)
            return None, "", ""
        except BaseException:
            _end(process, graces)
            raise
    return process.returncode, out or "", said


def _end(process: subprocess.Popen[str], graces: Graces) -> None:
    """The process and all that it has started."""
    for number, grace_s in graces:
        with suppress(subprocess.TimeoutExpired, ProcessLookupError):
            os.killpg(process.pid, number)
            process.communicate(timeout=grace_s)
            return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
