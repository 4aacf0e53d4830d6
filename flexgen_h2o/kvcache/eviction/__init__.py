"""Which KV columns are kept. One file a policy; `POLICIES` names them."""

from __future__ import annotations

from flexgen_h2o.errors import UsageError
from flexgen_h2o.kvcache.eviction.evicting import Evicting
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.kvcache.eviction.h2o_norm import H2ONorm
from flexgen_h2o.kvcache.eviction.local import Local
from flexgen_h2o.kvcache.eviction.policy import Eviction
from flexgen_h2o.kvcache.eviction.random_columns import Random
from flexgen_h2o.kvcache.eviction.snapkv import SnapKV
from flexgen_h2o.kvcache.eviction.tova import Tova
from flexgen_h2o.kvcache.eviction.value_h2o import ValueH2O

__all__ = [
    "EVICTING", "H2O", "POLICIES", "Evicting", "Eviction", "Full", "H2ONorm", "Local", "Random", "SnapKV", "Tova",
    "ValueH2O", "check_eviction",
]  # fmt: skip

EVICTING: dict[str, type[Evicting]] = {
    policy.name: policy for policy in (Local, H2O, H2ONorm, Tova, SnapKV, ValueH2O, Random)
}
POLICIES: tuple[str, ...] = (Full.name, *EVICTING)


def check_eviction(eviction: object) -> Eviction:
    """The policy to run with, None being the full cache; UsageError for what is no eviction policy."""
    if eviction is None:
        return Full()
    if not all(hasattr(eviction, member) for member in ("needs", "budget", "slots", "prompt_scores", "rank")):
        raise UsageError(f"eviction: {eviction!r} is not an eviction policy; use H2O(...) or another of {POLICIES}")
    return eviction  # type: ignore[return-value]
