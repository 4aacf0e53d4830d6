"""A policy never changes the tokens: every placement, shape and configuration against transformers
in fp32."""

from __future__ import annotations

import pytest

from tests.parity.cases import pairwise_cases, thinned
from tests.parity.conftest import Check


@pytest.mark.parametrize(("shape", "placement", "configuration"), thinned(pairwise_cases(), 5))
def test_tokens_and_logits_are_those_of_transformers(
    shape: str, placement: str, configuration: str, check: Check
) -> None:
    check(shape, placement, configuration)
