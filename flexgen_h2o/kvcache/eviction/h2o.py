"""H2O as published: the columns with the most accumulated attention, and the newest columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flexgen_h2o.kvcache.eviction.policy import POSITIONS, SCORES, Evicting, Needs


@dataclass(frozen=True)
class H2O(Evicting):
    """The policy that keeps heavy hitters by accumulated attention, and the newest columns.

    A column's score is the attention probability that it received from all queries that could see
    it, summed over the query heads of its kv-head. A new column starts with 0.

    Paper: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of LLMs",
    Algorithm 1.
    """

    name: ClassVar[str] = "h2o"

    @property
    def measures(self) -> Needs:
        return Needs(record=(POSITIONS, SCORES), query_rows=None)
