"""Algorithm 1 of the H2O paper (Zhang et al. 2023), slow and on whole sets, and where it is the
`h2o` of the reference.

For each query i the kept set S becomes G = S + {i}; when that is more than k columns, u = argmax
over v in G of F(G - {v}) leaves. F scores sets of columns by the attention rows seen so far: o_i,
the softmax of query i over G, written as exp(q K^T) with the keys outside G set to zero and their
exp(0) = 1 taken off again; D_i normalises it.

Settled here: a query sees its own column (o_i is over G, not S); the rows of the query heads of one
kv-head are summed; the newest `recent` columns never leave, as in the paper's experiments. Where F
is the same for several v, the oldest leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import pytest
import torch

from tests.eviction.plain_models import PlainLlama, PlainOPT
from tests.eviction.policies import Budget, h2o
from tests.eviction.reference import Attention, Evicted, PlainModel, evicted_greedy, forward
from tests.parity.reference import random_model, random_prompts

# How good a set of columns is, given the (rows, n) attention they received.
SetFunction = Callable[[torch.Tensor, Collection[int]], float]


def additive(h: Callable[[float], float]) -> SetFunction:
    """The paper's F_score: sum over s in T of h(attention that s accumulated). With h(x) = x that
    of H2O itself."""

    def score(history: torch.Tensor, columns: Collection[int]) -> float:
        sums = history.sum(0).tolist()
        return math.fsum(h(sums[s]) for s in columns)

    return score


@dataclass(frozen=True)
class Start:
    """What Algorithm 1 goes on from: the set kept after `rows` queries, and their attention (rows,
    n), 0-padded."""

    kept: tuple[int, ...]
    history: torch.Tensor


def restricted_attention(
    query: torch.Tensor, keys: torch.Tensor, columns: Collection[int]
) -> torch.Tensor:
    """o_i = D_i^-1 (exp(q K_G^T) - 1 outside G). query: (d,), scaled; keys: (n, d). Returns (n,), 0
    outside G."""
    outside = torch.ones(len(keys), dtype=keys.dtype)
    outside[list(columns)] = 0
    weights = (keys * (1 - outside)[:, None] @ query).exp() - outside
    return weights / weights.sum()


def leaver(
    score: SetFunction, history: torch.Tensor, grown: Collection[int], recent: int = 0
) -> int:
    """u = argmax over v of F(G - {v}), v outside the `recent` newest; the oldest of several."""
    ordered = sorted(grown)
    candidates = ordered[: len(ordered) - recent]
    return max(candidates, key=lambda v: (score(history, [s for s in ordered if s != v]), -v))


def algorithm_1(
    queries: torch.Tensor,
    keys: torch.Tensor,
    k: int,
    score: SetFunction,
    recent: int = 0,
    start: Start | None = None,
) -> list[tuple[int, ...]]:
    """The kept set after each query from the start's on, ascending. queries: (g, n, d), scaled;
    keys: (n, d)."""
    n = len(keys)
    history = start.history if start else torch.zeros(0, n, dtype=keys.dtype)
    kept = list(start.kept if start else ())
    kept_sets = []
    for i in range(len(history), n):
        kept.append(i)
        row = torch.stack([restricted_attention(query[i], keys, kept) for query in queries]).sum(0)
        history = torch.cat([history, row[None]])
        if len(kept) > k:
            kept.remove(leaver(score, history, kept, recent))
        kept_sets.append(tuple(kept))
    return kept_sets


SUM = additive(lambda x: x)


def test_equal_scores_leave_from_the_old_end_and_the_window_never() -> None:
    history = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0]])
    assert leaver(SUM, history, [0, 2, 3]) == 0
    assert leaver(SUM, history, [1, 2, 4]) == 1
    assert leaver(SUM, history, [0, 2, 3, 4], recent=1) == 0
    assert leaver(SUM, history, [2, 3, 4], recent=1) == 2


# ---- against the reference's h2o


def opt() -> PlainOPT:
    return PlainOPT(random_model(), torch.float64)


def gqa() -> PlainLlama:
    return PlainLlama(random_model(model_type="llama").double())


def attention_of_the_run(model: PlainModel, prompt: list[int], got: Evicted) -> list[Attention]:
    """Every layer's queries and keys as they were under the run's own masks."""
    n = len(prompt)
    total = len(prompt) + len(got.tokens) - 1
    masks = torch.ones(model.num_layers, model.kv_heads, total, total).tril().bool()
    for step, kept in enumerate(got.kept[:-1]):
        for layer, heads in enumerate(kept):
            for head, held in enumerate(heads):
                masks[layer, head, n + step] = False
                masks[layer, head, n + step, [*held, n + step]] = True
    return forward(model, [*prompt, *got.tokens[:-1]], list(masks))[1]


@pytest.mark.parametrize("make", [opt, gqa], ids=["OPT", "grouped kv-heads"])
@pytest.mark.parametrize(("heavy", "recent"), [(6, 0), (4, 2), (1, 5)])
def test_it_is_h2o_where_the_prompt_fits_the_budget(
    make: Callable[[], PlainModel], heavy: int, recent: int
) -> None:
    """F = sum of accumulated attention, k = H + R, `recent` = R, prompt <= k, eviction at every
    step, no sinks.

    Per layer and kv-head, on the queries and keys that this layer had: those of later layers depend
    on what the earlier ones evicted. Then nothing is evicted by the prefill, and each column's
    score is all it ever received.
    """
    model = make()
    prompt = random_prompts((5,))[0]
    got = evicted_greedy(model, prompt, 12, h2o(Budget(heavy_size=heavy, recent_size=recent)))
    assert got.least_gap > 1e-9
    for layer, seen in enumerate(attention_of_the_run(model, prompt, got)):
        for head in range(model.kv_heads):
            queries = seen.q[head] * seen.q.shape[-1] ** -0.5
            sets = algorithm_1(queries, seen.k[head], heavy + recent, SUM, recent)
            assert [list(s) for s in sets[len(prompt) - 1 :]] == [
                kept[layer][head] for kept in got.kept
            ]


@pytest.mark.parametrize("make", [opt, gqa], ids=["OPT", "grouped kv-heads"])
@pytest.mark.parametrize(("heavy", "recent"), [(5, 3), (8, 0)])
def test_it_is_h2o_from_the_prefills_choice_on(
    make: Callable[[], PlainModel], heavy: int, recent: int
) -> None:
    """As above for longer prompts, started from what h2o kept and the full causal attention of the
    prompt's rows."""
    model = make()
    prompt = random_prompts((17,))[0]
    n = len(prompt)
    k = heavy + recent
    got = evicted_greedy(model, prompt, 12, h2o(Budget(heavy_size=heavy, recent_size=recent)))
    for layer, seen in enumerate(attention_of_the_run(model, prompt, got)):
        for head in range(model.kv_heads):
            queries = seen.q[head] * seen.q.shape[-1] ** -0.5
            start = Start(tuple(got.kept[0][layer][head]), seen.probabilities[head, :, :n].sum(0))
            sets = algorithm_1(queries, seen.k[head], k, SUM, recent, start)
            assert [list(s) for s in sets] == [kept[layer][head] for kept in got.kept[1:]]


def test_it_is_not_h2o_where_the_prompt_itself_is_cut() -> None:
    """Algorithm 1 evicts while it reads the prompt; h2o reads all of it first and then chooses
    once."""
    model = opt()
    prompt = random_prompts((17,))[0]
    got = evicted_greedy(model, prompt, 1, h2o(Budget(heavy_size=5, recent_size=3)))
    seen = attention_of_the_run(model, prompt, got)[0]
    sets = [
        algorithm_1(seen.q[h] * seen.q.shape[-1] ** -0.5, seen.k[h], 8, SUM, 3)[-1]
        for h in range(4)
    ]
    assert [list(s) for s in sets] != got.kept[0][0]
