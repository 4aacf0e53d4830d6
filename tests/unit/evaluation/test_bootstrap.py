"""Bootstrap intervals: repeatable, around the estimate, as wide as theory says, paired between policies."""

from __future__ import annotations

import numpy as np
import pytest

from flexgen_h2o.evaluation.metrics import Bootstrap


def test_equal_seeds_give_equal_intervals_and_others_do_not() -> None:
    values = np.random.default_rng(1).normal(size=50)
    first, again, other = (Bootstrap(50, 200, seed).mean(values) for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_the_interval_holds_the_mean_and_is_as_wide_as_the_standard_error_says() -> None:
    values = np.random.default_rng(2).normal(5, 2, size=400)
    found = Bootstrap(400, 2000, 0).mean(values)
    error = values.std() / 20
    assert found.value == pytest.approx(values.mean())
    assert found.low < found.value < found.high
    assert (found.low, found.high) == pytest.approx((found.value - 1.96 * error, found.value + 1.96 * error), abs=0.03)
    assert found.n == 400


def test_about_95_in_100_intervals_hold_the_true_mean() -> None:
    rng = np.random.default_rng(3)
    found = [Bootstrap(60, 300, i).mean(rng.exponential(size=60)) for i in range(200)]
    assert 0.88 <= np.mean([one.low <= 1 <= one.high for one in found]) <= 0.99


def test_equal_values_leave_no_doubt() -> None:
    found = Bootstrap(7, 100, 0).mean(np.full(7, 0.25))
    assert (found.value, found.low, found.high) == (0.25, 0.25, 0.25)


def test_a_percentile_is_of_all_steps_of_the_drawn_prompts() -> None:
    values = np.arange(200.0).reshape(20, 10)
    found = Bootstrap(20, 300, 0).percentile(values, 95)
    assert found.value == np.percentile(np.arange(200.0), 95)
    assert found.low < found.value <= found.high <= 199


def test_a_ratio_draws_prompts_with_all_their_questions() -> None:
    right, asked = np.array([3.0, 0.0, 1.0, 0.0]), np.array([3.0, 1.0, 4.0, 0.0])
    found = Bootstrap(4, 500, 0).ratio(right, asked)
    assert found.value == 0.5
    assert 0 <= found.low < 0.5 < found.high <= 1


def test_a_difference_is_paired() -> None:
    """Prompts differ a lot, two policies on them by a constant: the difference is certain."""
    values = np.random.default_rng(5).normal(0, 100, size=30)
    found = Bootstrap(30, 200, 0).mean((values + 0.5) - values)
    assert (found.low, found.high) == pytest.approx((0.5, 0.5))
