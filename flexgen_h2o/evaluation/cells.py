"""What is compared with the full, uncompressed cache and weights: eviction policies at budgets, and compression."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from flexgen_h2o.errors import UsageError
from flexgen_h2o.evaluation.probe import Probe
from flexgen_h2o.kvcache.eviction import Eviction, make_eviction

Switches = Mapping[str, bool | int]
# Fields of the policy by the name that --compression gives them.
COMPRESSIONS: dict[str, Switches] = {
    **{f"weights{bits}": {"compress_weight": True, "weight_bits": bits} for bits in (8, 4)},
    "int8": {"int8_compute": True},
}


@dataclass(frozen=True)
class Cell:
    """One policy at one budget. budget: columns kept, as a share of the prompt, half heavy and half recent.

    switches: fields of the policy (config.Policy) that differ from the reference's; then nothing is evicted.
    """

    label: str
    budget: float
    eviction: Eviction
    switches: Switches = field(default_factory=dict)


def make_cells(policies: Sequence[str], budgets: Sequence[float], compressions: Sequence[str] = ()) -> list[Cell]:
    """All policies at all budgets, a budget at a time; then names of COMPRESSIONS.

    A policy is a name, or a name with settings of its own: `h2o-norm:decay=0.98,sinks=0`. Raises UsageError naming
    --policies, --budgets or --compression.
    """
    for name, given in (("--policies", policies), ("--budgets", budgets), ("--compression", compressions)):
        twice = next((one for i, one in enumerate(given) if one in given[:i]), None)
        if twice is not None:
            raise UsageError(f"{name}: {twice} is given twice")
    for budget in budgets:
        if not 0 < budget <= 1:
            raise UsageError(f"--budgets: {budget} is not in (0, 1]; 0.2 keeps a fifth of the prompt's columns")
    unknown = next((name for name in compressions if name not in COMPRESSIONS), None)
    if unknown is not None:
        raise UsageError(f"--compression {unknown}: not one of {', '.join(COMPRESSIONS)}")
    evicting = [Cell(policy, budget, _eviction(policy, budget)) for budget in budgets for policy in policies]
    return evicting + [Cell(name, 1.0, Probe(), COMPRESSIONS[name]) for name in compressions]


def _eviction(policy: str, budget: float) -> Eviction:
    try:
        return make_eviction(policy, heavy_ratio=budget / 2, recent_ratio=budget / 2)
    except UsageError as error:
        raise UsageError(f"--policies {policy}: {str(error).removeprefix('eviction: ')}") from error
