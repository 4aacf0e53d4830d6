"""The linear program over shares: within budgets, monotone in them, and priced where they bind;
whole percents."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexgen_h2o.core.config import TIERS, Policy
from flexgen_h2o.core.errors import FlexgenError
from flexgen_h2o.core.units import GIB
from flexgen_h2o.engine.memory_plan import OVERLAPPED
from flexgen_h2o.engine.workload import Workload
from flexgen_h2o.planner.cost_model import LANES
from flexgen_h2o.planner.lp import (
    TIE_BREAK,
    Corners,
    SearchSpace,
    Solution,
    find_corners,
    placements,
    solve,
)
from tests.unit.planner.made_up import BLOCKS, HUGE, SPEC, machine

NEED = Workload.full(64, 60, 8, BLOCKS)
POLICY = Policy(16, 2)
SWEEPS = NEED.gen_len - 1
Budgets = dict[str, int | None]


def space_of(is_host: bool) -> SearchSpace:
    return SearchSpace(SPEC, NEED, Policy(), machine(is_host), HUGE)


@pytest.fixture(scope="module")
def corners() -> dict[bool, Corners]:
    """By whether the device is host memory."""
    return {
        is_host: find_corners(space_of(is_host), POLICY, OVERLAPPED[2]) for is_host in (False, True)
    }


def found(corners: Corners, budgets: Budgets, overlap: bool = True) -> Solution:
    solution = solve(corners, SWEEPS, overlap, budgets)
    assert solution is not None
    return solution


def held(corners: Corners, solution: Solution) -> dict[str, float]:
    """Bytes that the program counts on each tier."""
    return {
        tier: corners.base.nbytes[tier]
        + sum(
            solution.shares[i] * (c.nbytes[tier] - corners.base.nbytes[tier])
            for i, c in corners.moved.items()
        )
        for tier in TIERS
    }


def some_budgets(corners: Corners, device: float, host: float) -> Budgets:
    """That share of what everything on the tier takes beyond what everything on disk does."""
    everything = {"device": (0, 2, 4), "host": (1, 3, 5) if 1 in corners.moved else (0, 2, 4)}
    budgets: Budgets = {"disk": GIB}
    for tier, share in (("device", device), ("host", host)):
        base = corners.base.nbytes[tier]
        room = sum(max(0, corners.moved[i].nbytes[tier] - base) for i in everything[tier])
        budgets[tier] = base + int(share * room)
    return budgets


shares = st.sampled_from([0.0, 0.05, 0.3, 0.6, 1.0])


@settings(max_examples=12)
@given(st.booleans(), st.booleans(), shares, shares, st.sampled_from(TIERS))
def test_a_solution_keeps_every_budget_and_more_memory_is_never_slower(
    corners: dict[bool, Corners],
    is_host: bool,
    overlap: bool,
    device: float,
    host: float,
    tier: str,
) -> None:
    """Of each kind at most all is placed. The objective never grows; the seconds in it by the tie
    break at most."""
    little = some_budgets(corners[is_host], device, host)
    more = {**little, tier: (little[tier] or 0) + 200_000}
    before, after = (found(corners[is_host], budgets, overlap) for budgets in (little, more))
    for name, nbytes in held(corners[is_host], before).items():
        assert nbytes <= (little[name] or 0) + 64
    assert all(-1e-9 <= sum(before.shares[i : i + 2]) <= 1 + 1e-6 for i in (0, 2, 4))
    assert after.seconds <= before.seconds * (1 + TIE_BREAK * (len(LANES) + 2))


@pytest.mark.parametrize("is_host", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_where_everything_fits_everything_is_on_the_device(
    corners: dict[bool, Corners], is_host: bool, overlap: bool
) -> None:
    """Nothing moves then, and no tier is worth anything more."""
    solution = found(corners[is_host], HUGE, overlap)
    assert solution.shares == pytest.approx((1, 0, 1, 0, 1, 0))
    assert all(gain == pytest.approx(0, abs=1e-9) for gain in solution.gain_s_per_gib.values())


def test_budgets_below_what_must_be_held_have_no_solution(corners: dict[bool, Corners]) -> None:
    """Whichever tier is short."""
    least = some_budgets(corners[False], 0, 0)
    assert solve(corners[False], SWEEPS, True, least) is not None
    for tier, nbytes in (
        ("device", least["device"] or 0),
        ("host", least["host"] or 0),
        ("disk", 1000),
    ):
        assert solve(corners[False], SWEEPS, True, {**least, tier: nbytes * 9 // 10}) is None


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), pulp.PulpSolverError("cbc failed")]
)
def test_a_full_folder_for_temporary_files_is_one_line_and_nothing_stays(
    corners: dict[bool, Corners], error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(problem: pulp.LpProblem, filename: str, **_: object) -> None:
        Path(filename).write_text("half")
        raise error

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(pulp.LpProblem, "writeMPS", write)
    with pytest.raises(FlexgenError, match=f"{error.args[-1]}.*TMPDIR"):
        solve(corners[True], SWEEPS, True, {})
    assert not list(tmp_path.iterdir())


def test_whole_percents_of_shares_that_fit() -> None:
    """As they are, and with slivers added to the largest share."""
    placed = placements(space_of(False), Policy(), (0.305, 0.68, 0.996, 0.0, 0.0, 1.0))
    assert [p.percent for p in placed] == [(30, 68, 100, 0, 0, 100), (30, 70, 100, 0, 0, 100)]
    too_much = placements(
        space_of(False), Policy(), (0.506, 0.496, 1.0, 0.0, 0.0, 1.0)
    )  # by as much as a solver errs
    assert [p.percent for p in too_much] == [(51, 49, 100, 0, 0, 100)]
