"""The linear program over shares: within budgets, monotone in them, and priced where they bind."""

from __future__ import annotations

import tempfile
from dataclasses import replace
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
    HELD,
    TIE_BREAK,
    Candidate,
    Corners,
    SearchSpace,
    find_corners,
    placements,
    solve,
)
from tests.unit.planner.made_up import BLOCKS, HUGE, SPEC, machine

NEED = Workload.full(64, 60, 8, BLOCKS)
CANDIDATE = Candidate(Policy(16, 2), OVERLAPPED[2])
Budgets = dict[str, int | None]


def space_of(is_host: bool) -> SearchSpace:
    return SearchSpace(SPEC, NEED, Policy(), machine(is_host), HUGE)


@pytest.fixture(scope="module")
def corners() -> dict[bool, Corners]:
    """By whether the device is host memory."""
    policy = CANDIDATE.policy
    return {
        is_host: find_corners(space_of(is_host), policy, CANDIDATE.depth)
        for is_host in (False, True)
    }


def solved(corners: Corners, budgets: Budgets, overlap: bool = True) -> Candidate:
    asked = replace(CANDIDATE, policy=replace(CANDIDATE.policy, overlap=overlap))
    solution = solve(asked, corners, NEED.gen_len - 1, budgets)
    assert solution is not None
    return solution


def budgets_between(corners: Corners, shares: dict[str, float]) -> Budgets:
    """Return such a share of what a tier holds beyond what it does if everything is on disk."""
    found: Budgets = {"disk": GIB}
    for tier, share in shares.items():
        held = [corner[HELD, tier] for corner in corners.values()]
        room = sum(max(0.0, one - corners[()][HELD, tier]) for one in held)
        found[tier] = int((corners[()][HELD, tier] + share * room) * GIB)
    return found


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
    """Of each kind at most all is placed. Seconds grow by the tie break at most."""
    known = corners[is_host]
    little = budgets_between(known, {"device": device, "host": host})
    more = {**little, tier: (little[tier] or 0) + 200_000}
    before, after = (solved(known, budgets, overlap) for budgets in (little, more))
    for name in TIERS:
        base = known[()][HELD, name]
        held = base + sum(
            before.shares[where[0]] * (corner[HELD, name] - base)
            for where, corner in known.items()
            if where
        )
        assert held * GIB <= (little[name] or 0) + 64
    assert all(-1e-9 <= sum(before.shares[i : i + 2]) <= 1 + 1e-6 for i in (0, 2, 4))
    assert after.block_s <= before.block_s * (1 + TIE_BREAK * (len(LANES) + 2))


def test_budgets_below_what_must_be_held_have_no_solution(corners: dict[bool, Corners]) -> None:
    least = budgets_between(corners[False], {"device": 0, "host": 0})
    assert solve(CANDIDATE, corners[False], 7, least) is not None
    for tier, nbytes in {**least, "disk": 1000}.items():
        tight = {**least, tier: (nbytes or 0) * 9 // 10}
        assert solve(CANDIDATE, corners[False], 7, tight) is None


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), pulp.PulpSolverError("cbc failed")]
)
def test_a_full_folder_for_temporary_files_is_one_line_and_nothing_stays(
    corners: dict[bool, Corners], error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def solve(problem: pulp.LpProblem, solver: pulp.LpSolver) -> None:
        (Path(solver.tmpDir) / "problem.mps").write_text("half")
        raise error

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(pulp.LpProblem, "solve", solve)
    with pytest.raises(FlexgenError, match=f"{error.args[-1]}.*TMPDIR"):
        solved(corners[True], {})
    assert not list(tmp_path.iterdir())


def test_without_a_solver_the_error_names_one(
    corners: dict[bool, Corners], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(onlyAvailable: bool = False) -> list[str]:
        return ["GLPK_CMD"]

    monkeypatch.setattr(pulp, "listSolvers", unknown)
    with pytest.raises(FlexgenError, match="pip install highspy"):
        solved(corners[True], {})


@pytest.mark.parametrize(
    ("shares", "percents"),
    [
        ((0.305, 0.68), [(30, 68), (30, 70)]),  # as they are, and with slivers added
        ((0.506, 0.496), [(51, 49)]),  # too much by as much as a solver errs
    ],
)
def test_whole_percents_of_shares_that_fit(
    shares: tuple[float, ...], percents: list[tuple[int, ...]]
) -> None:
    placed = placements(space_of(False), Policy(), (*shares, 0.996, 0.0, 0.0, 1.0))
    assert [p.percent for p in placed] == [(*pair, 100, 0, 0, 100) for pair in percents]
