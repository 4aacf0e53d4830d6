"""One measurement: a system in a process of its own, on quiet cores, with a cold page cache and
under a time limit.

With `cgroup` the process may not take more than its budget and BESIDE_BUDGET of memory, page cache
counted: what the kernel caches of a mapped file is then within the limit too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import common
from bench.baselines.contract import OUTSIDE_GROUP, drop_page_cache, words_of
from bench.sweep.grid import Cell, System, tuned_settings
from bench.sweep.store import BF16, DOES_NOT_FIT, FAILED, OK, OVER, REFUSED, TIMEOUT, Line
from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.planner.measure.run import cpu_name

BASELINES = Path(__file__).resolve().parents[1] / "baselines"
WITHOUT_TCMALLOC = ("openvino",)  # ends with "munmap_chunk(): invalid pointer" beside it
OVER_BUDGET = 300 * common.MB  # what a budget does not count: code, the interpreter, small objects
BESIDE_BUDGET = (
    768 * 2**20
)  # of a cgroup: an empty process that has imported its libraries, and OVER_BUDGET
# A group of its own in the first hierarchy that can be written: version 1, then version 2.
CGROUPS = (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max"))
KILLED = -9  # by the kernel, which ran out of memory; the sweep itself kills only at the time limit
STATUS_OF_EXIT = {2: REFUSED, 3: DOES_NOT_FIT, KILLED: DOES_NOT_FIT}
SAID = 300  # characters of a failure that are kept
# What tables and people are shown of a run; contract.py makes it.
FIGURES = (
    "tokens_per_s",
    "prefill_s",
    "decode_tokens_per_s",
    "total_s",
    "peak_rss_bytes",
    "read_bytes",
)


@dataclass(frozen=True)
class Setup:
    """Setup that all measurements of a sweep share. peers: the folder of their environments."""

    peers: Path
    offload_dir: Path
    threads: int
    limit_s: float
    quiet_wait: float
    cgroup: bool = False

    def python(self, system: System) -> Path:
        return Path(sys.executable) if system.ours else self.peers / system.peer / "bin" / "python"

    def settings(self, peer: str) -> dict[str, int] | None:
        """Return what was found best on such a CPU; None where nobody looked."""
        return tuned_settings(peer, cpu_name())

    def missing(self, system: System) -> str | None:
        """Return what to do before a peer can run; None when it is installed."""
        marker = self.peers / system.peer / "installed.txt"
        if system.ours or (marker.exists() and os.access(self.python(system), os.X_OK)):
            return None
        return f"not installed; run bash bench/baselines/setup.sh {system.peer}"


def measure(setup: Setup, system: System, cell: Cell, model_dir: Path, rows: int) -> Line:
    """Run the system once. Returns its JSON with `status`, `reason` when it gave none, and what
    neighbours took."""
    weights = sorted(model_dir.glob("*.safetensors"))
    budget = cell.budget_bytes(sum(path.stat().st_size for path in weights))
    command = command_of(setup, system, cell, model_dir, rows, budget)
    environment, malloc = environment_of(setup, system)
    # A peer's own copies too: what an earlier run has left cached would not count in this one's
    # group.
    for path in (*weights, *(path for path in setup.offload_dir.glob("*") if path.is_file())):
        drop_page_cache(path)
    limit = budget + BESIDE_BUDGET if setup.cgroup and budget else None
    if limit is not None and not system.ours:
        load_libraries(setup.python(system))
    busy = common.wait_for_quiet(setup.quiet_wait)
    with memory_limit(limit) as held, common.BackgroundLoad() as seen:
        code, out, said = common.run_limited([*held, *command], environment, setup.limit_s)
    here = common.machine_facts()
    facts: Line = {name: here[name] for name in ("date", "commit", "cpu")} | {
        "malloc": malloc,
        "busy_before": busy,
        "others": seen.others,
        "stolen": seen.stolen,
        "budget_bytes": budget,
        "limit_s": setup.limit_s,
        "cgroup": bool(held),
    }
    if code is None:
        return {"status": TIMEOUT, "reason": f"not done after {setup.limit_s:.0f} s"} | facts
    if code:
        reason = (
            "killed: no memory left" if code == KILLED else reason_of(said) or f"exit code {code}"
        )
        return {"status": STATUS_OF_EXIT.get(code, FAILED), "reason": reason} | facts
    found = _figures(out)
    if found is None:
        return {
            "status": FAILED,
            "reason": f"printed no figures; {reason_of(said)}".removesuffix("; "),
        } | facts
    # A group lets nothing be over: what counts as a process's own memory may be pages of a file
    # that it has mapped.
    over = not held and budget is not None and found["peak_rss_bytes"] > budget + OVER_BUDGET
    return found | {"status": OVER if over else OK} | facts


def load_libraries(python: Path) -> None:
    """Read the shared libraries of an interpreter's environment into the page cache, in no group. A
    page counts in the group that reads it first: ours were read by the sweep itself, a peer's would
    count where nobody had read them."""
    for path in python.parents[1].glob("lib/**/*.so*"):
        with suppress(OSError), path.open("rb") as file:
            while file.read(2**22):
                pass


def measure_profile(setup: Setup) -> None:
    """Measure the profile of this hour, by which our planner chooses and predicts. UsageError where
    that fails."""
    common.wait_for_quiet(setup.quiet_wait)
    where = words_of(offload_dir=setup.offload_dir)
    command = [sys.executable, "-m", "flexgen_h2o.hardware", *where]
    code, _, said = common.run_limited(command, common.environment(), setup.limit_s)
    if code != 0:
        why = (
            f"not done after {setup.limit_s:.0f} s"
            if code is None
            else reason_of(said) or f"exit code {code}"
        )
        raise UsageError(f"the machine's profile was not measured: {why}")


@contextmanager
def memory_limit(nbytes: int | None) -> Iterator[list[str]]:
    """Return what to put before a command so that it runs in a memory cgroup of `nbytes` (None:
    nothing, without a limit).

    Raises UsageError where no group can be made.
    """
    if nbytes is None:
        yield []
        return
    for root, limit in CGROUPS:
        for left in Path(root).glob("flexgen_h2o-*"):  # by a sweep that was killed
            with suppress(OSError):  # one that holds a process, or is read only, stays
                if not Path(f"/proc/{left.name.rpartition('-')[2]}").exists():
                    left.rmdir()
        group = Path(root) / f"flexgen_h2o-{os.getpid()}"
        try:
            group.mkdir()
            (group / limit).write_text(str(nbytes))
        except OSError:
            with suppress(OSError):  # it may not be there
                group.rmdir()
            continue
        try:
            leave = f"export {OUTSIDE_GROUP}={root}/cgroup.procs"
            yield ["sh", "-c", f'echo $$ > {group}/cgroup.procs && {leave} && exec "$@"', "sh"]
        finally:
            group.rmdir()
        return
    raise UsageError(
        "--cgroup: no memory cgroup can be made here; it takes root and a writable /sys/fs/cgroup"
    )


def can_limit() -> bool:
    """Can a memory cgroup be made here?"""
    try:
        with memory_limit(2**30):
            return True
    except UsageError:
        return False


def command_of(
    setup: Setup, system: System, cell: Cell, model_dir: Path, rows: int, budget: int | None
) -> list[str]:
    is_held = setup.cgroup and not system.ours
    settings = setup.settings(system.peer)
    flags = words_of(
        variant=system.variant,
        model_dir=model_dir,
        prompt_len=cell.prompt_len,
        gen_len=cell.gen_len,
        rows=rows,
        dtype=system.dtype or BF16,
        offload_dir=setup.offload_dir,
        threads=setup.threads,
        settings=json.dumps(settings) if settings else None,
        budget=budget,
        room=budget + OVER_BUDGET if is_held and budget is not None else None,
    )
    return [str(setup.python(system)), str(BASELINES / "run.py"), system.peer, *flags]


def environment_of(setup: Setup, system: System) -> tuple[dict[str, str], str]:
    """Variables of the process, and the name of its malloc: a peer's keeps pages, ours must do
    without. PYTHONPATH is ours alone: a peer has an environment of its own."""
    passed = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LD_PRELOAD", "VIRTUAL_ENV")
    }
    passed |= {
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(setup.threads),
        "HF_HUB_OFFLINE": "1",
    }
    if system.ours:
        return passed | {"PYTHONPATH": common.environment()["PYTHONPATH"]}, "glibc"
    variables, name = common.peer_malloc(system.peer not in WITHOUT_TCMALLOC)
    return passed | variables, name


def _figures(out: str) -> Line | None:
    """The object in the last line; None where there is none, or not with all of FIGURES."""
    try:
        found = json.loads(out.strip().rpartition("\n")[2])
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.keys() >= set(FIGURES) else None


def reason_of(said: str) -> str:
    lines = [line for line in said.strip().splitlines() if line.strip()]
    return lines[-1][:SAID] if lines else ""


def describe(line: dict[str, Any]) -> str:
    """A measurement in a line for people."""
    if "tokens_per_s" not in line:
        return f"{line['status']}: {line.get('reason', '')}"
    note = "" if line["status"] == OK else f" ({line['status']})"
    return (
        f"{line['tokens_per_s']:.2f} tok/s, prefill {line['prefill_s']:.1f} s, "
        f"decode {line['decode_tokens_per_s']:.2f} tok/s, "
        f"peak {line['peak_rss_bytes'] / common.GB:.2f} GB, read "
        f"{line['read_bytes'] / common.GB:.2f} GB, "
        f"others {line['others']:.0%}{note}"
    )
