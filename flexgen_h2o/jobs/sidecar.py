"""Keep two files beside an output: the settings of the job, and its status.

The settings ensure that no restart mixes answers of two settings.

    OUT.jsonl.job.json      schema, settings, input {path, bytes, digest},
                            earlier (settings before a --force)
    OUT.jsonl.status.json   the fields of `Status`; other processes may read it
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from flexgen_h2o.cli_common import flag_of
from flexgen_h2o.core.config import Policy
from flexgen_h2o.core.errors import FlexgenError, UsageError
from flexgen_h2o.core.files import read_json, write_whole
from flexgen_h2o.core.units import format_bytes, format_seconds, shortened
from flexgen_h2o.flags import EVICTION_FLAGS, PLACEMENT, THINKING
from flexgen_h2o.jobs.input import begins_as
from flexgen_h2o.jobs.output import count_rows, is_locked
from flexgen_h2o.kvcache.eviction.policy import DEFAULT_RATIO

SCHEMA = 1
RUNNING = "running"
DONE = "done"
_MOST = 2**63  # limit of any number; a year of seconds is 2**25
_THINKING = f"template.{THINKING}"
# Flags of settings that have another name. Settings of models and policies without a flag keep
# their names.
_FLAGS = {
    "model.name": "--model",
    "sampling.max_tokens": "--gen-len",
    "eviction.name": "--eviction",
    "texts.chat": "--chat",
    "texts.system": "--system",
    "model.random": "--random-weights",
    _THINKING: "--no-thinking",
}
_FLAGS |= {f"eviction.{name}": flag for name, flag in EVICTION_FLAGS.items()}
# Setting with a number of bits -> its switch, and settings that have an effect only with it.
_BITS: dict[str, tuple[str, tuple[str, ...]]] = {
    "policy.weight_bits": ("policy.compress_weight", ()),
    "policy.cache_bits": (
        "policy.compress_cache",
        ("policy.cache_window", "policy.cache_rotation"),
    ),
}
# How much the KV cache keeps. The first chooses the eviction policy and the bits too.
_SIZE = "eviction.kv_bytes"
_SIZES = ("eviction.kv_budget", "eviction.heavy_ratio", "eviction.heavy_size")
# Settings that are gone, each with the one value that today's version runs with.
_GONE = {"eviction.layer_schedule": "uniform", "eviction.decay": 1.0}

Made = TypeVar("Made")


@dataclass(frozen=True)
class Sidecar:
    """The settings and the input of a job, as stored beside its output."""

    settings: dict[str, Any]  # nested, JSON values (job.settings_of)
    input_path: str  # as the command line has it
    input_bytes: int  # size of the input when the job last began
    input_digest: str  # digest of these bytes, as in `InputScan`
    # Settings of rows that the output had before a --force.
    earlier: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Whether each field has the type that a job writes."""
        return (
            isinstance(self.earlier, list)
            and all(isinstance(one, dict) for one in (self.settings, *self.earlier))
            and isinstance(self.input_path, str)
            and isinstance(self.input_digest, str)
            and type(self.input_bytes) is int
            and self.input_bytes >= 0
        )

    def write(self, output: Path) -> None:
        """Write the file. Raise FlexgenError if it cannot be written."""
        source = {"path": self.input_path, "bytes": self.input_bytes, "digest": self.input_digest}
        body = {
            "schema": SCHEMA,
            "settings": self.settings,
            "input": source,
            "earlier": self.earlier,
        }
        try:
            write_whole(sidecar_path(output), json.dumps(body, indent=1) + "\n", follow=False)
        except OSError as error:
            raise FlexgenError(f"{sidecar_path(output)}: {error.strerror or error}") from error


def sidecar_path(output: Path) -> Path:
    return output.with_name(output.name + ".job.json")


def read_sidecar(output: Path) -> Sidecar | None:
    """Return the sidecar, or None if there is none. Raise UsageError for any other file."""
    path = sidecar_path(output)

    def made(body: Any) -> Sidecar:
        if body["schema"] != SCHEMA:
            raise UsageError(
                f"{path}: schema is {body['schema']!r}, this version reads {SCHEMA}; give another "
                "--output"
            )
        source = body["input"]
        return Sidecar(
            body["settings"], source["path"], source["bytes"], source["digest"], body["earlier"]
        )

    return _read(
        path, made, f"{path}", "is not the sidecar of a job; move it away, with its output"
    )


def differences(before: Sidecar, settings: dict[str, Any], source: Path) -> list[str]:
    """Return in words, by flag if there is one, what a restart would mix. Empty if nothing differs.

    source: the input, which may have grown.
    """
    old = {name: value for name, value in _flat(before.settings) if _GONE.get(name) != value}
    new = dict(_flat(settings))
    if _has_same_model(old, new):
        del old["model.name"], new["model.name"]
    changed = {name for name in {*old, *new} if old.get(name) != new.get(name)}
    # What follows from another difference is not named beside it.
    changed |= {bits for bits, (switch, _) in _BITS.items() if switch in changed}
    changed = changed - (_following(old, new) | _following(new, old)) or changed
    found = [
        f"{_flag(name)} was {_typed(old, name)}"
        + (
            ", which this version does not have"
            if name in _GONE
            else f" and is {_typed(new, name, old)}"
        )
        for name in dict.fromkeys([*old, *new])
        if name in changed
    ]
    if not begins_as(source, before.input_bytes, before.input_digest):
        found.append(f"the input does not begin as {before.input_path} did")
    return found


