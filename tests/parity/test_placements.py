"""A policy never changes the tokens: every placement, shape and configuration against transformers in fp32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.parity.cases import CONFIGURATIONS, PLACEMENTS, plane_of_configurations, plane_of_families, plane_of_shapes
from tests.parity.reference import Reference, assert_equal


@pytest.mark.parametrize(("placement", "configuration"), plane_of_configurations())
def test_placement_by_configuration(
    placement: str, configuration: str, reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    chosen = CONFIGURATIONS[configuration]
    assert_equal(reference("normal"), chosen.policy(PLACEMENTS[placement]), chosen.budget, tmp_path)


@pytest.mark.parametrize(("shape", "placement", "configuration"), [*plane_of_shapes(), *plane_of_families()])
def test_placement_by_shape(
    shape: str, placement: str, configuration: str, reference: Callable[[str], Reference], tmp_path: Path
) -> None:
    chosen = CONFIGURATIONS[configuration]
    assert_equal(reference(shape), chosen.policy(PLACEMENTS[placement]), chosen.budget, tmp_path)
