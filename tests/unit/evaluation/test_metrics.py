"""The step metrics on numbers small enough to be worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from flexgen_h2o.evaluation.metrics import divergence, evicted_mass, flips, surprise


def test_divergence_of_two_coins() -> None:
    full, policy = torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.tensor([[math.log(9.0), 0.0], [5.0, 5.0]])
    want = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert divergence(full, policy).tolist() == pytest.approx([want, 0.0], abs=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_diverge_by_exactly_nothing(dtype: torch.dtype) -> None:
    logits = torch.randn(5, 1000).mul(7).to(dtype)
    assert divergence(logits, logits.clone()).tolist() == [0.0] * 5
    assert not flips(logits, logits.clone()).any()


def test_divergence_is_not_symmetric_and_looks_from_the_full_cache() -> None:
    full, policy = torch.tensor([[3.0, 0.0, 0.0]]), torch.tensor([[0.0, 0.0, 0.0]])
    p = torch.softmax(full[0].double(), 0)
    assert divergence(full, policy).item() == pytest.approx((p * (p * 3).log()).sum().item())
    assert divergence(full, policy).item() != pytest.approx(divergence(policy, full).item())


def test_flips_are_other_likeliest_tokens() -> None:
    full = torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.0, 0.0], [5.0, 5.0, 0.0]])
    policy = torch.tensor([[0.0, 9.0, 1.0], [3.0, 2.0, 0.0], [1.0, 1.0, 0.0]])
    assert flips(full, policy).tolist() == [False, True, False]


def test_surprise_is_the_log_of_the_token_s_share() -> None:
    logits = torch.log(torch.tensor([[0.25, 0.75], [0.5, 0.5]])) + 3
    assert surprise(logits, torch.tensor([0, 1])).tolist() == pytest.approx([math.log(4), math.log(2)], abs=1e-6)


def test_evicted_mass_is_what_the_columns_that_are_gone_would_get() -> None:
    """Two rows, two kv-heads of two query heads each; slots beyond `filled` hold nonsense."""
    weights = torch.tensor(
        [[[0.5, 1.0, 0.25, 0.25], [0.0, 0.0, 2.0, 0.0]], [[1.0, 1.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.5]]]
    )
    positions = torch.tensor([[[3, 1, 99], [0, 3, -7]], [[2, 0, 1], [1, 3, 2]]], dtype=torch.int32)
    lost = evicted_mass(weights, positions, torch.tensor([2, 3]))
    assert torch.allclose(lost, torch.tensor([[1 - 1.25 / 2, 1.0], [0.0, 0.25]]))


def test_holding_everything_loses_nothing() -> None:
    weights = torch.rand(3, 2, 17)
    positions = torch.stack([torch.randperm(17) for _ in range(6)]).view(3, 2, 17).int()
    assert evicted_mass(weights, positions, torch.full((3,), 17)).abs().max() < 1e-6
