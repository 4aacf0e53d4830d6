"""Algorithm 1 of the H2O paper, and where it is the `h2o` of the reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.eviction.algorithm1 import Start, additive, algorithm_1, leaver, restricted_attention
from tests.eviction.plain_models import PlainLlama
from tests.eviction.policies import Budget, h2o
from tests.eviction.reference import Attention, Evicted, PlainModel, PlainOPT, evicted_greedy, forward
from tests.parity.reference import random_model, random_prompts

SUM = additive(lambda x: x)


def test_equal_scores_leave_from_the_old_end_and_the_window_never() -> None:
    history = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0]])
    assert leaver(SUM, history, [0, 2, 3]) == 0
    assert leaver(SUM, history, [1, 2, 4]) == 1
    assert leaver(SUM, history, [0, 2, 3, 4], recent=1) == 0
    assert leaver(SUM, history, [2, 3, 4], recent=1) == 2


def test_attention_over_a_kept_set_is_its_softmax() -> None:
    torch.manual_seed(0)
    query, keys = torch.randn(4).double(), torch.randn(7, 4).double()
    o = restricted_attention(query, keys, (1, 3, 6))
    torch.testing.assert_close(o[[1, 3, 6]], (keys[[1, 3, 6]] @ query).softmax(0))
    assert o[[0, 2, 4, 5]].abs().max() <= 1e-15


# ---- against the reference's h2o


def opt() -> PlainOPT:
    return PlainOPT(random_model(), torch.float64)


def gqa() -> PlainLlama:
    return PlainLlama(random_model(model_type="llama").double())


def attention_of_the_run(model: PlainModel, prompt: list[int], got: Evicted) -> list[Attention]:
    """Every layer's queries and keys as they were under the run's own masks."""
    n, total = len(prompt), len(prompt) + len(got.tokens) - 1
    masks = torch.ones(model.num_layers, model.kv_heads, total, total).tril().bool()
    for step, kept in enumerate(got.kept[:-1]):
        for layer, heads in enumerate(kept):
            for head, held in enumerate(heads):
                masks[layer, head, n + step] = False
                masks[layer, head, n + step, [*held, n + step]] = True
    return forward(model, [*prompt, *got.tokens[:-1]], list(masks))[1]


@pytest.mark.parametrize("make", [opt, gqa], ids=["OPT", "grouped kv-heads"])
@pytest.mark.parametrize(("heavy", "recent"), [(6, 0), (4, 2), (1, 5)])
def test_it_is_h2o_where_the_prompt_fits_the_budget(make: Callable[[], PlainModel], heavy: int, recent: int) -> None:
    """F = sum of accumulated attention, k = H + R, `recent` = R, prompt <= k, eviction at every step, no sinks.

    Per layer and kv-head, on the queries and keys that this layer had: those of later layers depend on what the
    earlier ones evicted. Then nothing is evicted by the prefill, and each column's score is all it ever received.
    """
    model, prompt = make(), random_prompts((5,))[0]
    got = evicted_greedy(model, prompt, 12, h2o(Budget(heavy_size=heavy, recent_size=recent)))
    assert got.least_gap > 1e-9
    for layer, seen in enumerate(attention_of_the_run(model, prompt, got)):
        for head in range(model.kv_heads):
            queries = seen.q[head] * seen.q.shape[-1] ** -0.5
            sets = algorithm_1(queries, seen.k[head], heavy + recent, SUM, recent)
            assert [list(s) for s in sets[len(prompt) - 1 :]] == [kept[layer][head] for kept in got.kept]


@pytest.mark.parametrize("make", [opt, gqa], ids=["OPT", "grouped kv-heads"])
@pytest.mark.parametrize(("heavy", "recent"), [(5, 3), (8, 0)])
def test_it_is_h2o_from_the_prefills_choice_on(make: Callable[[], PlainModel], heavy: int, recent: int) -> None:
    """As above for longer prompts, started from what h2o kept and the full causal attention of the prompt's rows."""
    model, prompt = make(), random_prompts((17,))[0]
    n, k = len(prompt), heavy + recent
    got = evicted_greedy(model, prompt, 12, h2o(Budget(heavy_size=heavy, recent_size=recent)))
    for layer, seen in enumerate(attention_of_the_run(model, prompt, got)):
        for head in range(model.kv_heads):
            queries = seen.q[head] * seen.q.shape[-1] ** -0.5
            start = Start(tuple(got.kept[0][layer][head]), seen.probabilities[head, :, :n].sum(0))
            sets = algorithm_1(queries, seen.k[head], k, SUM, recent, start)
            assert [list(s) for s in sets] == [kept[layer][head] for kept in got.kept[1:]]


def test_it_is_not_h2o_where_the_prompt_itself_is_cut() -> None:
    """Algorithm 1 evicts while it reads the prompt; h2o reads all of it first and then chooses once."""
    model, prompt = opt(), random_prompts((17,))[0]
    got = evicted_greedy(model, prompt, 1, h2o(Budget(heavy_size=5, recent_size=3)))
    seen = attention_of_the_run(model, prompt, got)[0]
    sets = [algorithm_1(seen.q[h] * seen.q.shape[-1] ** -0.5, seen.k[h], 8, SUM, 3)[-1] for h in range(4)]
    assert [list(s) for s in sets] != got.kept[0][0]
