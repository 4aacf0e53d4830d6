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
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import combinations

import torch

# How good a set of columns is, given the (rows, n) attention they received.
SetFunction = Callable[[torch.Tensor, Collection[int]], float]


def additive(h: Callable[[float], float]) -> SetFunction:
    """The paper's F_score: sum over s in T of h(attention that s accumulated). With h(x) = x that of H2O itself."""

    def score(history: torch.Tensor, columns: Collection[int]) -> float:
        sums = history.sum(0).tolist()
        return math.fsum(h(sums[s]) for s in columns)

    return score


def covered(h: Callable[[float], float]) -> SetFunction:
    """Sum over the queries of h(attention of that query inside T): columns that serve the same queries add less."""

    def score(history: torch.Tensor, columns: Collection[int]) -> float:
        return math.fsum(h(math.fsum(row[s] for s in columns)) for row in history.tolist())

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


# ---- by brute force


Plain = Callable[[Collection[int]], float]


def subsets(ground: Collection[int], most: int | None = None) -> Iterator[frozenset[int]]:
    """All subsets of at most `most` elements, the smaller first."""
    sizes = range((len(ground) if most is None else most) + 1)
    return (frozenset(chosen) for size in sizes for chosen in combinations(sorted(ground), size))


def is_monotone(f: Plain, ground: Collection[int], tolerance: float = 1e-12) -> bool:
    """F(T + {v}) >= F(T) for all T and v."""
    return all(f(t | {v}) >= f(t) - tolerance for t in subsets(ground) for v in set(ground) - t)


def is_submodular(f: Plain, ground: Collection[int], tolerance: float = 1e-12) -> bool:
    """F(S + {v}) - F(S) >= F(T + {v}) - F(T) for all S inside T and v outside T."""
    known = {t: f(t) for t in subsets(ground)}

    def gain(t: frozenset[int], v: int) -> float:
        return known[t | {v}] - known[t]

    # It is enough to look at T = S + {w}: longer chains are sums of such steps.
    return all(
        gain(s, v) >= gain(s | {w}, v) - tolerance
        for s in known
        for v, w in combinations(sorted(set(ground) - s), 2)
    )  # fmt: skip


def best_subset(f: Plain, ground: Collection[int], k: int) -> frozenset[int]:
    return max(subsets(ground, k), key=f)


def greedy_subset(f: Plain, ground: Collection[int], k: int) -> frozenset[int]:
    """k elements, each time the one that adds the most."""
    chosen: frozenset[int] = frozenset()
    for _ in range(k):
        chosen |= {max(sorted(set(ground) - chosen), key=lambda v: f(chosen | {v}))}
    return chosen
