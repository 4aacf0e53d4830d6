"""What an output was made with, kept beside it, so that no restart mixes answers of two settings in one file.

`OUT.jsonl.job.json`: schema, settings, input {path, bytes, digest}, earlier (settings before a --force).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flexgen_h2o.errors import FlexgenError, UsageError
from flexgen_h2o.files import read_json, write_whole
from flexgen_h2o.jobs.lines import Scan

SCHEMA = 1


@dataclass(frozen=True)
class Sidecar:
    """settings: nested, JSON values. earlier: those of rows that are in the output since before a --force."""

    settings: dict[str, Any]
    input_path: str
    input_bytes: int
    input_digest: str
    earlier: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Has each field the type that a job writes?"""
        texts = (self.input_path, self.input_digest)
        return (
            all(isinstance(one, dict) for one in (self.settings, *self.earlier))
            and isinstance(self.earlier, list)
            and all(isinstance(text, str) for text in texts)
            and type(self.input_bytes) is int
            and self.input_bytes >= 0
        )

    @classmethod
    def of(cls, settings: dict[str, Any], path: Path, scan: Scan) -> Sidecar:
        return cls(settings, str(path), scan.nbytes, scan.digest)

    def write(self, output: Path) -> None:
        """FlexgenError where it cannot be written."""
        body = {
            "schema": SCHEMA,
            "settings": self.settings,
            "input": {"path": self.input_path, "bytes": self.input_bytes, "digest": self.input_digest},
            "earlier": self.earlier,
        }
        try:
            write_whole(sidecar_path(output), json.dumps(body, indent=1) + "\n", follow=False)
        except OSError as error:
            raise FlexgenError(f"{sidecar_path(output)}: {error.strerror or error}") from error


def sidecar_path(output: Path) -> Path:
    return output.with_name(output.name + ".job.json")


def read_sidecar(output: Path) -> Sidecar | None:
    """None where there is none; UsageError for a file that is not one."""
    path = sidecar_path(output)
    try:
        body = read_json(path)
        if body["schema"] != SCHEMA:
            raise UsageError(f"{path}: schema is {body['schema']!r}, this version reads {SCHEMA}")
        source = body["input"]
        found = Sidecar(body["settings"], source["path"], source["bytes"], source["digest"], body["earlier"])
        if not found.is_sound:
            raise TypeError
        return found
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path}: is not the sidecar of a job; move it away, with its output") from error


def differences(before: Sidecar, settings: dict[str, Any], scan: Scan) -> list[str]:
    """What a restart would mix, in words; empty where it goes on as the output was begun. An input may have grown."""
    old, new = (dict(_flat(values)) for values in (before.settings, settings))
    found = [
        f"{name} was {_short(old.get(name))} and is {_short(new.get(name))}"
        for name in dict.fromkeys([*old, *new])
        if old.get(name) != new.get(name)
    ]
    if scan.prefix != before.input_digest:
        found.append(f"the input does not begin as {before.input_path} did")
    return found


def _flat(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
