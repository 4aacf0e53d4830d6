"""Percentile bootstrap intervals over prompts (Efron and Tibshirani 1993, chapter 13).

A prompt with all its steps or questions is drawn as a whole, since what belongs to one prompt is not independent. Equal
seeds draw equal prompts, so differences between policies are paired.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
LEVEL = 0.95


@dataclass(frozen=True)
class Interval:
    """An estimate from `n` prompts with the ends of its 95% interval."""

    value: float
    low: float
    high: float
    n: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Bootstrap:
    """`count` resamples of `n` prompts."""

    def __init__(self, n: int, count: int, seed: int) -> None:
        self._drawn = np.random.default_rng(seed).integers(0, n, size=(count, n))

    def mean(self, values: Array) -> Interval:
        """Of one value a prompt, (n,)."""
        return self._interval(float(values.mean()), values[self._drawn].mean(axis=1))

    def percentile(self, values: Array, percent: float) -> Interval:
        """Of all values (n, steps) together."""
        found = [np.percentile(values[rows], percent) for rows in self._drawn]
        return self._interval(float(np.percentile(values, percent)), np.array(found))

    def ratio(self, above: Array, below: Array) -> Interval:
        """Of two sums over prompts, (n,) each; a resample whose lower sum is 0 does not count."""
        drawn = below[self._drawn].sum(axis=1)
        found = above[self._drawn].sum(axis=1)[drawn > 0] / drawn[drawn > 0]
        return self._interval(float(above.sum() / below.sum()), found)

    def _interval(self, value: float, resampled: Array) -> Interval:
        low, high = np.percentile(resampled, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
        return Interval(value, float(low), float(high), self._drawn.shape[1])
