"""Models and references, made once for the whole session; every test here runs on the plain CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest

from tests.eviction.cases import OTHER_SHAPES, Case, Known, reference_of
from tests.eviction.engine import Wanted
from tests.eviction.plain_models import plain_model
from tests.parity.cases import FAMILY_SHAPES, SHAPES
from tests.parity.reference import random_model

# Of models that repeat themselves, or whose heavy columns are the recent ones, with the usual one.
SEEDS = {
    "post-norm, narrow embedding (350m)": 1,
    "qwen3, biases, one kv-head, odd sizes, tied": 4,
    "qwen3, one layer, window filled": 1,
    "qwen3_moe, a narrow MLP in every other layer, tied": 3,
    "qwen3_moe, the first layer an MLP, odd sizes": 3,
}


@pytest.fixture(scope="session")
def known(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Known]:
    """A saved model, by the name of its shape."""

    @cache
    def made(shape: str) -> Known:
        model = random_model(SEEDS.get(shape, 0), **(SHAPES | OTHER_SHAPES | FAMILY_SHAPES)[shape])
        folder = tmp_path_factory.mktemp("model")
        model.save_pretrained(folder)
        return Known(folder, plain_model(model), model)

    return made


@pytest.fixture(scope="session")
def reference(known: Callable[[str], Known]) -> Callable[[Case], Wanted]:
    """What the reference generates in a case."""

    @cache
    def made(case: Case) -> Wanted:
        return reference_of(case, known(case.shape))

    return lambda case: made(case.of_reference)


@pytest.fixture(autouse=True)
def _plain_cpu(plain_cpu: None) -> None:
    """Every test here."""
