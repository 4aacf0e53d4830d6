"""Token choice against a slow reference, and independence of batching."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch

from flexgen_h2o.engine.sampling import (
    NOT_FINITE,
    Logprobs,
    SamplingParams,
    choose_tokens,
    kept_probabilities,
    sample_tokens,
    token_logprobs,
)

# ---- greedy


@pytest.mark.parametrize(("dtype", "temperature"), [(torch.float32, 0.0), (torch.bfloat16, 9.9e-6)])
def test_greedy_takes_the_lowest_of_equal_maxima(dtype: torch.dtype, temperature: float) -> None:
    logits = torch.randint(0, 4, (9, 5003), generator=torch.Generator().manual_seed(0)).to(dtype)
    chosen = sample_tokens(logits, [SamplingParams(temperature=temperature)] * 9, range(9), [0] * 9)
    assert chosen == [int((row == row.max()).nonzero()[0]) for row in logits]
    assert all(type(token) is int for token in chosen)


# ---- sampling


def slow_probabilities(
    row: list[float], temperature: float, top_k: int, top_p: float
) -> list[float]:
    """What top-k and then top-p leave of one row, one step after the other."""
    top = max(row)
    weight = [math.exp((x - top) / temperature) for x in row]
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if top_k:
        order = order[:top_k]
    mass = sum(weight[i] for i in order)
    kept = []
    reached = 0.0
    for i in order:
        kept.append(i)
        reached += weight[i] / mass
        if reached >= top_p:
            break
    if top_p == 1.0:
        kept = order
    mass = sum(weight[i] for i in kept)
    return [weight[i] / mass if i in kept else 0.0 for i in range(len(row))]


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(0, 0.0), (0, 0.9), (0, 1.0), (1, 0.3), (40, 1e-9), (40, 0.9), (99, 0.999), (40, 1.0)],
)
@pytest.mark.parametrize("ties", [False, True])
def test_kept_probabilities_equal_the_slow_reference(top_k: int, top_p: float, ties: bool) -> None:
    logits = torch.randn(12, 50, generator=torch.Generator().manual_seed(top_k)) * 3
    if ties:
        # Values no sum of which falls on top_p itself: rounding must not decide the test.
        logits = (logits / 2).round()
    found = kept_probabilities(logits, SamplingParams(temperature=0.7, top_k=top_k, top_p=top_p))
    wanted = torch.tensor([slow_probabilities(row, 0.7, top_k, top_p) for row in logits.tolist()])
    assert torch.equal(found > 0, wanted > 0)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-7)


def test_nucleus_wider_than_the_first_guess() -> None:
    logits = torch.stack([torch.zeros(5000), torch.linspace(0, 30, 5000)])
    found = kept_probabilities(logits, SamplingParams(temperature=1.0, top_p=0.5001))
    assert int((found[0] > 0).sum()) == 2501 and bool((found[0, :2501] > 0).all())
    alone = kept_probabilities(logits[1:], SamplingParams(temperature=1.0, top_p=0.5001))
    assert torch.equal(found[1:], alone)


def test_distribution_follows_the_probabilities() -> None:
    row = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -math.inf])
    draws = 20_000
    params = SamplingParams(temperature=1.3, top_k=4, top_p=0.95, seed=11)
    chosen = sample_tokens(row.expand(draws, 6), [params] * draws, range(draws), [7] * draws)
    wanted = np.array(slow_probabilities(row.tolist(), 1.3, 4, 0.95))
    counts = np.bincount(chosen, minlength=6)
    assert (counts[wanted == 0] == 0).all() and (wanted > 0).sum() == 4
    expected = wanted[wanted > 0] * draws
    # chi-square, 3 degrees of freedom: 16.3 is passed once in a thousand; the seed is fixed.
    assert float((((counts[wanted > 0] - expected) ** 2) / expected).sum()) < 16.3


def test_steps_rows_and_seeds_draw_independently() -> None:
    """Neighbouring rows, steps and seeds must not share or shift one stream."""
    logits = torch.zeros(1, 2**20)
    drawn = [
        sample_tokens(logits, [SamplingParams(temperature=1.0, seed=seed)], [row], [step])[0]
        for seed, row, step in product(range(4), repeat=3)
    ]
    assert len(set(drawn)) >= 63


MIXED = [
    SamplingParams(),
    SamplingParams(temperature=0.9, top_k=200, top_p=0.9, seed=5),
    SamplingParams(temperature=0.9, seed=5),
    SamplingParams(temperature=2.0, seed=6, max_tokens=3),
]


@pytest.mark.parametrize("kinds", [MIXED, MIXED[1:2]])
def test_batching_and_order_do_not_change_a_token(
    kinds: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy rows and rows cut differently side by side, in chunks: each chooses as if alone."""
    monkeypatch.setattr("flexgen_h2o.engine.sampling.SAMPLING_CHUNK", 3000)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(40, 1031, generator=generator).to(torch.bfloat16)
    rows = [(i, kinds[i % len(kinds)], 100 + i, i % 5) for i in range(40)]

    def sample(some: list[tuple[int, SamplingParams, int, int]]) -> list[int]:
        places, params, streams, steps = (list(column) for column in zip(*some, strict=True))
        return sample_tokens(logits[places], params, streams, steps)

    together = sample(rows)
    assert len(set(together)) > 15
    assert [sample([row])[0] for row in rows] == together
    assert sample(rows[::-1]) == together[::-1]


def test_a_compact_list_of_logprobs_returns_what_it_got() -> None:
    found = token_logprobs(torch.randn(4, 9), [1, 2, 3, 8], [3, 0, 2, 1])
    kept = Logprobs([None, *found])
    kept.append(found[0])
    assert kept == [None, *found, found[0]] and kept[1:3] == found[:2] and kept[-1] == found[0]
    assert len(kept) == 6 and [*Logprobs()] == []


def test_logprobs_of_chosen_and_likeliest_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flexgen_h2o.engine.sampling.SAMPLING_CHUNK", 130)
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    logits[:, 3:] = -math.inf  # a topic of three words
    tokens = [0, 1, 2, 0, 1, 2, 0]
    tops = [0, 1, 2, 3, 4, 20, 0]
    want = logits.float().log_softmax(-1)
    found = token_logprobs(logits, tokens, tops)
    for i, one in enumerate(found):
        assert one.logprob == pytest.approx(float(want[i, tokens[i]]), abs=1e-6)
        assert len(one.top) == min(tops[i], 3), "forbidden tokens have none"
        best = want[i].topk(len(one.top))
        assert [token for token, _ in one.top] == best.indices.tolist()
        assert [value for _, value in one.top] == pytest.approx(best.values.tolist(), abs=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_row_that_is_not_finite_leaves_the_others_alone(value: float) -> None:
    """Its place has the mark in the one tensor that comes back, and everyone else's the token."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3)) * 3
    expected = sample_tokens(logits, MIXED, range(4), range(4))
    for bad in ([0], [2, 3], [0, 1, 2, 3]):
        damaged = logits.clone()
        damaged[bad, 7] = value
        chosen = choose_tokens(damaged, MIXED, range(4), range(4)).tolist()
        assert chosen == [NOT_FINITE if i in bad else token for i, token in enumerate(expected)]
