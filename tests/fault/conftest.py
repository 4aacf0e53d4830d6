"""A tiny model whose right tokens are known, and what must be gone after every failure."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from flexgen_h2o.engine.resources import LANE_THREADS
from tests.fault.jobs import Jobs
from tests.forks import Forks
from tests.parity.reference import Reference, make_reference, random_model, random_prompts

NEW_TOKENS = 5


def workers() -> list[str]:
    """Names of the engine's threads that live."""
    return [t.name for t in threading.enumerate() if t.name.startswith(tuple(LANE_THREADS))]


@pytest.fixture(scope="session")
def known(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    prompts = random_prompts((5, 9, 9, 1, 12))
    return make_reference(
        random_model(), tmp_path_factory.mktemp("models") / "opt-known", prompts, NEW_TOKENS
    )


@pytest.fixture(scope="session")
def jobs(forks: Forks) -> Jobs:
    return Jobs(forks)


@pytest.fixture(autouse=True)
def _plain_cpu(plain_cpu: None) -> None:
    """Every test here."""


@pytest.fixture
def assert_clean(tmp_path: Path) -> Callable[[], None]:
    """No worker thread lives, nothing of a run is in the offload dir `tmp_path / "offload"`."""

    def check() -> None:
        assert not workers()
        assert not [p.name for p in tmp_path.glob("offload/*") if p.name.startswith(("run-", "."))]

    return check
