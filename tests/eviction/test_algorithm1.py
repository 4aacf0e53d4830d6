"""Algorithm 1 of the H2O paper: its greedy choices against brute force, and where it is the `h2o` of the reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from tests.eviction.algorithm1 import (
    Plain,
    SetFunction,
    Start,
    additive,
    algorithm_1,
    best_subset,
    covered,
    greedy_subset,
    is_monotone,
    is_submodular,
    leaver,
    restricted_attention,
)
from tests.eviction.gqa_family import PlainGQA, random_weights
from tests.eviction.policies import Budget, h2o
from tests.eviction.reference import Attention, Evicted, PlainModel, PlainOPT, evicted_greedy, forward
from tests.parity.reference import random_model, random_prompts

SUM = additive(lambda x: x)
CONCAVE: dict[str, SetFunction] = {
    "sum": SUM,
    "sum of roots": additive(math.sqrt),
    "sum of logs": additive(math.log1p),
    "covered, roots": covered(math.sqrt),
    "covered, logs": covered(math.log1p),
    "covered, capped": covered(lambda x: min(x, 0.5)),
}
GREEDY_SHARE = 1 - 1 / math.e


def attention_rows(n: int, seed: int, sharpness: float = 3.0) -> torch.Tensor:
    """(n, n) causal softmax rows, fp64."""
    generator = torch.Generator().manual_seed(seed)
    scores = sharpness * torch.randn(n, n, generator=generator, dtype=torch.float64)
    return scores.masked_fill(~torch.ones(n, n).tril().bool(), -math.inf).softmax(-1)


# ---- the set functions


@pytest.mark.parametrize("name", CONCAVE)
@pytest.mark.parametrize("seed", range(3))
def test_the_set_functions_are_monotone_and_submodular(name: str, seed: int) -> None:
    f = partial(CONCAVE[name], attention_rows(7, seed))
    assert is_monotone(f, range(7)) and is_submodular(f, range(7)) and f(()) == 0


def test_the_checks_can_fail() -> None:
    history = attention_rows(6, 0)
    assert is_monotone(partial(covered(lambda x: x * x), history), range(6))
    assert not is_submodular(partial(covered(lambda x: x * x), history), range(6))
    table = [0, 1, 1.5, 2]
    assert is_submodular(lambda t: table[len(t)], range(3))
    assert not is_submodular(lambda t: table[len(t)] + (set(t) == {1, 2}), range(3))  # by one of its pairs only
    assert not is_monotone(partial(covered(lambda x: x - x * x), history), range(6))


# ---- greedy choices


@pytest.mark.parametrize("name", CONCAVE)
@pytest.mark.parametrize(("n", "k"), [(3, 2), (5, 4), (9, 4), (9, 1)])
def test_one_step_leaves_the_best_of_all_subsets(name: str, n: int, k: int) -> None:
    """Of all subsets of G = S + {i} with at most k columns, G - {u} has the largest F."""
    for seed in range(8):
        history = attention_rows(n, seed)
        grown = [*range(n)][n - 1 - k :]
        f = partial(CONCAVE[name], history)
        left = set(grown) - {leaver(CONCAVE[name], history, grown)}
        assert f(left) >= f(best_subset(f, grown, k)) - 1e-12


def test_equal_scores_leave_from_the_old_end_and_the_window_never() -> None:
    history = torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0]])
    assert leaver(SUM, history, [0, 2, 3]) == 0
    assert leaver(SUM, history, [1, 2, 4]) == 1
    assert leaver(SUM, history, [0, 2, 3, 4], recent=1) == 0
    assert leaver(SUM, history, [2, 3, 4], recent=1) == 2


@pytest.mark.parametrize("name", CONCAVE)
@pytest.mark.parametrize(("n", "k"), [(6, 2), (8, 3), (9, 4)])
def test_greedy_selection_is_within_its_guarantee(name: str, n: int, k: int) -> None:
    """F(greedy) >= (1 - 1/e) F(best) (Nemhauser et al. 1978), for the sums it is the best itself."""
    for seed in range(4):
        f = partial(CONCAVE[name], attention_rows(n, seed))
        greedy, best = f(greedy_subset(f, range(n), k)), f(best_subset(f, range(n), k))
        assert greedy >= GREEDY_SHARE * best - 1e-12
        if name.startswith("sum"):
            assert greedy == pytest.approx(best)


def test_greedy_selection_may_miss_the_best() -> None:
    """Column 0 serves both queries best alone, 1 and 2 together better: the guarantee is not empty."""
    history = torch.tensor([[0.6, 1.0, 0.0], [0.6, 0.0, 1.0]])
    f: Plain = partial(covered(lambda x: min(x, 1.0)), history)
    assert is_monotone(f, range(3)) and is_submodular(f, range(3))
    assert greedy_subset(f, range(3), 2) == {0, 1} and best_subset(f, range(3), 2) == {1, 2}


# ---- the whole algorithm


def test_attention_over_a_kept_set_is_its_softmax() -> None:
    torch.manual_seed(0)
    query, keys = torch.randn(4).double(), torch.randn(7, 4).double()
    o = restricted_attention(query, keys, (1, 3, 6))
    torch.testing.assert_close(o[[1, 3, 6]], (keys[[1, 3, 6]] @ query).softmax(0))
    assert o[[0, 2, 4, 5]].abs().max() <= 1e-15


@pytest.mark.parametrize("name", CONCAVE)
def test_sets_grow_by_the_new_column_and_never_beyond_k(name: str) -> None:
    torch.manual_seed(1)
    queries, keys = torch.randn(2, 12, 4).double(), torch.randn(12, 4).double()
    before: set[int] = set()
    for i, kept in enumerate(algorithm_1(queries, keys, 4, CONCAVE[name], recent=2)):
        assert set(kept) <= before | {i} and len(kept) == min(i + 1, 4) and set(kept) >= {i, max(0, i - 1)}
        before = set(kept)


def test_a_monotone_h_changes_no_set() -> None:
    """F = sum of h(...) is additive, so any rising h lets the column with the least accumulated attention leave."""
    torch.manual_seed(2)
    queries, keys = torch.randn(2, 14, 4).double(), torch.randn(14, 4).double()
    sets = [algorithm_1(queries, keys, 5, CONCAVE[name], recent=2) for name in ("sum", "sum of roots", "sum of logs")]
    assert sets[0] == sets[1] == sets[2]


# ---- against the reference's h2o


def opt() -> PlainOPT:
    return PlainOPT(random_model(), torch.float64)


def gqa() -> PlainGQA:
    return PlainGQA(random_weights(), torch.float64)


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
@pytest.mark.parametrize(("heavy", "recent"), [(6, 0), (4, 2), (3, 3), (1, 5), (0, 6)])
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
@pytest.mark.parametrize(("heavy", "recent"), [(5, 3), (8, 0), (2, 6)])
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
