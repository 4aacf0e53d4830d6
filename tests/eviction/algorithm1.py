"""Algorithm 1 of the H2O paper (Zhang et al. 2023), slow and on whole sets.

For each query i the kept set S becomes G = S + {i}; when that is more than k columns, u = argmax over v in G of
F(G - {v}) leaves. F scores sets of columns by the attention rows seen so far: o_i, the softmax of query i over G,
written as exp(q K^T) with the keys outside G set to zero and their exp(0) = 1 taken off again; D_i normalises it.

Settled here: a query sees its own column (o_i is over G, not S); the rows of the query heads of one kv-head are
summed; the newest `recent` columns never leave, as in the paper's experiments. Where F is the same for several v,
the oldest leaves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

# How good a set of columns is, given the (rows, n) attention they received.
SetFunction = Callable[[torch.Tensor, Collection[int]], float]


def additive(h: Callable[[float], float]) -> SetFunction:
    """The paper's F_score: sum over s in T of h(attention that s accumulated). With h(x) = x that of H2O itself."""

    def score(history: torch.Tensor, columns: Collection[int]) -> float:
        sums = history.sum(0).tolist()
        return math.fsum(h(sums[s]) for s in columns)

    return score


@dataclass(frozen=True)
class Start:
    """What Algorithm 1 goes on from: the set kept after `rows` queries, and their attention (rows, n), 0-padded."""

    kept: tuple[int, ...]
    history: torch.Tensor


def restricted_attention(query: torch.Tensor, keys: torch.Tensor, columns: Collection[int]) -> torch.Tensor:
    """o_i = D_i^-1 (exp(q K_G^T) - 1 outside G). query: (d,), scaled; keys: (n, d). Returns (n,), 0 outside G."""
    outside = torch.ones(len(keys), dtype=keys.dtype)
    outside[list(columns)] = 0
    weights = (keys * (1 - outside)[:, None] @ query).exp() - outside
    return weights / weights.sum()


def leaver(score: SetFunction, history: torch.Tensor, grown: Collection[int], recent: int = 0) -> int:
    """u = argmax over v of F(G - {v}), v outside the `recent` newest; the oldest of several."""
    ordered = sorted(grown)
    candidates = ordered[: len(ordered) - recent]
    return max(candidates, key=lambda v: (score(history, [s for s in ordered if s != v]), -v))


def algorithm_1(
    queries: torch.Tensor, keys: torch.Tensor, k: int, score: SetFunction, recent: int = 0, start: Start | None = None
) -> list[tuple[int, ...]]:
    """The kept set after each query from the start's on, ascending. queries: (g, n, d), scaled; keys: (n, d)."""
    n = len(keys)
    history = start.history if start else torch.zeros(0, n, dtype=keys.dtype)
    kept, kept_sets = list(start.kept if start else ()), []
    for i in range(len(history), n):
        kept.append(i)
        row = torch.stack([restricted_attention(query[i], keys, kept) for query in queries]).sum(0)
        history = torch.cat([history, row[None]])
        if len(kept) > k:
            kept.remove(leaver(score, history, kept, recent))
        kept_sets.append(tuple(kept))
    return kept_sets
