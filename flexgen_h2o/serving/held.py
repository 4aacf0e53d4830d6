"""Write down which batches are open, so that after a kill the batch that caused it can be found.

    STATE/held.json   {"clients": requests of clients run, "held": {ID: bytes of its results},
                       "company": {ID: batches}, "deaths": {ID: number}}

A server may die because of one of its batches, or for a reason of its own: memory that others
need, `docker kill`. After a death the batches that were open run apart, half as many at a time. A
batch that has a new result is not suspected any more. Only the death of a server in which a batch
was alone counts against the batch.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flexgen_h2o.core import files
from flexgen_h2o.serving.answers import say_line
from flexgen_h2o.serving.records import MAX_NUMBER, is_count

# A batch is given up after this many deaths of the server with it alone, none of its requests
# done in between.
MAX_DEATHS = 4
# A death counts only so much if requests of clients ran beside the batch: they may be the cause.
WITH_CLIENTS = 0.5

TESTS: dict[str, Callable[[Any], bool]] = {
    "held": is_count,
    "company": is_count,
    "deaths": lambda value: isinstance(value, float) and 0 <= value < MAX_NUMBER,
}


def _is_sound(body: Any) -> bool:
    return (
        isinstance(body, dict)
        and isinstance(body.get("clients"), bool)
        and all(
            isinstance(body.get(name), dict) and all(map(is_sound, body[name].values()))
            for name, is_sound in TESTS.items()
        )
    )


class Held:
    """The batches that are open, and those that are suspected. All methods take ids.

    The file outlives the process. It is not synced, because no batch makes a machine lose its
    power.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()  # held while the file is written
        self._clients = False  # whether requests of clients run
        self._held: dict[str, int] = {}  # bytes of results when the batch was opened
        self._company: dict[str, int] = {}  # batches that were open at the last death, by suspect
        self._deaths: dict[str, float] = {}
        self._has_said = False  # that the file cannot be written

    def settle(self, sizes: Mapping[str, int]) -> None:
        """Read what the server before has left, and blame the batches that were open.

        sizes: bytes of results of the batches that are not over.
        """
        before = self._read()
        held = before["held"]
        with self._lock:
            self._company = {name: n for name, n in before["company"].items() if name in sizes}
            self._deaths = {name: n for name, n in before["deaths"].items() if name in sizes}
            self._held = {}
            for name, nbytes in held.items():
                if name not in sizes:
                    continue
                if sizes[name] > nbytes:
                    self._acquit(name)
                    continue
                self._company[name] = len(held)
                if len(held) == 1:
                    more = WITH_CLIENTS if before["clients"] else 1.0
                    self._deaths[name] = self._deaths.get(name, 0.0) + more
            if held:
                self._write()

    @property
    def names(self) -> list[str]:
        return list(self._held)

    def deaths(self, name: str) -> float:
        """Return how often the server has died with the batch alone, since it last got on."""
        return self._deaths.get(name, 0.0)

    def most_beside(self, name: str) -> int:
        """Return how many suspected batches may run together with this one, itself included.

        0: it is not suspected.
        """
        company = self._company.get(name, 0)
        return max(1, company // 2) if company else 0

    def take(self, sizes: Mapping[str, int]) -> None:
        """Write down that batches are about to be read or run.

        sizes: bytes of their results.
        """
        with self._lock:
            self._held |= sizes
            self._write()

    def release(self, *names: str) -> None:
        """Write down that batches are not in hand any more: the server lives."""
        with self._lock:
            were_held = [self._held.pop(name, None) is not None for name in names]
            if any(were_held):
                self._write()

    def acquit(self, name: str) -> None:
        """Write down that a suspected batch got on."""
        with self._lock:
            if self._acquit(name):
                self._write()

    def forget(self, name: str) -> None:
        """Drop a batch that is over."""
        with self._lock:
            was_held = self._held.pop(name, None) is not None
            if self._acquit(name) or was_held:
                self._write()

    def note_clients(self, run: bool) -> None:
        """Write down whether requests of clients run. The engine's thread calls this."""
        if run == self._clients:
            return
        with self._lock:
            self._clients = run
            if self._held:
                self._write()

    def _acquit(self, name: str) -> bool:
        found = [one.pop(name, None) for one in (self._company, self._deaths)]
        return any(one is not None for one in found)

    def _read(self) -> dict[str, Any]:
        nothing = {"clients": False, "held": {}, "company": {}, "deaths": {}}
        try:
            found: Any = files.read_json(self._path)
            if not _is_sound(found):
                raise ValueError
            return dict(found)
        except FileNotFoundError:
            return nothing
        except (OSError, ValueError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or "is not as a server writes it"
            say_line(f"{self._path}: {reason}; which batches were open is not known")
            return nothing

    def _write(self) -> None:
        body = {
            "clients": self._clients,
            "held": self._held,
            "company": self._company,
            "deaths": self._deaths,
        }
        try:
            files.write_whole(self._path, json.dumps(body) + "\n", follow=False, sync=False)
        except OSError as error:
            if not self._has_said:
                self._has_said = True
                reason = error.strerror or error
                say_line(f"{self._path}: {reason}; a batch that ends the server is not found")
