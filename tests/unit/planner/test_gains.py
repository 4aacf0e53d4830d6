"""What more memory saves: against searches that have it, for searched and for given policies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flexgen_h2o.core.config import TIERS, ModelSpec, Policy
from flexgen_h2o.core.units import GIB
from flexgen_h2o.engine.workload import WorkloadShape
from flexgen_h2o.models import built_in_spec
from flexgen_h2o.planner.candidates import Budgets, Search
from flexgen_h2o.planner.predict import Machine
from flexgen_h2o.planner.profile import find_profile, read_profile
from flexgen_h2o.planner.report import gains_of_policy, gains_of_search
from flexgen_h2o.planner.search import Plan, evaluate, search

ON_T4: Budgets = {"device": int(13.5 * GIB), "host": int(187.2 * GIB), "disk": 1200 * GIB}


def known(name: str) -> ModelSpec:
    found = built_in_spec(f"facebook/{name}")
    assert found is not None
    return found[0]


def asked(name: str, rows: int, budgets: Budgets = ON_T4) -> Search:
    spec = known(name)
    machine = Machine(read_profile(find_profile("t4")), "float16", False)
    return Search(spec, WorkloadShape.full(rows, 512, 32, spec.num_blocks), Policy(), machine, budgets)


def found(q: Search) -> Plan:
    return search(q.spec, q.need, q.base, q.machine, q.budgets, q.sides)


def test_a_gain_that_the_program_does_not_see_is_found() -> None:
    """The rounded policy waits for the link, the program thinks of compute: its dual is next to 0."""
    q = asked("opt-6.7b", 1024)
    plan = found(q)
    near = gains_of_search(q, plan, whole=False)
    assert plan.dual_s_per_gib["device"] < 1
    more = found(replace(q, budgets={**q.budgets, "device": int(14.5 * GIB)}))
    saved = plan.prediction.total_s - more.prediction.total_s
    assert saved > 0.1 * plan.prediction.total_s
    assert near.s_per_gib["device"] >= 0.8 * saved
    assert near.found_by == "neighbourhood" and set(near.s_per_gib) == set(TIERS)
    assert near.s_per_gib["host"] == near.s_per_gib["disk"] == 0


def test_searching_again_finds_no_less() -> None:
    """Than the plan's neighbourhood does."""
    q = asked("opt-350m", 16, {**ON_T4, "device": GIB // 2, "host": 3 * GIB})
    plan = found(q)
    near, again = (gains_of_search(q, plan, whole) for whole in (False, True))
    assert again.found_by == "search"
    more = found(replace(q, budgets={**q.budgets, "device": GIB // 2 + GIB}))
    saved = plan.prediction.total_s - more.prediction.total_s
    assert again.s_per_gib["device"] <= 1.01 * max(saved, near.s_per_gib["device"])
    assert again.s_per_gib["device"] > 0


def test_where_everything_is_resident_nothing_is_gained() -> None:
    q = asked("opt-1.3b", 16)
    plan = found(q)
    assert plan.policy.percent == (100, 0, 100, 0, 100, 0)
    assert set(gains_of_search(q, plan, whole=False).s_per_gib.values()) == {0.0}
    assert set(gains_of_policy(q, plan).s_per_gib.values()) == {0.0}


def test_a_given_policy_gains_by_what_is_moved() -> None:
    """To a tier from slower ones, at its own batch sizes: as much as by hand."""
    q, policy = asked("opt-6.7b", 16), Policy(16, 1, (0, 50, 0, 100, 100, 0))
    plan = evaluate(q.spec, policy, q.need, q.machine, q.budgets)
    gains = gains_of_policy(q, plan)
    assert gains.found_by == "placement"
    # 5% of the host's budget is 75% of the weights: all that are on disk fit.
    more = 0.05 * (q.budgets["host"] or 0) / GIB
    by_hand = evaluate(q.spec, replace(policy, percent=(0, 100, 0, 100, 100, 0)), q.need, q.machine, q.budgets)
    saved = plan.prediction.total_s - by_hand.prediction.total_s
    assert gains.s_per_gib["host"] == pytest.approx(saved / more)
    assert gains.s_per_gib["device"] > 0 == gains.s_per_gib["disk"]


def test_a_tier_without_a_budget_is_not_named() -> None:
    q = asked("opt-1.3b", 4, {**ON_T4, "disk": None})
    assert set(gains_of_search(q, found(q), whole=False).s_per_gib) == {"device", "host"}
