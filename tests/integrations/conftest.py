"""Random models of each family, made once; every test here runs on the plain CPU, as does the
engine beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.integrations.models import Known, known_model


@pytest.fixture(scope="session")
def known() -> Callable[[str], Known]:
    """A model and the same in plain torch, by its name in `MODELS`."""
    return cache(known_model)


@pytest.fixture(autouse=True)
def _plain_cpu(plain_cpu: None) -> None:
    """Every test here."""
