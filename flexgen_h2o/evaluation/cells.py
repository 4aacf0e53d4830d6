"""What is compared: eviction policies at budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from flexgen_h2o.errors import UsageError
from flexgen_h2o.kvcache.eviction import Eviction, Full, make_eviction


@dataclass(frozen=True)
class Cell:
    """One policy at one budget. budget: columns kept, as a share of the prompt, half heavy and half recent."""

    label: str
    budget: float
    eviction: Eviction


def make_cells(policies: Sequence[str], budgets: Sequence[float], whole: bool = False) -> list[Cell]:
    """All policies at all budgets, a budget at a time. whole: the full cache is one of them, first.

    A policy is a name, or a name with settings of its own: `h2o-norm:decay=0.98,sinks=0`. Raises UsageError naming
    --policies or --budgets.
    """
    for name, given in (("--policies", policies), ("--budgets", budgets)):
        twice = next((one for i, one in enumerate(given) if one in given[:i]), None)
        if twice is not None:
            raise UsageError(f"{name}: {twice} is given twice")
    for budget in budgets:
        if not 0 < budget <= 1:
            raise UsageError(f"--budgets: {budget} is not in (0, 1]; 0.2 keeps a fifth of the prompt's columns")
    full = [Cell(Full.name, 1.0, Full())] if whole else []
    return full + [Cell(policy, budget, _eviction(policy, budget)) for budget in budgets for policy in policies]


def _eviction(policy: str, budget: float) -> Eviction:
    try:
        return make_eviction(policy, heavy_ratio=budget / 2, recent_ratio=budget / 2)
    except UsageError as error:
        raise UsageError(f"--policies {policy}: {str(error).removeprefix('eviction: ')}") from error
