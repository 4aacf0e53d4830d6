"""What all policies that drop columns share: the budget of a row, over its prompt's length and the layers.

Eviction policies as text: `h2o`, `h2o-norm:decay=0.95,sinks=0`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

import torch

from flexgen_h2o.core.errors import UsageError
from flexgen_h2o.core.settings import ORIGINAL, ROLLING, EvictionSettings
from flexgen_h2o.core.units import check_int
from flexgen_h2o.kvcache.eviction.policy import EVERYTHING, RANKS, Columns, Needs, RowBudget

DEFAULT_RATIO = 0.1
PYRAMID_BETA = 20  # PyramidKV: the last layer's heavy budget is the mean / beta


@dataclass(frozen=True)
class Evicting(EvictionSettings):
    """A policy that drops columns; its settings are checked when it is made."""

    name: ClassVar[str] = ""

    def _take_int(self, name: str, low: int, high: int | None = None) -> int:
        """A setting as a plain int, which a report can hold."""
        value = check_int(name, getattr(self, name), low, high)
        object.__setattr__(self, name, value)
        return value

    @property
    def needs(self) -> Needs:
        found = self.measures
        return replace(found, record=(*found.record, RANKS)) if self.positions == ROLLING else found

    @property
    def measures(self) -> Needs:
        """What the policy itself needs, wherever positions come from."""
        raise NotImplementedError

    def split(self, heavy: int, recent: int) -> RowBudget:
        """How the policy uses heavy + recent columns."""
        return RowBudget(0, heavy, recent)

    def budget(self, prompt_len: int, block: int, num_blocks: int) -> RowBudget:
        heavy, recent = self._count("heavy", prompt_len), self._count("recent", prompt_len)
        if self.layer_schedule == "pyramid":
            heavy = _pyramid(heavy, prompt_len - recent, block, num_blocks)
        return self.split(heavy, recent)

    def slots(self, prompt_len: int, gen_len: int, block: int, num_blocks: int) -> int:
        columns = self.budget(prompt_len, block, num_blocks).columns
        grown = min(columns, prompt_len) + gen_len - 1
        return max(1, min(columns + 1, grown) if self.while_decoding else grown)

    def prompt_scores(self, sums: torch.Tensor, query_rows: int) -> torch.Tensor:
        return sums

    def rank(self, columns: Columns) -> torch.Tensor:
        assert columns.scores is not None
        return columns.scores

    def to_json(self) -> dict[str, Any]:
        """The settings as they are used: defaults filled in, each share a ratio or a size."""
        shares = {f"{kind}_{what}": value for kind in ("heavy", "recent") for what, value in [self._share(kind)]}
        settings = {k: v for k, v in asdict(self).items() if v is not None and (k, v) != ("positions", ORIGINAL)}
        return {"name": self.name, **settings, **shares}

    def _share(self, kind: str) -> tuple[str, int | float]:
        """("size", columns) or ("ratio", of the prompt)."""
        ratio, size = getattr(self, f"{kind}_ratio"), getattr(self, f"{kind}_size")
        if ratio is None and size is None and kind == "recent":
            ratio, size = self.heavy_ratio, self.heavy_size
        if size is not None:
            return "size", size
        return "ratio", DEFAULT_RATIO if ratio is None else ratio

    def _count(self, kind: str, prompt_len: int) -> int:
        what, value = self._share(kind)
        return min(int(value), EVERYTHING) if what == "size" else max(1, int(value * prompt_len))


def _pyramid(heavy: int, most: int, block: int, num_blocks: int) -> int:
    """The heavy columns of one block: falling in a line, `num_blocks * heavy` in sum, no block above `most`."""
    if num_blocks == 1:
        return heavy
    high = min(2 * heavy - heavy / PYRAMID_BETA, max(heavy, most))
    step = 2 * (high - heavy) / (num_blocks - 1)

    def below(blocks: int) -> int:
        """Heavy columns of the first `blocks`, rounded so that every sum is a whole number."""
        return round(blocks * high - step * blocks * (blocks - 1) / 2)

    return below(block + 1) - below(block)


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
