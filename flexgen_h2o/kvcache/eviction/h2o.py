"""H2O as published: heavy hitters by accumulated attention, and the newest columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flexgen_h2o.kvcache.eviction.policy import POSITIONS, SCORES, Evicting, Needs


@dataclass(frozen=True)
class H2O(Evicting):
    """Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of LLMs", Algorithm 1.

    A column's score is the attention probability that it received from all queries that could see it, summed over the
    query heads of its kv-head; a new column joins with 0.
    """

    name: ClassVar[str] = "h2o"

    @property
    def measures(self) -> Needs:
        return Needs(record=(POSITIONS, SCORES), query_rows=None)