def _has_same_model(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Return whether two flat settings have the same model, however its name is spelled.

    The digest of weights is that of their contents. Random weights have none: their name counts.
    """
    names = [name for name in {*old, *new} if name.startswith("model.") and name != "model.name"]
    return (
        "model.name" in old
        and "model.name" in new
        and new.get("model.weights") is not None
        and all(old.get(name) == new.get(name) for name in names)
    )


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _flag(name: str) -> str:
    group, _, field = name.rpartition(".")
    if name.startswith("template.") and name not in _FLAGS:
        return f"--chat-template-kwargs {name.removeprefix('template.')}"
    return _FLAGS.get(name, flag_of(field) if group in ("", "policy", "sampling") else name)


def _following(one: dict[str, Any], other: dict[str, Any]) -> set[str]:
    """Return the settings whose difference follows from another one, if a flag set it in `one`.

    Both are flat settings. The caller asks for both orders.
    """
    follow: set[str] = set()
    for bits, (switch, rest) in _BITS.items():
        follow.add(switch)  # the bits say it too
        if not one.get(switch):
            follow |= {*rest}
            follow |= set() if other.get(switch) else {bits}
    for kind in ("ratio", "size"):
        recent = f"eviction.recent_{kind}"
        heavy = f"eviction.heavy_{kind}"
        if all(side.get(recent) in (None, side.get(heavy)) for side in (one, other)):
            follow.add(recent)
    if any(other.get(name) is not None for name in (_SIZE, "eviction.kv_budget")):
        follow |= {n for n in ("eviction.heavy_ratio",) if one.get(n) == DEFAULT_RATIO}
    named = {name for name in {*one, *other} if name.startswith("eviction.")} - {_SIZE}
    if one.get("eviction.name") != other.get("eviction.name"):
        follow |= named - {"eviction.name"}
    bits = "policy.cache_bits"
    switch, rest = _BITS[bits]
    if _SIZE in one and any(one.get(name) != other.get(name) for name in (_SIZE, bits)):
        follow |= {*rest}
    if _SIZE in one and one[_SIZE] != other.get(_SIZE):
        if _SIZE in other or other.get("eviction.name") == "full":
            follow |= named
        if _SIZE in other or not other.get(switch):
            follow.add(bits)
    placement = {f"policy.{name}" for name in PLACEMENT}
    if all(one.get(name) == "auto" for name in placement):
        usual = dict(_flat({"policy": Policy().to_json()}))
        given = {name for name in placement if other.get(name) not in ("auto", usual[name])}
        follow |= placement - given if given else set()
    if one.get("sampling.temperature") == 0 and other.get("sampling.temperature") != 0:
        follow |= {"sampling.top_p", "sampling.top_k"}
    if one.get("model.name") != other.get("model.name"):
        follow |= {name for name in one if name.startswith("model.") and name != "model.name"}
    return follow


def _typed(
    settings: dict[str, Any], name: str, before: Mapping[str, Any] = MappingProxyType({})
) -> str:
    """Return the value of a flat setting as a user types it, and what chose it.

    before: settings of an earlier run. Bits that differ at the same --kv-size were given.
    """
    value = settings.get(name)
    of = ""
    if name in _BITS and not settings.get(_BITS[name][0]):
        value = 16 if name == "policy.cache_bits" else None
    elif name in ("eviction.name", "policy.cache_bits"):
        sizes = (_SIZE, *_SIZES) if name == "eviction.name" else (_SIZE,)
        size = next((one for one in sizes if settings.get(one) is not None), None)
        is_given = name == "policy.cache_bits" and before.get(_SIZE) == settings.get(_SIZE)
        of = "" if size is None or is_given else f" (of {_flag(size)} {_typed(settings, size)})"
    if value is None or value == []:
        return "not given"
    if name == _THINKING and value is False:
        return "given"
    if name == "texts.chat":
        return "given" if value else "--no-chat"
    if name == _SIZE and isinstance(value, float):
        return f"{100 * value:g}%"
    if isinstance(value, list):
        return shortened(" ".join(map(_word, value)), 60)
    return shortened(_word(value), 60) + of


def _word(value: Any) -> str:
    """Return a value in one word: a text as it is, if it has no space and no quote."""
    is_plain = isinstance(value, str) and re.fullmatch(r"[\w./:@,=+-]+", value) is not None
    return value if is_plain else json.dumps(value)


@dataclass
class Status:
    """Progress of a job.

    Counts of rows are those of the whole output; tokens and seconds are of this run.
    """

    state: str = RUNNING  # running, done, or what ended the job
    pid: int = field(default_factory=os.getpid)  # process of the job
    rows: int = 0  # rows of the input
    done: int = 0  # rows of the input that are in the output
    errors: int = 0  # error rows among them
    # Rows in the output that answer no line of this input, as after --force with another input.
    other_rows: int = 0
    other_errors: int = 0  # error rows among them
    tokens: int = 0  # new tokens
    # Prompt tokens of rows that the engine has finished. They are counted at the end of a window,
    # or with refill at the end of the job.
    prompt_tokens: int = 0
    # Prompt tokens that were not computed, because rows that begin alike share them.
    spared_tokens: int = 0
    seconds: float = 0.0  # since this run began
    tokens_per_s: float = 0.0  # new tokens per second of this run
    eta_s: float | None = None  # None until a row has a token or is done
    peak_bytes: dict[str, int] = field(default_factory=dict)  # charged to the budgets, by tier
    updated: float = 0.0  # time.time() of the last write

    def add_engine(
        self,
        prompt_tokens: int = 0,
        spared_tokens: int = 0,
        peak_bytes: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Add the counts of an engine, of which a job on Ray has several."""
        self.prompt_tokens += prompt_tokens
        self.spared_tokens += spared_tokens
        for tier, nbytes in peak_bytes.items():
            self.peak_bytes[tier] = max(nbytes, self.peak_bytes.get(tier, 0))

    @property
    def is_sound(self) -> bool:
        """Whether each field has the type that a job writes, and each number is possible."""
        if not isinstance(self.state, str) or not isinstance(self.peak_bytes, dict):
            return False
        numbers = [
            (getattr(self, f.name), f.type)
            for f in fields(self)
            if f.name not in ("state", "peak_bytes")
        ]
        numbers += [(n, "int") for n in self.peak_bytes.values()]
        return all(
            type(n) in ((int,) if kind == "int" else (int, float)) and 0 <= n < _MOST
            for n, kind in numbers
            if n is not None or kind != "float | None"
        )

    def write(self, output: Path) -> None:
        """Write the file if possible. A job must not end because its status cannot be written."""
        self.updated = time.time()
        with contextlib.suppress(OSError):
            write_whole(
                status_path(output),
                json.dumps(asdict(self), indent=1) + "\n",
                follow=False,
                sync=False,
            )


def status_path(output: Path) -> Path:
    return output.with_name(output.name + ".status.json")


def read_status(output: Path) -> Status:
    """Return the status of the job that writes `output`, or wrote it last.

    Raise UsageError if there is none. Rows are counted in the output itself. It has more than the
    file says if the job was killed, and fewer if somebody has cut it. A job whose state is running
    but which does not hold the output's lock was killed.
    """
    path = status_path(output)
    status = _read(
        path,
        lambda body: Status(**body),
        f"--status: {path}",
        "is not the status of a job; its next run writes one",
    )
    if status is None:
        raise UsageError(
            f"--status: no job has written {output}: there is no {path.name} beside it"
        )
    if status.state == RUNNING and not is_locked(output):
        status.state = "killed; the same command goes on"
    rows, errors = count_rows(output)
    status.done = max(0, rows - status.other_rows)
    status.errors = max(0, errors - status.other_errors)
    if status.state == DONE and status.done < status.rows:
        status.state = "done, and rows were taken away since; the same command does them again"
    return status


def _read(path: Path, made: Callable[[Any], Made], name: str, advice: str) -> Made | None:
    """Return what `made` makes of a JSON file, or None if there is no file.

    Raise UsageError if the result is not sound.
    """
    try:
        found = made(read_json(path))
        if not found.is_sound:  # type: ignore[attr-defined]
            raise TypeError
        return found
    except FileNotFoundError:
        return None
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(f"{name}: {advice}") from error


def status_lines(status: Status) -> list[str]:
    """Return the status as text for people."""
    left = max(0, status.rows - status.done)
    lines = [
        f"state: {status.state}" + (f" (process {status.pid})" if status.state == RUNNING else ""),
        f"prompts: {status.done} of {status.rows} done, {status.errors} of them errors, {left} to "
        "do",
    ]
    if status.tokens:
        done = f"{status.tokens} in {format_seconds(status.seconds)}"
        lines.append(f"speed: {status.tokens_per_s:.1f} new tokens/s, {done}")
    if status.spared_tokens:
        lines.append(spared_text(status))
    if left and status.state == RUNNING:
        lines.append(f"time: {left_text(status)}")
    if status.peak_bytes:
        lines.append("memory: " + tiers_text(status.peak_bytes))
    if status.updated:
        lines.append(f"updated: {max(0, round(time.time() - status.updated))} s ago")
    return lines


def left_text(status: Status) -> str:
    if status.eta_s is None:
        return "time left not known yet"
    return f"{format_seconds(status.eta_s)} left"


def spared_text(status: Status) -> str:
    return f"shared prefixes spared {status.spared_tokens} of {status.prompt_tokens} prompt tokens"


def tiers_text(nbytes: dict[str, int]) -> str:
    named = {"device": "GPU", "host": "RAM", "disk": "disk"}
    return ", ".join(f"{named[tier]} {format_bytes(n)}" for tier, n in nbytes.items() if n)
