"""What is compared: eviction policies at budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from flexgen_h2o.errors import UsageError
from flexgen_h2o.kvcache.eviction import EVICTING, Eviction, Full, make_eviction
from flexgen_h2o.kvcache.eviction.evicting import ORIGINAL, ROLLING
from flexgen_h2o.kvcache.eviction.rolling import is_rolling


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
        check_distinct(name, given)
    for budget in budgets:
        if not 0 < budget <= 1:
            raise UsageError(f"--budgets: {budget} is not in (0, 1]; 0.2 keeps a fifth of the prompt's columns")
    full = [Cell(Full.name, 1.0, Full())] if whole else []
    shares = {budget: {"heavy_ratio": budget / 2, "recent_ratio": budget / 2} for budget in budgets}
    return full + [Cell(policy, budget, _eviction(policy, shares[budget])) for budget in budgets for policy in policies]


@dataclass(frozen=True)
class Case:
    """One policy of a given size."""

    label: str
    eviction: Eviction

    @property
    def positions(self) -> str:
        return ROLLING if is_rolling(self.eviction) else ORIGINAL


def make_cases(policies: Sequence[str], settings: Mapping[str, Any], sinks: int | None) -> list[Case]:
    """The full cache and policies by name, settings of their own included (`h2o:positions=rolling`).

    settings: of all policies but the full cache; sinks: of those that have some. Raises UsageError naming --policies.
    """
    check_distinct("--policies", policies)
    cases = []
    for policy in policies:
        own = dict(settings)
        kind = EVICTING.get(policy.partition(":")[0])
        if sinks is not None and kind is not None and "sinks" in {field.name for field in fields(kind)}:
            own["sinks"] = sinks
        cases.append(Case(policy, Full() if policy == Full.name else _eviction(policy, own)))
    return cases


def check_distinct(flag: str, given: Sequence[object]) -> None:
    twice = next((one for i, one in enumerate(given) if one in given[:i]), None)
    if twice is not None:
        raise UsageError(f"{flag}: {twice} is given twice")


def _eviction(policy: str, settings: Mapping[str, Any]) -> Eviction:
    try:
        return make_eviction(policy, **settings)
    except UsageError as error:
        raise UsageError(f"--policies {policy}: {str(error).removeprefix('eviction: ')}") from error
