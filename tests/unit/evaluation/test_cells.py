"""Policies and budgets as they are given on the command line."""

from __future__ import annotations

import pytest

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.evaluation.metrics import make_cells
from flexgen_h2o.kvcache.eviction import EVICTING, H2O, H2ONorm


def test_all_policies_at_all_budgets_each_half_heavy_and_half_recent() -> None:
    cells = make_cells(list(EVICTING), [0.5, 0.1])
    assert len(cells) == 2 * len(EVICTING)
    assert {(c.eviction.heavy_ratio, c.eviction.recent_ratio) for c in cells if c.budget == 0.1} == {(0.05, 0.05)}
    assert all(c.eviction.budget(100, 0, 1).columns == 10 for c in cells if c.budget == 0.1)
    assert H2O(heavy_ratio=0.25, recent_ratio=0.25) in [c.eviction for c in cells]


def test_a_policy_takes_settings_of_its_own() -> None:
    [cell] = make_cells(["h2o-norm:decay=0.98,sinks=0,layer_schedule=pyramid,while_decoding=false"], [0.2])
    want = H2ONorm(0.1, 0.1, None, None, "pyramid", False, sinks=0, decay=0.98)
    assert cell.eviction == want
    assert cell.label.startswith("h2o-norm:decay")


@pytest.mark.parametrize(
    ("policies", "budgets", "says"),
    [
        (["h3o"], [0.1], "--policies h3o: h3o is not one of local, h2o"),
        ([""], [0.1], "--policies : nothing is not one of"),
        (["full"], [0.1], "--policies full: full is not one of"),
        (["h2o:decay=0.9"], [0.1], "decay is not a setting of h2o"),
        (["h2o:heavy_size=3"], [0.1], "heavy_size is not a setting of h2o"),
        (["h2o-norm:decay=2"], [0.1], "--policies h2o-norm:decay=2: decay: 2 is not in"),
        (["h2o-norm:sinks=many"], [0.1], "sinks"),
        (["h2o-norm:decay"], [0.1], "decay"),
        (["h2o", "h2o"], [0.1], "--policies: h2o is given twice"),
        (["h2o"], [0.1, 0.1], "--budgets: 0.1 is given twice"),
        (["h2o"], [0.0], "--budgets: 0.0 is not in"),
        (["h2o"], [1.01], "--budgets: 1.01 is not in"),
        (["h2o"], [-0.1], "--budgets: -0.1 is not in"),
        (["h2o"], [float("nan")], "--budgets: nan is not in"),
        (["h2o"], [float("inf")], "--budgets: inf is not in"),
    ],
)
def test_what_is_refused(policies: list[str], budgets: list[float], says: str) -> None:
    with pytest.raises(UsageError) as error:
        make_cells(policies, budgets)
    assert says in str(error.value)
