"""Which KV columns are kept. One file a policy; `POLICIES` names them."""

from __future__ import annotations

from typing import Any

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.kvcache.eviction.evicting import Evicting, named_eviction
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
    "ValueH2O", "check_eviction", "make_eviction",
]  # fmt: skip

EVICTING: dict[str, type[Evicting]] = {
    policy.name: policy for policy in (Local, H2O, H2ONorm, Tova, SnapKV, ValueH2O, Random)
}
POLICIES: tuple[str, ...] = (Full.name, *EVICTING)


def make_eviction(text: str, **settings: Any) -> Evicting:
    """A policy of `EVICTING` from its name, with its own settings behind a colon: `h2o-norm:decay=0.95`.

    Raises UsageError that begins with the name of a setting, or with `eviction` where the text is wrong.
    """
    return named_eviction(EVICTING, text, settings)


def check_eviction(eviction: object) -> Eviction:
    """The policy to run with, None being the full cache; UsageError for what is no eviction policy."""
    if eviction is None:
        return Full()
    if isinstance(eviction, type) or not all(
        hasattr(eviction, member) for member in ("needs", "budget", "slots", "prompt_scores", "rank")
    ):
        names = ", ".join(policy.__name__ for policy in EVICTING.values())
        raise UsageError(f"eviction: {eviction!r} is not an eviction policy; use Full() or one of {names}")
    return eviction  # type: ignore[return-value]
