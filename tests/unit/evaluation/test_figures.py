"""Policies at budgets as flags give them, metrics of a step by hand, and intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from flexgen_h2o.evaluation.fidelity import divergence, flips
from flexgen_h2o.evaluation.figures import (
    Bootstrap,
    surprise,
)
from flexgen_h2o.evaluation.rows import make_cells
from flexgen_h2o.kvcache.eviction import EVICTING, H2O


def test_all_policies_at_all_budgets_each_half_heavy_and_half_recent() -> None:
    cells = make_cells(list(EVICTING), [0.5, 0.1])
    assert len(cells) == 2 * len(EVICTING)
    assert {
        (c.eviction.heavy_ratio, c.eviction.recent_ratio) for c in cells if c.budget == 0.1
    } == {(0.05, 0.05)}
    assert all(c.eviction.budget(100, 50, 0).columns == 10 for c in cells if c.budget == 0.1)
    assert H2O(heavy_ratio=0.25, recent_ratio=0.25) in [c.eviction for c in cells]


# ---- bootstrap


def test_the_interval_holds_the_mean_and_is_as_wide_as_the_standard_error_says() -> None:
    values = np.random.default_rng(2).normal(5, 2, size=400)
    found = Bootstrap(400, 2000, 0).mean(values)
    error = values.std() / 20
    assert found["value"] == pytest.approx(values.mean())
    assert found["low"] < found["value"] < found["high"]
    assert (found["low"], found["high"]) == pytest.approx(
        (found["value"] - 1.96 * error, found["value"] + 1.96 * error), abs=0.03
    )
    assert found["n"] == 400 and found == Bootstrap(400, 2000, 0).mean(values)
    share = Bootstrap(4, 500, 0).ratio(
        np.array([3.0, 0.0, 1.0, 0.0]), np.array([3.0, 1.0, 4.0, 0.0])
    )
    assert share["value"] == 0.5 and 0 <= share["low"] < 0.5 < share["high"] <= 1


# ---- metrics of a step


def test_divergence_flips_and_surprise_of_two_coins() -> None:
    """KL looks from the full cache; of equal logits it is exactly nothing, and the lower index
    counts as likeliest."""
    full = torch.tensor([[0.0, 0.0], [5.0, 5.0], [0.3, 0.7]])
    policy = torch.tensor([[0.0, math.log(9.0)], [5.0, 5.0], [0.3, 0.7]])
    want = 0.5 * math.log(0.5 / 0.1) + 0.5 * math.log(0.5 / 0.9)
    assert divergence(full, policy).tolist() == pytest.approx([want, 0.0, 0.0], abs=1e-7)
    assert divergence(full, policy)[1:].tolist() == [0.0, 0.0]
    assert flips(full, policy).tolist() == [True, False, False]
    assert surprise(policy[:2], torch.tensor([0, 1])).tolist() == pytest.approx(
        [math.log(10), math.log(2)]
    )
