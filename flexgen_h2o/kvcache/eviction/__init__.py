"""Eviction policies, which decide the KV columns that are kept.

Each policy is one class in its own file, and one entry of `EVICTING`.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import Any

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.settings import SIZES
from flexgen_h2o.kvcache.eviction.full import Full
from flexgen_h2o.kvcache.eviction.h2o import H2O
from flexgen_h2o.kvcache.eviction.h2o_norm import H2ONorm
from flexgen_h2o.kvcache.eviction.local import Local
from flexgen_h2o.kvcache.eviction.policy import Evicting, Eviction
from flexgen_h2o.kvcache.eviction.random_columns import Random
from flexgen_h2o.kvcache.eviction.snapkv import SnapKV
from flexgen_h2o.kvcache.eviction.tova import Tova

__all__ = [
    "EVICTING",
    "H2O",
    "POLICIES",
    "Evicting",
    "Eviction",
    "Full",
    "H2ONorm",
    "Local",
    "Random",
    "SnapKV",
    "Tova",
    "check_eviction",
    "check_name",
    "make_eviction",
    "says_budget",
]


# The policies by their names in flags, reports and files.
EVICTING: dict[str, type[Evicting]] = {
    policy.name: policy for policy in (Local, H2O, H2ONorm, Tova, SnapKV, Random)
}
POLICIES: tuple[str, ...] = (Full.name, *EVICTING)
# Policies that an earlier version had. None kept better columns than h2o (docs/lab/quality.md).
REMOVED = ("h2o-v", "vase", "triattention")


def check_name(text: str, where: str, known: Collection[str] = POLICIES) -> None:
    """Raise UsageError that begins with `where` unless a policy's text has a name of `known`."""
    name = text.partition(":")[0]
    if name in REMOVED:
        raise UsageError(f"{where}: {name} was removed, because it is no better than h2o; use h2o")
    if name not in known:
        raise UsageError(f"{where}: {name or 'nothing'} is not one of {', '.join(known)}")


def make_eviction(text: str, **settings: Any) -> Evicting:
    """Return the policy that a text names, with its settings.

    The text is a name of `EVICTING`. The policy's own settings may follow behind a colon:
    `h2o-norm:grace=8,sinks=0`. Ratios and sizes may only be in `settings`; kv_budget may be in
    either. Raises UsageError, which begins with the name of a setting, or with `eviction` if the
    text is wrong.
    """
    name, colon, rest = text.partition(":")
    check_name(text, "eviction", EVICTING)
    if colon and not rest:
        raise UsageError(f"eviction: no settings behind the colon of {text}")
    known = [
        field.name for field in fields(EVICTING[name]) if field.metadata and field.name not in SIZES
    ]
    own: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        if key not in known:
            raise UsageError(
                f"eviction: {key} is not a setting of {name}; it has {', '.join(known)} (sizes are "
                "flags of their own)"
            )
        if key in own or key in settings:
            raise UsageError(f"eviction: {key} is given twice")
        own[key] = _value(value)
    return EVICTING[name](**settings, **own)


def says_budget(text: str) -> bool:
    """Return whether a policy's text sets kv_budget or kv_bytes.

    Ratios and sizes must not be given in addition.
    """
    given = {item.partition("=")[0] for item in text.partition(":")[2].split(",")}
    return bool(given & {"kv_budget", "kv_bytes"})


def _value(text: str) -> bool | int | float | str:
    """Return a setting's value: a truth value, a number, or else the text.

    The policy checks such a text, which may be a name.
    """
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def check_eviction(eviction: object) -> Eviction:
    """Return the policy to run with. None means the full cache.

    Raise UsageError for anything that is not an eviction policy.
    """
    if eviction is None:
        return Full()
    if isinstance(eviction, type) or not all(
        hasattr(eviction, member)
        for member in ("needs", "budget", "slots", "prompt_scores", "rank")
    ):
        names = ", ".join(policy.__name__ for policy in EVICTING.values())
        raise UsageError(
            f"eviction: {eviction!r} is not an eviction policy; use Full() or one of {names}"
        )
    return eviction  # type: ignore[return-value]
