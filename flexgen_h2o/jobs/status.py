"""How a job stands, in a small file beside its output that other processes may read: `OUT.jsonl.status.json`."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from flexgen_h2o.errors import UsageError
from flexgen_h2o.files import read_json
from flexgen_h2o.jobs.files import replace_json
from flexgen_h2o.jobs.output import is_locked
from flexgen_h2o.units import format_bytes, format_seconds

RUNNING = "running"
_NUMBERS = (
    "rows", "done", "errors", "tokens", "prompt_tokens", "spared_tokens", "seconds", "tokens_per_s", "updated"
)  # fmt: skip


@dataclass
class Status:
    """Counts of rows are of the whole output, tokens and seconds of this run. tokens: new ones. pid: of the job.

    prompt_tokens: of rows that the engine is done with, which is known as a window ends, with refill at the job's end.
    spared_tokens: those of them that were not computed, because rows that begin alike share them.
    state: running, done, or what ended it. eta_s: None until a row is done. peak_bytes: of the budgets, by tier.
    """

    state: str = RUNNING
    pid: int = field(default_factory=os.getpid)
    rows: int = 0
    done: int = 0
    errors: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    spared_tokens: int = 0
    seconds: float = 0.0
    tokens_per_s: float = 0.0
    eta_s: float | None = None
    peak_bytes: dict[str, int] = field(default_factory=dict)
    updated: float = 0.0

    def write(self, output: Path) -> None:
        """Best effort: a job must not end because nobody can be told of it."""
        self.updated = time.time()
        with contextlib.suppress(OSError):
            replace_json(status_path(output), asdict(self), durable=False)


def status_path(output: Path) -> Path:
    return output.with_name(output.name + ".status.json")


def read_status(output: Path) -> Status:
    """The status of the job that writes `output`, or did last. UsageError where there is none.

    A job that says that it runs and does not hold the output's lock was killed.
    """
    path = status_path(output)
    try:
        status = Status(**read_json(path))
        if not all(isinstance(getattr(status, name), int | float) for name in _NUMBERS):
            raise TypeError
    except FileNotFoundError as error:
        raise UsageError(f"--status: no job has written {output}: there is no {path.name} beside it") from error
    except OSError as error:
        raise UsageError(f"--status: {path}: {error.strerror or error}") from error
    except (ValueError, TypeError) as error:
        raise UsageError(f"--status: {path}: is not the status of a job") from error
    if status.state == RUNNING and not is_locked(output):
        status.state = "killed"
    return status


def status_lines(status: Status) -> list[str]:
    """The status for people."""
    left = status.rows - status.done
    lines = [
        f"state: {status.state}" + (f" (process {status.pid})" if status.state == RUNNING else ""),
        f"rows: {status.done} of {status.rows} done, {status.errors} of them errors, {left} to do",
        f"speed: {status.tokens_per_s:.1f} new tokens/s, {status.tokens} in {format_seconds(status.seconds)}",
    ]
    if status.spared_tokens:
        lines.append(spared_text(status))
    if status.eta_s is not None and left:
        lines.append(f"left: {format_seconds(status.eta_s)}")
    if status.peak_bytes:
        lines.append("memory: " + tiers_text(status.peak_bytes))
    if status.updated:
        lines.append(f"updated: {max(0, round(time.time() - status.updated))} s ago")
    return lines


def spared_text(status: Status) -> str:
    return f"shared prefixes spared {status.spared_tokens} of {status.prompt_tokens} prompt tokens"


def tiers_text(nbytes: dict[str, int]) -> str:
    return ", ".join(f"{tier} {format_bytes(n)}" for tier, n in nbytes.items())
