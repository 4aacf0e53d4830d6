"""Name the libraries whose insides are used, and the versions that were tried.

A new release may change what is inside without an error. So an untried version is tested at its
first use, or refused by name. `doctor` shows the table.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import NoReturn

from flexgen_h2o.core.errors import UsageError


@dataclass(frozen=True)
class Library:
    """A library, and what is used of it that its authors do not promise to keep."""

    name: str  # as pip names it
    oldest: str  # oldest version that was tried
    newest: str  # newest version that was tried
    used: str  # parts that are used
    check: str  # what happens with an untried version

    @property
    def module(self) -> str:
        """Its name in Python."""
        return self.name.lower().replace("-", "_")

    @property
    def tried(self) -> str:
        """The versions that were tried, for messages."""
        return self.newest if self.oldest == self.newest else f"{self.oldest} to {self.newest}"


LIBRARIES = (
    Library(
        "transformers",
        "5.20.0",
        "5.24.0",
        "cache layers and the cache argument of models, by flexgen_h2o.integrations",
        "a self-test with a tiny model of the same type",
    ),
    Library(
        "numba",
        "0.60.0",
        "0.68.1",
        "the stamp of the cache of compiled loops",
        "without the stamp, nothing is cached",
    ),
    Library(
        "uvicorn",
        "0.50.0",
        "0.54.0",
        "the HTTP/1.1 protocol's connections and timeouts",
        "a self-test without a connection",
    ),
    Library(
        "lm-eval",
        "0.4.13",
        "0.4.13",
        "the command line, downloads and samples",
        "refused",
    ),
    Library("PuLP", "2.8.0", "4.2.0", "public functions, which differ by version", "none"),
)


def library(name: str) -> Library:
    """Return the row of a library."""
    return next(one for one in LIBRARIES if one.name == name)


def is_tried(one: Library) -> bool:
    """Return whether the installed version lies between the two that were tried."""
    from packaging.version import Version

    return Version(one.oldest) <= Version(metadata.version(one.name)) <= Version(one.newest)


@cache
def check_library(name: str, works: Callable[[], bool] | None = None) -> None:
    """Raise UsageError if an untried version of a library does not pass its self-test.

    works: the self-test; None refuses every untried version. It runs once per process.
    """
    one = library(name)
    if is_tried(one):
        return
    try:
        if works is not None and works():
            return
    except Exception as error:  # a changed inside may raise anything
        _refuse(one, error)
    _refuse(one, None)


def _refuse(one: Library, error: Exception | None) -> NoReturn:
    raise UsageError(
        f"{one.name} {metadata.version(one.name)}: was not tried, and a self-test fails or is "
        f"missing; {one.tried} work: pip install '{one.name}=={one.newest}'"
    ) from error
