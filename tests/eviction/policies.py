"""The eviction policies as the reference runs them: a few lines each, column scores in fp64 and by
position.

Letters: kv = kv-heads, g = query heads of one kv-head, n = columns so far. A policy says how many
columns stay (`Sizes`) and scores them (`Scorer`); `choose` decides. Whatever a paper leaves open is
settled as the engine does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F

# How many of the heavy columns are chosen by which scores, (kv, n), one choice after the other.
Turns = Sequence[tuple[int, torch.Tensor]]


@dataclass(frozen=True)
class Sizes:
    """Columns that stay of one row: its first positions, those with the largest scores, its
    newest."""

    sinks: int
    heavy: int
    recent: int

    @property
    def total(self) -> int:
        return self.sinks + self.heavy + self.recent


@dataclass(frozen=True)
class Budget:
    """Heavy and recent columns of a row: shares of its prompt, at least 1 each, or absolute sizes,
    which may be 0; or half each of a share of its prompt and most new tokens, at least 1 together,
    an odd one recent."""

    heavy_ratio: float = 0.1
    recent_ratio: float = 0.1
    heavy_size: int | None = None
    recent_size: int | None = None
    kv_budget: float | None = None

    def sizes(self, prompt_len: int, most_new: int) -> tuple[int, int]:
        if self.kv_budget is not None:
            both = max(1, int(self.kv_budget * (prompt_len + most_new)))
            return both // 2, both - both // 2
        heavy = (
            max(1, int(self.heavy_ratio * prompt_len))
            if self.heavy_size is None
            else self.heavy_size
        )
        recent = (
            max(1, int(self.recent_ratio * prompt_len))
            if self.recent_size is None
            else self.recent_size
        )
        return heavy, recent


class Scorer:
    """Scores of one layer's columns. Columns that were evicted keep an entry, which nobody
    reads."""

    def __init__(self, layer: int, sizes: Sizes) -> None:
        self.layer = layer
        self.sizes = sizes

    def see_prompt(self, p: torch.Tensor) -> None:
        """p: (kv, g, n, n) fp64 causal probabilities. By default only the last query counts."""
        self.see_token(p[:, :, -1])

    def see_token(self, p: torch.Tensor) -> None:
        """p: (kv, g, n) probabilities of the newest query, its own column the last. Sets `scores`,
        (kv, n)."""
        raise NotImplementedError

    def turns(self) -> Turns:
        return [(self.sizes.heavy, self.scores)]


@dataclass(frozen=True)
class Policy:
    """`sizes` of a row by its prompt tokens and its most new tokens. in_decode False: only the
    prefill evicts. share: of the columns whose values count, below 1 for a policy that keeps
    all."""

    sizes: Callable[[int, int], Sizes]
    scorer: Callable[[int, Sizes], Scorer]
    in_decode: bool = True
    share: float = 1.0


def choose(
    held: Sequence[int], sizes: Sizes, turns: Sequence[tuple[int, torch.Tensor]]
) -> tuple[list[int], float]:
    """Which of the `held` positions (ascending) of one kv-head stay, by its turns (scores: (n,) by
    position).

    Sinks and the newest always do; of the others those with the largest scores, on equal ones the
    newer. Also the least distance in score between one that stays and one that goes: infinite where
    there was no choice.
    """
    if len(held) <= sizes.total:
        return list(held), math.inf
    newest = list(held[len(held) - sizes.recent :])
    sinks = [j for j in held if j < sizes.sinks]
    rest = [j for j in held if j not in {*sinks, *newest}]
    stay = [*sinks, *newest]
    gap = math.inf
    for count, score in turns:
        order = sorted(rest, key=lambda j: (float(score[j]), j), reverse=True)
        chosen = order[:count]
        rest = order[count:]
        if chosen and rest:
            gap = min(gap, float(score[chosen[-1]] - score[rest[0]]))
        stay += chosen
    return sorted(stay), gap


def _grown(values: torch.Tensor) -> torch.Tensor:
    """(kv, n) with a zero for the new column."""
    return F.pad(values, (0, 1))


# ---- h2o as published, and the window alone


class ColumnSums(Scorer):
    """Sum of the probabilities that a column received, over query rows and the group."""

    def see_prompt(self, p: torch.Tensor) -> None:
        self.scores = p.sum((1, 2))

    def see_token(self, p: torch.Tensor) -> None:
        self.scores = _grown(self.scores) + p.sum(1)


class Position(Scorer):
    """The newer, the better."""

    def see_token(self, p: torch.Tensor) -> None:
        self.scores = torch.arange(p.shape[-1], dtype=torch.float64).expand(len(p), -1)


def h2o(budget: Budget) -> Policy:
    """Heavy hitters and recent columns."""
    return Policy(_without_sinks(budget), ColumnSums)


def _without_sinks(budget: Budget) -> Callable[[int, int], Sizes]:
    return lambda n, new: Sizes(0, *budget.sizes(n, new))


def local(budget: Budget, sinks: int = 4) -> Policy:
    """Sinks and a window, together as many columns as heavy and recent ones. Never less than one
    recent column."""

    def sizes(prompt_len: int, most_new: int) -> Sizes:
        total = sum(budget.sizes(prompt_len, most_new))
        first = min(sinks, total - 1)
        return Sizes(first, 0, total - first)

    return Policy(sizes, Position)


# ---- those that came after it


class MeanSeen(Scorer):
    """Column sums per query row that saw the column.

    What a decode step gives counts by the share of the columns that are held (those of probability
    above 0).
    """

    def see_prompt(self, p: torch.Tensor) -> None:
        kv = p.shape[0]
        n = p.shape[-1]
        self.sums = p.sum((1, 2))
        self.count = torch.arange(n, 0, -1, dtype=torch.float64).expand(kv, n)
        self.scores = self.sums / self.count

    def see_token(self, p: torch.Tensor) -> None:
        held = (p > 0).any(1).double().mean(1, keepdim=True)
        self.sums = _grown(self.sums) + held * p.sum(1)
        self.count = _grown(self.count) + 1
        self.scores = self.sums / self.count


class LastQuery(Scorer):
    """TOVA: what the newest query gives the column, mean over all heads of the layer; so all hold
    the same set."""

    def see_token(self, p: torch.Tensor) -> None:
        self.scores = p.mean((0, 1)).expand(len(p), -1)


class ObservationWindow(Scorer):
    """SnapKV: mean over the last `rows` queries, average-pooled over neighbours for the columns
    before them.

    Group summed. Neighbours past the first column, or in the window of those queries, count as
    zeros. A shorter prompt has fewer rows. While decoding a moving mean goes on from there.
    """

    def __init__(self, layer: int, sizes: Sizes, rows: int = 32, kernel: int = 7) -> None:
        super().__init__(layer, sizes)
        self.rows = rows
        self.kernel = kernel

    def see_prompt(self, p: torch.Tensor) -> None:
        mean = p[:, :, -self.rows :].sum(1).mean(1)
        reach = self.kernel // 2
        n = p.shape[-1]
        before = range(max(0, n - self.rows))
        pooled = [
            sum(mean[:, i] for i in range(j - reach, j + reach + 1) if i in before) / self.kernel
            for j in before
        ]
        self.scores = torch.stack([*pooled, *mean[:, len(before) :].unbind(1)], dim=1)

    def see_token(self, p: torch.Tensor) -> None:
        self.scores = (1 - 1 / self.rows) * _grown(self.scores) + p.sum(1) / self.rows


class Hashed(Scorer):
    """A fixed pseudo-random number for each (seed, layer, kv-head, position): the same whatever
    else is computed."""

    def __init__(self, layer: int, sizes: Sizes, seed: int = 0) -> None:
        super().__init__(layer, sizes)
        self.seed = seed

    def see_token(self, p: torch.Tensor) -> None:
        rows = [[self._number(head, j) for j in range(p.shape[-1])] for head in range(len(p))]
        self.scores = torch.tensor(rows, dtype=torch.float64)

    def _number(self, head: int, position: int) -> int:
        """24 bits of a 32-bit integer hash: the engine's, in Python's whole numbers."""
        x = (
            (position + 1) * 0x9E3779B1
            + (head + 1) * 0x85EBCA77
            + (self.layer + 65537 * self.seed + 1) * 0xC2B2AE3D
        )
        for shift in (15, 13, 16):
            x &= 0xFFFFFFFF
            x = (x ^ (x >> shift)) * 0x85EBCA77
        return (x & 0xFFFFFFFF) >> 8


def _of_heavy(budget: Budget, sinks: int, grace: int) -> Callable[[int, int], Sizes]:
    """Sinks, and recent columns until `grace` queries saw each, out of the heavy share: the budget
    stays what it is."""

    def sizes(prompt_len: int, most_new: int) -> Sizes:
        heavy, recent = budget.sizes(prompt_len, most_new)
        first = min(sinks, heavy)
        waiting = min(max(0, grace - recent), (heavy - first) // 2)
        return Sizes(first, heavy - first - waiting, recent + waiting)

    return sizes


def h2o_norm(budget: Budget, sinks: int = 4, grace: int = 16) -> Policy:
    return Policy(_of_heavy(budget, sinks, grace), MeanSeen)


def tova(budget: Budget) -> Policy:
    """Heavy and recent are one budget; only the newest column is safe."""
    return Policy(lambda n, new: Sizes(0, sum(budget.sizes(n, new)) - 1, 1), LastQuery)


def snapkv(budget: Budget, window: int = 32, kernel: int = 7) -> Policy:
    return Policy(
        _without_sinks(budget),
        lambda layer, sizes: ObservationWindow(layer, sizes, window, kernel),
    )


def random(budget: Budget, seed: int = 0) -> Policy:
    return Policy(_without_sinks(budget), lambda layer, sizes: Hashed(layer, sizes, seed))


# ---- what goes with any of them


def protecting(policy: Policy, first: int | str) -> Policy:
    """The first columns of a prompt stay, or all of the "prompt"; heavy and recent ones share the
    rest as they would share all. Only for policies without sinks or grace of their own."""

    def sizes(prompt_len: int, most_new: int) -> Sizes:
        own = policy.sizes(prompt_len, most_new)
        safe = prompt_len if first == "prompt" else min(prompt_len, int(first))
        left = own.total - safe
        heavy = own.heavy * left // own.total
        return Sizes(safe, heavy, left - heavy)

    return replace(policy, sizes=sizes)


# By the name that the engine has for them; their settings have the engine's names too.
POLICIES: dict[str, Callable[..., Policy]] = {
    "h2o": h2o,
    "local": local,
    "h2o-norm": h2o_norm,
    "tova": tova,
    "snapkv": snapkv,
    "random": random,
}


def policy(name: str, settings: Mapping[str, Any]) -> Policy:
    """The policy with the settings that the engine's policy of this name would be given."""
    sizes = {field.name for field in fields(Budget)}
    known = {*sizes, "while_decoding", "protect"}
    own = {key: value for key, value in settings.items() if key not in known}
    made = POLICIES[name](Budget(**{k: v for k, v in settings.items() if k in sizes}), **own)
    made = replace(made, in_decode=settings.get("while_decoding", True))
    protect = settings.get("protect")
    return made if protect is None else protecting(made, protect)
