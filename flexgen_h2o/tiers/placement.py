"""Shares into whole rows: which part of a tensor or unit lives on which tier."""

from __future__ import annotations

from dataclasses import dataclass

from flexgen_h2o.core.config import TIERS

Shares = tuple[float, float, float]


@dataclass(frozen=True)
class Part:
    """Rows [start, end) have their home on `tier`."""

    tier: str
    start: int
    end: int

    @property
    def rows(self) -> int:
        return self.end - self.start


def split_rows(count: int, shares: Shares, multiple: int = 1) -> tuple[Part, ...]:
    """Cut `count` rows into at most three parts, device first, each share honoured to within `multiple` rows.

    A share of 0 gets no rows and the shares' sum is always all rows.
    """
    cuts, total = [0], 0.0
    for i, share in enumerate(shares):
        total += share
        if not any(s > 0 for s in shares[i + 1 :]):
            cuts.append(count)
        elif share == 0:
            cuts.append(cuts[-1])
        else:
            cuts.append(max(cuts[-1], min(count, round(count * total / multiple) * multiple)))
    return tuple(Part(tier, a, b) for tier, a, b in zip(TIERS, cuts[:-1], cuts[1:], strict=True) if b > a)


def on_host_device(shares: Shares) -> Shares:
    """The shares when the device is host memory: both are one tier."""
    return (0.0, shares[0] + shares[1], shares[2])


def is_streamed(tier: str, device_is_host: bool) -> bool:
    """Must bytes with this home be brought to the device before a layer can use them?"""
    return tier == "disk" or (tier == "host" and not device_is_host)
