"""What is compared: eviction policies at budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from flexgen_h2o.errors import UsageError
from flexgen_h2o.kvcache.eviction import EVICTING, Eviction

_SIZES = frozenset({"heavy_ratio", "recent_ratio", "heavy_size", "recent_size"})  # what a budget stands for


@dataclass(frozen=True)
class Cell:
    """One policy at one budget. budget: columns kept, as a share of the prompt, half heavy and half recent."""

    label: str
    budget: float
    eviction: Eviction


def make_cells(policies: Sequence[str], budgets: Sequence[float]) -> list[Cell]:
    """All policies at all budgets, a budget at a time.

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
    return [Cell(policy, budget, _eviction(policy, budget)) for budget in budgets for policy in policies]


def _eviction(policy: str, budget: float) -> Eviction:
    name, _, rest = policy.partition(":")
    if name not in EVICTING:
        raise UsageError(f"--policies {policy}: {name or 'nothing'} is not one of {', '.join(EVICTING)}")
    own = [field.name for field in fields(EVICTING[name]) if field.name not in _SIZES]
    settings: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        if key not in own:
            raise UsageError(f"--policies {policy}: {key} is not a setting of {name}; it has {', '.join(own)}")
        settings[key] = _value(value)
    try:
        return EVICTING[name](heavy_ratio=budget / 2, recent_ratio=budget / 2, **settings)
    except UsageError as error:
        raise UsageError(f"--policies {policy}: {error}") from error


def _value(text: str) -> bool | int | float | str:
    """A setting as Python has it; what is no number and no truth value is a name, and the policy judges it."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
