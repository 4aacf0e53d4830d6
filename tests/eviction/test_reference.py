"""The slow reference itself: transformers' models when nothing is evicted, and what may be kept
when something is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle

import pytest
import torch

from tests.eviction.cases import WINDOWS, Known
from tests.eviction.engine import PAIRS
from tests.eviction.plain_models import plain_model
from tests.eviction.policies import Budget, Policy, Sizes, choose, h2o
from tests.eviction.reference import evicted_greedy
from tests.parity.cases import SHAPES
from tests.parity.reference import (
    LOGIT_TOLERANCE,
    greedy,
    random_model,
    random_prompts,
    teacher_forced,
)

NEW_TOKENS = 9
PROMPT = random_prompts((21,))[0]
KEEP_ALL = [replace(pair.plain, sizes=lambda n, new: Sizes(1, 99, 99)) for pair in PAIRS.values()]


@pytest.mark.parametrize(
    ("shape", "policy"),
    zip(
        (*SHAPES, "llama", "gpt_neox", WINDOWS, "mistral, windows", "gpt_oss"), cycle(KEEP_ALL[::3])
    ),
)
def test_a_budget_for_everything_gives_transformers_logits(
    shape: str, policy: Policy, known: Callable[[str], Known]
) -> None:
    model = known(shape).model
    plain = known(shape).plain
    got = evicted_greedy(plain, PROMPT, NEW_TOKENS, policy)
    assert got.tokens == greedy(model, PROMPT, NEW_TOKENS)
    apart = (got.logits - teacher_forced(model, PROMPT, got.tokens)).abs().max()
    assert apart <= LOGIT_TOLERANCE / 10 and got.least_gap == math.inf
    for step, kept in enumerate(got.kept):
        for heads, window in zip(kept, plain.windows, strict=True):
            whole = list(range(len(PROMPT) + step))
            assert heads == ([whole] * plain.kv_heads if window is None else [])


@torch.no_grad()
def test_the_prefill_keeps_what_transformers_own_attention_says() -> None:
    model = random_model()
    got = evicted_greedy(plain_model(model), PROMPT, 1, h2o(Budget(heavy_size=5, recent_size=3)))
    model.set_attn_implementation("eager")
    attentions = model(torch.tensor([PROMPT]), output_attentions=True).attentions
    for heads, attention in zip(got.kept[0], attentions, strict=True):
        heavy = attention[0].sum(1)[:, :-3].topk(5).indices
        assert [[*sorted(row), 18, 19, 20] for row in heavy.tolist()] == heads


@pytest.mark.parametrize(
    ("sizes", "score", "stay", "gap"),
    [
        (Sizes(0, 2, 2), [5, 1, 3, 2, 9, 9], [0, 2, 4, 5], 1),
        (
            Sizes(0, 1, 2),
            [3, 1, 3, 3, 0, 0],
            [3, 4, 5],
            0,
        ),  # a tie: the newest of the equal ones stays
        (Sizes(1, 1, 2), [0, 1, 3, 7, 0, 0], [0, 3, 4, 5], 4),
        (Sizes(0, 3, 0), [5, 1, 3, 2, 9, 0], [0, 2, 4], 1),  # nothing protects the newest
        (Sizes(0, 4, 2), [5, 1, 3, 2, 9, 9], [0, 1, 2, 3, 4, 5], math.inf),
    ],
)
def test_what_stays(sizes: Sizes, score: list[float], stay: list[int], gap: float) -> None:
    assert choose(range(6), sizes, [(sizes.heavy, torch.tensor(score).double())]) == (stay, gap)
