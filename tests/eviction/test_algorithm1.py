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

from collections.abc import Collection

import pytest
import torch

from tests.eviction.plain_models import plain_model
from tests.eviction.policies import Budget, h2o
from tests.eviction.reference import Attention, Evicted, PlainModel, evicted_greedy, forward
from tests.parity.reference import random_model, random_prompts


def restricted_attention(
    query: torch.Tensor, keys: torch.Tensor, columns: Collection[int]
) -> torch.Tensor:
    """o_i = D_i^-1 (exp(q K_G^T) - 1 outside G). query: (d,), scaled; keys: (n, d). Returns (n,), 0
    outside G."""
    outside = torch.ones(len(keys), dtype=keys.dtype)
    outside[list(columns)] = 0
    weights = (keys * (1 - outside)[:, None] @ query).exp() - outside
    return weights / weights.sum()


def algorithm_1(
    queries: torch.Tensor,
    keys: torch.Tensor,
    k: int,
    recent: int,
    kept: Collection[int],
    history: torch.Tensor,
) -> list[list[int]]:
    """The kept set after each further query, ascending. queries: (g, n, d), scaled; keys: (n, d).

    kept: the set after as many queries as `history` has rows, and their attention (rows, n).

    F is the paper's F_score with h(x) = x: the sum over a set of the attention that its columns
    accumulated. u is the oldest of several.
    """
    held = list(kept)
    found = []
    for i in range(len(history), len(keys)):
        held.append(i)
        row = torch.stack([restricted_attention(query[i], keys, held) for query in queries]).sum(0)
        history = torch.cat([history, row[None]])
        if len(held) > k:
            sums = history.sum(0).tolist()
            may_leave = held[: len(held) - recent]
            held.remove(max(may_leave, key=lambda v: sum(sums[s] for s in held if s != v)))
        found.append(list(held))
    return found


# ---- against the reference's h2o


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


@pytest.mark.parametrize("model_type", ["opt", "llama"])
@pytest.mark.parametrize(("prompt_len", "heavy", "recent"), [(5, 4, 2), (17, 5, 3), (17, 8, 0)])
def test_it_is_h2o_from_the_prefills_choice_on(
    model_type: str, prompt_len: int, heavy: int, recent: int
) -> None:
    """F = sum of accumulated attention, k = H + R, `recent` = R, eviction at every step, no sinks.

    A prompt that fits the budget is run from its first query on. A longer one starts from what h2o
    kept and the full causal attention of the prompt's rows. Per layer and kv-head, on the queries
    and keys that this layer had: those of later layers depend on what the earlier ones evicted.
    """
    model = plain_model(random_model(model_type=model_type).double())
    prompt = random_prompts((prompt_len,))[0]
    got = evicted_greedy(model, prompt, 12, h2o(Budget(heavy_size=heavy, recent_size=recent)))
    assert got.least_gap > 1e-9
    for layer, seen in enumerate(attention_of_the_run(model, prompt, got)):
        for head in range(model.kv_heads):
            queries = seen.q[head] * seen.q.shape[-1] ** -0.5
            rows = 0 if prompt_len <= heavy + recent else prompt_len
            sets = algorithm_1(
                queries,
                seen.k[head],
                heavy + recent,
                recent,
                got.kept[0][layer][head] if rows else (),
                seen.probabilities[head, :, :rows].sum(0),
            )
            kept = [kept[layer][head] for kept in got.kept]
            assert sets[-len(kept) + bool(rows) :] == kept[bool(rows) :]
