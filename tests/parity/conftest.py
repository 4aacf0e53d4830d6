"""References by shape, made once for the whole session."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.parity.cases import CONFIGURATIONS, FAMILY_SHAPES, PLACEMENTS, SHAPES
from tests.parity.reference import (
    LONG,
    ByShape,
    Ended,
    Reference,
    assert_equal,
    folder_with_eos,
    greedy,
    make_reference,
    random_model,
    random_prompts,
    token_that_ends,
)

Check = Callable[..., None]
LENGTHS = (5, 9, 9, 1, 12)
NEW_TOKENS = 5
SEEDS = {"gpt_neox": 1}  # of models that repeat themselves, or nearly tie, with the usual one
EOS_LENGTHS = (17, 3, 9, 9, 1, 12, 5, 9, 2)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> ByShape:
    """The reference of a shape by its name."""

    @cache
    def made(shape: str) -> Reference:
        model = random_model(SEEDS.get(shape, 0), **(SHAPES | FAMILY_SHAPES)[shape])
        return make_reference(
            model, tmp_path_factory.mktemp("model"), random_prompts(LENGTHS), NEW_TOKENS
        )

    return made


@pytest.fixture(scope="session")
def ended(reference: ByShape, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    known = reference("normal")
    prompts = random_prompts(EOS_LENGTHS, seed=2)
    eos = token_that_ends([greedy(known.model, p, LONG) for p in prompts])
    tokens = [greedy(known.model, p, LONG, eos) for p in prompts]
    assert len({len(row) for row in tokens}) >= 4 and max(map(len, tokens)) == LONG > min(
        map(len, tokens)
    )
    folder = folder_with_eos(known.folder, tmp_path_factory.mktemp("eos") / "model", eos)
    return Ended(folder, eos, prompts, tokens)


@pytest.fixture(autouse=True)
def _plain_cpu(plain_cpu: None) -> None:
    """Every test here."""


@pytest.fixture(scope="module")
def offload_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests of a file, so that most tests find a store that is made."""
    return tmp_path_factory.mktemp("offload")


@pytest.fixture
def check(reference: ByShape, tmp_path: Path) -> Check:
    """The engine gives a shape's reference at a placement and in a configuration."""

    def checked(shape: str, placement: str, configuration: str, **switches: Any) -> None:
        chosen = CONFIGURATIONS[configuration]
        policy = chosen.policy(PLACEMENTS[placement], **switches)
        assert_equal(reference(shape), policy, chosen.budget, tmp_path)

    return checked
