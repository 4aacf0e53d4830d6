"""A policy never changes the tokens: every placement, shape and configuration against transformers
in fp32."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from tests.parity.cases import (
    CONFIGURATIONS,
    FAMILY_SHAPES,
    LAID_OUT,
    PLACEMENTS,
    SHAPES,
    pairwise_cases,
    thinned,
)
from tests.parity.reference import Reference, assert_equal


@pytest.mark.parametrize(("shape", "placement", "configuration"), thinned(pairwise_cases(), 5))
def test_tokens_and_logits_are_those_of_transformers(
    shape: str,
    placement: str,
    configuration: str,
    reference: Callable[[str], Reference],
    tmp_path: Path,
) -> None:
    chosen = CONFIGURATIONS[configuration]
    assert_equal(reference(shape), chosen.policy(PLACEMENTS[placement]), chosen.budget, tmp_path)


def test_every_pair_is_among_the_cases() -> None:
    cases = list(pairwise_cases())
    assert {(p, c) for _, p, c in cases} == set(product(PLACEMENTS, CONFIGURATIONS))
    assert {(s, p) for s, p, _ in cases} >= set(product(LAID_OUT, PLACEMENTS))
    assert {(s, c) for s, _, c in cases} >= set(product(LAID_OUT, CONFIGURATIONS))
    assert {s for s, _, _ in cases} == {*SHAPES, *FAMILY_SHAPES}
