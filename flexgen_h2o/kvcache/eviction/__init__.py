"""Which KV columns are kept. One file a policy; `POLICIES` names those that the engine runs."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen_h2o.errors import UsageError
from flexgen_h2o.kvcache.eviction.full import Full

__all__ = ["H2O", "POLICIES", "Full", "Local", "check_eviction"]

POLICIES = {Full.name: Full}


@dataclass(frozen=True)
class H2O:
    """Heavy hitters and recent columns, as shares of the prompt. Its settings; the engine does not run it yet."""

    heavy_ratio: float = 0.1
    recent_ratio: float = 0.1


@dataclass(frozen=True)
class Local:
    """Sinks and a window of recent columns. Its settings; the engine does not run it yet."""

    recent_ratio: float = 0.2
    sinks: int = 0


def check_eviction(eviction: object) -> Full:
    """The policy that the engine runs; UsageError for one it does not know or does not run yet."""
    if eviction is None:
        return Full()
    if isinstance(eviction, Full):
        return eviction
    if isinstance(eviction, H2O | Local):
        raise UsageError(f"eviction {type(eviction).__name__} is not in this version; use Full() (--eviction full)")
    raise UsageError(f"eviction {eviction!r} is not an eviction policy; use Full()")
