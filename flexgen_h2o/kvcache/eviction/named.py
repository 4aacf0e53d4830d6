"""Eviction policies as text: `h2o`, `h2o-norm:decay=0.95,sinks=0`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from flexgen_h2o.errors import UsageError
from flexgen_h2o.kvcache.eviction.evicting import Evicting

# How much is kept is said apart from which policy keeps it.
_SIZES = frozenset({"heavy_ratio", "recent_ratio", "heavy_size", "recent_size"})


def named_eviction(policies: Mapping[str, type[Evicting]], text: str, settings: Mapping[str, Any]) -> Evicting:
    """The policy that `text` names, with its own settings behind a colon and the given ones.

    Raises UsageError that begins with the name of a setting, or with `eviction` where the text is wrong.
    """
    name, colon, rest = text.partition(":")
    if name not in policies:
        raise UsageError(f"eviction: {name or 'nothing'} is not one of {', '.join(policies)}")
    if colon and not rest:
        raise UsageError(f"eviction: no settings behind the colon of {text}")
    known = [field.name for field in fields(policies[name]) if field.name not in _SIZES]
    own: dict[str, Any] = {}
    for item in filter(None, rest.split(",")):
        key, _, value = item.partition("=")
        if key not in known:
            raise UsageError(f"eviction: {key} is not a setting of {name}; it has {', '.join(known)}")
        if key in own or key in settings:
            raise UsageError(f"eviction: {key} is given twice")
        own[key] = _value(value)
    return policies[name](**settings, **own)


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
